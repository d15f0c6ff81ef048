"""Checks before parsing, error responses, request logging, and panics of a tokenizer."""

import asyncio
import json
import logging
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient
from tokenizers import Tokenizer

from gerund.entry import load
from gerund.errors import (
    ClosedError,
    ConfigError,
    DeadlineError,
    FingerprintError,
    MissingDependencyError,
    ModelError,
    QueueFullError,
    ResourceError,
    TextError,
    TooLargeError,
)
from gerund.inference.generate.detokenizing import decoded
from gerund.server import connections
from gerund.server.app import GuardMiddleware, make_app
from gerund.server.bodies import worst
from gerund.server.config import ServerConfig
from gerund.server.errors import ApiError, api_error
from gerund.server.service import Service
from tests.server.conftest import Running, exchange, until
from tests.tiny import byte_tokenizer


@pytest.fixture(scope="module")
def guarded(served_folder: Any) -> Iterator[Running]:
    """A server with two keys and small bounds."""
    settings = ServerConfig(body_limit=2000, body_timeout=0.4, timeout=30)
    with Running(load(served_folder), settings, ["first-key", "second-key"]) as running:
        yield running


def routes(running: Running) -> list[tuple[str, str]]:
    paths = running.client.get("/openapi.json").json()["paths"]
    return [(method.upper(), path) for path, own in paths.items() for method in own]


@pytest.mark.slow
def test_every_route_needs_the_key(guarded: Running) -> None:
    listed = [*routes(guarded), ("GET", "/openapi.json"), ("GET", "/nothing")]
    assert len(listed) > 12
    for method, path in listed:
        for header in ({"Authorization": ""}, {"Authorization": "Bearer wrong"}, {"Authorization": "first-key"}):
            found = guarded.client.request(method, path, headers=header)
            assert found.status_code == 401, (method, path)
            error = found.json()["error"]  # Ollama's routes answer with a text
            assert isinstance(error, str) if path.startswith("/api/") else error["code"] == "invalid_api_key"
            assert "first-key" not in found.text
    for key in ("first-key", "second-key"):
        found = guarded.client.get("/health", headers={"Authorization": f"bearer {key}"})
        assert found.status_code == 200


@pytest.mark.slow
def test_a_body_has_a_bound_with_and_without_a_length(guarded: Running) -> None:
    small, large = {"prompt": "a"}, {"prompt": "a" * 3000}
    assert guarded.post("/tokenize", **small).status_code == 200
    found = guarded.post("/tokenize", **large)
    assert (found.status_code, found.json()["error"]["code"]) == (413, "request_too_large")

    def parts() -> Iterator[bytes]:
        content = json.dumps(large).encode()
        for start in range(0, len(content), 500):
            yield content[start : start + 500]

    chunked = guarded.client.post("/tokenize", content=parts(), headers={"Content-Type": "application/json"})
    assert (chunked.status_code, chunked.json()["error"]["code"]) == (413, "request_too_large")
    announced, _ = exchange(guarded, HEAD + b"Content-Length: 99999999999\r\n\r\n")
    assert b"request_too_large" in announced
    assert guarded.post("/tokenize", **small).status_code == 200


HEAD = (
    b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer first-key\r\n"
    b"Content-Type: application/json\r\n"
)


@pytest.mark.slow
def test_a_body_that_comes_too_slowly_is_given_up(guarded: Running) -> None:
    began = time.monotonic()
    found, _ = exchange(guarded, HEAD + b"Content-Length: 1000\r\n\r\n{", *[b" "] * 30, pause=0.05)
    assert b" 408 " in found.splitlines()[0]
    assert time.monotonic() - began < 4
    assert b"body_timeout" in found


def test_a_head_that_comes_too_slowly_is_given_up(monkeypatch: pytest.MonkeyPatch, live: Running) -> None:
    monkeypatch.setattr(connections, "KEEP_ALIVE", 0.3)
    began = time.monotonic()
    slowly = [b"GET /health HTTP/1.1\r\n", *[b"X-A: b\r\n"] * 50]
    assert exchange(live, *slowly, pause=0.05) == (b"", True)
    assert time.monotonic() - began < 3
    assert live.client.get("/health").status_code == 200


