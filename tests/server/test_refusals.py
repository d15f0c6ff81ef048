"""What clients get wrong: each mistake is a 4xx that names the field, never a 422 and never a 5xx."""

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from gerund.entry import load
from gerund.server.config import ServerConfig
from gerund.server.schemas.embeddings import (
    DetokenizeRequest,
    EmbeddingRequest,
    RerankRequest,
    TeiRerankRequest,
)
from gerund.server.schemas.generation import ChatRequest, CompletionRequest, InfillRequest
from tests.server.conftest import Running, save_served

CHAT, COMPLETE, EMBED = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
HELLO = [{"role": "user", "content": "Hello"}]
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]
HUGE = 10**30

REFUSED: list[tuple[str, dict[str, Any], int, str | None, str | None]] = [
    # route, body, status, param, code
    (CHAT, {}, 400, "messages", None),
    (CHAT, {"messages": []}, 400, "messages", None),
    (CHAT, {"messages": "Hello"}, 400, "messages", None),
    (CHAT, {"messages": [{"content": "no role"}]}, 400, "messages.0.role", None),
    (CHAT, {"messages": [{"role": "a b", "content": "x"}]}, 400, "messages", None),
    (CHAT, {"messages": [{"role": "user"}]}, 400, "messages.0.content", None),
    (CHAT, {"messages": [{"role": "raise", "content": "x"}]}, 400, "messages", None),
    (CHAT, {"messages": [{"role": "user", "content": "\ud800"}]}, 400, "messages", None),
    (CHAT, {"messages": [{"role": "user", "content": "the " * 600}]}, 400, "messages", "context_length_exceeded"),
    (CHAT, {"messages": IMAGE}, 400, "messages.0.content.0", "not_supported"),
    (CHAT, {"messages": [{"role": "tool", "content": "5"}]}, 400, "messages.0", "not_supported"),
    (CHAT, {"messages": HELLO, "tools": [{"type": "function"}]}, 400, "tools", "not_supported"),
    (CHAT, {"messages": HELLO, "functions": [{"name": "f"}]}, 400, "functions", "not_supported"),
    (CHAT, {"messages": HELLO, "tool_choice": "required"}, 400, "tool_choice", "not_supported"),
    (CHAT, {"messages": HELLO, "modalities": ["audio"]}, 400, "modalities", "not_supported"),
    (CHAT, {"messages": HELLO, "model": "gpt-4"}, 404, "model", "model_not_found"),
    (CHAT, {"messages": HELLO, "model": "\ud800"}, 400, "model", None),
    (CHAT, {"messages": HELLO, "temperature": -1}, 400, "temperature", None),
    (CHAT, {"messages": HELLO, "temperature": 3}, 400, "temperature", None),
    (CHAT, {"messages": HELLO, "temperature": "1"}, 400, "temperature", None),
    (CHAT, {"messages": HELLO, "top_p": 0}, 400, "top_p", None),
    (CHAT, {"messages": HELLO, "n": 0}, 400, "n", None),
    (CHAT, {"messages": HELLO, "n": True}, 400, "n", None),
    (CHAT, {"messages": HELLO, "n": 2, "temperature": 0}, 400, None, None),
    (CHAT, {"messages": HELLO, "seed": HUGE}, 400, "seed", None),
    (CHAT, {"messages": HELLO, "max_tokens": HUGE}, 400, "max_tokens", None),
    (CHAT, {"messages": HELLO, "max_tokens": 10**6}, 413, None, "request_too_large"),
    (CHAT, {"messages": HELLO, "max_tokens": 10**4, "n": 100}, 413, None, "request_too_large"),
    (CHAT, {"messages": HELLO, "stop": [""]}, 400, "stop.0", None),
    (CHAT, {"messages": HELLO, "stop": ["a"] * 50}, 400, "stop", None),
    (CHAT, {"messages": HELLO, "top_logprobs": 3}, 400, "top_logprobs", None),
    (CHAT, {"messages": HELLO, "logprobs": True, "top_logprobs": 21}, 400, "top_logprobs", None),
    (CHAT, {"messages": HELLO, "logit_bias": {"a": 1}}, 400, "logit_bias", None),
    (CHAT, {"messages": HELLO, "logit_bias": {"99999": 1}}, 400, "logit_bias", None),
    (CHAT, {"messages": HELLO, "logit_bias": {"5": 101}}, 400, "logit_bias", None),
    (CHAT, {"messages": HELLO, "response_format": {"type": "xml"}}, 400, "response_format.type", None),
    (CHAT, {"messages": HELLO, "response_format": {"type": "json_schema"}}, 400, "response_format", None),
    (CHAT, {"messages": HELLO, "best_of": 2, "n": 3}, 400, "best_of", None),
    (CHAT, {"messages": HELLO, "best_of": 2, "stream": True}, 400, "best_of", None),
    (CHAT, {"messages": HELLO, "best_of": 2, "scorer": "own"}, 400, None, None),
    (CHAT, {"messages": HELLO, "best_of": 2, "scorer": "/etc"}, 400, "scorer", None),
    (CHAT, {"messages": HELLO, "max_token": 5}, 400, "max_token", "not_supported"),
    (CHAT, {"message": HELLO}, 400, "message", "not_supported"),
    (EMBED, {"input": "a", "dimension": 8}, 400, "dimension", "not_supported"),
    (CHAT, {"messages": HELLO, "grammar": "root ::= [a]"}, 400, "grammar", "not_supported"),
    (CHAT, {"messages": HELLO, "guided_grammar": "root ::= [a]"}, 400, "guided_grammar", "not_supported"),
    (CHAT, {"messages": HELLO, "json_schema": {}}, 400, "json_schema", "not_supported"),
    (CHAT, {"messages": HELLO, "structured_outputs": {"grammar": "a"}}, 400, "structured_outputs.grammar", None),
    (CHAT, {"messages": HELLO, "structured_outputs": {"structural_tag": "a"}}, 400, None, "not_supported"),
    (CHAT, {"messages": HELLO, "structured_outputs": {"regex": "("}}, 400, "structured_outputs", None),
    (CHAT, {"messages": HELLO, "structured_outputs": {"json": "{"}}, 400, "structured_outputs", None),
    (CHAT, {"messages": HELLO, "structured_outputs": {"choice": []}}, 400, "structured_outputs.choice", None),
    (CHAT, {"messages": HELLO, "structured_outputs": {"regex": "a", "choice": ["a"]}}, 400, "structured_outputs", None),
    (CHAT, {"messages": HELLO, "guided_regex": "a", "guided_choice": ["a"]}, 400, "guided_choice", None),
    (COMPLETE, {"prompt": "a", "guided_regex": "("}, 400, "guided_regex", None),
    (COMPLETE, {"prompt": "a", "suffix": "b", "guided_choice": ["a"]}, 400, "guided_choice", "not_supported"),
    (COMPLETE, {"prompt": "a", "suffix": "b", "max_tokens": 513}, 400, "max_tokens", None),
    (COMPLETE, {}, 400, "prompt", None),
    (COMPLETE, {"prompt": []}, 400, "prompt", None),
    (COMPLETE, {"prompt": [[]]}, 400, "prompt.0", None),
    (COMPLETE, {"prompt": [5, "a"]}, 400, "prompt.0", None),
    (COMPLETE, {"prompt": [-1]}, 400, "prompt.0", None),
    (COMPLETE, {"prompt": [5000]}, 400, "prompt", None),
    (COMPLETE, {"prompt": "a", "max_tokens": 0}, 400, "max_tokens", None),
    (COMPLETE, {"prompt": ["a"] * 256, "max_tokens": 300}, 413, None, "request_too_large"),
    (COMPLETE, {"prompt": "a", "tools": [{"type": "function"}]}, 400, "tools", "not_supported"),
    (COMPLETE, {"prompt": "a", "n": 2, "temperature": 0}, 400, "n", None),
    (COMPLETE, {"prompt": "a", "max_tokens": 5, "max_new_tokens": 6}, 400, "max_new_tokens", None),
    (COMPLETE, {"prompt": "a", "max_tokens": 4, "min_tokens": 5}, 400, "min_tokens", None),
    (COMPLETE, {"prompt": "a", "min_tokens": -1}, 400, "min_tokens", None),
    (COMPLETE, {"prompt": "a", "stop_token_ids": [99999]}, 400, "stop_token_ids", None),
    (COMPLETE, {"prompt": "a", "stop_token_ids": ["a"]}, 400, "stop_token_ids.0", None),
    (COMPLETE, {"prompt": "a", "allowed_token_ids": []}, 400, "allowed_token_ids", None),
    (COMPLETE, {"prompt": "a", "allowed_token_ids": [99999]}, 400, "allowed_token_ids", None),
    (COMPLETE, {"prompt": "a", "allowed_token_ids": [2], "min_tokens": 1}, 400, "allowed_token_ids", None),
    (COMPLETE, {"prompt": "a", "bad_words": [""]}, 400, "bad_words.0", None),
    (COMPLETE, {"prompt": "a", "ignore_eos": True, "guided_choice": ["a"]}, 400, "ignore_eos", None),
    (COMPLETE, {"prompt": "a", "guided_choice": ["ab"], "bad_words": ["b"]}, 400, "bad_words", None),
    (COMPLETE, {"prompt": "a", "truncate_prompt_tokens": 0}, 400, "truncate_prompt_tokens", None),
    (COMPLETE, {"prompt": "a", "suffix": "c", "bad_words": ["x"]}, 400, "bad_words", "not_supported"),
    (COMPLETE, {"prompt": "a", "echo": True, "n": 2, "temperature": 0}, 400, "n", None),
    (
        CHAT,
        {"messages": HELLO, "continue_final_message": True, "add_generation_prompt": True},
        400,
        "continue_final_message",
        None,
    ),
    (CHAT, {"messages": HELLO, "chat_template_kwargs": {"messages": []}}, 400, "chat_template_kwargs", None),
    (CHAT, {"messages": HELLO, "chat_template_kwargs": {"bos_token": "x"}}, 400, "chat_template_kwargs", None),
    (CHAT, {"messages": HELLO, "chat_template_kwargs": {"tokenize": True}}, 400, "chat_template_kwargs", None),
    (CHAT, {"messages": HELLO, "chat_template_kwargs": {"style": ["</s>"]}}, 400, "chat_template_kwargs", None),
    (CHAT, {"messages": HELLO, "response_format": {"type": "text", "schema": {}}}, 400, "response_format", None),
    (EMBED, {"input": "a", "input_type": "classification"}, 400, "input_type", None),
    (EMBED, {"input": "a", "input_type": "query", "prompt": "b"}, 400, "input_type", None),
    (EMBED, {"input": "a", "task": "text-matching"}, 400, "task", None),
    (EMBED, {"input": "a", "truncate_prompt_tokens": 5}, 400, "truncate_prompt_tokens", None),
    (EMBED, {"input": "a", "normalize": False}, 400, "normalize", "not_supported"),
    ("/v1/rerank", {"query": "a", "documents": ["a"], "top_n": 1, "top_k": 2}, 400, "top_k", None),
    ("/v1/rerank", {"query": "a", "documents": [{"title": "x"}]}, 400, "documents.0.text", None),
    ("/rerank", {"query": "a", "documents": [{"title": "x"}]}, 400, "documents.0.text", None),
    ("/rerank", {"query": "a", "texts": ["a"], "top_n": 1}, 400, "top_n", "not_supported"),
    (COMPLETE, {"prompt": ["a", "b"], "suffix": "c"}, 400, "prompt", None),
    (COMPLETE, {"prompt": "a", "suffix": "c", "n": 2}, 400, "n", "not_supported"),
    (COMPLETE, {"prompt": "a", "suffix": "c", "stop": "x"}, 400, "stop", "not_supported"),
    (EMBED, {}, 400, "input", None),
    (EMBED, {"input": ""}, 400, "input", None),
    (EMBED, {"input": " "}, 400, "input", None),
    (EMBED, {"input": ["a", "\n"]}, 400, "input.1", None),
    (EMBED, {"input": "\ud800"}, 400, "input", None),
    (EMBED, {"input": ["a", None]}, 400, "input.1", None),
    (EMBED, {"input": "a", "dimensions": 0}, 400, "dimensions", None),
    (EMBED, {"input": "a", "dimensions": 33}, 400, "dimensions", None),
    (EMBED, {"input": "a", "prompt_name": "absent"}, 400, "prompt_name", None),
    (EMBED, {"input": 5}, 400, "input", None),
    (EMBED, {"input": "a", "encoding_format": "int8"}, 400, "encoding_format", None),
    (EMBED, {"input": "a", "model": "ada"}, 404, "model", "model_not_found"),
    (EMBED, {"input": ["the " * 120] * 1400}, 413, None, "request_too_large"),
    ("/v1/rerank", {"query": "a", "documents": []}, 400, "documents", None),
    ("/v1/rerank", {"query": " ", "documents": ["a"]}, 400, "query", None),
    ("/v1/rerank", {"query": "a", "documents": ["a", " "]}, 400, "documents", None),
    ("/v2/rerank", {"query": "a", "documents": ["a"], "top_n": 0}, 400, "top_n", None),
    ("/v2/rerank", {"query": "a", "documents": ["a"], "by": "own"}, 400, "by", None),
    ("/rerank", {"query": "a"}, 400, None, None),
    ("/rerank", {"query": "a", "texts": [" "]}, 400, "texts", None),
    (
        "/rerank",
        {"query": "a", "texts": ["the " * 900, "b"], "truncate": False},
        400,
        "texts.0",
        "context_length_exceeded",
    ),
    ("/v1/score", {}, 400, "prefix", None),
    ("/v1/score", {"prefix": "a"}, 400, "continuations", None),
    ("/v1/score", {"prefix": "a", "continuations": [" "]}, 400, "continuations", None),
    ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, 400, "text_2", None),
    ("/v1/score", {"text_1": "a", "text_2": ["b", " "]}, 400, "text_2.1", None),
    ("/v1/score", {"text_1": " ", "text_2": ["b", "c"]}, 400, "text_1", None),
    ("/infill", {}, 400, "text", None),
    ("/infill", {"text": "a [blank]", "stream": True}, 400, "stream", "not_supported"),
    ("/infill", {"text": "no gap"}, 400, "text", None),
    ("/infill", {"text": "a [blank]", "pieces": ["a", "b"]}, 400, "pieces", None),
    ("/infill", {"text": "[blank] [blank]"}, 400, "text", None),
    ("/infill", {"pieces": ["", ""]}, 400, "pieces", None),
    ("/infill", {"text": "a [blank]", "samples": 2}, 400, "samples", None),
    ("/infill", {"text": "a [blank]", "lengths": 10**6}, 400, "lengths", None),
    ("/infill", {"text": "a [blank]", "max_tokens": 2, "n_predict": 3}, 400, "n_predict", None),
    ("/tokenize", {"messages": HELLO, "add_special_tokens": True}, 400, "add_special_tokens", "not_supported"),
    ("/tokenize", {}, 400, "prompt", None),
    ("/tokenize", {"prompt": "a", "content": "b"}, 400, "content", None),
    ("/tokenize", {"prompt": "\ud800"}, 400, "prompt", None),
    ("/detokenize", {"tokens": [10**6]}, 400, "tokens", None),
    ("/detokenize", {"tokens": [-5]}, 400, "tokens.0", None),
]


