"""Read documents from JSONL, Parquet, text and Markdown files, and clean up known quirks of raw text.

A corpus is streamed, never held in memory. Each document knows its place in its file, so that errors name the line.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path

from gerund.checks import one_of
from gerund.data.files import COMPRESSED, as_utf8, checked_text, decode, field_of, json_row, opened
from gerund.data.tables import column_at, column_values, parquet_file
from gerund.errors import ConfigError, DataError

FORMATS = (
    ".jsonl", ".jsonl.xz", ".jsonl.gz", ".parquet",
    ".txt", ".txt.xz", ".txt.gz", ".md", ".md.xz", ".md.gz",
)  # fmt: skip

# A line with only a byte order mark is blank too.
_BLANK = b" \t\r\n\f\v\xef\xbb\xbf"
# The top heading of a Markdown document.
_HEADING = re.compile(r"^ {0,3}#[ \t]+(?P<title>\S.*?)(?:[ \t]+#+)?[ \t]*\r?$", re.MULTILINE)
# A code block, in which a line with # is a comment; an unclosed block extends to the end of the document.
_FENCED = re.compile(r"^ {0,3}(```+|~~~+).*?(?:^ {0,3}\1|\Z)", re.MULTILINE | re.DOTALL)
_KERNEL_FOLDERS = (Path("/proc"), Path("/sys"), Path("/dev"))


@dataclass(frozen=True)
class Document:
    """A document of a corpus."""

    text: str
    title: str = ""
    """Its title, empty where the file has none."""


@dataclass(frozen=True)
class BadDocument:
    """A document that can't be used."""

    file: str
    line: int | None  # the line or row, from 1; None for the file as a whole
    reason: str

    def __str__(self) -> str:
        return f"{self.file}{f', line {self.line}' if self.line else ''}: {self.reason}"

    @classmethod
    def of(cls, record: "Record", error: DataError) -> "BadDocument":
        """Return the bad document for an error about a record."""
        line = record.number if record.unit else None
        reason = str(error).removeprefix(f"{record.place}: ").removeprefix(f"{record.path}: ")
        return cls(as_utf8(str(record.path)), line, reason)


@dataclass(frozen=True)
class Record:
    """A document as it is in its file, not parsed yet."""

    path: Path
    number: int  # its line or row, from 1
    unit: str  # ``line`` or ``row``, whichever ``number`` counts; "" where the file is one document
    content: bytes | tuple[object, object] | DataError
    """The bytes of a line or file, the text and title of a row, or why they can't be read."""
    offset: int | None = None  # where these bytes begin in the file; None for compressed files and tables

    @property
    def place(self) -> str:
        """Where it is, for a message."""
        return f"{self.path}, {self.unit} {self.number}" if self.unit else str(self.path)