@pytest.mark.parametrize("host", ["localhost", "localhost:1234", "[::1]:1234", "127.0.0.1", "LocalHost:80"])
def test_this_machines_names_are_answered(live: Running, guarded: Running, host: str) -> None:
    for running in (live, guarded):
        assert running.client.get("/health", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["attacker.example", "attacker.example:8000", "localhost.attacker.example", "192.168.1.5", "0.0.0.0",
     "localhost:80@attacker.example", "[::1].attacker.example", "localhost, attacker.example", ""],
)  # fmt: skip
def test_another_name_is_refused_where_only_this_machine_can_ask(live: Running, guarded: Running, host: str) -> None:
    """A page may let its own name point to this machine, but not send another Host."""
    for running in (live, guarded):
        answer = running.client.get("/health", headers={"Host": host})
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "host_not_allowed")
        assert "--allowed-host" in answer.json()["error"]["message"]


@contextmanager
def asked(settings: ServerConfig, keys: Sequence[str] = (), **headers: str) -> Iterator[Callable[..., httpx.Response]]:
    """Ask a server that is still loading, without a socket."""
    app = make_app(Service(settings, ("tiny",)), keys)

    async def ask(method: str, path: str, json: Any = None, **more: str) -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost") as client:
            return await client.request(method, path, headers={**headers, **more}, json=json)

    yield lambda method, path, **more: asyncio.run(ask(method, path, **more))


def test_while_the_model_is_loaded_all_else_is_503() -> None:
    with asked(ServerConfig()) as ask:
        health = ask("GET", "/health")
        assert (health.status_code, health.json()) == (503, {"status": "loading"})
        for found in (ask("GET", "/v1/models"), ask("POST", "/v1/embeddings", json={"input": "a"})):
            assert (found.status_code, found.json()["error"]["code"]) == (503, "loading")
            assert 1 <= int(found.headers["Retry-After"]) <= 60
        assert ask("GET", "/metrics").status_code == 200


def test_a_name_that_is_allowed_is_answered() -> None:
    behind_a_proxy = ServerConfig(allowed_host=("models.example",))
    for keys in ((), ("secret",)):
        with asked(behind_a_proxy, keys, Authorization="Bearer secret") as ask:
            assert ask("GET", "/health", Host="Models.example:443").status_code == 503
            assert ask("GET", "/health", Host="localhost").status_code == 503
            assert ask("GET", "/health", Host="other.example").status_code == 403


def test_where_other_machines_can_ask_any_name_is_answered_unless_some_are_given() -> None:
    with asked(ServerConfig(host="0.0.0.0"), ["secret"], Authorization="Bearer secret") as ask:
        assert ask("GET", "/health", Host="models.example").status_code == 503
    with asked(
        ServerConfig(host="10.0.0.1", allowed_host=("a.example",)), ["secret"], Authorization="Bearer secret"
    ) as ask:
        assert [ask("GET", "/health", Host=host).status_code for host in ("a.example", "10.0.0.1:80", "b.example")] == [
            503, 503, 403,
        ]  # fmt: skip


def test_head_is_answered_as_get_without_its_body(live: Running, guarded: Running) -> None:
    for path in ("/health", "/v1/models", "/v1/models/tiny", "/metrics", "/openapi.json"):
        answer = live.client.head(path)
        assert (answer.status_code, answer.content) == (200, b""), path
        assert int(answer.headers["content-length"]) > 0
        assert answer.headers["content-type"] == live.client.get(path).headers["content-type"]
    assert live.client.head("/v1/embeddings").status_code == 405
    assert live.client.head("/v1/models/other").status_code == 404
    assert guarded.client.head("/health", headers={"Authorization": ""}).status_code == 401
    with asked(ServerConfig()) as ask:
        answer = ask("HEAD", "/health")
        assert (answer.status_code, answer.content) == (503, b"")


PREFLIGHT = {"Origin": "http://localhost:5173", "Access-Control-Request-Method": "POST"}
ALLOWED = "access-control-allow-origin"


def test_no_page_of_another_origin_can_read_an_answer_unless_it_was_named() -> None:
    with asked(ServerConfig()) as ask:
        for method, path in (("OPTIONS", "/v1/chat/completions"), ("GET", "/health"), ("POST", "/tokenize")):
            answer = ask(method, path, **PREFLIGHT)
            assert answer.status_code != 200
            assert not [name for name in answer.headers if name.startswith("access-control")]


