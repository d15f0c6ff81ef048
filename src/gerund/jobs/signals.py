"""SIGINT and SIGTERM: end cleanly, or finish the current step first."""

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


def interrupt_on_termination() -> None:
    """Let SIGTERM raise ``KeyboardInterrupt``; after the cleanup the process dies of the signal, as its sender expects.

    A second SIGTERM ends the process immediately. Nothing is changed in a thread other than the main one, where the
    signal is ignored or handled already, or in a process of ``torchrun``, whose siblings may wait for it in calls that
    no exception interrupts.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
        or os.environ.get("WORLD_SIZE", "1") != "1"
    ):
        return
    received = False

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        nonlocal received
        received = True
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        raise KeyboardInterrupt

    def die() -> None:
        if received:
            sys.stdout.flush()
            sys.stderr.flush()
            os.kill(os.getpid(), signal.SIGTERM)

    # Registered first, so that it runs last, after every other cleanup.
    atexit.register(die)
    signal.signal(signal.SIGTERM, interrupt)


@contextmanager
def interrupt_deferred(notice: str) -> Iterator[Callable[[], bool]]:
    """Defer the first SIGINT or SIGTERM to the end of the block, so that the current step can be finished.

    ``notice`` is then printed to stderr. A second signal acts immediately. If the block raises, the signal is dropped.
    Ignored signals, and threads other than the main one, are left alone. Yields a function that returns whether a
    signal has come.
    """
    received: list[int] = []

    def defer(number: int, _frame: FrameType | None) -> None:
        if received:
            restore()
            signal.raise_signal(number)
            return
        received.append(number)
        # Not by Python's own stream: the signal may have come while it was writing, which must not be entered twice.
        os.write(2, f"{notice}\n".encode())

    with handle_ending_signals(defer, ignored_too=False) as restore:
        yield lambda: bool(received)
    if received:
        signal.raise_signal(received[0])


@contextmanager
def handle_ending_signals(
    handler: Callable[[int, FrameType | None], None], *, ignored_too: bool
) -> Iterator[Callable[[], None]]:
    """Let ``handler`` take SIGINT and SIGTERM until the end of the block, in the main thread; elsewhere do nothing.

    With ``ignored_too`` also a signal that is ignored, as in a server that a shell has started in the background.
    Yields a function that restores the previous handlers early.
    """
    before: dict[int, signal._HANDLER] = {}

    def restore() -> None:
        while before:
            signal.signal(*before.popitem())

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            present = signal.getsignal(number)
            # None is a handler that was not set from Python, and could not be restored.
            if present is not None and (ignored_too or present != signal.SIG_IGN):
                before[number] = present
                signal.signal(number, handler)
    try:
        yield restore
    finally:
        restore()
