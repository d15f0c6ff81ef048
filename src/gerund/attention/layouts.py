"""Layouts that run layers twice or add skips: INTER, EXTRA, EXTEND (LBW, section 3.1) and skips (Algorithm 1).

Each decoder layer gets one forward hook that does nothing unless the call has a plan with a stream or skips, except for
the preemption point. Layers with recurrent modules also get the hooks of ``attention.recurrent``. The second pass of a
layer calls ``layer.forward`` again with another mask type: no parameter is copied, and the state dict stays the same.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedConfig, PreTrainedModel

from gerund.attention.bound_plan import BoundPlan
from gerund.attention.layer_state import cache_in
from gerund.attention.masked import attach_masked
from gerund.attention.preemption import pause
from gerund.attention.recurrent import attach_recurrent, handed_down, hidden_of, input_of, kind_of
from gerund.errors import ConfigError, UnsupportedModelError
from gerund.settings.plan import Stream

_MARK = "is_gerund_stream"
_UNREADABLE = {
    "reformer": "it cuts a batch into parts, so that what a text becomes depends on the others of its batch",
    "prophetnet": "it reads streams of tokens to come beside the text",
    "xlm": "its layers are not kept as layers",
    "hrm_text": "its layers run many times in cycles, so a plan has no layers to count",
}
# What a config calls the number of its decoder layers; longcat_flash counts each twice in the first.
_COUNTS = ("num_hidden_layers", "num_layers")


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """Return the list of decoder layers, bottom first."""
    if model.config.model_type in _UNREADABLE:
        kind = model.config.model_type
        raise UnsupportedModelError(f"this {kind} model cannot be used: {_UNREADABLE[kind]}")
    config = model.config.get_text_config(decoder=True)
    counts = [getattr(config, name) for name in _COUNTS if hasattr(config, name)]
    stacks = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) in counts]
    for stack in stacks:
        if _is_stack(stack):
            return stack
    # Layers that do not know their index cannot have a plan, but may still be used causally.
    if len(stacks) == 1:
        return stacks[0]
    raise UnsupportedModelError(f"no stack of {counts[0]} decoder layers was found in this {model.config.model_type}")


def text_half(model: PreTrainedModel) -> PreTrainedModel:
    """Return the innermost model that holds the decoder layers: all but the head and towers for pictures and sound."""
    layers = decoder_layers(model)
    half = model
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and any(inner is layers for inner in part.modules()):
            half = part
    return half


def lower_layers(model: PreTrainedModel, n_layers: int) -> PreTrainedModel:
    """Return a model of the lower ``n_layers`` layers of another, which end in its final norm and head.

    All weights and layers are the other's own: only the modules that hold the layers are new, so this costs next to
    nothing.
    """
    layers = decoder_layers(model)
    if n_layers == len(layers):
        return model
    lower = _holding(model, layers, nn.ModuleList(list(layers)[:n_layers]))
    assert isinstance(lower, PreTrainedModel)
    return lower


def _holding(module: nn.Module, layers: nn.ModuleList, lower: nn.ModuleList) -> nn.Module | None:
    """Return a module with ``lower`` in the place of ``layers``; None where it does not hold these."""
    if module is layers:
        return lower
    for name, child in module._modules.items():
        if child is None or (part := _holding(child, layers, lower)) is None:
            continue
        if "forward" in vars(module):
            raise UnsupportedModelError("exit_layer is not for models whose forward was replaced, as accelerate does")
        shallow = copy.copy(module)
        shallow._modules = {**module._modules, name: part}
        if isinstance(shallow, PreTrainedModel):
            shallow.config = _of_lower_layers(shallow.config, len(lower))
        return shallow
    return None


def _of_lower_layers(config: PreTrainedConfig, n_layers: int) -> PreTrainedConfig:
    """Return a config with another number of decoder layers."""
    text = config.get_text_config(decoder=True)
    shallow = copy.copy(text)
    count = text.num_hidden_layers if hasattr(text, "num_hidden_layers") else 0
    for name, value in vars(text).items():
        if count and isinstance(value, list) and len(value) == count:  # such as the type of each layer
            setattr(shallow, name, value[:n_layers])
    for name in _COUNTS:
        if hasattr(shallow, name):
            setattr(shallow, name, n_layers)
    if text is config:
        return shallow
    outer = copy.copy(config)
    for name, value in vars(config).items():
        if value is text:
            setattr(outer, name, shallow)
    return outer


def _is_stack(layers: nn.ModuleList) -> bool:
    """Decoder layers are of one class and hold an attention module that knows its layer."""
    return all(any(getattr(part, "layer_idx", None) == i for part in layer.modules()) for i, layer in enumerate(layers))


def is_one_graph(model: PreTrainedModel) -> bool:
    """Whether a model's layers are computed in one graph: then it has no weights here, and no hook sees a layer."""
    return getattr(model, "one_graph", False)


