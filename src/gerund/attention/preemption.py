"""Preemption points: during a forward pass, run other work between two decoder layers.

For a single thread that does all work, some of which can't wait for the end of a long pass. The other work may use the
same model; the result of the interrupted pass stays the same.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import Context
from threading import local


class _Pausing(local):
    work: Callable[[], None] | None = None


_pausing = _Pausing()


@contextmanager
def pausing(work: Callable[[], None]) -> Iterator[None]:
    """Let a function run after every decoder layer that this thread runs until the block ends.

    It is not called while it runs itself. An exception that it raises ends the pass.

    >>> with pausing(lambda: print("between two layers")):
    ...     pause()
    between two layers
    """
    before, _pausing.work = _pausing.work, work
    try:
        yield
    finally:
        _pausing.work = before


def pause(alone: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
    """Do what is to be done between two layers: nothing, mostly. What the pass set is undone meanwhile by ``alone``."""
    work = _pausing.work
    if work is None:
        return
    _pausing.work = None
    try:
        # Which adapter is active, and what a pass collects, are matters of the pass that is interrupted.
        with alone():
            Context().run(work)
    finally:
        _pausing.work = work
