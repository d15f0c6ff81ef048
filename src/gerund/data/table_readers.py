"""Readers of tables by format: the rows of a file, one after the other, one text each or all that they hold.

A row that cannot be read comes as the error that says why, in the place of what it should hold, and the rows behind it
come all the same; whoever reads decides whether it ends there. What is wrong with the file as a whole is raised.

Knows: JSON lines, CSV, TSV, Parquet, columns. Does not know: folders, shards.
"""

import csv
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from gerund.data.files import checked_text, decode, json_row, opened
from gerund.errors import ConfigError, DataError

FORMATS = ("txt", "jsonl", "csv", "tsv", "parquet")
DEFAULT_COLUMN = "text"
DEFAULT_ID_COLUMN = "id"
# BEIR's collections call it _id.
_ID_COLUMNS = (DEFAULT_ID_COLUMN, "_id")
# What every reader yields: the id, the text or why it cannot be had, and the number of the line (or row) that it stood
# on, or the place.
Row = tuple[int | str, str | DataError, int | str]
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


def read_records(table: Table, wanted: Sequence[str]) -> Iterator[tuple[int, str, Mapping[str, Any] | DataError]]:
    """Yield what each row of a table holds, in order, blank lines apart.

    Args:
        table: of JSON lines, CSV, TSV or Parquet.
        wanted: columns; of a Parquet file only those that are there are read, ``table.column`` must be.

    Yields:
        The number of the line (or row), what messages call it, and the values by column, or why they cannot be had.

    Raises:
        DataError: the file cannot be read, or not on from there, or a column is missing in its header.
    """
    if table.format == "parquet":
        yield from _parquet_records(table, wanted)
    elif table.format == "jsonl":
        for number, row in _json_records(table, Cursor()):
            yield number, f"{table.name}, line {number}", row
    else:
        records = _CSV_RECORDS[table.format](table, Cursor())
        _, header = _header(records)
        for number, fields in records:
            yield number, f"{table.name}, line {number}", tried(_by_column, fields, header)


def tried(make: Callable[..., Found], row: Any, *more: Any) -> Found | DataError:
    """Return what a function makes of a row, or the error that says why it cannot; a row that is one is that error."""
    if isinstance(row, DataError):
        return row
    try:
        return make(row, *more)
    except DataError as error:
        # Many of them may be kept, and what they come from may have many megabytes.
        return error.with_traceback(None)


def _by_column(fields: list[str], header: list[str]) -> dict[str, str]:
    return dict(zip(header, fields, strict=True))


@contextmanager
def _bytes_of(table: Table, offset: int) -> Iterator[BinaryIO]:
    if table.path is None:
        yield sys.stdin.buffer
    else:
        with opened(table.path) as file:
            if offset:
                file.seek(offset)
            yield file


def lines_of(table: Table, cursor: Cursor, *, ends: bool = True) -> Iterator[tuple[int, str | DataError]]:
    """Yield the lines with their numbers, or why one cannot be had, without their line ends if those are not wanted.

    A line may have many megabytes: while somebody works with it, no other copy of it is held here.
    """
    with _bytes_of(table, cursor.offset) as file:
        for raw in file:
            cursor.offset += len(raw)
            cursor.line = number = cursor.line + 1  # enumerate would hold on to the last line
            if not ends:
                raw = raw.rstrip(b"\r\n")
            line: list[str | DataError]
            try:
                line = [raw.decode("utf-8")]
            except UnicodeDecodeError:
                line = [tried(decode, raw, f"{table.name}, line {number}")]
            del raw
            if number == 1 and isinstance(line[0], str):
                line[0] = line[0].removeprefix("\ufeff")
            yield number, line.pop()


def _read_txt(table: Table, cursor: Cursor) -> Iterator[Row]:
    for number, line in lines_of(table, cursor, ends=False):
        yield number - 1, line, number


def _json_records(table: Table, cursor: Cursor) -> Iterator[tuple[int, dict[str, Any] | DataError]]:
    for number, line in lines_of(table, cursor):
        if isinstance(line, str) and line.isspace():
            continue
        yield number, tried(json_row, line, f"{table.name}, line {number}")