@contextmanager
def _without_autocast(layer: nn.Module) -> Iterator[None]:
    """Compute in the dtype of the weights until the block ends, on the device of a layer."""
    weight = next(layer.parameters(), None)
    with torch.autocast("cpu" if weight is None else weight.device.type, enabled=False):
        yield


def attach_streams(layers: nn.ModuleList) -> list[RemovableHandle]:
    """Give every decoder layer the inactive hook; return the handles that take it away again.

    A layer that has it keeps the one it has: two would run the stream twice.
    """
    handles: list[RemovableHandle] = []
    for index, layer in enumerate(layers):
        handles += attach_masked(index, layer)
        handles += attach_recurrent(index, layer)
        if any(getattr(hook, _MARK, False) for hook in layer._forward_hooks.values()):
            continue

        def hook(
            layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, index: int = index
        ) -> Any:
            if not torch.compiler.is_compiling():
                pause(partial(_without_autocast, layer))
            plan = kwargs.get("attention_plan")
            if plan is None:
                return None
            if plan.after_layer is not None:
                return plan.after_layer(index, layer, args, kwargs, output)
            changed = None
            if plan.skips:
                changed = _with_skip(plan, index, args, kwargs, output)
            elif plan.stream is not None:
                changed = _after_layer(plan, plan.stream, index, layer, args, kwargs, output)
            if plan.beside is None or plan.is_second_stream:
                return changed
            return plan.beside(index, args, kwargs, output if changed is None else changed)

        setattr(hook, _MARK, True)
        handles.append(layer.register_forward_hook(hook, with_kwargs=True))
    return handles


def is_stream_hook(hook: Any) -> bool:
    """Whether a hook is one of those that ``attach_streams`` gives the layers."""
    return getattr(hook, _MARK, False)


def _after_layer(
    plan: BoundPlan,
    stream: Stream,
    index: int,
    layer: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: Any,
) -> Any:
    if cache_in(kwargs) is not None:
        raise ConfigError("plans that run layers twice (inter, extra, extend) cannot fill a KV cache")
    kwargs = {**kwargs, "attention_plan": plan.seen_through(stream.view)}
    hidden_BTD = hidden_of(output)
    if stream.kind == "extend":
        if index in stream.layers:
            for _ in range(stream.repeats):
                hidden_BTD = run_again(layer, hidden_BTD, args, kwargs)
    elif stream.kind == "parallel":
        # A recurrent layer that stays causal is not converted, and runs once.
        if index in stream.layers and kind_of(layer).changes(stream.view):
            second_BTD = run_again(layer, input_of(args, kwargs), args, kwargs)
            hidden_BTD = combine(hidden_BTD, second_BTD, stream)
    else:
        if index in stream.layers:
            first = index == stream.layers[0]
            # Keyed by layer, never popped: gradient checkpointing runs this hook again in the backward pass.
            source_BTD = input_of(args, kwargs) if first else plan.states[index - 1]
            plan.states[index] = run_again(layer, source_BTD, args, kwargs)
        if index == len(plan.plan.views) - 1:
            hidden_BTD = combine(hidden_BTD, plan.states[stream.layers[-1]], stream)
    return (hidden_BTD, *output[1:]) if isinstance(output, tuple) else hidden_BTD


def _with_skip(plan: BoundPlan, index: int, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Add the state that the plan adds after a layer, and keep those that it will add."""
    if cache_in(kwargs) is not None:
        raise ConfigError("plans with skips cannot fill a KV cache")
    hidden_BTD = hidden_of(output)
    # Keyed by layer, never popped: gradient checkpointing runs this hook again in the backward pass.
    if index == 0 and 0 in plan.skips:
        plan.states[0] = input_of(args, kwargs)
    added = plan.plan.added_after(index)
    if added is not None:
        hidden_BTD = hidden_BTD + plan.states[added]
    if index + 1 in plan.skips:
        plan.states[index + 1] = hidden_BTD
    return (hidden_BTD, *output[1:]) if isinstance(output, tuple) else hidden_BTD


def run_again(layer: nn.Module, hidden_BTD: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Run a layer on another input than in the call that ``args`` and ``kwargs`` are from."""
    args, kwargs = handed_down(args, kwargs)
    if args:
        return hidden_of(layer.forward(hidden_BTD, *args[1:], **kwargs))
    return hidden_of(layer.forward(**{**kwargs, "hidden_states": hidden_BTD}))


def combine(left: Tensor, right: Tensor, stream: Stream) -> Tensor:
    """Join the states of a layer and its second pass."""
    total = left + right
    return total / 2 if stream.combine == "mean" else total
