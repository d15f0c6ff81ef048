"""SIGTERM as an interruption: whoever is asked to end tidies up and says what was kept, as after Ctrl-C.

Knows: signals. Does not know: what is being done.
"""

import atexit
import os
import signal
import sys
import threading
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


def _may_handle() -> bool:
    return (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        and os.environ.get("WORLD_SIZE", "1") == "1"
    )
