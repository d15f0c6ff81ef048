"""Poolings: how the states of a text's tokens become one vector, one entry per pooling in one table.

torch is imported on use only: the settings read the table.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gerund.errors import unknown_name

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Pooling:
    """One way to pool."""

    # The weight of each token, of any sum, from the mask of pooled tokens ``(B, T)``.
    weights: Callable[[Tensor], Tensor]
    reads_end: bool = False  # whether it uses the last token's state, so that the end of a template is pooled too
    depends_on_places: bool = False  # whether a token's weight depends on its position, and so on the prompt before it
    sentence_transformers: str | None = None  # its switch in that library's ``1_Pooling/config.json``
    takes_largest: bool = False  # whether it is the maximum over the pooled tokens instead of a weighted mean
    divides_by_root: bool = False  # whether the weighted sum is divided by the square root of the weights' sum


def _mean(counted_BT: Tensor) -> Tensor:
    return counted_BT.float()


def _weighted_mean(counted_BT: Tensor) -> Tensor:
    return (counted_BT.int().cumsum(dim=1) * counted_BT).float()


def _last(counted_BT: Tensor) -> Tensor:
    rank_BT = counted_BT.int().cumsum(dim=1)
    return (counted_BT & (rank_BT == rank_BT[:, -1:])).float()


def _first(counted_BT: Tensor) -> Tensor:
    return (counted_BT & (counted_BT.int().cumsum(dim=1) == 1)).float()


def _last_mean(counted_BT: Tensor) -> Tensor:
    return _mean(counted_BT) + counted_BT.sum(dim=1, keepdim=True) * _last(counted_BT)


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


def pool(hidden_BTD: Tensor, pooled_BT: Tensor, pooling: str, before_B: Tensor | None = None) -> Tensor:
    """Pool the states that ``pooled_BT`` marks into one vector per text.

    Args:
        hidden_BTD: last hidden states.
        pooled_BT: True for the pooled tokens. A row without any gives a zero vector.
        pooling: a name of ``gerund.poolings.POOLINGS``; with several, such as ``first+mean``, their vectors are
            concatenated.
        before_B: number of tokens before the first pooled one, where a weighted mean counts them too.

    Returns:
        ``(B, D)`` in float32; with several poolings ``(B, n * D)``.

    >>> import torch
    >>> states = torch.tensor([[[1.0], [3.0], [9.0]]])
    >>> counted = torch.tensor([[True, True, False]])
    >>> [pool(states, counted, name).item() for name in ("mean", "last", "first", "max")]
    [2.0, 3.0, 1.0, 3.0]
    >>> round(pool(states, counted, "weighted-mean").item(), 4)
    2.3333
    >>> pool(states, counted, "first+last").tolist()
    [[1.0, 3.0]]
    """
    vectors = [_pooled(hidden_BTD, pooled_BT.bool(), part, before_B) for part in pooling_parts(pooling)]
    if len(vectors) == 1:
        return vectors[0]
    import torch

    return torch.cat(vectors, dim=-1)


def _pooled(hidden_BTD: Tensor, counted_BT: Tensor, pooling: Pooling, before_B: Tensor | None) -> Tensor:
    if pooling.takes_largest:
        largest_BD = hidden_BTD.float().masked_fill(~counted_BT[..., None], -math.inf).amax(dim=1)
        return largest_BD.masked_fill(~counted_BT.any(dim=1, keepdim=True), 0.0)
    weight_BT = pooling.weights(counted_BT)
    if before_B is not None and pooling.depends_on_places:
        weight_BT = weight_BT + before_B[:, None] * counted_BT
    sum_B1 = weight_BT.sum(dim=1, keepdim=True).clamp(min=1.0)
    weight_BT = weight_BT / (sum_B1.sqrt() if pooling.divides_by_root else sum_B1)
    # Padding may contain anything, even infinities, so it is masked before it is multiplied by 0.
    states_BTD = hidden_BTD.float().masked_fill(weight_BT[..., None] == 0, 0.0)
    return weight_BT[:, None].bmm(states_BTD)[:, 0]
