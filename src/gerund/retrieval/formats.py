"""Parse each file format into text with headings: Markdown, HTML, PDF, Word, EPUB and tables.

Markdown stays unchanged, so that offsets are those of the file; only its headings are extracted. HTML is converted to
Markdown by html-to-markdown, and its offsets are those of the Markdown. Bytes are decoded by their byte order mark, the
declared encoding, as UTF-8, or by detection. Any error of a library on a malformed file is raised as a ``DataError``.
"""

import codecs
import io
import logging
import posixpath
import re
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path
from typing import Any

from gerund.data.files import COMPRESSED, as_utf8, checked_text, opened
from gerund.data.tables import Table, no_column, read_records, value_or_error
from gerund.errors import DataError, GerundError, MissingDependencyError, is_panic


@dataclass(frozen=True)
class Section:
    """A section of a document."""

    start: int  # its first character, that of its heading
    path: tuple[str, ...]  # the headings above its text, outermost first, ending with its own


@dataclass(frozen=True)
class ParsedText:
    """The text of a file, or of a row of a table."""

    text: str
    title: str = ""
    sections: tuple[Section, ...] = ()
    key: str = ""  # identifies one of several documents in a file; empty where the file is a single document
    encoding: str = ""  # the encoding where it is not UTF-8: ``windows-1252 (declared)`` or ``utf-16-le (detected)``


TEXT_COLUMN, TITLE_COLUMN = "text", "title"
ID_COLUMNS = ("id", "_id")

# A row that cannot be read is yielded as its error.
Parser = Callable[[Path, int], Iterable[ParsedText | DataError]]


