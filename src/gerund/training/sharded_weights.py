"""Trained weights and optimizer states on the disk: in one file, or in a file a process with its rows of each tensor.

A file of shards says in its header which rows of which tensor it has. So any number of processes reads what any other
number has written: each takes the rows it needs from whatever files have them, and nobody puts a tensor together.

Knows: safetensors, rows of sharded tensors, the Trainer's own file of an optimizer. Does not know: the training.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from gerund.errors import GerundError

WEIGHTS, OPTIMIZER = "trainable", "optimizer"
_ENDING = ".safetensors"
_HEADER = "gerund_rows"
# What the Trainer writes where one process has all of it.
_WHOLE_OPTIMIZER = "optimizer.pt"


def shard_file(stem: str, index: int, count: int) -> str:
    """Return the name of a process's file.

    >>> shard_file("trainable", 0, 8)
    'trainable-00001-of-00008.safetensors'
    """
    return f"{stem}-{index + 1:05}-of-{count:05}{_ENDING}"


def are_sharded(checkpoint: Path) -> bool:
    """Return whether a checkpoint was written in shards."""
    return any(checkpoint.glob(f"{WEIGHTS}-*-of-*{_ENDING}"))


def write_shard(tensors: Mapping[str, Tensor], folder: Path, stem: str, *, index: int, count: int) -> None:
    """Write this process's rows of all tensors; of those that are in no shards the first process writes all.

    Args:
        tensors: By name; every process has the same names.
        folder: Of the checkpoint.
        stem: What the file is called.
        index: Of this process.
        count: How many processes there are.
    """
    own, rows = {}, {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            first, local = _own_rows(tensor), tensor.to_local()
        elif index == 0:
            first, local = 0, tensor
        else:
            continue
        rows[name] = [first, list(tensor.shape)]
        own[name] = local.detach().cpu().reshape(local.shape or (1,)).contiguous()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / shard_file(stem, index, count)
    save_file(own, path, {"format": "pt", _HEADER: json.dumps(rows)})
    with path.open("rb") as file:
        os.fsync(file.fileno())  # what other machines have written the manifest's writer cannot promise


class Stored:
    """Tensors of a checkpoint by name, whatever number of processes wrote them.

    Args:
        pieces: For each name where rows begin, and what gives them by slicing.
        shapes: The whole shape of each.
    """

    def __init__(self, pieces: dict[str, list[tuple[int, Any]]], shapes: dict[str, tuple[int, ...]]) -> None:
        self.pieces, self.shapes = pieces, shapes

    @classmethod
    def open(cls, folder: Path, stem: str) -> "Stored":
        """Open the files of a checkpoint; of tensors nothing is read yet."""
        pieces: dict[str, list[tuple[int, Any]]] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for path in sorted(folder.glob(f"{stem}-*-of-*{_ENDING}")) or [folder / f"{stem}{_ENDING}"]:
            file = safe_open(str(path), framework="pt")
            rows = json.loads((file.metadata() or {}).get(_HEADER, "{}"))
            for name in file.keys():  # noqa: SIM118
                part = file.get_slice(name)
                first, shape = rows.get(name, (0, part.get_shape()))
                pieces.setdefault(name, []).append((first, part))
                shapes[name] = tuple(shape)
        return cls(pieces, shapes)

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> "Stored":
        """Return tensors that are in memory in the same form."""
        rows = {name: tensor.reshape(tensor.shape or (1,)) for name, tensor in tensors.items()}
        return cls({name: [(0, own)] for name, own in rows.items()}, {n: tuple(t.shape) for n, t in tensors.items()})

    def rows(self, name: str, first: int, stop: int) -> Tensor:
        """Return rows ``first`` to ``stop`` of a tensor.

        Raises:
            GerundError: A file does not have what its header promises.
        """
        found = []
        for begin, part in sorted(self.pieces[name], key=lambda piece: piece[0]):
            size = (part.shape if isinstance(part, Tensor) else part.get_shape())[0]
            low, high = max(first, begin), min(stop, begin + size)
            if low < high:
                found.append(part[low - begin : high - begin])
        gathered = torch.cat(found) if found else torch.empty(0, *self.shapes[name][1:])
        if len(gathered) != stop - first:
            raise GerundError(f"the checkpoint has {len(gathered)} of {stop - first} rows of {name}; take another one")
        return gathered

    def read_into(self, name: str, target: Tensor) -> None:
        """Copy a tensor, or this process's rows of it, into ``target``."""
        if isinstance(target, DTensor):
            local = target.to_local()
            first = _own_rows(target)
            if len(local):
                local.copy_(self.rows(name, first, first + len(local)))
        elif not self.shapes[name]:
            target.copy_(self.rows(name, 0, 1).reshape(()))
        else:
            target.copy_(self.rows(name, 0, self.shapes[name][0]))


def read_weights(module: nn.Module, checkpoint: Path) -> None:
    """Load a checkpoint's weights into ``module``, which must be trainable in exactly these parameters.

    Raises:
        GerundError: They are those of another model.
    """
    stored = Stored.open(checkpoint, WEIGHTS)
    trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
    differing = sorted(stored.shapes.keys() ^ trainable.keys())
    differing += [name for name, p in trainable.items() if stored.shapes.get(name, p.shape) != p.shape]
    if differing:
        raise GerundError(
            f"{checkpoint}: its weights are those of another model (for example {', '.join(differing[:3])})"
        )
    with torch.no_grad():
        for name, parameter in trainable.items():
            stored.read_into(name, parameter)


def optimizer_tensors(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return an optimizer's state as tensors under the names of the parameters."""
    found = {}
    for name, parameter in module.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"{name}.{key}"] = value if isinstance(value, Tensor) else torch.tensor(float(value))
    return found


def read_optimizer(module: nn.Module, optimizer: torch.optim.Optimizer, checkpoint: Path) -> None:
    """Load an optimizer's state, whole or in shards, into an optimizer of this process's parameters."""
    if are_sharded(checkpoint):
        stored = Stored.open(checkpoint, OPTIMIZER)
    else:
        stored = Stored.of(_whole_state(module, optimizer, checkpoint / _WHOLE_OPTIMIZER))
    states: dict[str, list[str]] = {}
    for entry in stored.shapes:
        name, _, key = entry.rpartition(".")
        states.setdefault(name, []).append(key)
    for name, parameter in module.named_parameters():
        state = {}
        for key in states.get(name, ()):
            shape = stored.shapes[f"{name}.{key}"]
            like = torch.zeros_like(parameter, requires_grad=False) if shape == parameter.shape else torch.zeros(shape)
            stored.read_into(f"{name}.{key}", like)
            state[key] = like
        if state:
            optimizer.state[parameter] = state


def _whole_state(module: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> dict[str, Tensor]:
    """Return what the Trainer wrote of an optimizer, under the names of the parameters."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    order = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
    state = torch.load(path, map_location="cpu", weights_only=True)["state"]
    return {
        f"{order[number]}.{key}": torch.as_tensor(value)
        for number, values in state.items()
        for key, value in values.items()
    }


def _own_rows(tensor: DTensor) -> int:
    """Return the first of this process's rows of a tensor whose rows are shared out."""
    mesh = tensor.device_mesh
    if tuple(tensor.placements) != (Shard(0),):
        raise GerundError(f"a tensor is cut as {tensor.placements}, and checkpoints hold rows")
    each = -(-tensor.shape[0] // mesh.size())
    return min(mesh.get_local_rank() * each, tensor.shape[0])
