"""Fields of other servers: built, accepted without effect, or refused by name; nothing is left out in silence."""

import base64
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from starlette.testclient import TestClient

from gerund.entry import load
from gerund.server.app import make_app
from gerund.server.config import ServerConfig
from gerund.server.schemas import base as without_effect
from gerund.server.schemas.base import Body, worst
from gerund.server.schemas.embeddings import (
    AttentionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
    SearchRequest,
    TeiRerankRequest,
    TokenizeRequest,
)
from gerund.server.schemas.generation import ChatRequest, CompletionRequest, InfillRequest
from gerund.settings.sampling import Sampling
from tests.server.conftest import Running
from tests.server.test_routes import events

CHAT, COMPLETE, EMBED = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
HELLO: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]
GREEDY: dict[str, Any] = {"max_tokens": 6, "temperature": 0}

# Every route with a body, and a request that it answers.
ROUTES: list[tuple[str, type[Body], dict[str, Any]]] = [
    (CHAT, ChatRequest, {"messages": HELLO, **GREEDY}),
    (COMPLETE, CompletionRequest, {"prompt": "the", **GREEDY}),
    ("/infill", InfillRequest, {"text": "a [blank] b", "lengths": 1}),
    (EMBED, EmbeddingRequest, {"input": "the ant"}),
    ("/v1/rerank", RerankRequest, {"query": "ant", "documents": ["the ant", "sun"]}),
    ("/v2/rerank", RerankRequest, {"query": "ant", "documents": ["the ant", "sun"]}),
    ("/rerank", TeiRerankRequest, {"query": "ant", "texts": ["the ant", "sun"]}),
    ("/v1/score", ScoreRequest, {"text_1": "ant", "text_2": "the ant"}),
    ("/tokenize", TokenizeRequest, {"prompt": "the ant"}),
    ("/detokenize", DetokenizeRequest, {"tokens": [70]}),
    ("/v1/search", SearchRequest, {"query": "ant"}),
    ("/v1/attention", AttentionRequest, {"text": "the ant"}),
]
# What servers and clients of this kind know and gerund does not do, with values that would change the answer.
ELSEWHERE: dict[str, Any] = {
    "prompt_logprobs": 1,
    "use_beam_search": True,
    "length_penalty": 2.0,
    "early_stopping": True,
    "logits_processors": ["x"],
    "return_token_ids": True,
    "add_generation_prompts": True,
    "chat_template": "{{ 1 }}",
    "documents_": [{"text": "x"}],
    "repetition_detection": {"max_pattern_size": 3},
    "thinking_token_budget": 9,
    "reasoning_effort": "high",
    "enable_thinking": False,
    "verbosity": "low",
    "mirostat": 2,
    "dynatemp_range": 0.5,
    "xtc_probability": 0.1,
    "dry_multiplier": 0.8,
    "repeat_penalty": 1.1,
    "samplers": ["top_k"],
    "n_probs": 5,
    "n_keep": 8,
    "top_a": 0.5,
    "tfs_z": 0.9,
    "no_repeat_ngram_size": 3,
    "do_sample": False,
    "num_beams": 4,
    "max_length": 20,
    "typical": 0.2,
    "options": {"num_ctx": 5},
    "instruction": "Rank.",
    "overlap_tokens": 80,
    "output_dtype": "int8",
    "late_chunking": True,
    "softmax": True,
    "embedding_types": ["int8"],
    "output_dimension": 8,
    "rank_fields": ["title"],
    "format": "json",
    "images": ["x"],
    "num_predict": 3,
    "raw": True,
    "system": "Be brief.",
    "context": [1, 2],
    "extra_body": {"top_k": 1},
    "\ud800": 1,
    "": 1,
}
# Objects in bodies, and a field that they do not have.
NESTED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"messages": [{**HELLO[0], "prefix": True}]}, "messages.0.prefix"),
    (CHAT, {"messages": [*HELLO, {"role": "assistant", "content": "a", "reasoning_content": "Hm."}]},
     "messages.1.reasoning_content"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "lang": "en"}]}]},
     "messages.0.content.0.lang"),
    (CHAT, {"messages": HELLO, "response_format": {"type": "json_object", "regex": "a"}}, "response_format.regex"),
    (CHAT, {"messages": HELLO, "response_format": {"type": "json_schema", "json_schema": {"schema": {}, "x": 1}}},
     "response_format.json_schema.x"),
    (CHAT, {"messages": HELLO, "stream_options": {"continuous_usage_stats": True}},
     "stream_options.continuous_usage_stats"),
    (CHAT, {"messages": HELLO, "structured_outputs": {"whitespace_pattern": " "}},
     "structured_outputs.whitespace_pattern"),
    (CHAT, {"messages": HELLO, "tools": [{"type": "function", "x": 1}]}, "tools"),
    (COMPLETE, {"prompt": "a", "stream_options": {"x": 1}}, "stream_options.x"),
    ("/tokenize", {"messages": [{**HELLO[0], "weight": 1}]}, "messages.0.weight"),
]  # fmt: skip


