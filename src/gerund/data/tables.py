"""Stream rows of texts from text, JSON lines, CSV, TSV and Parquet files, or a folder of them.

A table is never held in memory. A row that can't be read is yielded as the error that says why, and the rows after it
follow; the caller decides whether to stop there. Faults of the file as a whole are raised.
(``corpus`` reads documents.)
"""

import codecs
import csv
import os
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from gerund.data.files import COMPRESSED, checked_text, decode, json_row, not_utf8, opened, shown_path
from gerund.errors import ConfigError, DataError, InputError, TextError, unknown_name

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


def value_or_error(make: Callable[..., Found], row: Any, *more: Any) -> Found | DataError:
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
            yield number, f"{table.name}, line {number}", value_or_error(_by_column, fields, header)


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
        yield number, value_or_error(json_row, line, f"{table.name}, line {number}")


def _read_jsonl(table: Table, cursor: Cursor) -> Iterator[Row]:
    if table.id_column is not None:
        cursor.id_column = table.id_column
    for number, row in _json_records(table, cursor):
        if cursor.id_column is None and not isinstance(row, DataError):
            cursor.id_column = next((name for name in ID_COLUMNS if name in row), "")
        count, id_column = cursor.count, cursor.id_column or ""
        cursor.count += 1
        where = f"{table.name}, line {number}"
        found = value_or_error(_text_and_id, row, table.column, id_column, where)
        if isinstance(found, DataError):
            yield (_known_id(row, id_column, where) if id_column else count), found, number
        else:
            yield (found[1] if id_column else count), found[0], number


def _known_id(row: Mapping[str, Any] | DataError, column: str, where: str) -> int | str | None:
    """Return the id of a row whose text cannot be had, if it has one."""
    id_ = None if isinstance(row, DataError) or column not in row else value_or_error(id_of, row[column], where, column)
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
                    id_ = value_or_error(id_of, id_, f"{table.name}, row {count}", id_column)
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


STDIN = "-"
_FOLDER = "folder"
# The documents of a collection in BEIR's form.
_COLLECTION = "corpus.jsonl"
_ENDINGS = {"ndjson": "jsonl"} | {name: name for name in FORMATS}


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be used.

    Attributes:
        place: where it stands, such as ``notes.jsonl, line 7``.
        reason: why, in a sentence.
        id: its id, where it is known.
    """

    place: str
    reason: str
    id: int | str | None = None

    def __str__(self) -> str:
        """Say it in a sentence."""
        return f"{self.place}: {self.reason}"


@dataclass(frozen=True)
class Rows:
    """Some consecutive rows of a table.

    Attributes:
        ids: their ids.
        texts: their texts; empty where the table has none (a null).
        lines: where each stood, counted from 1; or its whole place, where a table has several files.
        name: what messages call the table.
        unit: ``line`` or ``row``, whichever ``lines`` counts; "" where there is only one text.
        start: where they begin in their table; None where none can go on there, as in an archive.
    """

    ids: list[int | str]
    texts: list[str]
    lines: list[int | str]
    name: str
    unit: str = "line"
    start: Cursor | None = None

    def __len__(self) -> int:
        return len(self.texts)

    def place(self, index: int) -> str:
        """Return where a row stood, for a message.

        >>> Rows([0], ["hello"], [7], "notes.txt").place(0)
        'notes.txt, line 7'
        """
        line = self.lines[index]
        if isinstance(line, str):
            return line
        return f"{self.name}, {self.unit} {line}" if self.unit else self.name

    def placed(self, index: int, error: InputError) -> InputError:
        """Return an error about one of these texts with the text's place in front; alone in its table it needs none."""
        return type(error)(f"{self.place(index)}: {error}") if self.unit else error

    def empty(self) -> list[int]:
        """Return which rows have no text but white space."""
        return [index for index, text in enumerate(self.texts) if not text or text.isspace()]

    def without(self, left_out: Collection[int]) -> "Rows":
        """Return the rows but for some."""
        if not left_out:
            return self
        gone = frozenset(left_out)
        kept = [index for index in range(len(self)) if index not in gone]
        ids, texts, lines = ([column[i] for i in kept] for column in (self.ids, self.texts, self.lines))
        return Rows(ids, texts, lines, self.name, self.unit, self.start)  # type: ignore[arg-type]

    def bad(self, index: int, reason: str) -> BadRow:
        """Return what is told of a row that cannot be used."""
        return BadRow(self.place(index), reason, self.ids[index])

    def named(self, error: InputError) -> InputError:
        """Return an error about one of these texts with the text's place instead of its index."""
        if not isinstance(error, TextError) or error.index is None or error.index >= len(self):
            return error
        return type(error)(f"{self.place(error.index)}: the text {error.reason}")