@pytest.mark.parametrize(("route", "body", "status", "param", "code"), REFUSED)
def test_mistakes(live: Running, route: str, body: Any, status: int, param: Any, code: Any) -> None:
    import json

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
    ("route", "body", "said"),
    [
        (EMBED, {"input": "a", "dimension": 8}, "there is no field 'dimension'; did you mean 'dimensions'?"),
        (COMPLETE, {"prompt": "a", "max_token": 5}, "there is no field 'max_token'; did you mean 'max_tokens'?"),
        (EMBED, ["a"], 'the body is a JSON object, such as {"input": "a text"}'),
    ],
)
def test_what_is_wrong_with_a_whole_body(live: Running, route: str, body: Any, said: str) -> None:
    found = live.client.post(route, json=body)
    assert (found.status_code, found.json()["error"]["message"]) == (400, said)


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


def test_after_all_of_them_the_server_answers(live: Running) -> None:
    assert live.idle()
    assert live.ok(COMPLETE, prompt="a", max_tokens=2)["choices"]


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


@pytest.mark.slow
def test_a_model_without_a_template_says_so(tmp_path: Any) -> None:
    folder = save_served(tmp_path / "plain", template=None)
    running = Running(load(folder), ServerConfig(), [])
    try:
        found = running.post(CHAT, messages=HELLO)
        assert (found.status_code, found.json()["error"]["code"]) == (400, "not_with_this_model")
        assert "no chat template" in found.json()["error"]["message"]
        assert running.ok(COMPLETE, prompt="a", max_tokens=2)["choices"]
    finally:
        running.stop()
