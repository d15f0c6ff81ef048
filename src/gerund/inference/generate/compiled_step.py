"""Compile the decoding step with torch, so that its matrix products are fast with few rows.

A step is a product of few rows with every weight of the model, which takes as long as reading the weights at best. On a
CPU torch's usual kernels are far from that beyond one row: four take four times as long as one. The kernels that
inductor makes out of its template do it in 1.5 times, and six in 1.7; beyond, gcc does not keep the sums in registers.
They need weights that are constants of the compiled code, in orders of their own: so the weights are in memory twice
more, and compiled code cannot be stored on disk.
"""

import copy
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count as counted
from types import FunctionType, MethodType
from typing import Any, ParamSpec

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers import PreTrainedModel

from gerund.attention.layouts import is_stream_hook
from gerund.models.adapters import own_module
from gerund.models.int8_matmul import Int8Linear

# Torch compiles one row separately from any other number of them.
_LEAST_OF_A_CPU, _MOST_OF_A_CPU = 2, 6
_MAKES_KERNELS = {
    "freezing": True,
    "max_autotune": True,
    # Report nothing about autotuning.
    "autotune_num_choices_displayed": 0,
    "max_autotune_report_choices_stats": False,
}
# Backends for matrix products. The template alone first: torch's own kernels would be compared with it for one number
# of rows, and are far slower for others. But it can't multiply two tensors that are not weights.
_BACKENDS = ("CPP", "CPP,ATEN")
_P = ParamSpec("_P")
_numbers = counted()
# By the first weight of a model: what its last compiled function was compiled for, and the function.
_functions = WeakIdKeyDictionary()


def rows_together(device: torch.device, count: int) -> tuple[int, int]:
    """Return the least and greatest number of rows of a compiled step; more rows take several steps."""
    if device.type != "cpu":
        return count, count
    most = min(count, _MOST_OF_A_CPU)
    return min(most, _LEAST_OF_A_CPU), most


def compiled(step: Callable[_P, Tensor], model: nn.Module, shapes: Hashable) -> Callable[_P, Tensor]:
    """Return a function that torch compiles at its first call, without gradients.

    Weights changed in place between two calls cause a recompilation: compiled code for a CPU contains their values.
    ``shapes`` describes the step's tensors except for the dimensions marked by ``any_length``. Only those are checked
    in a call: checking everything that a model consists of, as torch does, takes a fifth of a small model's step.
    """
    first = next(model.parameters())
    kind = first.dtype, first.device, torch.get_num_threads(), shapes
    weights = [tensor for tensor in (*model.parameters(), *model.buffers()) if not tensor.is_inference()]
    if not weights or first.device.type != "cpu":
        return _made(step, first, kind)
    with quiet_compiler():
        from torch._dynamo.exc import BackendCompilerFailed
        from torch._inductor import config
    made, known = step, -1

    def with_kernels(*args: _P.args, **kwargs: _P.kwargs) -> Tensor:
        nonlocal made, known
        version = sum(tensor._version for tensor in weights)
        if version == known:
            return made(*args, **kwargs)
        made = _made(step, first, (version, kind))
        for backends in _BACKENDS:
            try:
                with config.patch({**_MAKES_KERNELS, "max_autotune_gemm_backends": backends}):
                    result = made(*args, **kwargs)
                break
            except BackendCompilerFailed:
                if backends == _BACKENDS[-1]:
                    raise
        known = version
        return result

    return with_kernels


def _made(step: Callable[_P, Tensor], weight: Tensor, kind: Hashable) -> Callable[_P, Tensor]:
    """Return a compiled step; the last compiled function is reused if it is of the same kind."""
    assert isinstance(step, MethodType)
    before = _functions.get(weight)
    if before is None or before[0] != kind:
        # Torch caches compiled code by function code, and does not check that the weights are the same.
        function, name = step.__func__, f"{step.__func__.__name__}_{next(_numbers)}"
        code = function.__code__.replace(co_name=name)
        duplicate = FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)
        before = _functions[weight] = kind, duplicate
    with quiet_compiler():
        # Not dynamic: other sizes are other code, except for dimensions marked by ``any_length``.
        made: Callable[_P, Tensor] = torch.compile(
            MethodType(before[1], step.__self__), dynamic=False, options={"guard_filter_fn": _lengths_only}
        )
    return made


def _lengths_only(guards: Sequence[Any]) -> list[bool]:
    """Select the guards to check in each call."""
    return [guard.guard_type == "SHAPE_ENV" for guard in guards]


@contextmanager
def quiet_compiler() -> Iterator[None]:
    """Suppress warnings of what torch's compiler itself imports and calls."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", "TypedStorage is deprecated")
        yield


def any_length(tensor: Tensor, dim: int) -> None:
    """Compile the next code for any length of this dimension, instead of one length."""
    torch._dynamo.maybe_mark_dynamic(tensor, dim)


def without_hooks(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model with the same tensors, without adapters and attention-plan hooks; bit-identical.

    A step is many small calls, so idle hooks and adapters cost a tenth of it; and a compiler can read the model in one
    piece. Where a module's forward was replaced, as accelerate does, it is the model itself: that forward would run the
    children of the original.
    """
    if any("forward" in vars(module) for module in model.modules()):
        return model
    bare = _bare(model, {})
    assert isinstance(bare, PreTrainedModel)
    return bare


def _bare(module: nn.Module, known: dict[nn.Module, nn.Module]) -> nn.Module:
    module = own_module(module)
    if module not in known:
        known[module] = duplicate = copy.copy(module)
        duplicate.__dict__ = dict(vars(module))
        if type(duplicate) is Int8Linear:
            duplicate.__class__ = nn.Linear  # type: ignore[assignment]
        duplicate._forward_hooks = type(module._forward_hooks)(
            (number, hook) for number, hook in module._forward_hooks.items() if not is_stream_hook(hook)
        )
        duplicate._modules = {
            name: None if child is None else _bare(child, known) for name, child in module._modules.items()
        }
    return known[module]