def open_table(
    source: str | Path,
    *,
    format: str | None = None,
    column: str | None = None,
    id_column: str | None = None,
    folders: bool = False,
) -> Table:
    """Say what table a path is, without reading it.

    Args:
        source: a file, whose ending says the format (``.gz`` or ``.xz`` may follow); a folder of such files; or ``-``.
        format: one of ``FORMATS``; needed where the ending does not say it. Standard input is ``txt`` by default.
        column: the column with the texts; None for ``text``.
        id_column: the column with the ids; see ``Table``.
        folders: take a folder too.

    Raises:
        DataError: there is no such file, or its format is not known.
        ConfigError: an unknown format, or columns named for a file without any.
    """
    if format is not None and format not in FORMATS:
        raise unknown_name("format", format, FORMATS)
    if str(source) == STDIN:
        path, name, format = None, "standard input", format or "txt"
    else:
        path, name = Path(source), shown_path(source)
        if path.is_dir():
            if not folders:
                raise DataError(f"{path} is a folder, not a file")
            return _folder(path, format, column, id_column)
        if not path.exists():
            raise DataError(f"{path}: no such file")
        format = format or _format_of(path)
    if format == "txt" and (column or id_column):
        raise ConfigError(f"{name}: a txt file has one text a line and no column {column or id_column!r}")
    return Table(path, format, name, column or DEFAULT_COLUMN, id_column)


def _folder(path: Path, format: str | None, column: str | None, id_column: str | None) -> Table:
    if format is not None:
        raise ConfigError(f"{path} is a folder; what format its files have is said by their endings")
    table = Table(path, _FOLDER, shown_path(path), column or DEFAULT_COLUMN, id_column)
    next(files_below(table))
    return table


def read_rows(
    table: Table,
    *,
    max_rows: int,
    max_characters: int = 2**20,
    bad: Callable[[BadRow], None] | None = None,
    start: Cursor | None = None,
) -> Iterator[Rows]:
    """Yield the rows of a table in order, so many at a time.

    Where one shard ends and the next begins depends on the rows alone, so it is the same each time, and also for
    whoever begins with where one of them started.

    Args:
        table: from ``open_table``.
        max_rows: rows a shard at most.
        max_characters: characters a shard at most, unless a single text has more: bounds the memory.
        bad: told of each row that cannot be read, which is left out; None raises.
        start: where to begin, as ``Rows.start`` says; None at the beginning.

    Raises:
        DataError: a malformed row, a missing column, a value that is no text: with file and line; or the file cannot
            be read.
    """
    unit = "row" if table.format == "parquet" else "line"
    ids: list[int | str] = []
    texts: list[str] = []
    lines: list[int | str] = []
    size = 0
    cursor = Cursor() if start is None else replace(start)
    begin = here = cursor.place()
    for id_, text, line in _read_table(table, cursor):
        before, here = here, cursor.place()
        if isinstance(text, DataError):
            if bad is None:
                raise text
            place = line if isinstance(line, str) else f"{table.name}, {unit} {line}"
            bad(BadRow(place, str(text).removeprefix(place).lstrip(":, "), id_))
            continue
        assert id_ is not None
        size += len(text)
        if texts and (len(texts) == max_rows or size > max_characters):
            yield Rows(ids, texts, lines, table.name, unit, _start(table, *begin))
            ids, texts, lines, size, begin = [], [], [], len(text), before
        ids.append(id_)
        texts.append(text)
        lines.append(line)
    if texts:
        yield Rows(ids, texts, lines, table.name, unit, _start(table, *begin))


def _read_table(table: Table, cursor: Cursor) -> Iterator[Row]:
    return _read_folder(table, cursor) if table.format == _FOLDER else READERS[table.format](table, cursor)


