"""Apply plans in architectures whose attention takes its mask as an argument, by hooks.

Some architectures compute attention themselves (BLOOM, GPT-J, CodeGen, Falcon, MPT, XGLM, GPT-NeoX Japanese); some have
an indexer that selects among the keys that the mask shows (DeepSeek V3.2, GLM 5); and some decoder layers don't pass
keywords on (StableLM, Nemotron). All of them take a four-dimensional mask. So a decoder layer is called with the plan
instead of its mask, and its attention module with the plan's mask for this layer. Without a plan the hooks do nothing.
"""

import inspect
from contextvars import ContextVar
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from gerund.attention.bound_plan import BoundPlan, module_window
from gerund.attention.layer_state import cache_in
from gerund.errors import UnsupportedModelError


class Way(Enum):
    """How an attention module is told whom its tokens see."""

    HANDED_ON = "it hands keywords on to transformers' attention function, which reads the plan"
    ADDED = "its mask is added to the scores"
    HIDING = "its mask is true where nothing is seen"


# By the end of the attention classes' names.
_WAYS: dict[str, Way] = {
    "StableLmAttention": Way.HANDED_ON,
    "NemotronAttention": Way.HANDED_ON,
    "BloomAttention": Way.ADDED,
    "GPTJAttention": Way.ADDED,
    "CodeGenAttention": Way.ADDED,
    "FalconAttention": Way.ADDED,
    "XGLMAttention": Way.ADDED,
    "GPTNeoXJapaneseAttention": Way.ADDED,
    "DogeAttention": Way.ADDED,  # it puts a learned mask of its own on top
    "MvpAttention": Way.ADDED,
    "TrOCRAttention": Way.ADDED,
    "GitSelfAttention": Way.ADDED,
    "BigBirdSelfAttention": Way.ADDED,
    "MegatronBertSelfAttention": Way.ADDED,
    "RemBertSelfAttention": Way.ADDED,
    "RoFormerSelfAttention": Way.ADDED,
    "MptAttention": Way.HIDING,
}
# Layers of recurrent modules that their models hand no keywords to (mamba, falcon_mamba).
_UNTOLD = ("MambaBlock",)
_MASK = "attention_mask"
_MARK = "is_gerund_masked"


def way_of(module: nn.Module) -> Way | None:
    """Return how an attention module takes its mask; None for one that plans reach by themselves."""
    name = type(module).__name__
    if name.endswith("Attention") and hasattr(module, "indexer"):
        return Way.ADDED
    return next((way for end, way in _WAYS.items() if name.endswith(end)), None)


def has_indexer(model: PreTrainedModel) -> bool:
    """Whether some attention of the model chooses by an indexer which keys are looked at."""
    return any(hasattr(part, "indexer") for part in model.modules())


# What a pass goes through the model with, for layers that are not told, and for their attention. Work between two
# layers runs in a context of its own (``preemption.pause``), so its passes leave these alone.
_plan: ContextVar[BoundPlan | None] = ContextVar("plan", default=None)
_at: ContextVar[tuple[BoundPlan, int] | None] = ContextVar("at", default=None)


def plan_of(kwargs: dict[str, Any]) -> BoundPlan | None:
    """Return the plan that a decoder layer is called under, whether its keywords say it or not."""
    plan: BoundPlan | None = kwargs.get("attention_plan")
    return _plan.get() if plan is None else plan


