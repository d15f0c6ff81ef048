"""Folders that are written whole or not at all.

A folder is written under a temporary name beside its place, flushed to the disk, and then put there in one
step. Whoever kills it on the way leaves the old folder or the new one, never half of either::

    .NAME.0f3a91c2.part/      hidden, beside NAME
        lock                  held by the process that writes; removed with the folder by a later one once it is gone
        folder/               becomes NAME

Knows: folders and the file system. Does not know: what is in the files.
"""

import ctypes
import errno
import os
import re
import secrets
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gerund import checks
from gerund.errors import OutputExistsError, ResourceError
from gerund.jobs.locks import give_back, remove_abandoned, take

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
    refuse_existing(checks.place("the folder to write", target), overwrite=overwrite)
    place = Path(os.path.realpath(target))  # a link stays a link, and what it points to is replaced
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(place)
        room = place.with_name(f".{place.name}.{secrets.token_hex(4)}.part")
        # Somebody who looks for abandoned folders may have it for a moment.
        lock = take(room, target, wait=10)
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
        give_back(lock)
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


def refuse_existing(target: Path, *, overwrite: bool) -> None:
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
