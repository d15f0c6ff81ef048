"""A tokenizer that panics, which Python sees as no ``Exception``, is an error of its request and of no other."""

import json
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient
from tokenizers import Tokenizer

from gerund import ModelError, TextError
from gerund.entry import load
from gerund.inference.generate.detokenizing import decoded
from gerund.server.app import make_app
from tests.server.conftest import Running
from tests.tiny import byte_tokenizer, save_tiny

# A table of characters without entries: tokenizers' normalizer leaves its bounds.
BROKEN = {"type": "Precompiled", "precompiled_charsmap": "BAAAAAEAAAA="}


def broken(tokenizer: Any) -> Any:
    """Return a tokenizer whose normalizer panics on any text."""
    core = json.loads(tokenizer.backend_tokenizer.to_str())
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps({**core, "normalizer": BROKEN}))
    return tokenizer


def panic() -> BaseException:
    """Return a panic of tokenizers."""
    try:
        broken(byte_tokenizer()).backend_tokenizer.encode("a")
    except BaseException as error:
        return error
    raise AssertionError("tokenizers does not panic any more; find another way")


def test_in_the_library(tmp_path: Path) -> None:
    lm = load(save_tiny(tmp_path / "tiny"))
    broken(lm.tokenizer)
    for call in (lambda: lm.generate("a", 2), lambda: lm.encode("a"), lambda: lm.score(["a"], [["b"]])):
        with pytest.raises(TextError, match="this model's tokenizer fails on this text: index out of bounds"):
            call()


def test_while_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    error, tokenizer = panic(), byte_tokenizer()

    def fail(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.setattr(tokenizer, "decode", fail)
    with pytest.raises(ModelError, match="the model's tokenizer fails on token ids"):
        decoded(tokenizer, [70])


ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ("/v1/completions", {"prompt": "a"}),
    ("/infill", {"text": "a [blank] b"}),
    ("/v1/embeddings", {"input": "a"}),
    ("/v1/rerank", {"query": "a", "documents": ["b"]}),
    ("/v1/score", {"prefix": "a", "continuations": ["b"]}),
    ("/tokenize", {"prompt": "a"}),
]


def test_on_the_server(live: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    own = broken(byte_tokenizer())
    with monkeypatch.context() as patch:
        patch.setattr(live.service.lm.tokenizer, "_tokenizer", own._tokenizer)
        for route, body in ROUTES:
            found = live.post(route, **body)
            assert found.status_code == 400, found.text
            assert "this model's tokenizer fails on this text" in found.json()["error"]["message"]
    for route, body in ROUTES:
        assert live.ok(route, **body)


def test_a_panic_anywhere_else_is_an_error_of_the_usual_form(live: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    error = panic()

    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(type(live.service), "require_model", fail)
    with TestClient(make_app(live.service), base_url="http://127.0.0.1", raise_server_exceptions=False) as client:
        found = client.post("/v1/embeddings", json={"input": "a"})
    assert (found.status_code, found.json()["error"]["code"]) == (500, "server_error")
