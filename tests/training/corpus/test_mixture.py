"""The order of rows: exact proportions, whole epochs, and a turn that depends on seed and number alone."""

import numpy as np
import pytest

from gerund.errors import ConfigError
from gerund.training.corpus.texts import Mixture, Sample


def slow_order(sizes, counts, seed, shifts, rows):
    """Order rows the slow way: one after the other, each source with a pile of its own."""
    pattern = np.random.default_rng([seed, 0]).permutation(np.repeat(np.arange(len(sizes)), counts))
    piles, epochs, samples = [[] for _ in sizes], [-1] * len(sizes), []
    shift = [0] * len(sizes)
    for number in range(rows):
        source = int(pattern[number % 1000])
        if not piles[source]:
            epochs[source] += 1
            rng = np.random.default_rng([seed, 1, source, epochs[source]])
            shift[source] = int(rng.integers(shifts))
            piles[source] = rng.permutation(sizes[source]).tolist()
        samples.append(Sample(source, epochs[source], piles[source].pop(0), shift[source]))
    return samples


@pytest.mark.parametrize(
    "sizes, weights, counts",
    [([7], [3.0], [1000]), ([70, 11, 300], [2.0, 1.0, 1.0], [500, 250, 250]), ([5, 5], [2.0, 1.0], [667, 333])],
)
def test_samples_are_those_of_choosing_one_by_one(sizes, weights, counts):
    expected = slow_order(sizes, counts, 3, 16, 2500)
    mixture = Mixture(sizes, weights, seed=3, shifts=16)
    assert [mixture.sample(number) for number in range(2500)] == expected
    # Asked in any order, and by an object that has not seen the others.
    jumping = Mixture(sizes, weights, seed=3, shifts=16)
    for number in (2499, 0, 1203, 2, 1203):
        assert jumping.sample(number) == expected[number]


@pytest.mark.parametrize(
    ("weights", "counts"), [([3.0, 996.4, 0.6], [3, 996, 1]), ([0.6, 0.6, 0.6, 998.2], [1, 1, 1, 997])]
)
def test_a_source_of_small_weight_is_read(weights, counts):
    mixture = Mixture([5] * len(weights), weights, seed=0)
    sources = [mixture.sample(number).source for number in range(1000)]
    assert [sources.count(place) for place in range(len(weights))] == counts
    with pytest.raises(ConfigError, match="has the weight 1 of 3001 in all, which is less than one text in 2,000"):
        Mixture([3, 2], [3000.0, 1.0], seed=0)


def test_another_seed_another_order():
    one, other = (Mixture([50, 50], [1.0, 1.0], seed=seed) for seed in (0, 1))
    assert [one.sample(number).item for number in range(50)] != [other.sample(number).item for number in range(50)]
    assert one.pattern.tolist() != other.pattern.tolist()


def test_sources_alternate_rather_than_follow_each_other():
    pattern = Mixture([9, 9], [3.0, 1.0], seed=0).pattern
    assert np.bincount(pattern).tolist() == [750, 250]
    assert 0.6 < np.mean(pattern[:200] == 0) < 0.9


def test_epochs():
    assert Mixture([10, 50], [3.0, 1.0], seed=0).epochs(2000) == [150.0, 10.0]
