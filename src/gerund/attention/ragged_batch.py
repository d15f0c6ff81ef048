"""Attention for batched decoding of sequences with different cache lengths, and of branches of shared prompts.

The result of a row must be bit-identical regardless of the other rows. Kernels sum over keys in blocks of vectors, so a
row's result changes with the number of hidden keys after its own, unless they fill complete vectors. Hence two ways:
all rows in one call whose keys end at a multiple of ``STEP``, or one call per row on its own keys.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from gerund.attention import BLOCK, whole_blocks
from gerund.attention.bound_plan import BoundPlan, layer_window
from gerund.attention.masks import Chunk, Near, added_to_scores
from gerund.errors import UnsupportedModelError
from gerund.settings.plan import AttentionPlan, ResolvedPlan

# Keys of a call, rounded up: the widest vector of float32 in use, so that hidden keys fill whole ones.
STEP = 16
# Numbers that a row has room for in all of its keys, up to which they are converted to float32 in each step: of eight
# rows they are less than malloc takes from the system anew each time.
_QUICKLY_CONVERTED = 3 * 2**18


class RaggedBatch(BoundPlan):
    """The causal plan for one new token in each of several rows; ``lengths`` are their keys, new token included.

    With ``alone`` each row attends in a call of its own, as it would without the others.
    """

    computes_itself = True

    def __init__(self, n_layers: int, lengths: Sequence[int], *, alone: bool, device: torch.device) -> None:
        super().__init__(_causal(n_layers))
        self.lengths, self.alone = list(lengths), alone
        self.width = -(-max(lengths) // STEP) * STEP
        place_W = torch.arange(self.width, device=device)
        self.real_B11W = (place_W < torch.tensor(self.lengths, device=device)[:, None])[:, None, None]
        self._added: dict[tuple[torch.dtype | None, Near], Tensor] = {}

    def check_lengths(self, queries: int, keys: int) -> None:
        """Accept the keys of earlier passes."""
        del queries, keys

    def mask(self, layer: int, query: Tensor, window: Near, dtype: torch.dtype | None) -> Tensor | None:
        """Return what attention that is no kernel adds to its scores, ``(B, 1, 1, W)``."""
        self.asked.add(layer)
        if isinstance(window, Chunk):
            raise UnsupportedModelError("rows that are written side by side see no parts of their keys")
        if dtype is None and window is None:
            return self.real_B11W
        if (dtype, window) not in self._added:
            seen_B11W = self.real_B11W
            if window is not None:
                end_B111 = torch.tensor(self.lengths, device=query.device)[:, None, None, None]
                seen_B11W = seen_B11W & (torch.arange(self.width, device=query.device) >= end_B111 - window)
            self._added[dtype, window] = seen_B11W if dtype is None else added_to_scores(seen_B11W, dtype)
        return self._added[dtype, window]

    def attend(
        self, module: nn.Module, layer: int, query: Tensor, key: Tensor, value: Tensor, kwargs: dict[str, Any]
    ) -> Tensor:
        """Return the new tokens' attention ``(B, 1, heads, head_dim)``.

        Keys ``(B, key heads, W, head_dim)`` are padded.
        """
        self.asked.add(layer)
        _refuse_more(module, kwargs)
        if not self.alone:
            half = query.device.type == "cpu" and query.dtype in (torch.bfloat16, torch.float16)
            if half and key.stride(0) > _QUICKLY_CONVERTED:
                return _by_matmul(query, key, value, self.real_B11W, kwargs.get("scaling"))
            # On a CPU the kernel of half precision takes up to four times as long for a single query: it brings all
            # keys and values into another order first.
            inner = torch.float32 if half else query.dtype
            output: Tensor = functional.scaled_dot_product_attention(
                query.to(inner),
                key.to(inner),
                value.to(inner),
                attn_mask=self.real_B11W,
                scale=kwargs.get("scaling"),
                # Not several queries of a head in one product, whose sums depend on how many keys there are.
                enable_gqa=query.shape[1] != key.shape[1],
            )
            return output.to(query.dtype).transpose(1, 2)
        attended = []
        for row, length in enumerate(self.lengths):
            part = slice(row, row + 1)
            mine = query[part], key[part, :, :length], value[part, :, :length]
            attended.append(sdpa_attention_forward(module, *mine, None, **kwargs)[0])
        return attended[0] if len(attended) == 1 else torch.cat(attended)


def _by_matmul(query: Tensor, key: Tensor, value: Tensor, real_B11W: Tensor, scale: float | None) -> Tensor:
    """Return the attention of one query a row ``(B, 1, heads, head_dim)``, as two products; weights are float32."""
    (rows, heads, _, width), key_heads = query.shape, key.shape[1]
    query_BHGD = query.reshape(rows, key_heads, heads // key_heads, width)
    scores_BHGW = torch.matmul(query_BHGD, key.transpose(2, 3)).float() * (width**-0.5 if scale is None else scale)
    weights_BHGW = scores_BHGW.masked_fill_(~real_B11W, float("-inf")).softmax(dim=-1)
    return torch.matmul(weights_BHGW.to(value.dtype), value).reshape(rows, 1, heads, width)


class BlockPrefill(BoundPlan):
    """The causal plan for prefill in parts: the result of a token is bit-identical in a longer text.

    ``parts`` has for each text how many tokens were read before, full blocks, and how many are read now.

    Kernels divide the queries among themselves by how many there are, and sum over the keys that the last query of a
    part may see: in a pass over a longer text a token is summed up otherwise. So each ``BLOCK`` of tokens attends in a
    call of its own, filled up with empty ones, to the keys up to its end.
    """

    computes_itself = True

    def __init__(self, n_layers: int, parts: Sequence[tuple[int, int]]) -> None:
        super().__init__(_causal(n_layers))
        self.parts = list(parts)
        self.width = max(whole_blocks(start + length) for start, length in self.parts)
        self._added: Tensor | None = None

    def check_lengths(self, queries: int, keys: int) -> None:
        """Raise unless the keys are those of the whole texts, the last block of the longest filled up."""
        parts_fit = not any(start % BLOCK for start, _ in self.parts)
        if not parts_fit or keys != self.width or queries != sum(length for _, length in self.parts):
            raise UnsupportedModelError(f"attention sees {keys} keys of {queries} tokens that are read")

    def mask(self, layer: int, query: Tensor, window: Near, dtype: torch.dtype | None) -> Tensor | None:
        """Return what attention that is no kernel adds to its scores, ``(1, 1, T, W)``, of a single text."""
        self.asked.add(layer)
        if window is not None or len(self.parts) > 1:
            raise UnsupportedModelError("attention that is no kernel takes one text at a time, which sees all its keys")
        [(start, length)] = self.parts
        own_T = torch.arange(start, start + length, device=query.device)
        seen_11TW = (torch.arange(self.width, device=query.device) <= own_T[:, None])[None, None]
        return seen_11TW if dtype is None else added_to_scores(seen_11TW, dtype)

    def attend(
        self, module: nn.Module, layer: int, query: Tensor, key: Tensor, value: Tensor, kwargs: dict[str, Any]
    ) -> Tensor:
        """Return the attention ``(1, T, heads, head_dim)`` of the tokens that are read now, text after text."""
        self.asked.add(layer)
        _refuse_more(module, kwargs)
        outputs, first = [], 0
        for text, (start, length) in enumerate(self.parts):
            keys = whole_blocks(start + length)
            own_key, own_value = (states[text : text + 1, :, :keys] for states in (key, value))
            own_query = query[:, :, first : first + length]
            outputs.append(self._text(own_query, own_key, own_value, start, kwargs.get("scaling")))
            first += length
        return torch.cat(outputs, dim=2).transpose(1, 2)

    def _text(self, query: Tensor, key: Tensor, value: Tensor, start: int, scale: float | None) -> Tensor:
        """Return the attention of one text, ``(1, heads, T, head_dim)``."""
        length, width = query.shape[2], key.shape[2]
        if query.shape[1] != key.shape[1]:
            groups = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        query = functional.pad(query, (0, 0, 0, width - start - length))
        # Many small calls are quick on a CPU alone; what another device computes is looked at like any other.
        size = BLOCK if query.device.type == "cpu" else query.shape[2]
        outputs = []
        for first in range(0, query.shape[2], size):
            keys = start + first + size
            outputs.append(
                functional.scaled_dot_product_attention(
                    query[:, :, first : first + size],
                    key[:, :, :keys],
                    value[:, :, :keys],
                    attn_mask=self._added_to(query, size, keys),
                    scale=scale,
                )
            )
        return torch.cat(outputs, dim=2)[:, :, :length]

    def _added_to(self, query: Tensor, size: int, keys: int) -> Tensor:
        """Return what is added to the scores of a block, the last of so many keys, ``(size, keys)``."""
        if self._added is None or self._added.dtype != query.dtype or len(self._added) != size:
            hidden_BB = torch.ones((size, size), dtype=torch.bool, device=query.device).triu(1)
            own_BB = query.new_zeros((size, size)).masked_fill_(hidden_BB, float("-inf"))
            self._added = torch.cat([query.new_zeros((size, self.width - size)), own_BB], dim=1)
        return self._added[:, self.width - keys :]


def _refuse_more(module: nn.Module, kwargs: dict[str, Any]) -> None:
    if any(kwargs.get(name) is not None for name in ("sliding_window", "softcap", "s_aux", "position_bias")):
        raise UnsupportedModelError(f"{type(module).__name__} does more than attend to all keys of a row")


@cache
def _causal(n_layers: int) -> ResolvedPlan:
    return AttentionPlan("causal").resolve(n_layers)


# Keys and values ``(key heads, T, head_dim)`` of one text.
Trunk = tuple[Tensor, Tensor]


class Branches(BoundPlan):
    """The causal plan for one new token in each of many rows that continue a few texts, whose keys are stored once.

    Each new token sees the full text that its row continues, the trunk, and its row's own tokens, the branch. All rows
    of a trunk read its keys in one matmul, where a cache with a copy per row would read each copy. ``trunks`` has by
    layer the keys and values of each text, ``rows`` how many rows continue each; rows of one text are adjacent.
    """

    computes_itself = True

    def __init__(self, trunks: Sequence[Sequence[Trunk]], rows: Sequence[int]) -> None:
        super().__init__(AttentionPlan("causal").resolve(len(trunks)))
        self.trunks, self.rows = trunks, list(rows)

    def check_lengths(self, queries: int, keys: int) -> None:
        """Accept any number of keys: the branches have keys of earlier passes."""
        del queries, keys

    def attend(
        self, module: nn.Module, layer: int, query: Tensor, key: Tensor, value: Tensor, kwargs: dict[str, Any]
    ) -> Tensor:
        """Return the new tokens' attention ``(B, 1, heads, head_dim)``."""
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
        outputs = []
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
            outputs.append(_through(trunk_BKGT, trunk_value_KTD) + branch_BKGS @ value[rows])
        return torch.cat(outputs).reshape(B, 1, heads, width)


def _through(left_BKGX: Tensor, right_KXY: Tensor) -> Tensor:
    """Return ``left @ right`` with all rows of a key head in one product, ``(B, K, G, Y)``."""
    B, K, G, X = left_BKGX.shape
    product_KRY = left_BKGX.transpose(0, 1).reshape(K, B * G, X) @ right_KXY
    return product_KRY.reshape(K, B, G, -1).transpose(0, 1)
