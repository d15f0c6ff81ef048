"""Listening sockets, and strict parsing of HTTP/1.1.

h11 parses. It tolerates what RFC 9112 allows a server to tolerate and what request smuggling is made of: a request that
gives its length twice, in two ways, and line ends that a proxy may read otherwise. Here such a request is answered with
400, and the connection is closed.
"""

import asyncio
import errno
import json
import re
import socket
import uuid
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from gerund.errors import ConfigError
from gerund.server.errors import ApiError
from gerund.server.logs import note

KEEP_ALIVE = 30
"""Seconds that a connection may wait for its next request, and that the head of a request may take."""

_END_OF_HEAD = re.compile(rb"\n\r?\n")
# A line feed or a carriage return without the other, and a header that continues in the next line.
_BAD_LINE = re.compile(rb"(?<!\r)\n|\r(?!\n|\Z)|\n[ \t]")


class StrictConnection(h11.Connection):
    r"""A server's connection that rejects requests which a proxy may split differently (request smuggling).

    ``reason`` is why the last request was rejected, if it was not h11 that rejected it.

    >>> connection = StrictConnection(h11.SERVER)
    >>> head = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n"
    >>> connection.receive_data(head)
    >>> connection.next_event()
    Traceback (most recent call last):
    h11._util.RemoteProtocolError: a request gives its length by Content-Length or by Transfer-Encoding, not by both
    """

    reason: str | None = None

    def next_event(self) -> Any:
        """Return the next event, as h11 does."""
        if self.their_state is h11.IDLE:
            self._refuse(_wrong_lines(self.trailing_data[0]))
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._refuse(_wrong_framing(event))
        return event

    def _refuse(self, reason: str | None) -> None:
        if reason is not None:
            self.reason = reason
            raise h11.RemoteProtocolError(reason)


def _wrong_lines(received: bytes) -> str | None:
    end = _END_OF_HEAD.search(received)
    if _BAD_LINE.search(received[: end.end()] if end else received):
        return "each header of a request is one line, and its lines end with CR and LF"
    return None


def _wrong_framing(request: h11.Request) -> str | None:
    names = {name for name, _ in request.headers}
    if request.http_version not in (b"1.0", b"1.1"):
        return "this server speaks HTTP/1.1"
    if b"transfer-encoding" in names and b"content-length" in names:
        return "a request gives its length by Content-Length or by Transfer-Encoding, not by both"
    if b"transfer-encoding" in names and request.http_version == b"1.0":
        return "a request of HTTP/1.0 has no Transfer-Encoding"
    return None


class Protocol(H11Protocol):
    """HTTP on one connection, with a time limit for the head of a request, which uvicorn doesn't have."""

    _timer: asyncio.TimerHandle | None = None

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.conn: StrictConnection = StrictConnection(h11.SERVER)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timer for the first request's head."""
        super().connection_made(transport)
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        """Receive bytes; a complete head stops the timer, a part of a head starts it."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_timer()
        elif self._timer is None and not self.transport.is_closing():
            self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
        self._stop_timer()
        super().connection_lost(exc)

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(KEEP_ALIVE, self._on_timeout)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timeout(self) -> None:
        self._timer = None
        if (self.cycle is None or self.cycle.response_complete) and not self.transport.is_closing():
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Answer invalid HTTP with an error in the usual form; the middleware never sees it."""
        del msg  # uvicorn's message
        is_logged = self.cycle is None or self.cycle.response_complete  # else the middleware logs the request
        # If an answer has begun, as to a request that was rejected before its body came, no other can follow.
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            reason = self.conn.reason or "this is no valid request of HTTP/1.1"
            error, request_id = ApiError(reason, code="invalid_http"), uuid.uuid4().hex
            content = json.dumps(error.body).encode()
            headers = {"content-type": "application/json", "content-length": str(len(content)), "connection": "close"}
            answer = h11.Response(status_code=error.status, headers=[*headers.items(), ("x-request-id", request_id)])
            for event in (answer, h11.Data(data=content), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
            if is_logged:
                note("request", method="?", route="(none)", status=error.status, ms=0, request=request_id)
        self.transport.close()


_BACKLOG = 2048


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 is a free port."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        made = socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    except socket.gaierror as error:
        raise ConfigError(f"there is no address {host}: {error.strerror}") from error
    except (OSError, OverflowError, UnicodeError) as error:
        messages = {
            errno.EADDRINUSE: f"port {port} of {host} is in use; take another by --port, or 0 for a free one",
            errno.EACCES: f"port {port} is not allowed to you; take one from 1024 on by --port",
            errno.EADDRNOTAVAIL: f"{host} is no address of this machine; 127.0.0.1 is this machine alone",
        }
        other = f"{host}, port {port}: cannot be listened on: {getattr(error, 'strerror', None) or error}"
        raise ConfigError(messages.get(getattr(error, "errno", None) or 0, other)) from error
    # create_server makes sockets of protocol 0, and asyncio sets TCP_NODELAY only on those that name TCP. Without it,
    # the second packet of every answer waits for the client's delayed acknowledgement, some 40 ms.
    listening = socket.socket(made.family, made.type, socket.IPPROTO_TCP, fileno=made.detach())
    listening.set_inheritable(True)
    return listening


def address_of(made: socket.socket) -> str:
    """Return a socket's address as a URL."""
    host, port = made.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - what a client on this machine asks
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
