"""Find substrings that sentences of a document share, and how much they weigh (GUR, section III-B).

A window is the shortest stretch from a place on that weighs at least the threshold. Two texts share a substring of
that weight exactly when they share a window: the substring begins with one. So instead of comparing sentences pair by
pair (GUR, section III-B, step 3), every window is hashed once and equal hashes are grouped; all documents of a batch
go through together, with the document's number in the hash. A hash only brings windows together: every reported
match was compared symbol by symbol.

The heaviest common substring of a pair begins with a shared window, at two places before which the symbols differ (or
a sentence begins): anything else could be made longer. So only such places are followed to the right. Where a pair has
very many of them (``aaaa...``), a binary search over the weight replaces this.

Substrings and windows neither begin nor end with a space: GUR's Figure 2 counts "is chasing" of " is chasing ", which
would be heavy enough with its spaces. GUR compares "normalized versions" of sentences without saying which; its Figure
2 lets 14 Latin letters pass and 9 not, and section IV-A takes two or three Chinese characters. The released code weighs
1, 0.3 and 0.1 in floating point, where ten letters come to 2.999...; here the weights are whole numbers.

Shapes: N symbols of all sentences, n sentences, m shared windows, M meetings (a sentence's windows in one group),
p pairs.
"""

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from gerund.errors import ConfigError
from gerund.text_analysis import normalized

# Letters beyond this code point (the released code's 10000) say as much as several Latin letters: Han, kana, Hangul...
LAST_LIGHT_LETTER = 0x2710
_CODE_POINTS = 0x110000
# The planes from here on have no letters: unassigned, tags, private use.
_BEYOND_LETTERS = 0x40000


@dataclass(frozen=True)
class SymbolWeights:
    """What a symbol adds to the weight of a substring."""

    wide: int = 10  # a letter (Unicode category L) beyond U+2710: Han, kana, Hangul and others
    letter: int = 3  # any other letter
    other: int = 1  # anything else: spaces, digits, punctuation, combining marks

    def __post_init__(self) -> None:
        for name in ("wide", "letter", "other"):
            value = getattr(self, name)
            # With weight 0 a symbol could be added to any substring, so that the heaviest would not be unique.
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 1_000_000:
                raise ConfigError(f"the weight of a symbol is a whole number from 1 to 1,000,000, and {name}={value!r}")

    def of(self, codes: np.ndarray) -> np.ndarray:
        """Return the weight of each code point: ``(n,)`` uint32 to ``(n,)`` int64.

        >>> SymbolWeights().of(np.array([ord(symbol) for symbol in "aé 7汉"])).tolist()
        [3, 3, 1, 1, 10]
        """
        return np.array([self.other, self.letter, self.wide], dtype=np.int64)[_kinds()[codes]]

    def of_text(self, text: str) -> int:
        """Return the weight of a text.

        >>> SymbolWeights().of_text("spike is chasing ")
        45
        """
        return int(self.of(code_points(text)).sum())


def normalised(text: str) -> str:
    r"""Return the form in which texts are compared: Unicode-normalized, lower case, with single spaces.

    >>> normalised("  Spike\n is　ＣＨＡＳＩＮＧ Tom. ")
    'spike is chasing tom.'
    """
    return " ".join(normalized(text).lower().split())


