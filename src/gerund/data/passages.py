"""Documents cut at sentence boundaries into a prefix and its continuation, and wrong continuations from the same book.

RankGen, section 2.2: "We break all prefixes and continuations at sentence boundaries to make the task less reliant on
local syntactic patterns."

Passages of one document may overlap, as "all possible prefixes" do. So each knows which characters of the document it
is: a stretch that overlaps a passage repeats its prefix or is part of its true continuation, and is no wrong one.

Knows: sentences, words, characters. Does not know: tokens, models, files.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from gerund.text_analysis import segments

_WORD = re.compile(r"\S+")
_STRETCH = 20_000
# Quotation marks in a stretch, and characters of a piece of a stretch that has more of them.
_MOST_MARKS = 1500
_QUOTATION_MARK = re.compile("[\"'\u2018-\u201f\u00ab\u00bb\u2039\u203a\u300c-\u300f`\u00b4(\\[]")
_LIKELY_END = re.compile(r"[.!?]['\"”’)]*\s+|[。！？][”’」』）]*|\n\s*\n")
_SENTENCE_ENDS = (".", "!", "?", '"', "\u201d", "'")


@dataclass(frozen=True)
class Sentence:
    """A sentence of a document.

    Attributes:
        start: its first character.
        end: the character after its last.
        words: how many words it has, split at white space.
    """

    start: int
    end: int
    words: int


@dataclass(frozen=True)
class Passage:
    """A prefix and what follows it, both whole sentences.

    Attributes:
        prefix: the prefix.
        continuation: its continuation.
        sentences: which sentences of the document prefix and continuation are.
        words: words of the continuation.
        start: the prefix's first character in the document.
        middle: the continuation's first character.
        end: the character after the continuation's last.
    """

    prefix: str
    continuation: str
    sentences: range
    words: int
    start: int
    middle: int
    end: int


@dataclass(frozen=True)
class Stretch:
    """Whole sentences of a document.

    Attributes:
        text: the text.
        start: its first character in the document.
        end: the character after its last.
    """

    text: str
    start: int
    end: int


def split_sentences(text: str, language: str = "en") -> list[Sentence]:
    """Return where a text's sentences lie, without the white space around them.

    >>> text = "Mr. Smith left. He was late."
    >>> [text[one.start : one.end] for one in split_sentences(text)]
    ['Mr. Smith left.', 'He was late.']
    """
    bounds = sentence_bounds(text, language)
    return [Sentence(start, end, len(_WORD.findall(text[start:end]))) for start, end in bounds]


def sentence_bounds(text: str, language: str = "en") -> list[tuple[int, int]]:
    """Return where a text's sentences begin and end, without the white space around them.

    >>> sentence_bounds("Mr. Smith left. He was late.")
    [(0, 15), (16, 28)]
    """
    found = []
    place = 0
    for stretch in _stretches(text):
        for piece in segments(stretch, language):
            if stripped := piece.strip():
                # What the splitter does to white space between sentences does not matter this way.
                start = text.index(stripped, place)
                place = start + len(stripped)
                found.append((start, place))
    return found


def _stretches(text: str) -> Iterator[str]:
    """Cut a text between paragraphs, and a very long paragraph at what looks like the end of a sentence.

    The splitter's time grows with the square of a paragraph that has quotations, and faster with the number of
    quotation marks: a text of little else is cut shorter. Where no sentence seems to end, it is cut between words.
    """
    start = 0
    while len(text) - start > _STRETCH:
        end = text.rfind("\n\n", start + 1, start + _STRETCH) + 2
        if end < 2:
            found = _LIKELY_END.search(text, start + _STRETCH, start + 2 * _STRETCH)
            end = found.end() if found else _between_words(text, start, 2 * _STRETCH)
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
    """Return where at most so many characters end, behind white space in the second half if there is any."""
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

    A prefix takes sentences up to ``prefix_words`` words, its continuation those that follow up to the larger of
    ``continuation_words``; a continuation with fewer words than the smaller is passed over.

    >>> text = "One two. Three four. Five six. Seven."
    >>> [one] = cut_passages(text, split_sentences(text), prefix_words=4, continuation_words=(2, 3))
    >>> one.prefix, one.continuation
    ('One two. Three four.', 'Five six. Seven.')
    """
    fewest, most = continuation_words
    passages = []
    start = 0
    while start < len(sentences):
        middle = _reach(sentences, start, prefix_words)
        end = _reach(sentences, middle, most) if middle < len(sentences) else middle
        words = sum(one.words for one in sentences[middle:end])
        # A prefix that is cut short by the end of the document, or a sentence that is too long, makes no passage.
        if middle > start and end > middle and words >= fewest and _long_enough(sentences, start, middle, prefix_words):
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
    """Sample passages that a scorer learns from, which may overlap (RankGen, section 2.2: dataset construction).

    A prefix may begin at every sentence and takes sentences up to ``prefix_words`` words. The length of its
    continuation is sampled evenly between ``continuation_words``; it takes the whole sentences that come nearest.

    >>> text = "One two. Three four. Five six. Seven."
    >>> found = sample_passages(
    ...     text, split_sentences(text), np.random.default_rng(0), prefix_words=4, continuation_words=(1, 2)
    ... )
    >>> [(one.prefix, one.continuation) for one in found]
    [('One two. Three four.', 'Five six.'), ('Three four. Five six.', 'Seven.')]

    Args:
        text: the document.
        sentences: its sentences.
        rng: determines lengths, and which passages where there are more than ``count``.
        count: how many at most; None for all.
        prefix_words: words of a prefix at most, and half of them at least.
        continuation_words: words of a continuation at least and at most.

    Returns:
        The passages, in the order of the document.
    """
    fewest, most = continuation_words
    found = []
    for start in range(len(sentences)):
        middle = _reach(sentences, start, prefix_words)
        # One number for every start, so that what is sampled for one does not depend on the others.
        wanted = int(rng.integers(fewest, most + 1))
        if not start < middle < len(sentences) or not _long_enough(sentences, start, middle, prefix_words):
            continue
        end = _nearest(sentences, middle, wanted)
        words = sum(one.words for one in sentences[middle:end])
        if fewest <= words <= most:
            found.append(_passage(text, sentences, start, middle, end))
    if count is None or len(found) <= count:
        return found
    return [found[place] for place in sorted(rng.choice(len(found), count, replace=False).tolist())]


