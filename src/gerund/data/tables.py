"""Rows of a table, one text each, streamed out of text, JSON lines, CSV, TSV and Parquet files.

Knows: file formats, columns, and where in a file a row stood, so that an error can name the line. Does not
know: what the texts are for. A table is never held in memory whole. (``corpus`` reads whole documents.)
"""

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from gerund.data.files import COMPRESSED, shown_path
from gerund.data.table import DEFAULT_COLUMN, FORMATS, Cursor, Row, Table, tried
from gerund.data.table_readers import READERS, lines_of
from gerund.errors import ConfigError, DataError, InputError, TextError, unknown_name

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
    for id_, text, line in _read(table, cursor):
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


def _read(table: Table, cursor: Cursor) -> Iterator[Row]:
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


def passed_over(table: Table) -> dict[str, int]:
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
                    yield shown, tried(_whole_text, own), name
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
