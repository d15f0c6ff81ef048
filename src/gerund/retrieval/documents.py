"""Documents, and how they are split into chunks: full sentences up to a token budget, never across a heading."""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from gerund.checks import check_unicode, flag, one_of, whole_number
from gerund.data.files import as_utf8
from gerund.data.passages import sentence_bounds
from gerund.errors import ConfigError, DataError, TextError
from gerund.inference.text_ids import encode_texts
from gerund.retrieval.formats import Section

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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


# Sentences per call of the tokenizer.
_BATCH = 1024


class _Span(NamedTuple):
    start: int
    end: int
    tokens: int


def cut(document: Document, tokenizer: "PreTrainedTokenizerBase", chunking: Chunking) -> list[Chunk]:
    """Split a document into chunks.

    Each has as many full sentences of one section as fit the budget. A longer sentence is split between words, and a
    longer word between tokens. Every character except white space is in exactly one chunk. White space after a sentence
    counts as part of it.

    Raises:
        ModelError: a sentence is too long, and the tokenizer, which is not a fast one, cannot tell where to split it.
    """
    text, digest = document.text, document.digest
    sections = [(section.start, PATH_SIGN.join(section.path)) for section in document.sections]
    chunks: list[Chunk] = []
    for (begin, heading), (end, _) in pairwise([(0, ""), *sections, (len(text), "")]):
        for span in _spans(text[begin:end], tokenizer, chunking):
            start, stop = begin + span.start, begin + span.end
            chunks.append(
                Chunk(
                    source=document.source,
                    start=start,
                    end=stop,
                    text=text[start:stop],
                    number=len(chunks),
                    tokens=span.tokens,
                    title=document.title,
                    heading=heading,
                    file=document.file,
                    digest=digest,
                )
            )
    return chunks


def _spans(text: str, tokenizer: "PreTrainedTokenizerBase", chunking: Chunking) -> Iterator[_Span]:
    chunk: _Span | None = None
    for sentence in _sentences(text, tokenizer, chunking):
        if chunk is not None and chunk.tokens + sentence.tokens <= chunking.tokens:
            chunk = _Span(chunk.start, sentence.end, chunk.tokens + sentence.tokens)
            continue
        if chunk is not None:
            yield chunk
        chunk = sentence
    if chunk is not None:
        yield chunk


def _sentences(text: str, tokenizer: "PreTrainedTokenizerBase", chunking: Chunking) -> Iterator[_Span]:
    """Yield the sentences, those that are too long in pieces."""
    bounds = sentence_bounds(text, chunking.language)
    # Up to where the next sentence begins, so that the tokens of line ends count too.
    ends = [start for start, _ in bounds[1:]] + [bounds[-1][1] if bounds else 0]
    for first in range(0, len(bounds), _BATCH):
        rows = range(first, min(first + _BATCH, len(bounds)))
        encoded = encode_texts(tokenizer, [text[bounds[row][0] : ends[row]] for row in rows], specials=False)
        for row, sentence in zip(rows, encoded, strict=True):
            start, end = bounds[row]
            if len(sentence.ids) <= chunking.tokens:
                yield _Span(start, end, len(sentence.ids))
            else:
                yield from _pieces(text, start, end, tokenizer, chunking.tokens)


def _pieces(text: str, start: int, end: int, tokenizer: "PreTrainedTokenizerBase", limit: int) -> Iterator[_Span]:
    """Split a sentence into pieces of at most ``limit`` tokens, between words where there are any."""
    [encoded] = encode_texts(tokenizer, [text[start:end]], specials=False, offsets=True)
    begins = [start + offset for offset, _ in encoded.offsets]
    first = 0
    while first < len(begins):
        stop = _stop(text, begins, first, limit)
        begin = begins[first] if first else start
        piece = text[begin : begins[stop] if stop < len(begins) else end]
        if piece.strip():
            leading = len(piece) - len(piece.lstrip())
            yield _Span(begin + leading, begin + len(piece.rstrip()), stop - first)
        first = stop


def _stop(text: str, begins: Sequence[int], first: int, limit: int) -> int:
    """Return the token before which a piece ends that begins with token ``first``."""
    last = first + limit
    if last >= len(begins):
        return len(begins)
    for stop in range(last, first, -1):
        at = begins[stop]
        # A token's first character may be the space before its word.
        if at > begins[first] and (text[at].isspace() or text[at - 1].isspace()):
            return stop
    # No word ends here: between two characters, since several tokens may be of one character.
    stop = last
    while stop < len(begins) and begins[stop] == begins[stop - 1]:
        stop += 1
    return stop
