"""Errors as clients get them: a status, and OpenAI's ``{"error": {"message", "type", "param", "code"}}``.

A client's mistake is a 4xx and never a 422; what the server cannot do now is 429 or 503 with ``Retry-After``.
"""

import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

from gerund.errors import (
    ClosedError,
    DeadlineError,
    FingerprintError,
    GerundError,
    MissingDependencyError,
    ModelError,
    QueueFullError,
    ResourceError,
    TextError,
    TooLargeError,
    one_line,
)

INVALID = "invalid_request_error"
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    503: "unavailable_error",
    504: "timeout_error",
}
# How clients get an error of the library: status, code, message (None for its own), seconds before the next try.
_ANSWERS: dict[type[BaseException], tuple[int, str | None, str | None, int | None]] = {
    TooLargeError: (413, "request_too_large", None, None),
    DeadlineError: (504, "timeout", "this was not done in time; ask for less, or when fewer do", None),
    ClosedError: (503, "unavailable", "the server is ending; try again", 5),
    FingerprintError: (409, "fingerprint_mismatch", None, None),
    MissingDependencyError: (400, "not_available", None, None),
    ModelError: (400, "not_with_this_model", None, None),
    ResourceError: (503, "unavailable", None, 10),
    MemoryError: (503, "unavailable", "the server has not enough memory for it now", 10),
    GerundError: (400, None, None, None),
}
# Arguments of the library, and the fields of bodies that they come from.
_NAMES_IN_BODIES = {
    "schema": ("response_format", "structured_outputs", "guided_json"),
    "regex": ("structured_outputs", "guided_regex"),
    "choice": ("structured_outputs", "guided_choice"),
    "max_new_tokens": ("max_completion_tokens", "max_tokens", "n_predict"),
    "samples": ("best_of",),
}
# For the log: the client has disconnected, so nothing was sent.
GONE = 499


class ApiError(Exception):
    """An error as a client gets it: HTTP status, code for programs, the body's field, seconds before the next try.

    >>> ApiError("no such model", 404, code="model_not_found").body["error"]["type"]
    'not_found_error'
    """

    def __init__(
        self,
        message: object,
        status: int = 400,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        self.message = one_line(str(message))
        super().__init__(self.message)
        self.status, self.code, self.param = status, code, param
        self.retry_after = None if retry_after is None else max(1, min(60, int(retry_after)))

    @property
    def body(self) -> dict[str, Any]:
        """The JSON body."""
        kind = _TYPES.get(self.status, INVALID if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """Further headers."""
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if self.status in (408, 413):
            headers["Connection"] = "close"
        return headers


class ClientGoneError(ApiError):
    """The client has disconnected."""

    def __init__(self) -> None:
        super().__init__("the client has gone", GONE)


def unsupported(param: str, message: str) -> ApiError:
    """Return the error about a field, or a value of it, that the API has and this server has not."""
    return ApiError(message, param=param, code="not_supported")


def unknown_model(name: str, *known: str) -> ApiError:
    """Return the error for a model that isn't served."""
    return ApiError(
        f"The model {name!r} does not exist here; this server has {' and '.join(map(repr, known))}",
        404,
        code="model_not_found",
        param="model",
    )


@contextmanager
def errors_about(param: str | Callable[[Exception], str | None] | None) -> Iterator[None]:
    """Turn errors of the library into an ``ApiError`` about a field of the body, which may depend on the error."""
    try:
        yield
    except ApiError:
        raise
    except Exception as error:
        raise api_error(error, param(error) if callable(param) else param) from error


def blamed(error: BaseException, given: Collection[str]) -> str | None:
    """Return the first of a body's fields that an error of the library names; None if it names none.

    >>> blamed(ValueError("greedy ones are all the same; set n=1"), {"prompt", "n"})
    'n'
    """
    message = str(error)
    for word in [message.partition(" ")[0].strip(":`"), *re.findall(r"\b\w+(?==)|(?<=`)\w+(?=`)", message)]:
        for name in (word, *_NAMES_IN_BODIES.get(word, ())):
            if name in given:
                return name
    return None


def api_error(error: BaseException, param: str | None = None) -> ApiError:
    """Return any error as clients get it; ``param`` is the field it is about, if the error does not know better."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFullError):
        return ApiError(error, 429, code="rate_limit_exceeded", retry_after=error.retry_after)
    if isinstance(error, TextError):
        return ApiError(error, 400, code="context_length_exceeded" if error.exceeds_context else None, param=param)
    for kind, (status, code, message, retry_after) in _ANSWERS.items():
        if isinstance(error, kind):
            param = param if status < 500 else None  # above, it is not the request's fault
            return ApiError(message or error, status, code=code, retry_after=retry_after, param=param)
    return ApiError("something went wrong in the server; its log says what", 500, code="server_error")


def error_body(error: ApiError, path: str) -> dict[str, Any]:
    """Return the JSON body of an error, in the form of the API that a path belongs to.

    >>> error_body(ApiError("no such model", 404), "/api/chat")
    {'error': 'no such model'}
    """
    return {"error": error.message} if path.startswith("/api/") else error.body


# The error answers that the OpenAPI description declares for every route.


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(properties), "properties": properties}


_TEXT, _PERHAPS = {"type": "string"}, {"type": ["string", "null"]}
_SCHEMA = _object(error=_object(message=_TEXT, type=_TEXT, param=_PERHAPS, code=_PERHAPS))
_ERROR = {"content": {"application/json": {"schema": _SCHEMA}}}
_STATUSES = {
    400: "The request cannot be answered as it is.",
    401: "There is no key, or a wrong one.",
    403: "The server does not answer to the name in the Host header.",
    404: "There is no such model or route.",
    405: "The route takes another method.",
    408: "The body came too slowly.",
    413: "The request is too large, and will always be.",
    415: "The body is not declared as JSON.",
    429: "Too much waits already; Retry-After says when to try again.",
    503: "The model is being loaded, or the server ends.",
    504: "It was not done in time.",
}
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": text, **_ERROR} for status, text in _STATUSES.items()
}
STREAMS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer; with stream, its pieces as server-sent events.",
        "content": {"application/json": {}, "text/event-stream": {"schema": {"type": "string"}}},
    }
}
MISMATCH: dict[int | str, dict[str, Any]] = {
    409: {"description": "The vectors would be of another encoder than the header names.", **_ERROR}
}
