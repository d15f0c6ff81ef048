"""Atomic writes of files and folders, and locks that keep two processes from writing the same one.

A file or folder is written under a hidden temporary name next to its place, flushed to the disk, and renamed. A
process that is killed on the way leaves the old version or the new one, never half of either::

    .NAME.part                hidden, becomes the file NAME
    .NAME.0f3a91c2.part/      hidden, next to the folder NAME
        lock                  held by the process that writes; a later process removes the folder if its owner is gone
        folder/               becomes the folder NAME

A lock is a file named ``lock`` in a folder, held by the operating system (flock on Unix, LockFileEx on Windows), so it
ends with its process. A file system without locks gives no protection and no error.

An output file that is a symbolic link is never followed or replaced; a link to a folder on the way is followed.
"""

import errno
import json
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from gerund.errors import InputError, OutputExistsError, ResourceError

if TYPE_CHECKING:
    from filelock import BaseFileLock
import ctypes
import re
import sys

from gerund import checks


@contextmanager
def atomic_file(target: Path, *, apart: bool = False) -> Iterator[BinaryIO]:
    """Yield a file to write into; it becomes ``target`` in one step when the block ends without an error.

    Whoever is killed on the way leaves what was at ``target`` before, and perhaps a hidden ``.part`` file, which the
    next attempt takes over.

    Args:
        target: where the file goes.
        apart: another process may write the same file at the same time: the hidden file gets a name of its own.

    Raises:
        InputError: ``target`` is a symbolic link or no regular file.
        ResourceError: the disk is full or refuses; nothing is left behind.
    """
    if not target.name:
        raise InputError(f"{target} is a folder; name a file in it as the output")
    part = target.with_name(f".{target.name}{f'.{secrets.token_hex(4)}' if apart else ''}.part")
    try:
        require_regular_file(target)
        # A link that somebody has put at the temporary name is removed, not followed.
        if part.is_symlink():
            part.unlink()
        with part.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(target)
        flush_names(target.parent)
    except BaseException as error:
        with suppress(OSError):  # where nothing can be written nothing can be removed
            part.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise ResourceError(f"{target} was not written: {error.strerror or error}") from error
        raise


def errors_file_of(output: Path) -> Path:
    """Return where a job lists what it could not use.

    >>> errors_file_of(Path("a/notes.parquet")).name
    'notes.errors.jsonl'
    """
    return output.with_name(f"{output.stem}.errors.jsonl")


def write_atomic(target: Path, text: str) -> None:
    """Write a text file so that a reader sees the old one or the new one, never half of it.

    Raises:
        InputError: ``target`` is a symbolic link or no regular file.
        ResourceError: the disk is full or refuses; nothing is left behind.
    """
    with atomic_file(target) as file:
        file.write(text.encode())


def write_json_lines(target: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a file with a JSON object a line, whole or not at all; half a surrogate pair becomes ``?``.

    Raises:
        InputError: ``target`` is a symbolic link or no regular file.
        ResourceError: the disk is full or refuses; nothing is left behind.
    """
    with atomic_file(target) as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False).encode("utf-8", "replace") + b"\n")


def require_regular_file(target: Path) -> None:
    """Refuse an output that is a symbolic link, a device or a pipe: none of them can be replaced by a whole file.

    Raises:
        InputError: it is one of these.
    """
    # os.path tells of a name that no system takes that it is not there; writing then says what is wrong with it.
    if os.path.islink(target):  # noqa: PTH114
        # As the link spells it: a target that is a link again, or is not there, is told like any other.
        raise InputError(f"{target} is a symbolic link to {target.readlink()}; name the file itself as the output")
    if os.path.exists(target) and not (target.is_file() or target.is_dir()):  # noqa: PTH110
        raise InputError(f"{target} is not a regular file; choose another output")


def require_new_files(*targets: Path) -> None:
    """Refuse outputs that are there already.

    Raises:
        OutputExistsError: one of them is there.
    """
    for target in targets:
        if os.path.exists(target):  # noqa: PTH110
            raise OutputExistsError(f"{target} exists already; choose another name or give --force to replace it")


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, unless they are there.

    Raises:
        ResourceError: the place is not one that can be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ResourceError(f"the folder {folder} cannot be made: {error.strerror or error}") from error


def flush_names(folder: Path) -> None:
    """Force the names of a folder's files to the disk, so that a rename outlives a power cut."""
    # Not every system and file system can; then the rename is as safe as it gets.
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


LOCK = "lock"
# What a file system without locks answers.
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP)


