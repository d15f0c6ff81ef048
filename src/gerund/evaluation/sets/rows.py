"""Rows of evaluation data, with errors that name file and line.

Knows: JSON lines and tab-separated lines, plain or compressed. Does not know: what the fields mean.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from gerund.data.files import checked_text, decode, json_row, opened
from gerund.errors import DataError


@dataclass(frozen=True)
class Row:
    """One row and where it stood.

    Attributes:
        where: ``FILE, line N``, for messages.
        values: its fields.
    """

    where: str
    values: Mapping[str, Any]

    def text(self, name: str) -> str:
        """Return a field that is a text.

        Raises:
            DataError: it is missing or no text.
        """
        return checked_text(self._get(name), self.where, name)

    def label(self, name: str) -> str:
        """Return a field that is a class: a text or a whole number, as text.

        Raises:
            DataError: it is missing, empty, or neither.
        """
        value = self._get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
        text = checked_text(value, self.where, name)
        if not text.strip():
            raise DataError(f"{self.where}: {name!r} is empty")
        return text

    def number(self, name: str) -> float:
        """Return a field that is a finite number.

        Raises:
            DataError: it is missing or no number.
        """
        return finite_number(self._get(name), self.where, name)

    def _get(self, name: str) -> Any:
        if name not in self.values:
            raise DataError(f"{self.where}: no field {name!r}; present are: {', '.join(self.values) or 'none'}")
        return self.values[name]


def finite_number(value: object, where: str, name: str) -> float:
    """Return ``value`` as a finite number.

    Raises:
        DataError: it is none; the message begins with ``where``.
    """
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = float("nan")
    if not math.isfinite(number) or isinstance(value, bool):
        raise DataError(f"{where}: {name!r} is not a number: {str(value)[:40]!r}")
    return number


def read_json_lines(path: Path, *, most: int | None = None) -> list[Row]:
    """Return the rows of a .jsonl file (or .jsonl.xz, .jsonl.gz); blank lines are passed over.

    Args:
        path: the file.
        most: read only the first so many rows.

    Raises:
        DataError: the file is missing, empty, not UTF-8, or has a malformed row.
    """
    rows = []
    for where, line in islice(_lines(path), most):
        rows.append(Row(where, json_row(line, where)))
    return _not_empty(rows, path)


def read_tab_lines(path: Path, names: tuple[str, ...], *, header: bool = False) -> list[Row]:
    """Return the rows of a file with tab-separated fields and no quoting.

    Args:
        path: the file.
        names: what the fields are called, in their order; a row with fewer or more is refused.
        header: whether the first line holds names and no data.

    Raises:
        DataError: the file is missing, empty, not UTF-8, or has a malformed row.
    """
    rows = []
    for index, (where, line) in enumerate(_lines(path)):
        if header and index == 0:
            continue
        fields = line.rstrip("\r\n").split("\t")
        if len(fields) != len(names):
            raise DataError(f"{where}: expected {len(names)} fields ({', '.join(names)}), found {len(fields)}")
        rows.append(Row(where, dict(zip(names, fields, strict=True))))
    return _not_empty(rows, path)


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    if not path.is_file():
        raise DataError(f"{path} is a folder, not a file" if path.is_dir() else f"{path}: no such file")
    with opened(path) as file:
        for number, raw in enumerate(file, start=1):
            where = f"{path}, line {number}"
            line = decode(raw, where)
            line = line.lstrip("\ufeff") if number == 1 else line
            if line.strip():
                yield where, line


def _not_empty(rows: list[Row], path: Path) -> list[Row]:
    if not rows:
        raise DataError(f"{path}: the file is empty")
    return rows
