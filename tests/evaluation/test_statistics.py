"""Intervals and tests against slow ones that are obviously right."""

import itertools
import random

import numpy as np
import pytest

from gerund.evaluation.statistics import difference_of, holm, interval_of
from gerund.evaluation.task import Examples, Score


def correlated(count, noise, seed):
    rng = np.random.default_rng(seed)
    ratings = rng.integers(0, 6, count).astype(float)
    values = ratings + noise * rng.normal(size=count)
    return Examples("spearman", tuple(map(str, range(count))), tuple(values), tuple(ratings))


def slow_bootstrap(examples, statistic, rounds=1500):
    """Draw rows again with replacement, one by one."""
    rng = random.Random(5)
    rows = list(zip(*examples, strict=True))
    resampled = sorted(statistic(*zip(*rng.choices(rows, k=len(rows)), strict=True)) for _ in range(rounds))
    return resampled[int(0.025 * rounds)], resampled[int(0.975 * rounds)]


def slow_spearman(values, targets):
    from scipy.stats import spearmanr

    return spearmanr(values, targets).statistic


def test_the_interval_of_a_mean():
    values = np.random.default_rng(0).random(60) ** 2
    found = interval_of(Examples.of_mean(values))
    low, high = slow_bootstrap([values], lambda own: sum(own) / len(own))
    assert (found.low, found.high) == pytest.approx((low, high), abs=0.012)
    half = 1.96 * values.std() / np.sqrt(60)
    assert found.high - found.low == pytest.approx(2 * half, rel=0.1)


def test_the_interval_of_a_correlation():
    examples = correlated(40, 2.0, 1)
    found = interval_of(examples)
    low, high = slow_bootstrap([examples.values, examples.targets], slow_spearman, rounds=400)
    assert (found.low, found.high) == pytest.approx((low, high), abs=0.06)


def test_intervals_hold_what_they_say():
    """Of samples of a known mean about 95 in 100 intervals hold it."""
    rng = np.random.default_rng(2)
    held = 0
    for _ in range(200):
        found = interval_of(Examples.of_mean(rng.normal(0.3, 0.1, size=50)))
        held += found.low <= 0.3 <= found.high
    assert 180 <= held <= 199


def test_the_randomisation_test_is_that_over_all_flips():
    rng = np.random.default_rng(3)
    one, other = rng.random(9), rng.random(9) - 0.15
    differences = np.round(one, 6) - np.round(other, 6)
    sums = [np.dot(signs, differences) for signs in itertools.product((-1, 1), repeat=9)]
    exact = np.mean([abs(value) >= abs(differences.sum()) - 1e-12 for value in sums])
    found = difference_of(Examples.of_mean(one), Examples.of_mean(other))
    assert found.p == pytest.approx(exact)
    assert found.value == pytest.approx(differences.mean())
    assert found.interval.low < found.value < found.interval.high


def test_a_single_example_that_differs_says_nothing():
    found = difference_of(Examples.of_mean([1, 0.5, 0.5, 0.2]), Examples.of_mean([0, 0.5, 0.5, 0.2]))
    assert (found.value, found.p) == (0.25, 1.0)


@pytest.mark.slow
def test_chance_is_found_significant_as_often_as_it_may():
    rng = np.random.default_rng(4)
    p_values = []
    for _ in range(100):
        base = rng.random(30)
        one, other = base + 0.1 * rng.normal(size=30), base + 0.1 * rng.normal(size=30)
        p_values.append(difference_of(Examples.of_mean(one), Examples.of_mean(other)).p)
    assert sum(p < 0.05 for p in p_values) <= 12
    assert 0.3 < np.median(p_values) < 0.7


def test_a_correlation_that_is_better_is_told_from_one_that_is_not():
    ratings = correlated(150, 1.0, 1)
    other = Examples("spearman", ratings.ids, correlated(150, 1.0, 7).values, ratings.targets)  # of other ratings
    found = difference_of(ratings, other)
    assert found.value == pytest.approx(
        slow_spearman(ratings.values, ratings.targets) - slow_spearman(other.values, ratings.targets)
    )
    assert found.p < 0.01
    assert difference_of(ratings, ratings).p == 1.0


def test_the_same_examples_in_another_order():
    one = Examples.of_mean([1.0, 0.0, 0.5], ["a", "b", "c"])
    other = Examples.of_mean([0.5, 1.0, 0.0], ["c", "a", "b"])
    found = difference_of(one, other)
    assert (found.value, found.p) == (0.0, 1.0)


@pytest.mark.parametrize(
    "other",
    [
        Examples.of_mean([1.0, 0.0], ["a", "x"]),
        Examples.of_mean([1.0, 0.0, 1.0], ["a", "b", "c"]),
        Examples("spearman", ("a", "b"), (1.0, 0.0), (1.0, 2.0)),
    ],
)
def test_other_examples_are_not_compared(other):
    assert difference_of(Examples.of_mean([1.0, 0.0], ["a", "b"]), other) is None


def test_too_few_and_constant_ones():
    assert interval_of(Examples.of_mean([1.0])) is None
    constant = Examples("spearman", ("0", "1"), (1.0, 1.0), (1.0, 2.0))
    assert (interval_of(constant).low, interval_of(constant).high) == (0.0, 0.0)


def test_holm_allows_for_how_many_there_are():
    assert holm([]) == []
    assert holm([0.02]) == [0.02]
    # Sorted: 0.01 * 3, then 0.03 * 2, then the largest so far.
    assert holm([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06])


@pytest.mark.parametrize("examples", [None, Examples.of_mean([1, 0.25], ["q", "r"]), correlated(3, 1.0, 1)])
def test_examples_go_through_json(examples):
    score = Score("main", {"main": 0.5}, examples=examples)
    assert Score.from_dict(score.to_dict()) == score
    old = {name: value for name, value in score.to_dict().items() if name != "examples"}
    assert Score.from_dict(old).examples is None
