"""Kills work before one of its steps on the disk.

A file that has not been flushed yet is torn in half, as a power cut would leave it. Forks a child for each run, which
wants a process without threads.
"""

import os
import signal
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import filelock  # noqa: F401  (imported once here rather than in every child)

STEPS = ("replace", "rename", "unlink", "rmdir", "mkdir", "ftruncate")


def killed_before(step: int, work: Callable[[], None]) -> bool:
    """Run ``work`` in a child that is killed before its ``step``-th step on the disk; tells whether it was."""
    child = os.fork()
    if child == 0:
        _kill_before(step)
        try:
            work()
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


def _kill_before(step: int) -> None:
    left = step

    def at_step(tear: int | None = None) -> None:
        nonlocal left
        if left == 0:
            if tear is not None:
                os.truncate(tear, os.fstat(tear).st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1

    def counted(name: str) -> Callable[..., object]:
        own = getattr(os, name)

        def call(*arguments: object, **options: object) -> object:
            at_step()
            return own(*arguments, **options)

        return call

    def fsync(handle: int) -> None:
        # The flush itself is left out: another process sees what was written anyway, and sooner.
        if stat.S_ISREG(os.fstat(handle).st_mode):
            at_step(tear=handle)

    os.fsync = fsync  # type: ignore[assignment]
    for name in STEPS:
        setattr(os, name, counted(name))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() if path.is_file() else b"" for path in sorted(folder.iterdir())}