@contextmanager
def lock_folder(folder: Path, what: Path | str | None = None) -> Iterator[None]:
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
        lock = acquire_lock(folder, what)
    except OSError as error:
        raise ResourceError(f"cannot write {what}: {error.strerror or error}") from error
    try:
        yield
    finally:
        release_lock(lock)
        with suppress(OSError):  # it holds something now
            for place in missing:
                place.rmdir()


def acquire_lock(folder: Path, what: Path | str, *, wait: float = 0) -> "BaseFileLock":
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


def release_lock(lock: "BaseFileLock") -> None:
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


_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


@contextmanager
def atomic_folder(target: str | Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield an empty folder to write into; it becomes ``target`` when the block ends without an error.

    Args:
        target: where the folder goes. An empty folder there is taken as none.
        overwrite: replace a folder that is there; without it that is an error.

    Raises:
        ConfigError: ``target`` is no path.
        OutputExistsError: there is something at ``target`` already.
        ResourceError: the disk is full; nothing is left behind.
    """
    require_new_folder(checks.place("the folder to write", target), overwrite=overwrite)
    place = Path(os.path.realpath(target))  # a link stays a link, and what it points to is replaced
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(place)
        room = place.with_name(f".{place.name}.{secrets.token_hex(4)}.part")
        # Somebody who looks for abandoned folders may have it for a moment.
        lock = acquire_lock(room, target, wait=10)
    except OSError as error:
        raise ResourceError(f"cannot write beside {target}: {error.strerror or error}") from error
    work = room / "folder"
    try:
        work.mkdir()
        yield work
        _open_to_readers(work)
        flush_folder(work)
        _put(work, place, overwrite=overwrite)
    except BaseException as error:
        reason = _system_error(error)
        if reason is None:
            raise
        raise ResourceError(f"{target} was not written: {reason}") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
        release_lock(lock)
        shutil.rmtree(room, ignore_errors=True)


def _remove_abandoned(place: Path) -> None:
    """Remove what writers of the same place have left that were killed."""
    named = re.compile(rf"\.{re.escape(place.name)}\.[0-9a-f]{{8}}\.part")
    with suppress(PermissionError):  # a folder that may be written and not listed
        for path in place.parent.iterdir():
            if named.fullmatch(path.name) and path.is_dir():
                remove_abandoned(path)


def flush_folder(folder: Path) -> None:
    """Force every file of a folder to the disk."""
    for path in [*folder.rglob("*"), folder]:
        _flush(path)


def require_new_folder(target: Path, *, overwrite: bool) -> None:
    """Refuse an output that is there already; an empty folder is taken as none.

    Raises:
        OutputExistsError: it is there and may not be replaced, or is no folder.
    """
    if target.is_dir():
        if any(target.iterdir()) and not overwrite:
            raise OutputExistsError(
                f"{target} exists already; choose another name, or replace it (--force, overwrite=True)"
            )
    elif target.exists() or target.is_symlink():
        raise OutputExistsError(f"{target} exists already and is not a folder")


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _system_error(error: BaseException) -> str | None:
    """Return what the operating system refused; None when the error is no such refusal."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.strerror or str(error)
    # safetensors reports what the system refused as an error of its own.
    found = re.search(r"\(os error (\d+)\)", str(error))
    return os.strerror(int(found[1])) if found else None


def _open_to_readers(work: Path) -> None:
    """Give files the rights that the folder got from the user's umask: safetensors lets only the owner read."""
    for path in work.rglob("*"):
        if path.is_file():
            path.chmod(work.stat().st_mode & 0o666)


def _put(work: Path, target: Path, *, overwrite: bool) -> None:
    if not overwrite or not target.exists():
        try:
            work.rename(target)  # replaces an empty folder, and no other
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            raise OutputExistsError(f"{target} was written by someone else in the meantime") from error
    elif _exchange(work, target):
        shutil.rmtree(work, ignore_errors=True)
    else:
        # No exchange on this system: the old folder is whole under its other name if we are killed here.
        old = target.with_name(f".{target.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
        work.rename(target)
        shutil.rmtree(old, ignore_errors=True)
    _flush(target.parent)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two names in one step, where the system can (Linux)."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    done = rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE)
    return bool(done == 0)