@pytest.fixture(scope="module")
def client(live: Running) -> Iterator[TestClient]:
    """The application without a socket, for requests that never reach the model."""
    with TestClient(make_app(live.service), base_url="http://127.0.0.1") as found:
        yield found


def refusal(client: TestClient, route: str, body: Any) -> dict[str, Any]:
    found = client.post(route, content=json.dumps(body), headers={"Content-Type": "application/json"})
    assert found.status_code == 400, (route, body, found.text)
    error: dict[str, Any] = found.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def test_hundreds_of_unknown_fields_are_each_refused_by_name() -> None:
    count = 0
    for route, form, body in ROUTES:
        known = {one.alias or name for name, one in form.model_fields.items()}
        for name, value in ELSEWHERE.items():
            if name in known or without_effect.is_accepted(form.without_effect or {}, name, value):
                continue
            changed = {**body, name: value}
            with pytest.raises(ValidationError) as caught:
                form.model_validate(changed)
            errors: list[Any] = [{**one, "loc": ("body", *one["loc"])} for one in caught.value.errors()]
            place, message, code = worst(errors, changed)
            shown = name.encode("utf-8", "backslashreplace").decode() or "''"
            assert (place, shown in message, code) == (shown, True, "not_supported"), (route, name)
            count += 1
    assert count > 400


@pytest.mark.parametrize(("route", "body"), [(route, body) for route, _, body in ROUTES])
def test_every_route_refuses_unknown_fields(client: TestClient, route: str, body: dict[str, Any]) -> None:
    for name, shown in (("no_repeat_ngram_size", "no_repeat_ngram_size"), ("\ud800", "\\ud800"), ("", "''")):
        error = refusal(client, route, {**body, name: 3})
        assert (error["param"], error["code"]) == (shown, "not_supported")


@pytest.mark.parametrize(("route", "body", "param"), NESTED)
def test_unknown_fields_in_objects_are_refused_by_name(
    client: TestClient, route: str, body: dict[str, Any], param: str
) -> None:
    error = refusal(client, route, body)
    assert (error["param"], error["code"]) == (param, "not_supported")


def test_a_field_that_is_refused_comes_with_a_hint(client: TestClient) -> None:
    def said(**field: Any) -> str:
        return str(refusal(client, COMPLETE, {"prompt": "a", **field})["message"])

    assert said(prompt_logprobs=1) == "prompt_logprobs is not supported here; leave it out"
    assert said(mirostat=2) == "mirostat is supported with its usual value alone; leave it out"
    assert said(max_token=2) == "there is no field 'max_token'; did you mean 'max_tokens'?"
    assert len(said(**{"x" * 10_000: 1})) < 120


@pytest.mark.parametrize(("route", "form", "body"), [one for one in ROUTES if one[0] != "/v1/search"])
def test_what_changes_no_answer_is_accepted(live: Running, route: str, form: type[Body], body: Any) -> None:
    accepted = {**without_effect.EVERYWHERE, **(form.without_effect or {})}
    more = {name: {"a": [1]} if values is without_effect.ANY else values[0] for name, values in accepted.items()}
    nulls = {name: None for name in (*ELSEWHERE, *form.model_fields) if name not in ("\ud800", "schema_")}
    plain, found = live.ok(route, **body), live.ok(route, **{**nulls, **more, **body})
    for answer in (plain, found):
        if isinstance(answer, dict):
            for name in ("id", "created"):
                answer.pop(name, None)
    assert found == plain


