"""Rows of all processes, so that every process compares its own with everybody's.

Knows: process groups. Does not know: what the rows are, losses.

Take the mean over a process's *own* queries against *all* keys. The gradient of a key then comes from the losses of
all processes, and after the average that DDP takes over them it is the gradient of one process that has all rows.
"""

from typing import Any

import torch
from torch import Tensor, distributed
from torch.autograd.function import once_differentiable

from gerund.errors import DataError


def process_count() -> int:
    """Return how many processes train together."""
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def gather_rows(rows_BD: Tensor) -> tuple[Tensor, int]:
    """Return the rows of all processes in the order of their ranks, with gradient, and where the own ones begin.

    The backward pass communicates as well: all processes have to run it.

    Args:
        rows_BD: this process's rows; every process brings as many.

    Returns:
        ``(K, D)``, and the index of the own first row: 0 in a single process, which gets its rows as they are.

    Raises:
        DataError: the processes bring rows of different numbers or widths; raised in all of them.
    """
    if process_count() == 1:
        return rows_BD, 0
    _demand_equal_shapes(rows_BD)
    all_KD: Tensor = _GatherWithGradient.apply(rows_BD)
    return all_KD, distributed.get_rank() * len(rows_BD)


@torch.no_grad()
def gather_numbers(numbers_B: Tensor) -> Tensor:
    """Return the numbers of all processes, such as ids of texts, in the order of ``gather_rows``; no gradient.

    Args:
        numbers_B: this process's numbers; every process brings as many.

    Returns:
        ``(K,)``.

    Raises:
        DataError: the processes bring different numbers of them; raised in all of them.
    """
    if process_count() == 1:
        return numbers_B
    _demand_equal_shapes(numbers_B)
    return _gathered(numbers_B)


class _GatherWithGradient(torch.autograd.Function):
    """Rows of all processes; a row's gradient is the sum of what all processes make of it.

    torch's own, ``torch.distributed.nn.functional.all_gather``, is deprecated, and what follows it is private.
    """

    @staticmethod
    def forward(ctx: Any, rows_BD: Tensor) -> Tensor:
        """Collect the rows."""
        first = distributed.get_rank() * len(rows_BD)
        ctx.own = slice(first, first + len(rows_BD))
        return _gathered(rows_BD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream_KD: Tensor) -> Tensor:
        """Add up the gradients of all processes and take those of the own rows."""
        total_KD = upstream_KD.clone(memory_format=torch.contiguous_format)
        distributed.all_reduce(total_KD)
        return total_KD[ctx.own]


def _gathered(own: Tensor) -> Tensor:
    parts = [torch.empty_like(own, memory_format=torch.contiguous_format) for _ in range(process_count())]
    distributed.all_gather(parts, own.contiguous())
    return torch.cat(parts)


def _demand_equal_shapes(rows: Tensor) -> None:
    """Compare the shapes first: with unequal ones the communication itself would hang or mix up rows."""
    own = torch.tensor([len(rows), rows[:1].numel() if rows.ndim > 1 else 1], device=rows.device)
    shapes = [torch.empty_like(own) for _ in range(process_count())]
    distributed.all_gather(shapes, own)
    found = [shape.tolist() for shape in shapes]
    if any(shape != found[0] for shape in found):
        told = ", ".join(f"process {rank} has {count} of width {width}" for rank, (count, width) in enumerate(found))
        raise DataError(f"every process has to bring as many rows of one width, but {told}")