def code_points(text: str) -> np.ndarray:
    """Return a text's code points, ``(n,)`` uint32, with lone surrogates."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")


@cache
def _kinds() -> np.ndarray:
    """Return the kind of each code point: 1 for a letter, 2 for a letter beyond ``LAST_LIGHT_LETTER``, 0 otherwise."""
    kinds = np.zeros(_CODE_POINTS, dtype=np.uint8)
    kinds[:_BEYOND_LETTERS] = [unicodedata.category(chr(code))[0] == "L" for code in range(_BEYOND_LETTERS)]
    kinds[LAST_LIGHT_LETTER + 1 :] *= 2
    kinds.setflags(write=False)
    return kinds


# Left of a sentence's first symbol; no code point.
NOTHING = np.uint32(0xFFFFFFFF)
# No code point has this bit.
BEHIND_SPACE = np.uint32(0x80000000)
SPACE = np.uint32(0x20)
_BASE = np.uint64(0x9E3779B97F4A7C15)
_DOCUMENT = np.uint64(0xD1342543DE82EF95)
_MIX = np.uint64(0xFF51AFD7ED558CCD)
# Elements of an intermediate array at most.
CHUNK = 2**20


class Texts:
    """The normalized sentences of some documents (no double or outer spaces), concatenated.

    Attributes:
        codes: ``(N,)`` uint32, their symbols.
        left: ``(N,)`` uint32, the symbol before each, ``NOTHING`` at the start of a sentence; after a space the symbol
            before that, with ``BEHIND_SPACE`` added.
        weight: ``(N + 1,)`` int64, the weight of all symbols before a place.
        bounds: ``(n + 1,)`` int64, where the sentences begin and the last ends.
        sentence: ``(N,)`` int32, which sentence a symbol belongs to.
        document: ``(n,)`` int32, which document a sentence belongs to.
    """

    def __init__(self, documents: Sequence[Sequence[str]], weights: SymbolWeights) -> None:
        self.weights = weights
        sentences = [sentence for document in documents for sentence in document]
        self._joined = "".join(sentences)
        self.codes = code_points(self._joined)
        lengths = np.fromiter(map(len, sentences), dtype=np.int64, count=len(sentences))
        self.bounds = np.concatenate([[0], np.cumsum(lengths)])
        self.sentence = np.repeat(np.arange(len(sentences), dtype=np.int32), lengths)
        self.document = np.repeat(
            np.arange(len(documents), dtype=np.int32), np.fromiter(map(len, documents), np.int64, len(documents))
        )
        self.weight = np.zeros(len(self.codes) + 1, dtype=np.int64)
        np.cumsum(weights.of(self.codes), out=self.weight[1:])
        self.left = np.empty_like(self.codes)
        self.left[1:] = self.codes[:-1]
        self.left[self.bounds[:-1][lengths > 0]] = NOTHING
        behind = np.flatnonzero(self.left == SPACE)
        self.left[behind] = self.codes[behind - 2] | BEHIND_SPACE

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def total_weights(self) -> np.ndarray:
        """Return the weight of each sentence, ``(n,)`` int64."""
        return self.weight[self.bounds[1:]] - self.weight[self.bounds[:-1]]

    def text(self, sentence: int) -> str:
        """Return a sentence."""
        return self.stretch(self.bounds[sentence], self.bounds[sentence + 1])

    def stretch(self, start: int, end: int) -> str:
        """Return the symbols between two places."""
        return self._joined[start:end]


@dataclass(frozen=True)
class Windows:
    """All windows of one threshold."""

    starts: np.ndarray  # ``(k,)`` int64, where they begin, ascending
    ends: np.ndarray  # ``(N,)`` int32 or int64, the end of the window that begins at a symbol; 0 where none does
    hashes: np.ndarray  # ``(k,)`` uint64; equal windows of one document have equal hashes


def find_windows(texts: Texts, threshold: int) -> Windows:
    """Return the window at every place from which its sentence weighs enough."""
    ends = _reach(texts.weight, threshold)
    last = np.repeat(texts.bounds[1:].astype(ends.dtype), np.diff(texts.bounds))
    ends[ends > last] = 0
    # A window that would end with a space extends to the symbol after it.
    space = texts.codes == SPACE
    ends += (ends > 0) & space[ends - 1]
    starts = np.flatnonzero((ends > 0) & ~space)
    return Windows(starts, ends, mixed(_hashes(texts, starts, ends), texts.document[texts.sentence[starts]]))


def mixed(hashes: np.ndarray, document: np.ndarray) -> np.ndarray:
    """Mix the document into hashes and spread their bits, ``(k,)`` uint64."""
    hashes = hashes + document.astype(np.uint64) * _DOCUMENT
    hashes ^= hashes >> np.uint64(29)
    hashes *= _MIX
    return hashes ^ (hashes >> np.uint64(32))


@dataclass(frozen=True)
class Shared:
    """Windows that several sentences of a document share, in groups of equal ones.

    Of the groups that only continue another group (every member is the right neighbor of a member there) the first
    stands for all: a pair of sentences that meets in one of them meets there too. So two equal sentences meet once, and
    not at each of their symbols.
    """

    places: np.ndarray  # ``(m,)`` int64, where the windows begin, ascending in each group
    group: np.ndarray  # ``(m,)`` int64, the group of each, ascending


def share(texts: Texts, windows: Windows, wanted: np.ndarray | None = None) -> Shared:
    """Return the windows that at least two sentences of a document share, one of them in ``wanted`` ``(n,)`` bool."""
    starts, hashes = windows.starts, windows.hashes
    if wanted is None:
        ordered = np.sort(hashes)
        looked_for = ordered[1:][ordered[1:] == ordered[:-1]]
        looked_for = looked_for[changes(looked_for)]
    else:
        looked_for = np.unique(hashes[wanted[texts.sentence[starts]]])
    places, group = _members(hashes, looked_for)
    # One key for group and place, since integers sort faster than columns.
    size = len(texts.codes)
    key = np.sort(group * size + starts[places])
    group = key // max(size, 1)
    shared = _worthwhile(texts, Shared(key - group * size, group))
    return _verified(texts, windows, shared)


def common_prefixes(codes: np.ndarray, a: np.ndarray, b: np.ndarray, limit: np.ndarray) -> np.ndarray:
    """Return how many symbols agree from each of two places on: ``(r,)``, at most ``limit``."""
    agreeing = np.zeros(len(a), dtype=np.int64)
    rows, width = np.flatnonzero(limit > 0), 16
    last = len(codes) - 1
    while len(rows):
        going_on = []
        for some in range(0, len(rows), max(CHUNK // width, 1)):
            part = rows[some : some + max(CHUNK // width, 1)]
            done = agreeing[part]
            steps = np.arange(width)
            same = codes[np.minimum((a[part] + done)[:, None] + steps, last)]
            same = same == codes[np.minimum((b[part] + done)[:, None] + steps, last)]
            same &= steps < (limit[part] - done)[:, None]
            ahead = np.where(same.all(axis=1), width, same.argmin(axis=1))
            agreeing[part] = done + ahead
            going_on.append(part[(ahead == width) & (done + width < limit[part])])
        rows, width = np.concatenate(going_on), min(width * 4, CHUNK)
    return agreeing


def _reach(weight: np.ndarray, threshold: int) -> np.ndarray:
    """Return for each symbol the first place at which ``threshold`` is reached, beyond the end where it isn't."""
    size, total = len(weight) - 1, int(weight[-1])
    if total > 16 * size:
        return np.searchsorted(weight, weight[:-1] + threshold)
    # Which symbol adds each unit of weight: a lookup table is faster than a search.
    small = np.int32 if size < 2**31 - 2 else np.int64
    bringer = np.repeat(np.arange(1, size + 1, dtype=small), np.diff(weight))
    ends = np.full(size, size + 1, dtype=small)
    enough = int(np.searchsorted(weight, total - threshold, side="right")) if total >= threshold else 0
    ends[:enough] = bringer[weight[:enough] + (threshold - 1)]
    return ends