def test_what_answers_say_of_a_message_is_taken_back(live: Running) -> None:
    message = {
        "role": "assistant",
        "content": "Hi",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "id": "msg_1",
        "function_call": None,
        "tool_calls": None,
        "reasoning_content": "",
        "provider_specific_fields": {},
    }
    plain = {"role": "assistant", "content": "Hi"}
    part = {"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}}
    turns = [{"role": "user", "content": [part]}, message, *HELLO]
    found = live.ok(CHAT, messages=turns, **GREEDY)
    assert found["choices"] == live.ok(CHAT, messages=[*HELLO, plain, *HELLO], **GREEDY)["choices"]


# ------------------------------------------------------------------------------------------------------ what is built


@pytest.mark.parametrize(
    "limits",
    [
        {"allowed_token_ids": [70, 71, 80]},
        {"bad_words": ["o", "th"]},
        {"min_tokens": 5},
        {"stop_token_ids": [120, 90, 75], "min_tokens": 1},
        {"ignore_eos": True},
        {"stop": ["o"], "include_stop_str_in_output": True},
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_limits_are_those_of_the_library(live: Running, served_lm: Any, limits: dict[str, Any], stream: bool) -> None:
    sampling = Sampling(temperature=1, seed=4, logit_bias={2: 3})
    expected = served_lm.generate("the ant", 8, sampling, n=3, **limits)
    body: dict[str, Any] = {"prompt": "the ant", "max_tokens": 8, "seed": 4, "n": 3, "logit_bias": {"2": 3}, **limits}
    assert [one.text for one in expected] != [one.text for one in served_lm.generate("the ant", 8, sampling, n=3)]
    texts, reasons = [""] * 3, [None] * 3
    for chunk in events(live, COMPLETE, **body) if stream else [live.ok(COMPLETE, **body)]:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
            reasons[choice["index"]] = choice.get("stop_reason") or reasons[choice["index"]]
    assert texts == [one.text for one in expected]
    assert reasons == [one.stop for one in expected]


def test_names_of_the_length(live: Running) -> None:
    body: dict[str, Any] = {"temperature": 0}
    plain = live.ok(COMPLETE, prompt="the", max_tokens=3, **body)["choices"]
    for name in ("max_new_tokens", "n_predict"):
        assert live.ok(COMPLETE, prompt="the", **{name: 3}, **body)["choices"] == plain
    chat = live.ok(CHAT, messages=HELLO, max_completion_tokens=3, **body)["choices"]
    for name in ("max_tokens", "max_new_tokens", "n_predict"):
        assert live.ok(CHAT, messages=HELLO, **{name: 3}, **body)["choices"] == chat


def test_the_last_message_is_continued(live: Running, served_lm: Any) -> None:
    turns = [*HELLO, {"role": "assistant", "content": " I am  "}]
    for name, options in (
        ("user: Hello\nassistant:  I am  ", {"continue_final_message": True}),
        ("user: Hello\nassistant:  I am  ", {"continue_final_message": True, "add_generation_prompt": False}),
        ("user: Hello\nassistant:  I am  \n", {"add_generation_prompt": False}),
        ("user: Hello\nassistant:  I am  \nassistant:", {"continue_final_message": False}),
    ):
        ids = served_lm.tokenizer("<s>" + name, add_special_tokens=False).input_ids
        assert live.ok("/tokenize", messages=turns, **options)["tokens"] == ids, options
        found = live.ok(CHAT, messages=turns, **GREEDY, **options)
        assert found["choices"][0]["message"]["content"] == served_lm.generate([ids], 6)[0].text
        assert found["usage"]["prompt_tokens"] == len(ids)


@pytest.mark.parametrize("content", ["", "<s>", "a </s>", "</s> b "])
def test_control_tokens_in_a_continued_message_are_text(live: Running, served_lm: Any, content: str) -> None:
    turns = [*HELLO, {"role": "assistant", "content": content}]
    ids = live.ok("/tokenize", messages=turns, continue_final_message=True)["tokens"]
    assert served_lm.tokenizer.decode(ids) == f"<s>user: Hello\nassistant: {content}"
    assert (ids.count(1), ids.count(2)) == (1, 0)


def test_variables_of_the_template(live: Running, served_lm: Any) -> None:
    tokenizer, template = live.service.lm.tokenizer, live.service.lm.tokenizer.chat_template
    tokenizer.chat_template = template + "{% if style is defined %}({{ style.name }}){% endif %}"
    try:
        ids = live.ok("/tokenize", messages=HELLO, chat_template_kwargs={"style": {"name": "brief"}})["tokens"]
        assert served_lm.tokenizer.decode(ids).endswith("assistant:(brief)")
        found = live.ok(CHAT, messages=HELLO, chat_template_kwargs={"style": {"name": "brief"}}, **GREEDY)
        assert found["usage"]["prompt_tokens"] == len(ids)
        plain = live.ok(CHAT, messages=HELLO, chat_template_kwargs={}, **GREEDY)
        assert plain["choices"] == live.ok(CHAT, messages=HELLO, **GREEDY)["choices"]
    finally:
        tokenizer.chat_template = template


def test_prompts_are_truncated_at_their_start(live: Running, served_lm: Any) -> None:
    ids = served_lm.tokenizer("the ant in rain").input_ids
    found = live.ok(COMPLETE, prompt="the ant in rain", truncate_prompt_tokens=4, **GREEDY)
    assert found["choices"][0]["text"] == served_lm.generate([ids[-4:]], 6)[0].text
    assert found["usage"]["prompt_tokens"] == 4
    assert live.ok(COMPLETE, prompt=ids, truncate_prompt_tokens=4, **GREEDY)["choices"] == found["choices"]
    whole = live.ok(COMPLETE, prompt="the ant in rain", truncate_prompt_tokens=400, **GREEDY)
    assert whole["choices"] == live.ok(COMPLETE, prompt="the ant in rain", **GREEDY)["choices"]
    long = "the ant " * 300
    chat = live.ok(CHAT, messages=[{"role": "user", "content": long}], truncate_prompt_tokens=-1, **GREEDY)
    assert (chat["usage"]["prompt_tokens"], chat["usage"]["completion_tokens"]) == (506, 6)
    echo = live.ok(COMPLETE, prompt="the ant in rain", truncate_prompt_tokens=4, echo=True, max_tokens=0)
    assert echo["choices"][0]["text"] == served_lm.tokenizer.decode(ids[-4:])


def test_json_in_the_words_of_llama_cpp(live: Running) -> None:
    pytest.importorskip("llguidance")
    form = {"type": "json_object", "schema": {"enum": ["yes", "no"]}}
    found = live.ok(CHAT, messages=HELLO, response_format=form, max_tokens=40, temperature=0)
    assert json.loads(found["choices"][0]["message"]["content"]) in ("yes", "no")


@pytest.mark.slow
def test_kinds_of_texts_are_read_with_the_encoders_prompts(served_folder: Any) -> None:
    lm = load(served_folder, prompts={"query": "Q: ", "passage": "P: ", "topic": "T: "})
    running = Running(lm, ServerConfig(), [])
    plain = load(served_folder)
    try:
        for field, kind, prompt in (
            ("input_type", "query", "Q: "), ("input_type", "search_query", "Q: "), ("input_type", "topic", "T: "),
            ("input_type", "document", "P: "), ("input_type", "passage", "P: "), ("task", "retrieval.query", "Q: "),
            ("task", "retrieval.passage", "P: "), ("prompt_name", "topic", "T: "),
        ):  # fmt: skip
            found = running.ok(EMBED, input="the ant", **{field: kind}, encoding_format="base64")
            vector = np.frombuffer(base64.b64decode(found["data"][0]["embedding"]), "<f4")
            assert np.allclose(vector, plain.encode("the ant", prompt=prompt), atol=1e-5), kind
        assert running.post(EMBED, input="a", input_type="clustering").status_code == 400
    finally:
        running.stop()


def test_an_encoder_without_prompts_reads_all_kinds_alike(live: Running) -> None:
    plain = live.ok(EMBED, input="the ant")
    for kind in ("query", "document", "passage"):
        assert live.ok(EMBED, input="the ant", input_type=kind) == plain
    assert live.ok(EMBED, input="the ant", normalize=True, normalized=True, truncate_prompt_tokens=-1) == plain
    cut = live.ok(EMBED, input="the ant " * 400, truncate_prompt_tokens=-1)
    assert cut == live.ok(EMBED, input="the ant " * 400, truncate=True)


def test_rerank_returns_as_many_as_top_k_says(live: Running) -> None:
    body: dict[str, Any] = {"query": "the ants", "documents": ["rain in the sun", {"text": "the ant", "id": 5}, "air"]}
    assert live.ok("/v1/rerank", **body, top_k=2)["results"] == live.ok("/v1/rerank", **body, top_n=2)["results"]
    assert len(live.ok("/rerank", **body, top_k=2, top_n=2)["results"]) == 2
