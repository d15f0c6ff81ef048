"""Confidence intervals of scores, and significance tests between two systems.

The interval is the percentile bootstrap's: examples are sampled with replacement. Two means over the same examples
are compared by the randomization test, which flips the signs of their differences; two correlations by the bootstrap
of their difference, since no sign can be flipped there. Both are the tests that the field recommends (Smucker et al.,
2007, for retrieval; Dror et al., 2018, for language).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from gerund.evaluation.task import Examples

LEVEL = 0.95
"""Of all intervals."""
RESAMPLES = 2000
"""Of the bootstrap."""
FLIPS = 9999
"""Of the randomization test; where there are no more possible ones than these, all are tried."""
FEWEST = 2
# Numbers that are sampled per batch: 64 MB.
_PER_BATCH = 1 << 23


@dataclass(frozen=True)
class Interval:
    """Where the score would be for other examples of the same kind, in 95 of 100 cases."""

    low: float
    high: float


@dataclass(frozen=True)
class Difference:
    """How much better one system is than another on the same ``examples``.

    ``p`` is how often chance alone makes a difference as large, on either side.
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
    values = np.array(examples.values)
    if examples.targets is None:
        return _bootstrap((values,), np.mean, seed)[0]
    return _bootstrap((values, np.array(examples.targets)), _spearman, seed)[0]


def difference_of(ours: Examples, theirs: Examples, *, seed: int = 0) -> Difference | None:
    """Return how much better ``one`` is; None where the two were not measured on the same examples, or on too few.

    >>> difference = difference_of(Examples.of_mean([1, 1, 1, 1]), Examples.of_mean([0, 0, 0, 0]))
    >>> difference.value, difference.p
    (1.0, 0.125)
    """
    same = (ours.statistic, ours.targets) == (theirs.statistic, theirs.targets) and set(ours.ids) == set(theirs.ids)
    if not same or len(ours.values) < FEWEST or len(set(ours.ids)) < len(ours.ids):
        return None
    row = {name: row for row, name in enumerate(theirs.ids)}
    first, second = np.array(ours.values), np.array([theirs.values[row[name]] for name in ours.ids])
    if ours.targets is None:
        gaps = first - second
        return Difference(
            float(gaps.mean()), _bootstrap((gaps,), np.mean, seed)[0], _randomization(gaps, seed), len(first)
        )
    if ours.ids != theirs.ids:
        return None

    def gap(first_RN: np.ndarray, second_RN: np.ndarray, targets_RN: np.ndarray, axis: int = -1) -> np.ndarray:
        return _spearman(first_RN, targets_RN, axis) - _spearman(second_RN, targets_RN, axis)

    targets = np.array(ours.targets)
    interval, resampled = _bootstrap((first, second, targets), gap, seed)
    # Twice the smaller part of the differences on one side of zero; never quite 0.
    least = min(int((resampled <= 0).sum()), int((resampled >= 0).sum()))
    p = min(1.0, 2 * (least + 1) / (len(resampled) + 1))
    return Difference(float(gap(first, second, targets)), interval, p, len(first))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p values corrected for the number of comparisons (Holm, 1979), in the given order.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    order = np.argsort(p_values, kind="stable")
    corrected = np.minimum(1.0, np.arange(len(order), 0, -1) * np.array(p_values)[order])
    adjusted = np.empty(len(order))
    adjusted[order] = np.maximum.accumulate(corrected)
    return [float(p) for p in adjusted]


def _bootstrap(columns: Sequence[np.ndarray], statistic: Callable, seed: int) -> tuple[Interval, np.ndarray]:
    """Return the percentile interval and the statistic of every sample; a sample has the same rows in all columns."""
    from scipy.stats import bootstrap

    result = bootstrap(
        columns,
        statistic,
        paired=len(columns) > 1,
        vectorized=True,
        n_resamples=RESAMPLES,
        batch=max(1, _PER_BATCH // len(columns[0])),
        confidence_level=LEVEL,
        method="percentile",
        random_state=np.random.default_rng(seed),
    )
    return Interval(*map(float, result.confidence_interval)), result.bootstrap_distribution


def _spearman(values_RN: np.ndarray, targets_RN: np.ndarray, axis: int = -1) -> np.ndarray:
    """Return the correlation of the ranks in each row; 0 where a row is constant, as the metric is shown."""
    from scipy.stats import rankdata

    centered = []
    for numbers_RN in (values_RN, targets_RN):
        ranks_RN = rankdata(numbers_RN, axis=axis)
        centered.append(ranks_RN - ranks_RN.mean(axis=axis, keepdims=True))
    above = (centered[0] * centered[1]).sum(axis=axis)
    below = np.sqrt((centered[0] ** 2).sum(axis=axis) * (centered[1] ** 2).sum(axis=axis))
    return np.asarray(np.divide(above, below, out=np.zeros_like(above), where=below > 0))


def _randomization(differences: np.ndarray, seed: int) -> float:
    """Return the two-sided p value of a mean difference by flipping signs."""
    from scipy.stats import permutation_test

    # What is equal in both systems stays as it is under any flip; and a single flip is as large as none.
    unequal = differences[differences != 0]
    if len(unequal) < FEWEST:
        return 1.0
    result = permutation_test(
        (unequal,),
        np.sum,
        permutation_type="samples",
        vectorized=True,
        n_resamples=FLIPS,
        batch=max(1, _PER_BATCH // len(unequal)),
        random_state=np.random.default_rng(seed),
    )
    return float(result.pvalue) if math.isfinite(result.pvalue) else 1.0