def _hashes(texts: Texts, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Return a polynomial hash of each window, modulo 2**64.

    The difference of two prefix sums is the window's polynomial times a power of its start; multiplying by the
    remaining power up to N makes all windows comparable.
    """
    size = len(texts.codes)
    powers = np.full(size + 1, _BASE)
    powers[:1] = 1
    np.cumprod(powers, out=powers)
    prefix = np.zeros(size + 1, dtype=np.uint64)
    np.cumsum((texts.codes + np.uint64(1)) * powers[:-1], out=prefix[1:])
    hashes: np.ndarray = prefix[ends[starts]] - prefix[starts]
    hashes *= powers[size - starts]
    return hashes


def _members(hashes: np.ndarray, looked_for: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of the hashes that are in ``looked_for`` (ascending), and the index of each there."""
    if not len(looked_for):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    # A Bloom-like table of bits excludes most of the others without a search.
    bits = np.uint64(min(max(int(8 * len(looked_for)).bit_length(), 10), 24))
    shift = np.uint64(64) - bits
    table = np.zeros(1 << int(bits), dtype=bool)
    table[looked_for >> shift] = True
    candidates = np.flatnonzero(table[hashes >> shift])
    group = np.minimum(np.searchsorted(looked_for, hashes[candidates]), len(looked_for) - 1)
    right = looked_for[group] == hashes[candidates]
    return candidates[right], group[right]


def changes(values: np.ndarray) -> np.ndarray:
    """Return where a value differs from the value before it; the first does."""
    differs = np.ones(len(values), dtype=bool)
    np.not_equal(values[1:], values[:-1], out=differs[1:])
    return differs


def _worthwhile(texts: Texts, shared: Shared) -> Shared:
    """Return the groups that have two sentences and do not only continue another group.

    This is valid for hashes as for windows: where two equal windows have equal symbols before them, the windows from
    there on are equal too, so they meet in a group of their own, and so on to a group that is kept.
    """
    if not len(shared.group):
        return shared
    first = np.flatnonzero(changes(shared.group))
    last = np.append(first[1:], len(shared.group)) - 1
    sentence = texts.sentence[shared.places]
    left = texts.left[shared.places]
    lowest, highest = np.minimum.reduceat(left, first), np.maximum.reduceat(left, first)
    kept = (sentence[first] != sentence[last]) & ((lowest != highest) | (highest == NOTHING))
    rows = np.repeat(kept, last - first + 1)
    return Shared(shared.places[rows], shared.group[rows])


def _verified(texts: Texts, windows: Windows, shared: Shared) -> Shared:
    """Return groups of windows that are truly equal, and truly of one document."""
    a, b = shared.places[:-1], shared.places[1:]
    together = shared.group[1:] == shared.group[:-1]
    a, b = a[together], b[together]
    length = windows.ends[a] - a
    equal = length == windows.ends[b] - b
    equal &= texts.document[texts.sentence[a]] == texts.document[texts.sentence[b]]
    equal[equal] = common_prefixes(texts.codes, a[equal], b[equal], length[equal]) == length[equal]
    if equal.all():
        return shared
    # Different windows under one hash: sort them out one by one.
    mixed_up = np.unique(shared.group[1:][together][~equal])
    rows = np.isin(shared.group, mixed_up)
    names: dict[tuple[int, int, bytes], int] = {}
    group = shared.group.copy()
    beyond = int(group[-1]) + 1
    for row in np.flatnonzero(rows).tolist():
        place = int(shared.places[row])
        document = int(texts.document[texts.sentence[place]])
        symbols = texts.codes[place : windows.ends[place]].tobytes()
        group[row] = beyond + names.setdefault((int(shared.group[row]), document, symbols), len(names))
    order = np.lexsort((shared.places, group))
    return _worthwhile(texts, Shared(shared.places[order], group[order]))


# A pair with more seeds than this for each of its symbols is searched in another way.
_SEEDS_A_SYMBOL = 4


@dataclass(frozen=True)
class Spans:
    """The heaviest common substring of each pair; of several, the leftmost in the first sentence.

    ``(p,)`` int64 each: where in the texts it begins and ends, within the pair's first sentence, and its weight.
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
        self.first = np.flatnonzero(changes(sentence) | changes(shared.group))
        self.count = np.diff(np.append(self.first, len(sentence)))
        self.sentence = sentence[self.first]
        # Numbered without gaps.
        _, self.group = np.unique(shared.group[self.first], return_inverse=True)


def heaviest_spans(texts: Texts, shared: Shared, meetings: Meetings, first: np.ndarray, second: np.ndarray) -> Spans:
    """Return the heaviest common substrings of the pairs of sentences ``first`` and ``second``, ``(p,)`` each.

    Every pair must share a window in ``shared``. Ties go to the leftmost substring in ``first``.
    """
    spans = Spans(*(np.zeros(len(first), dtype=np.int64) for _ in range(3)))
    finder = _Finder(texts, shared, meetings)
    sizes = np.diff(finder.bounds)
    cost = np.minimum(sizes[first], sizes[second])
    for rows in slices(cost, CHUNK // 4):
        finder.find(np.arange(len(first))[rows], first[rows], second[rows], spans)
    return spans


def heaviest_span(texts: Texts, i: int, j: int, at_least: int = 1) -> tuple[int, int]:
    """Return where the heaviest common substring of two sentences is in the first, by a search over the weight.

    Sharing a window of some weight implies sharing one of every smaller weight; ``at_least`` is known to be shared.
    Each step takes linear time except for a sort.
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
        stretch = _shared_stretch(pair, middle)
        if stretch is None:
            high = middle
        else:
            # The shared window may weigh more than the searched weight.
            best, low = stretch, int(pair.weight[stretch[1]] - pair.weight[stretch[0]])
    return start + best[0], start + best[1]


class _Finder:
    def __init__(self, texts: Texts, shared: Shared, meetings: Meetings) -> None:
        self.texts, self.shared, self.meetings = texts, shared, meetings
        self.by_sentence = np.argsort(meetings.sentence, kind="stable")
        sentence, group = meetings.sentence[self.by_sentence], meetings.group[self.by_sentence]
        self.bounds = np.searchsorted(sentence, np.arange(len(texts) + 1))
        self.groups = int(meetings.group[-1]) + 1 if len(group) else 0
        self.keys = sentence * self.groups + group

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
        light = np.stack([pair, mine, other, seeds])[:, ~heavy[pair]]
        best = [self._heads(light[:, part], first, second) for part in slices(light[3], CHUNK // 4)]
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
        keys = many[pair] * self.groups + self.meetings.group[mine]
        place = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        there = self.keys[place] == keys
        pair, mine, other = pair[there], mine[there], self.by_sentence[place[there]]
        turned = swapped[pair]
        return pair, np.where(turned, other, mine), np.where(turned, mine, other)

    def _heads(self, common: np.ndarray, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        """Return pair, start and end of the common substrings that nothing can be put before, ``(3, h)``.

        ``common`` has pairs, the meetings of both sentences, and their numbers of seeds.
        """
        texts, meetings = self.texts, self.meetings
        pair, mine, other, seeds = common
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
    return order[changes(pair[order])]


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
    """Return ``counts`` consecutive numbers from each start, concatenated.

    >>> ranges(np.array([5, 0]), np.array([2, 3])).tolist()
    [5, 6, 0, 1, 2]
    """
    before = np.cumsum(counts) - counts
    return np.arange(int(counts.sum())) + np.repeat(starts - before, counts)


def slices(costs: np.ndarray, most: int) -> list[slice]:
    """Cut rows into slices that cost at most ``most`` in total, or are a single row.

    >>> slices(np.array([3, 3, 9, 1, 1]), 6)
    [slice(0, 2, None), slice(2, 3, None), slice(3, 5, None)]
    """
    total = np.cumsum(costs)
    parts, start = [], 0
    while start < len(costs):
        before = int(total[start - 1]) if start else 0
        end = max(int(np.searchsorted(total, before + most, side="right")), start + 1)
        parts.append(slice(start, end))
        start = end
    return parts
