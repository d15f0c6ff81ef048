"""The FastAPI application: routes, and every error in one form."""

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from gerund.errors import GerundError
from gerund.server.errors import ERRORS, GONE, ApiError, api_error
from gerund.server.middleware import Gate, NoPanics
from gerund.server.routes import embeddings, generation, info
from gerund.server.schemas.base import worst
from gerund.server.service import Service
from gerund.version import __version__

_CODES = {404: "not_found", 405: "method_not_allowed"}
# Characters of a path that a message repeats.
_LONGEST_PATH = 100


def make_app(service: Service, keys: Sequence[str] = ()) -> Gate:
    """Return the application for one process's service.

    Args:
        service: the model; it may still be loading.
        keys: who may ask; none for everybody on this machine.
    """
    app = FastAPI(title="gerund", version=__version__, responses=ERRORS, docs_url=None, redoc_url=None)
    app.state.service = service
    for part in (info, generation, embeddings):
        app.include_router(part.router)
    # What FastAPI would declare by itself is never sent.
    usual = app.openapi

    def openapi() -> dict[str, Any]:
        found = usual()
        for path in found["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        return found

    app.openapi = openapi  # type: ignore[method-assign]
    app.add_middleware(NoPanics)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(GerundError, _api_error)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _any_error)
    return Gate(app, service.settings, keys, service.metrics.done)


async def _api_error(_request: Request, error: Exception) -> Response:
    found = api_error(error)
    return Response(status_code=GONE) if found.status == GONE else _shown(found)


async def _invalid(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    if any(one["type"] == "json_invalid" for one in error.errors()):
        return _shown(ApiError("the body is not valid JSON", code="invalid_json"))
    place, message, code = worst(list(error.errors()), error.body)
    if not isinstance(error.body, dict):
        message = 'the body is a JSON object, such as {"input": "a text"}'
    return _shown(ApiError(message, param=place or None, code=code))


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 400 and isinstance(error.__cause__, ValueError | RecursionError):
        why = ": it is not UTF-8" if isinstance(error.__cause__, UnicodeDecodeError) else ""
        return _shown(ApiError(f"the body is not valid JSON{why}", code="invalid_json"))
    status = 400 if error.status_code == 422 else error.status_code
    said = error.detail
    if status == 404 and said == "Not Found":
        said = f"there is no route {request.url.path[:_LONGEST_PATH]}; this server prints its routes when it starts"
    elif status == 405 and said == "Method Not Allowed":
        allowed = (error.headers or {}).get("Allow", "another method")
        said = f"{request.url.path[:_LONGEST_PATH]} takes {allowed}, not {request.method}"
    shown = _shown(ApiError(said, status, code=_CODES.get(status)))
    shown.headers.update(error.headers or {})
    return shown


async def _any_error(_request: Request, error: Exception) -> Response:
    # It is raised again behind this answer, and the gate notes it.
    return _shown(api_error(error))


def _shown(error: ApiError) -> JSONResponse:
    return JSONResponse(error.body, error.status, headers=error.headers)
