"""Spans of tokens to be hidden: how long each is, how many tokens together, where they stand.

Knows: distributions of lengths, arrangements. Does not know: tokens, sentinels, models.
"""

from collections.abc import Callable, Mapping
from typing import Literal

import numpy as np

from gerund.errors import ConfigError, unknown_name

SpanLengths = Literal["hump", "geometric", "t5"]

# GUR, Figure 4 and equation 3: at most 10 tokens, and means of about 3.8 for both.
LONGEST = 10
_HUMP, _MODE = 0.66, 3
_GEOMETRIC = 0.2
# T5's own: the mean length of its spans (Raffel et al. 2020, section 3.3.4).
_T5_MEAN = 3.0


def hump_geometric(p: float = _HUMP, mode: int = _MODE, longest: int = LONGEST) -> np.ndarray:
    """Return the probabilities of the lengths 1 to ``longest`` (GUR, equation 3): they fall on both sides of ``mode``.

    >>> lengths = hump_geometric()
    >>> int(lengths.argmax()) + 1, round(float(lengths @ np.arange(1, 11)), 2)
    (3, 3.8)

    Args:
        p: each step away from the mode multiplies the probability by this.
        mode: the most probable length.
        longest: the greatest length.
    """
    weights = p ** np.abs(np.arange(1, longest + 1) - mode)
    return np.asarray(weights / weights.sum())


def clipped_geometric(p: float = _GEOMETRIC, longest: int = LONGEST) -> np.ndarray:
    """Return the probabilities of the lengths 1 to ``longest`` of SpanBERT: geometric, cut off and normalised.

    >>> round(float(clipped_geometric() @ np.arange(1, 11)), 2)
    3.8
    """
    weights = p * (1 - p) ** np.arange(longest)
    return np.asarray(weights / weights.sum())


def sample_corrupted_spans(
    tokens: int, rng: np.random.Generator, *, rate: float = 0.15, lengths: SpanLengths = "hump"
) -> list[range]:
    """Sample the spans of a text that are hidden (GUR, section IV-A).

    So many tokens are hidden in all as ``rate`` of the text comes to, rounded, at least one and at most all but one.
    Every arrangement of the spans is equally likely; a token at least lies between two of them.

    >>> sample_corrupted_spans(20, np.random.default_rng(0), rate=0.3)
    [range(0, 2), range(3, 7)]

    Args:
        tokens: how many tokens the text has.
        rng: the source of randomness.
        rate: fraction of the tokens that are hidden.
        lengths: ``hump`` (GUR); ``geometric`` (SpanBERT); ``t5``: as many spans as have a mean length of three.

    Returns:
        The spans from left to right; none for a text of fewer than two tokens.

    Raises:
        ConfigError: the rate is no fraction, or there are no such lengths.
    """
    if not 0 < rate < 1:
        raise ConfigError(f"the masking rate lies between 0 and 1, and is {rate}")
    if lengths not in _SAMPLERS:
        raise unknown_name("span lengths", lengths, list(_SAMPLERS))
    if tokens < 2:
        return []
    hidden = min(max(1, round(rate * tokens)), tokens - 1)
    sampled = _SAMPLERS[lengths](hidden, rng)
    shown = tokens - hidden
    while len(sampled) > shown + 1:  # only with very high rates: there is not room for so many
        sampled[-2:] = [sampled[-2] + sampled[-1]]
    rng.shuffle(sampled)
    # A span stands before the first shown token, between two, or behind the last: no two in one place.
    places = np.sort(rng.choice(shown + 1, size=len(sampled), replace=False)).tolist()
    spans, before = [], 0
    for place, length in zip(places, sampled, strict=True):
        spans.append(range(place + before, place + before + length))
        before += length
    return spans


def _by_probability(probabilities: np.ndarray) -> Callable[[int, np.random.Generator], list[int]]:
    cumulated = probabilities.cumsum()

    def sample(hidden: int, rng: np.random.Generator) -> list[int]:
        found: list[int] = []
        while hidden:
            own = min(int(np.searchsorted(cumulated, rng.random() * cumulated[-1], side="right")) + 1, hidden)
            found.append(own)
            hidden -= own
        return found

    return sample


def _evenly(hidden: int, rng: np.random.Generator) -> list[int]:
    """Cut ``hidden`` tokens into spans, every way to do so equally likely, as T5's own code does."""
    count = max(1, round(hidden / _T5_MEAN))
    cuts = np.sort(rng.choice(hidden - 1, size=count - 1, replace=False) + 1) if count > 1 else np.zeros(0, dtype=int)
    return [int(length) for length in np.diff([0, *cuts.tolist(), hidden])]


_SAMPLERS: Mapping[str, Callable[[int, np.random.Generator], list[int]]] = {
    "hump": _by_probability(hump_geometric()),
    "geometric": _by_probability(clipped_geometric()),
    "t5": _evenly,
}
