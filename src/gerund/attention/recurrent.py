"""Apply plans to recurrent layers: linear attention, state spaces and short convolutions.

Such a module mixes tokens from left to right, and no mask can reverse it. A plan can run it a second time, on the text
reversed, and add both outputs. The module itself is unchanged: hooks reorder each row's tokens before it, and its
output back afterwards. Padding is always moved after the tokens, where a left-to-right module never sees it.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from threading import local
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from gerund.attention.bound_plan import BoundPlan
from gerund.attention.layer_state import cache_in
from gerund.attention.masked import plan_of
from gerund.errors import ConfigError, UnsupportedModelError
from gerund.settings.plan import Direction, ResolvedPlan, View

# How the classes of recurrent modules are called at their end, and the attribute that says how far back they see: None
# for all the way. All take hidden states (B, T, D) and give them, or a tuple that begins with them, back.
_MODULES: dict[str, str | None] = {
    "GatedDeltaNet": None,  # qwen3_next, qwen3_5, qwen4_exp, olmo_hybrid
    "DeltaAttention": None,  # kimi_linear, bailing_hybrid
    "LightningAttention": None,  # minimax
    "MambaMixer": None,  # mamba, falcon_mamba, jamba, zamba, zamba2
    "Mamba2Mixer": None,  # mamba2, nemotron_h
    "BambaMixer": None,
    "FalconH1Mixer": None,
    "GraniteMoeHybridMambaLayer": None,
    "ShortConv": "conv_kernel_size",  # lfm2, lfm2_moe, lfm3
}
_STATE_SPACES = ("MambaMixer", "Mamba2Mixer", "BambaMixer", "FalconH1Mixer", "GraniteMoeHybridMambaLayer")
_READ_BY_WEIGHT = ("conv1d", "x_proj", "dt_proj", "out_proj")
# Of layers that are a feed-forward block and nothing else (nemotron_h).
_TOKENWISE = ("mlp", "moe")
# By which name a decoder layer takes the mask of its recurrent module. The last one goes to attention as well, unless
# the layer has another mask for that (zamba).
_MASKS = ("mamba_attention_mask", "conv_mask", "attention_mask")
_OF_ATTENTION = "causal_mask"
ATTENTION_FREE = ("mamba", "mamba2", "falcon_mamba")
"""What models in which no layer attends are called in a config, as ``model_type``."""
_MARK = "is_gerund_recurrent"
# Embeddings of n-grams, added in some layers and smoothed over the text so far (qwen4_exp): they stay as they are, and
# only share the mask of the recurrent module beside them.
_LEXICAL = "PLELayer"


@dataclass(frozen=True)
class LayerKind:
    """What a decoder layer mixes tokens with."""

    attends: bool  # it has an attention module, which asks for the plan's mask
    recurrent: bool  # it has a recurrent module; some have both
    reach: int | None = None  # how many tokens the recurrent module sees, itself included; None for all on its side

    def changes(self, view: View) -> bool:
        """Whether a layer of this kind does anything else under ``view`` than untouched."""
        if view.direction is Direction.CAUSAL:
            return self.attends and view.hidden > 0
        return self.attends or (self.recurrent and view.turns)

    def named(self, view: View) -> str:
        """Say what a layer of this kind does under ``view``.

        >>> LayerKind(attends=False, recurrent=True).named(View(Direction.BIDIRECTIONAL))
        'recurrent, causal'
        """
        parts = [str(view)] * self.attends
        if self.recurrent:
            parts.append(f"recurrent, {_direction(view).value}")
        return " beside ".join(parts) or "each token alone"


def kind_of(layer: nn.Module) -> LayerKind:
    """Return what a decoder layer mixes tokens with; one that is not known to do otherwise is taken to attend."""
    modules = recurrent_modules(layer)
    if getattr(layer, "block_type", None) in _TOKENWISE and not modules:
        return LayerKind(attends=False, recurrent=False)
    attends = not modules or any(
        type(part).__name__.endswith("Attention") and part not in modules for part in layer.modules()
    )
    reaches = [_reach(module) for module in modules]
    known = [reach for reach in reaches if reach is not None]
    return LayerKind(attends, bool(modules), max(known) if known and len(known) == len(reaches) else None)


def recurrent_modules(layer: nn.Module) -> list[nn.Module]:
    """Return the recurrent modules in a decoder layer, or in a whole model."""
    return [part for part in layer.modules() if type(part).__name__.endswith(tuple(_MODULES))]


def keeps_states(model: PreTrainedModel) -> bool:
    """Whether a model's cache has more of a text than keys and values: states of what runs from left to right in it.

    That may be a short convolution inside attention (inkling, zaya), of which no plan needs to know.
    """
    if recurrent_modules(model):
        return True
    try:
        layers = DynamicCache(config=model.config).layers
    except (KeyError, ValueError, AttributeError):  # a kind of layer that has no such cache
        return False
    return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers)


def read_by_weight(model: nn.Module) -> list[str]:
    """Return the names of linear layers whose weights a recurrent module reads itself: an adapter there is not seen.

    State spaces hand them to kernels of their own on a GPU, and some read them everywhere.
    """
    mixers = [(name, part) for name, part in model.named_modules() if type(part).__name__.endswith(_STATE_SPACES)]
    return [f"{name}.{child}" for name, part in mixers for child in _READ_BY_WEIGHT if hasattr(part, child)]


def _reach(module: nn.Module) -> int | None:
    name = next(how for end, how in _MODULES.items() if type(module).__name__.endswith(end))
    return None if name is None else int(getattr(module, name))


def _direction(view: View) -> Direction:
    """Return where a recurrent module looks under a view."""
    return view.direction if view.turns else Direction.CAUSAL


def recurrent_view(view: View) -> View:
    """Return what a recurrent module sees under a view: nothing is hidden from it."""
    return View(_direction(view))


def refuse_unfit(plan: ResolvedPlan, kinds: Sequence[LayerKind], name: str) -> None:
    """Refuse what has no meaning in a model whose layers are of these kinds."""
    views = [*plan.views, *([] if plan.stream is None else [plan.stream.view])]
    recurrent = [layer for layer, kind in enumerate(kinds) if kind.recurrent]
    if any(view.turns for view in views) and not recurrent:
        raise ConfigError(f"recurrent='both' is for models with recurrent layers, and this {name} model has none")
    if not recurrent or plan.is_causal:
        return
    if any(view.direction is Direction.HYBRID for view in views):
        raise UnsupportedModelError(
            f"the plan 'hybrid' cannot be used with this {name} model: its recurrent layers would show the context "
            "the spans that it must not see"
        )
    converted = [layer for layer, view in enumerate(plan.views) if kinds[layer].changes(view)]
    if plan.stream is not None:
        converted += [layer for layer in plan.stream.layers if kinds[layer].changes(plan.stream.view)]
    if not converted and not plan.skips:
        extends = plan.stream is not None and plan.stream.kind == "extend"
        larger = ["a larger k"] if any(kind.attends for kind in kinds) and not extends else []
        turned = ["recurrent='both'"] if any(view.looks_right for view in views) else []
        advice = f"; take {', or '.join(larger + turned)}" if larger or turned else ""
        raise ConfigError(
            f"the plan would convert nothing in this {name} model: the layers that it converts are recurrent and stay "
            f"causal{advice}"
        )


class _Order(local):
    """What the recurrent module that runs in this thread is run in; each call sets it before anything else."""

    value: "Order | None" = None


_current = _Order()


def handed_down(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a decoder layer's call with its plan in the place of another that was handed down before."""
    plan = kwargs.get("attention_plan")
    return (
        tuple(plan if isinstance(value, BoundPlan) else value for value in args),
        {name: plan if isinstance(value, BoundPlan) else value for name, value in kwargs.items()},
    )


