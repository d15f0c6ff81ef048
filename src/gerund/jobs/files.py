"""Atomic writes of files and folders, and locks that keep two processes from writing the same one.

A file or folder is written under a hidden temporary name next to its target, flushed to the disk, and renamed. A
process that is killed on the way leaves the old version or the new one, never half of either::

    .NAME.part                hidden, becomes the file NAME
    .NAME.0f3a91c2.part/      hidden, next to the folder NAME
        lock                  held by the process that writes; a later process removes the folder if its owner is gone
        folder/               becomes the folder NAME

A lock is a file named ``lock`` in a folder, held by the operating system (flock on Unix, LockFileEx on Windows), so it
ends with its process. A file system without locks gives no protection and no error.

An output file that is a symbolic link is never followed or replaced; a link to a folder on the way is followed.
"""

import ctypes
import errno
import json
import os
import re
import secrets
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from gerund import checks
from gerund.errors import InputError, OutputExistsError, ResourceError

if TYPE_CHECKING:
    from filelock import BaseFileLock

LOCK = "lock"
# Error codes of a file system without locks.
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP)
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


@contextmanager
def atomic_file(target: Path, *, apart: bool = False) -> Iterator[BinaryIO]:
    """Yield a binary file that becomes ``target`` when the block ends without an error.

    With ``apart`` the temporary name is unique, for a target that several processes may write at the same time.
    Without it, the next attempt overwrites what a killed process has left.
    """
    if not target.name:
        raise InputError(f"{target} is a folder; name a file in it as the output")
    part = target.with_name(f".{target.name}{f'.{secrets.token_hex(4)}' if apart else ''}.part")
    try:
        require_regular_file(target)
        # A link that someone has put at the temporary name is removed, not followed.
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
            raise ResourceError(f"cannot write {target}: {error.strerror or error}") from error
        raise


def write_atomic(target: Path, text: str, *, apart: bool = False) -> None:
    """Write a text file so that a reader sees the old version or the new one; ``apart`` as in ``atomic_file``."""
    with atomic_file(target, apart=apart) as file:
        file.write(text.encode())