def inbook_negatives(
    text: str, sentences: Sequence[Sentence], passage: Passage, count: int, rng: np.random.Generator
) -> list[Stretch]:
    """Sample other stretches of the same document as wrong continuations (RankGen, section 2: INBOOK negatives).

    Args:
        text: the document.
        sentences: its sentences.
        passage: the right one.
        count: how many.
        rng: determines which.

    Returns:
        Up to ``count`` of :func:`other_stretches`, in a random order; fewer where the document has no more.
    """
    order = rng.permutation(len(sentences)).tolist()
    return list(islice(other_stretches(text, sentences, passage, order), count))


def other_stretches(
    text: str, sentences: Sequence[Sentence], passage: Passage, starts: Iterable[int] | None = None
) -> Iterator[Stretch]:
    """Yield the stretches of a document that are wrong continuations of a passage's prefix, one from each sentence on.

    Each is whole sentences of about as many words as the right one. It shares no character with the passage, and does
    not say what the passage says at another place, such as a refrain: it neither stands in the prefix or in the right
    continuation, nor contains the latter. All texts are different.

    Args:
        text: the document.
        sentences: its sentences.
        passage: the right one.
        starts: the first sentences, in the order that is wanted; None for all, in the order of the document.
    """
    whole, right = _plain(text[passage.start : passage.end]), _plain(passage.continuation)
    # Of a long document hashes take a tenth of what its texts would.
    seen: set[int] = set()
    for start in range(len(sentences)) if starts is None else starts:
        end = _nearest(sentences, start, passage.words)
        if start < passage.sentences.stop and end > passage.sentences.start:
            continue
        words = sum(one.words for one in sentences[start:end])
        if not 0.5 * passage.words <= words <= 1.5 * passage.words:
            continue
        found = _text(text, sentences, start, end)
        if hash(found) not in seen and not says_the_same(found, whole, right):
            seen.add(hash(found))
            yield Stretch(found, sentences[start].start, sentences[end - 1].end)


