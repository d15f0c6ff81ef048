"""Find pairs of sentences in a document that share a long substring (GUR, section III-B).

GUR, section III-B: two sentences are similar when the longest common substring of their normalized forms is long
enough. Figure 2: with "Tom is chasing Jerry." and "Jerry is chasing Tom." it is not, with "Spike is chasing Tom." and
"Spike is chasing Jerry." it is.

Shapes: n sentences, p pairs, M meetings.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from gerund.data.mining.substrings import (
    CHUNK,
    Meetings,
    SymbolWeights,
    Texts,
    find_windows,
    heaviest_spans,
    normalised,
    ranges,
    share,
    slices,
)
from gerund.errors import ConfigError, TextError


@dataclass(frozen=True)
class Side:
    """Meetings that make two sentences a pair."""

    meetings: Meetings
    short: np.ndarray | None = None
    """``(n,)`` bool: the short sentences, of which a pair needs one; None where any two make a pair."""
    both: bool = False  # whether a pair needs two short sentences


def all_pairs(n: int, sides: Sequence[Side], wanted: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Return every pair that a side makes, once and sorted; ``wanted`` ``(n,)`` bool restricts its first sentence."""
    keys = np.empty(0, dtype=np.int64)
    waiting: list[np.ndarray] = []
    for side in sides:
        sentence, group = side.meetings.sentence, side.meetings.group
        partners = np.searchsorted(group, group, side="right") - np.arange(len(group)) - 1
        if wanted is not None:
            partners[~wanted[sentence]] = 0
        for part in slices(partners, CHUNK):
            counts = partners[part]
            first = np.repeat(sentence[part], counts)
            second = sentence[ranges(np.arange(len(group))[part] + 1, counts)]
            if side.short is not None:
                kept = (np.logical_and if side.both else np.logical_or)(side.short[first], side.short[second])
                first, second = first[kept], second[kept]
            waiting.append(np.unique(first * n + second))
            # A pair may meet in many groups: what waits must not grow far beyond the result.
            if sum(map(len, waiting)) > max(4 * CHUNK, len(keys)):
                keys, waiting = np.unique(np.concatenate([keys, *waiting])), []
    keys = np.unique(np.concatenate([keys, *waiting]))
    return keys // max(n, 1), keys % max(n, 1)


def greedy_pairs(n: int, sides: Sequence[Side], max_uses: int) -> tuple[np.ndarray, np.ndarray]:
    """Return pairs in their order, without those of a sentence that was used ``max_uses`` times already.

    In a group only as many are tried as may be taken, so that the cost of n similar sentences is not quadratic.
    """
    sentence, start, stop, members = _lists(sides)
    # Index of the next sentence that may still be used: a union-find over used sentences.
    following = list(range(len(members) + 1))
    used = [0] * n
    first: list[int] = []
    second: list[int] = []
    for i, rows in _by_sentence(sentence):
        left = max_uses - used[i]
        if left < 1:
            continue
        partners: set[int] = set()
        for row in rows:
            partners.update(_next_usable(members, following, used, max_uses, start[row], stop[row], left))
        for j in sorted(partners)[:left]:
            used[i] += 1
            used[j] += 1
            first.append(i)
            second.append(j)
    return np.array(first, dtype=np.int64), np.array(second, dtype=np.int64)


def _next_usable(
    members: list[int], following: list[int], used: list[int], max_uses: int, place: int, stop: int, count: int
) -> list[int]:
    """Return the next members of a list, from a place on, that may still be used."""
    usable: list[int] = []
    while len(usable) < count:
        while following[place] != place:
            following[place] = following[following[place]]
            place = following[place]
        if place >= stop:
            break
        if used[members[place]] < max_uses:
            usable.append(members[place])
        else:
            following[place] = place + 1
        place += 1
    return usable


def _lists(sides: Sequence[Side]) -> tuple[np.ndarray, list[int], list[int], list[int]]:
    """Return, per sentence and group, the range of its possible partners (sentence, start, stop); and the partners."""
    columns: list[list[np.ndarray]] = [[], [], [], []]
    before = 0

    def add(rows: np.ndarray, partners: np.ndarray) -> None:
        nonlocal before
        sentence, group = side.meetings.sentence, side.meetings.group
        n = int(sentence.max()) + 1
        keys = group[partners] * n + sentence[partners]
        places = group[rows] * n + sentence[rows]
        columns[0].append(sentence[rows])
        columns[1].append(before + np.searchsorted(keys, places, side="right"))
        columns[2].append(before + np.searchsorted(group[partners], group[rows], side="right"))
        columns[3].append(sentence[partners])
        before += len(partners)

    for side in sides:
        every = np.arange(len(side.meetings.sentence))
        if not len(every):
            continue
        if side.short is None:
            add(every, every)
        else:
            short = side.short[side.meetings.sentence]
            add(every[short], every[short] if side.both else every)
            if not side.both:
                # A long sentence only pairs with a short one.
                add(every[~short], every[short])
    if not columns[0]:
        return np.empty(0, dtype=np.int64), [], [], []
    joined = [np.concatenate(column) for column in columns]
    return joined[0], joined[1].tolist(), joined[2].tolist(), joined[3].tolist()


