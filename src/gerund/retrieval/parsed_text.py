"""A document as a reader returns it: its text, its title, and where its sections begin.

Knows: nothing but these values, so that the reader process starts quickly.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Section:
    """Where a section of a document begins.

    Attributes:
        start: its first character, that of its heading.
        path: the headings above what follows, outermost first, its own the last.
    """

    start: int
    path: tuple[str, ...]


@dataclass(frozen=True)
class ParsedText:
    """What is in a file.

    Attributes:
        text: the text.
        title: its title; empty where nothing says so.
        sections: where its sections begin.
        key: which of several documents of one file it is; empty where the file is one document.
        encoding: what the text was decoded from, where that is not UTF-8: ``windows-1252 (declared)`` or
            ``utf-16-le (detected)``.
    """

    text: str
    title: str = ""
    sections: tuple[Section, ...] = ()
    key: str = ""
    encoding: str = ""
