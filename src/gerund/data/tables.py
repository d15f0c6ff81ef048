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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from gerund.checks import one_of
from gerund.data.files import COMPRESSED, checked_text, decode, json_row, not_utf8, opened, shown_path
from gerund.errors import ConfigError, DataError, InputError, TextError

FORMATS = ("txt", "jsonl", "csv", "tsv", "parquet")
DEFAULT_COLUMN = "text"
DEFAULT_ID_COLUMN = "id"
# BEIR's collections call it _id.
ID_COLUMNS = (DEFAULT_ID_COLUMN, "_id")
STDIN = "-"
MOST_ROW_BYTES = 10**8
"""Maximum size of a line, or of a field of a CSV file: a small archive may have a line that fills the memory."""

_FOLDER = "folder"
# The documents of a collection in BEIR's format.
_COLLECTION = "corpus.jsonl"
_ENDINGS = {"ndjson": "jsonl"} | {name: name for name in FORMATS}
_KNOWN_ENDINGS = f"valid endings are: {', '.join(f'.{name}' for name in _ENDINGS)} (text formats also .gz, .xz)"
_TOO_LONG = f"longer than {MOST_ROW_BYTES // 10**6} MB, more than a row may have"

# What every reader yields: id, text or error, and the number of the line or row, or a place such as "a.csv, line 2". A
# bad row may have no id.
Row = tuple[int | str | None, str | DataError, int | str]
Result = TypeVar("Result")


@dataclass(frozen=True)
class Table:
    """A file of rows and the columns to read."""

    path: Path | None  # the file or folder; None for standard input
    format: str  # one of ``FORMATS``; or ``folder``, for all files of these formats in a folder and below it
    name: str  # the table's name in messages
    column: str = DEFAULT_COLUMN  # the text column; a txt file has none
    id_column: str | None = None
    """The id column; None for ``id`` or ``_id`` if the first row has one, "" to number the rows from 0."""


@dataclass
class Cursor:
    """The position of a reader; a reader that begins with a copy of it continues with the next row."""

    file: str = ""  # of a folder: the current file, relative to the folder
    offset: int = 0  # bytes read
    line: int = 0  # lines read
    count: int = 0  # rows read
    id_column: str | None = None  # known after the first row

    def place(self) -> tuple[str, int, int, int, str | None]:
        """Return the arguments for a copy; a tuple, since this is called for every row."""
        return self.file, self.offset, self.line, self.count, self.id_column

    def begin(self, file: str) -> None:
        """Go to the beginning of a file of a folder."""
        self.file, self.offset, self.line, self.count, self.id_column = file, 0, 0, 0, None


def value_or_error(make: Callable[..., Result], row: Any, *more: Any) -> Result | DataError:
    """Return ``make(row, *more)`` or its ``DataError``; a row that is an error is returned unchanged."""
    if isinstance(row, DataError):
        return row
    try:
        return make(row, *more)
    except DataError as error:
        # Without its frames, which may refer to many megabytes: many errors may be stored.
        return error.with_traceback(None)


def column_at(header: list[str], column: str, where: str) -> int:
    """Return the index of a column; it must be there exactly once."""
    indices = [index for index, name in enumerate(header) if name == column]
    if not indices:
        raise no_column(where, column, header)
    if len(indices) > 1:
        raise DataError(f"{where}: {len(indices)} columns are called {column!r}; rename one of them")
    return indices[0]


def no_column(where: str, column: str, present: list[str]) -> DataError:
    """Return the error for a missing column."""
    return DataError(f"{where}: no column {column!r}; present are: {', '.join(present) or 'none'}")


def _id_column(table: Table, present: Collection[str]) -> str:
    if table.id_column is not None:
        return table.id_column
    return next((name for name in ID_COLUMNS if name in present), "")


def _id_of(value: object, where: str, column: str) -> int | str:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        kind = "null" if value is None else type(value).__name__
        raise DataError(f"{where}: the id {column!r} is neither a text nor a number but {kind}")
    return value if isinstance(value, int) else checked_text(str(value), where, column)


