"""An attention plan bound to one batch; supplies the mask for each layer.

Also KV-Embedding, in which the last token's key and value precede the text, and the hybrid plan over a KV cache.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gerund.attention.masks import Chunk, Near, added_to_scores, hybrid_visible, padding_side, visible
from gerund.errors import ConfigError, UnsupportedModelError
from gerund.settings.plan import AttentionPlan, Direction, ResolvedPlan, Stream, View

# Called with a layer, whether this is its second pass, and its attention probabilities (B, heads, T, T).
Record = Callable[[int, bool, Tensor], None]
# Called after a layer has run, with its index, itself, its call and its output; may return another output.
AfterLayer = Callable[[int, nn.Module, tuple[Any, ...], dict[str, Any], Any], Any]
# The same without the layer, called with what the plan made of its output.
Beside = Callable[[int, tuple[Any, ...], dict[str, Any], Any], Any]


class KeepsParts(Protocol):
    """Is told of the values and the output of each layer's attention; see ``inference.encode.other_states``."""

    def keep(self, index: int, module: nn.Module, value: Tensor, output: Tensor) -> None:
        """Note the values ``(B, heads, T, d)`` and the output ``(B, T, heads, d)`` of a layer, counted from 0."""


class BoundPlan:
    """A plan bound to one batch: what goes into ``model(..., attention_plan=...)``.

    One object serves one forward pass (and its backward pass): it stores the masks, the layers that asked for them, and
    the states of a second stream. ``real_BT`` is 1 for tokens and 0 for padding; ``span_BT`` is 0 for context, s >= 1
    for the tokens of span s (``hybrid`` only). ``record`` is called with every layer's attention probabilities; without
    it none are computed. ``after_layer`` replaces the plan's own stream (see ``inference.encode.sweep``). ``beside`` is
    called after each layer with the plan's output, and may change it.
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
        self.rerouting: Rerouting | None = None
        self.attention_parts: KeepsParts | None = None
        self._masks: dict[tuple[Any, ...], Tensor | None] = {}
        self._only: View | None = None
        if span_BT is None and any(view.direction is Direction.HYBRID for view in plan.views):
            raise ConfigError("the plan 'hybrid' fills spans: encode with another plan, or give the spans")

    computes_itself = False
    """Whether ``attend`` computes attention, so that there is no mask for it."""

    @property
    def is_second_stream(self) -> bool:
        """Whether this object runs inside a second stream."""
        return self._only is not None

    @property
    def stream(self) -> Stream | None:
        """The second stream, unless this object already runs inside it."""
        return None if self.is_second_stream else self.plan.stream

    @property
    def skips(self) -> tuple[int, ...]:
        """The layers whose inputs are added further up, unless this object runs inside a second stream."""
        return () if self.is_second_stream else self.plan.skips

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

    def mask(self, layer: int, query: Tensor, window: Near, dtype: torch.dtype | None) -> Tensor | None:
        """Return the mask of a layer, made once for all layers that share it.

        ``query`` is ``(B, heads, T, head_dim)``. The mask is boolean with ``dtype`` None, else additive,
        ``(B or 1, 1, T, T)``; None where "causal" or "sees everything" needs none. That of a rerouted layer is always
        additive.
        """
        view = self.view(layer)
        length = query.shape[2]
        rerouting = self.rerouting if self.reroutes(layer) else None
        if rerouting is not None:
            rerouting.reached.add(layer)
            dtype = query.dtype if dtype is None else dtype
        if not self._hides(window, length):
            window = None
        if dtype is None and self._needs_no_mask(view, window):
            return None
        key = (view, window, dtype, query.device, rerouting is None)
        if key not in self._masks:
            see = self._visible(view, length, window, query.device)
            if dtype is None:
                self._masks[key] = see
            elif rerouting is not None:
                self._masks[key] = rerouting.mask(see, dtype)
            else:
                self._masks[key] = added_to_scores(see, dtype)
        return self._masks[key]

    def hides_padding_alone(self, layer: int, length: int, window: Near) -> bool:
        """Whether in this layer all tokens of a text see one another."""
        view = self.view(layer)
        to_all = view.direction is Direction.BIDIRECTIONAL and not view.hidden
        return to_all and not self.reroutes(layer) and not self._hides(window, length)

    def reroutes(self, layer: int) -> bool:
        """Whether the last token's key and value stand before the text in layer ``layer``."""
        return self.rerouting is not None and layer in self.rerouting.layers

    def check_lengths(self, queries: int, keys: int) -> None:
        """Raise where there are keys from an earlier pass."""
        if queries != keys:
            raise ConfigError("an attention plan covers a whole text: it cannot be combined with cached keys")

    def attend(
        self, module: nn.Module, layer: int, query: Tensor, key: Tensor, value: Tensor, kwargs: dict[str, Any]
    ) -> Tensor | None:
        """Return the attention ``(B, T, heads, head_dim)`` where a plan computes it itself; None, the usual, for not.

        The plans of ``attention.ragged_batch`` do.
        """
        del module, layer, query, key, value, kwargs
        return None

    def _hides(self, window: Near, length: int) -> bool:
        """Whether a window hides anything from a pass of ``length`` queries."""
        return window is not None and (window.size if isinstance(window, Chunk) else window) < self._width(length)

    def _width(self, length: int) -> int:
        """Return the smallest window that hides nothing from a pass of ``length`` queries."""
        return length

    def _visible(self, view: View, length: int, window: Near, device: torch.device) -> Tensor:
        """Return which query attends to which key, ``(B or 1, 1, queries, keys)``."""
        real = None if self.real_BT is None else self.real_BT.to(device)
        span = None if self.span_BT is None else self.span_BT.to(device)
        return visible(view, length, real_BT=real, span_BT=span, window=window, device=device)

    def _needs_no_mask(self, view: View, window: Near) -> bool:
        if view.hidden or window is not None:
            return False
        if view.direction is Direction.BIDIRECTIONAL:
            return self.side == "none"
        # Tokens before right padding never see it when they look to the left only.
        return view.direction is Direction.CAUSAL and self.side in ("none", "right")

    def check_all_asked(self, name: str) -> None:
        """Raise unless every layer of the model asked for its mask in the pass that this object went through."""
        missing = sorted((set(range(len(self.plan.views))) - self.asked) | self.unmet)
        if missing:
            raise UnsupportedModelError(unreached(name, missing, len(self.plan.views)))
        if self.rerouting is not None and (left := sorted(self.rerouting.layers - self.rerouting.reached)):
            numbers = ", ".join(str(layer + 1) for layer in left)
            raise UnsupportedModelError(f"reroute is for attention, which layer {numbers} of this {name} model has not")