def attach_carrier(model: PreTrainedModel) -> None:
    """Let a model that hands no keywords to its layers note the plan that it is called with."""
    base = model.base_model
    if any(getattr(hook, _MARK, False) for hook in base._forward_pre_hooks.values()):
        return
    if not any(way_of(part) or type(part).__name__.endswith(_UNTOLD) for part in base.modules()):
        return

    def begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        del module
        plan = kwargs.get("attention_plan")
        _plan.set(plan)
        if plan is None:
            return None
        return args, {name: value for name, value in kwargs.items() if name != "attention_plan"}

    def end(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        del module, args, output
        _plan.set(None)

    setattr(begin, _MARK, True)
    base.register_forward_pre_hook(begin, with_kwargs=True)
    base.register_forward_hook(end, always_call=True)


def attach_masked(index: int, layer: nn.Module) -> list[RemovableHandle]:
    """Give a decoder layer the hooks that bring a plan to attention that takes a mask."""
    for part in layer.modules():
        # Attention modules that count otherwise: two in a layer, or one for many.
        if type(part).__name__.endswith(("Attention", "MLA")) and getattr(part, "layer_idx", index) != index:
            part.gerund_layer = index  # type: ignore[assignment]
    modules = [part for part in layer.modules() if way_of(part) is not None]
    if not modules or any(getattr(hook, _MARK, False) for hook in layer._forward_pre_hooks.values()):
        return []
    place = _place_of_mask(layer)

    def begin(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        del layer
        plan = plan_of(kwargs)
        return None if plan is None else _with_mask(plan, place, args, {**kwargs, "attention_plan": plan})

    setattr(begin, _MARK, True)
    handles = [layer.register_forward_pre_hook(begin, with_kwargs=True)]
    for module in modules:
        handles += _attach_module(index, module)
    return handles


def _attach_module(index: int, module: nn.Module) -> list[RemovableHandle]:
    place = _place_of_mask(module)
    way = way_of(module)

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        _at.set(None)
        plan = args[place] if place < len(args) else kwargs.get(_MASK)
        if not isinstance(plan, BoundPlan):
            return None
        if way is Way.HANDED_ON:
            args, kwargs = _with_mask(None, place, args, kwargs)
            return args, {**kwargs, "attention_plan": plan}
        if plan.reroutes(index) and (
            way is Way.HIDING or hasattr(module, "indexer") or kwargs.get("alibi") is not None
        ):
            raise UnsupportedModelError(f"{type(module).__name__} cannot have its last token's key before the text")
        _at.set((plan, index))
        mask = _mask(plan, index, module, args[0] if args else kwargs["hidden_states"], kwargs)
        return _with_mask(mask < 0 if way is Way.HIDING else mask, place, args, kwargs)

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        del module, args
        at = _at.get()
        _at.set(None)
        if at is not None and at[0].record is not None and isinstance(output[1], Tensor):
            at[0].record(at[1], at[0].is_second_stream, output[1])

    return [module.register_forward_pre_hook(before, with_kwargs=True), module.register_forward_hook(after)]


def _mask(plan: BoundPlan, index: int, module: nn.Module, hidden_BTD: Tensor, kwargs: dict[str, Any]) -> Tensor:
    """Return what is added to the scores ``(B, heads or 1, T, keys)``."""
    cache = cache_in(kwargs)
    length = hidden_BTD.shape[1]
    plan.check_lengths(length, length + (0 if cache is None else cache.get_seq_length(index)))
    if plan.computes_itself:
        raise UnsupportedModelError(f"{type(module).__name__} computes its attention by itself")
    # Of the queries only their number, type and device are read.
    query_B1TD = hidden_BTD[:, None]
    mask = plan.mask(index, query_B1TD, module_window(module), hidden_BTD.dtype)
    assert mask is not None
    mask = mask.expand(len(hidden_BTD), *mask.shape[1:])
    alibi_BH1K = kwargs.get("alibi")
    if alibi_BH1K is None or not type(module).__name__.endswith("FalconAttention"):
        return mask
    # Falcon's model puts the bias of positions into the mask that it hands down.
    width = hidden_BTD.shape[-1] // alibi_BH1K.shape[1]
    return (alibi_BH1K * width**-0.5).masked_fill(mask < 0, torch.finfo(hidden_BTD.dtype).min)


def _place_of_mask(module: nn.Module) -> int:
    """Return the place of the mask among the arguments of a module's forward."""
    names = list(inspect.signature(module.forward).parameters)
    if _MASK not in names:
        raise UnsupportedModelError(f"{type(module).__name__} takes no mask, so no attention plan can be applied to it")
    return names.index(_MASK)


def _with_mask(
    mask: Any, place: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if place < len(args):
        return (*args[:place], mask, *args[place + 1 :]), kwargs
    return args, {**kwargs, _MASK: mask}
