"""Chats that the served index answers, on every chat route, whole and streamed, with the clients' own libraries."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lancedb", reason="needs gerund[index]")

from gerund.entry import load
from gerund.inference.generate.constraints import Constraint
from gerund.retrieval import question_answering
from gerund.retrieval.question_answering import NOTHING, PendingAnswer
from gerund.server.config import ServerConfig
from tests.server.conftest import Running, events, index_of, lines, save_served

NAME = "tiny+index"
DOCUMENTS = {
    "bread": "Bread is made of flour, water and salt.",
    "rail": "The railway of Stockton opened in 1825. It was built by George Stephenson.",
    "sea": "The sea is wide.",
}
BREAD: list[dict[str, Any]] = [{"role": "user", "content": "What is bread made of?"}]
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def indexed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server with an index, whose model has room for an answer's instructions."""
    folder = tmp_path_factory.mktemp("chats")
    lm = load(save_served(folder / "tiny", context=2048))
    settings = ServerConfig(max_new_tokens=100, index=index_of(folder / "my.index", lm, DOCUMENTS))
    with Running(lm, settings, []) as running:
        yield running


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let the tiny model write a given answer, as a model that is large enough to answer would."""
    settings, script = PendingAnswer.settings.fget, []  # type: ignore[attr-defined]

    def scripted(self: PendingAnswer) -> Any:
        return replace(settings(self), constraint=Constraint("choice", json.dumps(script)))

    monkeypatch.setattr(PendingAnswer, "settings", property(scripted))
    monkeypatch.setattr(question_answering, "ANSWERS_FROM", 0)
    return script.append


@pytest.fixture(scope="module")
def openai(indexed: Running) -> Iterator[Any]:
    module = pytest.importorskip("openai", reason="needs gerund[clients]")
    with module.OpenAI(base_url=f"{indexed.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def message_of(running: Running, **body: Any) -> dict[str, Any]:
    [choice] = running.ok(CHAT, model=NAME, **body)["choices"]
    message: dict[str, Any] = choice["message"]
    return message


def test_the_second_name_is_listed(indexed: Running, live: Running) -> None:
    assert [card["id"] for card in indexed.client.get("/v1/models").json()["data"]] == ["tiny", NAME]
    assert indexed.client.get(f"/v1/models/{NAME}").json()["id"] == NAME
    assert [entry["name"] for entry in indexed.client.get("/api/tags").json()["models"]] == ["tiny", NAME]
    assert indexed.ok("/api/show", model=f"{NAME}:latest")["details"]
    assert "'tiny' and 'tiny+index'" in indexed.post(CHAT, model="other", messages=BREAD).json()["error"]["message"]
    # It is for chats alone, and for servers that have an index.
    refused = indexed.post("/v1/embeddings", model=NAME, input="a")
    assert (refused.status_code, "answers chats" in refused.json()["error"]["message"]) == (404, True)
    assert indexed.post("/api/embed", model=NAME, input="a").status_code == 404
    assert live.post(CHAT, model=NAME, messages=BREAD).status_code == 404


def test_openai(openai: Any) -> None:
    found = openai.chat.completions.create(model=NAME, messages=BREAD)
    message = found.choices[0].message
    assert found.model == NAME
    assert message.content == f"{DOCUMENTS['bread']} [1]\n\n[1] bread:0-39"
    assert (message.method, message.found, message.sources[0]["source"]) == ("extractive", True, "bread")
    chunks = list(openai.chat.completions.create(model=NAME, messages=BREAD, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == message.content
    assert (chunks[-1].choices[0].finish_reason, chunks[-1].choices[0].delta.sources) == ("stop", message.sources)
    # Without the second name, the model itself answers.
    assert openai.chat.completions.create(model="tiny", messages=BREAD).choices[0].message.content != message.content


def test_openai_responses(openai: Any) -> None:
    found = openai.responses.create(model=NAME, input="What is bread made of?")
    [part] = found.output[0].content
    assert found.output_text == f"{DOCUMENTS['bread']} [1]\n\n[1] bread:0-39"
    [note] = part.annotations
    assert (note.type, note.file_id, found.output_text[note.index :][:3]) == ("file_citation", "bread", "[1]")
    events = list(openai.responses.create(model=NAME, input="What is bread made of?", stream=True))
    assert "".join(event.delta for event in events if event.type.endswith("text.delta")) == found.output_text
    assert events[-1].response.output[0].content[0].annotations == part.annotations
    assert sum(event.type == "response.output_text.annotation.added" for event in events) == 1


def test_ollama(indexed: Running) -> None:
    whole = indexed.ok("/api/chat", model=NAME, messages=BREAD, stream=False)
    assert whole["message"]["content"].startswith(DOCUMENTS["bread"])
    assert whole["message"]["sources"][0]["source"] == "bread"
    assert "eval_duration" not in whole, "a quotation is not generated"
    streamed = [line["message"] for line in lines(indexed, "/api/chat", model=f"{NAME}:latest", messages=BREAD)]
    assert "".join(message["content"] for message in streamed) == whole["message"]["content"]
    assert streamed[-1]["sources"] == whole["message"]["sources"]
    single = indexed.ok("/api/generate", model=NAME, prompt=BREAD[0]["content"], stream=False)
    assert (single["response"], single["found"]) == (whole["message"]["content"], True)
    assert indexed.post("/api/generate", model=NAME, prompt="a", raw=True).status_code == 400


def test_durations_by_ollamas_names(indexed: Running, written: Any) -> None:
    pytest.importorskip("llguidance")
    written("Flour. [1]")
    body = {"model": NAME, "messages": BREAD}
    for answer in (lines(indexed, "/api/chat", **body)[-1], indexed.ok("/api/chat", **body, stream=False)):
        times = [answer[name] for name in ("prompt_eval_duration", "eval_duration", "total_duration")]
        assert times[0] > 0
        assert times[1] > 0
        assert times[0] + times[1] <= times[2]


def test_a_question_refers_to_the_conversation(indexed: Running) -> None:
    first = {"role": "user", "content": "When did the railway of Stockton open?"}
    answer = message_of(indexed, messages=[first])
    assert answer["content"].startswith("The railway of Stockton opened in 1825.")
    # Alone, the second question finds nothing.
    second = {"role": "user", "content": "Who created this?"}
    assert message_of(indexed, messages=[second])["content"] == NOTHING
    assert not message_of(indexed, messages=[second])["found"]
    talk = [{"role": "assistant", "content": "Ask me!"}, first, {"role": "assistant", "content": answer["content"]}]
    assert message_of(indexed, messages=[*talk, second])["sources"][0]["source"] == "rail"
    # What found nothing is no part of the conversation.
    lost = [{"role": "user", "content": "Zebra zinc?"}, {"role": "assistant", "content": NOTHING}]
    assert message_of(indexed, messages=[*talk, *lost, second])["sources"][0]["source"] == "rail"


def test_a_written_answer(indexed: Running, written: Any) -> None:
    pytest.importorskip("llguidance")
    text = "It is made of flour, water and salt [1] [9]. Otters like chocolate."
    written(text)
    message = message_of(indexed, messages=BREAD, temperature=0.5, seed=1)
    assert message["content"] == f"{text.replace(' [9]', '')}\n\n[1] bread:0-39"
    assert message["method"] == "generate"
    assert [check["support"] for check in message["checks"]] == ["supported", "unsupported"]
    deltas = [event["choices"][0]["delta"] for event in events(indexed, CHAT, model=NAME, messages=BREAD)]
    assert "".join(delta.get("content", "") for delta in deltas) == message["content"]
    assert sum(bool(delta.get("content")) for delta in deltas) > 2
    assert deltas[-1]["sources"] == message["sources"]
    assert indexed.idle()


def test_an_unsupported_answer_is_replaced(indexed: Running, written: Any) -> None:
    pytest.importorskip("llguidance")
    written("Otters like chocolate.")
    for stream in (False, True):
        found = indexed.post(CHAT, model=NAME, messages=BREAD, stream=stream)
        assert "Otters like" not in found.text.partition('"checks"')[0]
        assert DOCUMENTS["bread"] in found.text
        assert "extractive" in found.text


def test_a_system_message_adds_to_the_instructions(indexed: Running, written: Any) -> None:
    written("Flour.")
    tokens = []
    for system in ([], [{"role": "system", "content": "Answer in rhymes."}]):
        answered = indexed.post(CHAT, model=NAME, messages=[*system, *BREAD])
        assert answered.status_code == 200, answered.text
        assert answered.json()["choices"][0]["message"]["sources"][0]["source"] == "bread"
        tokens.append(answered.json()["usage"]["prompt_tokens"])
    assert tokens[0] < tokens[1] < tokens[0] + 40


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": BREAD, "tools": [{"type": "function", "function": {"name": "a"}}]}, "tools"),
    ({"messages": BREAD, "n": 2, "temperature": 1}, "n"),
    ({"messages": BREAD, "response_format": {"type": "json_object"}}, "response_format"),
    ({"messages": BREAD, "logprobs": True}, "logprobs"),
    ({"messages": [{"role": "tool", "content": "Flour.", "tool_call_id": "1"}, *BREAD]}, "messages.0"),
    ({"messages": [*BREAD, {"role": "assistant", "content": "Flour."}]}, "messages"),
    ({"messages": [{"role": "user", "content": " "}]}, "messages"),
    ({"messages": [{"role": "user", "content": "bread " * 3000}]}, "messages"),
]


@pytest.mark.filterwarnings("ignore")  # a long question is truncated for the search, which is a warning
@pytest.mark.parametrize(("body", "param"), REFUSED)
def test_mistakes(indexed: Running, body: dict[str, Any], param: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(question_answering, "ANSWERS_FROM", 0)
    for stream in (False, True):
        found = indexed.post(CHAT, model=NAME, stream=stream, **body)
        assert (found.status_code, found.json()["error"]["param"]) == (400, param), found.text


def test_a_model_without_a_chat_template_quotes(tmp_path: Path) -> None:
    lm = load(save_served(tmp_path / "tiny", template=None))
    with Running(lm, ServerConfig(index=index_of(tmp_path / "my.index", lm)), []) as running:
        assert message_of(running, messages=BREAD)["content"].startswith(DOCUMENTS["bread"])
        found = running.post(CHAT, messages=BREAD)
        assert (found.status_code, found.json()["error"]["code"]) == (400, "not_with_this_model")
        assert "no chat template" in found.json()["error"]["message"]
        assert running.ok("/v1/completions", prompt="a", max_tokens=2)["choices"]


def _parts(kind: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": kind, "image_url": {"url": "data:"}}]}]


@pytest.mark.parametrize("model", ["tiny", NAME])
@pytest.mark.parametrize(
    ("route", "body", "word"),
    [
        (CHAT, {"messages": _parts("image_url")}, "image_url"),
        ("/v1/responses", {"input": _parts("input_audio")}, "input_audio"),
        ("/api/chat", {"messages": [{"role": "user", "content": "a", "images": ["aGk="]}]}, "images"),
        ("/api/generate", {"prompt": "a", "images": ["aGk="]}, "images"),
    ],
)
def test_images_and_audio_are_refused_by_name(
    indexed: Running, model: str, route: str, body: dict[str, Any], word: str
) -> None:
    found = indexed.post(route, model=model, **body)
    assert (found.status_code, word in found.text) == (400, True), found.text
