"""Streams end the work behind them when they are closed, wherever that is done."""

import asyncio
import threading

from gerund.inference.generate.sequence import Piece
from gerund.inference.generate.streams import AsyncTextStream, TextStream


def endless(emit, stop):
    """Hand out pieces until somebody stops it."""
    while not stop.wait(0.001):
        emit(Piece(0, "a"))


def running():
    return "gerund-stream" in {thread.name for thread in threading.enumerate()}


def test_leaving_a_with_block_stops_the_work():
    with TextStream(endless) as stream:
        assert next(stream) == "a"
        assert running()
    assert not running()
    assert list(stream) == []


def test_another_thread_may_close_what_is_read():
    stream, texts = TextStream(endless), []
    reader = threading.Thread(target=lambda: texts.extend(stream))
    reader.start()
    while not running():
        pass
    stream.close()
    reader.join(10)
    assert not reader.is_alive()
    assert not running()


def test_a_closed_stream_never_begins():
    stream = TextStream(endless)
    stream.close()
    assert list(stream) == []


def test_leaving_an_async_with_block_stops_the_work():
    async def read_one():
        async with AsyncTextStream(endless) as stream:
            return await anext(stream)

    assert asyncio.run(read_one()) == "a"
    for thread in threading.enumerate():
        if thread.name == "gerund-stream":
            thread.join(10)
    assert not running()
