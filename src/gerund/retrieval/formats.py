"""The documents in a file of each format, as the reader process and, for plain text and tables, this process read them.

Whatever a library raises on a malformed file comes as a ``DataError``.

Knows: formats, the libraries that parse them. Does not know: processes, folders of files.
"""

import io
import logging
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from gerund.data.files import COMPRESSED, as_utf8, checked_text, opened
from gerund.data.table import Table, no_column, tried
from gerund.data.table_readers import read_records
from gerund.errors import DataError, GerundError, MissingDependencyError
from gerund.retrieval.encodings import decoded
from gerund.retrieval.epub import pages
from gerund.retrieval.markup import html, markdown
from gerund.retrieval.parsed_text import ParsedText, Section

TEXT_COLUMN, TITLE_COLUMN = "text", "title"
ID_COLUMNS = ("id", "_id")

# A row that cannot be read comes as the error that says why.
Parser = Callable[[Path, int], Iterable[ParsedText | DataError]]


def parse(path: Path, ending: str, most_bytes: int) -> Iterator[ParsedText | DataError]:
    """Yield the documents of a file.

    Args:
        path: the file.
        ending: which format it has: one of ``PARSERS``.
        most_bytes: what the file, or any part of an archive that is read, may unpack to.

    Raises:
        DataError: it is malformed, or too large.
        MissingDependencyError: a library is needed to read it.
        MemoryError: it needs more memory than there is.
    """
    name, parser = PARSERS[ending]
    try:
        yield from parser(path, most_bytes)
    except MissingDependencyError as error:
        raise MissingDependencyError(_named(error, path)) from error
    except DataError as error:
        raise DataError(_named(error, path)) from error
    except (GerundError, MemoryError):
        raise
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
    except Exception as error:
        raise DataError(f"{path}: not a readable {name} ({_reason(error)})") from error
    except BaseException as error:
        if not is_panic(error):
            raise
        raise DataError(f"{path}: not a readable {name} ({_reason(error)})") from error


def is_panic(error: BaseException) -> bool:
    """Whether an error is what a library in Rust panics with, which is no ``Exception``."""
    return type(error).__name__ == "PanicException"


def load_libraries(ending: str) -> None:
    """Import what parses a format, which takes time and memory that the document has no part in."""
    for module in _LIBRARIES.get(ending, ()):
        try:
            import_module(module)
        except ImportError:
            return  # the parser says which one is missing


def _named(error: GerundError, path: Path) -> str:
    return str(error) if str(error).startswith(str(path)) else f"{path}: {error}"


