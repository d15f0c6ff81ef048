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
    """Let SIGTERM raise ``KeyboardInterrupt``; the process dies of the signal when it has tidied up.

    So whoever sent it sees that it was obeyed. A second one ends the process at once. Nothing is changed in a thread
    other than the main one, where the signal is ignored or handled already, or in a process of ``torchrun``, whose
    siblings may be waiting for it in calls that no exception interrupts.
    """
    if not _may_handle():
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

    # What is registered first runs last, after all that others have to tidy up.
    atexit.register(die)
    signal.signal(signal.SIGTERM, interrupt)


@contextmanager
def interrupt_deferred(notice: str) -> Iterator[Callable[[], bool]]:
    """Let the first SIGINT or SIGTERM act at the end of the block only, so that a step under way can be finished.

    A second one acts at once. An error in the block goes first, and the signal is dropped. In a thread other than the
    main one, and for a signal that is ignored, nothing is changed.

    Args:
        notice: A line for the error stream when the signal comes.

    Yields:
        What tells whether a signal has come.
    """
    received: list[int] = []

    def put_off(number: int, _frame: FrameType | None) -> None:
        if received:
            restore()
            signal.raise_signal(number)
            return
        received.append(number)
        # The signal may have come while Python's own stream was writing, which must not be entered twice.
        os.write(2, f"{notice}\n".encode())

    with handle_ending_signals(put_off, ignored_too=False) as restore:
        yield lambda: bool(received)
    if received:
        signal.raise_signal(received[0])


@contextmanager
def handle_ending_signals(
    handler: Callable[[int, FrameType | None], None], *, ignored_too: bool
) -> Iterator[Callable[[], None]]:
    """Let ``handler`` take SIGINT and SIGTERM until the end of the block, in the main thread; elsewhere do nothing.

    Args:
        handler: Called with the signal's number and the frame that it interrupted.
        ignored_too: Take a signal that is ignored as well, as a server does that a shell has started in the background.

    Yields:
        What puts back the handlers of before, should that be needed within the block.
    """
    before: dict[int, signal._HANDLER] = {}

    def restore() -> None:
        while before:
            signal.signal(*before.popitem())

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            present = signal.getsignal(number)
            # None is a handler that was not set from Python, and could not be put back.
            if present is not None and (ignored_too or present != signal.SIG_IGN):
                before[number] = present
                signal.signal(number, handler)
    try:
        yield restore
    finally:
        restore()


def _may_handle() -> bool:
    return (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        and os.environ.get("WORLD_SIZE", "1") == "1"
    )
