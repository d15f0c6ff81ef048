"""Validate user input: paths, names, flags, texts and JSON files.

Knows: paths, the limits of file systems, JSON. Does not know: what any of it is for.
"""

import io
import json
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from numbers import Integral, Real
from pathlib import Path
from typing import Any, BinaryIO

from gerund.errors import ConfigError, DataError, TextError, unknown_name

_LONGEST_NAME = 255  # bytes, on the file systems in use
_LONGEST_PATH = 4095
_SECONDS_FOR_A_WRITER = 10.0


def place(what: str, value: Any) -> Path:
    """Return a path that a file system could hold; ``what`` is the subject of the message if it is not one.

    >>> place("adapter", 5)
    Traceback (most recent call last):
    gerund.errors.ConfigError: adapter is a path, not 5
    """
    if not isinstance(value, str | os.PathLike) or isinstance(os.fspath(value), bytes):
        raise ConfigError(f"{what} is a path, not {value!r}")
    text = os.fspath(value)
    if "\0" in text:
        raise ConfigError(f"{what} is no path: it holds a NUL character")
    try:
        raw = os.fsencode(text)
    except UnicodeEncodeError as error:
        raise ConfigError(f"{what} is no path: a lone surrogate at character {error.start}") from error
    longest = max(map(len, raw.replace((os.altsep or os.sep).encode(), os.sep.encode()).split(os.sep.encode())))
    if longest > _LONGEST_NAME or len(raw) > _LONGEST_PATH:
        bytes_, limit = (longest, _LONGEST_NAME) if longest > _LONGEST_NAME else (len(raw), _LONGEST_PATH)
        raise ConfigError(f"{what} is no path: {text[:40]}... has {bytes_} bytes where file systems allow {limit}")
    return Path(text)


def one_of(kind: str, value: Any, valid: Sequence[str]) -> None:
    """Refuse what is not one of a few names.

    >>> one_of("pooling", "max", ["mean", "last"])
    Traceback (most recent call last):
    gerund.errors.ConfigError: unknown pooling 'max'; valid are: mean, last
    """
    if not isinstance(value, str) or value not in valid:
        raise unknown_name(kind, value, list(valid))


def demand_fields(kind: type, data: Iterable[str], where: str) -> None:
    """Refuse names that are no fields of a dataclass; ``where`` is what they are fields in or of."""
    known = [item.name for item in fields(kind)]
    for name in data:
        if name not in known:
            raise unknown_name(f"field {where}", name, known)


def whole_number(name: str, value: Any) -> int:
    """Return a whole number, also one of numpy's, as Python's own."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ConfigError(f"{name} is a whole number, not {value!r}")
    return int(value)


def demand_number(name: str, value: Any) -> None:
    """Refuse what is not a number."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ConfigError(f"{name} is a number, not {value!r}")


def check_dimensions(dimensions: int | None, most: int | None = None) -> None:
    """Refuse a number of dimensions that a vector can't be cut to; ``most`` is None if it is not known yet."""
    if dimensions is None:
        return
    if whole_number("dimensions", dimensions) < 1 or (most is not None and dimensions > most):
        limit = "as many as a vector has" if most is None else f"the model's {most}"
        raise ConfigError(f"dimensions={dimensions} is not between 1 and {limit}")


def flag(name: str, value: Any) -> bool:
    """Return a setting that is on or off."""
    if type(value).__name__ not in ("bool", "bool_") and not isinstance(value, Integral):
        raise ConfigError(f"{name} is True or False, not {value!r}")
    return bool(value)


def flag_or_none(name: str, value: Any) -> bool | None:
    """Return a setting that is on, off or left out."""
    return None if value is None else flag(name, value)


def is_listing(value: Any) -> bool:
    """Whether a value holds others in a row: no text, no mapping, no table and no array without a dimension."""
    if isinstance(value, str | bytes | bytearray | Mapping) or not hasattr(value, "__iter__"):
        return False
    return getattr(value, "ndim", 1) == 1 and not isinstance(value, type)


