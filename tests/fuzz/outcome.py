"""What a call may do with any arguments: work, or refuse them in one sentence."""

import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hypothesis import HealthCheck, settings

from gerund.errors import GerundError

_SECONDS = 30
# Every run is the same for one seed; a call's own limit replaces the deadline, which counts other processes' time.
FUZZ: dict[str, Any] = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}


def fuzz(examples: int) -> settings:
    """Return hypothesis settings for so many examples."""
    return settings(max_examples=examples, **FUZZ)


class TooLongError(BaseException):
    """A call did not come back."""


@contextmanager
def limit(seconds: float = _SECONDS) -> Iterator[None]:
    """End the block with an error when it takes too long, in CPU time: the machine may be busy."""

    def stop(*_: object) -> None:
        raise TooLongError

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    except TooLongError:
        raise AssertionError(f"more than {seconds} seconds") from None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def outcome(call: Callable[[], Any]) -> str:
    """Make a call; returns ``worked`` or ``refused``. Any error but a GerundError of one sentence goes through."""
    try:
        with limit(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call()
    except GerundError as error:
        message = str(error)
        assert "\n" not in message, message
        assert 0 < len(message) <= 300, message
        assert message.isprintable(), repr(message)
        return "refused"
    return "worked"
