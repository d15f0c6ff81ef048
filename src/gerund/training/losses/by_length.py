"""Texts of a batch in several passes by their length, so that next to nothing of a pass is padding.

Knows: batches as dictionaries of tensors, lengths. Does not know: what is made of the texts.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, distributed

from gerund.inference.tokens import token_batches

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Batch = dict[str, Tensor]

# What a pass should hold, padding left out, to be worth its launching.
_CPU_TOKENS = 512
_GPU_TOKENS = 8192


def read_by_length(read: Callable[[Batch], Tensor], part: Batch, *, min_tokens: int | None = None) -> Tensor:
    """Read texts of like length together; every row is what it would be in one pass over all.

    Args:
        read: from texts to one row each. It must not look from one text to another.
        part: what is read of the texts, one row each; what is as wide as ``real`` is cut to the longest of a pass.
            Padding is on the right.
        min_tokens: tokens of a pass, padding left out, below which it takes in shorter texts; None chooses by device.

    Returns:
        The rows, in the order of ``part``.

    >>> part = {"input_ids": torch.tensor([[7, 0, 0], [1, 2, 3], [8, 0, 0], [4, 5, 6]])}
    >>> part["real"] = part["input_ids"] > 0
    >>> def read(part):
    ...     print(part["input_ids"].tolist())
    ...     return part["input_ids"].sum(1)
    >>> read_by_length(read, part, min_tokens=1).tolist()
    [[1, 2, 3], [4, 5, 6]]
    [[7], [8]]
    [7, 6, 8, 15]
    """
    lengths = part["real"].sum(1).tolist()
    if min_tokens is None:
        min_tokens = _CPU_TOKENS if part["real"].device.type == "cpu" else _GPU_TOKENS
    passes = token_batches(lengths, budget=part["real"].numel(), min_tokens=min_tokens)
    if len(passes) > 1 and len(passes[-1]) == 1:
        # Kernels are compiled anew for a batch of one.
        passes[-2:] = [passes[-2] + passes[-1]]
    if len(passes) == 1:
        return read(part)
    width = part["real"].shape[1]
    order = torch.tensor([row for rows in passes for row in rows], device=part["real"].device)
    made = []
    for rows_B, rows in zip(order.split([len(rows) for rows in passes]), passes, strict=True):
        longest = max(1, *(lengths[row] for row in rows))
        own = {name: tensor[rows_B] for name, tensor in part.items()}
        made.append(read({name: _cut(tensor, width, longest) for name, tensor in own.items()}))
    return torch.cat(made)[order.argsort()]


def _cut(tensor: Tensor, width: int, longest: int) -> Tensor:
    return tensor[:, :longest] if tensor.ndim > 1 and tensor.shape[1] == width else tensor


def passes_may_differ(model: "PreTrainedModel") -> bool:
    """Tell whether processes may read their texts in different numbers of passes.

    Where FSDP has cut the weights, every pass puts them together, and all processes have to take part in it.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        return True
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    return not any(isinstance(module, FSDPModule | FullyShardedDataParallel) for module in model.modules())
