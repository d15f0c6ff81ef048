"""Readers of tables by format: the rows of a file, one after the other, one text each or all that they hold.

A row that cannot be read comes as the error that says why, in the place of what it should hold, and the rows behind it
come all the same; whoever reads decides whether it ends there. What is wrong with the file as a whole is raised.

Knows: JSON lines, CSV, TSV, Parquet, columns. Does not know: folders, shards.
"""

import codecs
import csv
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO

from gerund.data.files import checked_text, decode, json_row, not_utf8, opened
from gerund.data.table import (
    ID_COLUMNS,
    Cursor,
    Row,
    Table,
    column_at,
    id_column_of,
    id_of,
    no_column,
    tried,
)
from gerund.errors import ConfigError, DataError

MOST_ROW_BYTES = 10**8
"""Bytes of a line, or of a field of a CSV file, at most: a small archive may hold a line that fills the memory."""

_TOO_LONG = f"longer than {MOST_ROW_BYTES // 10**6} MB, more than a row may have"


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
        first, header = _header(records)
        for name in dict.fromkeys([table.column, *(name for name in wanted if name in header)]) if header else ():
            column_at(header, name, f"{table.name}, line {first}")
        for number, fields in records:
            yield number, f"{table.name}, line {number}", tried(_by_column, fields, header)


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
    for number, raw in _raw_lines(table, cursor):
        if not ends:
            raw = raw.rstrip(b"\r\n")
        line: list[str | DataError]
        try:
            line = [decode(raw, f"{table.name}, line {number}")]
        except DataError as error:
            line = [error.with_traceback(None)]
        del raw
        yield number, line.pop()


def _raw_lines(table: Table, cursor: Cursor) -> Iterator[tuple[int, bytes]]:
    with _bytes_of(table, cursor.offset) as file:
        while raw := file.readline(MOST_ROW_BYTES + 1):
            if len(raw) > MOST_ROW_BYTES:
                raise DataError(f"{table.name}, line {cursor.line + 1}: {_TOO_LONG}")
            cursor.offset += len(raw)
            cursor.line += 1  # enumerate would hold on to the last line
            line = [raw.removeprefix(codecs.BOM_UTF8) if cursor.line == 1 else raw]
            del raw
            yield cursor.line, line.pop()


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
            cursor.id_column = next((name for name in ID_COLUMNS if name in row), "")
        count, id_column = cursor.count, cursor.id_column or ""
        cursor.count += 1
        where = f"{table.name}, line {number}"
        found = tried(_text_and_id, row, table.column, id_column, where)
        if isinstance(found, DataError):
            yield (_known_id(row, id_column, where) if id_column else count), found, number
        else:
            yield (found[1] if id_column else count), found[0], number


def _known_id(row: Mapping[str, Any] | DataError, column: str, where: str) -> int | str | None:
    """Return the id of a row whose text cannot be had, if it has one."""
    id_ = None if isinstance(row, DataError) or column not in row else tried(id_of, row[column], where, column)
    return None if isinstance(id_, DataError) else id_


def _text_and_id(row: Mapping[str, Any], column: str, id_column: str, where: str) -> tuple[str, int | str]:
    for name in (column, id_column):
        if name and name not in row:
            raise no_column(where, name, list(row))
    text = "" if row[column] is None else checked_text(row[column], where, column)
    return text, id_of(row[id_column], where, id_column) if id_column else ""


def _csv_records(table: Table, cursor: Cursor, width: int = 0) -> Iterator[tuple[int, list[str] | DataError]]:
    # The module's limit of 131,072 characters a field would refuse long documents.
    csv.field_size_limit(MOST_ROW_BYTES)
    unread: list[tuple[int, DataError]] = []

    def readable() -> Iterator[str]:
        for number, raw in _raw_lines(table, cursor):
            try:
                line = decode(raw, f"{table.name}, line {number}")
            except DataError as error:
                # An error would end the reader, and what is quoted has to end where it ends.
                line = raw.decode("utf-8", "surrogateescape")
                unread.append((number, error.with_traceback(None)))
            yield line

    reader = csv.reader(readable(), strict=True)
    while True:
        number = cursor.line + 1  # a quoted field may span lines: name the first
        fields, where, wrong = list[str](), f"{table.name}, line {number}", ""
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            wrong = _why_malformed(error, where)
        width = width or len(fields)
        if unread:
            number, bad = unread[0]
            unread.clear()
            yield number, bad
        elif wrong or (fields and len(fields) != width):
            # A quote that nobody closes takes the rows behind it along.
            more = f"; it goes on to line {cursor.line}" if cursor.line > number else ""
            yield number, DataError(f"{where}: malformed row ({wrong or _widths(fields, width)}){more}")
        elif fields:
            yield number, fields


def _tsv_records(table: Table, cursor: Cursor, width: int = 0) -> Iterator[tuple[int, list[str] | DataError]]:
    for number, line in lines_of(table, cursor, ends=False):
        if isinstance(line, DataError):
            yield number, line
        elif line:
            fields = line.split("\t")
            width = width or len(fields)
            if len(fields) == width:
                yield number, fields
            else:
                yield number, DataError(f"{table.name}, line {number}: malformed row ({_widths(fields, width)})")


def _why_malformed(error: csv.Error, where: str) -> str:
    if str(error).startswith("field larger than"):
        # What follows is the middle of a field, so there are no rows to go on with.
        raise DataError(f"{where}: {_TOO_LONG}; a quote may not be closed") from error
    return str(error)


def _widths(fields: list[str], width: int) -> str:
    return f"{len(fields)} fields, and the header has {width}"


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
    text_at = column_at(header, table.column, where)
    id_column = id_column_of(table, header)
    id_at = column_at(header, id_column, where) if id_column else None
    for number, fields in records:
        count, cursor.count = cursor.count, cursor.count + 1
        if isinstance(fields, DataError):
            yield count if id_at is None else None, fields, number
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
        column_at(present, table.column, table.name)
        columns, count = [name for name in wanted if name in present], 0
        for batch in file.iter_batches(batch_size=256, columns=columns):
            for row in zip(*(_values(batch.column(name), table, count) for name in columns), strict=True):
                count += 1
                bad = next((value for value in row if isinstance(value, DataError)), None)
                yield count, f"{table.name}, row {count}", bad or dict(zip(columns, row, strict=True))


def _read_parquet(table: Table, cursor: Cursor) -> Iterator[Row]:
    with _parquet_file(table) as file:
        schema = file.schema_arrow
        column_at(schema.names, table.column, table.name)
        id_column = id_column_of(table, schema.names)
        if id_column:
            column_at(schema.names, id_column, table.name)
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
                    id_ = tried(id_of, id_, f"{table.name}, row {count}", id_column)
                if isinstance(id_, DataError):
                    yield None, id_, count
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
        return not_utf8(error, where)


READERS: dict[str, Callable[[Table, Cursor], Iterator[Row]]] = {
    "txt": _read_txt,
    "jsonl": _read_jsonl,
    "csv": _read_with_header,
    "tsv": _read_with_header,
    "parquet": _read_parquet,
}
