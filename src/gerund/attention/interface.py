"""Brings the masks into the model: attention functions registered with transformers.

A ``BoundPlan`` travels as the forward keyword ``attention_plan``; transformers hands keywords that it does
not know down to the attention function. Without the keyword the functions are transformers' own, bit for
bit. No model code is patched and no state is shared, so that threads may generate and encode on the same
weights.

Knows: transformers' attention functions. Does not know: what the plans are good for.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask

from gerund.attention.masks import padding_side, visible
from gerund.attention.plan import Direction, ResolvedPlan, Stream, View
from gerund.errors import ConfigError, UnsupportedModelError

# transformers looks for "sdpa", "flash" and "flex" inside these names: none may occur in ours.
FUSED = "gerund"
ADDITIVE = "gerund_additive"

# On a CPU the fused kernel's backward pass is up to five times slower than plain products while texts are short: at 48
# tokens 14 ms against 3, at 160 46 against 24, at 256 57 against 72 (16 texts, 6 heads of 64, one core, bf16).
_SHORT = 192

# Called with a layer, whether this is its second pass, and its attention probabilities (B, heads, T, T).
Record = Callable[[int, bool, Tensor], None]
# Called after a layer has run, with its index, itself, its call and its output; may return another output.
AfterLayer = Callable[[int, nn.Module, tuple[Any, ...], dict[str, Any], Any], Any]
# The same without the layer, called with what the plan made of its output.
Beside = Callable[[int, tuple[Any, ...], dict[str, Any], Any], Any]


class BoundPlan:
    """A plan bound to one batch: what goes into ``model(..., attention_plan=...)``.

    One object serves one forward pass (and its backward pass): it keeps the masks, which layers of the
    model asked for them, and the states of a second stream. What is set as ``beside`` is called after each layer with
    what the plan made of its output, and may change that.

    Args:
        plan: the plan, resolved for the model's layers.
        real_BT: the batch's attention mask, 1 for tokens and 0 for padding; None for no padding.
        span_BT: 0 for context, s >= 1 for the tokens of span s (``hybrid`` only).
        record: told every layer's attention probabilities as it runs; None, the usual, computes none of them.
        after_layer: takes the place of the plan's own stream; see ``attention.sweep``.
    """

    def __init__(
        self,
        plan: ResolvedPlan,
        real_BT: Tensor | None = None,
        span_BT: Tensor | None = None,
        record: Record | None = None,
        after_layer: AfterLayer | None = None,
    ) -> None:
        self.plan = plan
        self.record = record
        self.after_layer = after_layer
        self.side = "none" if real_BT is None else padding_side(real_BT)
        self.real_BT = None if self.side == "none" or real_BT is None else real_BT.bool()
        self.span_BT = span_BT
        self.asked: set[int] = set()
        self.unmet: set[int] = set()  # layers whose recurrent module has not been given the plan yet
        self.states: dict[int, Tensor] = {}
        self.beside: Beside | None = None
        self._masks: dict[tuple[Any, ...], Tensor | None] = {}
        self._only: View | None = None
        if span_BT is None and any(view.direction is Direction.HYBRID for view in plan.views):
            raise ConfigError("the plan 'hybrid' fills spans: encode with another plan, or give the spans")

    @property
    def is_twin(self) -> bool:
        """Whether this object runs inside a second stream."""
        return self._only is not None

    @property
    def stream(self) -> Stream | None:
        """The second stream, unless this object already runs inside it."""
        return None if self.is_twin else self.plan.stream

    @property
    def skips(self) -> tuple[int, ...]:
        """The layers whose inputs are added further up, unless this object runs inside a second stream."""
        return () if self.is_twin else self.plan.skips

    def seen_through(self, view: View) -> "BoundPlan":
        """Return the same batch with one view for every layer: what a second stream runs on."""
        other = BoundPlan.__new__(BoundPlan)
        other.__dict__.update(self.__dict__)
        other._only = view
        return other

    def view(self, layer: int) -> View:
        """Return what layer ``layer`` sees, and note that it asked."""
        self.asked.add(layer)
        return self.view_unasked(layer)

    def view_unasked(self, layer: int) -> View:
        """Return what layer ``layer`` sees, to a module that does not answer for the whole layer."""
        return self._only or self.plan.views[layer]

    def mask(self, layer: int, query: Tensor, window: int | None, dtype: torch.dtype | None) -> Tensor | None:
        """Return layer ``layer``'s mask, made once for all layers that share it.

        Args:
            layer: index of the layer.
            query: its queries ``(B, heads, T, head_dim)``; only shape and device are read.
            window: the layer's sliding window.
            dtype: None for a boolean mask, else an additive one of this dtype.

        Returns:
            ``(B or 1, 1, T, T)``; None where "causal" or "sees everything" needs no mask.
        """
        view = self.view(layer)
        length = query.shape[2]
        if window is not None and window >= self._width(length):
            window = None
        if dtype is None and self._needs_no_mask(view, window):
            return None
        key = (view, window, dtype, query.device)
        if key not in self._masks:
            see = self._visible(view, length, window, query.device)
            if dtype is None:
                self._masks[key] = see
            else:
                zero = torch.zeros((), dtype=dtype, device=query.device)
                self._masks[key] = torch.where(see, zero, torch.finfo(dtype).min)
        return self._masks[key]

    def check_lengths(self, queries: int, keys: int) -> None:
        """Raise unless this plan says what so many queries see of so many keys.

        Raises:
            ConfigError: there are keys from an earlier pass.
        """
        if queries != keys:
            raise ConfigError("an attention plan covers a whole text: it cannot be combined with cached keys")

    def attend(
        self, module: nn.Module, layer: int, query: Tensor, key: Tensor, value: Tensor, kwargs: dict[str, Any]
    ) -> Tensor | None:
        """Return the attention ``(B, T, heads, head_dim)`` where a plan computes it itself; None, the usual, for not.

        ``attention.branches`` does.
        """
        del module, layer, query, key, value, kwargs
        return None

    def _width(self, length: int) -> int:
        """Return the smallest window that hides nothing from a pass of ``length`` queries."""
        return length

    def _visible(self, view: View, length: int, window: int | None, device: torch.device) -> Tensor:
        """Return who sees whom, ``(B or 1, 1, queries, keys)``."""
        real = None if self.real_BT is None else self.real_BT.to(device)
        span = None if self.span_BT is None else self.span_BT.to(device)
        return visible(view, length, real_BT=real, span_BT=span, window=window, device=device)

    def _needs_no_mask(self, view: View, window: int | None) -> bool:
        if view.hidden or window is not None:
            return False
        if view.direction is Direction.BIDIRECTIONAL:
            return self.side == "none"
        # Tokens before right padding never see it when they look to the left only.
        return view.direction is Direction.CAUSAL and self.side in ("none", "right")

    def check_all_asked(self, name: str) -> None:
        """Raise unless every layer of the model asked for its mask in the pass that this object went through.

        Raises:
            UnsupportedModelError: a layer ran without asking, that is, causally whatever the plan said.
        """
        missing = sorted((set(range(len(self.plan.views))) - self.asked) | self.unmet)
        if missing:
            raise UnsupportedModelError(unreached(name, missing, len(self.plan.views)))


def unreached(name: str, layers: list[int], n_layers: int) -> str:
    """Return the sentence for layers that a plan does not reach."""
    which = "no layer" if len(layers) == n_layers else f"not layer {', '.join(map(str, layers))}"
    return (
        f"the attention plan reaches {which} of this {name} model, which would silently stay causal; "
        "use it with attention='causal', or take another architecture (llama, qwen, mistral, gemma, gpt2, "
        "gpt_neox, olmo, phi3, opt and granite are known to work)"
    )


def layer_window(module: nn.Module, kwargs: dict[str, Any]) -> int | None:
    """Return the sliding window of an attention module: from the call, else from the model's config."""
    if "sliding_window" in kwargs:
        return kwargs["sliding_window"]
    config = getattr(module, "config", None)
    types = getattr(config, "layer_types", None)
    layer = getattr(module, "layer_idx", None)
    if types is not None and layer is not None and types[layer] == "sliding_attention":
        return getattr(config, "sliding_window", None)
    return None