def attach_recurrent(index: int, layer: nn.Module) -> list[RemovableHandle]:
    """Give a decoder layer the hooks that turn its recurrent modules, and that do nothing without a plan."""
    kind = kind_of(layer)
    marked = any(getattr(hook, _MARK, False) for hook in layer._forward_pre_hooks.values())
    if marked or (kind.attends and not kind.recurrent):
        return []

    def begin(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        plan = plan_of(kwargs)
        if plan is None:
            return None
        if not kind.attends:
            plan.asked.add(index)
        if not kind.recurrent:
            return None
        plan.unmet.add(index)
        return _with_plan(kind, layer, args, {**kwargs, "attention_plan": plan}, plan)

    setattr(begin, _MARK, True)
    handles = [layer.register_forward_pre_hook(begin, with_kwargs=True)]
    for module in layer.modules():
        if type(module).__name__.endswith(_LEXICAL):
            handles.append(module.register_forward_pre_hook(_with_own_mask, with_kwargs=True))
    for module in recurrent_modules(layer):
        handles += _attach_module(index, module)
    return handles


def _attach_module(index: int, module: nn.Module) -> list[RemovableHandle]:
    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        del module
        plan = kwargs.get("attention_mask")
        _current.value = order = Order(plan, index) if isinstance(plan, BoundPlan) else None
        if order is None or plan is None:
            return None
        plan.unmet.discard(index)
        return _begin(order, args, kwargs)

    def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        order, _current.value = _current.value, None
        return None if order is None else _end(order, module, args, kwargs, output)

    return [
        module.register_forward_pre_hook(before, with_kwargs=True),
        module.register_forward_hook(after, with_kwargs=True),
    ]


def _with_own_mask(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the call of a module that shares a mask with a recurrent one, with its mask in the plan's place."""
    del module
    plan = kwargs.get("conv_mask")
    if not isinstance(plan, BoundPlan):
        return None
    return args, {**kwargs, "conv_mask": None if plan.real_BT is None else plan.real_BT.long()}


def _with_plan(
    kind: LayerKind, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], plan: BoundPlan
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a decoder layer's call with the plan in the place of the padding mask of its recurrent module.

    Some layers hand nothing else on, and what runs again for gradient checkpointing is the layer without its hooks.
    """
    names = list(inspect.signature(layer.forward).parameters)
    name = next((name for name in _MASKS if name in kwargs or name in names[: len(args)]), None)
    shared = name == _MASKS[-1] and kind.attends and _OF_ATTENTION not in names
    if name is None or shared:
        raise UnsupportedModelError(
            f"{type(layer).__name__} takes no mask for its recurrent module alone, so no attention plan can be applied "
            "to it; use the model with attention='causal'"
        )
    if name in kwargs:
        return args, {**kwargs, name: plan}
    place = names.index(name)
    return (*args[:place], plan, *args[place + 1 :]), kwargs


def _begin(order: "Order", args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return how a recurrent module is to be called: on its own order of each row, padding last."""
    if cache_in(kwargs) is not None:
        raise ConfigError("an attention plan covers a whole text: it cannot be combined with cached states")
    # Without padding in front no mask is needed, and no such module knows the plan, which some of their kernels refuse.
    kwargs = {name: value for name, value in kwargs.items() if name != "attention_plan"} | {"attention_mask": None}
    return _with_input(order.before(input_of(args, kwargs)), args, kwargs)


def _end(order: "Order", module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Return a recurrent module's output in the text's order, with that of the reversed text added where both count."""
    own_BTD = hidden_of(output)
    if order.direction is Direction.BIDIRECTIONAL:
        args, kwargs = _with_input(order.reverse(input_of(args, kwargs)), args, kwargs)
        own_BTD = own_BTD + order.reverse(hidden_of(module.forward(*args, **kwargs)))
    own_BTD = order.after(own_BTD)
    return (own_BTD, *output[1:]) if isinstance(output, tuple) else own_BTD


class Order:
    """In which order a recurrent module runs through each row: its tokens first, then its padding.

    With L tokens that begin at s in a row of T places, the module's place t holds the row's place s + t, or, looking
    back, s + L - 1 - t; both modulo T, so that padding comes last and every place is taken once.
    """

    def __init__(self, plan: BoundPlan, layer: int) -> None:
        self.direction = _direction(plan.view_unasked(layer))
        self._real_BT = plan.real_BT
        self._begins_late = plan.side not in ("none", "right")

    def before(self, hidden_BTD: Tensor) -> Tensor:
        """Bring the text's order into the module's."""
        return self._move(hidden_BTD, 1)

    def after(self, hidden_BTD: Tensor) -> Tensor:
        """Bring the module's order back into the text's."""
        return self._move(hidden_BTD, -1)

    def reverse(self, hidden_BTD: Tensor) -> Tensor:
        """Reverse the tokens of each row in the module's order, where they come first; twice is as never."""
        if self._real_BT is None:
            return hidden_BTD.flip(1)
        _, length_B1, place_T = self._places(hidden_BTD)
        return _taken(hidden_BTD, length_B1 - 1 - place_T)

    def _move(self, hidden_BTD: Tensor, way: int) -> Tensor:
        backward = self.direction is Direction.BACKWARD
        if self._real_BT is None:
            return hidden_BTD.flip(1) if backward else hidden_BTD
        start_B1, length_B1, place_T = self._places(hidden_BTD)
        if backward:
            return _taken(hidden_BTD, start_B1 + length_B1 - 1 - place_T)
        return _taken(hidden_BTD, place_T + way * start_B1) if self._begins_late else hidden_BTD

    def _places(self, hidden_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return where each row's tokens begin and how many they are, both ``(B, 1)``, and all places ``(T,)``."""
        assert self._real_BT is not None
        real_BT = self._real_BT.to(hidden_BTD.device).long()
        place_T = torch.arange(real_BT.shape[1], device=hidden_BTD.device)
        return real_BT.argmax(dim=1, keepdim=True), real_BT.sum(dim=1, keepdim=True), place_T


def _taken(hidden_BTD: Tensor, place_BT: Tensor) -> Tensor:
    """Return the states at these places, modulo their number."""
    place_BT = place_BT.expand(hidden_BTD.shape[:2]) % hidden_BTD.shape[1]
    return hidden_BTD.gather(1, place_BT[..., None].expand_as(hidden_BTD))


def input_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the states ``(B, T, D)`` that a layer was called with."""
    hidden_BTD: Tensor = args[0] if args else kwargs["hidden_states"]
    return hidden_BTD


def _with_input(
    hidden_BTD: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return ((hidden_BTD, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden_BTD})


def hidden_of(output: Any) -> Tensor:
    """Return the states ``(B, T, D)`` in what a layer returned."""
    hidden_BTD: Tensor = output[0] if isinstance(output, tuple) else output
    return hidden_BTD
