"""What is indexed: documents, their sections, the chunks that they are cut into, and how they are cut.

Knows: names, offsets, hashes. Does not know: files, models, stores.
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from gerund.checks import flag, one_of, whole_number
from gerund.errors import ConfigError, DataError
from gerund.retrieval.formats import Section

PATH_SIGN = " > "
BINARY = "binary"
# Not int8, which LanceDB stores and does not compare with a query.
PRECISIONS = ("float32", "float16", BINARY)
"""Stands between the headings above a chunk."""


@dataclass(frozen=True)
class Document:
    """A text with what says where it is from.

    Attributes:
        source: what it is called: a file, or ``FILE#ID`` for a row of a table. No two of an index are called the same.
        text: the text; offsets are counted in its characters.
        title: its title; empty where there is none.
        sections: where its sections begin, in their order; none for a text without headings.
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
        parts = [self.title, *(f"{one.start} {PATH_SIGN.join(one.path)}" for one in self.sections)]
        whole = hashlib.blake2b("\0".join(parts).encode() + b"\0\0", digest_size=16)
        whole.update(self.text.encode())
        return whole.hexdigest()


@dataclass(frozen=True)
class Chunk:
    """A stretch of a document, as it is stored.

    Attributes:
        source: the document's name.
        start: its first character in the document's text.
        end: the character behind its last.
        text: these characters.
        number: which of the document's chunks it is, counted from 0.
        tokens: how many tokens it has.
        title: the document's title.
        heading: the headings above it, outermost first.
        file: the file that the document came from.
        digest: the document's.
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
        """What tells it from all others: a hash of source and start."""
        return hashlib.blake2b(f"{self.source}\0{self.start}".encode(), digest_size=16).hexdigest()

    @property
    def context(self) -> str:
        """What stands above it: title and headings, a line each; empty where there is nothing."""
        above = self.heading.split(PATH_SIGN) if self.heading else []
        return "\n".join(dict.fromkeys(one for one in (self.title, *above) if one))

    @property
    def indexed_text(self) -> str:
        """What words are searched in: what stands above it, and its text."""
        return f"{self.context}\n{self.text}" if self.context else self.text


@dataclass(frozen=True)
class Chunking:
    """How documents are cut and embedded; an index has one way, and keeps it.

    >>> Chunking.from_dict(Chunking(tokens=32).to_dict())
    Chunking(tokens=32, late=False, context=False, language='en', precision='float32')
    """

    tokens: int = 128
    """Tokens of a chunk at most, special ones not counted."""

    late: bool = False
    """Late chunking: the document is read in one pass, and each chunk's vector is pooled from the states of its own
    tokens, which have seen what stands around them. Otherwise each chunk is read by itself."""

    context: bool = False
    """Whether the title and the headings above a chunk are read in front of it when it is embedded. Words are searched
    in them in any case."""

    language: str = "en"
    """What the documents are written in: how sentences end, and which words are stems of each other."""

    precision: str = "float32"
    """How the numbers of vectors are stored: ``float32``; ``float16``, half the bytes; or ``binary``, a bit each, by
    which four times as many chunks are found as are wanted, then put into order by the query's own numbers."""

    def __post_init__(self) -> None:
        one_of("precision of an index", self.precision, PRECISIONS)
        if whole_number("tokens", self.tokens) < 1:
            raise ConfigError(f"chunks of {self.tokens} tokens hold nothing")
        for name in ("late", "context"):
            object.__setattr__(self, name, flag(name, getattr(self, name)))
        if not isinstance(self.language, str) or not re.fullmatch("[a-z]{2,3}", self.language):
            raise ConfigError(f"language={self.language!r} is no language code such as en, zh or de")

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        # Indices of whole numbers are described, and their tables called, as they were before there were others.
        return {name: value for name, value in asdict(self).items() if (name, value) != ("precision", PRECISIONS[0])}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return what ``to_dict`` described.

        Raises:
            DataError: it describes something else.
        """
        if not isinstance(values, Mapping) or {*values, "precision"} != {one.name for one in fields(cls)}:
            raise DataError(f"this is no description of chunks: {values!r}")
        return cls(**values)

    def __str__(self) -> str:
        """Describe it in a few words."""
        parts = [f"{self.tokens} tokens", "late" if self.late else "early"]
        parts += [*(["with headings"] if self.context else []), self.language]
        return ", ".join([*parts, *([] if self.precision == PRECISIONS[0] else [self.precision])])


def rebuilt(chunks: list[Chunk]) -> Document:
    r"""Return a document out of all of its chunks; what stood between them, which is white space, becomes line ends.

    >>> parts = [(0, "One."), (6, "Two.")]
    >>> chunks = [Chunk("a", at, at + 4, text, place, 1, "", "", "", "") for place, (at, text) in enumerate(parts)]
    >>> rebuilt(chunks).text
    'One.\n\nTwo.'
    """
    text, sections = "", list[Section]()
    for chunk in sorted(chunks, key=lambda one: one.start):
        text += "\n" * (chunk.start - len(text))
        path = tuple(chunk.heading.split(PATH_SIGN)) if chunk.heading else ()
        if path != (sections[-1].path if sections else ()):
            sections.append(Section(chunk.start, path))
        text += chunk.text
    first = chunks[0]
    return Document(first.source, text, first.title, tuple(sections), first.file)
