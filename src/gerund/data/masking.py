"""Corrupt token ids for training: masked tokens, random masks, and spans to generate.

Every function depends on its arguments and the generator alone, and changes none of its inputs.

Shapes: T tokens of one text. ``maskable_T`` is True where a token may be masked: never at special tokens, prompts or
padding.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np

from gerund.checks import one_of
from gerund.errors import ConfigError

SpanLengths = Literal["hump", "geometric", "t5"]

# GUR, Figure 4 and equation 3: at most 10 tokens, and a mean of about 3.8 for both.
LONGEST = 10
_HUMP, _MODE = 0.66, 3
_GEOMETRIC = 0.2
# T5's own: the mean length of its spans (Raffel et al. 2020, section 3.3.4).
_T5_MEAN = 3.0


def mask_tokens(
    ids_T: np.ndarray,
    maskable_T: np.ndarray,
    *,
    rate: float,
    mask_id: int,
    random_ids: Sequence[int] | np.ndarray,
    rng: np.random.Generator,
    mask_fraction: float = 0.8,
    random_fraction: float = 0.1,
) -> tuple[np.ndarray, np.ndarray]:
    """Select tokens to predict and mask most of them (Devlin et al. 2019, section 3.1; MNTP of LLM2Vec, MAGNET).

    Each maskable token is selected independently with probability ``rate`` (at least one per text, if any is maskable).
    A selected token becomes the mask token with probability ``mask_fraction``, a sample of ``random_ids`` (perhaps the
    same token) with ``random_fraction``, or stays. Returns the corrupted ids ``(T,)`` and the selection ``(T,)`` bool.

    >>> ids, maskable = np.arange(10, 16), np.array([False, True, True, True, True, True])
    >>> rng = np.random.default_rng(0)
    >>> mask_tokens(ids, maskable, rate=0.4, mask_id=0, random_ids=[7], rng=rng)
    (array([10,  0,  0, 13, 14, 15]), array([False,  True,  True,  True, False, False]))
    """
    if not 0 < rate <= 1:
        raise ConfigError(f"the masking rate must be above 0 and at most 1, got {rate}")
    if min(mask_fraction, random_fraction) < 0 or mask_fraction + random_fraction > 1:
        raise ConfigError(
            f"mask_fraction {mask_fraction} and random_fraction {random_fraction} must be fractions of one whole"
        )
    if random_fraction and not len(random_ids):
        raise ConfigError("random_fraction needs random_ids to sample from")
    maskable_T = _checked(ids_T, maskable_T)
    selected_T = maskable_T & (rng.random(len(ids_T)) < rate)
    if maskable_T.any() and not selected_T.any():
        selected_T[rng.choice(np.flatnonzero(maskable_T))] = True
    draw_T = rng.random(len(ids_T))
    masked_T = selected_T & (draw_T < mask_fraction)
    replaced_T = selected_T & (draw_T >= mask_fraction) & (draw_T < mask_fraction + random_fraction)
    corrupted_T = np.where(masked_T, mask_id, ids_T).astype(ids_T.dtype)
    if random_fraction:
        sampled_T = rng.choice(np.asarray(random_ids), size=len(ids_T))
        corrupted_T[replaced_T] = sampled_T[replaced_T]
    return corrupted_T, selected_T


def corrupt(
    ids_T: np.ndarray, maskable_T: np.ndarray, *, rate: float, mask_id: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Replace each maskable token by the mask token with probability ``rate``, independently (MAR of UniMAE).

    Returns the corrupted ids ``(T,)`` and which were replaced ``(T,)`` bool.

    >>> ids, maskable = np.arange(10, 16), np.array([False, True, True, True, True, True])
    >>> corrupt(ids, maskable, rate=0.5, mask_id=0, rng=np.random.default_rng(0))[0]
    array([10,  0,  0,  0, 14, 15])
    """
    if not 0 <= rate <= 1:
        raise ConfigError(f"the masking rate must be from 0 to 1, got {rate}")
    selected_T = _checked(ids_T, maskable_T) & (rng.random(len(ids_T)) < rate)
    return np.where(selected_T, mask_id, ids_T).astype(ids_T.dtype), selected_T


def sample_spans(
    maskable_T: np.ndarray, *, count: int = 2, shortest: int = 4, longest: int = 128, rng: np.random.Generator
) -> np.ndarray:
    """Sample the spans that a model learns to generate (MSG of MAGNET).

    Their number is uniform from 1 to ``count`` (fewer where a text is too short). Their lengths are uniform from
    ``shortest`` to the smaller of ``longest`` and the greatest length that all of them could have together. Then every
    arrangement is equally likely. At least one token separates two spans, at least one maskable token is left as
    context, and position 0 belongs to no span, since a token is predicted at the position before it. Padding must be on
    the right. Returns 0 for context and 1, 2, ... for the spans from left to right, ``(T,)`` int64.

    >>> maskable = np.array([False] + [True] * 11)
    >>> sample_spans(maskable, shortest=3, rng=np.random.default_rng(0))
    array([0, 1, 1, 1, 1, 0, 2, 2, 2, 2, 0, 0])
    """
    if count < 1 or not 1 <= shortest <= longest:
        raise ConfigError(f"spans need count >= 1 and 1 <= shortest <= longest, not {count}, {shortest} and {longest}")
    free_T = np.array(maskable_T, dtype=bool)
    tokens = int(free_T.sum())
    free_T[:1] = False
    span_T = np.zeros(len(free_T), dtype=np.int64)
    number = int(rng.integers(1, count + 1))
    while number and _what_fits(free_T, number, tokens, longest) < shortest:
        number -= 1
    if not number:
        return span_T
    fits = _what_fits(free_T, number, tokens, longest)
    lengths = rng.integers(shortest, fits + 1, size=number).tolist()
    for index, start in enumerate(_arrange(free_T, lengths, rng)):
        span_T[start : start + lengths[index]] = index + 1
    return span_T


