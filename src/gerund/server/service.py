"""The served model with its engine and index, and the request context that cancels a request's work."""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from fastapi import Depends, Request

from gerund.engine.config import Ticket
from gerund.engine.engine import Engine
from gerund.errors import DataError, FingerprintError, GerundError, InputError, StaleIndexError
from gerund.inference.generate.config import GenerationConfig
from gerund.inference.generate.sequence import Emit, Piece
from gerund.inference.tokens import context_length
from gerund.language_model import LanguageModel
from gerund.models.architectures import is_encoder_decoder
from gerund.server.config import ServerConfig
from gerund.server.errors import ApiError, ClientGoneError, unknown_model
from gerund.server.logs import note
from gerund.server.metrics import Metrics
from gerund.settings.model_spec import ModelSpec

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


if TYPE_CHECKING:
    from gerund.retrieval.index import Index
    from gerund.types import Hit

Phase = Literal["loading", "ready", "ending", "failed"]


def name_of(spec: ModelSpec) -> str:
    """Return what clients call a model where nothing else is said: the last part of a folder or hub id.

    >>> name_of(ModelSpec.of("org/Model-1B")), name_of(ModelSpec.of(None))
    ('Model-1B', 'gerund-default')
    """
    name = PurePath(spec.model).name if spec.model != "default" else "gerund-default"
    return re.sub(r"\s+", "-", name) or "gerund"


