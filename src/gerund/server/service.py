"""The served model with its engine, index and metrics, and the request context that cancels a request's work."""

import asyncio
import os
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from fastapi import Depends, Request
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from gerund.engine.config import EngineFuture, EngineState, RequestTimes
from gerund.engine.engine import Engine
from gerund.errors import DataError, FingerprintError, InputError, QueueFullError, StaleIndexError
from gerund.inference.generate.config import GenerationConfig
from gerund.inference.generate.sequence import Emit, Piece
from gerund.inference.generate.streams import call_soon
from gerund.inference.sentence_encoder import SentenceEncoder
from gerund.inference.tokens import context_length
from gerund.models.kinds import has_head, is_encoder_decoder
from gerund.retrieval.question_answering import PendingAnswer, Question
from gerund.server.config import ServerConfig
from gerund.server.errors import ApiError, ClientGoneError, unknown_model
from gerund.server.logs import note
from gerund.settings.model_spec import ModelSpec
from gerund.types import Answer, EncodeResult, Generation

if TYPE_CHECKING:
    from gerund.engine.batching import ServedModel
    from gerund.retrieval.index import Index


_SECONDS = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_GAPS = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2)
_COUNTED = {
    "tokens_read": "Tokens of prompts that were read.",
    "tokens_reused": "Tokens of prompts that did not have to be read.",
    "tokens_written": "Tokens that were written.",
    "texts_encoded": "Texts that became vectors.",
    "tokens_encoded": "Tokens of these texts.",
    "calls": "Other pieces of work.",
    "cancelled": "Requests that were given up by their clients.",
    "late": "Requests that were not done in time.",
    "failed": "Requests that ended with another error.",
    "refused": "Requests that were not taken.",
}
_MEASURED = {
    "live_rows": "Texts that are being written.",
    "queued": "Requests that are not done.",
    "queued_tokens": "Their tokens.",
}