def _by_sentence(sentence: np.ndarray) -> list[tuple[int, list[int]]]:
    """Return the rows of each sentence, in the order of sentences."""
    order = np.argsort(sentence, kind="stable")
    values, bounds = np.unique(sentence[order], return_index=True)
    rows = np.split(order, bounds[1:])
    return [(value, part.tolist()) for value, part in zip(values.tolist(), rows, strict=True)] if len(values) else []


# In the released code, a text is short if its symbols weigh 15 in total, in its weights of 1, 0.3 and 0.1.
SHORT_WEIGHT = 150


class Match(NamedTuple):
    """Two sentences that are a pair.

    Attributes:
        i: the first one's index.
        j: the second one's, larger.
        span: the heaviest common substring of their normalised forms; of several, the leftmost in ``i``.
        weight: its weight.
    """

    i: int
    j: int
    span: str
    weight: int


@dataclass(frozen=True)
class Rule:
    """When two sentences are a pair."""

    threshold: int = 30  # minimum weight of their heaviest common substring
    short_threshold: int | None = None  # minimum weight in a pair of short texts; None for no such exception
    weights: SymbolWeights = field(default_factory=SymbolWeights)  # weights of symbols
    short_characters: int | None = None
    """Two texts with fewer characters are a pair of short texts (GUR, section IV-A, has 64, with a short threshold of
    20: two Chinese characters). None: one of the two weighs at most ``SHORT_WEIGHT``, as in the released code."""

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
        threshold: the minimum weight of the heaviest common substring of two normalized sentences: 10 for a letter
            beyond U+2710, 3 for another letter, 1 for anything else, inner spaces too.
        max_uses: the maximum number of pairs per sentence, taken greedily in their order; None for any number.
        short_threshold: the smaller threshold of short texts; see ``Rule``.
        short_characters: two texts with fewer characters in their normalized forms are short; see ``Rule``.
        weights: other weights of symbols.

    Returns:
        The pairs, sorted by ``i`` and ``j``. Without ``max_uses`` their number may be quadratic.

    Raises:
        ConfigError: a threshold, weight or number of uses is out of range.
        TextError: the sentences aren't a list of strings.
    """
    is_list = not isinstance(sentences, str) and isinstance(sentences, Sequence)
    if not is_list or not all(isinstance(sentence, str) for sentence in sentences):
        raise TextError("the sentences of a document are a list of strings")
    rule = Rule(threshold, short_threshold, weights or SymbolWeights(), short_characters)
    pairs = find_pairs([[normalised(sentence) for sentence in sentences]], rule, max_uses=max_uses)
    return [Match(*row) for row in zip(*pairs.columns(), strict=True)]


@dataclass(frozen=True)
class Pairs:
    """The pairs among the sentences of some documents, which are numbered consecutively."""

    first: np.ndarray  # ``(p,)`` int64, the first sentence of each pair
    second: np.ndarray  # ``(p,)`` int64, the second, of the same document
    weights: np.ndarray  # ``(p,)`` int64, the weights of their spans
    spans: list[str]

    def columns(self) -> tuple[list[int], list[int], list[str], list[int]]:
        """Return first, second, span and weight as lists."""
        return self.first.tolist(), self.second.tolist(), self.spans, self.weights.tolist()


def find_pairs(
    documents: Sequence[Sequence[str]], rule: Rule, *, titled: bool = False, max_uses: int | None = None
) -> Pairs:
    """Return the pairs of several documents of normalized sentences, sorted.

    ``titled`` pairs only the first sentence of each document with its others.
    """
    if max_uses is not None and max_uses < 1:
        raise ConfigError(f"max_uses={max_uses} leaves no sentence to be used; 1 is the least")
    texts = Texts(documents, rule.weights)
    title = np.zeros(len(texts), dtype=bool)
    title[np.flatnonzero(np.diff(texts.document, prepend=-1))] = True
    title_only = title if titled else None
    shared = share(texts, find_windows(texts, rule.threshold), title_only)
    meetings = Meetings(texts, shared)
    sides = [Side(meetings, None)]
    if rule.short_threshold is not None:
        shared = share(texts, find_windows(texts, rule.short_threshold), title_only)
        meetings = Meetings(texts, shared)
        sides.append(Side(meetings, rule.short(texts), both=rule.short_characters is not None))
    if max_uses is None or titled:
        first, second = all_pairs(len(texts), sides, title_only)
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
