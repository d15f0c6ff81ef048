"""Locks that keep two processes from writing into one folder.

A lock is a file named ``lock`` in the folder, held by the operating system (flock on Unix, LockFileEx on Windows), so
that it ends with its process, however that ends. A file system without locks gives no protection and no error.

Knows: lock files, processes. Does not know: what is written in the folder.
"""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from gerund.errors import InputError, ResourceError

if TYPE_CHECKING:
    from filelock import BaseFileLock

LOCK = "lock"
# What a file system without locks answers.
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP)


@contextmanager
def hold(folder: Path, what: Path | str | None = None) -> Iterator[None]:
    """Keep other processes out of a folder until the block ends; the folder is made where it is missing.

    At the end the lock's file is removed, and so are the folder and those above it that were made here and are empty.

    Args:
        folder: the folder.
        what: what the message says is being written; None for the folder itself.

    Raises:
        InputError: another process holds it; the message names ``what`` and the process.
        ResourceError: the folder cannot be made or written.
    """
    what = folder if what is None else what
    try:
        missing = [place for place in (folder, *folder.parents) if not place.exists()]
        lock = take(folder, what)
    except OSError as error:
        raise ResourceError(f"cannot write {what}: {error.strerror or error}") from error
    try:
        yield
    finally:
        give_back(lock)
        with suppress(OSError):  # it holds something now
            for place in missing:
                place.rmdir()


def take(folder: Path, what: Path | str, *, wait: float = 0) -> "BaseFileLock":
    """Make a folder if need be and lock it.

    Args:
        folder: the folder.
        what: what the message says is being written.
        wait: seconds to wait for another process.

    Raises:
        InputError: another process holds it.
        OSError: the folder cannot be made or written.
    """
    from filelock import FileLock, Timeout

    folder.mkdir(parents=True, exist_ok=True)
    # Not tied to a thread: whoever was handed the lock may give it back. A file that loses its name while somebody
    # waits for it is opened anew.
    lock = FileLock(folder / LOCK, timeout=wait, thread_local=False)
    try:
        lock.acquire()
    except Timeout:
        owner = f"process {_owner(folder)}"
        raise InputError(f"{owner} is writing {what} already; wait for it or choose another name") from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    _note_owner(folder)
    return lock


def give_back(lock: "BaseFileLock") -> None:
    """Release a lock and remove its file."""
    path = Path(lock.lock_file)
    # Removed while it is held, since afterwards it may be another's. Windows removes no file that is open, and after
    # the release none that another has opened.
    for _ in range(2):
        with suppress(OSError):
            if os.name != "nt" or not lock.is_locked:
                path.unlink(missing_ok=True)
        if not lock.is_locked:
            return
        lock.release()
        if os.name != "nt":
            return


def remove_abandoned(folder: Path) -> None:
    """Remove a folder if it is empty, or if its lock is that of a process that is gone for certain."""
    from filelock import FileLock, Timeout

    if not (folder / LOCK).is_file():
        # Killed before it had its lock, or after it gave it back; who is about to lock it makes it again.
        with suppress(OSError):
            folder.rmdir()
        return
    lock = FileLock(folder / LOCK, timeout=0, thread_local=False)
    try:
        lock.acquire()
    except (Timeout, OSError):  # held, or a file system that cannot say
        return
    # While the lock is held, so that nobody begins in there meanwhile; Windows removes the lock's file only afterwards.
    shutil.rmtree(folder, ignore_errors=True)
    lock.release()
    shutil.rmtree(folder, ignore_errors=True)


def _owner(folder: Path) -> str:
    try:
        return (folder / LOCK).read_text(encoding="utf-8").split("\n")[0].strip() or "?"
    except (OSError, UnicodeDecodeError):  # Windows lets nobody read a locked file
        return "?"


def _note_owner(folder: Path) -> None:
    """Write down which process holds the lock, for the message to others."""
    path = folder / LOCK
    with suppress(OSError):
        # More than a line is written by filelock itself where the system has no flock, and has a meaning there.
        if path.read_bytes().count(b"\n") <= 1:
            path.write_bytes(f"{os.getpid()}\n".encode())
