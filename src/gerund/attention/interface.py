"""Register gerund's attention functions with transformers.

A ``BoundPlan`` is passed to the model's forward as the keyword ``attention_plan``; transformers hands unknown keywords
down to the attention function. Without the keyword the functions are transformers' own, bit-identical. No model code is
patched and no state is shared, so threads may generate and encode with the same weights.

Bidirectional attention in bfloat16 on a CPU is two matmuls with a softmax between them. The fused kernel takes up to
twice as long, since it multiplies small blocks; here the matmul takes the scores of several heads that fit into a
core's cache. Nothing is approximated: rounding scores to bfloat16 doubles the rounding error of the output, to 4e-3 of
its size, which doesn't show in the bundled model's vectors: they are as close to those of float32 either way (cosine
1 - 2.4e-6).
"""

import math
import sys
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask

from gerund.attention.bound_plan import BoundPlan, layer_window
from gerund.attention.layouts import text_half
from gerund.attention.masked import attach_carrier, has_indexer
from gerund.attention.masks import added_to_scores
from gerund.errors import UnsupportedModelError
from gerund.settings.plan import Direction

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


# transformers looks for "sdpa", "flash" and "flex" inside these names: none may occur in ours.
FUSED = "gerund"
ADDITIVE = "gerund_additive"

# On a CPU the fused kernel's backward pass is up to five times slower than plain products while texts are short: at 48
# tokens 14 ms against 3, at 160 46 against 24, at 256 57 against 72 (16 texts, 6 heads of 64, one core, bf16).
_SHORT = 192


def _layer_of(module: nn.Module, plan: BoundPlan, query: Tensor, key: Tensor) -> int:
    layer = getattr(module, "gerund_layer", getattr(module, "layer_idx", None))
    if layer is None:
        raise UnsupportedModelError(
            f"{type(module).__name__} does not say which layer it is (layer_idx), so no attention plan can "
            "be applied to it; use the model with attention='causal'"
        )
    plan.check_lengths(query.shape[2], key.shape[2])
    return int(layer)


def fused_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    attention_plan: BoundPlan | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Scaled dot-product attention under a plan; transformers' own without one."""
    if attention_plan is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    output = _planned(module, query, key, value, attention_mask, attention_plan, **kwargs)
    if attention_plan.attention_parts is not None:
        attention_plan.attention_parts.keep(_layer_of(module, attention_plan, query, key), module, value, output[0])
    return output


def _planned(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    attention_plan: BoundPlan,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    layer = _layer_of(module, attention_plan, query, key)
    output = attention_plan.attend(module, layer, query, key, value, kwargs)
    if output is not None:
        return output, None
    if attention_plan.record is None:
        if _trains_short_texts(module, query):
            return additive_attention(module, query, key, value, attention_mask, attention_plan, **kwargs)
        if attention_plan.view(layer).direction is Direction.BIDIRECTIONAL and is_faster(query, key, kwargs):
            return _products(module, layer, query, key, value, attention_plan, kwargs), None
    attention_mask = attention_plan.mask(layer, query, layer_window(module, kwargs), None)
    kwargs["is_causal"] = attention_plan.view(layer).direction is Direction.CAUSAL
    if attention_plan.record is not None:
        mask = attention_plan.mask(layer, query, layer_window(module, kwargs), torch.float32)
        weights = _probabilities(query, key, mask, kwargs.get("scaling"))
        attention_plan.record(layer, attention_plan.is_second_stream, weights)
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


def _trains_short_texts(module: nn.Module, query: Tensor) -> bool:
    """Whether plain products are quicker, and the architecture has a function for them."""
    trains = torch.is_grad_enabled() and query.requires_grad
    short = query.device.type == "cpu" and query.shape[2] <= _SHORT
    return trains and short and hasattr(sys.modules[type(module).__module__], "eager_attention_forward")


def _products(
    module: nn.Module, layer: int, query: Tensor, key: Tensor, value: Tensor, plan: BoundPlan, kwargs: dict[str, Any]
) -> Tensor:
    window = layer_window(module, kwargs)
    if plan.hides_padding_alone(layer, query.shape[2], window):
        return bidirectional_attention(query, key, value, real_BT=plan.real_BT, scale=kwargs.get("scaling"))
    added = plan.mask(layer, query, window, query.dtype)
    return bidirectional_attention(query, key, value, added=added, scale=kwargs.get("scaling"))


def _probabilities(query: Tensor, key: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    """Return what the fused kernel computes and keeps to itself: ``(B, heads, T, T)`` in float32."""
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    keys = repeat_kv(key, query.shape[1] // key.shape[1])
    scores = query.float() @ keys.float().transpose(2, 3) * scaling
    return (scores if mask is None else scores + mask).softmax(dim=-1)


def additive_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    attention_plan: BoundPlan | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend as ``fused_attention`` does, through the architecture's own eager function.

    For models whose scores are capped or have learned sinks, which the fused kernel cannot do.
    """
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward")  # noqa: B009
    if attention_plan is not None:
        layer = _layer_of(module, attention_plan, query, key)
        attention_mask = attention_plan.mask(layer, query, layer_window(module, kwargs), query.dtype)
    output: tuple[Tensor, Tensor | None] = eager(module, query, key, value, attention_mask, **kwargs)
    if attention_plan is not None and attention_plan.record is not None and output[1] is not None:
        attention_plan.record(layer, attention_plan.is_second_stream, output[1])
    if attention_plan is not None and attention_plan.attention_parts is not None:
        attention_plan.attention_parts.keep(layer, module, value, output[0])
    return output


def attach(model: PreTrainedModel) -> None:
    """Let ``model`` attend through gerund's functions: fused where it used SDPA, else its own eager one.

    Its results without a plan do not change by a bit.
    """
    if model.base_model is model and isinstance(getattr(model, "model", None), PreTrainedModel):
        model.base_model_prefix = "model"  # llama4 names a part that it does not have
    attach_carrier(model)
    # bloom, gptj and falcon choose among attention classes of their own, and would only print a warning; attention with
    # an indexer asks for the function by its name, and would leave the indexer out.
    target = model if model._can_set_attn_implementation() else _settable_half(model)
    if target is None or has_indexer(model):
        return
    current = target.config._attn_implementation
    if current not in (FUSED, ADDITIVE):
        target.set_attn_implementation(FUSED if current == "sdpa" else ADDITIVE)


def _settable_half(model: PreTrainedModel) -> PreTrainedModel | None:
    """Return the text half of a model whose towers choose attention otherwise; None for a model without."""
    try:
        half = text_half(model)
    except UnsupportedModelError:
        return None
    return half if half.config is not model.config and half._can_set_attn_implementation() else None


# Without the mask function of the same name transformers would drop the padding mask without a word.
AttentionInterface.register(FUSED, fused_attention)
AttentionMaskInterface.register(FUSED, sdpa_mask)
AttentionInterface.register(ADDITIVE, additive_attention)
AttentionMaskInterface.register(ADDITIVE, eager_mask)
