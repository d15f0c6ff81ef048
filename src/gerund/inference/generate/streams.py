"""Stream text from a background thread, for ``for`` and ``async for`` loops.

Closing a stream, leaving its ``with`` block or dropping it stops the model within one token.
"""

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from typing import Any, Self, TypeVar

from gerund.inference.generate.sequence import Emit, Piece
from gerund.inference.generate.transformers_loop import Cancelled
from gerund.types import Generation

# Work that hands out pieces until it is done or the event is set.
Work = Callable[[Emit, threading.Event], None]
Result = TypeVar("Result")

_END = None


class TextStream(Iterator[str]):
    """A text in pieces, as they come.

    >>> with gerund.load().stream("The old man", 200) as stream:
    ...     first = next(stream)  # and nothing of the rest is written

    Attributes:
        result: the whole continuation, once the last piece has come.
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
        """Yield what comes with log-probabilities and the results, in the place of texts alone."""
        for piece in self._pieces:
            self.result = piece.result or self.result
            yield piece

    def close(self) -> None:
        """Stop the model, and wait until it has stopped; from another thread than the one that reads, do not wait."""
        self._stop.set()
        # Where another thread waits for the next piece, that one finds the end.
        with suppress(ValueError):
            self._pieces.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def _read(work: Work, stop: threading.Event) -> Any:
    """Yield what the work hands out, which begins when the first piece is asked for."""
    found: queue.Queue[Piece | BaseException | None] = queue.Queue()
    if stop.is_set():
        return
    thread = _start(work, found.put, stop)
    try:
        while (one := found.get()) is not _END:
            if isinstance(one, BaseException):
                raise one
            yield one
    finally:
        stop.set()
        thread.join()


class AsyncTextStream(AsyncIterator[str]):
    """A text in pieces, for ``async for``; the other of ``TextStream``.

    Attributes:
        result: the whole continuation, once the last piece has come.
    """

    def __init__(self, work: Work) -> None:
        self.result: Generation | None = None
        self._work = work
        self._stop = threading.Event()
        self._found: asyncio.Queue[Piece | BaseException | None] | None = None
        self._is_over = False

    async def __anext__(self) -> str:
        while (piece := await self._piece()) is not None:
            if piece.text:
                return piece.text
        raise StopAsyncIteration

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yield what comes with log-probabilities and the results, in the place of texts alone."""
        while (piece := await self._piece()) is not None:
            yield piece

    async def _piece(self) -> Piece | None:
        """Return what comes next; None where nothing does."""
        if self._is_over:
            return None
        try:
            one = await self._next()
            if isinstance(one, BaseException):
                raise one
        except BaseException:
            await self.aclose()
            raise
        if one is _END:
            self._is_over = True
        else:
            self.result = one.result or self.result
        return one

    async def _next(self) -> Piece | BaseException | None:
        if self._found is None:
            self._found = asyncio.Queue()
            loop, found = asyncio.get_running_loop(), self._found
            _start(self._work, lambda one: _hand_over(loop, found, one), self._stop)
        return await self._found.get()

    async def aclose(self) -> None:
        """Stop the model, which ends within a token."""
        self._is_over = True
        self._stop.set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        self._stop.set()


def _hand_over(loop: asyncio.AbstractEventLoop, found: "asyncio.Queue[Any]", one: Any) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(found.put_nowait, one)


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
    """Await work that runs in a thread; where the task is cancelled, it ends within a token."""
    stop = threading.Event()
    try:
        return await asyncio.to_thread(work, stop)
    except asyncio.CancelledError:
        stop.set()
        raise