class Metrics:
    """Prometheus counters, gauges and histograms of one process; no text and no name of a client is ever a label.

    With several workers, each writes its counts into files of a shared folder (``PROMETHEUS_MULTIPROC_DIR``), and the
    worker that is queried adds them up.

    >>> metrics = Metrics()
    >>> metrics.done("/v1/embeddings", 200, 0.1)
    >>> b'gerund_requests_total{route="/v1/embeddings",status="200"} 1.0' in metrics.text()
    True
    """

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        self._requests = Counter("gerund_requests", "Requests.", ["route", "status"], registry=registry)
        self._seconds = Histogram(
            "gerund_request_seconds", "From first to last byte.", ["route"], registry=registry, buckets=_SECONDS
        )

        def histogram(name: str, help_: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
            return Histogram(name, help_, registry=registry, buckets=buckets)

        self.waits = histogram("gerund_wait_seconds", "Until the engine began with what it was given.")
        self.first = histogram("gerund_first_piece_seconds", "Until a stream's first text.")
        self.gaps = histogram("gerund_piece_gap_seconds", "Between two pieces of a stream.", _GAPS)
        self._counts = {name: Counter(f"gerund_{name}", text_, registry=registry) for name, text_ in _COUNTED.items()}
        self._gauges = {
            name: Gauge(f"gerund_{name}", text_, registry=registry, multiprocess_mode="livesum")
            for name, text_ in _MEASURED.items()
        }
        self._before: dict[str, int] = dict.fromkeys(_COUNTED, 0)

    def done(self, route: str, status: int, seconds: float) -> None:
        """Count a request."""
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def observe(self, state: EngineState) -> None:
        """Add what the engine has counted since the last call."""
        for name, counter in self._counts.items():
            now = getattr(state, name)
            counter.inc(max(0, now - self._before[name]))
            self._before[name] = now
        for name, gauge in self._gauges.items():
            gauge.set(getattr(state, name))

    def text(self) -> bytes:
        """Return the metrics of all workers in Prometheus' format."""
        if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
            return generate_latest(self._registry)
        combined = CollectorRegistry()
        MultiProcessCollector(combined)
        return generate_latest(combined)


T = TypeVar("T")

Phase = Literal["loading", "ready", "ending", "failed"]

# Behind the model's name: answer from the index.
WITH_INDEX = "+index"

# Seconds after its deadline in which the engine itself reports that a request is late.
_GRACE = 2.0
# Characters of a token at least, so that what waits can be counted without tokenizing.
_CHARACTERS = 4


class RequestContext:
    """The engine work of one request, cancelled when the client disconnects, the server ends or the time is up."""

    def __init__(self, service: "Service", request: Request) -> None:
        self._loop = asyncio.get_running_loop()
        self._service, self._timeout = service, service.settings.timeout
        self._ends = self._loop.time() + self._timeout + _GRACE
        self._futures: list[EngineFuture[Any]] = []
        self.times: RequestTimes | None = None  # of the answer that the engine generates, if it does
        self._is_closed = False
        self._disconnected = asyncio.ensure_future(_disconnected(request))
        # Pieces of the text, and prompts that are done; None when the request is not wanted any more.
        self._pieces: asyncio.Queue[Piece | Future[Any] | None] = asyncio.Queue()
        self._timer = self._loop.call_at(self._ends, self._pieces.put_nowait, None)
        for end in (self._disconnected, service.over):
            end.add_done_callback(self._wake)

    @property
    def deadline(self) -> float:
        """Seconds left for the engine."""
        return max(0.001, self._ends - _GRACE - self._loop.time())

    def hold(self, future: EngineFuture[T]) -> EngineFuture[T]:
        """Cancel a request to the engine when this context closes; may be called from any thread."""
        self._futures.append(future)
        if self._is_closed:
            future.cancel()
        return future

    async def run(self, work: Callable[[], T]) -> T:
        """Run what takes a while without the model, such as tokenizing, in a thread."""
        return await self._while_wanted(asyncio.to_thread(work))

    async def call(self, function: Callable[[], T], *, tokens: int, encodes: bool = False) -> T:
        """Run a function in the engine's thread; with ``encodes`` in that of the model of the vectors."""
        engine = self._service.encoding if encodes else self._service.engine
        assert isinstance(engine, Engine)  # what sentence-transformers runs takes no calls
        return await self.result(self.hold(engine.submit_call(function, tokens=tokens, deadline=self.deadline)))

    async def ask(self, question: Question) -> Answer:
        """Answer a question from the index; the model generates between other requests."""
        prepared = await self.prepare(question)
        if isinstance(prepared, Answer):
            return prepared
        [generation] = await self.result(self.submit(prepared))
        return await self.call(lambda: prepared.answer(generation), tokens=1)

    async def prepare(self, question: Question) -> Answer | PendingAnswer:
        """Search the index for a question; return the quoted answer, or what the model is to generate."""
        tokens = len(question.search_query) // 4 + 1
        return await self.call(lambda: self._service.with_index(lambda index: index.prepare(question)), tokens=tokens)

    def submit(self, pending: PendingAnswer, on_text: Emit | None = None) -> EngineFuture[list[Generation]]:
        """Have the engine generate a prepared answer."""
        engine, ids, settings = self._service.engine, pending.prompt.ids, pending.settings
        future = engine.submit_generate(ids, settings, on_text=on_text, deadline=self.deadline)
        self.times = future.times
        return self.hold(future)

    async def result(self, future: EngineFuture[T]) -> T:
        """Wait for a result of the engine."""
        return await self._while_wanted(asyncio.wrap_future(future.future))

    def on_text(self, number: int, choices: int) -> Emit:
        """Return the callback for completions of prompt ``number``; it is called in the engine's thread."""

        def put(piece: Piece) -> None:
            numbered = Piece(number * choices + piece.index, piece.text, piece.logprobs, piece.result)
            call_soon(self._loop, self._pieces.put_nowait, numbered)

        return put

    async def pieces(self, futures: list[EngineFuture[Any]]) -> AsyncIterator[Piece]:
        """Yield pieces of text as they come, until all futures are done; raise the error of one that fails."""
        for future in futures:
            future.future.add_done_callback(lambda done: call_soon(self._loop, self._pieces.put_nowait, done))
        waiting = len(futures)
        while waiting:
            # One queue for everything: a task for each piece would take longer than sending the piece.
            item = await self._pieces.get()
            if item is None:
                raise self._reason()
            if isinstance(item, Piece):
                yield item
            else:
                waiting -= 1
                item.result()

    async def _while_wanted(self, awaitable: Awaitable[T]) -> T:
        task: asyncio.Future[T] = asyncio.ensure_future(awaitable)
        ends: set[asyncio.Future[Any]] = {task, self._disconnected, self._service.over}
        try:
            left = self._ends - self._loop.time()
            await asyncio.wait(ends, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
        finally:
            if not task.done():
                task.cancel()
        raise self._reason()

    def _reason(self) -> Exception:
        """Return the error that says why the request is not wanted any more."""
        if self._disconnected.done():
            return ClientGoneError()
        if self._service.over.done():
            return ApiError("the server is ending; try again", 503, code="unavailable", retry_after=5)
        return ApiError(f"this was not done within {self._timeout:g} s", 504, code="timeout")

    def _wake(self, _: "asyncio.Future[None]") -> None:
        self._pieces.put_nowait(None)

    def close(self) -> None:
        """Cancel what is not done."""
        self._is_closed = True
        self._timer.cancel()
        self._service.over.remove_done_callback(self._wake)
        self._disconnected.cancel()
        for future in list(self._futures):
            future.cancel()

    async def __aenter__(self) -> "RequestContext":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


async def _disconnected(request: Request) -> None:
    """Return when the client has disconnected; the body was read before."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def name_of(spec: ModelSpec) -> str:
    """Return what clients call a model by default: the last part of a folder or hub id.

    >>> name_of(ModelSpec.of("org/Model-1B")), name_of(ModelSpec.of(None))
    ('Model-1B', 'gerund-default')
    """
    name = PurePath(spec.model).name if spec.model != "default" else "gerund-default"
    return re.sub(r"\s+", "-", name) or "gerund"


class EncoderQueue:
    """Takes encode requests for a separate encoder as the engine does, and runs them one at a time in its own thread.

    ``limit`` is how many tokens may wait, estimated.
    """

    def __init__(self, encoder: SentenceEncoder, limit: int) -> None:
        self._encoder, self._limit = encoder, limit
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="gerund-encoder")
        self._waiting = 0

    def submit_encode(
        self, texts: Sequence[str], *, deadline: float | None = None, normalize: bool | None = None, **options: Any
    ) -> EngineFuture[EncodeResult]:
        """Encode texts; see ``SentenceEncoder.encode_counted``.

        Raises:
            QueueFullError: too many tokens wait already.
        """
        del deadline, normalize  # the request's own timer cancels it; vectors always have length 1
        tokens = sum(len(text) // _CHARACTERS + 1 for text in texts)
        if self._waiting and self._waiting + tokens > self._limit:
            raise QueueFullError(f"about {self._waiting} tokens wait to be encoded already; try again", 2)
        self._waiting += tokens
        future: Future[EncodeResult] = self._thread.submit(self._encoder.encode_counted, texts, **options)
        future.add_done_callback(lambda _: self._done(tokens))
        return EngineFuture(future, tokens)

    def _done(self, tokens: int) -> None:
        self._waiting -= tokens

    def close(self) -> None:
        """Cancel what waits, and end after what runs."""
        self._thread.shutdown(cancel_futures=True)


@dataclass
class Service:
    """One process's model, engine and index; ``names`` are what clients may call the model, the listed name first."""

    settings: ServerConfig
    names: tuple[str, ...]
    metrics: Metrics = field(default_factory=Metrics)
    phase: Phase = "loading"
    created: int = field(default_factory=lambda: int(time.time()))
    index: "Index | None" = None
    """The index that is searched; None if none is served."""

    def __post_init__(self) -> None:
        self._lm: ServedModel | None = None
        self._encoder: ServedModel | SentenceEncoder | None = None
        self._encoding: Engine | EncoderQueue | None = None
        self._engine: Engine | None = None
        self._fingerprints: dict[int | None, str] = {}
        self._over: asyncio.Future[None] | None = None
        # The process that starts several workers updates this.
        self.workers: dict[str, Any] = {"expected": self.settings.workers, "ready": 1, "last_error": None}

    @property
    def lm(self) -> "ServedModel":
        """The model; while it is being loaded, an ``ApiError``."""
        self.require_ready()
        assert self._lm is not None
        return self._lm

    @property
    def engine(self) -> Engine:
        """The engine; while the model is being loaded, an ``ApiError``."""
        self.require_ready()
        assert self._engine is not None
        return self._engine

    @property
    def encoder(self) -> "ServedModel | SentenceEncoder":
        """The model of the vectors: the served one, unless there is another."""
        return self._encoder or self.lm

    @property
    def encoding(self) -> "Engine | EncoderQueue":
        """What takes encode requests."""
        return self._encoding or self.engine

    def require_ready(self) -> None:
        """Raise an ``ApiError`` while the model is being loaded."""
        if self._engine is None:
            raise ApiError("the model is being loaded; try again", 503, code="loading", retry_after=2)

    def require_model(self, name: str | None) -> None:
        """Raise an ``ApiError`` for a model that is not served, or not yet."""
        self.require_ready()
        if name and name not in self.names:
            if self.asks_index(name):
                raise ApiError(
                    f"{name!r} answers chats; call the model {self.names[0]!r} for this route", 404,
                    code="model_not_found", param="model",
                )  # fmt: skip
            raise unknown_model(name, *self.listed_names)

    @property
    def listed_names(self) -> list[str]:
        """The names in lists of models: the model's own, and with an index the name under which it answers from it."""
        return [self.names[0], f"{self.names[0]}{WITH_INDEX}"] if self.index is not None else [self.names[0]]

    def asks_index(self, name: str | None) -> bool:
        """Whether a model's name asks for answers from the index."""
        self.require_ready()
        return self.index is not None and bool(name) and str(name) in [f"{known}{WITH_INDEX}" for known in self.names]

    def load(self, spec: ModelSpec) -> None:
        """Load the model and start the engine; blocks."""
        from gerund.light_entry import load

        if self.settings.encoder is None:
            self.start(load(spec))
            return
        from gerund.retrieval.index import load_encoder

        self.start(load(spec), load_encoder(self.settings.encoder))

    def start(self, lm: "ServedModel", encoder: "ServedModel | SentenceEncoder | None" = None) -> None:
        """Start an engine for a model in memory, and warm it up by one request of each kind; blocks."""
        if self.settings.index is not None:
            self.index = _open_index(self.settings.index, lm, encoder)
        if encoder is not None:
            self._encoder = encoder
            if isinstance(encoder, SentenceEncoder):
                self._encoding = EncoderQueue(encoder, self.settings.queue_tokens)
            else:
                self._encoding = Engine(encoder, self.settings.engine)
                self._encoding.start()
        engine = Engine(lm, self.settings.engine, on_turn=self.metrics.waits.observe)
        engine.start()
        if encoder is not None or not lm.runtime.why_no_vectors:
            (self._encoding or engine).submit_encode(["A text to begin with."]).result()
        if has_head(lm.model):
            engine.submit_generate("A text", GenerationConfig(max_new_tokens=2)).result()
        if lm.reranker is not None:
            engine.submit_call(lambda: lm.rerank("A text", ["to begin with"]), tokens=1).result()
        self._fingerprints[None] = (encoder or lm).fingerprint()
        self._lm, self._engine, self.phase = lm, engine, "ready"

    def with_index(self, work: "Callable[[Index], T]") -> T:
        """Return a result of the index; runs in the engine's thread.

        An index that was migrated or rebuilt since it was opened is opened again.
        """
        assert self.index is not None
        try:
            return work(self.index)
        except (StaleIndexError, DataError) as error:
            self.index = self._reopened(error)
        try:
            return work(self.index)
        except DataError as error:
            raise ApiError(error, 503, code="index_unavailable", retry_after=60) from error

    def _reopened(self, error: InputError) -> "Index":
        try:
            return _open_index(str(self.settings.index), self.lm, self._encoder)
        except InputError as now:
            if isinstance(error, StaleIndexError) or isinstance(now, FingerprintError):
                raise ApiError(f"the index was made anew meanwhile: {now}", 503, code="index_replaced") from now
            # Not the request's fault: the folder was removed, or a part of it.
            raise ApiError(error, 503, code="index_unavailable", retry_after=60) from error

    @property
    def limit(self) -> int | None:
        """The model's context in tokens; None if it has none, or is an encoder-decoder."""
        if is_encoder_decoder(self.lm.model):
            return None
        return context_length(self.lm.model.config, self.lm.tokenizer)

    @property
    def chats(self) -> bool:
        """Whether the model has a chat template."""
        return bool(self.lm.tokenizer.chat_template)

    def fingerprint(self, dimensions: int | None = None) -> str:
        """Return the encoder's fingerprint for a number of dimensions; computed once."""
        if dimensions not in self._fingerprints:
            self._fingerprints[dimensions] = self.encoder.fingerprint(dimensions)
        return self._fingerprints[dimensions]

    @property
    def over(self) -> "asyncio.Future[None]":
        """A future of the running event loop, done when the server waits for no request any more."""
        if self._over is None:
            self._over = asyncio.get_running_loop().create_future()
        return self._over

    def end(self) -> None:
        """Cancel all running requests; their clients get an error."""
        if not self.over.done():
            self.over.set_result(None)

    def context(self, request: Request) -> RequestContext:
        """Return the context of a request."""
        return RequestContext(self, request)

    def close(self) -> None:
        """Stop the engine."""
        if self._encoding is not None:
            self._encoding.close()
        if self._engine is not None:
            self._engine.close()

    def cards(self) -> list[dict[str, Any]]:
        """Return the entries of ``/v1/models``."""
        return [{**self.card(), "id": name} for name in self.listed_names]

    def card(self) -> dict[str, Any]:
        """Return the model's entry in ``/v1/models``."""
        state = self.engine.state()
        return {
            "id": self.names[0],
            "object": "model",
            "created": self.created,
            "owned_by": "gerund",
            "max_model_len": self.limit,
            "dimensions": self.encoder.dimensions,
            "encoder": None if self._encoder is None else self._encoder.name,
            "fingerprint": self.fingerprint(),
            "chat": self.chats,
            "scorer": "own" if self.lm.has_scorer else "pmi",
            **_guarantee(state),
        }

    def health(self) -> dict[str, Any]:
        """Return the answer of ``/health``."""
        if self._engine is None:
            return {"status": self.phase}
        state = self._engine.state()
        return {
            "status": "ok" if self.phase == "ready" else self.phase,
            "model": self.names[0],
            **_guarantee(state),
            "fingerprint": self.fingerprint(),
            "workers": self.workers,
            "live_rows": state.live_rows,
            "queued": state.queued,
            "queued_tokens": state.queued_tokens,
        }

    def observe(self) -> None:
        """Copy the engine's counts into the metrics."""
        if self._engine is not None:
            self.metrics.observe(self._engine.state())


def _guarantee(state: EngineState) -> dict[str, str]:
    return {"guarantee": state.guarantee, "why": state.why}


def _open_index(where: str, lm: Any, encoder: Any = None) -> "Index":
    """Open an existing index under this model, which answers; another one may encode."""
    from gerund.retrieval.index import demand_index, open_index

    if is_encoder_decoder(lm.model):
        raise DataError(f"{where}: an index is searched with a decoder-only model, and {lm.name} is none")
    index = open_index(where, lm) if encoder is None else open_index(where, encoder, answer_with=lm)
    if index.about is None:
        demand_index(where)  # says what is missing
    if index.store.finish():
        note(
            "an earlier gerund index was ended before its last step, or is running; all words are indexed now",
            index=where,
        )
    return index


async def _service(request: Request) -> Service:
    # Async, since FastAPI would run a plain function in a thread.
    service: Service = request.app.state.service
    return service


Served = Annotated[Service, Depends(_service)]