def check_unicode(what: str, text: str, index: int | None = None) -> None:
    """Refuse half of a surrogate pair, which undecodable bytes of a command line turn into.

    ``what`` is what the text is, such as ``the prompt``; ``index`` is its number, where there are several.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        reason = f"is not valid Unicode: a lone surrogate at character {error.start}"
        raise (TextError(f"{what} {reason}") if index is None else TextError.about(what, index, reason)) from error


def some_texts(one: str, several: str, texts: Any) -> list[str]:
    """Return texts as a list, none of them blank; messages call them ``one`` and ``several``.

    >>> some_texts("query", "queries", ["bread", " "])
    Traceback (most recent call last):
    gerund.errors.TextError: query 1 is empty
    """
    if not is_listing(texts):
        raise TextError(f"{several} are a list of texts, not {type(texts).__name__}")
    checked = list(texts)
    for index, text in enumerate(checked):
        if not isinstance(text, str):
            raise TextError.about(one, index, f"is not a text but {type(text).__name__}")
        check_unicode(one, text, index)
        if not text.strip():
            raise TextError.about(one, index, "is empty")
    return checked


def check_texts(texts: Any) -> list[str]:
    """Return the texts as a list, refusing whatever is not a string."""
    if isinstance(texts, str):
        return [texts]
    if not is_listing(texts):
        raise TextError(f"texts are strings or a list of strings, not {type(texts).__name__}")
    listed = list(texts)
    for index, text in enumerate(listed):
        if not isinstance(text, str):
            raise TextError.about("text", index, f"is not a string but {type(text).__name__}: {str(text)[:40]!r}")
    return listed


def check_candidates(prefixes: Any, continuations: Any) -> tuple[list[str], list[list[str]]]:
    """Return prefixes and the continuations of each as lists, refusing whatever is something else."""
    checked = check_texts(prefixes)
    listed = [*continuations] if is_listing(continuations) else [continuations]
    for candidates in listed:
        if not is_listing(candidates):
            raise TextError(
                f"each prefix has a list of continuations, such as [['one', 'two']], and not {candidates!r}"
            )
    if len(listed) != len(checked):
        raise TextError(f"{len(checked)} prefixes have {len(listed)} lists of continuations")
    texts = [check_texts(candidates) for candidates in listed]
    refuse_blank(texts)
    return checked, texts


def refuse_blank(continuations: Sequence[Sequence[str]]) -> None:
    """Refuse continuations without a character but white space."""
    for number, texts in enumerate(continuations):
        for index, text in enumerate(texts):
            if not text.strip():
                raise TextError(f"continuation {index} of prefix {number} is empty")


def open_input(path: str | Path) -> BinaryIO:
    """Open a file for reading its bytes; of a named pipe a writer is waited for a few seconds, and not for ever."""
    path = Path(path)
    if not path.is_fifo():
        return path.open("rb")
    opened: list[BinaryIO | OSError] = []

    def wait() -> None:
        try:
            opened.append(path.open("rb"))
        except OSError as error:
            opened.append(error)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    waiting.join(_SECONDS_FOR_A_WRITER)
    if not opened:
        raise DataError(f"{path} is a pipe that nothing writes to")
    if isinstance(opened[0], OSError):
        raise opened[0]
    return opened[0]


def read_input(path: str | Path) -> str:
    """Return the text of a file, or of a pipe as ``open_input`` opens it, without a byte order mark."""
    with open_input(path) as file, io.TextIOWrapper(file, encoding="utf-8-sig") as text:
        return text.read()


def read_json(path: Path) -> Any:
    """Return what a JSON file holds."""
    try:
        return json.loads(read_input(path))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    except RecursionError as error:
        raise DataError(f"{path} is not valid JSON: it is nested too deep") from error
    except ValueError as error:
        raise DataError(f"{path} is not valid JSON: {error}") from error


def write_json(path: Path, data: Any) -> None:
    """Write a JSON file of a model's folder, as transformers writes its own."""
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read_sample(path: str | Path) -> list[str]:
    """Read the texts that a transform is fitted on, one a line; blank lines are passed over."""
    try:
        content = read_input(path)
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from error
    texts = [line.strip() for line in content.split("\n") if line.strip()]
    if not texts:
        raise DataError(f"{path} holds no text")
    return texts


def demand_between(name: str, value: Any, least: float, most: float) -> None:
    """Refuse a value of a setting that is no number, or not between two."""
    demand_number(name, value)
    if not least <= value <= most:
        raise ConfigError(f"{name}={value} is not between {least} and {most}")


def demand_unicode(name: str, text: str) -> None:
    """Refuse half of a surrogate pair, which JSON may spell and no tokenizer and no file can hold."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{name} is not valid Unicode: a lone surrogate at character {error.start}") from error
