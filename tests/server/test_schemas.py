"""Request fields: supported, ignored, or rejected by name; and mistakes, each a 4xx that names its field."""

import base64
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel, ValidationError
from starlette.testclient import TestClient

from gerund.entry import load
from gerund.server.app import make_app
from gerund.server.bodies import ANY, EVERYWHERE, Body
from gerund.server.config import ServerConfig
from gerund.server.generation_bodies import ChatRequest, CompletionRequest
from gerund.server.routes.embeddings import (
    AttentionRequest,
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
    SearchRequest,
    TeiRerankRequest,
)
from gerund.server.routes.generation import DetokenizeRequest, InfillRequest, TokenizeRequest
from gerund.settings.sampling import Sampling
from tests.server.conftest import Running, events

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
# Objects in bodies, and a field that they do not have.
NESTED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"messages": [{**HELLO[0], "prefix": True}]}, "messages.0.prefix"),
    (CHAT, {"messages": [*HELLO, {"role": "assistant", "content": "a", "reasoning_content": "Hm."}]},
     "messages.1.reasoning_content"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "lang": "en"}]}]},
     "messages.0.content.0.lang"),
    (CHAT, {"messages": HELLO, "response_format": {"type": "json_object", "regex": "a"}}, "response_format.regex"),
    (CHAT, {"messages": HELLO, "stream_options": {"continuous_usage_stats": True}},
     "stream_options.continuous_usage_stats"),
    (CHAT, {"messages": HELLO, "tools": [{"type": "function", "x": 1}]}, "tools.0.x"),
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


@pytest.mark.parametrize(("route", "form", "body"), ROUTES)
def test_every_route_refuses_unknown_fields_by_name(
    client: TestClient, route: str, form: type[Body], body: dict[str, Any]
) -> None:
    unusual = {name: "other" for name, values in (form.without_effect or {}).items() if values is not ANY}
    for name in ("no_repeat_ngram_size", "\ud800", "", *unusual):
        error = refusal(client, route, {**body, name: unusual.get(name, 3)})
        shown = name.encode("utf-8", "backslashreplace").decode() or "''"
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
    assert refusal(client, EMBED, ["a"])["message"] == 'the body is a JSON object, such as {"input": "a text"}'


@pytest.mark.parametrize(("route", "form", "body"), [one for one in ROUTES if one[0] != "/v1/search"])
def test_what_changes_no_answer_is_accepted(live: Running, route: str, form: type[Body], body: Any) -> None:
    accepted = {**EVERYWHERE, **(form.without_effect or {})}
    more = {name: {"a": [1]} if values is ANY else values[0] for name, values in accepted.items()}
    nulls = {name: None for name in ("no_such_field", *form.model_fields) if name != "schema_"}
    plain, found = live.ok(route, **body), live.ok(route, **{**nulls, **more, **body})
    for answer in (plain, found):
        if isinstance(answer, dict):
            for name in ("id", "created"):
                answer.pop(name, None)
            if answer.get("rerank"):
                answer["rerank"].pop("seconds")
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
    turns = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": [part, part]}, message, *HELLO]
    same = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello\nHello"}, plain, *HELLO]
    found = live.ok(CHAT, messages=turns, **GREEDY, model="", tools=[])["choices"]
    assert found == live.ok(CHAT, messages=same, **GREEDY)["choices"]


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


@pytest.mark.slow
def test_kinds_of_texts_are_read_with_the_encoders_prompts(served_folder: Any) -> None:
    lm, plain = load(served_folder, prompts={"query": "Q: ", "passage": "P: ", "topic": "T: "}), load(served_folder)
    with Running(lm, ServerConfig(), []) as running:
        for field, kind, prompt in (
            ("input_type", "query", "Q: "), ("input_type", "search_query", "Q: "), ("input_type", "topic", "T: "),
            ("input_type", "document", "P: "), ("input_type", "passage", "P: "), ("task", "retrieval.query", "Q: "),
            ("task", "retrieval.passage", "P: "), ("prompt_name", "topic", "T: "),
        ):  # fmt: skip
            found = running.ok(EMBED, input="the ant", **{field: kind}, encoding_format="base64")
            vector = np.frombuffer(base64.b64decode(found["data"][0]["embedding"]), "<f4")
            assert np.allclose(vector, plain.encode("the ant", prompt=prompt), atol=1e-5), kind
        assert running.post(EMBED, input="a", input_type="clustering").status_code == 400


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


