"""Poolings: how the states of a text's tokens become one vector, one entry per pooling in one table.

They are computed for numpy arrays and torch tensors alike. Neither is imported here: the settings read the table.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gerund.errors import unknown_name

Array = Any
"""An array of numpy, or a tensor."""


@dataclass(frozen=True)
class Pooling:
    """One way to pool."""

    # The weight of each token, of any sum, from the mask of pooled tokens ``(B, T)``.
    weights: Callable[[Array], Array]
    reads_end: bool = False  # whether it uses the last token's state, so that the end of a template is pooled too
    depends_on_places: bool = False  # whether a token's weight depends on its position, and so on the prompt before it
    sentence_transformers: str | None = None  # its switch in that library's ``1_Pooling/config.json``
    takes_largest: bool = False  # whether it is the maximum over the pooled tokens instead of a weighted mean
    divides_by_root: bool = False  # whether the weighted sum is divided by the square root of the weights' sum


def _numbers(mask: Array) -> Array:
    from gerund.arrays import as_float32

    return as_float32(mask)


def _mean(counted_BT: Array) -> Array:
    return _numbers(counted_BT)


def _weighted_mean(counted_BT: Array) -> Array:
    return _numbers(counted_BT.cumsum(1) * counted_BT)


def _last(counted_BT: Array) -> Array:
    rank_BT = counted_BT.cumsum(1)
    return _numbers(counted_BT & (rank_BT == rank_BT[:, -1:]))


def _first(counted_BT: Array) -> Array:
    return _numbers(counted_BT & (counted_BT.cumsum(1) == 1))


def _last_mean(counted_BT: Array) -> Array:
    return _mean(counted_BT) + _numbers(counted_BT.sum(1))[:, None] * _last(counted_BT)


POOLINGS: dict[str, Pooling] = {
    "mean": Pooling(_mean, sentence_transformers="pooling_mode_mean_tokens"),
    "weighted-mean": Pooling(
        _weighted_mean,  # the i-th token weighs i (SGPT, section 3.1.2)
        depends_on_places=True,
        sentence_transformers="pooling_mode_weightedmean_tokens",
    ),
    "last": Pooling(_last, reads_end=True, sentence_transformers="pooling_mode_lasttoken"),
    "first": Pooling(_first, sentence_transformers="pooling_mode_cls_token"),
    "last-mean": Pooling(_last_mean, reads_end=True),  # half of the last token's state and half of the mean
    "max": Pooling(_mean, sentence_transformers="pooling_mode_max_tokens", takes_largest=True),
    "mean-sqrt": Pooling(
        _mean,
        sentence_transformers="pooling_mode_mean_sqrt_len_tokens",
        divides_by_root=True,
    ),
}
"""All poolings by name."""

CONCATENATED = "+"
"""Between two names: their vectors are concatenated."""

SWITCHES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""What sentence-transformers calls poolings, by their switches in its older folders, in the order in which it
concatenates what these switch on."""

_BY_SWITCH = {pooling.sentence_transformers: name for name, pooling in POOLINGS.items()}
MODES = {mode: _BY_SWITCH[switch] for switch, mode in SWITCHES.items()}
"""gerund's names of poolings by those of sentence-transformers."""


def canonical_pooling(pooling: str) -> str:
    """Return a setting with sentence-transformers' names of poolings replaced by gerund's; others stay unchanged.

    >>> canonical_pooling("cls+lasttoken")
    'first+last'
    """
    return CONCATENATED.join(MODES.get(name, name) for name in pooling.split(CONCATENATED))


def pooling_parts(pooling: str) -> list[Pooling]:
    """Return the poolings that a setting names; with several, such as ``first+mean``, their vectors are concatenated.

    Raises:
        ConfigError: an unknown name.

    >>> len(pooling_parts("mean")), len(pooling_parts("first+mean"))
    (1, 2)
    """
    names = canonical_pooling(pooling).split(CONCATENATED)
    for name in names:
        if name not in POOLINGS:
            raise unknown_name("pooling", name, list(POOLINGS))
    return [POOLINGS[name] for name in names]


def pool(hidden_BTD: Array, pooled_BT: Array, pooling: str, before_B: Array | None = None) -> Array:
    """Pool the states that ``pooled_BT`` marks into one vector per text.

    Args:
        hidden_BTD: last hidden states.
        pooled_BT: True for the pooled tokens. A row without any gives a zero vector.
        pooling: a name of ``gerund.poolings.POOLINGS``; with several, such as ``first+mean``, their vectors are
            concatenated.
        before_B: number of tokens before the first pooled one, where a weighted mean counts them too.

    Returns:
        ``(B, D)`` in float32; with several poolings ``(B, n * D)``.

    >>> import numpy as np
    >>> states = np.array([[[1.0], [3.0], [9.0]]])
    >>> counted = np.array([[True, True, False]])
    >>> [pool(states, counted, name).item() for name in ("mean", "last", "first", "max")]
    [2.0, 3.0, 1.0, 3.0]
    >>> round(pool(states, counted, "weighted-mean").item(), 4)
    2.3333
    >>> pool(states, counted, "first+last").tolist()
    [[1.0, 3.0]]
    """
    vectors = [_pooled(hidden_BTD, pooled_BT != 0, part, before_B) for part in pooling_parts(pooling)]
    if len(vectors) == 1:
        return vectors[0]
    from gerund.arrays import library_of

    return library_of(hidden_BTD).concatenate(vectors, -1)


def _pooled(hidden_BTD: Array, counted_BT: Array, pooling: Pooling, before_B: Array | None) -> Array:
    from gerund.arrays import as_float32, library_of

    library, states_BTD = library_of(hidden_BTD), as_float32(hidden_BTD)
    if pooling.takes_largest:
        largest_BD = library.amax(library.where(counted_BT[..., None], states_BTD, -math.inf), 1)
        return library.where(counted_BT.sum(1)[:, None] > 0, largest_BD, 0.0)
    weight_BT = pooling.weights(counted_BT)
    if before_B is not None and pooling.depends_on_places:
        weight_BT = weight_BT + as_float32(before_B[:, None] * counted_BT)
    sum_B1 = weight_BT.sum(1)[:, None].clip(min=1.0)
    weight_BT = weight_BT / (sum_B1**0.5 if pooling.divides_by_root else sum_B1)
    # Padding may contain anything, even infinities, so it is masked before it is multiplied by 0.
    states_BTD = library.where(weight_BT[..., None] == 0, 0.0, states_BTD)
    return (weight_BT[:, None] @ states_BTD)[:, 0]
