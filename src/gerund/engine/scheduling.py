"""Token-based admission control, and how an engine divides its time between decoding and prefill or encoding."""

import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any

from gerund.checks import demand_between
from gerund.engine.config import RequestTimes
from gerund.errors import ClosedError, DeadlineError, QueueFullError, TooLargeError

# Tokens per second before anything was measured, and the weight of that guess in seconds.
_GUESS = 1000.0
_GUESSED_SECONDS = 1.0
# After twice this many seconds of work, older work counts half.
_MEMORY = 20.0
_LONGEST_WAIT = 60
_COUNTED = (
    *("tokens_read", "tokens_reused", "tokens_written", "texts_encoded", "tokens_encoded"),
    *("calls", "done", "cancelled", "late", "failed", "refused"),
)
# Decode steps owed at most: after a long pass that could not be interrupted, sequences do not catch up with all that
# they missed while other requests wait.
_MOST_OWED_STEPS = 16


class Job:
    """A request to an engine, with its tokens for admission and its deadline in seconds from now."""

    def __init__(self, tokens: int, deadline: float | None = None) -> None:
        self.future: Future[Any] = Future()
        self.tokens = tokens
        self.times = RequestTimes()
        self._created = time.monotonic()
        if deadline is not None:
            demand_between("deadline", deadline, float("-inf"), float("inf"))
        self._ends = None if deadline is None else self._created + deadline
        self.on_turn: Callable[[float], None] | None = None  # takes the queue time in seconds

    def begin(self) -> None:
        """Report the queue time, the first time that this is called."""
        self.times.began = self.times.began or time.perf_counter_ns()
        report, self.on_turn = self.on_turn, None
        if report is not None:
            report(time.monotonic() - self._created)

    @property
    def is_over(self) -> bool:
        """Whether it is done, was cancelled, or has missed its deadline."""
        if self._ends is not None and not self.future.done() and time.monotonic() > self._ends:
            self.fail(DeadlineError("the request was not done by its deadline"))
        return self.future.done()

    def settle(self, result: Any) -> None:
        """Set the result, unless the job is over."""
        self.times.ended = time.perf_counter_ns()
        with suppress(InvalidStateError):
            self.future.set_result(result)

    def fail(self, error: BaseException) -> None:
        """Set an error, unless the job is over."""
        with suppress(InvalidStateError):
            self.future.set_exception(error)


class Admission:
    """Counts waiting tokens and finished jobs, and notifies ``changed``.

    The queue takes ``most`` tokens. If it is empty, it takes a job of up to ``largest`` tokens, even if that is more.
    """

    def __init__(self, most: int, largest: int) -> None:
        self._most, self._largest = most, max(most, largest)
        self.changed = threading.Condition(threading.RLock())
        # All names from the start, since other threads read them while the engine counts.
        self.counts: Counter[str] = Counter(dict.fromkeys(_COUNTED, 0))
        self.is_open = False
        self.jobs: set[Job] = set()
        self.tokens = 0
        self._done, self._seconds = _GUESS * _GUESSED_SECONDS, _GUESSED_SECONDS

    def admit(self, job: Job, take: Callable[[], None]) -> None:
        """Count a job and call ``take``, or raise ``ClosedError``, ``TooLargeError`` or ``QueueFullError``."""
        with self.changed:
            if not self.is_open:
                raise ClosedError("the engine takes nothing: it was not started yet, or is being closed")
            if job.tokens > self._largest:
                self.counts["refused"] += 1
                raise TooLargeError(
                    f"the request counts {job.tokens} tokens, and the queue takes {self._largest} at most; divide it"
                )
            if self.jobs and self.tokens + job.tokens > self._most:
                self.counts["refused"] += 1
                wait = self.retry_after
                raise QueueFullError(
                    f"{self.tokens} tokens wait already, and the queue takes {self._most}; try again in {wait} s", wait
                )
            self.jobs.add(job)
            self.tokens += job.tokens
            job.future.add_done_callback(lambda future: self._count_done(job, future))
            take()
            self.changed.notify_all()

    def _count_done(self, job: Job, future: "Future[Any]") -> None:
        """Count a job that has ended; runs in the thread that ended it."""
        with self.changed:
            self.jobs.discard(job)
            self.tokens -= job.tokens
            error = None if future.cancelled() else future.exception()
            late = isinstance(error, DeadlineError)
            self.counts[
                "cancelled" if future.cancelled() else "late" if late else "done" if error is None else "failed"
            ] += 1
            self.changed.notify_all()

    def worked(self, tokens: int, seconds: float) -> None:
        """Add a measurement of the engine's rate."""
        with self.changed:
            self._done += tokens
            self._seconds += seconds
            if self._seconds > 2 * _MEMORY:
                self._done, self._seconds = self._done / 2, self._seconds / 2

    @property
    def rate(self) -> float:
        """Recent tokens per second."""
        return self._done / self._seconds

    @property
    def retry_after(self) -> int:
        """Seconds until the waiting tokens will probably be done, 1 to 60."""
        return max(1, min(_LONGEST_WAIT, round(self.tokens / max(self.rate, 1e-9))))

    def wait_until_empty(self, timeout: float) -> bool:
        """Wait until no job is left; return False after ``timeout`` seconds."""
        with self.changed:
            return self.changed.wait_for(lambda: not self.jobs, timeout)

    def end_all(self, error: Callable[[], BaseException]) -> None:
        """Fail every job that is not over."""
        with self.changed:
            left = list(self.jobs)
        for job in left:
            job.fail(error())


class DecodeRatio:
    """Counts how much decoding time is owed: ``ratio`` seconds for each second of prefill or encoding.

    >>> ratio = DecodeRatio(1.0)
    >>> ratio.decoded(0.01)
    >>> ratio.read(0.004)
    >>> ratio.is_due
    False
    >>> ratio.read(0.007)
    >>> ratio.is_due
    True
    """

    def __init__(self, ratio: float) -> None:
        self._ratio = ratio
        self._step = 0.0  # seconds per decode step, a moving average
        self._owed = 0.0

    def read(self, seconds: float) -> None:
        """Add time of prefill or encoding."""
        self._owed = min(self._owed + self._ratio * seconds, _MOST_OWED_STEPS * self._step)

    def decoded(self, seconds: float) -> None:
        """Add the time of one decode step."""
        self._step = 0.8 * self._step + 0.2 * seconds if self._step else seconds
        self._owed = max(0.0, self._owed - seconds)

    def let_in(self, seconds: float) -> None:
        """Subtract the time of short requests that were let into a long call; the call has to make up for it."""
        self._owed -= seconds

    def forget(self) -> None:
        """Owe nothing, since no sequence is being decoded."""
        self._owed = 0.0

    @property
    def is_due(self) -> bool:
        """Whether a decode step should come next."""
        return self._owed >= self._step
