"""Open plain or compressed files, decode text, and parse and batch rows, with errors that name the line."""

import gzip
import json
import lzma
import math
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from gerund.checks import open_input
from gerund.errors import DataError

Item = TypeVar("Item")

COMPRESSED = (".gz", ".xz")
_MOST_ZEROS = 0.4


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open a plain or compressed file for reading; errors, also within the block, become ``DataError``."""
    unpack: Callable[..., BinaryIO] | None = {".xz": lzma.open, ".gz": gzip.open}.get(path.suffix.lower())  # type: ignore[assignment]
    try:
        with open_input(path) as packed:
            if unpack is None:
                yield packed
            else:
                with unpack(packed, "rb") as file:
                    yield file
    except (lzma.LZMAError, gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise DataError(f"{path}: broken or truncated archive ({error})") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error


def decode(raw: bytes, where: str) -> str:
    """Decode UTF-8; a ``DataError`` begins with ``where``."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise not_utf8(error, where) from error
    # English in UTF-16 is valid UTF-8: every second byte is zero.
    if raw.count(0) > _MOST_ZEROS * len(raw):
        raise DataError(f"{where}: every second byte is zero, as in UTF-16; convert it to UTF-8")
    return text


def not_utf8(error: UnicodeDecodeError, where: str) -> DataError:
    """Return the error for bytes that aren't UTF-8."""
    return DataError(f"{where}: not valid UTF-8 at byte {error.start}; convert it to UTF-8")


def shown_path(path: str | Path) -> str:
    r"""Return a path as valid UTF-8: other bytes are escaped.

    >>> shown_path(os.fsdecode(b"caf\xe9.txt"))
    'caf\\xe9.txt'
    """
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def as_utf8(text: str) -> str:
    """Return a text as valid UTF-8: lone surrogates, as in some JSON and file names, become ``?``."""
    return text.encode("utf-8", "replace").decode()


def json_row(line: str, where: str) -> dict[str, Any]:
    """Parse a line as a JSON object; a ``DataError`` begins with ``where``.

    >>> json_row("[1, 2]", "a.jsonl, line 3")
    Traceback (most recent call last):
    gerund.errors.DataError: a.jsonl, line 3: expected a JSON object, found list
    """
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not valid JSON ({error})") from error
    if not isinstance(row, dict):
        raise DataError(f"{where}: expected a JSON object, found {type(row).__name__}")
    return row


def field_of(row: Mapping[str, Any], name: str, where: str) -> Any:
    """Return a field that a row must have."""
    if name not in row:
        raise DataError(f"{where}: no field {name!r}; present are: {', '.join(row) or 'none'}")
    return row[name]


def checked_text(value: object, where: str, column: str) -> str:
    """Return a value of a row that must be a string without lone surrogates; a ``DataError`` begins with ``where``."""
    if not isinstance(value, str):
        raise DataError(f"{where}: {column!r} is not a text but {type(value).__name__}")
    try:
        # JSON may spell a lone surrogate, which no file and no tokenizer takes.
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: {column!r} holds a lone surrogate at character {error.start}") from error
    return value


def finite_number(value: Any, where: str, column: str) -> float:
    """Return a value of a row that must be a finite number; tables of text have it as text."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number) or isinstance(value, bool):
        raise DataError(f"{where}: {column!r} is not a number: {str(value)[:40]!r}")
    return number


def filled_text(value: object, where: str, column: str) -> str:
    """Return a value of a row that must be a text with more than white space."""
    text = checked_text(value, where, column)
    if not text.strip():
        raise DataError(f"{where}: {column!r} is empty")
    return text


def batched_by_size(
    items: Iterable[Item], size_of: Callable[[Item], int], enough: int, most: int | None = None
) -> Iterator[list[Item]]:
    """Yield items in batches, each up to the item with which it reaches a size, or a number of items.

    >>> list(batched_by_size(["a", "bcd", "e", "f"], len, 4))
    [['a', 'bcd'], ['e', 'f']]
    """
    batch: list[Item] = []
    size = 0
    for item in items:
        batch.append(item)
        size += size_of(item)
        if size >= enough or len(batch) == most:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
