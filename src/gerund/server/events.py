"""Server-sent events: a text on its way, one JSON object an event, and ``[DONE]``.

Knows: the form of events, how a stream ends badly. Does not know: what is in them.
"""

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gerund.server.errors import ClientGoneError, api_error
from gerund.server.logs import note_defect

DONE = b"data: [DONE]\n\n"


def event(content: Any) -> bytes:
    r"""Return one event.

    >>> event({"text": "a\nb"})
    b'data: {"text": "a\\nb"}\n\n'
    """
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n".encode("utf-8", "replace")


class EventStream(Response):
    """Events as they come. An error in the midst of them is an event too, since the status was sent long ago.

    Args:
        events: what is sent, without ``[DONE]``.
        close: called when nothing is sent any more, however it ended.
        headers: further headers.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncIterator[Any], close: Callable[[], None], headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no", **(headers or {})})
        del self.headers["content-length"]
        self._events, self._close = events, close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all of it."""
        del receive
        started: dict[str, Any] = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        try:
            await send(started)
            async for content in self._events:
                await send({"type": "http.response.body", "body": event(content), "more_body": True})
            await send({"type": "http.response.body", "body": DONE, "more_body": False})
        except ClientGoneError:
            return  # nobody reads the end; the connection is closed behind what was sent
        except Exception as error:
            failed = api_error(error)
            if failed.status >= 500 and failed.code == "server_error":
                note_defect(error, route=scope["path"])
            await send({"type": "http.response.body", "body": event(failed.body), "more_body": False})
        finally:
            self._close()
