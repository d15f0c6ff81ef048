"""How torch compiles a step of texts that are written side by side, so that its products with the weights are quick.

A step is a product of few rows with every weight of the model, which takes as long as reading the weights at best. On a
CPU torch's usual kernels are far from that beyond one row: four take four times as long as one. The kernels that
inductor makes out of its template do it in 1.5 times, as long as the rows fit the registers, which eight do not. They
need weights that are constants of the compiled code, in an order of their own: so the weights are held once more, and
compiling cannot be kept on the disk.

Knows: inductor's settings. Does not know: models, texts.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec

import torch
from torch import Tensor

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


def rows_together(device: torch.device, count: int) -> int:
    """Return how many rows go through a compiled step together; more go in turn.

    Args:
        device: where it computes.
        count: how many there are at most.
    """
    return min(count, _ROWS_OF_A_CPU) if device.type == "cpu" else count


def compiled(step: Callable[_P, Tensor], device: torch.device) -> Callable[_P, Tensor]:
    """Return a function that torch compiles when it is called; it is called without gradients.

    Args:
        step: what is to be compiled.
        device: where it computes.
    """
    with quiet_compiler():
        # Not dynamic: other sizes are other code, but for those that ``any_length`` was said of.
        made: Callable[_P, Tensor] = torch.compile(step, dynamic=False)
        from torch._inductor import config
    if device.type != "cpu":
        return made

    def with_kernels(*args: _P.args, **kwargs: _P.kwargs) -> Tensor:
        # The setting counts while torch compiles, whenever it decides to.
        with config.patch(_MAKES_KERNELS):
            return made(*args, **kwargs)

    return with_kernels


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
