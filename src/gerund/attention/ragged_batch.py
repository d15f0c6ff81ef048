"""Attention of texts that are written side by side, each with as many keys as it has tokens so far.

What a row computes must not depend on the rows beside it, not even in the last bit. Kernels sum over keys in blocks of
vectors, so what a row gets changes with how many hidden keys stand behind its own, unless they fill whole vectors.
Hence two ways: all rows in one call whose keys end at a multiple of ``STEP``, or a call for each row on its own keys.

Knows: keys, lengths, transformers' attention function. Does not know: models, tokens, caches.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from gerund.attention.bound_plan import BoundPlan
from gerund.attention.masks import Near
from gerund.attention.plan import AttentionPlan, ResolvedPlan
from gerund.errors import UnsupportedModelError

# Keys of a call, rounded up: the widest vector of float32 in use, so that hidden keys fill whole ones.
STEP = 16


class SideBySide(BoundPlan):
    """The causal plan for one new token in each of several rows.

    Args:
        n_layers: number of decoder layers.
        lengths: keys of each row, its new token included.
        alone: attend to each row in a call of its own, which is what the row would do if there were no others.
        device: where the model lies.
    """

    computes_itself = True

    def __init__(self, n_layers: int, lengths: Sequence[int], *, alone: bool, device: torch.device) -> None:
        super().__init__(_causal(n_layers))
        self.lengths, self.alone = list(lengths), alone
        self.width = -(-max(lengths) // STEP) * STEP
        place_W = torch.arange(self.width, device=device)
        self.real_B11W = (place_W < torch.tensor(self.lengths, device=device)[:, None])[:, None, None]
        self._added: dict[torch.dtype, Tensor] = {}

    def check_lengths(self, queries: int, keys: int) -> None:
        """Accept the keys of earlier passes."""
        del queries, keys

    def mask(self, layer: int, query: Tensor, window: Near, dtype: torch.dtype | None) -> Tensor | None:
        """Return what attention that is no kernel adds to its scores, ``(B, 1, 1, W)``."""
        self.asked.add(layer)
        if window is not None:
            raise UnsupportedModelError("rows that are written side by side see all of their keys")
        if dtype is None:
            return self.real_B11W
        if dtype not in self._added:
            zero = torch.zeros((), dtype=dtype, device=query.device)
            self._added[dtype] = torch.where(self.real_B11W, zero, torch.finfo(dtype).min)
        return self._added[dtype]

    def attend(
        self, module: nn.Module, layer: int, query: Tensor, key: Tensor, value: Tensor, kwargs: dict[str, Any]
    ) -> Tensor:
        """Return the new tokens' attention ``(B, 1, heads, head_dim)``.

        Args:
            module: the attention module.
            layer: its index.
            query: ``(B, heads, 1, head_dim)``.
            key: ``(B, key heads, W, head_dim)``; what stands behind a row's length is hidden.
            value: like ``key``.
            kwargs: what else the model passes.
        """
        self.asked.add(layer)
        if any(kwargs.get(name) is not None for name in ("sliding_window", "softcap", "s_aux", "position_bias")):
            raise UnsupportedModelError(f"{type(module).__name__} does more than attend to all keys of a row")
        if not self.alone:
            if query.device.type == "cpu" and query.dtype in (torch.bfloat16, torch.float16):
                return _in_products(query, key, value, self.real_B11W, kwargs.get("scaling"))
            found: Tensor = functional.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=self.real_B11W,
                scale=kwargs.get("scaling"),
                # Not several queries of a head in one product, whose sums depend on how many keys there are.
                enable_gqa=query.shape[1] != key.shape[1],
            )
            return found.transpose(1, 2)
        own = []
        for row, length in enumerate(self.lengths):
            part = slice(row, row + 1)
            mine = query[part], key[part, :, :length], value[part, :, :length]
            own.append(sdpa_attention_forward(module, *mine, None, **kwargs)[0])
        return own[0] if len(own) == 1 else torch.cat(own)


def _in_products(query: Tensor, key: Tensor, value: Tensor, real_B11W: Tensor, scale: float | None) -> Tensor:
    """Return the attention of one query a row ``(B, 1, heads, head_dim)``, as two products.

    On a CPU torch's fused kernel takes up to four times as long for a single query in half precision: it brings all
    keys and values into another order first. Sums and weights are float32 here too.
    """
    (rows, heads, _, width), key_heads = query.shape, key.shape[1]
    query_BHGD = query.reshape(rows, key_heads, heads // key_heads, width)
    scores_BHGW = torch.matmul(query_BHGD, key.transpose(2, 3)).float() * (width**-0.5 if scale is None else scale)
    weights_BHGW = scores_BHGW.masked_fill_(~real_B11W, float("-inf")).softmax(dim=-1)
    return torch.matmul(weights_BHGW.to(value.dtype), value).reshape(rows, 1, heads, width)


class Rest(BoundPlan):
    """The causal plan for the rest of a text whose beginning was read before, computed as if all of it were read now.

    The kernel gets a row for every token of the text, those of the beginning being empty: so it divides the work as in
    a pass over the whole text, and what it gives the rest is the same to the bit.

    Args:
        n_layers: number of decoder layers.
        start: tokens that were read before.
    """

    computes_itself = True

    def __init__(self, n_layers: int, start: int) -> None:
        super().__init__(_causal(n_layers))
        self.start = start

    def check_lengths(self, queries: int, keys: int) -> None:
        """Raise unless the keys are those of the whole text.

        Raises:
            UnsupportedModelError: they are not.
        """
        if keys != self.start + queries:
            raise UnsupportedModelError(f"attention sees {keys} keys where {self.start + queries} tokens were read")

    def attend(
        self, module: nn.Module, layer: int, query: Tensor, key: Tensor, value: Tensor, kwargs: dict[str, Any]
    ) -> Tensor:
        """Return the attention of the rest ``(B, T, heads, head_dim)``; see ``SideBySide.attend``."""
        self.asked.add(layer)
        if kwargs.get("sliding_window") is not None:
            raise UnsupportedModelError(f"{type(module).__name__} does more than attend to all keys of a row")
        whole: Tensor = sdpa_attention_forward(
            module, functional.pad(query, (0, 0, self.start, 0)), key, value, None, **kwargs
        )[0]
        return whole[:, self.start :]


@cache
def _causal(n_layers: int) -> ResolvedPlan:
    return AttentionPlan("causal").resolve(n_layers)