def _read_jsonl(table: Table, cursor: Cursor) -> Iterator[Row]:
    if table.id_column is not None:
        cursor.id_column = table.id_column
    for number, row in _json_records(table, cursor):
        if cursor.id_column is None and not isinstance(row, DataError):
            cursor.id_column = next((name for name in _ID_COLUMNS if name in row), "")
        count, id_column = cursor.count, cursor.id_column or ""
        cursor.count += 1
        found = tried(_text_and_id, row, table.column, id_column, f"{table.name}, line {number}")
        text, id_ = (found, count) if isinstance(found, DataError) else found
        yield (id_ if id_column else count), text, number


def _text_and_id(row: Mapping[str, Any], column: str, id_column: str, where: str) -> tuple[str, int | str]:
    for name in (column, id_column):
        if name and name not in row:
            raise _no_column(where, name, list(row))
    text = "" if row[column] is None else checked_text(row[column], where, column)
    return text, _id(row[id_column], where, id_column) if id_column else ""


def _csv_records(table: Table, cursor: Cursor, width: int = 0) -> Iterator[tuple[int, list[str] | DataError]]:
    # The module's limit of 131,072 characters a field would refuse long documents.
    csv.field_size_limit(max(csv.field_size_limit(), 2**31 - 1))
    unread: list[tuple[int, DataError]] = []

    def readable() -> Iterator[str]:
        for number, line in lines_of(table, cursor):
            if isinstance(line, DataError):
                unread.append((number, line))
                line = "\n"  # an error would end the reader
            yield line

    reader = csv.reader(readable(), strict=True)
    while True:
        number = cursor.line + 1  # a quoted field may span lines: name the first
        fields: list[str] | DataError = []
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            fields = DataError(f"{table.name}, line {number}: malformed row ({error})")
        if unread:
            number, fields = unread[0]
            unread.clear()
        elif isinstance(fields, list) and fields:
            width = width or len(fields)
            fields = _of_width(fields, width, f"{table.name}, line {number}")
        if fields:
            yield number, fields


def _tsv_records(table: Table, cursor: Cursor, width: int = 0) -> Iterator[tuple[int, list[str] | DataError]]:
    for number, line in lines_of(table, cursor, ends=False):
        if isinstance(line, DataError):
            yield number, line
        elif line:
            fields = line.split("\t")
            width = width or len(fields)
            yield number, _of_width(fields, width, f"{table.name}, line {number}")


def _of_width(fields: list[str], width: int, where: str) -> list[str] | DataError:
    if len(fields) == width:
        return fields
    return DataError(f"{where}: malformed row ({len(fields)} fields, and the header has {width})")


def _header(records: Iterator[tuple[int, list[str] | DataError]]) -> tuple[int, list[str]]:
    number, header = next(records, (0, list[str]()))
    if isinstance(header, DataError):
        raise header
    return number, header


_CSV_RECORDS = {"csv": _csv_records, "tsv": _tsv_records}


def _read_with_header(table: Table, cursor: Cursor) -> Iterator[Row]:
    read = _CSV_RECORDS[table.format]
    records = read(table, cursor)
    if cursor.offset:  # whoever goes on in the middle wants the first line too
        number, header = _header(read(table, Cursor()))
        records = read(table, cursor, len(header))
    else:
        number, header = _header(records)
    if not header:
        return
    where = f"{table.name}, line {number}"
    text_at = _column_at(header, table.column, where)
    id_column = _id_column(table, header)
    id_at = _column_at(header, id_column, where) if id_column else None
    for number, fields in records:
        count, cursor.count = cursor.count, cursor.count + 1
        if isinstance(fields, DataError):
            yield count, fields, number
        else:
            yield count if id_at is None else fields[id_at], fields[text_at], number


@contextmanager
def _parquet_file(table: Table) -> Iterator[Any]:
    if table.path is None:
        raise ConfigError("parquet cannot be read from standard input here; give a file")
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(table.path) as file:
            yield file
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{table.name}: not a readable parquet file ({' '.join(str(error).split())})") from error


