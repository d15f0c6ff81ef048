"""What one request holds of the engine; it is let go of when the answer is there, or nobody waits for it any more.

Knows: tickets, event loops, clients that go. Does not know: HTTP's content, models.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

from starlette.requests import Request

from gerund.engine.work import Ticket
from gerund.inference.generate.rows import Emit, Piece
from gerund.server.errors import ApiError, ClientGoneError

T = TypeVar("T")

# What the engine gets to say itself that a request is late.
_GRACE = 2.0


class Claim:
    """One request's tickets, while its client is there, the server runs and the time lasts.

    Args:
        request: whose client is watched.
        over: is done when the server waits no longer.
        timeout: seconds that there are.
    """

    def __init__(self, request: Request, over: "asyncio.Future[None]", timeout: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._tickets: list[Ticket[Any]] = []
        self._over = over
        self._ends = self._loop.time() + timeout + _GRACE
        self._timeout = timeout
        self._gone = asyncio.ensure_future(_gone(request))
        self._is_closed = False
        # Of a text on its way; None when it is wanted no longer.
        self._pieces: asyncio.Queue[Piece | Future[Any] | None] = asyncio.Queue()
        self._late = self._loop.call_at(self._ends, self._pieces.put_nowait, None)
        for end in (self._gone, self._over):
            end.add_done_callback(self._wake)

    @property
    def deadline(self) -> float:
        """Seconds that the engine has."""
        return max(0.001, self._ends - _GRACE - self._loop.time())

    def hold(self, ticket: Ticket[T]) -> Ticket[T]:
        """Take a ticket, from any thread; it is cancelled when the claim is closed."""
        self._tickets.append(ticket)
        if self._is_closed:
            ticket.cancel()
        return ticket

    async def run(self, work: Callable[[], T]) -> T:
        """Do what takes a while without the model, such as tokenizing, in a thread."""
        return await self._while_wanted(asyncio.to_thread(work))

    async def result(self, ticket: Ticket[T]) -> T:
        """Wait for what a ticket stands for.

        Raises:
            ClientGoneError: the client went.
            ApiError: the time is over, or the server ends.
        """
        found: asyncio.Future[T] = self._loop.create_future()
        ticket.future.add_done_callback(lambda done: _soon(self._loop, _copy, done, found))
        return await self._while_wanted(found)

    def emit(self, number: int, choices: int) -> Emit:
        """Return what takes the pieces of the texts behind prompt ``number``; it is called in the engine's thread."""

        def take(piece: Piece) -> None:
            own = Piece(number * choices + piece.index, piece.text, piece.logprobs, piece.result)
            _soon(self._loop, self._pieces.put_nowait, own)

        return take

    async def pieces(self, tickets: list[Ticket[Any]]) -> AsyncIterator[Piece]:
        """Yield the pieces of texts as they come, until all tickets are done.

        Raises:
            Exception: what one of the tickets ended with.
        """
        for ticket in tickets:
            ticket.future.add_done_callback(lambda done: _soon(self._loop, self._pieces.put_nowait, done))
        waiting = len(tickets)
        while waiting:
            # Nothing else is waited for: a task of its own for each piece takes longer than sending it.
            found = await self._pieces.get()
            if found is None:
                raise self._why_not()
            if isinstance(found, Piece):
                yield found
            else:
                waiting -= 1
                found.result()

    async def _while_wanted(self, wanted: Awaitable[T]) -> T:
        task: asyncio.Future[Any] = asyncio.ensure_future(wanted)
        left = self._ends - self._loop.time()
        try:
            ends: set[asyncio.Future[Any]] = {task, self._gone, self._over}
            await asyncio.wait(ends, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                found: T = task.result()
                return found
        finally:
            if not task.done():
                task.cancel()
        raise self._why_not()

    def _why_not(self) -> Exception:
        """Return what to raise where nobody waits any longer."""
        if self._gone.done():
            return ClientGoneError()
        if self._over.done():
            return ApiError("the server is ending; try again", 503, code="unavailable", retry_after=5)
        return ApiError(f"this was not done within {self._timeout:g} s", 504, code="timeout")

    def _wake(self, _: "asyncio.Future[None]") -> None:
        self._pieces.put_nowait(None)

    def close(self) -> None:
        """Give up whatever is not done."""
        self._is_closed = True
        self._late.cancel()
        self._over.remove_done_callback(self._wake)
        self._gone.cancel()
        for ticket in list(self._tickets):
            ticket.cancel()

    async def __aenter__(self) -> "Claim":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


async def _gone(request: Request) -> None:
    """Return when the client has gone; the body was read before."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _soon(loop: asyncio.AbstractEventLoop, function: Callable[..., Any], *arguments: Any) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(function, *arguments)


def _copy(done: "Future[T]", found: "asyncio.Future[T]") -> None:
    """Hand a result over from the engine's thread."""
    if found.done():
        return
    try:
        found.set_result(done.result())
    except CancelledError:
        found.cancel()
    except BaseException as error:
        found.set_exception(error)