def _checked(ids_T: np.ndarray, maskable_T: np.ndarray) -> np.ndarray:
    maskable_T = np.asarray(maskable_T, dtype=bool)
    if ids_T.ndim != 1 or ids_T.shape != maskable_T.shape:
        raise ConfigError(f"ids and maskable are of one text each, not of shapes {ids_T.shape} and {maskable_T.shape}")
    return maskable_T


def _what_fits(free_T: np.ndarray, number: int, tokens: int, longest: int) -> int:
    """Return the greatest length that ``number`` spans could all have, 0 for none, of ``tokens`` maskable tokens."""
    edges = np.flatnonzero(np.diff(free_T, prepend=False, append=False))
    runs = edges[1::2] - edges[::2]
    # One maskable token stays as context, so the spans share the rest.
    lengths = np.arange(1, min(longest, (tokens - 1) // number) + 1)
    # n spans of m tokens and the n - 1 tokens between them fit into a run of r tokens if n(m + 1) <= r + 1.
    capacity = ((runs[:, None] + 1) // (lengths + 1)).sum(axis=0)
    return int((capacity >= number).sum())


def _arrange(free_T: np.ndarray, lengths: list[int], rng: np.random.Generator) -> list[int]:
    """Return where spans of these lengths begin, in this order; every arrangement is equally likely."""
    # Counted from the right: rest[p] is the number of ways to place the following spans from p on.
    rest = np.ones(len(free_T) + 2)
    before = np.concatenate([[0], np.cumsum(free_T)])
    ways = []
    for length in reversed(lengths):
        starts = np.arange(len(free_T) - length + 1)
        fits = before[starts + length] - before[starts] == length
        ways.append(fits * rest[starts + length + 1])
        counted = np.zeros_like(rest)
        counted[starts] = ways[-1]
        rest = counted[::-1].cumsum()[::-1]
    begins: list[int] = []
    earliest = 0
    for length, weights in zip(lengths, reversed(ways), strict=True):
        weights[:earliest] = 0
        # The counts grow like T to the power of the spans; divided, they are probabilities.
        begins.append(int(rng.choice(len(weights), p=weights / weights.sum())))
        earliest = begins[-1] + length + 1
    return begins


def hump_geometric(p: float = _HUMP, mode: int = _MODE, longest: int = LONGEST) -> np.ndarray:
    """Return the probabilities of lengths 1 to ``longest`` (GUR, equation 3): geometric around ``mode``.

    >>> lengths = hump_geometric()
    >>> int(lengths.argmax()) + 1, round(float(lengths @ np.arange(1, 11)), 2)
    (3, 3.8)
    """
    weights = p ** np.abs(np.arange(1, longest + 1) - mode)
    return np.asarray(weights / weights.sum())


def clipped_geometric(p: float = _GEOMETRIC, longest: int = LONGEST) -> np.ndarray:
    """Return the probabilities of lengths 1 to ``longest`` of SpanBERT: geometric, truncated and normalized.

    >>> round(float(clipped_geometric() @ np.arange(1, 11)), 2)
    3.8
    """
    weights = p * (1 - p) ** np.arange(longest)
    return np.asarray(weights / weights.sum())


def sample_corrupted_spans(
    tokens: int, rng: np.random.Generator, *, rate: float = 0.15, lengths: SpanLengths = "hump"
) -> list[range]:
    """Sample the spans of a text to hide, from left to right (GUR, section IV-A); none for fewer than two tokens.

    A fraction ``rate`` of the tokens is hidden, at least one and at most all except one. Every arrangement of the spans
    is equally likely; at least one token separates two spans. Span ``lengths`` are ``hump`` (GUR), ``geometric``
    (SpanBERT), or ``t5``: as many spans as have a mean length of three.

    >>> sample_corrupted_spans(20, np.random.default_rng(0), rate=0.3)
    [range(0, 2), range(3, 7)]
    """
    if not 0 < rate < 1:
        raise ConfigError(f"the masking rate must be between 0 and 1, got {rate}")
    one_of("span lengths", lengths, list(_SAMPLERS))
    if tokens < 2:
        return []
    hidden = min(max(1, round(rate * tokens)), tokens - 1)
    sampled = _SAMPLERS[lengths](hidden, rng)
    shown = tokens - hidden
    while len(sampled) > shown + 1:  # only with very high rates, where they don't fit
        sampled[-2:] = [sampled[-2] + sampled[-1]]
    rng.shuffle(sampled)
    # A span is before the first shown token, between two, or after the last: no two in one place.
    places = np.sort(rng.choice(shown + 1, size=len(sampled), replace=False)).tolist()
    spans, before = [], 0
    for place, length in zip(places, sampled, strict=True):
        spans.append(range(place + before, place + before + length))
        before += length
    return spans


def _by_probability(probabilities: np.ndarray) -> Callable[[int, np.random.Generator], list[int]]:
    cumulated = probabilities.cumsum()

    def sample(hidden: int, rng: np.random.Generator) -> list[int]:
        lengths: list[int] = []
        while hidden:
            length = int(np.searchsorted(cumulated, rng.random() * cumulated[-1], side="right")) + 1
            lengths.append(min(length, hidden))
            hidden -= lengths[-1]
        return lengths

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
