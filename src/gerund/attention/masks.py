"""Mask predicates: which queries may attend to which keys.

They are computed for numpy arrays and torch tensors alike.

Shapes: B texts, T tokens, and in a mask ``[..., i, j]`` the query i and the key j. True means "may attend".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gerund.settings.plan import Direction, View

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class Chunk:
    """Chunks of ``size`` tokens: no token sees those of another chunk (Llama 4)."""

    size: int


Array = Any
"""An array of numpy, or a tensor."""

# A layer's window: tokens at a smaller distance, those of the same chunk, or all.
Near = int | Chunk | None


def visible(
    view: View,
    length: int,
    *,
    real_BT: Array | None = None,
    span_BT: Array | None = None,
    window: Near = None,
    device: torch.device | str = "cpu",
) -> Array:
    """Return which keys each query may attend to: ``(B or 1, 1, T, T)``, 1 where all texts share the mask.

    ``real_BT`` is True for tokens and False for padding; ``span_BT`` is 0 for context, s >= 1 for the tokens of span s
    (``Direction.HYBRID``). With a window a token sees keys with ``|i - j| < window``, or those of its chunk. A token
    always sees itself, padding included, so that no row of a softmax is empty.

    >>> mask = visible(View(Direction.BIDIRECTIONAL, hidden=1), 3)
    >>> mask[0, 0].int().tolist()
    [[1, 1, 1], [0, 1, 1], [0, 1, 1]]
    >>> visible(View(Direction.BIDIRECTIONAL, hidden=2), 3)[0, 0].int().tolist()
    [[1, 1, 1], [0, 1, 1], [0, 0, 1]]
    """
    index_T = _places(length, real_BT if real_BT is not None else span_BT, device)
    real_BT = None if real_BT is None else real_BT != 0
    query, key = index_T[:, None], index_T[None, :]  # (T, 1), (1, T)
    see = _direction(view.direction, query, key, span_BT)  # (B or 1, T, T)
    if isinstance(window, Chunk) and real_BT is not None:
        see = see & _near((real_BT.cumsum(1) - 1).clip(min=0), length, window)
    elif window is not None:
        see = see & _near(index_T[None], length, window)
    if view.hidden:
        # From later tokens only: LBW, appendix F, where MASK9 of ten tokens is the reverse causal mask.
        # The first real tokens of each text, after any left padding.
        first_BT = (index_T < view.hidden)[None] if real_BT is None else real_BT & (real_BT.cumsum(1) <= view.hidden)
        see = see & ~(first_BT[:, None, :] & (key < query))
    if real_BT is not None:
        see = see & real_BT[:, None, :]
    return (see | (query == key))[:, None]  # (B or 1, 1, T, T)


def hybrid_visible(
    position_BT: Tensor, span_BT: Tensor, queries: int, *, real_BT: Tensor | None = None, window: Near = None
) -> Tensor:
    """Return which keys the last ``queries`` tokens see under MAGNET's hybrid mask: ``(B, 1, Q, T)``.

    The tokens may be in any order: ``position_BT`` has the position of each in its text.

    With positions 0, 1, 2, ... and every token a query this is ``visible`` with ``Direction.HYBRID``.

    >>> import torch
    >>> position, span = torch.tensor([[0, 3, 1, 2]]), torch.tensor([[0, 0, 1, 1]])
    >>> hybrid_visible(position, span, 2, window=2)[0, 0].int().tolist()
    [[1, 0, 1, 0], [0, 1, 1, 1]]
    """
    query, key = position_BT[:, -queries:, None], position_BT[:, None, :]  # (B, Q, 1), (B, 1, T)
    same_span = span_BT[:, -queries:, None] == span_BT[:, None, :]
    see = (span_BT == 0)[:, None, :] | (same_span & (key <= query))
    if window is not None:
        see = see & _near(position_BT, queries, window)
    if real_BT is not None:
        see = see & real_BT.bool()[:, None, :]
    index_T = _places(position_BT.shape[1], position_BT)
    return (see | (index_T[-queries:, None] == index_T))[:, None]


def _places(length: int, like: Array | None, device: torch.device | str = "cpu") -> Array:  # (T,)
    """Return the places of tokens as an array of the same library and device; without one, of torch."""
    if isinstance(like, np.ndarray):
        return np.arange(length)
    import torch

    return torch.arange(length, device=device if like is None else like.device)


def _near(position_BT: Array, queries: int, window: int | Chunk) -> Array:  # (B, Q, T)
    """Say which keys are near enough to the last tokens, by the places of all."""
    query, key = position_BT[:, -queries:, None], position_BT[:, None, :]
    if isinstance(window, Chunk):
        return query // window.size == key // window.size
    return abs(query - key) < window


def _direction(direction: Direction, query: Array, key: Array, span_BT: Array | None) -> Array:
    if direction is Direction.CAUSAL:
        return (key <= query)[None]
    if direction is Direction.BACKWARD:
        return (key >= query)[None]
    if direction is Direction.BIDIRECTIONAL:
        return ((query >= 0) & (key >= 0))[None]
    if span_BT is None:
        raise ValueError("the hybrid mask needs span_BT: 0 for context, s >= 1 for the tokens of span s")
    # MAGNET, section 3.1: context sees context; a span token sees context and its own span so far.
    same_span = span_BT[:, :, None] == span_BT[:, None, :]
    return (span_BT == 0)[:, None, :] | (same_span & (key <= query)[None])


def padding_side(real_BT: Tensor) -> str:
    """Return ``"none"``, ``"right"``, ``"left"`` or ``"mixed"`` for a batch's padding.

    >>> import torch
    >>> padding_side(torch.tensor([[1, 1, 1], [1, 1, 0]]))
    'right'
    """
    real = real_BT.bool()
    if bool(real.all()):
        return "none"
    falls = bool((real[:, 1:] & ~real[:, :-1]).any())  # padding, then a token
    rises = bool((real[:, :-1] & ~real[:, 1:]).any())  # a token, then padding
    if falls and rises:
        return "mixed"
    return "left" if falls else "right"


def added_to_scores(see: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what attention that is no kernel adds to its scores: 0 where a key is seen, the least number elsewhere."""
    import torch

    zero = torch.zeros((), dtype=dtype, device=see.device)
    return torch.where(see, zero, torch.finfo(dtype).min)
