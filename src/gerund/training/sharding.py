"""Distribute a model over processes, whole or in shards (FSDP2), and store shards of weights and optimizer states.

The first process alone reads weights; the others begin with the model's skeleton on torch's meta device and get
values from the first. Buffers travel too: those that are in no checkpoint, as the frequencies of rotary embeddings,
would be garbage otherwise, without an error.

A checkpoint has one file, or one per process with its rows of each tensor. A file of shards lists its rows in its
header, so any number of processes reads what any other number has written, and no process needs a whole tensor.
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from gerund.errors import GerundError, ModelError
from gerund.training.processes import on_first_process, process_count, process_index


def spread(module: nn.Module, device: torch.device) -> None:
    """Give every process all weights and buffers of the first one, in place.

    In all processes but the first, the module may be a skeleton on the meta device.
    """
    source = _contents(module)
    _agree(source)
    _replace(module, lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device))
    for target in _contents(module).values():
        sent = target.contiguous()
        distributed.broadcast(sent, 0)
        if sent is not target:
            target.copy_(sent)
    _check_materialized(module)


def shard(module: nn.Module, layers: Iterable[nn.Module], device: torch.device, *, gather_again: bool = True) -> None:
    """Cut the first process's weights over all processes, in place: a shard of every tensor to each.

    In all processes but the first, the module may be a skeleton on the meta device. With ``gather_again`` a layer's
    weights are let go after its forward pass and put together once more for its backward pass. Where a plan continues
    with states that no layer returned, they have to stay.
    """
    source = _contents(module)
    _agree(source)
    mesh = init_device_mesh(device.type, (process_count(),))
    # The first one's too, whose weights are kept in `source`: then all processes do the same.
    _replace(module, lambda tensor: torch.empty_like(tensor, device="meta"))
    for layer in layers:
        layer.register_forward_hook(_without_views)
        fully_shard(layer, mesh=mesh, reshard_after_forward=gather_again)
    # What lies outside of layers is needed by the last forward and the first backward pass: torch keeps it in between.
    fully_shard(module, mesh=mesh, reshard_after_forward=None if gather_again else False)
    module.to_empty(device=device)
    first = process_index() == 0
    with torch.no_grad():
        for name, target in _contents(module).items():
            # One tensor at a time is whole on the device. (What the others bring gives only its size.)
            value = source.pop(name)
            given = value.to(device) if first else torch.empty_like(value, device=device)
            if isinstance(target, DTensor):
                target.copy_(distribute_tensor(given, target.device_mesh, target.placements))
            else:
                distributed.broadcast(given, 0)
                target.copy_(given)
    _check_materialized(module)


def is_sharded(module: nn.Module) -> bool:
    """Return whether no process has all weights."""
    return any(isinstance(part, FSDPModule) for part in module.modules())


def reshard(module: nn.Module) -> None:
    """Let go of the weights that were put together for a pass without a backward pass."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def whole(tensor: Tensor) -> Tensor:
    """Put together what lies in shards; every process has to ask at the same time."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def copy_of(parameter: Tensor) -> Tensor:
    """Return a parameter's values as they are now, whole, in float32 and on the CPU; every process has to ask."""
    return whole(parameter.detach()).float().cpu().clone()


def gather_trained(module: nn.Module, *, keep: bool = True) -> dict[str, Tensor]:
    """Return the trained parameters, whole and on the CPU.

    Where the module is sharded, every process has to call this at the same time; only those with ``keep`` get them.
    """
    reshard(module)
    result = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            gathered = whole(parameter.detach())
            if keep:
                result[name] = gathered.cpu().contiguous()
    return result


def take(module: nn.Module, tensors: dict[str, Tensor], buffers: dict[str, Tensor]) -> None:
    """Fill a skeleton on the meta device with weights that were put together; what is not given stays a skeleton."""
    given = {id(item): tensors[name] for name, item in module.named_parameters() if name in tensors}
    given |= {
        id(item): buffers[name].detach().cpu().clone() for name, item in module.named_buffers() if name in buffers
    }
    _replace(module, lambda tensor: given.get(id(tensor), tensor))


def _contents(module: nn.Module) -> dict[str, Tensor]:
    """Return all parameters and buffers by name, each once; detached, so that they stay when others replace them."""
    named = chain(module.named_parameters(), module.named_buffers())
    return {name: tensor.detach() for name, tensor in named}


def _agree(contents: dict[str, Tensor]) -> None:
    """Refuse a skeleton that is another model than the first process's."""
    here = {name: (tuple(tensor.shape), str(tensor.dtype)) for name, tensor in contents.items()}
    first = on_first_process(lambda: here)
    differing = sorted(name for name in here.keys() | first.keys() if here.get(name) != first.get(name))
    if differing:
        raise GerundError(
            f"the processes have built different models ({differing[0]} is {here.get(differing[0])} here and "
            f"{first.get(differing[0])} in the first); give all nodes the same files and the same versions"
        )


