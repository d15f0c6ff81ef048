"""Reads documents out of files, one at a time.

Knows: file formats (.jsonl, .parquet, .txt, .md, each .xz or .gz where that makes sense) and where in a file
a document stood, so that an error can name the line. Does not know: tokens, models, what the documents
are for. A corpus is never held in memory whole.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gerund.data.files import COMPRESSED, as_utf8, checked_text, decode, json_row, not_utf8, opened
from gerund.data.table import column_at
from gerund.errors import ConfigError, DataError

FORMATS = (
    ".jsonl", ".jsonl.xz", ".jsonl.gz", ".parquet",
    ".txt", ".txt.xz", ".txt.gz", ".md", ".md.xz", ".md.gz",
)  # fmt: skip


# A byte order mark in front of nothing makes no document either.
_BLANK = b" \t\r\n\f\v\xef\xbb\xbf"

# The heading of a whole Markdown document.
_HEADING = re.compile(r"^ {0,3}#[ \t]+(?P<title>\S.*?)(?:[ \t]+#+)?[ \t]*\r?$", re.MULTILINE)

# A block of code, in which a line with # is a comment; one without an end goes to the end of the document.
_FENCED = re.compile(r"^ {0,3}(```+|~~~+).*?(?:^ {0,3}\1|\Z)", re.MULTILINE | re.DOTALL)

_KERNEL_FOLDERS = (Path("/proc"), Path("/sys"), Path("/dev"))


@dataclass(frozen=True)
class Document:
    """One document of a corpus."""

    text: str
    """The document itself."""
    title: str = ""
    """Its title, empty where the file has none."""


@dataclass(frozen=True)
class BadDocument:
    """A document that could not be used.

    Attributes:
        file: the file's path.
        line: the line or row, counted from 1; None where it is the file as a whole.
        reason: what is wrong.
    """

    file: str
    line: int | None
    reason: str

    def __str__(self) -> str:
        """Say it in a sentence."""
        return f"{self.file}{f', line {self.line}' if self.line else ''}: {self.reason}"

    @classmethod
    def of(cls, record: "Record", error: DataError) -> "BadDocument":
        """Return what is told of a record that an error is about."""
        line = record.number if record.unit else None
        reason = str(error).removeprefix(f"{record.place}: ").removeprefix(f"{record.path}: ")
        return cls(as_utf8(str(record.path)), line, reason)


@dataclass(frozen=True)
class Record:
    """A document as it stands in its file, not looked into yet.

    Attributes:
        path: the file.
        number: the line or row that it stands on, counted from 1.
        unit: ``line`` or ``row``, whichever ``number`` counts; "" where the file is one document.
        content: the bytes of a line or file, the text and title of a row, or why they cannot be had.
        offset: where these bytes begin in the file; None where it is compressed or a table.
    """

    path: Path
    number: int
    unit: str
    content: bytes | tuple[object, object] | DataError
    offset: int | None = None

    @property
    def place(self) -> str:
        """Where it stands, for a message."""
        return f"{self.path}, {self.unit} {self.number}" if self.unit else str(self.path)


def read_documents(
    paths: Iterable[str | Path],
    *,
    text_column: str = "text",
    title_column: str = "title",
    bad: Callable[[BadDocument], None] | None = None,
) -> Iterator[Document]:
    """Yield the documents of ``paths`` in order; a document without any text is passed over.

    Args:
        paths: Files; the ending says the format (see ``FORMATS``). A .txt or .md file is one document.
        text_column: The column or JSON field that holds the text.
        title_column: The one that holds the title; it may be absent.
        bad: Told of each document that cannot be used, which is passed over, or of what is left of a file that cannot
            be read on; None raises.

    Raises:
        DataError: A file is missing, of an unknown format, not UTF-8, or has a malformed row.
    """
    for record in all_records(map(Path, paths), text_column, title_column):
        try:
            document = document_of(record, text_column=text_column, title_column=title_column)
        except DataError as error:
            if bad is None:
                raise
            bad(BadDocument.of(record, error))
        else:
            if document.text.strip():
                yield document


def part_of(text: str) -> tuple[int, int]:
    """Read which of how many parts of a corpus is meant: ``2/3`` is the second, fifth, eighth, ... document.

    >>> part_of("2/3")
    (1, 3)

    Raises:
        ConfigError: it says no such thing.
    """
    found = re.fullmatch(r"([1-9]\d{0,8})/([1-9]\d{0,8})", text, re.ASCII)
    if found is None or int(found[1]) > int(found[2]):
        raise ConfigError(f"part {text!r} is no part such as 1/2, the first of two")
    return int(found[1]) - 1, int(found[2])


def corpus_files(paths: Iterable[Path]) -> list[Path]:
    """Return these files, and for a folder all files of texts in it and below it, sorted.

    Raises:
        ConfigError: A path is not there or cannot be read, a folder has no file of texts, or it is a whole file system.
    """
    found: list[Path] = []
    for path in paths:
        try:
            path.stat()
        except FileNotFoundError:
            raise ConfigError(f"{path}: no such file or folder") from None
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from error
        if path.is_dir():
            inside = sorted(_texts_below(path))
            if not inside:
                raise ConfigError(f"{path}: no file of texts in it; their endings are {', '.join(FORMATS)}")
            found += inside
        elif path.is_file():
            found.append(path)
        else:
            raise ConfigError(f"{path}: neither a file nor a folder")
    for file in found:
        if not os.access(file, os.R_OK):
            raise ConfigError(f"{file}: cannot be read (permission denied)")
    return [file.absolute() for file in found]


def _texts_below(folder: Path) -> Iterator[Path]:
    """Yield the files of texts in a folder and below it; links to folders are not followed."""
    own = folder.resolve()
    if own in (Path(own.anchor), *_KERNEL_FOLDERS):
        raise ConfigError(f"{folder}: these are the files of the whole system; name a folder of texts")

    def refuse(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):  # one that has just been removed
            raise ConfigError(f"{error.filename}: cannot be read ({error.strerror})") from error

    for place, folders, names in os.walk(folder, onerror=refuse):
        # What lies there is made up by the kernel, without an end.
        folders[:] = [name for name in folders if Path(place, name) not in _KERNEL_FOLDERS]
        yield from (Path(place, name) for name in names if _is_text(name) and Path(place, name).is_file())


def _is_text(name: str) -> bool:
    return name.lower().endswith(FORMATS) and not name.startswith(".")


def read_records(path: Path, *, text_column: str = "text", title_column: str = "title") -> Iterator[Record]:
    """Yield the documents of a file in order without looking into them, so that one that is malformed stops nothing.

    Raises:
        DataError: The file is missing, of an unknown format, or cannot be read (on).
    """
    reader = _READERS[corpus_format(path)]
    if not path.is_file():
        raise DataError(f"{path} is a folder, not a file" if path.is_dir() else f"{path}: no such file")
    yield from reader(path, text_column, title_column)


def all_records(paths: Iterable[Path], text_column: str, title_column: str) -> Iterator[Record]:
    """Yield the documents of several files, and where one cannot be read on a record that says why."""
    for path in paths:
        number = 0
        try:
            for record in read_records(path, text_column=text_column, title_column=title_column):
                number = record.number
                yield record
        except DataError as error:
            # An archive that is cut off, a table without the column: an error among others, and on with the next file.
            yield Record(path, number + 1, "", error)


def document_of(record: Record, *, text_column: str = "text", title_column: str = "title") -> Document:
    """Look into a record.

    Raises:
        DataError: It is not UTF-8, malformed, or has no text.
    """
    content, where = record.content, record.place
    if isinstance(content, DataError):
        raise content
    if isinstance(content, tuple):
        return _document(*content, where, text_column)
    text = decode(content, where)
    text = text.lstrip("\ufeff") if record.number == 1 else text
    if record.unit:
        return _parse_row(text, where, text_column, title_column)
    ending = corpus_format(record.path)
    heading = _HEADING.search(_FENCED.sub("", text)) if ending.startswith(".md") else None
    return Document(text=text, title=heading["title"] if heading else record.path.name[: -len(ending)])


def corpus_format(path: Path) -> str:
    """Return which of ``FORMATS`` a file has, by its name.

    Raises:
        DataError: None of them.
    """
    name = path.name.lower()
    for ending in sorted(FORMATS, key=len, reverse=True):
        if name.endswith(ending):
            return ending
    raise DataError(f"{path}: unknown file format; valid endings are: {', '.join(FORMATS)}")


def _read_jsonl(path: Path, text_column: str, title_column: str) -> Iterator[Record]:
    del text_column, title_column
    with opened(path) as file:
        yield from plain_lines(path, file, offset=0 if _is_plain(path) else None)


def plain_lines(path: Path, file: Iterable[bytes], *, number: int = 1, offset: int | None = None) -> Iterator[Record]:
    """Yield the lines of a file that are not blank.

    Args:
        path: the file.
        file: its lines, or some of them.
        number: the first one's number.
        offset: where it begins in the file; None where that says nothing.
    """
    for raw in file:
        if raw.strip(_BLANK):
            yield Record(path, number, "line", raw, offset)
        number += 1
        offset = None if offset is None else offset + len(raw)


def _is_plain(path: Path) -> bool:
    return path.suffix.lower() not in COMPRESSED


def _parse_row(line: str, where: str, text_column: str, title_column: str) -> Document:
    row = json_row(line, where)
    if text_column not in row:
        raise DataError(f"{where}: no field {text_column!r}; present are: {', '.join(row) or 'none'}")
    return _document(row[text_column], row.get(title_column), where, text_column)


def _document(text: object, title: object, where: str, text_column: str) -> Document:
    return Document(text=checked_text(text, where, text_column), title=title if isinstance(title, str) else "")


def _read_txt(path: Path, text_column: str, title_column: str) -> Iterator[Record]:
    del text_column, title_column
    with opened(path) as file:
        yield Record(path, 1, "", file.read(), 0 if _is_plain(path) else None)


def _read_parquet(path: Path, text_column: str, title_column: str) -> Iterator[Record]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            present = file.schema_arrow.names
            columns = [text_column, *([title_column] if title_column in present else [])]
            for name in columns:
                column_at(present, name, str(path))
            row = 0
            for batch in file.iter_batches(batch_size=256, columns=columns):
                for values in zip(*(_values(batch.column(name)) for name in columns), strict=True):
                    row += 1
                    yield _row_record(path, row, values)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a readable parquet file ({' '.join(str(error).split())})") from error


def _values(column: Any) -> list[Any]:
    """Return the values of a column, in the place of each that is not UTF-8 the error."""
    try:
        return list(column.to_pylist())
    except UnicodeDecodeError:
        return [_value(item) for item in column]


def _value(item: Any) -> Any:
    try:
        return item.as_py()
    except UnicodeDecodeError as error:
        return error


def _row_record(path: Path, row: int, values: Sequence[Any]) -> Record:
    text, title = values if len(values) == 2 else (values[0], None)
    if isinstance(text, UnicodeDecodeError):
        return Record(path, row, "row", not_utf8(text, f"{path}, row {row}"))
    return Record(path, row, "row", (text, title))


_READERS: dict[str, Callable[[Path, str, str], Iterator[Record]]] = {
    ".jsonl": _read_jsonl,
    ".jsonl.xz": _read_jsonl,
    ".jsonl.gz": _read_jsonl,
    ".txt": _read_txt,
    ".txt.xz": _read_txt,
    ".txt.gz": _read_txt,
    ".md": _read_txt,
    ".md.xz": _read_txt,
    ".md.gz": _read_txt,
    ".parquet": _read_parquet,
}
