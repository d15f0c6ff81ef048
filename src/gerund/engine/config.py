"""Engine settings, futures and state."""

from concurrent.futures import Future
from dataclasses import dataclass, fields
from typing import Generic, TypeVar

from gerund.checks import demand_number, flag, whole_number
from gerund.errors import ConfigError
from gerund.types import Promise

T = TypeVar("T")


@dataclass(frozen=True)
class EngineConfig:
    """How an engine divides its model among those who wait for it.

    Attributes:
        slots: texts that are written at a time.
        context: room of a slot in tokens, prompt and text together; None takes the model's context, 2048 at most. What
            needs more, and fits the model's context, is written one at a time.
        read_tokens: tokens of prompts and texts that are read between two steps of the writers; a prompt is read in
            parts of so many where that changes nothing.
        idle_read_tokens: the same while nobody writes.
        writing_ratio: time of writing for each second of reading.
        queue_tokens: tokens that may wait; more are refused until some are done.
        prefix_tokens: tokens of prompts that are kept for prompts that begin alike; 0 keeps none. None keeps 4096
            where that was verified to change nothing, and none elsewhere. A number keeps so many in any case: texts
            then have the bits of ``generate`` no more, and where it changes last bits, nothing is promised.
        exact: write each text alone, through transformers' own loop: bit-equal to ``generate`` always, without gain.
        compile: compile the decode step, at every start anew; texts are equal up to near ties. On a CPU the weights
            are held about three times then.
        reproducible: fill each step up with empty rows where that makes a text the same whatever is written beside it.
            Without, a step that is not compiled has as many rows as there are texts: quicker for few of them, and
            nothing is promised.
    """

    slots: int = 8
    context: int | None = None
    read_tokens: int = 256
    idle_read_tokens: int = 2048
    writing_ratio: float = 1.0
    queue_tokens: int = 65536
    prefix_tokens: int | None = None
    exact: bool = False
    compile: bool = False
    reproducible: bool = True

    def __post_init__(self) -> None:
        for name in ("slots", "context", "read_tokens", "idle_read_tokens", "queue_tokens"):
            value = getattr(self, name)
            if not (name == "context" and value is None) and whole_number(name, value) < 1:
                raise ConfigError(f"{name}={value} leaves no room; give at least 1")
        if self.prefix_tokens is not None and whole_number("prefix_tokens", self.prefix_tokens) < 0:
            raise ConfigError(f"prefix_tokens={self.prefix_tokens} is negative; 0 keeps none")
        for name in ("exact", "compile", "reproducible"):
            flag(name, getattr(self, name))
        if self.exact and self.compile:
            raise ConfigError("exact and compile contradict each other: a compiled step is equal up to rounding")
        if self.exact and not self.reproducible:
            raise ConfigError("exact and reproducible=False contradict each other: exact texts depend on nothing else")
        demand_number("writing_ratio", self.writing_ratio)
        if not 0 < self.writing_ratio < float("inf"):
            raise ConfigError(
                f"writing_ratio={self.writing_ratio} is not above 0; 1 gives writing as much time as reading"
            )


@dataclass(frozen=True)
class EngineState:
    """What an engine does at the moment, and what it has done since it was started.

    Attributes:
        running: whether it takes work.
        promise: ``bits of generate``: texts and log-probabilities are those of ``generate`` to the bit;
            ``same text under any load``: a request gives the same text whatever else is served; or ``none``.
        why: how that was found out.
        slots: texts that are written at a time at most.
        context: room of a slot in tokens.
        live_rows: texts that are being written.
        queued: requests that are not done.
        queued_tokens: their tokens, as they are counted for admission.
        tokens_read: tokens of prompts that were read.
        tokens_reused: tokens of prompts that did not have to be read, since an earlier one began alike.
        tokens_written: tokens that were written.
        texts_encoded: texts that became vectors.
        tokens_encoded: their tokens.
        calls: other pieces of work that were done.
        cancelled: requests that were cancelled.
        late: requests that were not done by their deadline.
        failed: requests that ended with another error.
        refused: requests that were not taken.
        tokens_per_second: tokens, as they are counted for admission, that are done in a second of work.
    """

    running: bool
    promise: Promise
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
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True)
class Ticket(Generic[T]):
    """What a caller holds while an engine works.

    Attributes:
        future: has the result once it is there. Its callbacks run in the engine's thread, or where it is cancelled in
            the thread that does; they must be quick.
        tokens: what admission counts for it.
    """

    future: "Future[T]"
    tokens: int

    def result(self, timeout: float | None = None) -> T:
        """Wait for the result and return it.

        Args:
            timeout: seconds to wait; None waits for ever.

        Raises:
            TimeoutError: it is not there in time; the work goes on.
            concurrent.futures.CancelledError: it was cancelled.
            DeadlineError: it was not done by its deadline.
            ClosedError: the engine was closed before.
        """
        return self.future.result(timeout)

    def cancel(self) -> bool:
        """Give it up: what it holds of queue and model is free within a token. Return whether it was not done yet."""
        return self.future.cancel()
