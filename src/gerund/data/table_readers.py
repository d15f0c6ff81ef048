"""Readers of tables by format: the rows of a file, one after the other, one text each or all that they hold.

Knows: JSON lines, CSV, TSV, Parquet, columns. Does not know: folders, shards.
"""

import csv
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from gerund.data.files import checked_text, decode, json_row, opened
from gerund.errors import ConfigError, DataError

FORMATS = ("txt", "jsonl", "csv", "tsv", "parquet")
DEFAULT_COLUMN = "text"
DEFAULT_ID_COLUMN = "id"
# BEIR's collections call it _id.
_ID_COLUMNS = (DEFAULT_ID_COLUMN, "_id")
# What every reader yields: the id, the text, and the number of the line (or row) that it stood on, or the place.
Row = tuple[int | str, str, int | str]


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


def read_records(table: Table, wanted: Sequence[str]) -> Iterator[tuple[int, str, Mapping[str, Any]]]:
    """Yield what each row of a table holds, in order, blank lines apart.

    Args:
        table: of JSON lines, CSV, TSV or Parquet.
        wanted: columns; of a Parquet file only those that are there are read, ``table.column`` must be.

    Yields:
        The number of the line (or row), what messages call it, and the values by column.

    Raises:
        DataError: a malformed row.
    """
    if table.format == "parquet":
        yield from _parquet_records(table, wanted)
    elif table.format == "jsonl":
        for number, row in _json_records(table):
            yield number, f"{table.name}, line {number}", row
    else:
        records = _CSV_RECORDS[table.format](table)
        _, header = next(records, (0, []))
        for number, fields in records:
            where = f"{table.name}, line {number}"
            _demand_width(fields, header, where)
            yield number, where, dict(zip(header, fields, strict=True))


@contextmanager
def _bytes_of(table: Table) -> Iterator[BinaryIO]:
    if table.path is None:
        yield sys.stdin.buffer
    else:
        with opened(table.path) as file:
            yield file


def lines_of(table: Table, *, ends: bool = True) -> Iterator[tuple[int, str]]:
    """Yield the lines with their numbers, without their line ends if those are not wanted.

    A line may have many megabytes: while somebody works with it, no other copy of it is held here.
    """
    number = 0  # enumerate would hold on to the last line
    with _bytes_of(table) as file:
        for raw in file:
            number += 1
            if not ends:
                raw = raw.rstrip(b"\r\n")
            line = [decode(raw, f"{table.name}, line {number}")]
            del raw
            if number == 1:
                line[0] = line[0].removeprefix("\ufeff")
            yield number, line.pop()


def _read_txt(table: Table) -> Iterator[Row]:
    for number, line in lines_of(table, ends=False):
        yield number - 1, line, number


def _json_records(table: Table) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in lines_of(table):
        if line.isspace():
            continue
        yield number, json_row(line, f"{table.name}, line {number}")


def _read_jsonl(table: Table) -> Iterator[Row]:
    column, id_column = table.column, table.id_column
    for count, (number, row) in enumerate(_json_records(table)):
        where = f"{table.name}, line {number}"
        if id_column is None:
            id_column = next((name for name in _ID_COLUMNS if name in row), "")
        for name in (column, id_column):
            if name and name not in row:
                raise _no_column(where, name, list(row))
        text = row[column]
        if text is not None:
            text = checked_text(text, where, column)
        yield _id(row[id_column], where, id_column) if id_column else count, text or "", number


def _csv_records(table: Table) -> Iterator[tuple[int, list[str]]]:
    # The module's limit of 131,072 characters a field would refuse long documents.
    csv.field_size_limit(max(csv.field_size_limit(), 2**31 - 1))
    reader = csv.reader((line for _, line in lines_of(table)), strict=True)
    while True:
        number = reader.line_num + 1  # a quoted field may span lines: name the first
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise DataError(f"{table.name}, line {number}: malformed row ({error})") from error
        if fields:
            yield number, fields


def _tsv_records(table: Table) -> Iterator[tuple[int, list[str]]]:
    return ((number, line.split("\t")) for number, line in lines_of(table, ends=False) if line)


_CSV_RECORDS = {"csv": _csv_records, "tsv": _tsv_records}


def _read_with_header(table: Table) -> Iterator[Row]:
    records = _CSV_RECORDS[table.format](table)
    number, header = next(records, (0, []))
    if not header:
        return
    where = f"{table.name}, line {number}"
    text_at = _column_at(header, table.column, where)
    id_column = _id_column(table, header)
    id_at = _column_at(header, id_column, where) if id_column else None
    for count, (number, fields) in enumerate(records):
        _demand_width(fields, header, f"{table.name}, line {number}")
        yield count if id_at is None else fields[id_at], fields[text_at], number


def _demand_width(fields: list[str], header: list[str], where: str) -> None:
    if len(fields) != len(header):
        raise DataError(f"{where}: malformed row ({len(fields)} fields, and the header has {len(header)})")


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


def _parquet_records(table: Table, wanted: Sequence[str]) -> Iterator[tuple[int, str, Mapping[str, Any]]]:
    with _parquet_file(table) as file:
        present = file.schema_arrow.names
        _column_at(present, table.column, table.name)
        columns, count = [name for name in wanted if name in present], 0
        for batch in file.iter_batches(batch_size=256, columns=columns):
            for row in zip(*(_values(batch.column(name), table, count) for name in columns), strict=True):
                count += 1
                yield count, f"{table.name}, row {count}", dict(zip(columns, row, strict=True))


def _read_parquet(table: Table) -> Iterator[Row]:
    with _parquet_file(table) as file:
        schema = file.schema_arrow
        _column_at(schema.names, table.column, table.name)
        id_column = _id_column(table, schema.names)
        if id_column:
            _column_at(schema.names, id_column, table.name)
        _check_parquet_text(table, schema.field(table.column).type)
        columns = list(dict.fromkeys(name for name in (table.column, id_column) if name))
        count = 0
        for batch in file.iter_batches(batch_size=1024, columns=columns):
            texts = _values(batch.column(table.column), table, count)
            ids = _values(batch.column(id_column), table, count) if id_column else range(count, count + len(texts))
            for id_, text in zip(ids, texts, strict=True):
                count += 1
                if id_column and type(id_) is not int and type(id_) is not str:
                    id_ = _id(id_, f"{table.name}, row {count}", id_column)
                yield id_, text or "", count


def _check_parquet_text(table: Table, kind: Any) -> None:
    import pyarrow as pa

    value = kind.value_type if pa.types.is_dictionary(kind) else kind
    text_like = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_null)
    if not any(check(value) for check in text_like):
        raise DataError(f"{table.name}, row 1: {table.column!r} is not a text but {kind}")


def _values(column: Any, table: Table, before: int) -> list[Any]:
    try:
        return list(column.to_pylist())
    except UnicodeDecodeError:
        for index in range(len(column)):
            try:
                column[index].as_py()
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{table.name}, row {before + index + 1}: not valid UTF-8 at byte {error.start}"
                ) from error
        raise


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


READERS: dict[str, Callable[[Table], Iterator[Row]]] = {
    "txt": _read_txt,
    "jsonl": _read_jsonl,
    "csv": _read_with_header,
    "tsv": _read_with_header,
    "parquet": _read_parquet,
}
