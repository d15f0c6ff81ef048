"""Rotary positions, plain and scaled, as cosines and sines of a batch's positions.

Shapes: B batch, T tokens, R half of the rotated dimensions.
"""

from dataclasses import dataclass
from math import ceil, floor, log, pi

import numpy as np


@dataclass(frozen=True)
class Rope:
    """Rotary positions.

    Attributes:
        theta: their base.
        size: how many dimensions of a head are rotated.
        divisors: of each frequency, if the positions are scaled.
        scale: factor of cosines and sines.
        long_divisors: instead of these, for texts longer than ``long_from`` tokens.
        long_from: see ``long_divisors``.
    """

    theta: float
    size: int
    divisors: tuple[float, ...] | None = None
    scale: float = 1.0
    long_divisors: tuple[float, ...] | None = None
    long_from: int = 0

    def angles(self, position_BT: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return cosines and sines, (B, T, R) each."""
        frequencies = self.theta ** (-np.arange(0, self.size, 2, dtype=np.float64) / self.size)
        divisors = self.divisors
        if self.long_divisors is not None and position_BT.max(initial=0) >= self.long_from:
            divisors = self.long_divisors
        if divisors is not None:
            frequencies = frequencies / np.asarray(divisors)
        angle_BTR = position_BT[..., None] * frequencies
        return (np.cos(angle_BTR) * self.scale).astype(np.float32), (np.sin(angle_BTR) * self.scale).astype(np.float32)


def yarn_divisors(theta: float, size: int, factor: float, original: int, fast: float, slow: float) -> tuple[float, ...]:
    """Return YaRN's divisor of each frequency (transformers, ``_compute_yarn_parameters``).

    Args:
        theta: the base.
        size: the rotated dimensions.
        factor: by how much texts became longer.
        original: how long they were, in tokens.
        fast: turns over ``original`` tokens from which a frequency is kept.
        slow: turns up to which it is divided by ``factor``.
    """

    def dimension(turns: float) -> float:
        return size * log(original / (turns * 2 * pi)) / (2 * log(theta))

    first, last = max(floor(dimension(fast)), 0), min(ceil(dimension(slow)), size - 1)
    ramp = np.clip((np.arange(size // 2) - first) / max(last - first, 0.001), 0, 1)
    return tuple((1 / (ramp / factor + 1 - ramp)).tolist())