def _layer_of(module: nn.Module, plan: BoundPlan, query: Tensor, key: Tensor) -> int:
    layer = getattr(module, "layer_idx", None)
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
    """Scaled dot-product attention under a plan; transformers' own without one.

    Args:
        module: the attention module, which knows its ``layer_idx``.
        query: ``(B, heads, T, head_dim)``.
        key: ``(B, key heads, T, head_dim)``.
        value: like ``key``.
        attention_mask: the model's own causal mask; replaced when there is a plan.
        attention_plan: the batch's plan.
        **kwargs: whatever else the model passes (scaling, dropout, ...).

    Returns:
        ``(B, T, heads, head_dim)`` and None, as transformers' attention functions do.
    """
    if attention_plan is not None:
        layer = _layer_of(module, attention_plan, query, key)
        own = attention_plan.attend(module, layer, query, key, value, kwargs)
        if own is not None:
            return own, None
        if attention_plan.record is None and _trains_short_texts(module, query):
            return additive_attention(module, query, key, value, attention_mask, attention_plan, **kwargs)
        attention_mask = attention_plan.mask(layer, query, layer_window(module, kwargs), None)
        kwargs["is_causal"] = attention_plan.view(layer).direction is Direction.CAUSAL
        if attention_plan.record is not None:
            mask = attention_plan.mask(layer, query, layer_window(module, kwargs), torch.float32)
            weights = _probabilities(query, key, mask, kwargs.get("scaling"))
            attention_plan.record(layer, attention_plan.is_twin, weights)
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


def _trains_short_texts(module: nn.Module, query: Tensor) -> bool:
    """Whether plain products are quicker, and the architecture has a function for them."""
    trains = torch.is_grad_enabled() and query.requires_grad
    short = query.device.type == "cpu" and query.shape[2] <= _SHORT
    return trains and short and hasattr(sys.modules[type(module).__module__], "eager_attention_forward")


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
    own = getattr(sys.modules[type(module).__module__], "eager_attention_forward")  # noqa: B009
    if attention_plan is not None:
        layer = _layer_of(module, attention_plan, query, key)
        attention_mask = attention_plan.mask(layer, query, layer_window(module, kwargs), query.dtype)
    output: tuple[Tensor, Tensor | None] = own(module, query, key, value, attention_mask, **kwargs)
    if attention_plan is not None and attention_plan.record is not None and output[1] is not None:
        attention_plan.record(layer, attention_plan.is_twin, output[1])
    return output


def attach(model: PreTrainedModel) -> None:
    """Let ``model`` attend through gerund's functions: fused where it used SDPA, else its own eager one.

    Its results without a plan do not change by a bit.
    """
    current = model.config._attn_implementation
    # bloom, gptj and falcon choose among attention classes of their own, and would only print a warning.
    if current not in (FUSED, ADDITIVE) and model._can_set_attn_implementation():
        model.set_attn_implementation(FUSED if current == "sdpa" else ADDITIVE)


# Without the mask function of the same name transformers would drop the padding mask without a word.
AttentionInterface.register(FUSED, fused_attention)
AttentionMaskInterface.register(FUSED, sdpa_mask)
AttentionInterface.register(ADDITIVE, additive_attention)
AttentionMaskInterface.register(ADDITIVE, eager_mask)