def _start(table: Table, file: str, *place: Any) -> Cursor | None:
    """Return where rows begin, if anybody can go on there: a file that is a single text is soon sent."""
    if table.format == _FOLDER:
        return None if file.endswith((".txt", *COMPRESSED)) else Cursor(file, *place)
    return None if table.path is None or table.path.suffix.lower() in COMPRESSED else Cursor(file, *place)


def _format_of(path: Path) -> str:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    packed = bool(suffixes) and suffixes[-1] in COMPRESSED
    ending = suffixes[-1 - packed].removeprefix(".") if len(suffixes) > packed else ""
    if ending not in _ENDINGS or (packed and ending == "parquet"):
        known = ", ".join(f".{name}" for name in _ENDINGS)
        raise DataError(f"{path}: unknown file format; valid endings are: {known} (text formats also .gz, .xz)")
    return _ENDINGS[ending]


def files_below(table: Table) -> Iterator[Path]:
    """Yield the files of a folder that are read as its tables, in order, without hidden ones and unfinished work.

    Of a collection in BEIR's form these are its documents.

    Raises:
        DataError: there is none, or a folder cannot be listed.
    """
    assert table.path is not None
    found: list[Path] = []

    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename}: cannot be read ({error.strerror})") from error

    for place, folders, names in os.walk(table.path, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".") and not name.endswith(".parts")]
        tables = (Path(place, name) for name in names if not name.startswith(".") and _is_table(Path(name)))
        found += [path for path in tables if path.is_file()]
    collection = table.path / _COLLECTION
    if collection in found and (table.path / "queries.jsonl").is_file():
        found = [collection]
    if not found:
        known = ", ".join(f".{name}" for name in _ENDINGS)
        raise DataError(
            f"{table.path}: no file of texts in it; valid endings are: {known} (text formats also .gz, .xz)"
        )
    yield from sorted(found)


def skipped_files(table: Table) -> dict[str, int]:
    """Return how many files of a folder are not read as its tables, by their ending; none of what is no folder."""
    if table.format != _FOLDER or table.path is None:
        return {}
    read, counts = set(files_below(table)), Counter[str]()
    for path in table.path.rglob("*"):
        parts = path.relative_to(table.path).parts
        is_hidden = any(part.startswith(".") or part.endswith(".parts") for part in parts)
        if path.is_file() and path not in read and not is_hidden:
            counts[path.suffix or "no ending"] += 1
    return dict(counts.most_common())


def _is_table(path: Path) -> bool:
    try:
        return bool(_format_of(path))
    except DataError:
        return False


def _read_folder(table: Table, cursor: Cursor) -> Iterator[Row]:
    """Read file after file: of a .txt file the whole is a text, of others each row."""
    assert table.path is not None
    # Whoever goes on in the middle of a folder does so many times.
    files = _names_once(table) if cursor.file else _names(table)
    begin = next((number for number, file in enumerate(files) if file == cursor.file), 0)
    for file in files[begin:]:
        path = table.path / file
        if file != cursor.file:
            cursor.begin(file)
        # As the folder was named, wherever it lies for whoever reads.
        shown = shown_path(file)
        name = str(Path(table.name) / shown)
        own = replace(table, path=path, name=name, format=_format_of(path))
        try:
            if own.format == "txt":
                if not cursor.count:
                    cursor.count = 1
                    yield shown, value_or_error(_whole_text, own), name
                continue
            unit = "row" if own.format == "parquet" else "line"
            for id_, text, line in READERS[own.format](own, cursor):
                whole = id_ if len(files) == 1 or id_ is None else f"{shown}#{id_}"
                yield whole, text, f"{name}, {unit} {line}"
        except DataError as error:
            # An archive that is cut off, a table without the column: the other files are whole.
            used = f"; its first {cursor.count} rows are used" if cursor.count else ""
            yield None, DataError(f"{error}{used}"), name


def _names(table: Table) -> tuple[str, ...]:
    assert table.path is not None
    return tuple(path.relative_to(table.path).as_posix() for path in files_below(table))


_names_once = lru_cache(maxsize=1)(_names)


def _whole_text(table: Table) -> str:
    """Return a file as one text, with its line ends as they are, but for the last."""
    lines = []
    for _, line in lines_of(table, Cursor()):
        if isinstance(line, DataError):
            raise line
        lines.append(line)
    return "".join(lines).rstrip("\r\n")
