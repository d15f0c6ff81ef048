"""Finds the heaviest common substring of pairs of sentences that are known to share a window.

It begins with a shared window, at two places before which the symbols differ (or a sentence begins): anything else
could be made longer. So only such places are followed to the right. Where a pair has very many of them (``aaaa...``),
a search over the weight takes their place.

Shapes: p pairs, m shared windows, M meetings: a sentence's windows in one group.

Knows: windows. Does not know: which pairs are wanted, or why.
"""

from dataclasses import dataclass

import numpy as np

from gerund.data.mining.windows import CHUNK, NOTHING, SPACE, Shared, Texts, common_prefixes, find_windows

# A pair with more seeds than this for each of its symbols is searched in another way.
_SEEDS_A_SYMBOL = 4


@dataclass(frozen=True)
class Spans:
    """The heaviest common substring of each pair; of several, the leftmost in the first sentence.

    Attributes:
        starts: ``(p,)`` int64, where in the texts it begins, within the pair's first sentence.
        ends: ``(p,)`` int64, where it ends.
        weights: ``(p,)`` int64, what it weighs.
    """

    starts: np.ndarray
    ends: np.ndarray
    weights: np.ndarray


class Meetings:
    """Shared windows by sentence and group.

    Attributes:
        sentence: ``(M,)`` int64, in the order of groups, and within a group ascending.
        group: ``(M,)`` int64.
        first: ``(M,)`` int64, the first of the sentence's windows in the group.
        count: ``(M,)`` int64, how many there are.
    """

    def __init__(self, texts: Texts, shared: Shared) -> None:
        sentence = texts.sentence[shared.places].astype(np.int64)
        new = np.ones(len(sentence), dtype=bool)
        new[1:] = (sentence[1:] != sentence[:-1]) | (shared.group[1:] != shared.group[:-1])
        self.first = np.flatnonzero(new)
        self.count = np.diff(np.append(self.first, len(sentence)))
        self.sentence = sentence[self.first]
        # Numbered without gaps.
        _, self.group = np.unique(shared.group[self.first], return_inverse=True)


