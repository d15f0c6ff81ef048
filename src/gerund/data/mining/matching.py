"""Says which sentences of a document are pairs, and by which substring.

GUR, section III-B: two sentences are similar when the longest common substring of their normalised forms is long
enough. Figure 2: with "Tom is chasing Jerry." and "Jerry is chasing Tom." it is not, with "Spike is chasing Tom." and
"Spike is chasing Jerry." it is.

Knows: windows, spans, how often a sentence may be used. Does not know: how a document is split, files.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from gerund.data.mining.pairing import Side, all_pairs, greedy_pairs
from gerund.data.mining.spans import Meetings, heaviest_spans
from gerund.data.mining.symbols import SymbolWeights, normalised
from gerund.data.mining.windows import Texts, find_windows, share
from gerund.errors import ConfigError, TextError

# The released code takes a text for short whose symbols weigh 15 together, in its weights of 1, 0.3 and 0.1.
SHORT_WEIGHT = 150


class Match(NamedTuple):
    """Two sentences that are a pair.

    Attributes:
        i: the first one's index.
        j: the second one's, larger.
        span: the heaviest common substring of their normalised forms; of several, the leftmost in ``i``.
        weight: what it weighs.
    """

    i: int
    j: int
    span: str
    weight: int


@dataclass(frozen=True)
class Rule:
    """When two sentences are a pair."""

    threshold: int = 30
    """What their heaviest common substring weighs at least."""
    short_threshold: int | None = None
    """What it weighs at least in a pair of short texts; None for no such exception."""
    weights: SymbolWeights = field(default_factory=SymbolWeights)
    """What symbols weigh."""
    short_characters: int | None = None
    """A pair is one of short texts where both have fewer characters (GUR, section IV-A, has 64, with a short threshold
    of 20: two Chinese characters). None: where one of the two weighs ``SHORT_WEIGHT`` at most, as in the released
    code."""

    def __post_init__(self) -> None:
        if self.threshold < 1:
            raise ConfigError(f"threshold={self.threshold} would make a pair of any two sentences; 1 is the least")
        if self.short_threshold is not None and not 1 <= self.short_threshold <= self.threshold:
            raise ConfigError(
                f"short_threshold={self.short_threshold} is not between 1 and the threshold, {self.threshold}"
            )
        if self.short_characters is not None and self.short_characters < 1:
            raise ConfigError(f"short_characters={self.short_characters} makes no text a short one; 1 is the least")
        if self.short_characters is not None and self.short_threshold is None:
            raise ConfigError("short_characters says which texts are short; give short_threshold for them too")

    def short(self, texts: Texts) -> np.ndarray:
        """Return which sentences are short, ``(n,)`` bool."""
        if self.short_characters is None:
            return texts.total_weights() <= SHORT_WEIGHT
        return np.diff(texts.bounds) < self.short_characters


def matching_pairs(
    sentences: Sequence[str],
    threshold: int = 30,
    max_uses: int | None = None,
    *,
    short_threshold: int | None = None,
    short_characters: int | None = None,
    weights: SymbolWeights | None = None,
) -> list[Match]:
    """Return the pairs among the sentences of one document (GUR, section III-B).

    >>> def figure_2(*sentences: str) -> list[str]:
    ...     return [match.span for match in matching_pairs(sentences)]
    >>> figure_2("Tom is chasing Jerry.", "Jerry is chasing Tom.")
    []
    >>> figure_2("Spike is chasing Tom.", "Spike is chasing Jerry.")
    ['spike is chasing']

    Args:
        sentences: the sentences, as they stand in the document. Equal ones match.
        threshold: what the heaviest common substring of two normalised sentences weighs at least: 10 for a letter
            beyond U+2710, 3 for another letter, 1 for anything else, spaces inside too.
        max_uses: how often a sentence may be used; pairs are then taken greedily in their order. None for any number.
        short_threshold: the smaller threshold of short texts; see ``Rule``.
        short_characters: two texts with fewer characters in their normalised forms are short; see ``Rule``.
        weights: other weights of symbols.

    Returns:
        The pairs, sorted by ``i`` and ``j``. Without ``max_uses`` these may be half the square of the sentences.

    Raises:
        ConfigError: a threshold, weight or number of uses that makes no sense.
        TextError: what is given is no list of strings.
    """
    known = not isinstance(sentences, str) and isinstance(sentences, Sequence)
    if not known or not all(isinstance(sentence, str) for sentence in sentences):
        raise TextError("the sentences of a document are a list of strings")
    rule = Rule(threshold, short_threshold, weights or SymbolWeights(), short_characters)
    found = find_pairs([[normalised(sentence) for sentence in sentences]], rule, max_uses=max_uses)
    return [Match(*row) for row in zip(*found.columns(), strict=True)]


@dataclass(frozen=True)
class Pairs:
    """The pairs among the sentences of some documents, counted through.

    Attributes:
        first: ``(p,)`` int64, the first sentence of each pair.
        second: ``(p,)`` int64, the second one, of the same document.
        weights: ``(p,)`` int64, what their span weighs.
        spans: the spans.
    """

    first: np.ndarray
    second: np.ndarray
    weights: np.ndarray
    spans: list[str]

    def columns(self) -> tuple[list[int], list[int], list[str], list[int]]:
        """Return first, second, span and weight as lists."""
        return self.first.tolist(), self.second.tolist(), self.spans, self.weights.tolist()


def find_pairs(
    documents: Sequence[Sequence[str]], rule: Rule, *, titled: bool = False, max_uses: int | None = None
) -> Pairs:
    """Return the pairs of several documents in one go, sorted.

    Args:
        documents: normalised sentences of each document.
        rule: when two are a pair.
        titled: pair only the first sentence of each document with its others.
        max_uses: how often a sentence may be used; None for any number.

    Raises:
        ConfigError: ``max_uses`` leaves no pair.
    """
    if max_uses is not None and max_uses < 1:
        raise ConfigError(f"max_uses={max_uses} leaves no sentence to be used; 1 is the least")
    texts = Texts(documents, rule.weights)
    title = np.zeros(len(texts), dtype=bool)
    title[np.flatnonzero(np.diff(texts.document, prepend=-1))] = True
    wanted = title if titled else None
    shared = share(texts, find_windows(texts, rule.threshold), wanted)
    meetings = Meetings(texts, shared)
    sides = [Side(meetings, None)]
    if rule.short_threshold is not None:
        shared = share(texts, find_windows(texts, rule.short_threshold), wanted)
        meetings = Meetings(texts, shared)
        sides.append(Side(meetings, rule.short(texts), both=rule.short_characters is not None))
    if max_uses is None or titled:
        first, second = all_pairs(len(texts), sides, wanted)
        if max_uses is not None:
            kept = _rank_within(first) < max_uses
            first, second = first[kept], second[kept]
    else:
        first, second = greedy_pairs(len(texts), sides, max_uses)
    spans = heaviest_spans(texts, shared, meetings, first, second)
    stretches = zip(spans.starts.tolist(), spans.ends.tolist(), strict=True)
    return Pairs(first, second, spans.weights, [texts.stretch(start, end) for start, end in stretches])


def _rank_within(values: np.ndarray) -> np.ndarray:
    """Return how many equal values stand before each of some sorted values."""
    return np.arange(len(values)) - np.searchsorted(values, values)
