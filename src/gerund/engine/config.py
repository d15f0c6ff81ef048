"""Engine settings, futures and state."""

from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from typing import Generic, TypeVar

from gerund.checks import demand_number, flag, whole_number
from gerund.errors import ConfigError
from gerund.types import Guarantee

T = TypeVar("T")


@dataclass(frozen=True)
class EngineConfig:
    """How an engine divides its model among its callers.

    Attributes:
        slots: sequences that are decoded concurrently.
        context: capacity of a slot in tokens, prompt and completion together; None takes the model's context, at most
            2048. A request that needs more, and fits the model's context, is decoded on its own.
        prefill_tokens: tokens of prompts and texts that are read between two decode steps; a longer prompt is read in
            parts of this size where that changes nothing.
        idle_prefill_tokens: the same while no sequence is being decoded.
        decode_ratio: seconds of decoding for each second of prefill or encoding.
        queue_tokens: tokens that may wait; beyond that, requests raise ``QueueFullError``.
        prefix_tokens: tokens of prompts that are cached for prompts with the same start; 0 caches none. None caches as
            many as a slot has, and at least 4096, where that was verified to change nothing, and none elsewhere. A
            number caches that many in any case: completions then no longer have the bits of ``generate``, and where it
            changes last bits, nothing is guaranteed.
        exact: generate each completion on its own, with transformers' own loop: always bit-identical to ``generate``,
            and not faster.
        reproducible: fill each step with empty rows where that makes a completion independent of concurrent requests.
            Without, a step has one row per sequence: faster for few sequences, and nothing is guaranteed.
    """

    slots: int = 8
    context: int | None = None
    prefill_tokens: int = 256
    idle_prefill_tokens: int = 2048
    decode_ratio: float = 1.0
    queue_tokens: int = 65536
    prefix_tokens: int | None = None
    exact: bool = False
    reproducible: bool = True

    def __post_init__(self) -> None:
        for name in ("slots", "context", "prefill_tokens", "idle_prefill_tokens", "queue_tokens"):
            value = getattr(self, name)
            if not (name == "context" and value is None) and whole_number(name, value) < 1:
                raise ConfigError(f"`{name}` must be at least 1, got {value}")
        if self.prefix_tokens is not None and whole_number("prefix_tokens", self.prefix_tokens) < 0:
            raise ConfigError(f"`prefix_tokens` must be at least 0, got {self.prefix_tokens}; 0 caches none")
        for name in ("exact", "reproducible"):
            flag(name, getattr(self, name))
        if self.exact and not self.reproducible:
            raise ConfigError("exact and reproducible=False contradict each other: exact texts depend on nothing else")
        demand_number("decode_ratio", self.decode_ratio)
        if not 0 < self.decode_ratio < float("inf"):
            raise ConfigError(f"`decode_ratio` must be above 0, got {self.decode_ratio}; 1 is equal time for both")


@dataclass(frozen=True)
class EngineState:
    """An engine's current load, and its counts since it was started.

    Attributes:
        running: whether it takes requests.
        guarantee: what is guaranteed. ``bits of generate``: completions and log-probabilities are bit-identical to
            those of ``generate``; ``same text under any load``: a request gives the same completion regardless of
            concurrent requests; or ``none``.
        why: how that was established.
        slots: sequences that are decoded concurrently at most.
        context: capacity of a slot in tokens.
        live_rows: sequences that are being decoded.
        queued: requests that are not done.
        queued_tokens: their tokens, as admission counts them.
        tokens_read: prompt tokens that were read.
        tokens_reused: prompt tokens that came from the cache of an earlier prompt with the same start.
        tokens_written: generated tokens.
        texts_encoded: encoded texts.
        tokens_encoded: their tokens.
        calls: functions that were run.
        cancelled: requests that were cancelled.
        late: requests that missed their deadline.
        failed: requests that ended with another error.
        refused: requests that admission rejected.
        tokens_per_second: tokens, as admission counts them, per second of work.
    """

    running: bool
    guarantee: Guarantee
    why: str
    slots: int
    context: int | None
    live_rows: int = 0
    queued: int = 0
    queued_tokens: int = 0
    tokens_read: int = 0
    tokens_reused: int = 0
    tokens_written: int = 0
    texts_encoded: int = 0
    tokens_encoded: int = 0
    calls: int = 0
    cancelled: int = 0
    late: int = 0
    failed: int = 0
    refused: int = 0
    tokens_per_second: float = 0.0

    def to_dict(self) -> dict[str, object]:
        """Return it as a JSON-ready dict."""
        return asdict(self)


@dataclass
class RequestTimes:
    """When an engine worked on a request, in nanoseconds of ``time.perf_counter_ns()``; None for what has not happened.

    Attributes:
        began: the end of its time in the queue.
        first_token: when the prompt was read and the first token generated.
        ended: when the result was there.
    """

    began: int | None = None
    first_token: int | None = None
    ended: int | None = None


@dataclass(frozen=True)
class EngineFuture(Generic[T]):
    """The future result of a request to an engine.

    Attributes:
        future: the ``concurrent.futures`` future. Its callbacks run in the engine's thread, or in the thread that
            cancels it; they must be quick.
        tokens: what admission counts for the request.
        times: when the engine worked on it.
    """

    future: "Future[T]"
    tokens: int
    times: RequestTimes = field(default_factory=RequestTimes, compare=False)

    def result(self, timeout: float | None = None) -> T:
        """Wait for the result and return it; ``timeout`` is in seconds, None waits for ever.

        Raises:
            TimeoutError: it is not there in time; the work continues.
            concurrent.futures.CancelledError: it was cancelled.
            DeadlineError: it was not done by its deadline.
            ClosedError: the engine was closed before.
        """
        return self.future.result(timeout)

    def cancel(self) -> bool:
        """Cancel the request, which frees its place within a token. Return False if it was done already."""
        return self.future.cancel()
