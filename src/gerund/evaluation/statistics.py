"""How sure a score is, and whether one system is better than another by more than chance.

The interval is the percentile bootstrap's: examples are sampled with replacement. Two means over the same examples
are compared by the randomisation test, which flips the signs of their differences; two correlations by the bootstrap
of their difference, since no sign can be flipped there. Both are the tests that the field recommends (Smucker et al.,
2007, for retrieval; Dror et al., 2018, for language).

Knows: scipy, examples. Does not know: tasks, systems, reports.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gerund.evaluation.task import Examples

LEVEL = 0.95
"""Of all intervals."""
RESAMPLES = 2000
"""Of the bootstrap."""
FLIPS = 9999
"""Of the randomisation test; where there are no more possible ones than these, all are tried."""
FEWEST = 2
# Numbers that are sampled at a time: 64 MB.
_AT_ONCE = 1 << 23


@dataclass(frozen=True)
class Interval:
    """Where the score would lie for other examples of the same kind, in 95 of 100 cases."""

    low: float
    high: float


@dataclass(frozen=True)
class Difference:
    """How much better one system is than another on the same examples.

    Attributes:
        value: the difference of their scores.
        interval: of that difference.
        p: how often chance alone makes a difference as large, on either side.
        examples: on how many examples.
    """

    value: float
    interval: Interval
    p: float
    examples: int


def interval_of(examples: Examples, *, seed: int = 0) -> Interval | None:
    """Return the confidence interval of a score; None where there are too few examples.

    >>> interval_of(Examples.of_mean([0.5, 0.5, 0.5]))
    Interval(low=0.5, high=0.5)
    """
    if len(examples.values) < FEWEST:
        return None
    return _interval(_resampled(_columns(examples), _statistic(examples), seed))


def difference_of(one: Examples, other: Examples, *, seed: int = 0) -> Difference | None:
    """Return how much better ``one`` is; None where the two were not measured on the same examples, or on too few.

    >>> difference = difference_of(Examples.of_mean([1, 1, 1, 1]), Examples.of_mean([0, 0, 0, 0]))
    >>> difference.value, difference.p
    (1.0, 0.125)
    """
    same = (one.statistic, one.targets) == (other.statistic, other.targets) and set(one.ids) == set(other.ids)
    if not same or len(one.values) < FEWEST or len(set(one.ids)) < len(one.ids):
        return None
    place = {name: row for row, name in enumerate(other.ids)}
    first, second = np.array(one.values), np.array([other.values[place[name]] for name in one.ids])
    if one.targets is None:
        columns, statistic = (first - second,), _mean
        p = _randomisation(columns[0], seed)
        resampled = _resampled(columns, statistic, seed)
        value = float(columns[0].mean())
    else:
        if one.ids != other.ids:
            return None
        targets = np.array(one.targets)

        def gap(first_RN: np.ndarray, second_RN: np.ndarray, targets_RN: np.ndarray) -> np.ndarray:
            return _spearman(first_RN, targets_RN) - _spearman(second_RN, targets_RN)

        resampled = _resampled((first, second, targets), gap, seed)
        value = float(gap(first[None], second[None], targets[None])[0])
        p = _both_sides(resampled)
    return Difference(value, _interval(resampled), p, len(first))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p values that allow for how many comparisons there are (Holm, 1979), in the given order.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    order = sorted(range(len(p_values)), key=lambda place: p_values[place])
    found, largest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[place]))
        found[place] = largest
    return found


def _columns(examples: Examples) -> tuple[np.ndarray, ...]:
    values = np.array(examples.values)
    return (values,) if examples.targets is None else (values, np.array(examples.targets))


def _statistic(examples: Examples) -> Any:
    return _mean if examples.targets is None else _spearman


def _mean(values_RN: np.ndarray) -> np.ndarray:
    return np.asarray(values_RN.mean(axis=-1))


def _spearman(values_RN: np.ndarray, targets_RN: np.ndarray) -> np.ndarray:
    """Return the correlation of the ranks in each row; 0 where a row is constant, as the metric is shown."""
    from scipy.stats import rankdata

    centred = []
    for numbers_RN in (values_RN, targets_RN):
        ranks_RN = rankdata(numbers_RN, axis=-1)
        centred.append(ranks_RN - ranks_RN.mean(axis=-1, keepdims=True))
    above = (centred[0] * centred[1]).sum(axis=-1)
    below = np.sqrt((centred[0] ** 2).sum(axis=-1) * (centred[1] ** 2).sum(axis=-1))
    return np.asarray(np.divide(above, below, out=np.zeros_like(above), where=below > 0))


def _resampled(columns: Sequence[np.ndarray], statistic: Any, seed: int) -> np.ndarray:
    """Return the statistic of every bootstrap sample; the same row is sampled in all columns."""
    rng = np.random.default_rng(seed)
    count = len(columns[0])
    at_once = max(1, _AT_ONCE // count)
    found = []
    for start in range(0, RESAMPLES, at_once):
        rows_RN = rng.integers(0, count, size=(min(at_once, RESAMPLES - start), count))
        found.append(statistic(*(column[rows_RN] for column in columns)))
    return np.concatenate(found)


def _interval(resampled: np.ndarray) -> Interval:
    low, high = np.quantile(resampled, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(low), float(high))


def _both_sides(resampled: np.ndarray) -> float:
    """Return twice the smaller part of the differences that lie on one side of none; never quite 0."""
    least = min(int((resampled <= 0).sum()), int((resampled >= 0).sum()))
    return min(1.0, 2 * (least + 1) / (len(resampled) + 1))


def _randomisation(differences: np.ndarray, seed: int) -> float:
    """Return the two-sided p value of a mean difference by flipping signs."""
    from scipy.stats import permutation_test

    # What is equal in both systems stays as it is under any flip; and a single flip is as large as none.
    telling = differences[differences != 0]
    if len(telling) < FEWEST:
        return 1.0

    def summed(flipped: np.ndarray, axis: int = -1) -> np.ndarray:
        return np.asarray(flipped.sum(axis=axis))

    found = permutation_test(
        (telling,),
        summed,
        permutation_type="samples",
        vectorized=True,
        n_resamples=FLIPS,
        batch=max(1, _AT_ONCE // len(telling)),
        random_state=np.random.default_rng(seed),
    )
    return float(found.pvalue) if math.isfinite(found.pvalue) else 1.0
