"""Ollama's routes, asked as its clients ask: shapes of its documentation, streams of lines, and what is refused."""

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from gerund.inference.generate.sequence import SequenceState
from gerund.settings.sampling import Sampling
from tests.server.conftest import Running, lines
from tests.server.test_tools import RESULT, TOOLS, scripted  # noqa: F401 - a fixture

HELLO: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]
GREEDY = {"temperature": 0, "num_predict": 6}


def test_a_chat_is_the_librarys(live: Running, served_lm: Any) -> None:
    found = live.ok("/api/chat", model="tiny", messages=HELLO, stream=False, options=GREEDY, keep_alive="5m")
    [expected] = served_lm.chat(HELLO, 6)
    assert found["message"] == {"role": "assistant", "content": expected.text}
    assert (found["model"], found["done"], found["done_reason"]) == ("tiny", True, expected.finish_reason)
    assert (found["prompt_eval_count"], found["eval_count"]) == (expected.usage.prompt_tokens, 6)
    *pieces, last = lines(live, "/api/chat", model="tiny:latest", messages=HELLO, options=GREEDY)
    assert "".join(piece["message"]["content"] for piece in pieces) == expected.text
    assert not any(piece["done"] for piece in pieces)
    assert last["message"]["content"] == ""
    assert (last["done"], last["eval_count"], last["model"]) == (True, 6, "tiny:latest")


def test_durations_are_those_of_the_engine(live: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(sequence: SequenceState, *token: Any) -> None:
        time.sleep(0.02)
        put(sequence, *token)

    put = SequenceState.put
    monkeypatch.setattr(SequenceState, "put", slow)
    options, ns = {"temperature": 0, "num_predict": 6}, 20_000_000
    for route, body in (
        ("/api/chat", {"messages": HELLO}),
        ("/api/generate", {"prompt": "Hello"}),
        ("/api/generate", {"prompt": "Hello", "raw": True}),
    ):
        whole = live.ok(route, **body, stream=False, options=options)
        for answer in (whole, lines(live, route, **body, options=options)[-1]):
            assert answer["eval_count"] == 6
            assert answer["prompt_eval_count"] == whole["prompt_eval_count"] > 0
            # The first token ends the reading of the prompt; five follow.
            assert answer["eval_duration"] >= 5 * ns, route
            assert answer["prompt_eval_duration"] >= ns, route
            assert answer["total_duration"] >= answer["prompt_eval_duration"] + answer["eval_duration"]
            assert answer["load_duration"] == 0
    filled = live.ok("/api/generate", prompt="the ", suffix=" end", stream=False, options=options)
    assert filled["total_duration"] > 0
    assert "eval_duration" not in filled, "its prompt is read several times"


def test_options_are_those_of_ollama(live: Running, served_lm: Any) -> None:
    alike = {"seed": 3, "temperature": 0.9, "top_k": 20, "top_p": 0.8, "min_p": 0.01}
    penalties = {"presence_penalty": 0.5, "frequency_penalty": 0.25}
    options = {**alike, **penalties, "num_predict": 8, "repeat_penalty": 1.1, "num_ctx": 4096, "mirostat": 0}
    found = live.ok("/api/chat", messages=HELLO, stream=False, options=options)
    how = Sampling(**alike, **penalties, repetition_penalty=1.1)
    assert found["message"]["content"] == served_lm.chat(HELLO, 8, how)[0].text
    found = live.ok("/api/chat", messages=HELLO, stream=False, options={"num_predict": 8, "seed": 3})
    usual = Sampling(temperature=0.8, top_k=40, top_p=0.9, seed=3)
    assert found["message"]["content"] == served_lm.chat(HELLO, 8, usual)[0].text


def test_generate(live: Running, served_lm: Any) -> None:
    body = {"model": "tiny", "prompt": "Hello", "stream": False, "options": GREEDY}
    assert live.ok("/api/generate", **body)["response"] == served_lm.chat(HELLO, 6)[0].text
    told = [{"role": "system", "content": "Be brief."}, *HELLO]
    assert live.ok("/api/generate", **body, system="Be brief.")["response"] == served_lm.chat(told, 6)[0].text
    raw = served_lm.generate("Hello", 6)[0].text
    assert live.ok("/api/generate", **body, raw=True)["response"] == raw
    pieces = lines(live, "/api/generate", **{**body, "stream": True}, raw=True)
    assert "".join(piece["response"] for piece in pieces) == raw
    filled = live.ok("/api/generate", **{**body, "prompt": "the "}, suffix=" end")
    assert filled["response"] == served_lm.infill("the [blank] end", max_tokens=6).spans[0].removeprefix(" ")
    loaded = live.ok("/api/generate", model="tiny")
    assert (loaded["done"], loaded["done_reason"], loaded["response"]) == (True, "load", "")
    assert live.ok("/api/chat", model="tiny", messages=[])["done_reason"] == "load"


def test_formats(live: Running) -> None:
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"yes": {"type": "boolean"}}, "required": ["yes"]}
    more = {"stream": False, "options": {"temperature": 0, "num_predict": 60}}
    assert "yes" in json.loads(live.ok("/api/chat", messages=HELLO, format=schema, **more)["message"]["content"])
    assert live.ok("/api/generate", prompt="a", format="json", **more)["response"].startswith("{")


