"""From token states to one vector a text.

Knows: which rows of a batch's states are pooled. Does not know: prompts, tokenizers, plans.
"""

import numpy as np
import torch
from torch import Tensor

from gerund.poolings import POOLINGS


def pool(hidden_BTD: Tensor, pooled_BT: Tensor, pooling: str) -> Tensor:
    """Pool the states that ``pooled_BT`` marks into one vector a text.

    Args:
        hidden_BTD: last hidden states.
        pooled_BT: True for the tokens that count. A row without any gives a zero vector.
        pooling: a name of ``gerund.poolings.POOLINGS``.

    Returns:
        ``(B, D)`` in float32.

    >>> states = torch.tensor([[[1.0], [3.0], [9.0]]])
    >>> counted = torch.tensor([[True, True, False]])
    >>> [pool(states, counted, name).item() for name in ("mean", "last", "first")]
    [2.0, 3.0, 1.0]
    >>> round(pool(states, counted, "weighted-mean").item(), 4)
    2.3333
    """
    weight_BT = POOLINGS[pooling].weights(pooled_BT.bool())
    weight_BT = weight_BT / weight_BT.sum(dim=1, keepdim=True).clamp(min=1.0)
    # Padding may hold anything, even infinities: it is taken out before it is multiplied by 0.
    states_BTD = hidden_BTD.float().masked_fill(weight_BT[..., None] == 0, 0.0)
    return torch.bmm(weight_BT[:, None], states_BTD)[:, 0]


def unit(vectors: np.ndarray) -> np.ndarray:
    """Return vectors ``(..., D)`` scaled to length 1; a zero vector stays one.

    >>> unit(np.array([[3.0, 4.0], [0.0, 0.0]])).tolist()
    [[0.6, 0.8], [0.0, 0.0]]
    """
    scaled: np.ndarray = vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)
    return scaled