def heaviest_spans(texts: Texts, shared: Shared, meetings: Meetings, first: np.ndarray, second: np.ndarray) -> Spans:
    """Return the heaviest common substring of each pair of sentences.

    Args:
        texts: the sentences.
        shared: their shared windows of a threshold that the span of every pair reaches.
        meetings: the same by sentence.
        first: ``(p,)``, the sentence of each pair that counts for ties.
        second: ``(p,)``, the other.
    """
    spans = Spans(*(np.zeros(len(first), dtype=np.int64) for _ in range(3)))
    by_sentence = np.argsort(meetings.sentence, kind="stable")
    bounds = np.searchsorted(meetings.sentence[by_sentence], np.arange(len(texts) + 1))
    groups = int(meetings.group[-1]) + 1 if len(meetings.group) else 0
    finder = _Finder(texts, shared, meetings, by_sentence, bounds, groups)
    cost = np.minimum(np.diff(bounds)[first], np.diff(bounds)[second])
    for rows in slices(cost, CHUNK // 4):
        finder.find(np.arange(len(first))[rows], first[rows], second[rows], spans)
    return spans


def heaviest_span(texts: Texts, i: int, j: int, at_least: int = 1) -> tuple[int, int]:
    """Return where the heaviest common substring of two sentences lies in the first, by a search over the weight.

    Sharing a window of some weight implies sharing one of every smaller weight. Each step takes time linear in the
    lengths but for a sort.

    Args:
        texts: the sentences.
        i: the sentence whose leftmost one counts.
        j: the other.
        at_least: a weight that is known to be shared.
    """
    a, b = texts.text(i), texts.text(j)
    start = int(texts.bounds[i])
    if a in b:
        return start, start + len(a)
    if (place := a.find(b)) >= 0:
        return start + place, start + place + len(b)
    pair = Texts([[a, b]], texts.weights)
    low, high = at_least, int(pair.total_weights().min()) + 1
    best = _shared_stretch(pair, low)
    assert best is not None
    while high - low > 1:
        middle = (low + high) // 2
        found = _shared_stretch(pair, middle)
        if found is None:
            high = middle
        else:
            # What is shared may weigh more than was asked for.
            best, low = found, int(pair.weight[found[1]] - pair.weight[found[0]])
    return start + best[0], start + best[1]


class _Finder:
    """Finds the spans of some pairs at a time."""

    def __init__(
        self, texts: Texts, shared: Shared, meetings: Meetings, by_sentence: np.ndarray, bounds: np.ndarray, groups: int
    ) -> None:
        self.texts, self.shared, self.meetings = texts, shared, meetings
        self.by_sentence, self.bounds, self.groups = by_sentence, bounds, groups
        self.keys = meetings.sentence[by_sentence] * groups + meetings.group[by_sentence]

    def find(self, rows: np.ndarray, first: np.ndarray, second: np.ndarray, spans: Spans) -> None:
        """Put the spans of the pairs into their rows."""
        pair, mine, other = self._common_groups(first, second)
        seeds = self.meetings.count[mine] * self.meetings.count[other]
        lengths = np.diff(self.texts.bounds)
        many = np.bincount(pair, weights=seeds, minlength=len(rows))
        heavy = many > 64 + _SEEDS_A_SYMBOL * (lengths[first] + lengths[second])
        for row in np.flatnonzero(heavy).tolist():
            start, end = np.array(heaviest_span(self.texts, int(first[row]), int(second[row])))
            _keep(spans, rows[row], start, end, self.texts.weight)
        light = ~heavy[pair]
        pair, mine, other, seeds = pair[light], mine[light], other[light], seeds[light]
        best: list[np.ndarray] = []
        for part in slices(seeds, CHUNK // 4):
            best.append(self._heads(pair[part], mine[part], other[part], seeds[part], first, second))
        heads = np.concatenate(best, axis=1) if best else np.empty((3, 0), dtype=np.int64)
        pair, start, end = heads[:, _best_of_each(heads, self.texts.weight)]
        _keep(spans, rows[pair], start, end, self.texts.weight)

    def _common_groups(self, first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return pair, and the meetings of its first and its second sentence, for each group that both are in."""
        sizes = np.diff(self.bounds)
        swapped = sizes[second] < sizes[first]
        few, many = np.where(swapped, second, first), np.where(swapped, first, second)
        pair = np.repeat(np.arange(len(few)), sizes[few])
        mine = self.by_sentence[ranges(self.bounds[few], sizes[few])]
        wanted = many[pair] * self.groups + self.meetings.group[mine]
        place = np.minimum(np.searchsorted(self.keys, wanted), len(self.keys) - 1)
        there = self.keys[place] == wanted
        pair, mine, other = pair[there], mine[there], self.by_sentence[place[there]]
        turned = swapped[pair]
        return pair, np.where(turned, other, mine), np.where(turned, mine, other)

    def _heads(
        self,
        pair: np.ndarray,
        mine: np.ndarray,
        other: np.ndarray,
        seeds: np.ndarray,
        first: np.ndarray,
        second: np.ndarray,
    ) -> np.ndarray:
        """Return pair, start and end of the common substrings that nothing can be put before, ``(3, h)``."""
        texts, meetings = self.texts, self.meetings
        row = np.repeat(np.arange(len(seeds)), seeds)
        step = ranges(np.zeros(len(seeds), dtype=np.int64), seeds)
        width = meetings.count[other][row]
        a = self.shared.places[meetings.first[mine][row] + step // width]
        b = self.shared.places[meetings.first[other][row] + step % width]
        left = texts.left[a]
        head = (left != texts.left[b]) | (left == NOTHING)
        a, b, pair = a[head], b[head], pair[row[head]]
        limit = np.minimum(texts.bounds[first[pair] + 1] - a, texts.bounds[second[pair] + 1] - b)
        end = a + common_prefixes(texts.codes, a, b, limit)
        return np.stack([pair, a, end - (texts.codes[end - 1] == SPACE)])


def _best_of_each(heads: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Return which head of each pair is the heaviest, and of equally heavy ones the leftmost."""
    pair, start, end = heads
    order = np.lexsort((start, weight[start] - weight[end], pair))
    new = np.ones(len(order), dtype=bool)
    new[1:] = pair[order][1:] != pair[order][:-1]
    return order[new]


def _keep(spans: Spans, rows: np.ndarray, start: np.ndarray, end: np.ndarray, weight: np.ndarray) -> None:
    spans.starts[rows], spans.ends[rows], spans.weights[rows] = start, end, weight[end] - weight[start]


def _shared_stretch(pair: Texts, weight: int) -> tuple[int, int] | None:
    """Return the leftmost window of a weight in the first of two sentences that the second has too."""
    windows = find_windows(pair, weight)
    split = int(np.searchsorted(windows.starts, pair.bounds[1]))
    starts, others = windows.starts[:split], windows.starts[split:]
    hashes, other_hashes = windows.hashes[:split], windows.hashes[split:]
    order = np.argsort(other_hashes, kind="stable")
    for place in np.flatnonzero(np.isin(hashes, other_hashes)).tolist():
        start = int(starts[place])
        end = int(windows.ends[start])
        low = int(np.searchsorted(other_hashes[order], hashes[place], side="left"))
        high = int(np.searchsorted(other_hashes[order], hashes[place], side="right"))
        symbols = pair.codes[start:end].tobytes()
        for other in others[order[low:high]].tolist():
            if pair.codes[other : other + end - start].tobytes() == symbols:
                return start, end
    return None


def ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the numbers from each start on, so many each, behind one another.

    >>> ranges(np.array([5, 0]), np.array([2, 3])).tolist()
    [5, 6, 0, 1, 2]
    """
    before = np.cumsum(counts) - counts
    return np.arange(int(counts.sum())) + np.repeat(starts - before, counts)


def slices(costs: np.ndarray, most: int) -> list[slice]:
    """Cut rows into slices that cost at most so much together, or are a single row.

    >>> slices(np.array([3, 3, 9, 1, 1]), 6)
    [slice(0, 2, None), slice(2, 3, None), slice(3, 5, None)]
    """
    total = np.cumsum(costs)
    found, start = [], 0
    while start < len(costs):
        before = int(total[start - 1]) if start else 0
        end = max(int(np.searchsorted(total, before + most, side="right")), start + 1)
        found.append(slice(start, end))
        start = end
    return found