def unreached(name: str, layers: list[int], n_layers: int) -> str:
    """Return the sentence for layers that a plan does not reach."""
    which = "no layer" if len(layers) == n_layers else f"not layer {', '.join(map(str, layers))}"
    return (
        f"the attention plan reaches {which} of this {name} model, which would silently stay causal; "
        "use it with attention='causal', or take another architecture (llama, qwen, mistral, gemma, gpt2, "
        "gpt_neox, olmo, phi3, opt and granite are known to work)"
    )


# Attention that neither says its window nor has types of layers: all layers have the config's.
_WINDOW_OF_CONFIG = ("PhimoeAttention", "DogeAttention")
# Attention whose window is of the cache alone.
_NO_WINDOW = ("MoshiAttention",)


def layer_window(module: nn.Module, kwargs: dict[str, Any]) -> Near:
    """Return how far an attention module looks: by the call, else by the model's config."""
    if "sliding_window" in kwargs:
        window: int | None = kwargs["sliding_window"]
        return window
    config = getattr(module, "config", None)
    kind = _layer_type(module)
    if kind == "chunked_attention":
        return Chunk(config.attention_chunk_size)  # type: ignore[union-attr]
    by_config = type(module).__name__.endswith(_WINDOW_OF_CONFIG)
    return getattr(config, "sliding_window", None) if kind == "sliding_attention" or by_config else None


def module_window(module: nn.Module) -> Near:
    """Return how far an attention module looks, outside of a call."""
    if _layer_type(module) == "full_attention" or type(module).__name__.endswith(_NO_WINDOW):
        return None
    if hasattr(module, "sliding_window"):
        return layer_window(module, {"sliding_window": module.sliding_window})
    config = getattr(module, "config", None)
    if getattr(config, "layer_types", None) is None:
        # Mistral and its kin hand the config's window to the attention function.
        return getattr(config, "sliding_window", None)
    return layer_window(module, {})


def _layer_type(module: nn.Module) -> str | None:
    types = getattr(getattr(module, "config", None), "layer_types", None)
    layer = getattr(module, "layer_idx", None)
    return None if types is None or layer is None else types[layer]


