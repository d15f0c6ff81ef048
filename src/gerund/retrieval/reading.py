"""Files into documents: which files there are, and what is in each of them.

A file of text is one document; of a table (JSON lines, CSV, Parquet) each row is one. Other packages read further kinds
of files, or known ones in their own way, by the entry point ``gerund.readers``: its name is the ending of a file, and
it is a function that takes a path and returns Markdown.

Knows: file formats, where in a file something is wrong. Does not know: chunks, models.
"""

import hashlib
import logging
import os
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from gerund.data.files import COMPRESSED, checked_text, decode, opened
from gerund.data.table import Table, no_column, tried
from gerund.data.table_readers import read_records
from gerund.errors import DataError, GerundError, MissingDependencyError
from gerund.retrieval.documents import Section
from gerund.retrieval.markup import ParsedText, html, markdown
from gerund.retrieval.store import POINTER_FOLDER

ENTRY_POINTS = "gerund.readers"
TEXT_COLUMN, TITLE_COLUMN = "text", "title"
ID_COLUMNS = ("id", "_id")

_PIECE = 2**20
# What a page of an electronic book may unpack to, so that a small file cannot fill the memory.
_LARGEST_PAGE = 2**26

# A row that cannot be read comes as the error that says why.
Reader = Callable[[Path], Iterable[ParsedText | DataError]]


class NoTextError(DataError):
    """A file that can be read and has no text, so that what it had before is out of date."""


def find_files(paths: Sequence[Path]) -> list[Path]:
    """Return these files, and for a folder all files in it and below it that can be read here, sorted.

    Hidden files and folders are passed over, and links to folders are not followed. A file that is named is returned
    whatever its ending.

    Raises:
        DataError: a path is not there, or is neither a file nor a folder.
    """
    found: dict[Path, None] = {}
    for path in paths:
        if not path.exists():
            raise DataError(f"{path}: no such file or folder")
        if path.is_dir():
            found |= dict.fromkeys(sorted(_files_below(path)))
        elif path.is_file():
            found[path] = None
        else:
            raise DataError(f"{path}: neither a file nor a folder")
    return list(found)


def unknown_files(paths: Sequence[Path]) -> dict[str, int]:
    """Return how many files in these folders are of no kind that can be read here, by their ending."""
    counts = Counter(
        path.suffix.lower() or "no ending"
        for folder in paths
        if folder.is_dir()
        for path in _visible_below(folder)
        if ending_of(path) not in endings()
    )
    return dict(sorted(counts.items(), key=lambda own: (-own[1], own[0])))


def _files_below(folder: Path) -> Iterator[Path]:
    return (path for path in _visible_below(folder) if ending_of(path) in endings())


def _visible_below(folder: Path) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename}: cannot be read ({error.strerror})") from error

    for place, folders, names in os.walk(folder, onerror=refuse):
        if POINTER_FOLDER in folders:  # an index's own files are nobody's documents
            folders.clear()
            continue
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            path = Path(place, name)
            if not name.startswith(".") and path.is_file():
                yield path


def ending_of(path: Path) -> str:
    """Return what a file's name ends in, without the dot and without that of an archive.

    >>> ending_of(Path("a/notes.MD.gz"))
    'md'
    """
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSED:
        suffixes.pop()
    return suffixes[-1].removeprefix(".") if suffixes else ""


def stem_of(path: Path) -> str:
    """Return a file's name without its ending and without that of an archive.

    >>> stem_of(Path("a/v1.2 release notes.MD.gz")), stem_of(Path("LICENSE"))
    ('v1.2 release notes', 'LICENSE')
    """
    inner = path.with_suffix("") if path.suffix.lower() in COMPRESSED else path
    return inner.stem


def endings() -> tuple[str, ...]:
    """Return the endings of files that can be read, those of other packages among them."""
    return (*_READERS, *(name for name in _others() if name not in _READERS))


@cache
def _others() -> Mapping[str, metadata.EntryPoint]:
    return {one.name.lower().removeprefix("."): one for one in metadata.entry_points(group=ENTRY_POINTS)}


def digest_of(path: Path) -> str:
    """Return a hash of a file's bytes: 32 hexadecimal digits.

    Raises:
        DataError: it cannot be read.
    """
    whole = hashlib.blake2b(digest_size=16)
    try:
        with path.open("rb") as file:
            while piece := file.read(_PIECE):
                whole.update(piece)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
    return whole.hexdigest()


def read_file(path: Path, bad: Callable[[DataError], None] | None = None) -> Iterator[ParsedText]:
    """Yield the documents of a file in order; a row without any text is passed over.

    Args:
        path: the file.
        bad: told of each row of a table that cannot be read, which is passed over; None raises.

    Raises:
        DataError: the file cannot be read, is of an unknown kind, or is malformed; with its name, and where there is
            one, the line.
        NoTextError: it has no text at all.
        MissingDependencyError: a library is needed to read it; the message has the pip line.
    """
    ending, count = ending_of(path), 0
    for parsed in _reader(path, ending)(path):
        if isinstance(parsed, DataError):
            if bad is None:
                raise parsed
            bad(parsed)
            count += 1
        elif parsed.text.strip():
            count += 1
            yield parsed
    if not count:
        hint = "; are its pages pictures of text?" if ending == "pdf" else ""
        raise NoTextError(f"{path}: there is no text in it{hint}")