def read_records(
    table: Table, wanted: Sequence[str], *, required: Sequence[str] = ()
) -> Iterator[tuple[int, str, Mapping[str, Any] | DataError]]:
    """Yield each row's line (or row) number, its name in messages, and its values by column or why it can't be read.

    For JSON lines, CSV, TSV and Parquet; blank lines are skipped. Of a Parquet file only the ``wanted`` columns that
    exist are read. ``table.column`` and the ``required`` columns must exist (JSON lines may have other fields).
    """
    if table.format == "parquet":
        yield from _parquet_records(table, wanted, required)
    elif table.format == "jsonl":
        for number, row in _json_records(table, Cursor()):
            yield number, f"{table.name}, line {number}", row
    else:
        records = _CSV_RECORDS[table.format](table, Cursor())
        first, header = _header(records)
        present = [name for name in wanted if name in header]
        for name in dict.fromkeys([table.column, *required, *present]) if header else ():
            column_at(header, name, f"{table.name}, line {first}")
        for number, fields in records:
            row = fields if isinstance(fields, DataError) else dict(zip(header, fields, strict=True))
            yield number, f"{table.name}, line {number}", row


def whole_records(
    table: Table, wanted: Sequence[str] = (), *, required: Sequence[str] = ()
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the rows as ``read_records`` does, each with its name in messages; the first bad one is raised."""
    for _, where, row in read_records(table, wanted, required=required):
        if isinstance(row, DataError):
            raise row
        yield where, row


def json_lines(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the rows of a .jsonl file, which may be compressed, each with its name in messages."""
    return whole_records(Table(path, "jsonl", shown_path(path)))


@contextmanager
def _bytes_of(table: Table, offset: int) -> Iterator[BinaryIO]:
    if table.path is None:
        yield sys.stdin.buffer
    else:
        with opened(table.path) as file:
            if offset:
                file.seek(offset)
            yield file


def _lines(table: Table, cursor: Cursor, *, ends: bool = True) -> Iterator[tuple[int, str | DataError]]:
    """Yield the lines with their numbers, or why one can't be read; ``ends`` keeps the line ends.

    A line may have many megabytes: no other copy of it is held here while the caller works with it.
    """
    for number, raw in _raw_lines(table, cursor):
        if not ends:
            raw = raw.rstrip(b"\r\n")
        line: list[str | DataError] = [value_or_error(decode, raw, f"{table.name}, line {number}")]
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
    for number, line in _lines(table, cursor, ends=False):
        yield number - 1, line, number


def _json_records(table: Table, cursor: Cursor) -> Iterator[tuple[int, dict[str, Any] | DataError]]:
    for number, line in _lines(table, cursor):
        if isinstance(line, str) and line.isspace():
            continue
        yield number, value_or_error(json_row, line, f"{table.name}, line {number}")


def _read_jsonl(table: Table, cursor: Cursor) -> Iterator[Row]:
    if table.id_column is not None:
        cursor.id_column = table.id_column
    for number, row in _json_records(table, cursor):
        if cursor.id_column is None and not isinstance(row, DataError):
            cursor.id_column = _id_column(table, row)
        count, id_column = cursor.count, cursor.id_column or ""
        cursor.count += 1
        where = f"{table.name}, line {number}"
        result = value_or_error(_text_and_id, row, table.column, id_column, where)
        if isinstance(result, DataError):
            yield (_known_id(row, id_column, where) if id_column else count), result, number
        else:
            yield (result[1] if id_column else count), result[0], number


def _known_id(row: Mapping[str, Any] | DataError, column: str, where: str) -> int | str | None:
    """Return the id of a bad row, if it has one."""
    if isinstance(row, DataError) or column not in row:
        return None
    id_ = value_or_error(_id_of, row[column], where, column)
    return None if isinstance(id_, DataError) else id_


def _text_and_id(row: Mapping[str, Any], column: str, id_column: str, where: str) -> tuple[str, int | str]:
    for name in (column, id_column):
        if name and name not in row:
            raise no_column(where, name, list(row))
    text = "" if row[column] is None else checked_text(row[column], where, column)
    return text, _id_of(row[id_column], where, id_column) if id_column else ""


def _csv_records(table: Table, cursor: Cursor, width: int = 0) -> Iterator[tuple[int, list[str] | DataError]]:
    # The module's limit of 131,072 characters per field would refuse long documents.
    csv.field_size_limit(MOST_ROW_BYTES)
    unread: list[tuple[int, DataError]] = []

    def readable() -> Iterator[str]:
        for number, raw in _raw_lines(table, cursor):
            line = value_or_error(decode, raw, f"{table.name}, line {number}")
            if isinstance(line, DataError):
                # An error would end the csv reader, and a quoted field must end where it ends.
                unread.append((number, line))
                line = raw.decode("utf-8", "surrogateescape")
            yield line

    reader = csv.reader(readable(), strict=True)
    while True:
        number = cursor.line + 1  # a quoted field may span lines: name the first
        fields, where, fault = list[str](), f"{table.name}, line {number}", ""
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            fault = _csv_fault(error, where)
        width = width or len(fields)
        if unread:
            yield unread[0]
            unread.clear()
        elif fault or (fields and len(fields) != width):
            # An unclosed quote swallows the rows after it.
            more = f"; it goes on to line {cursor.line}" if cursor.line > number else ""
            yield number, DataError(f"{where}: malformed row ({fault or _widths(fields, width)}){more}")
        elif fields:
            yield number, fields


def _csv_fault(error: csv.Error, where: str) -> str:
    if str(error).startswith("field larger than"):
        # What follows is the middle of a field, so no more rows can be read.
        raise DataError(f"{where}: {_TOO_LONG}; a quote may not be closed") from error
    return str(error)


def _tsv_records(table: Table, cursor: Cursor, width: int = 0) -> Iterator[tuple[int, list[str] | DataError]]:
    for number, line in _lines(table, cursor, ends=False):
        if isinstance(line, DataError):
            yield number, line
        elif line:
            fields = line.split("\t")
            width = width or len(fields)
            if len(fields) == width:
                yield number, fields
            else:
                yield number, DataError(f"{table.name}, line {number}: malformed row ({_widths(fields, width)})")


_CSV_RECORDS = {"csv": _csv_records, "tsv": _tsv_records}


def _widths(fields: list[str], width: int) -> str:
    return f"{len(fields)} fields, and the header has {width}"


def _header(records: Iterator[tuple[int, list[str] | DataError]]) -> tuple[int, list[str]]:
    number, header = next(records, (0, list[str]()))
    if isinstance(header, DataError):
        raise header
    return number, header


def _read_with_header(table: Table, cursor: Cursor) -> Iterator[Row]:
    read = _CSV_RECORDS[table.format]
    records = read(table, cursor)
    if cursor.offset:  # to continue in the middle, the first line is needed too
        number, header = _header(read(table, Cursor()))
        records = read(table, cursor, len(header))
    else:
        number, header = _header(records)
    if not header:
        return
    where = f"{table.name}, line {number}"
    text_at = column_at(header, table.column, where)
    id_column = _id_column(table, header)
    id_at = column_at(header, id_column, where) if id_column else None
    for number, fields in records:
        count, cursor.count = cursor.count, cursor.count + 1
        if isinstance(fields, DataError):
            yield count if id_at is None else None, fields, number
        else:
            yield count if id_at is None else fields[id_at], fields[text_at], number


@contextmanager
def parquet_file(path: Path, name: str) -> Iterator[Any]:
    """Open a Parquet file; pyarrow's errors, also within the block, become ``DataError``."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            yield file
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{name}: not a readable parquet file ({' '.join(str(error).split())})") from error


def column_values(column: Any, name: str, before: int) -> list[Any]:
    """Return the values of an Arrow column after ``before`` rows, with an error for each that is not UTF-8."""
    try:
        return list(column.to_pylist())
    except UnicodeDecodeError:
        return [_value(scalar, f"{name}, row {row}") for row, scalar in enumerate(column, start=before + 1)]


def _value(scalar: Any, where: str) -> Any:
    try:
        return scalar.as_py()
    except UnicodeDecodeError as error:
        return not_utf8(error, where)


def _parquet_path(table: Table) -> Path:
    if table.path is None:
        raise ConfigError("parquet cannot be read from standard input here; give a file")
    return table.path


def _parquet_records(
    table: Table, wanted: Sequence[str], required: Sequence[str]
) -> Iterator[tuple[int, str, Mapping[str, Any] | DataError]]:
    with parquet_file(_parquet_path(table), table.name) as file:
        present = file.schema_arrow.names
        for name in (table.column, *required):
            column_at(present, name, table.name)
        columns, count = [name for name in wanted if name in present], 0
        for batch in file.iter_batches(batch_size=256, columns=columns):
            values = (column_values(batch.column(name), table.name, count) for name in columns)
            for row in zip(*values, strict=True):
                count += 1
                bad = next((value for value in row if isinstance(value, DataError)), None)
                yield count, f"{table.name}, row {count}", bad or dict(zip(columns, row, strict=True))


def _read_parquet(table: Table, cursor: Cursor) -> Iterator[Row]:
    with parquet_file(_parquet_path(table), table.name) as file:
        schema = file.schema_arrow
        column_at(schema.names, table.column, table.name)
        id_column = _id_column(table, schema.names)
        if id_column:
            column_at(schema.names, id_column, table.name)
        _require_text(table, schema.field(table.column).type)
        columns = list(dict.fromkeys(name for name in (table.column, id_column) if name))
        done = cursor.count
        count, groups = _groups_after(file, done)
        for batch in file.iter_batches(batch_size=1024, columns=columns, row_groups=groups):
            if count + len(batch) <= done:
                count += len(batch)
                continue
            batch = batch.slice(max(0, done - count))
            count = max(count, done)
            texts = column_values(batch.column(table.column), table.name, count)
            ids: Iterable[Any] = range(count, count + len(texts))
            if id_column:
                ids = column_values(batch.column(id_column), table.name, count)
            for id_, text in zip(ids, texts, strict=True):
                count += 1
                cursor.count = count
                if id_column and type(id_) is not int and type(id_) is not str:
                    id_ = value_or_error(_id_of, id_, f"{table.name}, row {count}", id_column)
                if isinstance(id_, DataError):
                    yield None, id_, count
                else:
                    yield id_, text or "", count


def _groups_after(file: Any, rows: int) -> tuple[int, list[int]]:
    """Return the row groups with the rows after the first ``rows``, and how many rows stand before those groups."""
    before = 0
    for group in range(file.num_row_groups):
        size = file.metadata.row_group(group).num_rows
        if before + size > rows:
            return before, list(range(group, file.num_row_groups))
        before += size
    return before, []


def _require_text(table: Table, kind: Any) -> None:
    import pyarrow as pa

    value = kind.value_type if pa.types.is_dictionary(kind) else kind
    text_like = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_null)
    if not any(check(value) for check in text_like):
        raise DataError(f"{table.name}, row 1: {table.column!r} is not a text but {kind}")


_READERS: dict[str, Callable[[Table, Cursor], Iterator[Row]]] = {
    "txt": _read_txt,
    "jsonl": _read_jsonl,
    "csv": _read_with_header,
    "tsv": _read_with_header,
    "parquet": _read_parquet,
}


@dataclass(frozen=True)
class BadRow:
    """A row that can't be used."""

    place: str  # where it is, such as ``notes.jsonl, line 7``
    reason: str
    id: int | str | None = None

    def __str__(self) -> str:
        return f"{self.place}: {self.reason}"


@dataclass(frozen=True)
class Rows:
    """Some consecutive rows of a table."""

    ids: list[int | str]
    texts: list[str]  # their texts; "" for a null
    lines: list[int | str]  # their line or row numbers, from 1; or their places, where a table has several files
    name: str  # the table's name in messages
    unit: str = "line"  # ``line`` or ``row``, whichever ``lines`` counts; "" where there is only one text
    start: Cursor | None = None
    """Where they begin in their table; None where no reader can start there, as in an archive."""

    def __len__(self) -> int:
        return len(self.texts)

    def place(self, index: int) -> str:
        """Return where a row is, for a message.

        >>> Rows([0], ["hello"], [7], "notes.txt").place(0)
        'notes.txt, line 7'
        """
        line = self.lines[index]
        if isinstance(line, str):
            return line
        return f"{self.name}, {self.unit} {line}" if self.unit else self.name

    def placed(self, index: int, error: InputError) -> InputError:
        """Return an error with the text's place in front, unless it is the only text."""
        return type(error)(f"{self.place(index)}: {error}") if self.unit else error

    def empty(self) -> list[int]:
        """Return which rows have only white space."""
        return [index for index, text in enumerate(self.texts) if not text or text.isspace()]

    def without(self, dropped: Collection[int]) -> "Rows":
        """Return the rows except some."""
        if not dropped:
            return self
        gone = frozenset(dropped)
        left = [index for index in range(len(self)) if index not in gone]
        ids, texts, lines = ([column[i] for i in left] for column in (self.ids, self.texts, self.lines))
        return replace(self, ids=ids, texts=texts, lines=lines)  # type: ignore[arg-type]

    def bad(self, index: int, reason: str) -> BadRow:
        """Return a row as one that can't be used."""
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
    """Describe a table without reading it.

    The source is a file whose ending gives the format (``.gz`` or ``.xz`` may follow), a folder of such files if
    ``folders`` is set, or ``-`` for standard input (default: txt). For the columns see ``Table``.
    """
    if format is not None:
        one_of("format", format, FORMATS)
    if str(source) == STDIN:
        path, name, format = None, "standard input", format or "txt"
    else:
        path, name = Path(source), shown_path(source)
        if path.is_dir():
            if not folders:
                raise DataError(f"{path} is a folder, not a file")
            if format is not None:
                raise ConfigError(f"{path} is a folder; the endings of its files give their formats")
            table = Table(path, _FOLDER, name, column or DEFAULT_COLUMN, id_column)
            _files_below(table)
            return table
        if not path.exists():
            raise DataError(f"{path}: no such file")
        format = format or _format_of(path)
    if format == "txt" and (column or id_column):
        raise ConfigError(f"{name}: a txt file has one text per line and no column {column or id_column!r}")
    return Table(path, format, name, column or DEFAULT_COLUMN, id_column)


def read_rows(
    table: Table,
    *,
    max_rows: int,
    max_characters: int = 2**20,
    bad: Callable[[BadRow], None] | None = None,
    start: Cursor | None = None,
) -> Iterator[Rows]:
    """Yield the rows of a table in shards of at most ``max_rows`` rows and ``max_characters`` (or a single text).

    Where a shard ends depends on the rows alone, also for a reader that begins at ``start``, a ``Rows.start``. ``bad``
    is called with each row that can't be read, which is left out; None raises ``DataError`` with file and line.
    """
    unit = "row" if table.format == "parquet" else "line"
    ids: list[int | str] = []
    texts: list[str] = []
    lines: list[int | str] = []
    size = 0
    cursor = Cursor() if start is None else replace(start)
    begin = here = cursor.place()
    read = _read_folder if table.format == _FOLDER else _READERS[table.format]
    for id_, text, line in read(table, cursor):
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


def _start(table: Table, file: str, *place: Any) -> Cursor | None:
    """Return where rows begin, if a reader can start there; a file that is a single text is quickly sent instead."""
    if table.format == _FOLDER:
        return None if file.endswith((".txt", *COMPRESSED)) else Cursor(file, *place)
    return None if table.path is None or table.path.suffix.lower() in COMPRESSED else Cursor(file, *place)


def _format_of(path: Path) -> str:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    packed = bool(suffixes) and suffixes[-1] in COMPRESSED
    ending = suffixes[-1 - packed].removeprefix(".") if len(suffixes) > packed else ""
    if ending not in _ENDINGS or (packed and ending == "parquet"):
        raise DataError(f"{path}: unknown file format; {_KNOWN_ENDINGS}")
    return _ENDINGS[ending]


def _is_table(path: Path) -> bool:
    return not isinstance(value_or_error(_format_of, path), DataError)


def _files_below(table: Table) -> list[Path]:
    """Return the table files of a folder in order, without hidden files and unfinished work.

    Of a collection in BEIR's format these are its documents.
    """
    assert table.path is not None
    paths: list[Path] = []

    def fail(error: OSError) -> None:
        raise DataError(f"{error.filename}: cannot be read ({error.strerror})") from error

    for folder, folders, names in os.walk(table.path, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith(".") and not name.endswith(".parts")]
        tables = (Path(folder, name) for name in names if not name.startswith(".") and _is_table(Path(name)))
        paths += [path for path in tables if path.is_file()]
    collection = table.path / _COLLECTION
    if collection in paths and (table.path / "queries.jsonl").is_file():
        paths = [collection]
    if not paths:
        raise DataError(f"{table.path}: no file of texts in it; {_KNOWN_ENDINGS}")
    return sorted(paths)


def skipped_files(table: Table) -> dict[str, int]:
    """Count the files of a folder that aren't read as tables, by their ending."""
    if table.format != _FOLDER or table.path is None:
        return {}
    read, counts = set(_files_below(table)), Counter[str]()
    for path in table.path.rglob("*"):
        parts = path.relative_to(table.path).parts
        is_hidden = any(part.startswith(".") or part.endswith(".parts") for part in parts)
        if path.is_file() and path not in read and not is_hidden:
            counts[path.suffix or "no ending"] += 1
    return dict(counts.most_common())


def _read_folder(table: Table, cursor: Cursor) -> Iterator[Row]:
    """Read file after file: a .txt file is one text, of others each row is."""
    assert table.path is not None
    # A worker starts in the middle of a folder many times.
    files = _names_once(table) if cursor.file else _names(table)
    begin = next((number for number, file in enumerate(files) if file == cursor.file), 0)
    for file in files[begin:]:
        path = table.path / file
        if file != cursor.file:
            cursor.begin(file)
        # As the folder was named, wherever it is for this process.
        shown = shown_path(file)
        name = str(Path(table.name) / shown)
        part = replace(table, path=path, name=name, format=_format_of(path))
        try:
            if part.format == "txt":
                if not cursor.count:
                    cursor.count = 1
                    yield shown, value_or_error(_full_text, part), name
                continue
            unit = "row" if part.format == "parquet" else "line"
            for id_, text, line in _READERS[part.format](part, cursor):
                full_id = id_ if len(files) == 1 or id_ is None else f"{shown}#{id_}"
                yield full_id, text, f"{name}, {unit} {line}"
        except DataError as error:
            # A truncated archive, a table without the column: the other files are fine.
            used = f"; its first {cursor.count} rows are used" if cursor.count else ""
            yield None, DataError(f"{error}{used}"), name


def _names(table: Table) -> tuple[str, ...]:
    assert table.path is not None
    return tuple(path.relative_to(table.path).as_posix() for path in _files_below(table))


_names_once = lru_cache(maxsize=1)(_names)


def _full_text(table: Table) -> str:
    """Return a file as one text, with its line ends except the last."""
    lines = []
    for _, line in _lines(table, Cursor()):
        if isinstance(line, DataError):
            raise line
        lines.append(line)
    return "".join(lines).rstrip("\r\n")
