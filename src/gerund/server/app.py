"""The FastAPI application: routes, middleware and exception handlers."""

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from gerund.errors import GerundError
from gerund.server.errors import ERRORS, GONE, ApiError, api_error, error_body
from gerund.server.middleware import GuardMiddleware, PanicMiddleware
from gerund.server.routes import embeddings, generation, info, ollama, responses
from gerund.server.schemas.base import worst
from gerund.server.service import Service
from gerund.version import __version__

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