def test_a_page_of_an_origin_that_was_named_can() -> None:
    settings = ServerConfig(cors_origin=("http://localhost:5173", "https://example.com"))
    with asked(settings, ["secret"]) as ask:
        before = ask(
            "OPTIONS", "/v1/chat/completions", **PREFLIGHT,
            **{"Access-Control-Request-Headers": "authorization,content-type,x-stainless-os"},
        )  # fmt: skip
        assert (before.status_code, before.headers[ALLOWED]) == (200, "http://localhost:5173")
        assert "POST" in before.headers["access-control-allow-methods"]
        assert "x-stainless-os" in before.headers["access-control-allow-headers"]
        assert "x-request-id" in before.headers
        assert "access-control-allow-credentials" not in before.headers
        for origin in settings.cors_origin:
            # A refusal can be read too: which key is wrong, which body, which route.
            for method, path, key, status in (
                ("GET", "/health", "wrong", 401),
                ("GET", "/nothing", "secret", 404),
                ("POST", "/tokenize", "secret", 415),
                ("GET", "/health", "secret", 503),
            ):
                answer = ask(method, path, Origin=origin, Authorization=f"Bearer {key}")
                assert (answer.status_code, answer.headers[ALLOWED]) == (status, origin)
                assert "Origin" in answer.headers["vary"]
                assert "X-Request-Id" in answer.headers["access-control-expose-headers"]
        for origin in ("http://a.b", "null", "http://localhost:5174", "http://localhost"):
            assert ALLOWED not in ask("OPTIONS", "/health", **{**PREFLIGHT, "Origin": origin}).headers
            assert ALLOWED not in ask("GET", "/health", Origin=origin, Authorization="Bearer secret").headers
        # The page's own name, when it points here, is no way around the host.
        assert ask("OPTIONS", "/health", **PREFLIGHT, Host="attacker.example").status_code == 403


def test_pages_of_any_origin() -> None:
    with asked(ServerConfig(cors_origin=("*",))) as ask:
        assert ask("OPTIONS", "/tokenize", **PREFLIGHT).headers[ALLOWED] == "*"
        assert ask("GET", "/health", Origin="null").headers[ALLOWED] == "*"
        assert ask("GET", "/health", Host="attacker.example").status_code == 403


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_only_json_is_read(live: Running, kind: str) -> None:
    found = live.client.post("/tokenize", content=b'{"prompt": "a"}', headers={"Content-Type": kind})
    assert (found.status_code, found.json()["error"]["code"]) == (415, "not_json")


NO_OBJECTS = (b"", b"{", b"[" * 100_000, b'{"prompt": ' + b"9" * 5000 + b"}", b'"caf\xe9"', b"null")


@pytest.mark.parametrize("body", NO_OBJECTS)
def test_bodies_that_are_no_object(live: Running, body: bytes) -> None:
    found = live.client.post("/tokenize", content=body, headers={"Content-Type": "application/json"})
    assert found.status_code == 400, found.text
    error = found.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == (None if body in (b"", b"null") else "invalid_json")
    assert b"\xe9" not in body or error["message"] == "the body is not valid JSON: it is not UTF-8"


def test_request_ids(live: Running) -> None:
    assert live.client.get("/health", headers={"X-Request-Id": "mine-1"}).headers["x-request-id"] == "mine-1"
    assert live.client.get("/health", headers={"X-Request-Id": "no; good"}).headers["x-request-id"] != "no; good"


