"""What all routes have in common: the service behind a request, the model's name, the errors that they declare.

Knows: FastAPI. Does not know: what any route does.
"""

from typing import Annotated, Any

from fastapi import Depends, Request

from gerund.server.service import Service

FINGERPRINT_HEADER = "X-Gerund-Fingerprint"

_ERROR = {
    "content": {
        "application/json": {
            "schema": {
                "type": "object",
                "required": ["error"],
                "properties": {
                    "error": {
                        "type": "object",
                        "required": ["message", "type", "param", "code"],
                        "properties": {
                            "message": {"type": "string"},
                            "type": {"type": "string"},
                            "param": {"type": ["string", "null"]},
                            "code": {"type": ["string", "null"]},
                        },
                    }
                },
            }
        }
    }
}
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
    status: {"description": said, **_ERROR} for status, said in _STATUSES.items()
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


async def service_of(request: Request) -> Service:
    """Return the service behind a request; async, since FastAPI would send a plain function to a thread."""
    found: Service = request.app.state.service
    return found


Served = Annotated[Service, Depends(service_of)]
