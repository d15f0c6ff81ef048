"""One training's weights in several processes: each holds all of them, or a shard of every tensor (FSDP2).

The first process alone reads weights; the others begin with the model's skeleton on torch's meta device and get
numbers from the first. Buffers travel too: those that are in no checkpoint, as the frequencies of rotary embeddings,
would be garbage otherwise, without an error.

Knows: parameters, buffers, process groups, ``fully_shard``. Does not know: objectives, files, optimizers.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from gerund.errors import GerundError, ModelError
from gerund.training.losses.gathering import process_count
from gerund.training.processes import by_the_first, process_index


def spread(module: nn.Module, device: torch.device) -> None:
    """Give every process all weights and buffers of the first one, in place.

    Args:
        module: What is trained; in all processes but the first it may be a skeleton on the meta device.
        device: Where this process computes.
    """
    source = _contents(module)
    _agree(source)
    _replace(module, lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device))
    for target in _contents(module).values():
        sent = target.contiguous()
        distributed.broadcast(sent, 0)
        if sent is not target:
            target.copy_(sent)
    _demand_complete(module)


def shard(module: nn.Module, layers: Iterable[nn.Module], device: torch.device, *, gather_again: bool = True) -> None:
    """Cut the first process's weights over all processes, in place: a shard of every tensor to each.

    Args:
        module: What is trained; in all processes but the first it may be a skeleton on the meta device.
        layers: Its layers: the weights of one at a time are put together.
        device: Where this process computes.
        gather_again: Whether a layer's weights are let go after its forward pass and put together once more for its
            backward pass. Where a plan goes on with states that no layer returned, they have to stay.
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
            own = source.pop(name)
            given = own.to(device) if first else torch.empty_like(own, device=device)
            if isinstance(target, DTensor):
                target.copy_(distribute_tensor(given, target.device_mesh, target.placements))
            else:
                distributed.broadcast(given, 0)
                target.copy_(given)
    _demand_complete(module)


def is_sharded(module: nn.Module) -> bool:
    """Return whether no process has all weights."""
    return any(isinstance(part, FSDPModule) for part in module.modules())


def put_away(module: nn.Module) -> None:
    """Let go of the weights that were put together for a pass without a backward pass."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def whole(tensor: Tensor) -> Tensor:
    """Put together what lies in shards; every process has to ask at the same time."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def trained_tensors(module: nn.Module, *, keep: bool = True) -> dict[str, Tensor]:
    """Return the trained parameters, whole and on the CPU.

    Args:
        module: What is trained. Where it is sharded, every process has to ask at the same time.
        keep: Whether this process wants them; without it nothing is returned.
    """
    put_away(module)
    found = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            gathered = whole(parameter.detach())
            if keep:
                found[name] = gathered.cpu().contiguous()
    return found


def take(module: nn.Module, tensors: dict[str, Tensor], buffers: dict[str, Tensor]) -> None:
    """Fill a skeleton on the meta device with weights that were put together; what is not given stays a skeleton.

    Args:
        module: The skeleton.
        tensors: Parameters by name, which become its own.
        buffers: Buffers by name; they are copied.
    """
    given = {id(own): tensors[name] for name, own in module.named_parameters() if name in tensors}
    given |= {id(own): buffers[name].detach().cpu().clone() for name, own in module.named_buffers() if name in buffers}
    _replace(module, lambda tensor: given.get(id(tensor), tensor))


def _contents(module: nn.Module) -> dict[str, Tensor]:
    """Return all parameters and buffers by name, each once; detached, so that they stay when others replace them."""
    return {name: tensor.detach() for name, tensor in _named(module)}


def _named(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _agree(contents: dict[str, Tensor]) -> None:
    """Refuse a skeleton that is another model than the first process's."""
    own = {name: (tuple(tensor.shape), str(tensor.dtype)) for name, tensor in contents.items()}
    wanted = by_the_first(lambda: own)
    differing = sorted(name for name in own.keys() | wanted.keys() if own.get(name) != wanted.get(name))
    if differing:
        raise GerundError(
            f"the processes have built different models ({differing[0]} is {own.get(differing[0])} here and "
            f"{wanted.get(differing[0])} in the first); give all nodes the same files and the same versions"
        )


def _replace(module: nn.Module, make: Callable[[Tensor], Tensor]) -> None:
    """Replace every parameter and buffer; what is tied stays tied."""
    made: dict[int, Tensor] = {}
    kept: list[Tensor] = []  # a number of an object is its own only while it lives

    def other(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            new = make(tensor)
            if isinstance(tensor, nn.Parameter) and new is not tensor:
                new = nn.Parameter(new.detach(), requires_grad=tensor.requires_grad)
            made[id(tensor)] = new
            kept.append(tensor)
        return made[id(tensor)]

    for part in module.modules():
        tables: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
        for table in tables:
            for name, tensor in table.items():
                if tensor is not None:
                    table[name] = other(tensor)


def _without_views(layer: nn.Module, args: Any, output: Any) -> Any:
    """Return a layer's output without views, as the position bias of a T5: FSDP does not want to see them leave."""
    del layer, args
    if isinstance(output, tuple):
        return tuple(part.clone() if isinstance(part, Tensor) and part._is_view() else part for part in output)
    return output.clone() if isinstance(output, Tensor) and output._is_view() else output


def _demand_complete(module: nn.Module) -> None:
    """Refuse a model that keeps tensors where nobody finds them: they would be without numbers, and no error."""
    for name, part in module.named_modules():
        for key, value in (*vars(part).items(), *part._parameters.items(), *part._buffers.items()):
            if isinstance(value, Tensor) and value.is_meta:
                raise ModelError(
                    f"this model cannot be trained in several processes: {name}.{key} is neither a parameter nor a "
                    "buffer, so the others do not get it from the first"
                )
