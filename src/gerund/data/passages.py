"""Split documents into sentences, cut prefix and continuation passages, and find wrong continuations (RankGen).

RankGen, section 2.2: "We break all prefixes and continuations at sentence boundaries to make the task less reliant on
local syntactic patterns."

Passages of one document may overlap, as "all possible prefixes" do. So each has its character offsets: a stretch that
overlaps a passage repeats its prefix or is part of its true continuation, and isn't a wrong one.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from gerund.text_analysis import segments

_WORD = re.compile(r"\S+")
_STRETCH = 20_000
# Maximum of quotation marks in a stretch, and of characters in its pieces if it has more.
_MOST_MARKS = 1500
_QUOTATION_MARK = re.compile("[\"'\u2018-\u201f\u00ab\u00bb\u2039\u203a\u300c-\u300f`\u00b4(\\[]")
_LIKELY_END = re.compile(r"[.!?]['\"”’)]*\s+|[。！？][”’」』）]*|\n\s*\n")
_SENTENCE_ENDS = (".", "!", "?", '"', "\u201d", "'")


@dataclass(frozen=True)
class Sentence:
    """A sentence of a document: its characters from ``start`` to ``end``, and its number of words."""

    start: int
    end: int
    words: int


@dataclass(frozen=True)
class Passage:
    """A prefix and its continuation, both whole sentences."""

    prefix: str
    continuation: str
    sentences: range  # the document's sentences that both are
    words: int  # words of the continuation
    start: int  # offset of the prefix in the document
    middle: int  # offset of the continuation
    end: int  # offset of the continuation's end


@dataclass(frozen=True)
class Stretch:
    """Whole sentences of a document, with the offsets of their start and end."""

    text: str
    start: int
    end: int


def split_sentences(text: str, language: str = "en") -> list[Sentence]:
    """Return a text's sentences, without the white space around them.

    >>> text = "Mr. Smith left. He was late."
    >>> [text[sentence.start : sentence.end] for sentence in split_sentences(text)]
    ['Mr. Smith left.', 'He was late.']
    """
    bounds = sentence_bounds(text, language)
    return [Sentence(start, end, len(_WORD.findall(text[start:end]))) for start, end in bounds]


def sentence_bounds(text: str, language: str = "en") -> list[tuple[int, int]]:
    """Return the offsets of a text's sentences, without the white space around them.

    >>> sentence_bounds("Mr. Smith left. He was late.")
    [(0, 15), (16, 28)]
    """
    bounds = []
    place = 0
    for stretch in _stretches(text):
        for piece in segments(stretch, language):
            if stripped := piece.strip():
                # By search, whatever the splitter does to white space between sentences.
                start = text.index(stripped, place)
                place = start + len(stripped)
                bounds.append((start, place))
    return bounds


def _stretches(text: str) -> Iterator[str]:
    """Cut a text between paragraphs, and a very long paragraph at a likely end of a sentence, or between words.

    The splitter's time grows with the square of a paragraph that has quotations, and faster with the number of
    quotation marks: a text of little else is cut shorter.
    """
    start = 0
    while len(text) - start > _STRETCH:
        end = text.rfind("\n\n", start + 1, start + _STRETCH) + 2
        if end < 2:
            likely = _LIKELY_END.search(text, start + _STRETCH, start + 2 * _STRETCH)
            end = likely.end() if likely else _between_words(text, start, 2 * _STRETCH)
        yield from _with_few_marks(text[start:end])
        start = end
    yield from _with_few_marks(text[start:])


def _with_few_marks(text: str) -> Iterator[str]:
    start = 0
    if len(_QUOTATION_MARK.findall(text)) > _MOST_MARKS:
        while len(text) - start > _MOST_MARKS:
            end = _between_words(text, start, _MOST_MARKS)
            yield text[start:end]
            start = end
    yield text[start:]


def _between_words(text: str, start: int, most: int) -> int:
    """Return where at most ``most`` characters end, after white space in the second half if there is any."""
    half = start + most // 2
    end = max(text.rfind(" ", half, start + most), text.rfind("\n", half, start + most)) + 1
    return end or min(start + most, len(text))


def cut_passages(
    text: str,
    sentences: Sequence[Sentence],
    *,
    prefix_words: int = 256,
    continuation_words: tuple[int, int] = (10, 128),
) -> list[Passage]:
    """Cut a document into passages that do not overlap (RankGen, section 2.2).

    A prefix takes sentences up to ``prefix_words`` words, its continuation the next up to the larger of
    ``continuation_words``; a continuation with fewer words than the smaller is skipped.

    >>> text = "One two. Three four. Five six. Seven."
    >>> [passage] = cut_passages(text, split_sentences(text), prefix_words=4, continuation_words=(2, 3))
    >>> passage.prefix, passage.continuation
    ('One two. Three four.', 'Five six. Seven.')
    """
    fewest, most = continuation_words
    passages = []
    start = 0
    while start < len(sentences):
        middle = _reach(sentences, start, prefix_words)
        end = _reach(sentences, middle, most) if middle < len(sentences) else middle
        words = _words(sentences, middle, end)
        # A prefix cut short by the end of the document, or a sentence that is too long, makes no passage.
        if start < middle < end and words >= fewest and 2 * _words(sentences, start, middle) >= prefix_words:
            passages.append(_passage(text, sentences, start, middle, end))
        start = max(end, start + 1)
    return passages


def sample_passages(
    text: str,
    sentences: Sequence[Sentence],
    rng: np.random.Generator,
    *,
    count: int | None = None,
    prefix_words: int = 256,
    continuation_words: tuple[int, int] = (10, 128),
) -> list[Passage]:
    """Sample passages for training a scorer, which may overlap (RankGen, section 2.2: dataset construction).

    A prefix may begin at every sentence and takes sentences of ``prefix_words`` words at most, and half of them at
    least. The length of its continuation is sampled uniformly between ``continuation_words``; it takes the whole
    sentences that come nearest. Of more than ``count`` passages some are sampled. They are in the document's order.

    >>> text = "One two. Three four. Five six. Seven."
    >>> passages = sample_passages(
    ...     text, split_sentences(text), np.random.default_rng(0), prefix_words=4, continuation_words=(1, 2)
    ... )
    >>> [(passage.prefix, passage.continuation) for passage in passages]
    [('One two. Three four.', 'Five six.'), ('Three four. Five six.', 'Seven.')]
    """
    fewest, most = continuation_words
    passages = []
    for start in range(len(sentences)):
        middle = _reach(sentences, start, prefix_words)
        # Drawn for every start, so that no sample depends on the others.
        length = int(rng.integers(fewest, most + 1))
        if not start < middle < len(sentences) or 2 * _words(sentences, start, middle) < prefix_words:
            continue
        end = _nearest(sentences, middle, length)
        if fewest <= _words(sentences, middle, end) <= most:
            passages.append(_passage(text, sentences, start, middle, end))
    if count is None or len(passages) <= count:
        return passages
    return [passages[place] for place in sorted(rng.choice(len(passages), count, replace=False).tolist())]


def inbook_negatives(
    text: str, sentences: Sequence[Sentence], passage: Passage, count: int, rng: np.random.Generator
) -> list[Stretch]:
    """Sample up to ``count`` of :func:`other_stretches` in random order (RankGen, section 2: INBOOK negatives)."""
    order = rng.permutation(len(sentences)).tolist()
    return list(islice(other_stretches(text, sentences, passage, order), count))


def other_stretches(
    text: str, sentences: Sequence[Sentence], passage: Passage, starts: Iterable[int] | None = None
) -> Iterator[Stretch]:
    """Yield wrong continuations of a passage's prefix from the same document, one from each sentence of ``starts`` on.

    Each is whole sentences of about as many words as the right one. It shares no character with the passage, and does
    not repeat it, as a refrain does: it is neither in the prefix or the right continuation, nor contains the latter.
    All texts are different. ``starts`` defaults to all sentences in order.
    """
    whole, right = _plain(text[passage.start : passage.end]), _plain(passage.continuation)
    # Of a long document hashes take a tenth of the memory of its texts.
    seen: set[int] = set()
    for start in range(len(sentences)) if starts is None else starts:
        end = _nearest(sentences, start, passage.words)
        if start < passage.sentences.stop and end > passage.sentences.start:
            continue
        if not 0.5 * passage.words <= _words(sentences, start, end) <= 1.5 * passage.words:
            continue
        other = _text(text, sentences, start, end)
        if hash(other) not in seen and not _repeats(other, whole, right):
            seen.add(hash(other))
            yield Stretch(other, sentences[start].start, sentences[end - 1].end)


def wrong_for(passage: Passage, others: Sequence[Passage]) -> list[bool]:
    """Return for each of a document's passages whether its continuation is a wrong one for ``passage``'s prefix.

    A text that overlaps the passage or repeats it elsewhere isn't. Continuations of equal text are all wrong or all
    right.

    >>> text = "One two. Three four. Five six. Seven eight. Nine ten."
    >>> every = cut_passages(text, split_sentences(text), prefix_words=2, continuation_words=(1, 2))
    >>> wrong_for(every[0], every)
    [False, True]
    """
    whole, right = _plain(f"{passage.prefix} {passage.continuation}"), _plain(passage.continuation)
    near = {other.continuation for other in others if other.middle < passage.end and passage.start < other.end}
    return [other.continuation not in near and not _repeats(other.continuation, whole, right) for other in others]


def _repeats(text: str, whole: str, right: str) -> bool:
    """Return whether a text is in ``whole`` or contains ``right``, both with single spaces for white space."""
    plain = _plain(text)
    return plain in whole or right in plain


def _plain(text: str) -> str:
    return " ".join(text.split())


def cut_to_words(text: str, words: int, *, fewest: int = 1, most: int | None = None) -> str:
    """Truncate a text to the whole sentences whose words, from ``fewest`` to ``most``, come nearest to ``words``.

    Where no sentence ends within these limits, it is cut after ``words`` words. Otherwise length and ending alone would
    tell generated texts, which stop anywhere, from human ones. Returns "" for a text of fewer than ``fewest`` words.

    >>> cut_to_words(" He left. She stayed for the night. Then", 3)
    'He left.'
    >>> cut_to_words(" He left. She stayed for the night. Then", 3, fewest=3)
    'He left. She stayed for the night.'
    >>> cut_to_words(" He left and she", 3)
    'He left and'
    """
    count, best, end = 0, None, None
    for sentence in _whole_sentences(text):
        count += sentence.words
        if fewest <= count <= (most or count) and (best is None or abs(count - words) < best):
            best, end = abs(count - words), sentence.end
    if end is not None:
        return text[:end].strip()
    first = list(islice(_WORD.finditer(text), words))
    return text[: first[-1].end()].strip() if len(first) >= fewest and first else ""


def cut_to_sentence(text: str) -> str:
    """Truncate a text after its last whole sentence; "" where it has none.

    >>> cut_to_sentence(" He left. She stayed for")
    ' He left.'
    """
    sentences = _whole_sentences(text)
    return text[: sentences[-1].end] if sentences else ""


def _whole_sentences(text: str) -> list[Sentence]:
    """Return a text's sentences without a truncated last one."""
    sentences = split_sentences(text)
    return sentences if text.rstrip().endswith(_SENTENCE_ENDS) else sentences[:-1]


