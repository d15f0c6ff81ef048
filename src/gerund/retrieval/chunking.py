"""Split documents into chunks: full sentences up to a token budget, never across a heading."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from gerund.data.passages import sentence_bounds
from gerund.inference.text_ids import encode_texts
from gerund.retrieval.documents import PATH_SIGN, Chunk, Chunking, Document

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
    """Yield the chunks of a section."""
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