def _replace(module: nn.Module, make: Callable[[Tensor], Tensor]) -> None:
    """Replace every parameter and buffer; what is tied stays tied."""
    made: dict[int, Tensor] = {}
    alive: list[Tensor] = []  # a number of an object is its own only while it lives

    def other(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            new = make(tensor)
            if isinstance(tensor, nn.Parameter) and new is not tensor:
                new = nn.Parameter(new.detach(), requires_grad=tensor.requires_grad)
            made[id(tensor)] = new
            alive.append(tensor)
        return made[id(tensor)]

    for part in module.modules():
        tables: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
        for table in tables:
            for name, tensor in table.items():
                if tensor is not None:
                    table[name] = other(tensor)


def _without_views(_layer: nn.Module, _args: Any, output: Any) -> Any:
    """Return a layer's output without views, as the position bias of a T5: FSDP does not want to see them leave."""
    if isinstance(output, tuple):
        return tuple(part.clone() if isinstance(part, Tensor) and part._is_view() else part for part in output)
    return output.clone() if isinstance(output, Tensor) and output._is_view() else output


def _check_materialized(module: nn.Module) -> None:
    """Refuse a model that keeps tensors where nobody finds them: they would be without numbers, and no error."""
    for name, part in module.named_modules():
        for key, value in (*vars(part).items(), *part._parameters.items(), *part._buffers.items()):
            if isinstance(value, Tensor) and value.is_meta:
                raise ModelError(
                    f"this model cannot be trained in several processes: {name}.{key} is neither a parameter nor a "
                    "buffer, so the others do not get it from the first"
                )


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
    """Write this process's rows of all tensors; of those that are in no shards the first process writes all."""
    shards, rows = {}, {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            first, local = _first_row(tensor), tensor.to_local()
        elif index == 0:
            first, local = 0, tensor
        else:
            continue
        rows[name] = [first, list(tensor.shape)]
        shards[name] = local.detach().cpu().reshape(local.shape or (1,)).contiguous()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / shard_file(stem, index, count)
    save_file(shards, path, {"format": "pt", _HEADER: json.dumps(rows)})
    with path.open("rb") as file:
        os.fsync(file.fileno())  # what other machines have written the manifest's writer cannot promise


class Stored:
    """Tensors of a checkpoint by name, whatever number of processes wrote them."""

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
        return cls({name: [(0, item)] for name, item in rows.items()}, {n: tuple(t.shape) for n, t in tensors.items()})

    def rows(self, name: str, first: int, stop: int) -> Tensor:
        """Return rows ``first`` to ``stop`` of a tensor."""
        result = []
        for begin, part in sorted(self.pieces[name], key=lambda piece: piece[0]):
            size = (part.shape if isinstance(part, Tensor) else part.get_shape())[0]
            low, high = max(first, begin), min(stop, begin + size)
            if low < high:
                result.append(part[low - begin : high - begin])
        gathered = torch.cat(result) if result else torch.empty(0, *self.shapes[name][1:])
        if len(gathered) != stop - first:
            raise GerundError(f"the checkpoint has {len(gathered)} of {stop - first} rows of {name}; take another one")
        return gathered

    def read_into(self, name: str, target: Tensor) -> None:
        """Copy a tensor, or this process's rows of it, into ``target``."""
        if isinstance(target, DTensor):
            local = target.to_local()
            first = _first_row(target)
            if len(local):
                local.copy_(self.rows(name, first, first + len(local)))
        elif not self.shapes[name]:
            target.copy_(self.rows(name, 0, 1).reshape(()))
        else:
            target.copy_(self.rows(name, 0, self.shapes[name][0]))


def read_weights(module: nn.Module, checkpoint: Path) -> None:
    """Load a checkpoint's weights into ``module``, which must be trainable in exactly these parameters."""
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


def optimizer_state_tensors(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return an optimizer's state as tensors under the names of the parameters."""
    result = {}
    for name, parameter in module.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            result[f"{name}.{key}"] = value if isinstance(value, Tensor) else torch.tensor(float(value))
    return result


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


def _first_row(tensor: DTensor) -> int:
    """Return the first of this process's rows of a tensor whose rows are shared out."""
    mesh = tensor.device_mesh
    if tuple(tensor.placements) != (Shard(0),):
        raise GerundError(f"a tensor is cut as {tensor.placements}, and checkpoints hold rows")
    each = -(-tensor.shape[0] // mesh.size())
    return min(mesh.get_local_rank() * each, tensor.shape[0])
