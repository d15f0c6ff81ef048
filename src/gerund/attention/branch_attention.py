"""Attention of many continuations of few texts, each text's keys and values held once.

Each new token sees the whole text that its row continues, the trunk, and its own row's tokens so far, the branch. All
rows of a trunk read its keys in one matrix product, where a cache with a copy for every row would read each copy.

Knows: keys and values of both parts, sliding windows. Does not know: models, tokens.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gerund.attention.bound_plan import BoundPlan, layer_window
from gerund.attention.masks import Chunk
from gerund.errors import UnsupportedModelError
from gerund.settings.plan import AttentionPlan

# Keys and values ``(key heads, T, head_dim)`` of one text.
Trunk = tuple[Tensor, Tensor]


class Branches(BoundPlan):
    """The causal plan for one new token in each of many rows.

    Args:
        trunks: by layer, the keys and values of each text.
        rows: how many rows continue each text; rows of one text stand together, in the order of the texts.
    """

    computes_itself = True

    def __init__(self, trunks: Sequence[Sequence[Trunk]], rows: Sequence[int]) -> None:
        super().__init__(AttentionPlan("causal").resolve(len(trunks)))
        self.trunks, self.rows = trunks, list(rows)

    def check_lengths(self, queries: int, keys: int) -> None:
        """Accept any number of keys: those of the branches are not of this pass alone."""
        del queries, keys

    def attend(
        self, module: nn.Module, layer: int, query: Tensor, key: Tensor, value: Tensor, kwargs: dict[str, Any]
    ) -> Tensor:
        """Return the new tokens' attention ``(B, 1, heads, head_dim)``.

        Args:
            module: the attention module.
            layer: its index.
            query: ``(B, heads, 1, head_dim)``.
            key: of the branches, the new token included, ``(B, key heads, S, head_dim)``.
            value: like ``key``.
            kwargs: what else the model passes; ``scaling`` and the window are read.
        """
        self.asked.add(layer)
        B, heads, _, width = query.shape
        key_heads = key.shape[1]
        given = kwargs.get("scaling")
        query = query * (width**-0.5 if given is None else given)
        query_BKGD = query.reshape(B, key_heads, heads // key_heads, width)
        window = layer_window(module, kwargs)
        if isinstance(window, Chunk):
            raise UnsupportedModelError("attention in parts of a text has no keys that many continuations share")
        if window is not None and window < key.shape[2]:
            key, value = key[:, :, -window:], value[:, :, -window:]
        own_BKGS = query_BKGD @ key.transpose(2, 3)
        found = []
        start = 0
        for (trunk_key_KTD, trunk_value_KTD), count in zip(self.trunks[layer], self.rows, strict=True):
            rows = slice(start, start + count)
            start += count
            if not count:
                continue
            hidden = 0  # tokens at the beginning of the trunk that lie behind the window
            if window is not None:
                hidden = max(0, trunk_key_KTD.shape[1] + key.shape[2] - window)
            trunk_key_KTD, trunk_value_KTD = trunk_key_KTD[:, hidden:], trunk_value_KTD[:, hidden:]
            scores_BKGT = _through(query_BKGD[rows], trunk_key_KTD.transpose(1, 2))
            both = torch.cat([scores_BKGT, own_BKGS[rows]], dim=-1).softmax(dim=-1, dtype=torch.float32)
            trunk_BKGT, branch_BKGS = both.to(query.dtype).split([scores_BKGT.shape[-1], key.shape[2]], dim=-1)
            found.append(_through(trunk_BKGT, trunk_value_KTD) + branch_BKGS @ value[rows])
        return torch.cat(found).reshape(B, 1, heads, width)


def _through(left_BKGX: Tensor, right_KXY: Tensor) -> Tensor:
    """Return ``left @ right`` with all rows of a key head in one product, ``(B, K, G, Y)``."""
    B, K, G, X = left_BKGX.shape
    product_KRY = left_BKGX.transpose(0, 1).reshape(K, B * G, X) @ right_KXY
    return product_KRY.reshape(K, B, G, -1).transpose(0, 1)
