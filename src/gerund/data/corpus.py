"""Read documents from JSONL, Parquet, text and Markdown files, and clean up known quirks of raw text.

A corpus is streamed, never held in memory. Each document knows its place in its file, so that errors name the line.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gerund.data.files import COMPRESSED, as_utf8, checked_text, decode, json_row, not_utf8, opened
from gerund.data.tables import column_at
from gerund.errors import ConfigError, DataError, unknown_name

_BLANK_LINES = re.compile(r"\n[ \t]*\n\s*")
_EMPHASIS = re.compile(r"(?<![A-Za-z0-9_])_([^_\n]+)_(?![A-Za-z0-9_])")
_PICTURE = re.compile(r"\[(?:Picture|Illustration)[^\]]*\]", re.IGNORECASE)
_EMPTY_BRACKETS = re.compile(r"\s*\([\s,;:]*\)")
_SPACES = re.compile(r"[ \t]+")
# Gutenberg wraps near column 70. A paragraph with shorter lines is verse, a heading or a list.
_WRAPPED_LINE_LENGTH = 50


def _clean_gutenberg(text: str) -> str:
    text = _PICTURE.sub("", text.replace("\r\n", "\n"))
    paragraphs = (_unwrap(paragraph) for paragraph in _BLANK_LINES.split(text))
    return "\n\n".join(paragraph for paragraph in paragraphs if paragraph)


def _unwrap(paragraph: str) -> str:
    lines = [_SPACES.sub(" ", line).strip() for line in paragraph.split("\n")]
    lines = [line for line in lines if line]
    if sum(map(str.isalpha, paragraph)) < 0.5 * len(paragraph.replace(" ", "")):
        return ""  # a rule, a table of numbers, a row of asterisks
    wrapped = sum(len(line) for line in lines[:-1]) >= _WRAPPED_LINE_LENGTH * (len(lines) - 1)
    joined = (" " if wrapped else "\n").join(lines)
    return _EMPHASIS.sub(r"\1", joined)


def _clean_wikipedia(text: str) -> str:
    return _EMPTY_BRACKETS.sub("", text).strip()


# A rule of a table, two columns of one, a caption that lost its link, an address, and the name of a picture file.
_RULE = re.compile(r"^[\s|+:=-]*[-=+|]{4}[\s|+:=-]*$", re.MULTILINE)
_COLUMNS = re.compile(r"\S {3,}\S")
_LINK_END = re.compile(r"^[^\[]*\]\]\s*")
_ADDRESS = re.compile(r"\b(?:https?|ftp)://\S+")
_PICTURE_FILE = re.compile(r"\S+\.(?:jpe?g|png|svg|gif|tiff?)\b\S*", re.IGNORECASE)
_LIST_MARKER = re.compile(r"^\s*(?:[-*]|\d+\.)\s{2,}", re.MULTILINE)
_CAPITAL_WORD = "[A-ZÀ-ÖØ-Þ][A-ZÀ-ÖØ-Þ'’-]*[A-ZÀ-ÖØ-Þ]{2}"
_CAPITALS = re.compile(rf"\b{_CAPITAL_WORD}(?: {_CAPITAL_WORD})+\b")
_LOOSE_EMPHASIS = re.compile(r"(?<!\w)_(?=\w)|(?<=\w)_(?!\w)")
_PROSE = 0.6


def _clean_pandoc(text: str) -> str:
    paragraphs = [_clean_pandoc_paragraph(paragraph) for paragraph in _BLANK_LINES.split(text.replace("\r\n", "\n"))]
    return "\n\n".join(paragraph for paragraph in paragraphs if paragraph)


def _clean_pandoc_paragraph(paragraph: str) -> str:
    if _RULE.search(paragraph) or "[TABLE]" in paragraph or "{" in paragraph or "|" in paragraph:
        return ""  # a table, a map's data, a template that was not expanded
    lines = [_LIST_MARKER.sub("", line).strip() for line in paragraph.split("\n")]
    if 2 * sum(bool(_COLUMNS.search(line)) for line in lines) > len(lines):
        return ""  # a row of a table without rules
    body = _LINK_END.sub("", "\n".join(line for line in lines if line))
    body = _PICTURE_FILE.sub("", _ADDRESS.sub("", body))
    if sum(map(str.isalpha, body)) < _PROSE * len(body.replace(" ", "")):
        return ""
    body = _EMPTY_BRACKETS.sub("", _LOOSE_EMPHASIS.sub("", body))
    body = _CAPITALS.sub(lambda words: words[0].title(), body)
    return _SPACES.sub(" ", body).strip()


CLEANERS: dict[str, Callable[[str], str]] = {
    "none": str,
    "gutenberg": _clean_gutenberg,
    "wikipedia": _clean_wikipedia,
    "pandoc": _clean_pandoc,
}


def clean_text(text: str, style: str) -> str:
    r"""Return ``text`` without the quirks of where it came from.

    ``gutenberg`` joins hard-wrapped lines into paragraphs, removes the underscores of ``_emphasis_`` and
    drops picture captions and rules; verse and headings keep their lines. ``wikipedia`` removes the empty
    brackets that extraction leaves behind. ``pandoc`` does so too and undoes what pandoc makes of a wiki page's
    markup in plain text: tables, ``_emphasis_``, words in capitals for bold ones, list markers, rests of links.
    ``none`` changes nothing.

    >>> clean_text("It was a _very_ dark night, and nobody in the house\nwas up.", "gutenberg")
    'It was a very dark night, and nobody in the house was up.'
    >>> clean_text("Fraile () is a mountain ( , ) in Chile.", "wikipedia")
    'Fraile is a mountain in Chile.'
    >>> clean_text("A ROYAL TERN (_Thalasseus maximus_) is a bird.\n\n  ---- ----\n  Size   49 cm", "pandoc")
    'A Royal Tern (Thalasseus maximus) is a bird.'
    """
    try:
        clean = CLEANERS[style]
    except KeyError:
        raise unknown_name("text cleaning", style, list(CLEANERS)) from None
    return clean(text)


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