def _reason(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def _content(path: Path, most_bytes: int) -> bytes:
    with opened(path) as file:
        raw = file.read(most_bytes + 1)
    if len(raw) > most_bytes:
        raise DataError(_too_large("it is", most_bytes))
    return raw


def _too_large(what: str, most_bytes: int) -> str:
    return f"{what} larger than {most_bytes // 10**6} MB unpacked; allow the reader more memory (--read-memory)"


def _parse_text(path: Path, most_bytes: int) -> Iterator[ParsedText]:
    text, encoding = decoded(_content(path, most_bytes), str(path))
    yield ParsedText(text, encoding=encoding)


def _parse_markdown(path: Path, most_bytes: int) -> Iterator[ParsedText]:
    text, encoding = decoded(_content(path, most_bytes), str(path))
    yield _from(markdown(text), encoding)


def _parse_html(path: Path, most_bytes: int) -> Iterator[ParsedText]:
    text, encoding = decoded(_content(path, most_bytes), str(path), markup=True)
    yield _from(html(text), encoding)


def _from(parsed: ParsedText, encoding: str) -> ParsedText:
    return ParsedText(parsed.text, parsed.title, parsed.sections, parsed.key, encoding)


def parse_table(path: Path, ending: str) -> Iterator[ParsedText | DataError]:
    """Yield the rows of a table as documents, and for one that cannot be read why."""
    table = Table(path, "jsonl" if ending == "ndjson" else ending, str(path), TEXT_COLUMN)
    for number, where, row in read_records(table, (TEXT_COLUMN, TITLE_COLUMN, *ID_COLUMNS)):
        yield tried(_row, row, where, number)


def _parse_table(path: Path, most_bytes: int, *, ending: str) -> Iterator[ParsedText | DataError]:
    del most_bytes  # its rows have a limit of their own
    return parse_table(path, ending)


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


def _parse_pdf(path: Path, most_bytes: int) -> Iterator[ParsedText]:
    try:
        from pypdf import PdfReader
    except ImportError as error:
        raise _needs("pypdf") from error
    # What it repairs by itself it says on a log; what it cannot is an error.
    logging.getLogger("pypdf").setLevel(logging.CRITICAL)
    # In memory, since an archive may hold the file.
    reader = PdfReader(io.BytesIO(_content(path, most_bytes)) if path.suffix.lower() in COMPRESSED else path)
    if reader.is_encrypted and not reader.decrypt(""):
        raise DataError("it is locked by a password")
    # A line end, and no blank line: a sentence may go on on the next page.
    text = "\n".join(page.extract_text() for page in reader.pages)
    title = (reader.metadata or {}).get("/Title")
    # Characters that fonts leave undefined come out as halves of surrogate pairs, which nothing can store.
    yield ParsedText(as_utf8(text), as_utf8(str(title or "")).strip())


def _parse_docx(path: Path, most_bytes: int) -> Iterator[ParsedText]:
    try:
        import mammoth
    except ImportError as error:
        raise _needs("mammoth") from error
    with _archive(path, most_bytes) as archive:
        word = _with_formulas_as_text(archive, most_bytes)
    no_image = mammoth.images.img_element(lambda _: {"src": ""})
    yield html(mammoth.convert_to_html(word, convert_image=no_image).value)


# Word writes formulas in elements of their own, which mammoth leaves out; their text runs are like all others.
_FORMULA_RUN = re.compile(rb"<(/?)m:(r|t)(?=[\s>/])")
_FORMULA_SIGN = re.compile(rb"<m:(sup|sub|den)>")
_FORMULA_ELEMENT = re.compile(rb"</?m:[^<>]*>")
_SIGNS = {b"sup": b"^", b"sub": b"_", b"den": b"/"}


def _with_formulas_as_text(archive: zipfile.ZipFile, most_bytes: int) -> io.BytesIO:
    """Return a Word document, without its pictures, whose formulas are text: E=mc^2."""
    changed = io.BytesIO()
    size = 0
    with zipfile.ZipFile(changed, "w") as copy:
        for info in archive.infolist():
            if not info.filename.lower().endswith((".xml", ".rels")):
                continue
            size += info.file_size
            if size > most_bytes:
                raise DataError(_too_large("it is", most_bytes))
            content = archive.read(info)
            if b"<m:" in content:
                content = _FORMULA_SIGN.sub(lambda sign: b"<w:r><w:t>" + _SIGNS[sign[1]] + b"</w:t></w:r>", content)
                content = _FORMULA_ELEMENT.sub(b"", _FORMULA_RUN.sub(rb"<\1w:\2", content))
            copy.writestr(info.filename, content)
    changed.seek(0)
    return changed


def _parse_epub(path: Path, most_bytes: int) -> Iterator[ParsedText]:
    text, sections, title, encoding = "", list[Section](), "", ""
    parts = list[str]()
    length = 0
    with _archive(path, most_bytes) as archive:
        for page in pages(archive, most_bytes):
            content, page_encoding = decoded(page, str(path), markup=True)
            own = html(content)
            sections += [Section(length + one.start, one.path) for one in own.sections]
            parts.append(own.text)
            length += len(own.text) + 2
            title, encoding = title or own.title, encoding or page_encoding
    text = "\n\n".join(parts)
    yield ParsedText(text, title, tuple(sections), encoding=encoding)


def _archive(path: Path, most_bytes: int) -> zipfile.ZipFile:
    packed = path.suffix.lower() in COMPRESSED
    return zipfile.ZipFile(io.BytesIO(_content(path, most_bytes)) if packed else path)


def _needs(library: str) -> MissingDependencyError:
    return MissingDependencyError(f"needs {library} to be read: pip install 'gerund[documents]'")


TABLES = ("jsonl", "ndjson", "csv", "tsv", "parquet")
PLAIN = ("txt", "md", "markdown")

PARSERS: dict[str, tuple[str, Parser]] = {
    "txt": ("text", _parse_text),
    "md": ("Markdown file", _parse_markdown),
    "markdown": ("Markdown file", _parse_markdown),
    "html": ("HTML page", _parse_html),
    "htm": ("HTML page", _parse_html),
    "xhtml": ("HTML page", _parse_html),
    **{ending: (f"{ending} file", partial(_parse_table, ending=ending)) for ending in TABLES},
    "pdf": ("PDF", _parse_pdf),
    "docx": ("Word document", _parse_docx),
    "epub": ("EPUB", _parse_epub),
}

_LIBRARIES = {
    "pdf": ("pypdf",),
    "docx": ("mammoth", "html_to_markdown"),
    "parquet": ("pyarrow.parquet",),
    **dict.fromkeys(("html", "htm", "xhtml", "epub"), ("html_to_markdown",)),
    **dict.fromkeys(PLAIN, ("charset_normalizer",)),
}
