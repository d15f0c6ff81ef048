"""A table of texts: its file, the columns that count, how far a reader is, and what a row is that cannot be had.

Knows: columns, ids, places. Does not know: formats of files.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from gerund.data.files import checked_text
from gerund.errors import DataError

FORMATS = ("txt", "jsonl", "csv", "tsv", "parquet")
DEFAULT_COLUMN = "text"
DEFAULT_ID_COLUMN = "id"
# BEIR's collections call it _id.
ID_COLUMNS = (DEFAULT_ID_COLUMN, "_id")
# What every reader yields: the id, the text or why it cannot be had, and the number of the line (or row) that it stood
# on, or the place. Of a row that cannot be had the id may be missing too.
Row = tuple[int | str | None, str | DataError, int | str]
Found = TypeVar("Found")


@dataclass(frozen=True)
class Table:
    """A file of rows and the columns that count.

    Attributes:
        path: the file, or the folder; None for standard input.
        format: one of ``FORMATS``; or ``folder``, for all files of these formats in one and below it.
        name: what messages call it.
        column: the column with the texts; a txt file has none.
        id_column: the column with the ids; None takes ``id`` or ``_id`` where the first row has one, and "" (or a
            table without such a column) numbers the rows from 0.
    """

    path: Path | None
    format: str
    name: str
    column: str = DEFAULT_COLUMN
    id_column: str | None = None


@dataclass
class Cursor:
    """How far a reader is; one that begins with a copy of it goes on with the next row.

    Attributes:
        file: of a folder, the file that is being read, by its way from there.
        offset: bytes that were read.
        line: lines that were read.
        count: rows that were read.
        id_column: the column with the ids, once the first row has told which it is.
    """

    file: str = ""
    offset: int = 0
    line: int = 0
    count: int = 0
    id_column: str | None = None

    def place(self) -> tuple[str, int, int, int, str | None]:
        """Return what makes another one at the same place: this is asked for at every row."""
        return self.file, self.offset, self.line, self.count, self.id_column

    def begin(self, file: str) -> None:
        """Go to the beginning of a file of a folder."""
        self.file, self.offset, self.line, self.count, self.id_column = file, 0, 0, 0, None


def tried(make: Callable[..., Found], row: Any, *more: Any) -> Found | DataError:
    """Return what a function makes of a row, or the error that says why it cannot; a row that is one is that error."""
    if isinstance(row, DataError):
        return row
    try:
        return make(row, *more)
    except DataError as error:
        # Many of them may be kept, and what they come from may have many megabytes.
        return error.with_traceback(None)


def id_column_of(table: Table, present: list[str]) -> str:
    """Return the column with the ids; "" where rows are numbered."""
    if table.id_column is not None:
        return table.id_column
    return next((name for name in ID_COLUMNS if name in present), "")


def column_at(header: list[str], column: str, where: str) -> int:
    """Return which column has a name.

    Raises:
        DataError: none, or several.
    """
    found = [index for index, name in enumerate(header) if name == column]
    if not found:
        raise no_column(where, column, header)
    if len(found) > 1:
        raise DataError(f"{where}: {len(found)} columns are called {column!r}; rename one of them")
    return found[0]


def no_column(where: str, column: str, present: list[str]) -> DataError:
    """Return the error for a column that is not there."""
    return DataError(f"{where}: no column {column!r}; present are: {', '.join(present) or 'none'}")


def id_of(value: object, where: str, column: str) -> int | str:
    """Return a value as an id.

    Raises:
        DataError: it is neither a text nor a number.
    """
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        kind = "null" if value is None else type(value).__name__
        raise DataError(f"{where}: the id {column!r} is neither a text nor a number but {kind}")
    return value if isinstance(value, int) else checked_text(str(value), where, column)
