"""Bidirectional attention in bfloat16 on a CPU as two matmuls with a softmax between them.

The fused kernel takes up to twice as long, since it multiplies small blocks; here the matmul takes the scores of
several heads that fit into a core's cache. Nothing is approximated: rounding scores to bfloat16 doubles the rounding
error of the output, to 4e-3 of its size, which doesn't show in the bundled model's vectors: they are as close to those
of float32 either way (cosine 1 - 2.4e-6).
"""

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor

from gerund.attention.masks import added_to_scores

# The scores of a head of a longer text fill no cache.
_LONGEST = 2048
# Scores that a core computes together: 2 MiB of them.
_TOGETHER = 2**20
# From so many tokens on a text in a call of its own, without its padding, is quicker than several with it.
_ALONE = 256
# What else a model may want from its attention.
_MORE = ("softcap", "s_aux", "position_bias", "cache")


@cache
def cpu_has_bfloat16() -> bool:
    """Whether this processor computes in bfloat16 natively, without emulation."""
    checks = [getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")]
    return bool(torch.backends.mkldnn.is_available()) and any(check() for check in checks if check is not None)


def is_faster(query: Tensor, key: Tensor, kwargs: dict[str, Any]) -> bool:
    """Whether ``bidirectional_attention`` supports this attention and is faster than the fused kernel.

    ``key`` is ``(B, heads, K, d)``.
    """
    return (
        (query.device.type, query.dtype, key.dtype) == ("cpu", torch.bfloat16, torch.bfloat16)
        and not torch.is_grad_enabled()
        and not kwargs.get("dropout")
        and all(kwargs.get(name) is None for name in _MORE)
        and key.shape[2] <= _LONGEST
        and cpu_has_bfloat16()
        and not torch.compiler.is_compiling()
    )


def bidirectional_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    real_BT: Tensor | None = None,
    added: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Return the attention ``(B, T, heads, head_dim)`` that the fused kernel computes, without gradients.

    ``query`` is ``(B, heads, T, head_dim)``, ``key`` and ``value`` ``(B, key heads, K, head_dim)``. ``real_BT`` is True
    for tokens, where all tokens of a row see one another; the results for padding are arbitrary but finite. ``added``
    is added to the scores instead, ``(B or 1, 1, T, K)``.
    """
    rows, heads, length, width = query.shape
    scale = width**-0.5 if scale is None else scale
    with torch.autocast("cpu", enabled=False):
        texts = None if real_BT is None or length < _ALONE else _texts(real_BT)
        if texts is None:
            if real_BT is not None:
                added = added_to_scores(real_BT[:, None, None], query.dtype)
            return _in_parts(query, key, value, added, scale, query.new_empty((rows, length, heads, width)))
        found_BTHd = query.new_zeros((rows, length, heads, width))
        for row, text in enumerate(texts):
            part = slice(row, row + 1)
            mine, its_key, its_value = (states[part, :, text] for states in (query, key, value))
            _in_parts(mine, its_key, its_value, None, scale, found_BTHd[part, text])
    return found_BTHd


def _texts(real_BT: Tensor) -> list[slice] | None:
    """Return where the tokens of each row stand; None where a row has padding before and behind, or in between."""
    ends_B = (real_BT[:, 1:] != real_BT[:, :-1]).sum(dim=1)
    if int(ends_B.max()) > 1:
        return None
    length = real_BT.shape[1]
    counts, left = real_BT.sum(dim=1).tolist(), (~real_BT[:, 0]).tolist()
    return [slice(length - n, length) if is_left else slice(n) for n, is_left in zip(counts, left, strict=True)]


def _in_parts(
    query: Tensor, key: Tensor, value: Tensor, added: Tensor | None, scale: float, found_BTHd: Tensor
) -> Tensor:
    """Attend with as many rows or heads at a time as have few scores, and write the result into ``found_BTHd``."""
    key_heads, groups = key.shape[1], query.shape[1] // key.shape[1]
    together = max(1, _TOGETHER * torch.get_num_threads() // max(1, groups * query.shape[2] * key.shape[2]))
    for rows in _parts(query.shape[0], max(1, together // key_heads)):
        mine = added[rows] if added is not None and len(added) > 1 else added
        for heads in _parts(key_heads, min(together, key_heads)):
            query_heads = slice(heads.start * groups, heads.stop * groups)
            found_BHTd = _attended(query[rows, query_heads], key[rows, heads], value[rows, heads], mine, scale)
            found_BTHd[rows, :, query_heads] = found_BHTd.transpose(1, 2)
    return found_BTHd


def _attended(query: Tensor, key: Tensor, value: Tensor, added: Tensor | None, scale: float) -> Tensor:
    (rows, heads, queries, width), (_, key_heads, keys, _) = query.shape, key.shape
    if math.frexp(scale)[0] == 0.5:
        # A power of two changes no digit.
        query, scale = query * scale, 1.0
    # Queries of heads that share their keys stand below one another: one product, and no copies of keys.
    scores_BhRK = torch.matmul(query.reshape(rows, key_heads, -1, width), key.transpose(2, 3))
    if added is not None and added.shape[2] == 1:
        scores_BhRK = torch.add(added, scores_BhRK, alpha=scale)
    elif added is not None:
        scores_BhgTK = scores_BhRK.view(rows, key_heads, -1, queries, keys)
        scores_BhRK = torch.add(added[:, :, None], scores_BhgTK, alpha=scale).view(rows, key_heads, -1, keys)
    elif scale != 1.0:
        scores_BhRK.mul_(scale)
    weights_BhRK = torch.softmax(scores_BhRK, -1, out=scores_BhRK)
    return torch.matmul(weights_BhRK, value).view(rows, heads, queries, width)


def _parts(count: int, size: int) -> list[slice]:
    return [slice(first, min(first + size, count)) for first in range(0, count, size)]
