"""What a call may do with whatever it is given: work, or refuse it in one sentence."""

import signal
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from gerund.errors import GerundError

_SECONDS = 30


class TooLongError(BaseException):
    """A call did not come back."""


@contextmanager
def limit(seconds: float = _SECONDS) -> Iterator[None]:
    """End the block with an error when it takes too long, by what it computes: the machine may be busy."""

    def stop(*_: object) -> None:
        raise TooLongError

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


class Ledger:
    """Counts what calls did, and keeps one example of everything that they must not do."""

    def __init__(self) -> None:
        self.done: Counter[str] = Counter()
        self.wrong: dict[str, str] = {}

    def note(self, what: str, call: Callable[[], Any]) -> None:
        """Make a call and see how it ends.

        Args:
            what: the call, to be read when it ends wrongly.
            call: the call.
        """
        try:
            with limit(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                call()
        except GerundError as error:
            self.done["refused"] += 1
            message = str(error)
            if "\n" in message or not 0 < len(message) <= 300 or not message.isprintable():
                self.wrong.setdefault(f"no sentence: {message[:60]!r}", f"{what[:400]}: {message!r}")
        except (Exception, TooLongError) as error:
            frames = traceback.extract_tb(error.__traceback__)
            own = [
                f"{frame.filename.rpartition('/gerund/')[2]}:{frame.lineno}"
                for frame in frames
                if "/src/gerund/" in frame.filename
            ]
            self.done["wrong"] += 1
            said = " ".join(str(error).split())[:120]
            self.wrong.setdefault(
                f"{type(error).__name__} at {own[-1:] or said}", f"{what[:400]}: {said} by way of {own[-4:]}"
            )
        else:
            self.done["worked"] += 1

    def report(self) -> str:
        """Return everything that was wrong, a line each; empty where nothing was."""
        return "\n".join(f"{key} <- {example}" for key, example in self.wrong.items())
