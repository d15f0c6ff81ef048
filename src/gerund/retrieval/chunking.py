"""Documents into chunks: whole sentences up to a budget of tokens, never across a heading.

Knows: sentences, sections, how many tokens a tokenizer makes of them. Does not know: models, stores.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from transformers import PreTrainedTokenizerBase

from gerund.data.passages import sentence_bounds
from gerund.inference.text_ids import encode_texts
from gerund.retrieval.documents import PATH_SIGN, Chunk, Chunking, Document

# Sentences that are tokenized at once.
_AT_ONCE = 1024


@dataclass(frozen=True)
class _Span:
    start: int
    end: int
    tokens: int


def cut(document: Document, tokenizer: PreTrainedTokenizerBase, chunking: Chunking) -> list[Chunk]:
    """Cut a document into chunks.

    Each is as many whole sentences of one section as fit the budget; a longer sentence is cut between words, and a
    longer word between tokens. Every character but white space is in exactly one chunk. What white space stands behind
    a sentence is counted with it.

    Raises:
        ModelError: a sentence is too long, and the tokenizer, which is not a fast one, cannot say where to cut it.
    """
    text, digest = document.text, document.digest
    borders = [(0, ""), *((one.start, PATH_SIGN.join(one.path)) for one in document.sections), (len(text), "")]
    chunks: list[Chunk] = []
    for (begin, heading), (end, _) in pairwise(borders):
        for own in _spans(text[begin:end], tokenizer, chunking):
            start, stop = begin + own.start, begin + own.end
            chunks.append(
                Chunk(
                    source=document.source,
                    start=start,
                    end=stop,
                    text=text[start:stop],
                    number=len(chunks),
                    tokens=own.tokens,
                    title=document.title,
                    heading=heading,
                    file=document.file,
                    digest=digest,
                )
            )
    return chunks


def _spans(text: str, tokenizer: PreTrainedTokenizerBase, chunking: Chunking) -> Iterator[_Span]:
    """Yield the chunks of a section."""
    open_: _Span | None = None
    for one in _sentences(text, tokenizer, chunking):
        if open_ is not None and open_.tokens + one.tokens <= chunking.tokens:
            open_ = _Span(open_.start, one.end, open_.tokens + one.tokens)
            continue
        if open_ is not None:
            yield open_
        open_ = one
    if open_ is not None:
        yield open_


def _sentences(text: str, tokenizer: PreTrainedTokenizerBase, chunking: Chunking) -> Iterator[_Span]:
    """Yield the sentences, those that are too long in pieces."""
    bounds = sentence_bounds(text, chunking.language)
    # Up to where the next one begins, so that the tokens of line ends count too.
    behind = [start for start, _ in bounds[1:]] + [bounds[-1][1] if bounds else 0]
    for first in range(0, len(bounds), _AT_ONCE):
        rows = range(first, min(first + _AT_ONCE, len(bounds)))
        found = encode_texts(tokenizer, [text[bounds[row][0] : behind[row]] for row in rows], specials=False)
        for row, own in zip(rows, found, strict=True):
            start, end = bounds[row]
            if len(own.ids) <= chunking.tokens:
                yield _Span(start, end, len(own.ids))
            else:
                yield from _pieces(text, start, end, tokenizer, chunking.tokens)


def _pieces(text: str, start: int, end: int, tokenizer: PreTrainedTokenizerBase, most: int) -> Iterator[_Span]:
    """Cut a sentence into pieces of at most so many tokens, between words where there are any."""
    [found] = encode_texts(tokenizer, [text[start:end]], specials=False, offsets=True)
    begins = [start + own for own, _ in found.offsets]
    first = 0
    while first < len(begins):
        stop = _stop(text, begins, first, most)
        begin = begins[first] if first else start
        piece_end = begins[stop] if stop < len(begins) else end
        piece = text[begin:piece_end]
        lead = len(piece) - len(piece.lstrip())
        if piece.strip():
            yield _Span(begin + lead, begin + len(piece.rstrip()), stop - first)
        first = stop


def _stop(text: str, begins: Sequence[int], first: int, most: int) -> int:
    """Return behind which token a piece ends that begins with token ``first``."""
    limit = first + most
    if limit >= len(begins):
        return len(begins)
    for stop in range(limit, first, -1):
        at = begins[stop]
        # A token's first character may be the space in front of its word.
        if at > begins[first] and (text[at].isspace() or text[at - 1].isspace()):
            return stop
    # No word ends here: between two characters, since several tokens may be of one.
    stop = limit
    while stop < len(begins) and begins[stop] == begins[stop - 1]:
        stop += 1
    return stop
