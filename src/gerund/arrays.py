"""Array functions that sampling and pooling need, for numpy arrays and torch tensors alike; imports no torch.

Both have many functions of the same names and meanings; ``library_of`` gives them. Those that differ are here.

Shapes: B rows, V vocabulary.
"""

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

Array = Any
"""An array of numpy, or a tensor."""


def library_of(array: Array) -> Any:
    """Return the module of an array's functions: numpy or torch."""
    return np if isinstance(array, np.ndarray) else sys.modules["torch"]


def as_like(values: np.ndarray, like: Array) -> Array:
    """Return numpy's values as an array of the same library, on the same device."""
    if isinstance(like, np.ndarray):
        return values
    return library_of(like).from_numpy(values).to(like.device)


def copy_of(array: Array) -> Array:
    """Return a copy."""
    return array.copy() if isinstance(array, np.ndarray) else array.clone()


def as_float32(array: Array) -> Array:
    """Return an array in float32; itself where it is that."""
    return array.astype(np.float32, copy=False) if isinstance(array, np.ndarray) else array.float()


def as_numpy(array: Array) -> np.ndarray:
    """Return an array of numpy; itself where it is that."""
    return array if isinstance(array, np.ndarray) else np.asarray(array.detach().cpu())


def softmax(scores_BV: Array) -> Array:
    """Return the softmax of each row."""
    if not isinstance(scores_BV, np.ndarray):
        return scores_BV.softmax(-1)
    with np.errstate(invalid="ignore"):
        powers_BV = np.exp(scores_BV - scores_BV.max(-1, keepdims=True))
        return powers_BV / powers_BV.sum(-1, keepdims=True)


def log_softmax(scores_BV: Array) -> Array:
    """Return the logarithm of the softmax of each row; a row with NaN or infinity is NaN."""
    if not isinstance(scores_BV, np.ndarray):
        return scores_BV.log_softmax(-1)
    with np.errstate(invalid="ignore"):
        below_BV = scores_BV - scores_BV.max(-1, keepdims=True)
        return below_BV - np.log(np.exp(below_BV).sum(-1, keepdims=True))


def largest(values_BV: Array, count: int) -> tuple[Array, Array]:
    """Return the ``count`` largest values of each row ``(B, count)``, the largest first, and their places."""
    count = min(count, values_BV.shape[-1])
    if not isinstance(values_BV, np.ndarray):
        best = values_BV.topk(count, dim=-1)
        return best.values, best.indices
    place_BK = np.argpartition(values_BV, -count, axis=-1)[:, -count:]
    found_BK = np.take_along_axis(values_BV, place_BK, -1)
    order_BK = np.argsort(-found_BK, axis=-1, kind="stable")
    return np.take_along_axis(found_BK, order_BK, -1), np.take_along_axis(place_BK, order_BK, -1)


def picked(values_BV: Array, place_BK: Array) -> Array:
    """Return the values at some places of each row ``(B, K)``."""
    if isinstance(values_BV, np.ndarray):
        return np.take_along_axis(values_BV, place_BK, -1)
    return values_BV.gather(-1, place_BK)


def masked(scores_BV: Array, hidden_BV: Array) -> Array:
    """Return scores with minus infinity where they are hidden."""
    return library_of(scores_BV).where(hidden_BV, float("-inf"), scores_BV)


def counts_of(tokens: Sequence[int], like_V: Array) -> Array:
    """Count the tokens of a text, by token of the vocabulary, in float32."""
    return as_like(np.bincount(np.array(tokens, np.int64), minlength=len(like_V)).astype(np.float32), like_V)