def read_documents(
    paths: Iterable[str | Path],
    *,
    text_column: str = "text",
    title_column: str = "title",
    bad: Callable[[BadDocument], None] | None = None,
) -> Iterator[Document]:
    """Yield the documents of files in order; a document without any text is skipped.

    A file's ending gives its format (see ``FORMATS``); a .txt or .md file is one document, and the title column may be
    absent. ``bad`` is called with each document that can't be used, or with the unreadable rest of a file, and these
    are skipped; None raises ``DataError``.
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
    """Parse a part of a corpus: ``2/3`` is the second, fifth, eighth, ... document.

    >>> part_of("2/3")
    (1, 3)
    """
    match = re.fullmatch(r"([1-9]\d{0,8})/([1-9]\d{0,8})", text, re.ASCII)
    if match is None or int(match[1]) > int(match[2]):
        raise ConfigError(f"part {text!r} is not written such as 1/2, the first of two")
    return int(match[1]) - 1, int(match[2])


def corpus_files(paths: Iterable[Path]) -> list[Path]:
    """Return these files, and for a folder all text files in it and below it, sorted; each once."""
    files: list[Path] = []
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
            files += inside
        elif path.is_file():
            files.append(path)
        else:
            raise ConfigError(f"{path}: neither a file nor a folder")
    for file in files:
        if not os.access(file, os.R_OK):
            raise ConfigError(f"{file}: cannot be read (permission denied)")
    return list(dict.fromkeys(file.absolute() for file in files))


def _texts_below(folder: Path) -> Iterator[Path]:
    """Yield the text files in a folder and below it; links to folders are not followed."""
    real = folder.resolve()
    if real in (Path(real.anchor), *_KERNEL_FOLDERS):
        raise ConfigError(f"{folder}: these are the files of the whole system; name a folder of texts")

    def fail(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):  # just removed
            raise ConfigError(f"{error.filename}: cannot be read ({error.strerror})") from error

    for place, folders, names in os.walk(folder, onerror=fail):
        # The kernel generates these files, some without an end.
        folders[:] = [name for name in folders if Path(place, name) not in _KERNEL_FOLDERS]
        texts = (name for name in names if name.lower().endswith(FORMATS) and not name.startswith("."))
        yield from (path for name in texts if (path := Path(place, name)).is_file())


def all_records(paths: Iterable[Path], text_column: str, title_column: str) -> Iterator[Record]:
    """Yield the documents of several files unparsed, and for an unreadable rest of a file a record with the error."""
    for path in paths:
        number = 0
        try:
            for record in _read_records(path, text_column, title_column):
                number = record.number
                yield record
        except DataError as error:
            # A truncated archive, a table without the column: on with the next file.
            yield Record(path, number + 1, "", error)


def _read_records(path: Path, text_column: str, title_column: str) -> Iterator[Record]:
    ending = corpus_format(path)
    if not path.is_file():
        raise DataError(f"{path} is a folder, not a file" if path.is_dir() else f"{path}: no such file")
    if ending == ".parquet":
        yield from _read_parquet(path, text_column, title_column)
        return
    offset = 0 if path.suffix.lower() not in COMPRESSED else None
    with opened(path) as file:
        if ending.startswith(".jsonl"):
            yield from plain_lines(path, file, offset=offset)
        else:
            yield Record(path, 1, "", file.read(), offset)


def document_of(record: Record, *, text_column: str = "text", title_column: str = "title") -> Document:
    """Parse a record; raises ``DataError`` if it isn't UTF-8, is malformed, or has no text."""
    content, where = record.content, record.place
    if isinstance(content, DataError):
        raise content
    if isinstance(content, tuple):
        return _document(*content, where, text_column)
    text = decode(content, where)
    text = text.lstrip("\ufeff") if record.number == 1 else text
    if record.unit:
        row = json_row(text, where)
        return _document(field_of(row, text_column, where), row.get(title_column), where, text_column)
    ending = corpus_format(record.path)
    heading = _HEADING.search(_FENCED.sub("", text)) if ending.startswith(".md") else None
    return Document(text=text, title=heading["title"] if heading else record.path.name[: -len(ending)])


def _document(text: object, title: object, where: str, text_column: str) -> Document:
    return Document(text=checked_text(text, where, text_column), title=title if isinstance(title, str) else "")


def corpus_format(path: Path) -> str:
    """Return which of ``FORMATS`` a file has, by its name."""
    name = path.name.lower()
    for ending in sorted(FORMATS, key=len, reverse=True):
        if name.endswith(ending):
            return ending
    raise DataError(f"{path}: unknown file format; valid endings are: {', '.join(FORMATS)}")


def plain_lines(path: Path, file: Iterable[bytes], *, number: int = 1, offset: int | None = None) -> Iterator[Record]:
    """Yield the lines that are not blank; the first has this number and offset in the file (None if compressed)."""
    for raw in file:
        if raw.strip(_BLANK):
            yield Record(path, number, "line", raw, offset)
        number += 1
        offset = None if offset is None else offset + len(raw)


def _read_parquet(path: Path, text_column: str, title_column: str) -> Iterator[Record]:
    with parquet_file(path, str(path)) as file:
        present = file.schema_arrow.names
        columns = [text_column, *([title_column] if title_column in present else [])]
        for name in columns:
            column_at(present, name, str(path))
        row = 0
        for batch in file.iter_batches(batch_size=256, columns=columns):
            texts, *titles = (column_values(batch.column(name), str(path), row) for name in columns)
            for text, title in zip(texts, titles[0] if titles else repeat(None)):  # noqa: B905
                row += 1
                yield Record(path, row, "row", text if isinstance(text, DataError) else (text, title))


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
    r"""Remove the quirks of a text's source.

    ``gutenberg`` joins hard-wrapped lines into paragraphs, removes the underscores of ``_emphasis_`` and
    drops picture captions and rules; verse and headings keep their lines. ``wikipedia`` removes the empty
    brackets that extraction leaves behind. ``pandoc`` does so too and undoes what pandoc makes of a wiki page's
    markup in plain text: tables, ``_emphasis_``, bold words in capitals, list markers, broken links.
    ``none`` changes nothing.

    >>> clean_text("It was a _very_ dark night, and nobody in the house\nwas up.", "gutenberg")
    'It was a very dark night, and nobody in the house was up.'
    >>> clean_text("Fraile () is a mountain ( , ) in Chile.", "wikipedia")
    'Fraile is a mountain in Chile.'
    >>> clean_text("A ROYAL TERN (_Thalasseus maximus_) is a bird.\n\n  ---- ----\n  Size   49 cm", "pandoc")
    'A Royal Tern (Thalasseus maximus) is a bird.'
    """
    one_of("text cleaning", style, list(CLEANERS))
    return CLEANERS[style](text)
