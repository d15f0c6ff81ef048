"""Rows of a table, one text each or all that they hold, streamed out of text, JSON lines, CSV, TSV and Parquet files.

Knows: file formats, columns, and where in a file a row stood, so that an error can name the line. Does not
know: what the texts are for. A table is never held in memory whole. (``corpus`` reads whole documents.)
"""

import csv
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from gerund.data.files import COMPRESSED, checked_text, decode, opened
from gerund.errors import ConfigError, DataError, InputError, TextError, unknown_name

FORMATS = ("txt", "jsonl", "csv", "tsv", "parquet")
DEFAULT_COLUMN = "text"
DEFAULT_ID_COLUMN = "id"
STDIN = "-"
_ENDINGS = {"ndjson": "jsonl"} | {name: name for name in FORMATS}
# The id, the text, and the number of the line (or row) that it stood on.
Row = tuple[int | str, str, int]


@dataclass(frozen=True)
class Table:
    """A file of rows and the columns that count.

    Attributes:
        path: the file; None for standard input.
        format: one of ``FORMATS``.
        name: what messages call it.
        column: the column with the texts; a txt file has none.
        id_column: the column with the ids; None takes ``id`` where the first row has one, and "" (or a table
            without that column) numbers the rows from 0.
    """

    path: Path | None
    format: str
    name: str
    column: str = DEFAULT_COLUMN
    id_column: str | None = None


@dataclass(frozen=True)
class Rows:
    """Some consecutive rows of a table.

    Attributes:
        ids: their ids.
        texts: their texts; empty where the table has none (a null).
        lines: where each stood, counted from 1.
        name: what messages call the table.
        unit: ``line`` or ``row``, whichever ``lines`` counts; "" where there is only one text.
    """

    ids: list[int | str]
    texts: list[str]
    lines: list[int]
    name: str
    unit: str = "line"

    def __len__(self) -> int:
        return len(self.texts)

    def place(self, index: int) -> str:
        """Return where a row stood, for a message.

        >>> Rows([0], ["hello"], [7], "notes.txt").place(0)
        'notes.txt, line 7'
        """
        return f"{self.name}, {self.unit} {self.lines[index]}" if self.unit else self.name

    def placed(self, index: int, error: InputError) -> InputError:
        """Return an error about one of these texts with the text's place in front; alone in its table it needs none."""
        return type(error)(f"{self.place(index)}: {error}") if self.unit else error

    def without_empty(self) -> "Rows":
        """Return the rows that have a text."""
        kept = [index for index, text in enumerate(self.texts) if text and not text.isspace()]
        if len(kept) == len(self):
            return self
        ids, texts, lines = ([column[i] for i in kept] for column in (self.ids, self.texts, self.lines))
        return Rows(ids, texts, lines, self.name, self.unit)  # type: ignore[arg-type]

    def first_empty(self) -> int | None:
        """Return the index of the first row that has no text but white space, or None."""
        return next((index for index, text in enumerate(self.texts) if not text or text.isspace()), None)

    def named(self, error: InputError) -> InputError:
        """Return an error about one of these texts with the text's place instead of its index."""
        if not isinstance(error, TextError) or error.index is None or error.index >= len(self):
            return error
        return type(error)(f"{self.place(error.index)}: the text {error.reason}")


def open_table(
    source: str | Path, *, format: str | None = None, column: str | None = None, id_column: str | None = None
) -> Table:
    """Say what table a path is, without reading it.

    Args:
        source: a file, whose ending says the format (``.gz`` or ``.xz`` may follow), or ``-``.
        format: one of ``FORMATS``; needed where the ending does not say it. Standard input is ``txt`` by default.
        column: the column with the texts; None for ``text``.
        id_column: the column with the ids; see ``Table``.

    Raises:
        DataError: there is no such file, or its format is not known.
        ConfigError: an unknown format, or columns named for a file without any.
    """
    if format is not None and format not in FORMATS:
        raise unknown_name("format", format, FORMATS)
    if str(source) == STDIN:
        path, name, format = None, "standard input", format or "txt"
    else:
        path, name = Path(source), str(source)
        if path.is_dir():
            raise DataError(f"{path} is a folder, not a file")
        if not path.exists():
            raise DataError(f"{path}: no such file")
        format = format or _format_of(path)
    if format == "txt" and (column or id_column):
        raise ConfigError(f"{name}: a txt file has one text a line and no column {column or id_column!r}")
    return Table(path, format, name, column or DEFAULT_COLUMN, id_column)


def read_rows(table: Table, *, max_rows: int, max_characters: int = 2**20) -> Iterator[Rows]:
    """Yield the rows of a table in order, so many at a time.

    Where one shard ends and the next begins depends on the rows alone, so it is the same each time.

    Args:
        table: from ``open_table``.
        max_rows: rows a shard at most.
        max_characters: characters a shard at most, unless a single text has more: bounds the memory.

    Raises:
        DataError: a malformed row, a missing column, a value that is no text: with file and line.
    """
    unit = "row" if table.format == "parquet" else "line"
    ids: list[int | str] = []
    texts: list[str] = []
    lines: list[int] = []
    size = 0
    for id_, text, line in _READERS[table.format](table):
        size += len(text)
        if texts and (len(texts) == max_rows or size > max_characters):
            yield Rows(ids, texts, lines, table.name, unit)
            ids, texts, lines, size = [], [], [], len(text)
        ids.append(id_)
        texts.append(text)
        lines.append(line)
    if texts:
        yield Rows(ids, texts, lines, table.name, unit)


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


def _format_of(path: Path) -> str:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    packed = bool(suffixes) and suffixes[-1] in COMPRESSED
    ending = suffixes[-1 - packed].removeprefix(".") if len(suffixes) > packed else ""
    if ending not in _ENDINGS or (packed and ending == "parquet"):
        known = ", ".join(f".{name}" for name in _ENDINGS)
        raise DataError(f"{path}: unknown file format; valid endings are: {known} (text formats also .gz, .xz)")
    return _ENDINGS[ending]


@contextmanager
def _bytes_of(table: Table) -> Iterator[BinaryIO]:
    if table.path is None:
        yield sys.stdin.buffer
    else:
        with opened(table.path) as file:
            yield file


def _lines(table: Table, *, ends: bool = True) -> Iterator[tuple[int, str]]:
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
    for number, line in _lines(table, ends=False):
        yield number - 1, line, number


def _json_records(table: Table) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in _lines(table):
        if line.isspace():
            continue
        where = f"{table.name}, line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: not valid JSON ({error})") from error
        if not isinstance(row, dict):
            raise DataError(f"{where}: expected a JSON object, found {type(row).__name__}")
        yield number, row


def _read_jsonl(table: Table) -> Iterator[Row]:
    column, id_column = table.column, table.id_column
    for count, (number, row) in enumerate(_json_records(table)):
        where = f"{table.name}, line {number}"
        if id_column is None:
            id_column = DEFAULT_ID_COLUMN if DEFAULT_ID_COLUMN in row else ""
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
    reader = csv.reader((line for _, line in _lines(table)), strict=True)
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
    return ((number, line.split("\t")) for number, line in _lines(table, ends=False) if line)


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
    return DEFAULT_ID_COLUMN if DEFAULT_ID_COLUMN in present else ""


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


_READERS: dict[str, Callable[[Table], Iterator[Row]]] = {
    "txt": _read_txt,
    "jsonl": _read_jsonl,
    "csv": _read_with_header,
    "tsv": _read_with_header,
    "parquet": _read_parquet,
}
