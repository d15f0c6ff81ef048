"""Find out which tokens each layer of a packed network attends to, one layer at a time.

Shapes: T tokens, D width, L layers, P masks, R rows.
"""

from collections.abc import Sequence

import numpy as np

from gerund.packed.network import MASKED, PackedNetwork


def moved_by_layer(
    network: PackedNetwork, ids_T: np.ndarray, masks_P1TT: np.ndarray, mask_of_layer_L: Sequence[int]
) -> np.ndarray:
    """Return how far each token is moved in each layer by another token, ``(L, T, T)`` (moved token, other token).

    While one layer is looked at, each token sees but itself in the others. Movements are those of the last states, as
    parts of how far a token moves when it is disturbed itself.
    """
    T, L = len(ids_T), len(mask_of_layer_L)
    alone_TT = np.where(np.eye(T, dtype=bool), np.float32(0), MASKED)
    masks_P1TT = np.concatenate([alone_TT[None, None], masks_P1TT])
    embedded_TD = network.embed(ids_T[None])[0]
    size_T1 = np.sqrt(np.square(embedded_TD).mean(axis=1, keepdims=True))
    rows_RTD = np.repeat(embedded_TD[None], T + 1, axis=0)
    rows_RTD[np.arange(T) + 1, np.arange(T)] = np.random.default_rng(0).standard_normal(embedded_TD.shape) * size_T1
    moved = []
    for layer in range(L):
        chosen = [0] * L
        chosen[layer] = 1 + mask_of_layer_L[layer]
        states = network.run(
            None,
            np.broadcast_to(np.arange(T), (T + 1, T)),
            embedded_BTD=rows_RTD,
            masks_PB1TS=np.repeat(masks_P1TT[:, None], T + 1, axis=1),
            mask_of_layer_L=chosen,
            depth=L,
        ).states
        assert states is not None
        change_KQ = np.sqrt(np.square(states[1:] - states[:1]).mean(axis=-1))
        moved.append((change_KQ / np.diagonal(change_KQ)[:, None]).T)
    return np.stack(moved)