REFUSED: list[tuple[str, dict[str, Any], int, str | None, str | None]] = [
    # route, body, status, param, code
    (CHAT, {}, 400, "messages", None),
    (CHAT, {"messages": [{"content": "no role"}]}, 400, "messages.0.role", None),
    (CHAT, {"messages": [{"role": "a b", "content": "x"}]}, 400, "messages", None),
    (CHAT, {"messages": [{"role": "user"}]}, 400, "messages.0.content", None),
    (CHAT, {"messages": [{"role": "raise", "content": "x"}]}, 400, "messages", None),
    (CHAT, {"messages": [{"role": "user", "content": "\ud800"}]}, 400, "messages", None),
    (CHAT, {"messages": [{"role": "user", "content": "the " * 600}]}, 400, "messages", "context_length_exceeded"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages.0.content.0",
     "not_supported"),
    (CHAT, {"messages": [{"role": "tool", "content": "5"}]}, 400, "messages", "not_with_this_model"),
    (CHAT, {"messages": [{"role": "function", "content": "5"}]}, 400, "messages.0", "not_supported"),
    (CHAT, {"messages": HELLO, "tools": [{"type": "function"}]}, 400, "tools.0.function", None),
    (CHAT, {"messages": HELLO, "tools": [{"function": {"name": "f"}}]}, 400, "tools", "not_with_this_model"),
    (CHAT, {"messages": HELLO, "tool_choice": "required"}, 400, "tool_choice", None),
    (CHAT, {"messages": HELLO, "model": "gpt-4"}, 404, "model", "model_not_found"),
    (CHAT, {"messages": HELLO, "model": "\ud800"}, 400, "model", None),
    (CHAT, {"messages": HELLO, "temperature": 3}, 400, "temperature", None),
    (CHAT, {"messages": HELLO, "temperature": "1"}, 400, "temperature", None),
    (CHAT, {"messages": HELLO, "top_p": 0}, 400, "top_p", None),
    (CHAT, {"messages": HELLO, "n": 0}, 400, "n", None),
    (CHAT, {"messages": HELLO, "n": 2, "temperature": 0}, 400, None, None),
    (CHAT, {"messages": HELLO, "max_tokens": 10**6}, 413, None, "request_too_large"),
    (CHAT, {"messages": HELLO, "stop": [""]}, 400, "stop.0", None),
    (CHAT, {"messages": HELLO, "top_logprobs": 3}, 400, "top_logprobs", None),
    (CHAT, {"messages": HELLO, "logit_bias": {"a": 1}}, 400, "logit_bias", None),
    (CHAT, {"messages": HELLO, "logit_bias": {"99999": 1}}, 400, "logit_bias", None),
    (CHAT, {"messages": HELLO, "logit_bias": {"5": 101}}, 400, "logit_bias", None),
    (CHAT, {"messages": HELLO, "response_format": {"type": "xml"}}, 400, "response_format.type", None),
    (CHAT, {"messages": HELLO, "response_format": {"type": "json_schema"}}, 400, "response_format", None),
    (CHAT, {"messages": HELLO, "best_of": 2, "n": 3}, 400, "best_of", None),
    (CHAT, {"messages": HELLO, "best_of": 2, "stream": True}, 400, "best_of", None),
    (CHAT, {"messages": HELLO, "best_of": 2, "scorer": "own"}, 400, None, None),
    (CHAT, {"messages": HELLO, "grammar": "root ::= [a]"}, 400, "grammar", "not_supported"),
    (CHAT, {"messages": HELLO, "structured_outputs": {"grammar": "a"}}, 400, "structured_outputs.grammar", None),
    (CHAT, {"messages": HELLO, "structured_outputs": {"regex": "("}}, 400, "structured_outputs", None),
    (CHAT, {"messages": HELLO, "structured_outputs": {"choice": []}}, 400, "structured_outputs.choice", None),
    (CHAT, {"messages": HELLO, "structured_outputs": {"regex": "a", "choice": ["a"]}}, 400, "structured_outputs", None),
    (CHAT, {"messages": HELLO, "guided_regex": "a", "guided_choice": ["a"]}, 400, "guided_choice", None),
    (COMPLETE, {"prompt": "a", "guided_regex": "("}, 400, "guided_regex", None),
    (COMPLETE, {"prompt": "a", "suffix": "b", "guided_choice": ["a"]}, 400, "guided_choice", "not_supported"),
    (COMPLETE, {"prompt": "a", "suffix": "b", "max_tokens": 513}, 400, "max_tokens", None),
    (COMPLETE, {}, 400, "prompt", None),
    (COMPLETE, {"prompt": []}, 400, "prompt", None),
    (COMPLETE, {"prompt": [5, "a"]}, 400, "prompt.0", None),
    (COMPLETE, {"prompt": [-1]}, 400, "prompt.0", None),
    (COMPLETE, {"prompt": [5000]}, 400, "prompt", None),
    (COMPLETE, {"prompt": "a", "max_tokens": 0}, 400, "max_tokens", None),
    (COMPLETE, {"prompt": ["a"] * 256, "max_tokens": 300}, 413, None, "request_too_large"),
    (COMPLETE, {"prompt": "a", "max_tokens": 5, "max_new_tokens": 6}, 400, "max_new_tokens", None),
    (COMPLETE, {"prompt": "a", "max_tokens": 4, "min_tokens": 5}, 400, "min_tokens", None),
    (COMPLETE, {"prompt": "a", "allowed_token_ids": [99999]}, 400, "allowed_token_ids", None),
    (COMPLETE, {"prompt": "a", "allowed_token_ids": [2], "min_tokens": 1}, 400, "allowed_token_ids", None),
    (COMPLETE, {"prompt": "a", "bad_words": [""]}, 400, "bad_words.0", None),
    (COMPLETE, {"prompt": "a", "ignore_eos": True, "guided_choice": ["a"]}, 400, "ignore_eos", None),
    (COMPLETE, {"prompt": "a", "guided_choice": ["ab"], "bad_words": ["b"]}, 400, "bad_words", None),
    (COMPLETE, {"prompt": "a", "truncate_prompt_tokens": 0}, 400, "truncate_prompt_tokens", None),
    (COMPLETE, {"prompt": "a", "suffix": "c", "bad_words": ["x"]}, 400, "bad_words", "not_supported"),
    (CHAT, {"messages": HELLO, "continue_final_message": True, "add_generation_prompt": True}, 400,
     "continue_final_message", None),
    (CHAT, {"messages": HELLO, "chat_template_kwargs": {"messages": []}}, 400, "chat_template_kwargs", None),
    (CHAT, {"messages": HELLO, "chat_template_kwargs": {"style": ["</s>"]}}, 400, "chat_template_kwargs", None),
    (CHAT, {"messages": HELLO, "response_format": {"type": "text", "schema": {}}}, 400, "response_format", None),
    (EMBED, {"input": "a", "input_type": "classification"}, 400, "input_type", None),
    (EMBED, {"input": "a", "input_type": "query", "prompt": "b"}, 400, "input_type", None),
    (EMBED, {"input": "a", "truncate_prompt_tokens": 5}, 400, "truncate_prompt_tokens", None),
    (EMBED, {"input": "a", "normalize": False}, 400, "normalize", "not_supported"),
    ("/v1/rerank", {"query": "a", "documents": ["a"], "top_n": 1, "top_k": 2}, 400, "top_k", None),
    ("/v1/rerank", {"query": "a", "documents": [{"title": "x"}]}, 400, "documents.0.text", None),
    ("/rerank", {"query": "a", "texts": ["a"], "top_n": 1}, 400, "top_n", "not_supported"),
    (COMPLETE, {"prompt": ["a", "b"], "suffix": "c"}, 400, "prompt", None),
    (COMPLETE, {"prompt": "a", "suffix": "c", "n": 2}, 400, "n", "not_supported"),
    (COMPLETE, {"prompt": "a", "suffix": "c", "stop": "x"}, 400, "stop", "not_supported"),
    (EMBED, {}, 400, "input", None),
    (EMBED, {"input": ""}, 400, "input", None),
    (EMBED, {"input": ["a", "\n"]}, 400, "input.1", None),
    (EMBED, {"input": "\ud800"}, 400, "input", None),
    (EMBED, {"input": "a", "dimensions": 33}, 400, "dimensions", None),
    (EMBED, {"input": "a", "prompt_name": "absent"}, 400, "prompt_name", None),
    (EMBED, {"input": "a", "encoding_format": "int8"}, 400, "encoding_format", None),
    (EMBED, {"input": ["the " * 120] * 1400}, 413, None, "request_too_large"),
    ("/v1/rerank", {"query": "a", "documents": []}, 400, "documents", None),
    ("/v1/rerank", {"query": " ", "documents": ["a"]}, 400, "query", None),
    ("/v1/rerank", {"query": "a", "documents": ["a", " "]}, 400, "documents", None),
    ("/v2/rerank", {"query": "a", "documents": ["a"], "by": "own"}, 400, "by", None),
    ("/rerank", {"query": "a"}, 400, None, None),
    ("/rerank", {"query": "a", "texts": [" "]}, 400, "texts", None),
    ("/v1/score", {}, 400, "prefix", None),
    ("/v1/score", {"prefix": "a"}, 400, "continuations", None),
    ("/v1/score", {"prefix": "a", "continuations": [" "]}, 400, "continuations", None),
    ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, 400, "text_2", None),
    ("/v1/score", {"text_1": " ", "text_2": ["b", "c"]}, 400, "text_1", None),
    ("/infill", {}, 400, "text", None),
    ("/infill", {"text": "no gap"}, 400, "text", None),
    ("/infill", {"text": "a [blank]", "pieces": ["a", "b"]}, 400, "pieces", None),
    ("/infill", {"text": "[blank] [blank]"}, 400, "text", None),
    ("/infill", {"text": "a [blank]", "lengths": 10**6}, 400, "lengths", None),
    ("/infill", {"text": "a [blank]", "max_tokens": 2, "n_predict": 3}, 400, "n_predict", None),
    ("/tokenize", {"messages": HELLO, "add_special_tokens": True}, 400, "add_special_tokens", "not_supported"),
    ("/tokenize", {}, 400, "prompt", None),
    ("/tokenize", {"prompt": "a", "content": "b"}, 400, "content", None),
    ("/detokenize", {"tokens": [10**6]}, 400, "tokens", None),
    ("/v1/attention", {"text": ""}, 400, "text", None),
    ("/v1/attention", {"text": "a b c", "plan": "sideways"}, 400, None, None),
    ("/v1/attention", {"text": "a b c", "plan": "bidir", "k": 99}, 400, None, None),
    ("/v1/attention", {"text": "a b c", "k": 2}, 400, None, None),
    # what would have no effect
    ("/v1/score", {"prefix": "a", "continuations": ["b"], "text_2": "c"}, 400, "text_2", None),
    ("/v1/score", {"text_1": "a", "text_2": "b", "scorer": "pmi"}, 400, "scorer", None),
    ("/v1/score", {"text_1": "a", "text_2": "b", "continuations": ["c"]}, 400, "continuations", None),
    (COMPLETE, {"prompt": "a", "scorer": "pmi"}, 400, "scorer", None),
    ("/infill", {"pieces": ["a", "b"], "blank": "_"}, 400, "blank", None),
    ("/infill", {"text": "a [blank]", "lengths": 2, "max_tokens": 3}, 400, "max_tokens", None),
    ("/tokenize", {"prompt": "a", "continue_final_message": True}, 400, "continue_final_message", None),
]  # fmt: skip