@dataclass
class Service:
    """One process's model, and who may have it when.

    Attributes:
        settings: how the server is run.
        names: what clients may call the model, the listed name first.
        metrics: what is counted.
        phase: where it is in its life.
        over: done when nothing is waited for any more.
        workers: how many processes serve, and why one did not; several are told by the process that starts them.
    """

    settings: ServerConfig
    names: tuple[str, ...]
    metrics: Metrics = field(default_factory=Metrics)
    phase: Phase = "loading"
    created: int = field(default_factory=lambda: int(time.time()))
    error: GerundError | None = None

    def __post_init__(self) -> None:
        self._lm: LanguageModel | None = None
        self._engine: Engine | None = None
        self._index: Index | None = None
        self._fingerprints: dict[int | None, str] = {}
        self._over: asyncio.Future[None] | None = None
        self.workers: dict[str, Any] = {"expected": self.settings.workers, "ready": 1, "last_error": None}

    @property
    def lm(self) -> LanguageModel:
        """The model.

        Raises:
            ApiError: it is not loaded yet.
        """
        self.demand_ready()
        assert self._lm is not None
        return self._lm

    @property
    def engine(self) -> Engine:
        """What does the work.

        Raises:
            ApiError: the model is not loaded yet.
        """
        self.demand_ready()
        assert self._engine is not None
        return self._engine

    def demand_ready(self) -> None:
        """Refuse while the model is loaded.

        Raises:
            ApiError: it is not loaded yet.
        """
        if self._engine is None:
            raise ApiError("the model is being loaded; try again", 503, code="loading", retry_after=2)

    def demand_model(self, name: str | None) -> None:
        """Refuse a model that is not served.

        Raises:
            ApiError: there is another model behind this server, or none yet.
        """
        self.demand_ready()
        if name and name not in self.names:
            raise unknown_model(name, self.names[0])

    def load(self, spec: ModelSpec) -> None:
        """Load the model, start the engine and have it do each kind of work once; blocks.

        Raises:
            GerundError: it cannot be loaded.
        """
        from gerund.entry import load

        self.start(load(spec))

    def start(self, lm: LanguageModel) -> None:
        """Start an engine for a model that is in memory; blocks until it is warm.

        Raises:
            GerundError: the index that is to be searched is not there, or another encoder's.
        """
        own = self.settings
        if own.index is not None:
            self._index = _opened(own.index, lm)
        engine = Engine(lm, own.engine, on_turn=self.metrics.waits.observe)
        engine.start()
        engine.encode(["A text to begin with."]).result()
        engine.write("A text", GenerationConfig(max_new_tokens=2)).result()
        self._fingerprints[None] = lm.fingerprint()
        self._lm, self._engine, self.phase = lm, engine, "ready"

    @property
    def index(self) -> "Index | None":
        """The index that is searched; None where none is served."""
        return self._index

    def search(self, query: str, k: int, **how: Any) -> "list[Hit]":
        """Return the chunks of the index that fit a query best; runs in the engine's thread.

        An index that was migrated meanwhile, or made again, is opened again.

        Raises:
            ApiError: what is there now cannot be searched with this model.
            GerundError: the query cannot be answered.
        """
        assert self._index is not None
        try:
            return self._index.search(query, k, **how)
        except (StaleIndexError, DataError) as error:
            self._index = self._opened_again(error)
        try:
            return self._index.search(query, k, **how)
        except DataError as error:
            raise ApiError(error, 503, code="index_unavailable", retry_after=60) from error

    def _opened_again(self, error: InputError) -> "Index":
        """Return the index that is there now, in the place of one that can't be searched any more."""
        try:
            return _opened(str(self.settings.index), self.lm)
        except InputError as now:
            if isinstance(error, StaleIndexError) or isinstance(now, FingerprintError):
                raise ApiError(f"the index was made anew meanwhile: {now}", 503, code="index_replaced") from now
            # Not the request's fault: the folder was removed, or a part of it.
            raise ApiError(error, 503, code="index_unavailable", retry_after=60) from error

    @property
    def index_name(self) -> str | None:
        """The last part of the index's place; None where none is served."""
        return None if self.settings.index is None else PurePath(self.settings.index).name

    @property
    def has_index(self) -> bool:
        """Whether there is an index to search."""
        return self._index is not None

    @property
    def limit(self) -> int | None:
        """The model's context in tokens; None where it has none, or reads and writes apart."""
        if is_encoder_decoder(self.lm.model):
            return None
        return context_length(self.lm.model.config, self.lm.tokenizer)

    @property
    def chats(self) -> bool:
        """Whether the model has a chat template."""
        return bool(self.lm.tokenizer.chat_template)

    def fingerprint(self, dimensions: int | None = None) -> str:
        """Return what tells this encoder's vectors from others; it is worked out once."""
        if dimensions not in self._fingerprints:
            self._fingerprints[dimensions] = self.lm.fingerprint(dimensions)
        return self._fingerprints[dimensions]

    @property
    def over(self) -> "asyncio.Future[None]":
        """Done when the server waits for nothing any more; belongs to the running event loop."""
        if self._over is None:
            self._over = asyncio.get_running_loop().create_future()
        return self._over

    def end(self) -> None:
        """Let nobody wait any more: what still runs is given up, and its clients are told."""
        if not self.over.done():
            self.over.set_result(None)

    def claim(self, request: Request) -> Claim:
        """Return what a request may hold of the engine."""
        return Claim(request, self.over, self.settings.timeout)

    def close(self) -> None:
        """Stop the engine."""
        if self._engine is not None:
            self._engine.close()

    def card(self) -> dict[str, Any]:
        """Describe the model that is served, as ``/v1/models`` lists it."""
        state = self.engine.state()
        return {
            "id": self.names[0],
            "object": "model",
            "created": self.created,
            "owned_by": "gerund",
            "max_model_len": self.limit,
            "dimensions": self.lm.dimensions,
            "fingerprint": self.fingerprint(),
            "chat": self.chats,
            "scorer": "own" if self.lm.scorer is not None else "pmi",
            "promise": state.promise,
            "why": state.why,
        }

    def health(self) -> dict[str, Any]:
        """Return where the server is in its life, and what its engine promises."""
        if self._engine is None:
            return {"status": self.phase}
        state = self._engine.state()
        found: dict[str, Any] = {"status": "ok" if self.phase == "ready" else self.phase, "model": self.names[0]}
        found |= {"promise": state.promise, "why": state.why, "fingerprint": self.fingerprint()}
        found["workers"] = self.workers
        return found | {"live_rows": state.live_rows, "queued": state.queued, "queued_tokens": state.queued_tokens}

    def observe(self) -> None:
        """Bring the counts up to what the engine says."""
        if self._engine is not None:
            self.metrics.observe(self._engine.state())


def _opened(where: str, lm: LanguageModel) -> "Index":
    """Return an index that is there, under this model.

    Raises:
        GerundError: there is none, or another encoder made it.
    """
    from gerund.retrieval.index import demand_index, open_index
    from gerund.seq2seq_model import Seq2SeqModel

    if isinstance(lm, Seq2SeqModel):
        raise DataError(f"{where}: an index is searched with a decoder-only model, and {lm.name} is none")
    demand_index(where)
    index = open_index(where, lm)
    if index.store.finish():
        note(
            "an earlier gerund index was ended before its last step, or is running; all words are indexed now",
            index=where,
        )
    return index


async def service_of(request: Request) -> Service:
    """Return the service behind a request; async, since FastAPI would send a plain function to a thread."""
    found: Service = request.app.state.service
    return found


Served = Annotated[Service, Depends(service_of)]