def _words(sentences: Sequence[Sentence], start: int, end: int) -> int:
    return sum(sentence.words for sentence in sentences[start:end])


def _reach(sentences: Sequence[Sentence], start: int, most: int) -> int:
    """Return the end of the sentences from ``start`` on that have at most ``most`` words."""
    words = 0
    for place in range(start, len(sentences)):
        words += sentences[place].words
        if words > most:
            return place
    return len(sentences)


def _nearest(sentences: Sequence[Sentence], start: int, wanted: int) -> int:
    """Return the end of the sentences from ``start`` on whose words come nearest to ``wanted``."""
    end = max(start + 1, _reach(sentences, start, wanted))
    words = _words(sentences, start, end)
    if end < len(sentences) and words + sentences[end].words - wanted < wanted - words:
        return end + 1
    return end


def _passage(text: str, sentences: Sequence[Sentence], start: int, middle: int, end: int) -> Passage:
    return Passage(
        _text(text, sentences, start, middle),
        _text(text, sentences, middle, end),
        range(start, end),
        _words(sentences, middle, end),
        sentences[start].start,
        sentences[middle].start,
        sentences[end - 1].end,
    )


def _text(text: str, sentences: Sequence[Sentence], start: int, end: int) -> str:
    return text[sentences[start].start : sentences[end - 1].end]
