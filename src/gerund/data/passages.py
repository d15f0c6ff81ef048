"""Documents cut at sentence boundaries into a prefix and its continuation, and wrong continuations from the same book.

RankGen, section 2.2: "We break all prefixes and continuations at sentence boundaries to make the task less reliant on
local syntactic patterns."

Knows: sentences, words. Does not know: tokens, models, files.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

_WORD = re.compile(r"\S+")
_STRETCH = 20_000
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
    """

    prefix: str
    continuation: str
    sentences: range
    words: int


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
    from sentencex import segment

    found = []
    place = 0
    for stretch in _stretches(text):
        for piece in segment(language, stretch):
            if stripped := piece.strip():
                # What the splitter does to white space between sentences does not matter this way.
                start = text.index(stripped, place)
                place = start + len(stripped)
                found.append((start, place))
    return found


def _stretches(text: str) -> Iterator[str]:
    """Cut a text between paragraphs, and a very long paragraph at what looks like the end of a sentence.

    The splitter's time grows with the square of a paragraph that has quotations.
    """
    start = 0
    while len(text) - start > _STRETCH:
        end = text.rfind("\n\n", start + 1, start + _STRETCH) + 2
        if end < 2:
            found = _LIKELY_END.search(text, start + _STRETCH)
            if found is None:
                break
            end = found.end()
        yield text[start:end]
        start = end
    yield text[start:]


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
            prefix, continuation = _text(text, sentences, start, middle), _text(text, sentences, middle, end)
            passages.append(Passage(prefix, continuation, range(start, end), words))
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
            prefix, continuation = _text(text, sentences, start, middle), _text(text, sentences, middle, end)
            found.append(Passage(prefix, continuation, range(start, end), words))
    if count is None or len(found) <= count:
        return found
    return [found[place] for place in sorted(rng.choice(len(found), count, replace=False).tolist())]


def inbook_negatives(
    text: str, sentences: Sequence[Sentence], passage: Passage, count: int, rng: np.random.Generator
) -> list[str]:
    """Sample other stretches of the same document as wrong continuations (RankGen, section 2: INBOOK negatives).

    Each is whole sentences of about as many words as the right one, and overlaps neither it nor the prefix.

    Args:
        text: the document.
        sentences: its sentences.
        passage: the right one.
        count: how many.
        rng: determines which.

    Returns:
        Up to ``count`` different texts; fewer where the document has no more.
    """
    found: dict[str, None] = {}
    taken = passage.sentences
    for start in rng.permutation(len(sentences)).tolist():
        if len(found) == count:
            break
        end = _nearest(sentences, start, passage.words)
        if start < taken.stop and end > taken.start:
            continue
        words = sum(one.words for one in sentences[start:end])
        if 0.5 * passage.words <= words <= 1.5 * passage.words:
            found.setdefault(_text(text, sentences, start, end))
    found.pop(passage.continuation, None)
    return list(found)


def cut_to_words(text: str, words: int) -> str:
    """Return the beginning of a text: the whole sentences that come nearest to so many words.

    A text without the end of a sentence is cut at its last word. Where generated texts stop anywhere and people's at
    the end of a sentence, that alone would tell them apart.

    >>> cut_to_words(" He left. She stayed for the night. Then", 3)
    'He left.'
    >>> cut_to_words(" He left and", 3)
    'He left and'
    """
    sentences = split_sentences(text)
    if len(sentences) > 1 and not text.rstrip().endswith(_SENTENCE_ENDS):
        sentences = sentences[:-1]  # the last one was cut off
    count, best, taken = 0, None, 0
    for place, sentence in enumerate(sentences):
        count += sentence.words
        if best is None or abs(count - words) < best:
            best, taken = abs(count - words), place
    return text[sentences[0].start : sentences[taken].end] if sentences else ""


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


def _text(text: str, sentences: Sequence[Sentence], start: int, end: int) -> str:
    return text[sentences[start].start : sentences[end - 1].end]