def test_no_text_and_no_key_is_noted(
    guarded: Running, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = logging.getLogger("gerund.server")
    monkeypatch.setattr(logger, "propagate", True)
    with caplog.at_level(logging.INFO, "gerund.server"):
        # Requests are logged after their answers, so that records of the last test may still come.
        guarded.client.get("/health", headers={"X-Request-Id": "first"})
        until(lambda: any(record.fields.get("request") == "first" for record in caplog.records))
        caplog.clear()
        guarded.post("/tokenize", prompt="confidential words")
        guarded.post("/v1/completions", prompt="confidential words", max_tokens=-1)
        guarded.client.get("/confidential?words=confidential")

        def fails(*_: object, **__: object) -> None:
            raise RuntimeError("confidential words")

        monkeypatch.setattr(type(guarded.lm.tokenizer), "decode", fails)
        found = guarded.post("/detokenize", tokens=[5])
        until(lambda: len(caplog.records) >= 5)
    assert (found.status_code, found.json()["error"]["type"]) == (500, "server_error")
    assert "confidential" not in found.text
    said = [f"{record.getMessage()} {record.__dict__.get('fields')}" for record in caplog.records]
    assert len(said) == 5
    assert any("RuntimeError" in line and "fails" in line for line in said), "where it happened is noted"
    assert not any("confidential" in line or "first-key" in line for line in said)


@pytest.mark.parametrize(
    ("error", "status", "code", "retry"),
    [
        (QueueFullError("full", 900), 429, "rate_limit_exceeded", "60"),
        (QueueFullError("full", 0), 429, "rate_limit_exceeded", "1"),
        (TooLargeError("large"), 413, "request_too_large", None),
        (DeadlineError("late"), 504, "timeout", None),
        (ClosedError("closed"), 503, "unavailable", "5"),
        (FingerprintError("other"), 409, "fingerprint_mismatch", None),
        (MissingDependencyError("pip"), 400, "not_available", None),
        (ModelError("no template"), 400, "not_with_this_model", None),
        (ResourceError("memory"), 503, "unavailable", "10"),
        (MemoryError(), 503, "unavailable", "10"),
        (TextError("empty"), 400, None, None),
        (ConfigError("n"), 400, None, None),
        (ZeroDivisionError("a text"), 500, "server_error", None),
        (ApiError("mine", 418), 418, None, None),
    ],
)
def test_errors_as_clients_get_them(error: Exception, status: int, code: str | None, retry: str | None) -> None:
    found = api_error(error, "input")
    assert (found.status, found.code, found.headers.get("Retry-After")) == (status, code, retry)
    assert "a text" not in found.message


def test_of_a_unions_errors_the_one_that_says_most_is_told() -> None:
    errors = [
        {"loc": ("body", "input", "constrained-str"), "type": "string_type", "msg": "a string"},
        {"loc": ("body", "input", "list[constrained-str]", 1), "type": "string_type", "msg": "Value error, no string"},
        {"loc": ("body", "other"), "type": "missing", "msg": "missing"},
    ]
    forms = "input is a text, a list of texts, a list of token ids, or a list of such lists"
    assert worst(errors, {"input": ["a", 5]}) == ("input.1", f"input.1: {forms}", None)
    # One that was of the right type, and is wrong all the same, says more.
    errors[0] |= {"type": "string_too_short", "msg": "Value error, too short"}
    assert worst(errors, {"input": ["a", 5]}) == ("input", "input: too short", None)


def test_bodies_that_are_held_together_have_a_bound() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("no request is to come through")

    async def ask(gate: GuardMiddleware) -> list[Any]:
        gate._held = 32 * 100
        sent: list[Any] = []

        async def receive() -> Any:
            return {"type": "http.request", "body": b"x" * 50, "more_body": True}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "GET", "path": "/", "headers": []}
        await gate(scope, receive, send)
        assert gate._held == 32 * 100, "what was read of a refused request is let go of"
        return sent

    sent = asyncio.run(ask(GuardMiddleware(app, ServerConfig(body_limit=100), [], lambda *_: None)))
    assert sent[0]["status"] == 429
    assert (b"retry-after", b"1") in sent[0]["headers"]


@pytest.mark.slow
def test_a_client_that_does_not_read_is_given_up() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def ask() -> float:
        async def receive() -> Any:
            return {"type": "http.request", "body": b""}

        async def send(message: Any) -> None:
            await asyncio.sleep(60)

        statuses: list[int] = []
        gate = GuardMiddleware(
            app, ServerConfig(timeout=0.1), [], lambda route, status, seconds: statuses.append(status)
        )
        began = time.monotonic()
        await gate({"type": "http", "method": "GET", "path": "/", "headers": []}, receive, send)
        assert statuses == [499]
        return time.monotonic() - began

    assert asyncio.run(ask()) < 5


@pytest.mark.slow
def test_a_client_that_reads_byte_by_byte_is_given_up(served_folder: Any) -> None:
    body = {"prompt": "the", "max_tokens": 400, "n": 8, "logprobs": 20, "logit_bias": {"2": -100}, "stream": True}
    content = json.dumps(body).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with Running(load(served_folder), ServerConfig(timeout=2), []) as running:
        host, port = running.url.removeprefix("http://").split(":")
        with socket.socket() as made:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            made.settimeout(5)
            made.connect((host, int(port)))
            made.sendall(head + f"Content-Length: {len(content)}\r\n\r\n".encode() + content)
            began, read = time.monotonic(), b""
            while b'route="/v1/completions"' not in running.service.metrics.text():
                read += made.recv(1)
                assert time.monotonic() - began < 15, "the server waits for it without end"
                time.sleep(0.02)
        assert b"HTTP/1.1 200 OK".startswith(read[:15])
        assert running.idle(2)
        assert running.ok("/v1/completions", prompt="a", max_tokens=2)["choices"]


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
