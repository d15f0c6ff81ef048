"""Finds the windows that sentences of a document share.

A window is the shortest stretch from a place on that weighs at least the threshold. Two texts share a substring of
that weight exactly when they share a window: the substring begins with one. So instead of comparing sentences pair by
pair (GUR, section III-B, step 3), every window is hashed once and equal hashes are grouped; all documents of a batch
go through together, with the document's number in the hash.

Substrings and windows neither begin nor end with a space: GUR's Figure 2 counts "is chasing" of " is chasing ", which
would be heavy enough with its spaces.

A hash only brings windows together: whatever is reported was compared symbol by symbol.

Shapes: N symbols of all sentences, n sentences, m shared windows.

Knows: symbols, hashes. Does not know: which pairs of sentences are wanted.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gerund.data.mining.symbols import SymbolWeights, code_points

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
    """The sentences of some documents behind one another.

    Attributes:
        weights: what symbols weigh.
        codes: ``(N,)`` uint32, their symbols.
        left: ``(N,)`` uint32, the symbol before each, ``NOTHING`` at the start of a sentence; behind a space the one
            before that, with ``BEHIND_SPACE`` added.
        weight: ``(N + 1,)`` int64, the weight of all symbols before a place.
        bounds: ``(n + 1,)`` int64, where the sentences begin and the last one ends.
        sentence: ``(N,)`` int32, which sentence a symbol belongs to.
        document: ``(n,)`` int32, which document a sentence belongs to.
    """

    def __init__(self, documents: Sequence[Sequence[str]], weights: SymbolWeights) -> None:
        """Lay out normalised sentences (no space beside another or at an end), document by document."""
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
        """Return how many sentences there are."""
        return len(self.bounds) - 1

    def total_weights(self) -> np.ndarray:
        """Return what each sentence weighs, ``(n,)`` int64."""
        return self.weight[self.bounds[1:]] - self.weight[self.bounds[:-1]]

    def text(self, sentence: int) -> str:
        """Return a sentence."""
        return self.stretch(self.bounds[sentence], self.bounds[sentence + 1])

    def stretch(self, start: int, end: int) -> str:
        """Return the symbols between two places."""
        return self._joined[start:end]


@dataclass(frozen=True)
class Windows:
    """All windows of one threshold.

    Attributes:
        starts: ``(k,)`` int64, where they begin, ascending.
        ends: ``(N,)`` int32 or int64, the end of the window that begins at a symbol; 0 where none does.
        hashes: ``(k,)`` uint64; equal windows of one document have equal hashes.
    """

    starts: np.ndarray
    ends: np.ndarray
    hashes: np.ndarray


def find_windows(texts: Texts, threshold: int) -> Windows:
    """Return the window at every place from which its sentence weighs enough."""
    ends = _reach(texts.weight, threshold)
    last = np.repeat(texts.bounds[1:].astype(ends.dtype), np.diff(texts.bounds))
    ends[ends > last] = 0
    # A window that is reached by a space goes on to the symbol behind it.
    space = texts.codes == SPACE
    ends += (ends > 0) & space[ends - 1]
    starts = np.flatnonzero((ends > 0) & ~space)
    return Windows(starts, ends, mixed(_hashes(texts, starts, ends), texts.document[texts.sentence[starts]]))


def mixed(hashes: np.ndarray, document: np.ndarray) -> np.ndarray:
    """Return hashes with the document in them and their bits well spread, ``(k,)`` uint64."""
    hashes = hashes + document.astype(np.uint64) * _DOCUMENT
    hashes ^= hashes >> np.uint64(29)
    hashes *= _MIX
    return hashes ^ (hashes >> np.uint64(32))


@dataclass(frozen=True)
class Shared:
    """Windows that several sentences of a document share, in groups of equal ones.

    Of the groups that only continue another one (every member is the right neighbour of a member there) the first
    stands for all: a pair of sentences that meets in one of them meets there too. So two equal sentences meet once, and
    not at each of their symbols.

    Attributes:
        places: ``(m,)`` int64, where the windows begin, ascending in each group.
        group: ``(m,)`` int64, the group of each, ascending.
    """

    places: np.ndarray
    group: np.ndarray


def share(texts: Texts, windows: Windows, wanted: np.ndarray | None = None) -> Shared:
    """Return the windows that at least two sentences of a document have.

    Args:
        texts: the sentences.
        windows: their windows.
        wanted: ``(n,)`` bool, sentences of which one must be in every group; None for any.
    """
    starts, hashes = windows.starts, windows.hashes
    if wanted is None:
        ordered = np.sort(hashes)
        looked_for = ordered[1:][ordered[1:] == ordered[:-1]]
        looked_for = looked_for[_changes(looked_for)]
    else:
        looked_for = np.unique(hashes[wanted[texts.sentence[starts]]])
    found, group = _members(hashes, looked_for)
    # One key for group and place: numbers sort faster than columns.
    size = len(texts.codes)
    key = np.sort(group * size + starts[found])
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
    """Return for each symbol the first place by which ``threshold`` is reached, beyond the end where it is not."""
    size, total = len(weight) - 1, int(weight[-1])
    if total > 16 * size:
        return np.searchsorted(weight, weight[:-1] + threshold)
    # Which symbol brings a unit of weight: a table to look up is quicker than a search.
    small = np.int32 if size < 2**31 - 2 else np.int64
    bringer = np.repeat(np.arange(1, size + 1, dtype=small), np.diff(weight))
    ends = np.full(size, size + 1, dtype=small)
    enough = int(np.searchsorted(weight, total - threshold, side="right")) if total >= threshold else 0
    ends[:enough] = bringer[weight[:enough] + (threshold - 1)]
    return ends


def _hashes(texts: Texts, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Return a polynomial hash of each window, modulo 2**64.

    The difference of two prefix sums is the window's polynomial times a power of where it begins; multiplying by the
    power that is missing to N makes all windows alike.
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
    """Return which hashes are among the looked for, and which of those each is; ``looked_for`` is ascending."""
    if not len(looked_for):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    # A table of bits lets most of the others go without a search.
    bits = np.uint64(min(max(int(8 * len(looked_for)).bit_length(), 10), 24))
    shift = np.uint64(64) - bits
    table = np.zeros(1 << int(bits), dtype=bool)
    table[looked_for >> shift] = True
    found = np.flatnonzero(table[hashes >> shift])
    group = np.minimum(np.searchsorted(looked_for, hashes[found]), len(looked_for) - 1)
    right = looked_for[group] == hashes[found]
    return found[right], group[right]


def _changes(values: np.ndarray) -> np.ndarray:
    """Return where a value differs from the one before it; the first one does."""
    changes = np.ones(len(values), dtype=bool)
    np.not_equal(values[1:], values[:-1], out=changes[1:])
    return changes


def _worthwhile(texts: Texts, shared: Shared) -> Shared:
    """Return the groups that have two sentences and do not only continue another group.

    That holds of hashes as well as of windows: where two equal windows have equal symbols before them, the windows
    from there on are equal too, so they meet in a group of their own, and so on to one that is kept.
    """
    if not len(shared.group):
        return shared
    first = np.flatnonzero(_changes(shared.group))
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