def _reader(path: Path, ending: str) -> Reader:
    # Whoever installs another reader for a kind that is known here wants that one.
    if ending in _others():
        return _foreign(_others()[ending])
    if ending in _READERS:
        return _READERS[ending]
    raise DataError(f"{path}: unknown kind of file; known are: {', '.join(f'.{name}' for name in endings())}")


def _foreign(entry: metadata.EntryPoint) -> Reader:
    def read(path: Path) -> Iterator[ParsedText]:
        try:
            text = entry.load()(path)
        except GerundError:
            raise
        except Exception as error:
            raise DataError(f"{path}: the reader {entry.value} failed on it ({error})") from error
        yield markdown(checked_text(text, str(path), "the reader's text"))

    return read


def _content(path: Path) -> str:
    with opened(path) as file:
        return decode(file.read(), str(path)).removeprefix("\ufeff")


def _read_text(path: Path) -> Iterator[ParsedText]:
    yield ParsedText(_content(path))


def _read_markdown(path: Path) -> Iterator[ParsedText]:
    yield markdown(_content(path))


def _read_html(path: Path) -> Iterator[ParsedText]:
    yield html(_content(path))


def _read_table(path: Path) -> Iterator[ParsedText | DataError]:
    ending = ending_of(path)
    table = Table(path, "jsonl" if ending == "ndjson" else ending, str(path), TEXT_COLUMN)
    for number, where, row in read_records(table, (TEXT_COLUMN, TITLE_COLUMN, *ID_COLUMNS)):
        yield tried(_row, row, where, number)


def _row(row: Mapping[str, Any], where: str, number: int) -> ParsedText:
    """Return the document in a row: its text, perhaps a title, and its id, or else the number of its line."""
    if TEXT_COLUMN not in row:
        raise no_column(where, TEXT_COLUMN, [str(name) for name in row])
    text, title = row[TEXT_COLUMN], row.get(TITLE_COLUMN)
    name = next((one for one in ID_COLUMNS if row.get(one) is not None), None)
    key = number if name is None else row[name]
    if isinstance(key, bool) or not isinstance(key, str | int | float):
        raise DataError(f"{where}: the id {name!r} is neither a text nor a number but {type(key).__name__}")
    return ParsedText(
        "" if text is None else checked_text(text, where, TEXT_COLUMN),
        "" if title is None else checked_text(title, where, TITLE_COLUMN),
        key=checked_text(str(key), where, name or "id") or str(number),
    )


def _read_pdf(path: Path) -> Iterator[ParsedText]:
    try:
        from pypdf import PdfReader
        from pypdf.errors import PyPdfError
    except ImportError as error:
        raise _needs(path, "pypdf") from error
    # What it repairs by itself it says on a log; what it cannot is an error.
    logging.getLogger("pypdf").setLevel(logging.CRITICAL)
    try:
        reader = PdfReader(path)
        if reader.is_encrypted and not reader.decrypt(""):
            raise DataError(f"{path}: it is locked by a password")
        # A line end, and no blank line: a sentence may go on on the next page.
        text = "\n".join(page.extract_text() for page in reader.pages)
        title = (reader.metadata or {}).get("/Title")
    except (PyPdfError, OSError, ValueError, KeyError, TypeError, RecursionError, NotImplementedError) as error:
        raise DataError(f"{path}: not a readable PDF ({_first_line(error)})") from error
    # Characters that fonts leave undefined come out as halves of surrogate pairs, which nothing can store.
    yield ParsedText(text.encode(errors="replace").decode(), str(title or "").strip())


def _read_docx(path: Path) -> Iterator[ParsedText]:
    try:
        import mammoth
    except ImportError as error:
        raise _needs(path, "mammoth") from error
    try:
        with path.open("rb") as file:
            page = mammoth.convert_to_html(file, convert_image=mammoth.images.img_element(lambda _: {"src": ""})).value
    except (zipfile.BadZipFile, OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise DataError(f"{path}: not a readable Word document ({_first_line(error)})") from error
    yield html(page)


def _read_epub(path: Path) -> Iterator[ParsedText]:
    from gerund.retrieval.epub import pages

    text, sections, title = "", list[Section](), ""
    try:
        for page in pages(path, _LARGEST_PAGE):
            own = html(decode(page, str(path)))
            text += "\n\n" if text else ""
            sections += [Section(len(text) + one.start, one.path) for one in own.sections]
            text += own.text
            title = title or own.title
    except (zipfile.BadZipFile, OSError, KeyError, NotImplementedError, RuntimeError) as error:
        raise DataError(f"{path}: not a readable EPUB ({_first_line(error)})") from error
    yield ParsedText(text, title, tuple(sections))


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _needs(path: Path, library: str) -> MissingDependencyError:
    return MissingDependencyError(f"{path}: needs {library} to be read: pip install 'gerund[documents]'")


_READERS: dict[str, Reader] = {
    "txt": _read_text,
    "md": _read_markdown,
    "markdown": _read_markdown,
    "html": _read_html,
    "htm": _read_html,
    "xhtml": _read_html,
    **dict.fromkeys(("jsonl", "ndjson", "csv", "tsv", "parquet"), _read_table),
    "pdf": _read_pdf,
    "docx": _read_docx,
    "epub": _read_epub,
}
