"""How torch compiles a step of texts that are written side by side, so that its products with the weights are quick.

A step is a product of few rows with every weight of the model, which takes as long as reading the weights at best. On a
CPU torch's usual kernels are far from that beyond one row: four take four times as long as one. The kernels that
inductor makes out of its template do it in 1.5 times, as long as the rows fit the registers, which eight do not. They
need weights that are constants of the compiled code, in orders of their own: so the weights are held twice more, and
what is compiled cannot be kept on the disk.

Knows: inductor's settings. Does not know: models, texts.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count as counted
from types import FunctionType, MethodType
from typing import ParamSpec

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

_ROWS_OF_A_CPU = 4
_MAKES_KERNELS = {
    "freezing": True,
    "max_autotune": True,
    "max_autotune_gemm_backends": "CPP,ATEN",
    # Of what is tried and measured, nothing is told.
    "autotune_num_choices_displayed": 0,
    "max_autotune_report_choices_stats": False,
}
_P = ParamSpec("_P")
_numbers = counted()
# By the first weight of a model, its weights' version and the function that torch has compiled for them.
_functions = WeakIdKeyDictionary()


def rows_together(device: torch.device, count: int) -> int:
    """Return how many rows go through a compiled step together; more go in turn.

    Args:
        device: where it computes.
        count: how many there are at most.
    """
    return min(count, _ROWS_OF_A_CPU) if device.type == "cpu" else count


def compiled(step: Callable[_P, Tensor], model: nn.Module) -> Callable[_P, Tensor]:
    """Return a function that torch compiles when it is called; it is called without gradients.

    Weights that are changed in place between two calls have it compiled anew: the code of a CPU holds their values.

    Args:
        step: a method that is to be compiled.
        model: what computes in it.
    """
    weights = [one for one in (*model.parameters(), *model.buffers()) if not one.is_inference()]
    if not weights or weights[0].device.type != "cpu":
        return _compiled_by_torch(step)
    with quiet_compiler():
        from torch._inductor import config
    made, known = step, -1

    def with_kernels(*args: _P.args, **kwargs: _P.kwargs) -> Tensor:
        nonlocal made, known
        version = sum(one._version for one in weights)
        if version != known:
            made, known = _made(step, weights[0], version), version
        # The setting counts while torch compiles, whenever it decides to.
        with config.patch(_MAKES_KERNELS):
            return made(*args, **kwargs)

    return with_kernels


def _made(step: Callable[_P, Tensor], weight: Tensor, version: int) -> Callable[_P, Tensor]:
    """Return a step that torch compiles, unless it has for the same weights as they are now."""
    assert isinstance(step, MethodType)
    before = _functions.get(weight)
    if before is None or before[0] != version:
        # Torch keeps what it compiles with the code of a function, and does not look whether weights are the same.
        function, name = step.__func__, f"{step.__func__.__name__}_{next(_numbers)}"
        code = function.__code__.replace(co_name=name)
        own = FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)
        before = _functions[weight] = version, own
    return _compiled_by_torch(MethodType(before[1], step.__self__))


def _compiled_by_torch(step: Callable[_P, Tensor]) -> Callable[_P, Tensor]:
    with quiet_compiler():
        # Not dynamic: other sizes are other code, but for those that ``any_length`` was said of.
        made: Callable[_P, Tensor] = torch.compile(step, dynamic=False)
    return made


@contextmanager
def quiet_compiler() -> Iterator[None]:
    """Leave out the warnings of what torch's compiler itself imports and calls, which nobody here can heed."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", "TypedStorage is deprecated")
        yield


def any_length(tensor: Tensor, dim: int) -> None:
    """Have the code that is compiled next take any length of this dimension; before, it would serve one length only."""
    torch._dynamo.maybe_mark_dynamic(tensor, dim)