# What is added to the scores of the key that stands before a text (KV-Embedding, section 3.2.2).
_PREFIX_BIAS = 1.0


@dataclass
class Rerouting:
    """In which layers the key and the value of each text's last token stand before the text, seen by every token.

    A second copy of a key with its value, at a bias b, is the key itself with more weight: b is added to its score
    where a token does not see the original, and log(1 + e^b) where it does. So keys and values stay as they are.
    """

    layers: frozenset[int]  # their indices
    last_B: Tensor  # the place of each text's last token
    reached: set[int] = field(default_factory=set)  # the layers that made their mask so

    def mask(self, see: Tensor, dtype: torch.dtype) -> Tensor:
        """Return what is added to the scores ``(B, 1, T, T)`` of a layer; ``see`` is its mask ``(B or 1, 1, T, T)``."""
        see_B1TT = see.expand(len(self.last_B), *see.shape[1:])
        hidden = torch.full((), torch.finfo(dtype).min, dtype=dtype, device=see.device)
        added_B1TT = torch.where(see_B1TT, torch.zeros_like(hidden), hidden)
        place_B1T1 = self.last_B.to(see.device)[:, None, None, None].expand(*see_B1TT.shape[:3], 1)
        twice = torch.full_like(hidden, math.log1p(math.exp(_PREFIX_BIAS)))
        own_B1T1 = torch.where(see_B1TT.gather(3, place_B1T1), twice, torch.full_like(hidden, _PREFIX_BIAS))
        return added_B1TT.scatter(3, place_B1T1, own_B1T1)


class CachedHybrid(BoundPlan):
    """The hybrid plan over cached tokens: first a pass over the context, then one for each new token.

    Tokens of the context never see those of the span. So what a pass over the context leaves in a cache stays valid
    however the span continues, and the order of the cache's rows doesn't matter as long as every token has its true
    position: ``position_BT``, in the order in which the model reads them.

    Unlike its parent it serves many forward passes, and sees more keys than there are queries.
    """

    def __init__(self, n_layers: int, position_BT: Tensor, real_BT: Tensor | None = None) -> None:
        super().__init__(AttentionPlan("hybrid").resolve(n_layers), real_BT, torch.zeros_like(position_BT))
        self.position_BT = position_BT
        self.queries = position_BT.shape[1]
        self._furthest = int(position_BT.max())
        self._has_span = False

    def append(self, position_B: Tensor) -> None:
        """Make room for one more token of each text's span, which the next pass runs."""
        new_B1 = position_B[:, None]
        assert self.span_BT is not None
        self.span_BT = torch.cat([self.span_BT, torch.ones_like(new_B1)], dim=1)
        self.position_BT = torch.cat([self.position_BT, new_B1], dim=1)
        if self.real_BT is not None:
            self.real_BT = torch.cat([self.real_BT, torch.ones_like(new_B1, dtype=torch.bool)], dim=1)
        self.queries = 1
        self._furthest = max(self._furthest, int(position_B.max()))
        self._has_span = True
        self._masks.clear()
        self.asked.clear()

    def select(self, rows: Tensor) -> None:
        """Keep these rows, in this order; a row may be kept more than once."""
        assert self.span_BT is not None
        rows = rows.to(self.position_BT.device)
        self.span_BT, self.position_BT = self.span_BT[rows], self.position_BT[rows]
        if self.real_BT is not None:
            self.real_BT = self.real_BT[rows]
        self._masks.clear()

    def check_lengths(self, queries: int, keys: int) -> None:
        """Raise unless the model's cache holds every token so far."""
        known = self.position_BT.shape[1]
        if queries != self.queries or keys != known:
            raise UnsupportedModelError(
                f"this architecture's attention sees {keys} cached tokens where there are {known}, so spans cannot "
                "be written with it; take another architecture"
            )

    def _width(self, length: int) -> int:
        del length
        return self._furthest + 1

    def _visible(self, view: View, length: int, window: Near, device: torch.device) -> Tensor:
        del view
        assert self.span_BT is not None
        real = None if self.real_BT is None else self.real_BT.to(device)
        return hybrid_visible(self.position_BT.to(device), self.span_BT.to(device), length, real_BT=real, window=window)

    def _needs_no_mask(self, view: View, window: Near) -> bool:
        del view
        # Context alone sees all of itself, and a single new token of the span all that there is.
        return window is None and self.real_BT is None and (not self._has_span or self.queries == 1)