def parse(path: Path, ending: str, most_bytes: int) -> Iterator[ParsedText | DataError]:
    """Yield the documents of a file in the format ``ending``, one of ``PARSERS``.

    The file, and each part of an archive that is read, may unpack to at most ``most_bytes``.
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
    except BaseException as error:
        if not (isinstance(error, Exception) or is_panic(error)):
            raise
        raise DataError(f"{path}: not a readable {name} ({_reason(error)})") from error


def load_libraries(ending: str) -> None:
    """Import the parser of a format before the time and memory of the document are limited."""
    for module in _LIBRARIES.get(ending, ()):
        try:
            import_module(module)
        except ImportError:
            return  # the parser's error names the missing library


def _named(error: GerundError, path: Path) -> str:
    return str(error) if str(error).startswith(str(path)) else f"{path}: {error}"


def _reason(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def _content(path: Path, most_bytes: int) -> bytes:
    with opened(path) as file:
        raw = file.read(most_bytes + 1)
    if len(raw) > most_bytes:
        raise _too_large(most_bytes)
    return raw


def _too_large(most_bytes: int) -> DataError:
    return DataError(
        f"it is larger than {most_bytes // 10**6} MB unpacked; allow the reader more memory (--read-memory)"
    )


def _parse_text(path: Path, most_bytes: int) -> Iterator[ParsedText]:
    text, encoding = decoded(_content(path, most_bytes), str(path))
    yield ParsedText(text, encoding=encoding)


def _parse_markdown(path: Path, most_bytes: int) -> Iterator[ParsedText]:
    text, encoding = decoded(_content(path, most_bytes), str(path))
    yield replace(markdown(text), encoding=encoding)


def _parse_html(path: Path, most_bytes: int) -> Iterator[ParsedText]:
    text, encoding = decoded(_content(path, most_bytes), str(path), markup=True)
    yield replace(html(text), encoding=encoding)


def parse_table(path: Path, ending: str) -> Iterator[ParsedText | DataError]:
    """Yield the rows of a table as documents, and the error of a row that cannot be read."""
    table = Table(path, "jsonl" if ending == "ndjson" else ending, str(path), TEXT_COLUMN)
    for number, where, row in read_records(table, (TEXT_COLUMN, TITLE_COLUMN, *ID_COLUMNS)):
        yield value_or_error(_row, row, where, number)


def _parse_table(path: Path, most_bytes: int, *, ending: str) -> Iterator[ParsedText | DataError]:
    del most_bytes  # rows have their own limit
    return parse_table(path, ending)


def _row(row: Mapping[str, Any], where: str, number: int) -> ParsedText:
    """Return the document in a row: its text, perhaps a title, and its id, or else its line, such as ``L2``."""
    if TEXT_COLUMN not in row:
        raise no_column(where, TEXT_COLUMN, [str(name) for name in row])
    text, title = row[TEXT_COLUMN], row.get(TITLE_COLUMN)
    name = next((column for column in ID_COLUMNS if row.get(column) is not None), None)
    line = f"L{number}"  # no number alone, which could be the id of another row
    key = line if name is None else row[name]
    if isinstance(key, bool) or not isinstance(key, str | int | float):
        raise DataError(f"{where}: the id {name!r} is neither a text nor a number but {type(key).__name__}")
    return ParsedText(
        "" if text is None else checked_text(text, where, TEXT_COLUMN),
        "" if title is None else checked_text(title, where, TITLE_COLUMN),
        key=checked_text(str(key), where, name or "id") or line,
    )


def _parse_pdf(path: Path, most_bytes: int) -> Iterator[ParsedText]:
    try:
        from pypdf import PdfReader
    except ImportError as error:
        raise _needs("pypdf") from error
    # It logs what it repairs; what it cannot repair is an error.
    logging.getLogger("pypdf").setLevel(logging.CRITICAL)
    # In memory, since an archive may hold the file.
    reader = PdfReader(io.BytesIO(_content(path, most_bytes)) if path.suffix.lower() in COMPRESSED else path)
    if reader.is_encrypted and not reader.decrypt(""):
        raise DataError("it is locked by a password")
    # A line end, not a blank line: a sentence may continue on the next page.
    text = "\n".join(page.extract_text() for page in reader.pages)
    title = (reader.metadata or {}).get("/Title")
    # Characters that fonts leave undefined become halves of surrogate pairs, which cannot be stored.
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


# Word has its own elements for formulas, which mammoth skips; their text runs are like all others.
_FORMULA_RUN = re.compile(rb"<(/?)m:(r|t)(?=[\s>/])")
_FORMULA_SIGN = re.compile(rb"<m:(sup|sub|den)>")
_FORMULA_ELEMENT = re.compile(rb"</?m:[^<>]*>")
_SIGNS = {b"sup": b"^", b"sub": b"_", b"den": b"/"}


def _with_formulas_as_text(archive: zipfile.ZipFile, most_bytes: int) -> io.BytesIO:
    """Return a Word document without images, its formulas as text: E=mc^2."""
    changed = io.BytesIO()
    size = 0
    with zipfile.ZipFile(changed, "w") as copy:
        for info in archive.infolist():
            if not info.filename.lower().endswith((".xml", ".rels")):
                continue
            size += info.file_size
            if size > most_bytes:
                raise _too_large(most_bytes)
            content = archive.read(info)
            if b"<m:" in content:
                content = _FORMULA_SIGN.sub(lambda sign: b"<w:r><w:t>" + _SIGNS[sign[1]] + b"</w:t></w:r>", content)
                content = _FORMULA_ELEMENT.sub(b"", _FORMULA_RUN.sub(rb"<\1w:\2", content))
            copy.writestr(info.filename, content)
    changed.seek(0)
    return changed


def _parse_epub(path: Path, most_bytes: int) -> Iterator[ParsedText]:
    parts, sections, title, encoding, length = list[str](), list[Section](), "", "", 0
    with _archive(path, most_bytes) as archive:
        for page in pages(archive, most_bytes):
            content, page_encoding = decoded(page, str(path), markup=True)
            parsed = html(content)
            sections += [Section(length + section.start, section.path) for section in parsed.sections]
            parts.append(parsed.text)
            length += len(parsed.text) + 2
            title, encoding = title or parsed.title, encoding or page_encoding
    yield ParsedText("\n\n".join(parts), title, tuple(sections), encoding=encoding)


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


# Each of these expressions takes linear time for any text: documents may be hostile.
_FENCE = re.compile(r" {0,3}(`{3,}(?=[^`]*$)|~{3,})")
_ATX = re.compile(r" {0,3}(#{1,6})(?=[ \t]|$)")
_SETEXT = re.compile(r" {0,3}(=+|-+)[ \t]*$")
_NO_TITLE_LINE = re.compile(r"[ \t]*$| {4}|\t| {0,3}(?:[-*+>|]|\d{1,9}[.)])")
_FRONT_MATTER = re.compile(r"---[ \t]*\r?\n(?P<fields>.*?\r?\n)(?:---|\.\.\.)[ \t]*(?:\r?\n|$)", re.DOTALL)
_TITLE_FIELD = re.compile(r"^title:(?P<title>.*)$", re.MULTILINE | re.IGNORECASE)
_MARKS = re.compile(r"[*_`]+|!?\[([^\[\]]*)\]\([^()]*\)")

# A heading is stored with every chunk below it, so a longer one is truncated.
_HEADING = 300


def markdown(text: str) -> ParsedText:
    r"""Find the headings of a Markdown text, except in fenced code.

    The title is that of the front matter, else the first heading of level 1.

    >>> parsed = markdown("# Bread\n\nFlour.\n\n## Yeast\n\nIt rises.")
    >>> parsed.title, [section.path for section in parsed.sections]
    ('Bread', [('Bread',), ('Bread', 'Yeast')])
    """
    front = _FRONT_MATTER.match(text)
    field = _TITLE_FIELD.search(front["fields"]) if front else None
    headings = list(_headings(text, front.end() if front else 0))
    title = field["title"].strip().strip("\"'") if field else ""
    title = title or next((name for _, level, name in headings if level == 1), "")
    return ParsedText(text, title, sections_of(headings))


def sections_of(headings: list[tuple[int, int, str]]) -> tuple[Section, ...]:
    """Return sections with their paths, from (start, level, heading) in the order of the text.

    >>> [section.path for section in sections_of([(0, 2, "A"), (5, 3, "B"), (9, 2, "C")])]
    [('A',), ('A', 'B'), ('C',)]
    """
    path: list[tuple[int, str]] = []
    sections = []
    for start, level, name in headings:
        path = [*(heading for heading in path if heading[0] < level), (level, name)]
        sections.append(Section(start, tuple(heading for _, heading in path)))
    return tuple(sections)


def _headings(text: str, begin: int) -> Iterator[tuple[int, int, str]]:
    position, fence, in_paragraph = begin, "", False
    candidate: tuple[int, str] | None = None  # a line that an underline would make a heading
    for line in text[begin:].splitlines(keepends=True):
        bare = line.rstrip("\r\n")
        opening = _FENCE.match(bare)
        previous, candidate = candidate, None
        was_in_paragraph, in_paragraph = in_paragraph, False
        if fence:
            closes = opening is not None and opening[1].startswith(fence) and not bare.strip(" `~")
            fence = "" if closes else fence
        elif opening:
            fence = opening[1]
        elif (atx := _ATX.match(bare)) and (name := _without_closing_marks(bare[atx.end() :])):
            yield position, len(atx[1]), _plain(name)
        elif previous and (underline := _SETEXT.match(bare)):
            yield previous[0], 1 if underline[1][0] == "=" else 2, _plain(previous[1])
        elif not _NO_TITLE_LINE.match(bare):
            # Only a paragraph of one line becomes a heading: a rule below a longer paragraph is a rule.
            in_paragraph, candidate = True, None if was_in_paragraph else (position, bare)
        position += len(line)


def _without_closing_marks(heading: str) -> str:
    """Return a heading without the number signs that may close it.

    >>> _without_closing_marks(" Deep ### "), _without_closing_marks(" C#"), _without_closing_marks(" ##")
    ('Deep', 'C#', '')
    """
    text = heading.rstrip()
    without = text.rstrip("#")
    return (without if without != text and without[-1:].isspace() else text).strip()


def _plain(heading: str) -> str:
    plain = " ".join(_MARKS.sub(lambda mark: mark[1] or "", heading).split())
    return plain if len(plain) <= _HEADING else f"{plain[:_HEADING]}..."


# Inline markup. Without it a quotation looks as on the page, and link addresses are not part of the text.
_INLINE_TAGS = ["a", "b", "strong", "i", "em", "u", "s", "del", "ins", "mark", "small", "abbr"]
_MENUS = ["nav", "[role=navigation]"]
_MENU_LINE = re.compile(r"\s*(?:[-*+]|\d{1,9}[.)]|#{1,6})(?=\s)")
_MENU_WORDS = 10
# A cell that spans columns becomes as many cells, so a small page can make an endless table.
_MOST_GROWTH, _SMALL = 10, 10**5


def html(text: str) -> ParsedText:
    r"""Return an HTML page as Markdown with its headings; emphasis and the addresses of links are left out.

    A ``nav`` element is removed where it contains only a list of a few words per item; all other text is kept.

    >>> page = "<title>T</title><nav><ul><li>Menu</ul></nav><h1>Bread</h1><p>Flour &amp; <b>water</b>.</p><p>Salt.</p>"
    >>> parsed = html(page)
    >>> parsed.text, parsed.title, [section.path for section in parsed.sections]
    ('# Bread\n\nFlour & water.\n\nSalt.', 'T', [('Bread',)])
    """
    content = _converted(text, ())
    if "nav" in text.lower():
        without = _converted(text, tuple(_MENUS))
        removed = Counter(content.split("\n")) - Counter(without.split("\n"))
        if without and all(not line.strip() or _is_menu_line(line) for line in removed):
            content = without
    parsed = markdown(content)
    return replace(parsed, title=_title(text) or parsed.title)


def _is_menu_line(line: str) -> bool:
    return _MENU_LINE.match(line) is not None and len(line.split(maxsplit=_MENU_WORDS + 2)) <= _MENU_WORDS + 1


def _title(text: str) -> str:
    # With metadata the converter begins the text with front matter, so the title needs its own call.
    document = _library().convert(text, _options((), True)).metadata.document
    return " ".join((document.title or "").split()) if document else ""


def _converted(text: str, excluded: tuple[str, ...]) -> str:
    result = _library().convert(text, _options(excluded, False))
    if any(str(warning.kind).endswith("depth_limit_exceeded") for warning in result.warnings):
        raise DataError("its elements are nested too deeply")
    content = result.content or ""
    if len(content) > _MOST_GROWTH * len(text) + _SMALL:
        raise DataError(f"its tables would grow to {len(content):,} characters")
    # Spaces at a line's end are Markdown for a line break, which is there without them.
    return "\n".join(line.rstrip() for line in content.split("\n")).strip("\n")


@cache
def _options(excluded: tuple[str, ...], metadata: bool) -> Any:
    library = _library()
    return library.ConversionOptions(
        # Its preprocessing loses text in forms, and headings in a header.
        preprocessing=library.PreprocessingOptions(enabled=False),
        hidden_content="all",
        exclude_selectors=list(excluded),
        extract_metadata=metadata,
        strip_tags=list(_INLINE_TAGS),
        compact_tables=True,
        autolinks=False,
        expand_abbreviations=False,
        include_blockquote_citations=False,
        inline_data_media="alt_text_only",
    )


def _library() -> Any:
    try:
        import html_to_markdown
    except ImportError as error:
        raise _needs("html-to-markdown") from error
    return html_to_markdown


_CONTAINER = "META-INF/container.xml"
_PAGES = ("application/xhtml+xml", "text/html")


def pages(book: zipfile.ZipFile, most: int) -> Iterator[bytes]:
    """Yield the pages of an EPUB, an archive whose package file lists them, in reading order.

    All of them together may unpack to ``most`` bytes.
    """
    container = _Elements.of(_unpacked(book, _CONTAINER, most))
    package = next((attributes.get("full-path") or "" for tag, attributes in container if tag == "rootfile"), "")
    if not package:
        raise DataError("not a readable EPUB (its container names no package file)")
    elements = _Elements.of(_unpacked(book, package, most))
    items = {attributes.get("id"): attributes for tag, attributes in elements if tag == "item"}
    references = [attributes for tag, attributes in elements if tag == "itemref" and attributes.get("linear") != "no"]
    # A hostile book may reference one page a thousand times; it is read once.
    names = set[str]()
    for reference in references:
        item = items.get(reference.get("idref"), {})
        if item.get("media-type") in _PAGES and item.get("href"):
            name = posixpath.normpath(posixpath.join(posixpath.dirname(package), _unquoted(item["href"] or "")))
            if name not in names:
                names.add(name)
                page = _unpacked(book, name, most)
                most -= len(page)
                yield page


def _unquoted(href: str) -> str:
    """Return the name of a file in the archive.

    >>> _unquoted("my%20page%C3%A9.xhtml")
    'my pageé.xhtml'
    """
    raw = re.sub(rb"%([0-9A-Fa-f]{2})", lambda code: bytes([int(code[1], 16)]), href.encode())
    return raw.decode("utf-8", errors="replace")


def _unpacked(book: zipfile.ZipFile, name: str, most: int) -> bytes:
    with book.open(name) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise DataError(f"its pages are too large ({name}); allow the reader more memory (--read-memory)")
    return content


class _Elements(HTMLParser):
    """The elements of a small XML file with their attributes; an HTML parser does not expand hostile entities."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []

    @classmethod
    def of(cls, content: bytes) -> list[tuple[str, dict[str, str | None]]]:
        parser = cls()
        parser.feed(content.decode("utf-8", errors="replace"))
        parser.close()
        return parser.elements

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Add an element, without the prefix of its namespace."""
        self.elements.append((tag.rpartition(":")[2], dict(attrs)))


# UTF-32 first: its mark begins with that of UTF-16.
_BYTE_ORDER_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
# Browsers look this far for a declaration.
_HEAD = 1024
_XML = re.compile(rb"""\s*<\?xml\b[^>]{0,200}?\bencoding\s{0,20}=\s{0,20}["']([\w.:-]{1,40})["']""", re.IGNORECASE)
_META = re.compile(rb"""<meta\b[^>]{0,400}?\bcharset\s{0,20}=\s{0,20}["']?\s{0,20}([\w.:-]{1,40})""", re.IGNORECASE)
_COMMENT = re.compile(rb"<!--.*?(?:-->|\Z)", re.DOTALL)
# As in browsers (WHATWG Encoding): a declared name stands for this larger set, which editors write.
_MEANT = {
    "iso8859-1": "windows-1252",
    "ascii": "windows-1252",
    "cp1252": "windows-1252",
    "iso8859-9": "cp1254",
    "iso8859-11": "cp874",
    "tis-620": "cp874",
    "gb2312": "gb18030",
    "gbk": "gb18030",
    "shift_jis": "cp932",
    "euc_kr": "cp949",
    "big5": "big5hkscs",
}
# Names that Python does not know, and affixes of names that it knows: x-sjis, iso-8859-8-i.
_LABELS = {
    "windows-31j": "cp932", "windows-949": "cp949", "windows-874": "cp874", "ksc_5601": "cp949",
    "cn-big5": "big5hkscs", "gb_2312-80": "gb18030",
}  # fmt: skip
_ADDED = re.compile(r"^(?:x-)+|-[ie]$")
# Encodings of text files in practice. Detection among all of Python's would mistake common ones for rare ones.
_WESTERN = "cp1252"
_ONE_BYTE_UNITS = (
    _WESTERN, "cp1250", "cp1251", "cp1253", "cp1254", "cp1255", "cp1256", "cp1257", "cp1258", "cp874", "koi8_r",
    "koi8_u", "iso8859_2", "mac_roman", "gb18030", "big5", "cp932", "euc_jp", "iso2022_jp", "cp949",
)  # fmt: skip
_WIDE_UNITS = ("utf_16_le", "utf_16_be", "utf_32_le", "utf_32_be")


def utf8_or_none(raw: bytes) -> str | None:
    """Return bytes as text if they are valid UTF-8 without the zero bytes that UTF-16 is full of."""
    if b"\0" in raw:
        return None
    try:
        return raw.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError:
        return None


def decoded(raw: bytes, where: str, *, markup: bool = False) -> tuple[str, str]:
    r"""Return bytes as text, and their encoding; "" for UTF-8. ``markup`` (HTML, XML) can declare its encoding.

    A byte order mark counts first, then the declaration, then UTF-8; otherwise the encoding is detected.

    >>> decoded("caf\u00e9".encode("utf-16"), "a.txt")
    ('café', 'utf-16-le (byte order mark)')
    >>> decoded(b'<meta charset="iso-8859-1">caf\xe9', "a.html", markup=True)[1]
    'windows-1252 (declared)'
    """
    for mark, name in _BYTE_ORDER_MARKS:
        if raw.startswith(mark):
            return _marked(raw[len(mark) :], name, where)
    name = _declared(raw[:_HEAD]) if markup else ""
    if name and name != "utf-8":
        text = _strictly(raw, name)
        if text is not None:
            return text, f"{name} (declared)"
    plain = utf8_or_none(raw)
    if plain is not None:
        return plain, ""
    return _detected(raw, where)


def _marked(raw: bytes, name: str, where: str) -> tuple[str, str]:
    """Return bytes after a byte order mark as text, which may be slightly damaged, or cut in a character."""
    try:
        return raw.decode(name), "" if name == "utf-8" else f"{name} (byte order mark)"
    except UnicodeDecodeError as error:
        text = raw.decode(name, "replace")
        if text.count("\ufffd") * 2 > len(text):
            raise DataError(
                f"{where}: it begins with the mark of {name}, and is not valid {name}; save it as UTF-8"
            ) from error
        return text, f"{name} with errors (detected)"


def _declared(head: bytes) -> str:
    """Return the encoding of an XML declaration or a meta element; "" for none, or an unknown one."""
    match = _XML.match(head) or _META.search(_COMMENT.sub(b"", head))
    if match is None:
        return ""
    label = _ADDED.sub("", match[1].decode("ascii", "replace").lower())
    try:
        name = codecs.lookup(_LABELS.get(label, label)).name
    except LookupError:
        return ""
    # A declaration that is readable byte by byte is not in UTF-16.
    return "utf-8" if name.startswith(("utf-16", "utf-32")) else _MEANT.get(name, name)


def _strictly(raw: bytes, name: str) -> str | None:
    try:
        text = raw.decode(name)
    except (UnicodeError, LookupError):
        if name != "windows-1252":
            return None
        # Five bytes are undefined there, and browsers pass them through.
        text = "".join(_western(piece) for piece in re.split(rb"([\x81\x8d\x8f\x90\x9d]+)", raw))
    return text if isinstance(text, str) else None  # rot13 is a codec too


def _western(piece: bytes) -> str:
    try:
        return piece.decode("windows-1252")
    except UnicodeDecodeError:
        return piece.decode("latin-1")


def _detected(raw: bytes, where: str) -> tuple[str, str]:
    if b"\0" not in raw:
        # A damaged UTF-8 file has more valid characters than errors; in other encodings they are valid by chance.
        text = raw.decode("utf-8", "replace")
        damaged = text.count("\ufffd")
        if sum(1 for character in text if character > "\x7f") > 2 * damaged:
            return text, "utf-8 with errors (detected)"
    try:
        from charset_normalizer import from_bytes
    except ImportError as error:
        raise MissingDependencyError(
            f"{where}: not valid UTF-8, and needs charset-normalizer to detect what it is: "
            "pip install 'gerund[documents]'"
        ) from error
    wide = b"\0" in raw
    matches = list(from_bytes(raw, cp_isolation=list(_WIDE_UNITS if wide else _ONE_BYTE_UNITS)))
    if not matches:
        try:
            return raw.decode("utf-8"), ""  # UTF-8 with some zero bytes
        except UnicodeDecodeError as error:
            raise DataError(
                f"{where}: not valid UTF-8 at byte {error.start}, and its encoding cannot be detected; save it as UTF-8"
            ) from error
    best = matches[0]
    name = best.encoding
    # For short texts many encodings fit equally well; then the most common one is most likely.
    if any(_WESTERN in match.could_be_from_charset for match in matches if match.chaos <= best.chaos):
        name = _WESTERN
    name = {"cp1252": "windows-1252"}.get(name, name.replace("_", "-"))
    strict = _strictly(raw, name)
    return str(best) if strict is None else strict, f"{name} (detected)"
