"""Where a training's memory goes: weights, gradients, the optimizer, and what a step keeps for its backward pass.

Knows: tensors, optimizers, torch's hooks for saved tensors. Does not know: recipes' files, the trainer.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_MIB = 2**20


@dataclass(frozen=True)
class MemoryUse:
    """What each process holds, in MiB."""

    processes: int
    """How many processes there are."""
    sharding: str
    """How they hold the model: ``none``, or ``fsdp2``."""
    weights: int
    """Of the model and of what serves its training, frozen ones included."""
    gradients: int
    """Of all that is trained, in fp32."""
    optimizer: int
    """The optimizer's state."""
    activations: int
    """What a step keeps for its backward pass, at its peak; counted tensor by tensor."""
    gathered: int
    """With shards, the weights that are put together at a time: a layer's, and those outside of layers."""

    def lines(self) -> Iterator[str]:
        r"""Yield a line for each use, as ``--dry-run`` prints them.

        >>> print(*MemoryUse(8, "fsdp2", 3830, 3830, 7660, 512, 2836).lines(), sep="\n")
        weights            3,830 MiB in each of 8 processes (sharding: fsdp2)
        gradients          3,830 MiB
        optimizer          7,660 MiB
        activations        512 MiB at the peak of a step
        gathered           2,836 MiB at a time
        """
        where = f" in each of {self.processes} processes (sharding: {self.sharding})" if self.processes > 1 else ""
        yield f"weights            {self.weights:,} MiB{where}"
        yield f"gradients          {self.gradients:,} MiB"
        yield f"optimizer          {self.optimizer:,} MiB"
        yield f"activations        {self.activations:,} MiB at the peak of a step"
        if self.gathered:
            yield f"gathered           {self.gathered:,} MiB at a time"


def memory_use(
    module: nn.Module,
    layers: Iterable[nn.Module],
    optimizer: torch.optim.Optimizer,
    *,
    activations: int,
    processes: int,
    sharding: str,
) -> MemoryUse:
    """Return what each of several processes will hold.

    Args:
        module: What is trained, whole.
        layers: Its layers.
        optimizer: The optimizer, after a step.
        activations: Bytes that a step of one process keeps.
        processes: How many there will be.
        sharding: ``none`` or ``fsdp2``.
    """
    sharded = sharding != "none" and processes > 1
    parts = processes if sharded else 1
    weights = _bytes(module.parameters())
    by_layer = [_bytes(layer.parameters()) for layer in layers]
    outside = weights - sum(by_layer)
    gathered = outside + max(by_layer, default=0) if sharded else 0
    return MemoryUse(
        processes=processes,
        sharding=sharding if processes > 1 else "none",
        weights=_mib(weights / parts),
        gradients=_mib(_bytes(p for p in module.parameters() if p.requires_grad) / parts),
        optimizer=_mib(_bytes(_state(optimizer)) / parts),
        activations=_mib(activations),
        gathered=_mib(gathered),
    )


class KeptForBackward:
    """Counts the bytes that autograd keeps, parameters left out: what is alive now, and the most there was.

    Args:
        module: Whose parameters are no activations.
    """

    def __init__(self, module: nn.Module) -> None:
        self.now = self.peak = 0
        self._own = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
        self._holders: dict[int, int] = {}

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count what is kept in the block."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
            yield

    def _pack(self, tensor: Tensor) -> Any:
        storage = tensor.untyped_storage()
        return tensor if storage.data_ptr() in self._own else _Kept(tensor, self)

    def hold(self, place: int, size: int) -> None:
        """Count a storage; one that is held already counts once."""
        self._holders[place] = self._holders.get(place, 0) + 1
        if self._holders[place] == 1:
            self.now += size
            self.peak = max(self.peak, self.now)

    def release(self, place: int, size: int) -> None:
        """Forget a holder of a storage."""
        self._holders[place] -= 1
        if self._holders[place] == 0:
            self.now -= size


class _Kept:
    """A tensor that autograd keeps, for as long as it does."""

    def __init__(self, tensor: Tensor, counter: KeptForBackward) -> None:
        self.tensor, self.counter = tensor, counter
        storage = tensor.untyped_storage()
        self.place, self.size = storage.data_ptr(), storage.nbytes()
        counter.hold(self.place, self.size)

    def __del__(self) -> None:
        self.counter.release(self.place, self.size)


def _unpack(kept: Any) -> Tensor:
    found: Tensor = kept.tensor if isinstance(kept, _Kept) else kept
    return found


def _state(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    # Muon brings AdamW along, each with a state of its own.
    parts = [getattr(optimizer, name, None) for name in ("muon", "adamw")]
    for part in [own for own in parts if own is not None] or [optimizer]:
        for values in part.state.values():
            yield from (value for value in values.values() if isinstance(value, Tensor))


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _mib(count: float) -> int:
    return -(-int(count) // _MIB)