def _parquet_records(table: Table, wanted: Sequence[str]) -> Iterator[tuple[int, str, Mapping[str, Any] | DataError]]:
    with _parquet_file(table) as file:
        present = file.schema_arrow.names
        _column_at(present, table.column, table.name)
        columns, count = [name for name in wanted if name in present], 0
        for batch in file.iter_batches(batch_size=256, columns=columns):
            for row in zip(*(_values(batch.column(name), table, count) for name in columns), strict=True):
                count += 1
                bad = next((value for value in row if isinstance(value, DataError)), None)
                yield count, f"{table.name}, row {count}", bad or dict(zip(columns, row, strict=True))


def _read_parquet(table: Table, cursor: Cursor) -> Iterator[Row]:
    with _parquet_file(table) as file:
        schema = file.schema_arrow
        _column_at(schema.names, table.column, table.name)
        id_column = _id_column(table, schema.names)
        if id_column:
            _column_at(schema.names, id_column, table.name)
        _check_parquet_text(table, schema.field(table.column).type)
        columns = list(dict.fromkeys(name for name in (table.column, id_column) if name))
        done = cursor.count
        count, groups = _groups_behind(file, done)
        for batch in file.iter_batches(batch_size=1024, columns=columns, row_groups=groups):
            if count + len(batch) <= done:
                count += len(batch)
                continue
            batch = batch.slice(max(0, done - count))
            count = max(count, done)
            texts = _values(batch.column(table.column), table, count)
            ids = _values(batch.column(id_column), table, count) if id_column else range(count, count + len(texts))
            for id_, text in zip(ids, texts, strict=True):
                count += 1
                cursor.count = count
                if id_column and type(id_) is not int and type(id_) is not str:
                    id_ = tried(_id, id_, f"{table.name}, row {count}", id_column)
                if isinstance(id_, DataError):
                    yield count - 1, id_, count
                else:
                    yield id_, text or "", count


def _groups_behind(file: Any, rows: int) -> tuple[int, list[int]]:
    """Return the row groups that hold what stands behind so many rows, and how many rows stand before those groups."""
    before = 0
    for group in range(file.num_row_groups):
        own = file.metadata.row_group(group).num_rows
        if before + own > rows:
            return before, list(range(group, file.num_row_groups))
        before += own
    return before, []


def _check_parquet_text(table: Table, kind: Any) -> None:
    import pyarrow as pa

    value = kind.value_type if pa.types.is_dictionary(kind) else kind
    text_like = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_null)
    if not any(check(value) for check in text_like):
        raise DataError(f"{table.name}, row 1: {table.column!r} is not a text but {kind}")


def _values(column: Any, table: Table, before: int) -> list[Any]:
    """Return the values of a column, and in the place of one that is no text why."""
    try:
        return list(column.to_pylist())
    except UnicodeDecodeError:
        return [_value(one, f"{table.name}, row {row}") for row, one in enumerate(column, start=before + 1)]


def _value(scalar: Any, where: str) -> Any:
    try:
        return scalar.as_py()
    except UnicodeDecodeError as error:
        return DataError(f"{where}: not valid UTF-8 at byte {error.start}")


def _id_column(table: Table, present: list[str]) -> str:
    if table.id_column is not None:
        return table.id_column
    return next((name for name in _ID_COLUMNS if name in present), "")


def _column_at(header: list[str], column: str, where: str) -> int:
    found = [index for index, name in enumerate(header) if name == column]
    if not found:
        raise _no_column(where, column, header)
    if len(found) > 1:
        raise DataError(f"{where}: {len(found)} columns are called {column!r}")
    return found[0]


def _no_column(where: str, column: str, present: list[str]) -> DataError:
    return DataError(f"{where}: no column {column!r}; present are: {', '.join(present) or 'none'}")


def _id(value: object, where: str, column: str) -> int | str:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise DataError(f"{where}: the id {column!r} is neither a text nor a number but {type(value).__name__}")
    return value if isinstance(value, int) else checked_text(str(value), where, column)


READERS: dict[str, Callable[[Table, Cursor], Iterator[Row]]] = {
    "txt": _read_txt,
    "jsonl": _read_jsonl,
    "csv": _read_with_header,
    "tsv": _read_with_header,
    "parquet": _read_parquet,
}
