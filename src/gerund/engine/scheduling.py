"""Token-based admission control, and how an engine divides its time between decoding and prefill or encoding."""

import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any

from gerund.checks import demand_between
from gerund.errors import ClosedError, DeadlineError, QueueFullError, TooLargeError

# Before anything was measured: tokens a second, and for how many seconds that counts.
_GUESS = 1000.0
_GUESSED = 1.0
# Seconds of work after which older ones count half.
_MEMORY = 20.0
_LONGEST_WAIT = 60
_COUNTED = (
    *("tokens_read", "tokens_reused", "tokens_written", "texts_encoded", "tokens_encoded"),
    *("calls", "done", "cancelled", "late", "failed", "refused"),
)


class Job:
    """One request on its way through an engine.

    Args:
        tokens: what it counts.
        deadline: seconds from now after which nobody waits any more.

    Attributes:
        on_turn: takes the seconds that it waited for its turn.
    """

    def __init__(self, tokens: int, deadline: float | None = None) -> None:
        self.future: Future[Any] = Future()
        self.tokens = tokens
        self._came = time.monotonic()
        if deadline is not None:
            demand_between("deadline", deadline, float("-inf"), float("inf"))
        self._ends = None if deadline is None else self._came + deadline
        self.on_turn: Callable[[float], None] | None = None

    def begin(self) -> None:
        """Tell once, at the first of its turns, how long it waited for it."""
        tell, self.on_turn = self.on_turn, None
        if tell is not None:
            tell(time.monotonic() - self._came)

    @property
    def is_over(self) -> bool:
        """Whether nobody waits any more: it is done, was cancelled, or its time has passed."""
        if self._ends is not None and not self.future.done() and time.monotonic() > self._ends:
            self.fail(DeadlineError("the request was not done by its deadline"))
        return self.future.done()

    def settle(self, result: Any) -> None:
        """Hand over the result, unless nobody waits any more."""
        with suppress(InvalidStateError):
            self.future.set_result(result)

    def fail(self, error: BaseException) -> None:
        """Hand over an error, unless nobody waits any more."""
        with suppress(InvalidStateError):
            self.future.set_exception(error)


class Admission:
    """Counts what waits and what was done, and wakes whoever waits for a change.

    Args:
        most: tokens that may wait.
        largest: tokens of one request at most, which an empty queue takes though it be more than ``most``.
    """

    def __init__(self, most: int, largest: int) -> None:
        self._most, self._largest = most, max(most, largest)
        self.changed = threading.Condition(threading.RLock())
        # All names from the beginning: whoever asks for the state reads them while the engine counts.
        self.counts: Counter[str] = Counter(dict.fromkeys(_COUNTED, 0))
        self.is_open = False
        self.jobs: dict[int, Job] = {}
        self.tokens = 0
        self._done, self._seconds = _GUESS * _GUESSED, _GUESSED

    def admit(self, job: Job, take: Callable[[], None]) -> None:
        """Let a job in.

        Args:
            job: the job.
            take: puts it where it is worked on.

        Raises:
            ClosedError: nothing is taken any more.
            TooLargeError: it is more than ever fits.
            QueueFullError: too much waits already.
        """
        with self.changed:
            if not self.is_open:
                raise ClosedError("the engine takes nothing: it was not started yet, or is being closed")
            self._refuse(job.tokens)
            self.jobs[id(job)] = job
            self.tokens += job.tokens
            job.future.add_done_callback(lambda future: self._left(job, future))
            take()
            self.changed.notify_all()

    def _refuse(self, tokens: int) -> None:
        if tokens > self._largest:
            self.counts["refused"] += 1
            raise TooLargeError(
                f"the request counts {tokens} tokens, and the queue takes {self._largest} at most; divide it"
            )
        if self.jobs and self.tokens + tokens > self._most:
            self.counts["refused"] += 1
            wait = self.retry_after
            raise QueueFullError(
                f"{self.tokens} tokens wait already, and the queue takes {self._most}; try again in {wait} s", wait
            )

    def _left(self, job: Job, future: "Future[Any]") -> None:
        """Count a job that is done, however it ended; runs in whatever thread ended it."""
        with self.changed:
            self.jobs.pop(id(job), None)
            self.tokens -= job.tokens
            if future.cancelled():
                self.counts["cancelled"] += 1
            elif (error := future.exception()) is not None:
                late = isinstance(error, DeadlineError)
                self.counts["late" if late else "failed"] += 1
            else:
                self.counts["done"] += 1
            self.changed.notify_all()

    def worked(self, tokens: int, seconds: float) -> None:
        """Note how many tokens were done in how much time."""
        with self.changed:
            self._done += tokens
            self._seconds += seconds
            if self._seconds > 2 * _MEMORY:
                self._done, self._seconds = self._done / 2, self._seconds / 2

    @property
    def rate(self) -> float:
        """Tokens a second, lately."""
        return self._done / self._seconds

    @property
    def retry_after(self) -> int:
        """In how many seconds what waits will probably be done, 1 to 60."""
        return max(1, min(_LONGEST_WAIT, round(self.tokens / max(self.rate, 1e-9))))

    def wait_until_empty(self, timeout: float) -> bool:
        """Wait until nothing is left, and return whether that came about in time."""
        with self.changed:
            return self.changed.wait_for(lambda: not self.jobs, timeout)

    def end_all(self, error: Callable[[], BaseException]) -> None:
        """End everything that waits or is worked on."""
        with self.changed:
            left = list(self.jobs.values())
        for job in left:
            job.fail(error())


# Steps that writing may be behind at most: after a long pass that could not be interrupted, texts do not catch up with
# all that they missed while others wait.
_MOST_BEHIND = 16


class WritingRatio:
    """Counts what reading owes to writing.

    Args:
        ratio: seconds of writing for each second of reading.

    >>> ratio = WritingRatio(1.0)
    >>> ratio.wrote(0.01)
    >>> ratio.read(0.004)
    >>> ratio.is_due
    False
    >>> ratio.read(0.007)
    >>> ratio.is_due
    True
    """

    def __init__(self, ratio: float) -> None:
        self._ratio = ratio
        self._step = 0.0  # seconds of one step of writing, lately
        self._owed = 0.0

    def read(self, seconds: float) -> None:
        """Note a time of reading."""
        self._owed = min(self._owed + self._ratio * seconds, _MOST_BEHIND * self._step)

    def wrote(self, seconds: float) -> None:
        """Note the time of one step."""
        self._step = 0.8 * self._step + 0.2 * seconds if self._step else seconds
        self._owed = max(0.0, self._owed - seconds)

    def let_in(self, seconds: float) -> None:
        """Note a time of other work that was let into a long piece of reading; it has to be made up for."""
        self._owed -= seconds

    def forget(self) -> None:
        """Nobody writes any more, so nothing is owed."""
        self._owed = 0.0

    @property
    def is_due(self) -> bool:
        """Whether a step of writing should come next."""
        return self._owed >= self._step
