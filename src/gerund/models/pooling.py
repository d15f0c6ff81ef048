"""From token states to one vector a text.

Knows: which rows of a batch's states are pooled. Does not know: prompts, tokenizers, plans.
"""

import numpy as np
import torch
from torch import Tensor

from gerund.poolings import Pooling, pooling_parts


def pool(hidden_BTD: Tensor, pooled_BT: Tensor, pooling: str, before_B: Tensor | None = None) -> Tensor:
    """Pool the states that ``pooled_BT`` marks into one vector a text.

    Args:
        hidden_BTD: last hidden states.
        pooled_BT: True for the tokens that count. A row without any gives a zero vector.
        pooling: a name of ``gerund.poolings.POOLINGS``; with several, such as ``first+mean``, their vectors are
            concatenated.
        before_B: how many tokens of each text stand before the first that counts, where a weighted mean counts them
            too; None starts its weights at the first that counts.

    Returns:
        ``(B, D)`` in float32; with several poolings ``(B, n * D)``.

    >>> states = torch.tensor([[[1.0], [3.0], [9.0]]])
    >>> counted = torch.tensor([[True, True, False]])
    >>> [pool(states, counted, name).item() for name in ("mean", "last", "first", "max")]
    [2.0, 3.0, 1.0, 3.0]
    >>> round(pool(states, counted, "weighted-mean").item(), 4)
    2.3333
    >>> pool(states, counted, "first+last").tolist()
    [[1.0, 3.0]]
    """
    vectors = [_pooled(hidden_BTD, pooled_BT.bool(), one, before_B) for one in pooling_parts(pooling)]
    return vectors[0] if len(vectors) == 1 else torch.cat(vectors, dim=-1)


def _pooled(hidden_BTD: Tensor, counted_BT: Tensor, pooling: Pooling, before_B: Tensor | None) -> Tensor:
    if pooling.takes_largest:
        largest_BD = hidden_BTD.float().masked_fill(~counted_BT[..., None], -torch.inf).amax(dim=1)
        return largest_BD.masked_fill(~counted_BT.any(dim=1, keepdim=True), 0.0)
    weight_BT = pooling.weights(counted_BT)
    if before_B is not None and pooling.depends_on_places:
        weight_BT = weight_BT + before_B[:, None] * counted_BT
    sum_B1 = weight_BT.sum(dim=1, keepdim=True).clamp(min=1.0)
    weight_BT = weight_BT / (sum_B1.sqrt() if pooling.divides_by_root else sum_B1)
    # Padding may hold anything, even infinities: it is taken out before it is multiplied by 0.
    states_BTD = hidden_BTD.float().masked_fill(weight_BT[..., None] == 0, 0.0)
    return torch.bmm(weight_BT[:, None], states_BTD)[:, 0]


def compared(a_ND: np.ndarray, b_MD: np.ndarray, similarity: str) -> np.ndarray:
    """Return how near each vector of ``a_ND`` is to each of ``b_MD``, as sentence-transformers counts it: ``(N, M)``.

    Args:
        a_ND: vectors.
        b_MD: vectors.
        similarity: ``cosine``, ``dot``, or a distance taken negative: ``euclidean``, ``manhattan``.

    >>> ones, others = np.array([[3.0, 4.0]]), np.array([[3.0, 0.0]])
    >>> [float(compared(ones, others, name)[0, 0]) for name in ("cosine", "dot", "euclidean", "manhattan")]
    [0.6, 9.0, -4.0, -4.0]
    """
    found_NM: np.ndarray
    if similarity in ("cosine", "dot"):
        found_NM = unit(a_ND) @ unit(b_MD).T if similarity == "cosine" else a_ND @ b_MD.T
        return found_NM
    order = 2 if similarity == "euclidean" else 1
    # A row at a time: the differences of all pairs would take much memory.
    found_NM = np.stack([-np.linalg.norm(b_MD - own_D, ord=order, axis=-1) for own_D in a_ND])
    return found_NM


def compared_in_pairs(a_ND: np.ndarray, b_ND: np.ndarray, similarity: str) -> np.ndarray:
    """Return how near each vector of ``a_ND`` is to that in the same row of ``b_ND``: ``(N,)``; see ``compared``.

    >>> ones, others = np.array([[3.0, 4.0]]), np.array([[3.0, 0.0]])
    >>> [float(compared_in_pairs(ones, others, name)[0]) for name in ("cosine", "dot", "euclidean", "manhattan")]
    [0.6, 9.0, -4.0, -4.0]
    """
    found_N: np.ndarray
    if similarity in ("cosine", "dot"):
        left_ND, right_ND = (unit(a_ND), unit(b_ND)) if similarity == "cosine" else (a_ND, b_ND)
        found_N = (left_ND * right_ND).sum(axis=-1)
        return found_N
    found_N = -np.linalg.norm(a_ND - b_ND, ord=2 if similarity == "euclidean" else 1, axis=-1)
    return found_N


def unit(vectors: np.ndarray) -> np.ndarray:
    """Return vectors ``(..., D)`` scaled to length 1; a zero vector stays one.

    >>> unit(np.array([[3.0, 4.0], [0.0, 0.0]])).tolist()
    [[0.6, 0.8], [0.0, 0.0]]
    """
    scaled: np.ndarray = vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)
    return scaled
