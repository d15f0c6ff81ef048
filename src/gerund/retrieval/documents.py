"""Documents, the chunks that they are split into, and settings for chunking."""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from gerund.checks import check_unicode, flag, one_of, whole_number
from gerund.data.files import as_utf8
from gerund.errors import ConfigError, DataError, TextError
from gerund.retrieval.formats import Section

PATH_SIGN = " > "
"""Separates the headings above a chunk."""

BINARY = "binary"
# Not int8, which LanceDB stores but does not compare with a query.
PRECISIONS = ("float32", "float16", BINARY)


@dataclass(frozen=True)
class Document:
    """A text with its source.

    Attributes:
        source: its unique name in an index: a file, or ``FILE#ID`` for a row of a table.
        text: the text; offsets are counted in its characters.
        title: its title; empty where there is none.
        sections: where its sections begin, in order; none for a text without headings.
        file: the file that it came from; empty where it came from none.

    >>> Document("a.txt", "One.").digest == Document("a.txt", "One.", "A title").digest
    False
    """

    source: str
    text: str
    title: str = ""
    sections: tuple[Section, ...] = ()
    file: str = ""

    @property
    def digest(self) -> str:
        """Hash of everything that its chunks depend on: 32 hexadecimal digits."""
        parts = [self.title, *(f"{section.start} {PATH_SIGN.join(section.path)}" for section in self.sections)]
        content = hashlib.blake2b("\0".join(parts).encode() + b"\0\0", digest_size=16)
        content.update(self.text.encode())
        return content.hexdigest()


def is_source(name: object) -> bool:
    r"""Whether a document can have this name: a text without NUL characters and lone surrogates.

    >>> is_source("a.txt#7"), is_source("a\0b"), is_source(7)
    (True, False, False)
    """
    return isinstance(name, str) and "\0" not in name and as_utf8(name) == name


def check_document(document: object) -> None:
    """Refuse what is not a document that can be stored.

    Raises:
        ConfigError: it is not a ``Document``.
        TextError: its source, text, title or a heading is not a text that can be stored.
    """
    if not isinstance(document, Document):
        raise ConfigError(f"`documents` must be Documents, such as Document('name', 'text'), got {document!r}")
    if not is_source(document.source):
        raise TextError(f"a document's source is a text without NUL characters, not {document.source!r}")
    headings = [heading for section in document.sections for heading in section.path]
    for text in (document.text, document.title, *headings):
        if not isinstance(text, str):
            raise TextError(f"the document {document.source!r} has {text!r} where a text belongs")
        check_unicode(f"the document {document.source!r}", text)


@dataclass(frozen=True)
class Chunk:
    """A part of a document: its characters ``start`` to ``end``, the ``number``-th chunk.

    ``heading`` has the headings above it, outermost first; ``file`` and ``digest`` are the document's.
    """

    source: str
    start: int
    end: int
    text: str
    number: int
    tokens: int
    title: str
    heading: str
    file: str
    digest: str

    @property
    def id(self) -> str:
        """A unique hash of source and start."""
        return chunk_id(self.source, self.start)

    @property
    def context(self) -> str:
        """Title and headings above it, one per line; empty where there are none."""
        headings = self.heading.split(PATH_SIGN) if self.heading else []
        return "\n".join(dict.fromkeys(line for line in (self.title, *headings) if line))

    @property
    def indexed_text(self) -> str:
        """The text for keyword search: context and text."""
        return f"{self.context}\n{self.text}" if self.context else self.text


def chunk_id(source: str, start: int) -> str:
    """Return the unique hash of the chunk of a document that starts at a character."""
    return hashlib.blake2b(f"{source}\0{start}".encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class Chunking:
    """How documents are split and embedded; fixed for an index when it is created.

    >>> Chunking.from_dict(Chunking(tokens=32).to_dict())
    Chunking(tokens=32, late=False, context=False, language='en', precision='float32', multi=0)
    """

    tokens: int = 128
    """Maximum tokens of a chunk, without special tokens."""

    late: bool = False
    """Late chunking: the document is encoded in one pass, and each chunk's vector is pooled from the states of its
    tokens, which have seen the text around them. Otherwise each chunk is encoded on its own."""

    context: bool = False
    """Whether title and headings are put before a chunk when it is embedded. Keyword search always includes them."""

    language: str = "en"
    """The documents' language, for sentence splitting and stemming."""

    precision: str = "float32"
    """How vectors are stored: ``float32``; ``float16``, half the bytes; or ``binary``, one bit per dimension, where
    four times as many candidates are found and rescored with the query's float values."""

    multi: int = 0
    """Whether a vector is stored for each token of a chunk too, in 8 bits, for late interaction (``maxsim``): 1 for
    each, a larger number for so many neighbors together; 0 stores none."""

    def __post_init__(self) -> None:
        one_of("precision of an index", self.precision, PRECISIONS)
        if whole_number("tokens", self.tokens) < 1:
            raise ConfigError(f"`tokens` must be at least 1, got {self.tokens}")
        if whole_number("multi", self.multi) < 0:
            raise ConfigError(f"`multi` must be 0 or more, got {self.multi}")
        for name in ("late", "context"):
            object.__setattr__(self, name, flag(name, getattr(self, name)))
        if not isinstance(self.language, str) or not re.fullmatch("[a-z]{2,3}", self.language):
            raise ConfigError(f"language={self.language!r} is not a language code such as en, zh or de")

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        # Without later settings at their default, so that descriptions and table names are those from before.
        return {name: value for name, value in asdict(self).items() if _LATER.get(name) != value}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return what ``to_dict`` described.

        Raises:
            DataError: it describes something else.
        """
        if not isinstance(values, Mapping) or {*values, *_LATER} != {field.name for field in fields(cls)}:
            raise DataError(f"this is not a description of chunking: {values!r}")
        return cls(**values)

    def __str__(self) -> str:
        """Describe it in a few words."""
        parts = [f"{self.tokens} tokens", "late" if self.late else "early"]
        parts += [*(["with headings"] if self.context else []), self.language]
        parts += [] if self.precision == PRECISIONS[0] else [self.precision]
        return ", ".join([*parts, *(["with token vectors"] if self.multi else [])])


_LATER: dict[str, Any] = {"precision": PRECISIONS[0], "multi": 0}


def rebuilt(chunks: list[Chunk]) -> Document:
    r"""Return a document from all of its chunks; the white space between them becomes line ends.

    Of two sections under the same headings, the second begins where a chunk's first line is its heading.

    >>> parts = [(0, "One."), (6, "Two.")]
    >>> chunks = [Chunk("a", at, at + 4, text, place, 1, "", "", "", "") for place, (at, text) in enumerate(parts)]
    >>> rebuilt(chunks).text
    'One.\n\nTwo.'
    """
    text, sections = "", list[Section]()
    for chunk in sorted(chunks, key=lambda chunk: chunk.start):
        text += "\n" * (chunk.start - len(text))
        path = tuple(chunk.heading.split(PATH_SIGN)) if chunk.heading else ()
        heading = chunk.text.split("\n", 1)[0].strip("# ")
        if path != (sections[-1].path if sections else ()) or (path and heading == path[-1]):
            sections.append(Section(chunk.start, path))
        text += chunk.text
    first = chunks[0]
    return Document(first.source, text, first.title, tuple(sections), first.file)
