"""The FastAPI application: checks before parsing, routes and exception handlers.

Host, API key, content type and body size are checked first. Bodies are read completely there, so chunked bodies, which
declare no length, are bounded as well, and a client that sends one byte per second is disconnected.
"""

import asyncio
import base64
import hmac
import json
import random
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gerund.errors import GerundError, is_panic
from gerund.server.bodies import worst
from gerund.server.config import FINGERPRINT_HEADER, ServerConfig, host_in, is_loopback
from gerund.server.errors import ERRORS, GONE, ApiError, ClientGoneError, api_error, error_body
from gerund.server.logs import note, note_defect
from gerund.server.routes import embeddings, generation, info, ollama, responses
from gerund.server.service import Service
from gerund.version import __version__

_ID = re.compile(rb"[A-Za-z0-9_-]{1,64}")
# For request ids, which are not secret.
_IDS = random.Random()
# Size of all bodies in memory, in multiples of the largest one.
_BODIES = 32


class GuardMiddleware:
    """Checks, logs and counts every request; ``done`` takes its route, status and seconds."""

    def __init__(
        self, app: ASGIApp, settings: ServerConfig, keys: Sequence[str], done: Callable[[str, int, float], None]
    ) -> None:
        self.app, self.settings, self._done = app, settings, done
        self._keys = [key.encode("ascii") for key in keys]
        self._held = 0  # bytes of bodies in memory
        self._inner: ASGIApp = self._guarded
        if settings.cors_origin:
            # Around the checks as well: else a page could not read an error. A preflight request (OPTIONS) has no key.
            self._inner = CORSMiddleware(
                self._guarded,
                allow_origins=settings.cors_origin,
                allow_methods=("GET", "HEAD", "POST"),
                allow_headers=("*",),
                expose_headers=("X-Request-Id", FINGERPRINT_HEADER, "Retry-After"),
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        headers = dict(scope["headers"])
        sent_id = headers.get(b"x-request-id", b"")
        request_id = sent_id.decode() if _ID.fullmatch(sent_id) else f"{_IDS.getrandbits(128):032x}"
        method = scope["method"]
        answer = _Answer(send, request_id, self.settings.timeout, has_body=method != "HEAD")
        if method == "HEAD":  # the answer to GET, without its body
            scope = {**scope, "method": "GET"}
        began = time.perf_counter()
        try:
            self._check_host(headers)
            await self._inner(scope, receive, answer)
        except ClientGoneError:
            answer.status = GONE
        except ApiError as error:
            await answer.send_error(error, scope["path"])
        except Exception as error:
            if answer.is_gone:  # a handler may have replaced the `ClientGoneError`
                answer.status = GONE
            else:
                note_defect(error, request=request_id)
                await answer.send_error(api_error(error), scope["path"])
        finally:
            route = getattr(scope.get("route"), "path", "(none)")
            seconds = time.perf_counter() - began
            self._done(route, answer.status, seconds)
            note(
                "request",
                method=method if method.isalpha() else "?",
                route=route,
                status=answer.status,
                ms=round(seconds * 1000),
                request=request_id,
            )

    def _check_host(self, headers: dict[bytes, bytes]) -> None:
        """Reject a page whose host name was made to point to this machine (DNS rebinding): it sends that name."""
        settings = self.settings
        if not settings.is_local and not settings.allowed_host:
            return
        name = host_in(headers.get(b"host", b"localhost").decode("latin-1"))
        if name is None or not (is_loopback(name) or name in (settings.host.lower(), *settings.allowed_host)):
            raise ApiError(
                "this server does not answer to the host name of this request; --allowed-host adds one", 403,
                code="host_not_allowed",
            )  # fmt: skip

    async def _guarded(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on if its key and its body are valid."""
        headers = dict(scope["headers"])
        held = [0]
        try:
            try:
                self._check_headers(scope, headers)
                body = await self._body(headers, receive, held)
            except ClientGoneError:
                raise
            except ApiError as error:
                await _send_error(send, error, scope["path"])
                return
            await self.app(scope, replayed(body, receive), send)
        finally:
            self._held -= held[0]

    def _check_headers(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        if self._keys:
            key = _key(headers)
            # Compared with every key, so that the time doesn't show which one was nearly right.
            matches = [hmac.compare_digest(key, known) for known in self._keys]
            if not any(matches):
                raise ApiError(
                    "Incorrect API key: send the header 'Authorization: Bearer KEY'", 401, code="invalid_api_key"
                )
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if scope["method"] == "POST" and not (kind == b"application/json" or kind.endswith(b"+json")):
            raise ApiError("send JSON, with the header 'Content-Type: application/json'", 415, code="not_json")

    async def _body(self, headers: dict[bytes, bytes], receive: Receive, held: list[int]) -> bytes:
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length[:20]) > self.settings.body_limit:
            raise self._too_large()
        try:
            async with asyncio.timeout(self.settings.body_timeout):
                return await self._read(receive, held)
        except TimeoutError:
            raise ApiError(
                f"the body did not arrive within {self.settings.body_timeout:g} s", 408, code="body_timeout"
            ) from None

    async def _read(self, receive: Receive, held: list[int]) -> bytes:
        parts: list[bytes] = []
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            part = message.get("body", b"")
            parts.append(part)
            held[0] += len(part)
            self._held += len(part)
            if held[0] > self.settings.body_limit:
                raise self._too_large()
            if self._held > _BODIES * self.settings.body_limit:
                raise ApiError("too many large requests at a time", 429, code="rate_limit_exceeded", retry_after=1)
            if not message.get("more_body", False):
                return b"".join(parts)

    def _too_large(self) -> ApiError:
        return ApiError(f"the body is larger than {self.settings.body_limit} bytes", 413, code="request_too_large")


def replayed(body: bytes, receive: Receive) -> Receive:
    """Return what receives a body that was read already, and then what follows it."""
    unread = [body]

    async def replay() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        return await receive()

    return replay


class PanicMiddleware:
    """Turns a ``BaseException`` that is a panic of a library in Rust into an error that the handlers answer."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        try:
            await self.app(scope, receive, send)
        except BaseException as error:
            if not is_panic(error):
                raise
            raise RuntimeError("a library panicked") from error


class _Answer:
    """Sends an answer, remembers its status, and gives up on a client that does not read it."""

    def __init__(self, send: Send, request_id: str, timeout: float, *, has_body: bool = True) -> None:
        self._send, self._id, self._timeout, self._has_body = send, request_id.encode(), timeout, has_body
        self.status = 500
        self.has_begun = self.is_gone = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.has_begun, self.status = True, message["status"]
            message["headers"] = [*message.get("headers", ()), (b"x-request-id", self._id)]
        elif not self._has_body:
            message = {**message, "body": b""}
        try:
            async with asyncio.timeout(self._timeout):
                await self._send(message)
        except TimeoutError:
            self.is_gone = True
            raise ClientGoneError from None

    async def send_error(self, error: ApiError, path: str) -> None:
        """Send an error, if nothing was sent yet."""
        if not self.has_begun:
            await _send_error(self, error, path)


async def _send_error(send: Send, error: ApiError, path: str) -> None:
    content = json.dumps(error_body(error, path)).encode()
    headers = {**error.headers, "Content-Type": "application/json", "Content-Length": str(len(content))}
    listed = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    if error.status == 401:
        # Browsers know this scheme, and ask for a password; they read one scheme per header.
        listed.append((b"www-authenticate", b'Basic realm="gerund: any name, the key as the password"'))
    await send({"type": "http.response.start", "status": error.status, "headers": listed})
    await send({"type": "http.response.body", "body": content})


def _key(headers: dict[bytes, bytes]) -> bytes:
    """Return the API key of a request; empty if it has none.

    A browser asks its user for the key once and sends it as the password of HTTP Basic authentication, even in requests
    that another site's page makes; these do not count.

    >>> _key({b"authorization": b"Bearer secret"}), _key({b"authorization": b"Basic YW55OnNlY3JldA=="})
    (b'secret', b'secret')
    """
    kind, _, credentials = headers.get(b"authorization", b"").partition(b" ")
    if kind.lower() == b"bearer":
        return credentials.strip()
    is_same_site = headers.get(b"sec-fetch-site", b"none") in (b"none", b"same-origin")
    if kind.lower() != b"basic" or not is_same_site:
        return b""
    try:
        return base64.b64decode(credentials.strip(), validate=True).partition(b":")[2]
    except ValueError:
        return b""


_CODES = {404: "not_found", 405: "method_not_allowed"}
# Characters of a path that a message repeats.
_LONGEST_PATH = 100


def make_app(service: Service, keys: Sequence[str] = ()) -> GuardMiddleware:
    """Return the application for a service, whose model may still be loading; no ``keys`` let every client in."""
    app = FastAPI(title="gerund", version=__version__, responses=ERRORS, docs_url=None, redoc_url=None)
    app.state.service = service
    for routes in (info, generation, embeddings, ollama, responses):
        app.include_router(routes.router)
    if service.settings.mcp:
        from gerund.server.routes.mcp import route  # which needs the protocol's SDK

        app.router.routes.append(route(service))
    described = app.openapi

    def openapi() -> dict[str, Any]:
        description = described()
        for path in description["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)  # FastAPI's default, which is never sent
        return description

    app.openapi = openapi  # type: ignore[method-assign]
    app.add_middleware(PanicMiddleware)
    # Starlette raises an `Exception` again after the answer, and the middleware logs it.
    for kind in (ApiError, GerundError, Exception):
        app.add_exception_handler(kind, _on_error)
    app.add_exception_handler(RequestValidationError, _on_invalid_body)
    app.add_exception_handler(HTTPException, _on_http_error)
    return GuardMiddleware(app, service.settings, keys, service.metrics.done)


async def _on_error(request: Request, error: Exception) -> Response:
    answer = api_error(error)
    return Response(status_code=GONE) if answer.status == GONE else _response(request, answer)


async def _on_invalid_body(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    if any(item["type"] == "json_invalid" for item in error.errors()):
        return _response(request, ApiError("the body is not valid JSON", code="invalid_json"))
    param, message, code = worst(list(error.errors()), error.body)
    if not isinstance(error.body, dict):
        message = 'the body is a JSON object, such as {"input": "a text"}'
    return _response(request, ApiError(message, param=param or None, code=code))


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 400 and isinstance(error.__cause__, ValueError | RecursionError):
        why = ": it is not UTF-8" if isinstance(error.__cause__, UnicodeDecodeError) else ""
        return _response(request, ApiError(f"the body is not valid JSON{why}", code="invalid_json"))
    status = 400 if error.status_code == 422 else error.status_code
    message, path = error.detail, request.url.path[:_LONGEST_PATH]
    if status == 404 and message == "Not Found":
        message = f"there is no route {path}; this server prints its routes when it starts"
        if path == "/mcp":
            message = f"there is no route {path} without the server's options --mcp and --index"
    elif status == 405 and message == "Method Not Allowed":
        message = f"{path} takes {(error.headers or {}).get('Allow', 'another method')}, not {request.method}"
    response = _response(request, ApiError(message, status, code=_CODES.get(status)))
    response.headers.update(error.headers or {})
    return response


def _response(request: Request, error: ApiError) -> JSONResponse:
    return JSONResponse(error_body(error, request.url.path), error.status, headers=error.headers)