def test_tools(with_tools: Running, scripted: Any) -> None:  # noqa: F811
    pytest.importorskip("llguidance")
    scripted('<tool_call>{"name": "weather", "arguments": {"city": "Bonn"}}</tool_call>')
    call = {"function": {"name": "weather", "arguments": {"city": "Bonn"}}}
    talk = [*HELLO, {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_name": "weather", "content": "rain"}]  # fmt: skip
    body = {"messages": talk, "tools": TOOLS, "options": {"temperature": 0}}
    found = with_tools.ok("/api/chat", **body, stream=False)
    assert found["message"] == {"role": "assistant", "content": "", "tool_calls": [call]}
    calls, last = lines(with_tools, "/api/chat", **body)
    assert calls["message"]["tool_calls"] == [call]
    assert (last["done"], last["done_reason"]) == (True, "stop")


def test_arguments_that_are_no_json_are_text(with_tools: Running, scripted: Any) -> None:  # noqa: F811
    pytest.importorskip("llguidance")
    scripted('<tool_call>{"name": "now", "arguments": {"a": }}</tool_call>')
    body = {"messages": HELLO, "tools": TOOLS, "options": {"temperature": 0}}
    message = with_tools.ok("/api/chat", **body, stream=False)["message"]
    assert message == {"role": "assistant", "content": '{"name": "now", "arguments": {"a": }'}
    assert "".join(one["message"]["content"] for one in lines(with_tools, "/api/chat", **body)) == message["content"]


def test_embeddings(live: Running, served_lm: Any) -> None:
    texts = ["a cat", "the dogs run"]
    found = live.ok("/api/embed", model="tiny", input=texts)
    assert np.allclose(found["embeddings"], served_lm.encode(texts), atol=1e-5)
    assert found["prompt_eval_count"] == sum(served_lm.encode_with_usage(texts).token_counts)
    assert len(live.ok("/api/embed", input="a cat", dimensions=8)["embeddings"][0]) == 8
    assert live.ok("/api/embed", input=[])["embeddings"] == []
    assert np.allclose(live.ok("/api/embeddings", prompt="a cat")["embedding"], served_lm.encode("a cat"), atol=1e-5)
    assert live.ok("/api/embed", input="the " * 600)["embeddings"]
    assert live.post("/api/embed", input="the " * 600, truncate=False).status_code == 400


def test_descriptions(live: Running, with_tools: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    [entry] = live.client.get("/api/tags").json()["models"]
    assert (entry["name"], entry["details"]["family"]) == ("tiny", "llama")
    shown = live.ok("/api/show", model="tiny")
    assert shown["model_info"]["llama.context_length"] == 512
    assert shown["template"] == live.lm.tokenizer.chat_template
    assert shown["capabilities"] == ["completion", "embedding"], "it was not trained to infill"
    monkeypatch.setattr(live.lm, "fills_gaps", True)
    assert live.ok("/api/show", model="tiny")["capabilities"] == ["completion", "embedding", "insert"]
    assert "tools" in with_tools.ok("/api/show", name="tiny:latest")["capabilities"]
    assert live.client.get("/api/version").json()["version"].count(".") == 2


REFUSED = [
    ("/api/chat", {"messages": HELLO, "model": "llama3.2"}, 404, "'llama3.2' does not exist"),
    ("/api/chat", {"messages": HELLO, "options": {"temprature": 1}}, 400, "did you mean 'temperature'"),
    ("/api/chat", {"messages": HELLO, "options": {"mirostat": 2}}, 400, "mirostat is supported with its usual value"),
    ("/api/chat", {"messages": HELLO, "options": {"wings": 2}}, 400, "wings is not supported here"),
    ("/api/chat", {"messages": HELLO, "think": True}, 400, "think is not supported"),
    ("/api/chat", {"messages": HELLO, "tools": TOOLS}, 400, "knows no tools"),
    ("/api/chat", {"messages": HELLO, "tools": [{"type": "function", "function": {}}]}, 400, "function.name"),
    ("/api/chat", {"messages": [{"content": "a"}]}, 400, "messages.0.role"),
    ("/api/chat", {"messages": HELLO, "format": "xml"}, 400, "format"),
    ("/api/generate", {"prompt": "a", "context": [1, 2]}, 400, "context is supported with its usual value"),
    ("/api/generate", {"prompt": "a", "suffix": "b", "system": "c"}, 400, "system needs a chat template"),
    ("/api/generate", {"prompt": "a " * 600}, 400, "maximum context length is 512"),
    ("/api/embed", {}, 400, "input"), ("/api/embed", {"input": [5]}, 400, "input"),
    ("/api/embeddings", {"prompt": ""}, 400, "prompt"), ("/api/show", {"model": "x"}, 404, "does not exist"),
    ("/api/pull", {"model": "x"}, 404, "there is no route"),
]  # fmt: skip


@pytest.mark.parametrize(("route", "body", "status", "words"), REFUSED)
def test_mistakes(live: Running, route: str, body: dict[str, Any], status: int, words: str) -> None:
    found = live.post(route, **body)
    assert (found.status_code, words in found.json()["error"]) == (status, True), found.text


def test_errors_before_the_routes_have_the_same_form(live: Running) -> None:
    found = live.client.post("/api/chat", content=b"{", headers={"Content-Type": "application/json"})
    assert (found.status_code, found.json()) == (400, {"error": "the body is not valid JSON"})
    plain = httpx.post(f"{live.url}/api/chat", content=b"{}", headers={"Content-Type": "text/plain"})
    assert (plain.status_code, "application/json" in plain.json()["error"]) == (415, True)


@pytest.fixture(scope="module")
def ollama(with_tools: Running) -> Iterator[Any]:
    module = pytest.importorskip("ollama", reason="the ollama client is not installed")
    with module.Client(host=with_tools.url) as client:
        yield client


def test_the_client_of_ollama(ollama: Any, with_tools: Running) -> None:
    module = pytest.importorskip("ollama")
    whole = ollama.chat(model="tiny", messages=HELLO, options=GREEDY)
    assert (whole.message.role, whole.done_reason, whole.eval_count) == ("assistant", "length", 6)
    pieces = list(ollama.chat(model="tiny:latest", messages=HELLO, options=GREEDY, stream=True))
    assert "".join(piece.message.content for piece in pieces) == whole.message.content
    assert ollama.generate(model="tiny", prompt="Hello", options=GREEDY).response == whole.message.content
    formed = ollama.chat(model="tiny", messages=HELLO, options={"temperature": 0}, format={"enum": ["yes", "no"]})
    assert json.loads(formed.message.content) in ("yes", "no")
    found = ollama.embed(model="tiny", input=["a cat", "the dogs run"]).embeddings
    assert np.allclose(found, with_tools.lm.encode(["a cat", "the dogs run"]), atol=1e-5)
    assert [ollama.list().models[0].model, ollama.ps().models[0].model] == ["tiny", "tiny"]
    assert ollama.show("tiny").modelinfo["llama.context_length"] == 8192
    with pytest.raises(module.ResponseError, match="does not exist") as refused:
        ollama.chat(model="other", messages=HELLO)
    assert refused.value.status_code == 404