@pytest.mark.parametrize(("route", "body", "status", "param", "code"), REFUSED)
def test_mistakes(live: Running, route: str, body: Any, status: int, param: Any, code: Any) -> None:
    found = live.client.post(route, content=json.dumps(body), headers={"Content-Type": "application/json"})
    assert found.status_code == status, found.text
    error = found.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert len(error["message"]) <= 320
    assert code is None or error["code"] == code, error
    assert param is None or error["param"] == param, error


@pytest.mark.parametrize(
    ("form", "body"),
    [
        (EmbeddingRequest, {"input": [[1.5] * 500] * 500}),
        (CompletionRequest, {"prompt": [[1.5] * 500] * 500}),
        (ChatRequest, {"messages": [{}] * 4000}),
        (ChatRequest, {"messages": [{"role": "user", "content": [5] * 4000}]}),
        (ChatRequest, {"messages": HELLO, "stop": [5] * 4000}),
        (ChatRequest, {"messages": HELLO, "logit_bias": {str(number): "x" for number in range(4000)}}),
        (ChatRequest, {"messages": HELLO, "logit_bias": {f"a{number}": 1 for number in range(4000)}}),
        (RerankRequest, {"query": "a", "documents": [5] * 2000}),
        (TeiRerankRequest, {"query": "a", "texts": [5] * 2000}),
        (DetokenizeRequest, {"tokens": ["a"] * 4000}),
        (InfillRequest, {"pieces": [5] * 4000, "lengths": [0] * 4000}),
    ],
)
def test_of_many_mistakes_few_are_described(form: type[BaseModel], body: Any) -> None:
    """Vectors sent in the place of texts were two million errors, and minutes in which nobody else was answered."""
    with pytest.raises(ValidationError) as caught:
        form.model_validate(body)
    assert caught.value.error_count() <= 6


@pytest.mark.parametrize(
    "schema",
    [{"type": "nonsense"}, {"type": 5}, {"$ref": "#/nowhere"}, {"pattern": "("}, {"$ref": "http://example.com/s"}],
)
def test_a_schema_that_is_none(live: Running, schema: Any) -> None:
    pytest.importorskip("llguidance")
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for stream in (False, True):
        found = live.post(CHAT, messages=HELLO, response_format=form, stream=stream, max_tokens=4)
        assert found.status_code == 400, found.text


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_other_methods(live: Running, method: str) -> None:
    found = live.client.request(method, CHAT)
    assert (found.status_code, found.json()["error"]["code"]) == (405, "method_not_allowed")
    assert found.headers["Allow"] == "POST"
    assert found.json()["error"]["message"] == f"{CHAT} takes POST, not {method}"


def test_a_route_that_does_not_exist(live: Running) -> None:
    found = live.client.get("/v1/chats")
    assert (found.status_code, found.json()["error"]["code"]) == (404, "not_found")
    assert found.json()["error"]["message"].startswith("there is no route /v1/chats; ")
