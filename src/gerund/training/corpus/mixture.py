"""The order in which items of several sources are read: sources by weight, items of a source in shuffled epochs.

Knows: counts, weights, orders. Does not know: what an item is, or where it lies. A sample depends on nothing but
the seed and its number: that is what makes a resumed training see exactly what the interrupted one would have.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gerund.errors import ConfigError


@dataclass(frozen=True)
class Sample:
    """What row ``number`` of a training is made of."""

    source: int
    """Which source."""
    epoch: int
    """How often all items of the source have been read before."""
    item: int
    """Which of its items."""
    shift: int
    """A number below ``shifts``, the same for a whole epoch of a source."""


class Mixture:
    """A fixed order of the items of several sources.

    The items of each source are read in a shuffled order without repetition until none is left; then a new order
    begins. Rows of different sources alternate in a fixed pattern, exactly in proportion to the weights over
    every 1000 rows.

    >>> mixture = Mixture([3, 2], [3.0, 1.0], seed=0)
    >>> samples = [mixture.sample(number) for number in range(1000)]
    >>> sum(sample.source == 0 for sample in samples)
    750
    >>> first = [sample.item for sample in samples if sample.source == 0]
    >>> sorted(first[:3]), sorted(first[3:6])
    ([0, 1, 2], [0, 1, 2])

    Args:
        sizes: How many items each source has, at least one.
        weights: How many rows of each source, relative to the others.
        seed: Determines all orders.
        shifts: From how many numbers the shift of an epoch is sampled.

    Raises:
        ConfigError: There is not one positive weight for each source.
    """

    PERIOD = 1000

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], *, seed: int, shifts: int = 1) -> None:
        if len(sizes) != len(weights) or not all(math.isfinite(weight) and weight > 0 for weight in weights):
            raise ConfigError(f"{len(sizes)} sources need as many positive weights, not {list(weights)}")
        if not sizes or min(sizes) < 1:
            raise ConfigError(f"every source needs items; there are {list(sizes)}")
        self.sizes, self.seed, self.shifts = list(sizes), seed, shifts
        self.pattern = self._pattern(weights)
        chosen = self.pattern[:, None] == np.arange(len(sizes))
        self._rank = np.cumsum(chosen, axis=0) - chosen
        self._per_period = chosen.sum(axis=0)
        self._latest: dict[int, tuple[int, int, np.ndarray]] = {}

    def _pattern(self, weights: Sequence[float]) -> np.ndarray:
        rows = np.array(weights, dtype=float) / sum(weights) * self.PERIOD
        counts = np.floor(rows).astype(int)
        largest_remainders = np.argsort(counts - rows, kind="stable")[: self.PERIOD - counts.sum()]
        counts[largest_remainders] += 1
        pattern = np.repeat(np.arange(len(weights)), counts)
        return np.random.default_rng([self.seed, 0]).permutation(pattern)

    def sample(self, number: int) -> Sample:
        """Return what row ``number``, counted from 0, is made of."""
        if number < 0:
            raise IndexError(number)
        period, place = divmod(number, self.PERIOD)
        source = int(self.pattern[place])
        nth = period * int(self._per_period[source]) + int(self._rank[place, source])
        epoch, position = divmod(nth, self.sizes[source])
        shift, order = self._epoch(source, epoch)
        return Sample(source, epoch, int(order[position]), shift)

    def _epoch(self, source: int, epoch: int) -> tuple[int, np.ndarray]:
        """Return the shift and the order of an epoch; the latest one of each source is kept."""
        kept = self._latest.get(source)
        if kept is None or kept[0] != epoch:
            rng = np.random.default_rng([self.seed, 1, source, epoch])
            kept = (epoch, int(rng.integers(self.shifts)), rng.permutation(self.sizes[source]))
            self._latest[source] = kept
        return kept[1], kept[2]

    def epochs(self, rows: int) -> list[float]:
        """Return how often each source is read by the first ``rows`` rows, on average."""
        sources = zip(self._per_period, self.sizes, strict=True)
        return [float(rows * per_period / self.PERIOD / size) for per_period, size in sources]