def write_json_lines(target: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write one JSON object per line, atomically; a lone surrogate becomes ``?``."""
    with atomic_file(target) as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False).encode("utf-8", "replace") + b"\n")


def errors_file_of(output: Path) -> Path:
    """Return the file in which a job lists the input that it could not use.

    >>> errors_file_of(Path("a/notes.parquet")).name
    'notes.errors.jsonl'
    """
    return output.with_name(f"{output.stem}.errors.jsonl")


def require_regular_file(target: Path) -> None:
    """Raise ``InputError`` for an output that can't be replaced atomically: a symbolic link, a device or a pipe."""
    # os.path answers False for a name that the system doesn't allow; writing then reports what is wrong with it.
    if os.path.islink(target):  # noqa: PTH114
        raise InputError(f"{target} is a symbolic link to {target.readlink()}; name the file itself as the output")
    if os.path.exists(target) and not (target.is_file() or target.is_dir()):  # noqa: PTH110
        raise InputError(f"{target} is not a regular file; choose another output")


def require_new_files(*targets: Path) -> None:
    """Raise ``OutputExistsError`` if one of the outputs exists."""
    for target in targets:
        if os.path.exists(target):  # noqa: PTH110
            raise OutputExistsError(f"{target} exists already; choose another name or give --force to replace it")


def require_new_folder(target: Path, *, overwrite: bool) -> None:
    """Raise ``OutputExistsError`` if the output is a file, or a folder that isn't empty and may not be replaced."""
    if target.is_dir():
        if any(target.iterdir()) and not overwrite:
            raise OutputExistsError(
                f"{target} exists already; choose another name, or replace it (--force, overwrite=True)"
            )
    elif target.exists() or target.is_symlink():
        raise OutputExistsError(f"{target} exists already and is not a folder")


@contextmanager
def explained(failure: str) -> Iterator[None]:
    """Raise ``ResourceError`` for an error of the system: what failed, and the system's reason."""
    try:
        yield
    except OSError as error:
        raise ResourceError(f"{failure}: {error.strerror or error}") from error


def make_folder(folder: Path) -> None:
    """Make a folder and its parents where they are missing."""
    with explained(f"cannot make the folder {folder}"):
        folder.mkdir(parents=True, exist_ok=True)


def flush_names(folder: Path) -> None:
    """Force the names of a folder's files to the disk, so that a rename survives a power cut."""
    with suppress(OSError):  # not every file system can, and Windows opens no folder
        _flush(folder)


def _flush(path: Path) -> None:
    # Windows flushes only what may be written.
    handle = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def lock_folder(folder: Path, what: Path | str | None = None) -> Iterator[None]:
    """Lock a folder until the block ends; it is made where it is missing.

    At the end the lock file is removed, and so are the folders that were made here if they are empty. ``what`` names
    the output in messages (default: the folder). Raises ``InputError`` if another process holds the lock, and names it.
    """
    what = folder if what is None else what
    with explained(f"cannot write {what}"):
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        lock = acquire_lock(folder, what)
    try:
        yield
    finally:
        release_lock(lock)
        with suppress(OSError):  # not empty
            for path in missing:
                path.rmdir()


def acquire_lock(folder: Path, what: Path | str, *, wait: float = 0) -> "BaseFileLock":
    """Lock a folder, made if need be; wait up to ``wait`` seconds for another process, then raise ``InputError``."""
    from filelock import FileLock, Timeout

    folder.mkdir(parents=True, exist_ok=True)
    # Not tied to a thread: another thread may release it. filelock reopens a file that is removed during the wait.
    lock = FileLock(folder / LOCK, timeout=wait, thread_local=False)
    try:
        lock.acquire()
    except Timeout:
        owner = f"process {_owner(folder)}"
        raise InputError(f"{owner} is writing {what} already; wait for it or choose another name") from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    with suppress(OSError):
        # filelock itself writes more than one line where the system has no flock, and needs them.
        if (folder / LOCK).read_bytes().count(b"\n") <= 1:
            (folder / LOCK).write_bytes(f"{os.getpid()}\n".encode())
    return lock


def release_lock(lock: "BaseFileLock") -> None:
    """Release a lock and remove its file."""
    path = Path(lock.lock_file)
    # Removed while it is locked, since afterwards it may be another process's. Windows can't remove an open file, and
    # after the release not a file that another process has opened.
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
    """Remove a folder if it is empty, or if the process that held its lock is certainly gone."""
    from filelock import FileLock, Timeout

    if not (folder / LOCK).is_file():
        # Its process was killed before it locked the folder, or is about to, and then makes the folder again.
        with suppress(OSError):
            folder.rmdir()
        return
    lock = FileLock(folder / LOCK, timeout=0, thread_local=False)
    try:
        lock.acquire()
    except (Timeout, OSError):  # held, or a file system that cannot say
        return
    # While locked, so that no other process begins in there; Windows removes the lock file only afterwards.
    shutil.rmtree(folder, ignore_errors=True)
    lock.release()
    shutil.rmtree(folder, ignore_errors=True)


def _owner(folder: Path) -> str:
    try:
        return (folder / LOCK).read_text(encoding="utf-8").split("\n")[0].strip() or "?"
    except (OSError, UnicodeDecodeError):  # Windows lets no other process read a locked file
        return "?"


@contextmanager
def atomic_folder(target: str | Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield an empty folder that becomes ``target`` when the block ends without an error.

    A folder that isn't empty is replaced only with ``overwrite``; otherwise ``OutputExistsError`` is raised.
    """
    require_new_folder(checks.place("the folder to write", target), overwrite=overwrite)
    path = Path(os.path.realpath(target))  # a link stays a link, and its target is replaced
    with explained(f"cannot write next to {target}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned_parts(path)
        part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
        # A process that looks for abandoned folders may hold the lock for a moment.
        lock = acquire_lock(part, target, wait=10)
    work = part / "folder"
    try:
        work.mkdir()
        yield work
        _give_usual_rights(work)
        flush_folder(work)
        _move_into_place(work, path, overwrite=overwrite)
    except BaseException as error:
        reason = _system_error(error)
        if reason is None:
            raise
        raise ResourceError(f"cannot write {target}: {reason}") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
        release_lock(lock)
        shutil.rmtree(part, ignore_errors=True)


def _remove_abandoned_parts(target: Path) -> None:
    """Remove what killed writers of the same target have left."""
    named = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{8}}\.part")
    with suppress(PermissionError):  # a folder that may be written and not listed
        for path in target.parent.iterdir():
            if named.fullmatch(path.name) and path.is_dir():
                remove_abandoned(path)


def flush_folder(folder: Path) -> None:
    """Force every file of a folder to the disk, and their names."""
    for path in folder.rglob("*"):
        flush_names(path) if path.is_dir() else _flush(path)
    flush_names(folder)


def _system_error(error: BaseException) -> str | None:
    """Return the operating system's message behind an error, if there is one."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.strerror or str(error)
    # safetensors raises system errors as an error class of its own.
    code = re.search(r"\(os error (\d+)\)", str(error))
    return os.strerror(int(code[1])) if code else None


def _give_usual_rights(work: Path) -> None:
    """Give files the rights that the folder got from the user's umask: safetensors lets only the owner read."""
    for path in work.rglob("*"):
        if path.is_file():
            path.chmod(work.stat().st_mode & 0o666)


def _move_into_place(work: Path, target: Path, *, overwrite: bool) -> None:
    if not overwrite or not target.exists():
        try:
            work.rename(target)  # replaces an empty folder, and no other
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            raise OutputExistsError(f"another process wrote {target} in the meantime") from error
    elif _exchange(work, target):
        shutil.rmtree(work, ignore_errors=True)
    else:
        # No exchange on this system: a kill here leaves the old folder complete under its other name.
        old = target.with_name(f".{target.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
        work.rename(target)
        shutil.rmtree(old, ignore_errors=True)
    flush_names(target.parent)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two names atomically, where the system can (Linux); returns whether it did."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    return bool(rename(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0)
