"""HTTP on the wire: requests that could be divided in two ways, and what a kept connection costs a request."""

import asyncio
import json
import re
import socket
from typing import Any

import pytest

from gerund.server.connections import listen
from tests.server.conftest import Running, exchange

SMUGGLED = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"


def statuses(received: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+) ", received)]


def request(*headers: bytes, version: bytes = b"1.1", body: bytes = b"", end: bytes = b"\r\n") -> bytes:
    listed = [b"Host: localhost", b"Content-Type: application/json", *headers]
    return end.join([b"POST /tokenize HTTP/" + version, *listed, b"", b""]) + body


CHUNKED = b'f\r\n{"prompt": "a"}\r\n0\r\n\r\n'
BAD = {
    "both lengths": request(b"Content-Length: 25", b"Transfer-Encoding: chunked", body=CHUNKED),
    "both lengths, the other way round": request(b"Transfer-Encoding: chunked", b"Content-Length: 4", body=CHUNKED),
    "a length and an unknown coding": request(b"Content-Length: 4", b"Transfer-Encoding: xchunked", body=CHUNKED),
    "two codings": request(b"Transfer-Encoding: chunked", b"Transfer-Encoding: identity", body=CHUNKED),
    "a coding around the chunks": request(b"Transfer-Encoding: gzip, chunked", body=CHUNKED),
    "chunks in HTTP/1.0": request(b"Transfer-Encoding: chunked", version=b"1.0", body=CHUNKED),
    "two differing lengths": request(b"Content-Length: 15", b"Content-Length: 16", body=b'{"prompt": "a"} '),
    "two differing lengths in one header": request(b"Content-Length: 15, 16", body=b'{"prompt": "a"} '),
    "an absurd length": request(b"Content-Length: 99999999999999999999999999", body=b'{"prompt": "a"}'),
    "a length with a sign": request(b"Content-Length: +15", body=b'{"prompt": "a"}'),
    "a header that goes on in the next line": request(b"X-A: b\r\n Content-Length: 3", body=b"abc"),
    "a folded coding": request(b"Transfer-Encoding:\r\n chunked", b"Content-Length: 25", body=CHUNKED),
    "lines that end with LF": request(b"Content-Length: 15", body=b'{"prompt": "a"}', end=b"\n"),
    "one header that ends with LF": request(b"X-A: b\nContent-Length: 15", body=b'{"prompt": "a"}'),
    "a lone carriage return": request(b"X-A: b\rContent-Length: 15", body=b'{"prompt": "a"}'),
    "a space before the colon": request(b"Content-Length : 15", body=b'{"prompt": "a"}'),
    "a space before the header": b"GET /health HTTP/1.1\r\n Host: localhost\r\n\r\n",
    "a zero byte in a header": request(b"X-A: b\0c", b"Content-Length: 0"),
    "two hosts": b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n",
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "a later version": b"GET /health HTTP/2.0\r\nHost: localhost\r\n\r\n",
    "a chunk's size with a sign": request(b"Transfer-Encoding: chunked", body=b'+f\r\n{"prompt": "a"}\r\n0\r\n\r\n'),
    "a chunk's size with 0x": request(b"Transfer-Encoding: chunked", body=b'0xf\r\n{"prompt": "a"}\r\n0\r\n\r\n'),
    "a chunk that ends with LF": request(b"Transfer-Encoding: chunked", body=b'f\r\n{"prompt": "a"}\n0\r\n\r\n'),
    "a chunk longer than its size": request(b"Transfer-Encoding: chunked", body=b'e\r\n{"prompt": "a"}\r\n0\r\n\r\n'),
    "no chunk": request(b"Transfer-Encoding: chunked", body=b"no length\r\n"),
    "no HTTP": b"no such thing\r\n\r\n",
    "bytes of TLS": b"\x16\x03\x01\x02\x00\r\n\r\n",
}


@pytest.mark.parametrize("sent", BAD.values(), ids=BAD)
def test_a_request_that_can_be_divided_in_two_ways_is_refused_and_the_connection_closed(
    live: Running, sent: bytes
) -> None:
    received, closed = exchange(live, sent + SMUGGLED)
    assert statuses(received) == [400], "it is refused, and what follows on the connection is not answered"
    head, _, content = received.partition(b"\r\n\r\n")
    for header in (b"connection: close", b"content-type: application/json", b"x-request-id: "):
        assert b"\r\n" + header in head.lower()
    error = json.loads(content)["error"]
    assert (set(error), error["code"]) == ({"message", "type", "param", "code"}, "invalid_http")
    assert closed
    if sent == BAD["both lengths"]:
        assert "gives its length by Content-Length or by Transfer-Encoding, not by both" in error["message"]


@pytest.mark.slow
def test_such_a_request_is_refused_in_whatever_pieces_it_comes(live: Running) -> None:
    both = BAD["both lengths"]
    for sent in (BAD["one header that ends with LF"], BAD["a header that goes on in the next line"], both):
        for cut in (20, sent.index(b"X-A" if b"X-A" in sent else b"chunked") + 7, len(sent) - 30):
            received, closed = exchange(live, sent[:cut], sent[cut:] + SMUGGLED)
            assert (statuses(received), closed) == ([400], True), (cut, received)
    good = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    received, closed = exchange(live, good + both + SMUGGLED)
    assert statuses(received) == [200, 400]
    assert closed


GOOD = {
    "two equal lengths": request(b"Content-Length: 15", b"Content-Length: 15", body=b'{"prompt": "a"}'),
    "chunks": request(b"Transfer-Encoding: Chunked", body=CHUNKED),
    "chunks with an extension and a trailer": request(
        b"Transfer-Encoding: chunked", body=b'f;a="b"\r\n{"prompt": "a"}\r\n0\r\nContent-Length: 3\r\n\r\n'
    ),
    "line ends in a body": request(b"Content-Length: 17", body=b'{"prompt":\n "a"\r}'),
}


@pytest.mark.parametrize("sent", GOOD.values(), ids=GOOD)
def test_what_is_well_formed_is_answered_and_the_connection_goes_on(live: Running, sent: bytes) -> None:
    last = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    received, closed = exchange(live, sent + sent + last)
    assert statuses(received) == [200, 200, 200], received
    assert closed


@pytest.mark.slow
def test_a_body_that_breaks_off_after_its_request_was_refused_ends_quietly(
    live: Running, caplog: pytest.LogCaptureFixture
) -> None:
    head = (
        b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: text/plain\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    received, closed = exchange(live, head, b"no length\r\n")
    assert (statuses(received), closed) == ([415], True)
    assert "Fatal error" not in caplog.text


# ------------------------------------------------------------------------------------------------- what a request costs


def test_what_is_accepted_sends_at_once() -> None:
    """asyncio sets TCP_NODELAY where the socket names its protocol."""
    with listen("127.0.0.1", 0) as made:
        assert made.proto == socket.IPPROTO_TCP
        accepted: list[Any] = []

        async def ask() -> None:
            class Taker(asyncio.Protocol):
                def connection_made(self, transport: Any) -> None:
                    accepted.append(
                        transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
                    )
                    transport.close()

            server = await asyncio.get_running_loop().create_server(Taker, sock=made)
            _, writer = await asyncio.open_connection(*made.getsockname())
            while not accepted:
                await asyncio.sleep(0.01)
            writer.close()
            server.close()

        asyncio.run(ask())
    assert accepted[0] != 0