def wrong_for(passage: Passage, others: Sequence[Passage]) -> list[bool]:
    """Return for each of a document's passages whether its continuation is a wrong one behind ``passage``'s prefix.

    Not one whose text overlaps the passage, nor one that says the same at another place. Continuations of equal text
    are all wrong or all right.

    >>> text = "One two. Three four. Five six. Seven eight. Nine ten."
    >>> every = cut_passages(text, split_sentences(text), prefix_words=2, continuation_words=(1, 2))
    >>> wrong_for(every[0], every)
    [False, True]
    """
    whole, right = _plain(f"{passage.prefix} {passage.continuation}"), _plain(passage.continuation)
    near = {one.continuation for one in others if one.middle < passage.end and passage.start < one.end}
    return [one.continuation not in near and not says_the_same(one.continuation, whole, right) for one in others]


def says_the_same(text: str, whole: str, right: str) -> bool:
    """Return whether a text stands in ``whole`` or contains ``right``, both with single spaces for white space."""
    own = _plain(text)
    return own in whole or right in own


def _plain(text: str) -> str:
    return " ".join(text.split())


def cut_to_words(text: str, words: int, *, fewest: int = 1, most: int | None = None) -> str:
    """Return the beginning of a text: the whole sentences that come nearest to so many words, within limits.

    Where no sentence ends within the limits, the beginning is cut at a word, ``words`` long or as long as the text is.
    Where generated texts stop anywhere and people's at the end of a sentence, or are longer or shorter than people's
    ever are, that alone would tell them apart.

    >>> cut_to_words(" He left. She stayed for the night. Then", 3)
    'He left.'
    >>> cut_to_words(" He left. She stayed for the night. Then", 3, fewest=3)
    'He left. She stayed for the night.'
    >>> cut_to_words(" He left and she", 3)
    'He left and'

    Args:
        text: the text.
        words: how many words are wanted.
        fewest: words at least.
        most: words at most; None for no limit.

    Returns:
        The beginning, without white space around it; "" for a text of fewer than ``fewest`` words.
    """
    sentences = _whole_sentences(text)
    count, best, end = 0, None, None
    for sentence in sentences:
        count += sentence.words
        if fewest <= count <= (most or count) and (best is None or abs(count - words) < best):
            best, end = abs(count - words), sentence.end
    if end is not None:
        return text[:end].strip()
    found = list(islice(_WORD.finditer(text), words))
    return text[: found[-1].end()].strip() if len(found) >= fewest and found else ""


def cut_to_sentence(text: str) -> str:
    """Return a text up to the end of its last whole sentence; "" where it has none.

    >>> cut_to_sentence(" He left. She stayed for")
    ' He left.'
    """
    sentences = _whole_sentences(text)
    return text[: sentences[-1].end] if sentences else ""


def _whole_sentences(text: str) -> list[Sentence]:
    """Return a text's sentences without the last one where that was cut off."""
    sentences = split_sentences(text)
    return sentences if text.rstrip().endswith(_SENTENCE_ENDS) else sentences[:-1]


def _reach(sentences: Sequence[Sentence], start: int, most: int) -> int:
    """Return how far from ``start`` sentences go with at most ``most`` words."""
    words = 0
    for place in range(start, len(sentences)):
        words += sentences[place].words
        if words > most:
            return place
    return len(sentences)


def _nearest(sentences: Sequence[Sentence], start: int, wanted: int) -> int:
    """Return how far from ``start`` sentences come nearest to ``wanted`` words."""
    end = max(start + 1, _reach(sentences, start, wanted))
    words = sum(one.words for one in sentences[start:end])
    if end < len(sentences) and words + sentences[end].words - wanted < wanted - words:
        return end + 1
    return end


def _long_enough(sentences: Sequence[Sentence], start: int, middle: int, wanted: int) -> bool:
    return sum(one.words for one in sentences[start:middle]) >= wanted / 2


def _passage(text: str, sentences: Sequence[Sentence], start: int, middle: int, end: int) -> Passage:
    return Passage(
        _text(text, sentences, start, middle),
        _text(text, sentences, middle, end),
        range(start, end),
        sum(one.words for one in sentences[middle:end]),
        sentences[start].start,
        sentences[middle].start,
        sentences[end - 1].end,
    )


def _text(text: str, sentences: Sequence[Sentence], start: int, end: int) -> str:
    return text[sentences[start].start : sentences[end - 1].end]
