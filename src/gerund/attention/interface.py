"""Register gerund's attention functions with transformers.

A ``BoundPlan`` is passed to the model's forward as the keyword ``attention_plan``; transformers hands unknown keywords
down to the attention function. Without the keyword the functions are transformers' own, bit-identical. No model code is
patched and no state is shared, so threads may generate and encode with the same weights.
"""

import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask

from gerund.attention.bound_plan import BoundPlan, layer_window
from gerund.attention.layouts import text_half
from gerund.attention.masked import attach_carrier, has_indexer
from gerund.attention.matmul_attention import bidirectional_attention, is_faster
from gerund.errors import UnsupportedModelError
from gerund.settings.plan import Direction

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
