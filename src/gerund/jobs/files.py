"""Files that are written whole or not at all.

A symbolic link is never written to: neither is it followed nor replaced by a file. A link to a folder on the way is
followed as everywhere.

Knows: the disk, names, links. Does not know: what is in a file.
"""

import json
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from gerund.errors import InputError, OutputExistsError, ResourceError


@contextmanager
def whole_file(target: Path, *, apart: bool = False) -> Iterator[BinaryIO]:
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
        refuse_special(target)
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


def write_whole(target: Path, text: str) -> None:
    """Write a text file so that a reader sees the old one or the new one, never half of it.

    Raises:
        InputError: ``target`` is a symbolic link or no regular file.
        ResourceError: the disk is full or refuses; nothing is left behind.
    """
    with whole_file(target) as file:
        file.write(text.encode())


def write_json_lines(target: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a file with a JSON object a line, whole or not at all; half a surrogate pair becomes ``?``.

    Raises:
        InputError: ``target`` is a symbolic link or no regular file.
        ResourceError: the disk is full or refuses; nothing is left behind.
    """
    with whole_file(target) as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False).encode("utf-8", "replace") + b"\n")


def refuse_special(target: Path) -> None:
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


def refuse_existing(*targets: Path) -> None:
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
