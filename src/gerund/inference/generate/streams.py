"""Stream text from a background thread, for ``for`` and ``async for`` loops.

Closing a stream, leaving its ``with`` block or dropping it stops the model within one token.
"""

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from typing import Any, Self, TypeVar

from gerund.inference.generate.sequence import Cancelled, Emit, Piece
from gerund.types import Generation

# Emits pieces until it is done or the event is set.
Work = Callable[[Emit, threading.Event], None]
Result = TypeVar("Result")

_END = None


class TextStream(Iterator[str]):
    """The pieces of a text while it is generated.

    >>> with gerund.load().stream("The old man", 200) as stream:
    ...     first = next(stream)  # and the rest is not generated

    Attributes:
        result: the complete continuation, after the last piece.
    """

    def __init__(self, work: Work) -> None:
        self.result: Generation | None = None
        self._stop = threading.Event()
        self._pieces = _read(work, self._stop)

    def __next__(self) -> str:
        for piece in self._pieces:
            if piece.result is not None:
                self.result = piece.result
            if piece.text:
                return piece.text
        raise StopIteration

    def pieces(self) -> Iterator[Piece]:
        """Yield pieces with log-probabilities and results instead of strings."""
        for piece in self._pieces:
            self.result = piece.result or self.result
            yield piece

    def close(self) -> None:
        """Stop the model, and wait until it has stopped; a thread that does not read the stream does not wait."""
        self._stop.set()
        # Another thread that waits for the next piece gets the end of the stream.
        with suppress(ValueError):
            self._pieces.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def _read(work: Work, stop: threading.Event) -> Any:
    """Yield the pieces of work that starts when the first one is requested."""
    pieces: queue.Queue[Piece | BaseException | None] = queue.Queue()
    if stop.is_set():
        return
    thread = _start(work, pieces.put, stop)
    try:
        while (item := pieces.get()) is not _END:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stop.set()
        thread.join()


class AsyncTextStream(AsyncIterator[str]):
    """The pieces of a text while it is generated, for ``async for``.

    Attributes:
        result: the complete continuation, after the last piece.
    """

    def __init__(self, work: Work) -> None:
        self.result: Generation | None = None
        self._work = work
        self._stop = threading.Event()
        self._pieces: asyncio.Queue[Piece | BaseException | None] | None = None
        self._is_over = False

    async def __anext__(self) -> str:
        while (piece := await self._piece()) is not None:
            if piece.text:
                return piece.text
        raise StopAsyncIteration

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yield pieces with log-probabilities and results instead of strings."""
        while (piece := await self._piece()) is not None:
            yield piece

    async def _piece(self) -> Piece | None:
        """Return the next piece; None at the end."""
        if self._is_over:
            return None
        try:
            item = await self._next()
            if isinstance(item, BaseException):
                raise item
        except BaseException:
            await self.aclose()
            raise
        if item is _END:
            self._is_over = True
        else:
            self.result = item.result or self.result
        return item

    async def _next(self) -> Piece | BaseException | None:
        if self._pieces is None:
            self._pieces = asyncio.Queue()
            loop, pieces = asyncio.get_running_loop(), self._pieces
            _start(self._work, lambda item: call_soon(loop, pieces.put_nowait, item), self._stop)
        return await self._pieces.get()

    async def aclose(self) -> None:
        """Stop the model within one token."""
        self._is_over = True
        self._stop.set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        self._stop.set()


def call_soon(loop: asyncio.AbstractEventLoop, function: Callable[..., Any], *arguments: Any) -> None:
    """Call a function in an event loop, from any thread, unless the loop has ended."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(function, *arguments)


def _start(work: Work, put: Callable[[Any], None], stop: threading.Event) -> threading.Thread:
    def run() -> None:
        try:
            work(put, stop)
        except Cancelled:
            pass
        except BaseException as error:
            put(error)
        finally:
            put(_END)

    thread = threading.Thread(target=run, name="gerund-stream", daemon=True)
    thread.start()
    return thread


async def in_thread(work: Callable[[threading.Event], Result]) -> Result:
    """Await work in a thread; cancelling the task sets its event and so stops it within one token."""
    stop = threading.Event()
    try:
        return await asyncio.to_thread(work, stop)
    except asyncio.CancelledError:
        stop.set()
        raise
