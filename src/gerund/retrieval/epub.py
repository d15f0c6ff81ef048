"""The pages of an electronic book (EPUB) in their order: an archive whose package file lists them.

Knows: archives, the package file. Does not know: what is on a page.
"""

import posixpath
import re
import zipfile
from collections.abc import Iterator
from html.parser import HTMLParser

from gerund.errors import DataError

_CONTAINER = "META-INF/container.xml"
_PAGES = ("application/xhtml+xml", "text/html")


def pages(book: zipfile.ZipFile, most: int) -> Iterator[bytes]:
    """Yield the pages that a reader turns, in their order.

    Args:
        book: the book.
        most: bytes that all of them together may unpack to.

    Raises:
        KeyError: a page that the package file names is not there.
        DataError: the book names no package file, or its pages are larger.
        zipfile.BadZipFile: it is no archive.
    """
    container = _Elements.of(_unpacked(book, _CONTAINER, most))
    package = next((own.get("full-path") or "" for tag, own in container if tag == "rootfile"), "")
    if not package:
        raise DataError("not a readable EPUB (its container names no package file)")
    elements = _Elements.of(_unpacked(book, package, most))
    files = {own.get("id"): own for tag, own in elements if tag == "item"}
    # A hostile book may name one page a thousand times; a reader turns it once.
    turned = set[str]()
    for place in [own.get("idref") for tag, own in elements if tag == "itemref" and own.get("linear") != "no"]:
        own = files.get(place, {})
        if own.get("media-type") in _PAGES and own.get("href"):
            name = posixpath.normpath(posixpath.join(posixpath.dirname(package), _unquoted(own["href"] or "")))
            if name not in turned:
                turned.add(name)
                page = _unpacked(book, name, most)
                most -= len(page)
                yield page


def _unquoted(href: str) -> str:
    """Return the name of a file as its archive has it.

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
    """The elements of a small XML file with their attributes; a parser of HTML knows no entities that explode."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    @classmethod
    def of(cls, content: bytes) -> list[tuple[str, dict[str, str | None]]]:
        parser = cls()
        parser.feed(content.decode("utf-8", errors="replace"))
        parser.close()
        return parser.found

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep an element, without the prefix of its namespace."""
        self.found.append((tag.rpartition(":")[2], dict(attrs)))
