"""From groups of sentences that share a window to pairs: all of them, or so many of each sentence.

Shapes: n sentences, p pairs, M meetings.

Knows: meetings. Does not know: texts, weights, spans.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gerund.data.mining.spans import Meetings, ranges, slices
from gerund.data.mining.windows import CHUNK


@dataclass(frozen=True)
class Side:
    """Meetings that make a pair of two sentences.

    Attributes:
        meetings: who meets whom.
        short: ``(n,)`` bool, sentences of which a pair needs one; None where any two will do.
        both: whether a pair needs two of them.
    """

    meetings: Meetings
    short: np.ndarray | None = None
    both: bool = False


def all_pairs(n: int, sides: Sequence[Side], wanted: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Return every pair once, sorted.

    Args:
        n: how many sentences there are.
        sides: what makes a pair; either will do.
        wanted: ``(n,)`` bool, what the first of a pair must be; None for anything.
    """
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
            # A pair may meet in many groups: what waits must not grow far beyond what comes out.
            if sum(map(len, waiting)) > max(4 * CHUNK, len(keys)):
                keys, waiting = np.unique(np.concatenate([keys, *waiting])), []
    keys = np.unique(np.concatenate([keys, *waiting]))
    return keys // max(n, 1), keys % max(n, 1)


def greedy_pairs(n: int, sides: Sequence[Side], max_uses: int) -> tuple[np.ndarray, np.ndarray]:
    """Return pairs in their order, each unless one of its sentences has been used ``max_uses`` times already.

    Of a group only as many are looked at as may be taken, so that thousands of alike sentences do not cost their
    square.
    """
    sentence, start, stop, members = _lists(sides)
    # Where in a list the next sentence is that may still be used: shortened as sentences are used up.
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
    found: list[int] = []
    while len(found) < count:
        while following[place] != place:
            following[place] = following[following[place]]
            place = following[place]
        if place >= stop:
            break
        if used[members[place]] < max_uses:
            found.append(members[place])
        else:
            following[place] = place + 1
        place += 1
    return found


def _lists(sides: Sequence[Side]) -> tuple[np.ndarray, list[int], list[int], list[int]]:
    """Return for each sentence and group where its possible partners stand: sentence, start, stop; and the partners."""
    columns: list[list[np.ndarray]] = [[], [], [], []]
    before = 0

    def add(rows: np.ndarray, partners: np.ndarray) -> None:
        nonlocal before
        sentence, group = side.meetings.sentence, side.meetings.group
        n = int(sentence.max()) + 1
        keys = group[partners] * n + sentence[partners]
        wanted = group[rows] * n + sentence[rows]
        columns[0].append(sentence[rows])
        columns[1].append(before + np.searchsorted(keys, wanted, side="right"))
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
                # A long sentence is only a pair with a short one.
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
