"""Files read with errors that name the line, and files written whole or not at all.

Knows: bytes, compression, the disk. Does not know: what is in a file.
"""

import gzip
import lzma
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from gerund.errors import DataError, ResourceError

COMPRESSED = (".gz", ".xz")


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open a plain or compressed file for reading.

    Raises:
        DataError: it cannot be read, or the archive is broken.
    """
    opener: Callable[..., BinaryIO] = {".xz": lzma.open, ".gz": gzip.open}.get(path.suffix.lower(), open)  # type: ignore[assignment]
    try:
        with opener(path, "rb") as file:
            yield file
    except (lzma.LZMAError, gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise DataError(f"{path}: broken or truncated archive ({error})") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error


def decode(raw: bytes, where: str) -> str:
    """Return bytes as text.

    Raises:
        DataError: they are not UTF-8; the message begins with ``where``.
    """
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not valid UTF-8 at byte {error.start}") from error


def checked_text(value: object, where: str, column: str) -> str:
    """Return a value of a row as text.

    Raises:
        DataError: it is no text, or one that no file and no tokenizer can hold; the message begins with
            ``where``.
    """
    if not isinstance(value, str):
        raise DataError(f"{where}: {column!r} is not a text but {type(value).__name__}")
    try:
        # JSON may spell half a surrogate pair.
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: {column!r} holds a lone surrogate at character {error.start}") from error
    return value


@contextmanager
def whole_file(target: Path) -> Iterator[BinaryIO]:
    """Yield a file to write into; it becomes ``target`` in one step when the block ends without an error.

    Whoever is killed on the way leaves what was at ``target`` before, and perhaps a hidden ``.part`` file.

    Raises:
        ResourceError: the disk is full or refuses; nothing is left behind.
    """
    part = target.with_name(f".{target.name}.part")
    try:
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


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, unless they are there.

    Raises:
        ResourceError: the place is not one that can be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ResourceError(f"the folder {folder} cannot be made: {error.strerror or error}") from error


def write_whole(target: Path, text: str) -> None:
    """Write a text file so that a reader sees the old one or the new one, never half of it.

    Raises:
        ResourceError: the disk is full or refuses; nothing is left behind.
    """
    with whole_file(target) as file:
        file.write(text.encode())


def flush_names(folder: Path) -> None:
    """Force the names of a folder's files to the disk, so that a rename outlives a power cut."""
    # Not every system and file system can; then the rename is as safe as it gets.
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
