"""``gerund train --dry-run``: estimate sizes, memory and time from a few real steps of each stage on random tokens."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn

from gerund.progress import progress
from gerund.training.corpus.texts import existing
from gerund.training.objectives.base import Objective, prepare_objectives, tokens_in
from gerund.training.objectives.sections import TextConfig
from gerund.training.processes import check_machine, peak_memory_mib, preserve_random_states, uses_bf16
from gerund.training.recipe import Recipe
from gerund.training.step import StepData, TrainingModule, build_optimizer, run_step
from gerund.training.trainable_model import prepare_model

_MIB = 2**20


@dataclass(frozen=True)
class MemoryUse:
    """What each process holds, in MiB."""

    processes: int  # how many processes there are
    sharding: str  # how they hold the model: ``none``, or ``fsdp2``
    weights: int  # of the model and of what serves its training, frozen ones included
    gradients: int  # of all that is trained, in fp32
    optimizer: int  # the optimizer's state
    activations: int  # what a step keeps for its backward pass, at its peak; counted tensor by tensor
    gathered: int  # with shards, the weights that are put together at a time: a layer's, and those outside of layers

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
    """Return what each of several processes will hold."""
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


class ActivationMemory:
    """Counts the bytes that autograd keeps, parameters left out: what is alive now, and the most there was."""

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

    def __init__(self, tensor: Tensor, counter: ActivationMemory) -> None:
        self.tensor, self.counter = tensor, counter
        storage = tensor.untyped_storage()
        self.place, self.size = storage.data_ptr(), storage.nbytes()
        counter.hold(self.place, self.size)

    def __del__(self) -> None:
        self.counter.release(self.place, self.size)


def _unpack(kept: Any) -> Tensor:
    result: Tensor = kept.tensor if isinstance(kept, _Kept) else kept
    return result


def _state(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    # Muon brings AdamW along, each with a state of its own.
    parts = [getattr(optimizer, name, None) for name in ("muon", "adamw")]
    for part in [part for part in parts if part is not None] or [optimizer]:
        for values in part.state.values():
            yield from (value for value in values.values() if isinstance(value, Tensor))


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _mib(count: float) -> int:
    return -(-int(count) // _MIB)


# Steps that take so long together vary little: another would only be waited for.
_LONG_SECONDS = 30.0


@dataclass(frozen=True)
class Estimate:
    """What ``--dry-run`` finds out."""

    parameters: int  # parameters of the model
    trained_parameters: int  # parameters that are trained, heads for the training included
    objectives: dict[str, int]
    """For each objective, by name, the tokens of a step in which it takes part; texts as long as they may be."""
    tokens_per_step: int  # tokens of an optimizer step, at most: those of the stage with most of them
    tokens: int  # tokens of the whole training, at most
    seconds_per_step: float
    """Mean over all steps, by two real ones of each stage, or one if they are long: of steps in which the same
    objectives take part."""
    seconds: float  # estimated time of all steps
    memory_mib: int  # peak memory of these steps, over all stages: of the GPU where there is one, else of the process
    memory: MemoryUse  # what each process holds, by what it is


class RandomTexts:
    """Random tokens in the place of ``Sources``, every text as long as it may be."""

    cache = None  # nothing is written

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary

    def texts(self, _config: TextConfig, length: int, seed: int) -> Any:
        """Return random training texts."""
        return _RandomRows(self.vocabulary, length, seed)

    def validation_texts(self, config: TextConfig, length: int, seed: int) -> Any:
        """Return nothing: nothing is validated."""

    def blocks(self, _names: list[str], length: int, seed: int) -> Any:
        """Return random blocks."""
        return _RandomRows(self.vocabulary, length, seed)

    def validation_blocks(self, _names: list[str], _length: int, _rows: int) -> dict[str, Any]:
        """Return nothing: nothing is validated."""
        return {}

    def reads(self, name: str, files: list[Path]) -> None:
        """Do nothing: nothing is resumed."""


class _RandomRows:
    skipped = 0

    def __init__(self, vocabulary: int, length: int, seed: int) -> None:
        self.vocabulary, self.length, self.seed = vocabulary, length, seed

    def row(self, number: int) -> np.ndarray:
        return np.random.default_rng([self.seed, number]).integers(self.vocabulary, size=self.length)

    def number(self, row: int) -> int:
        return row

    def tokens_of(self, number: int) -> np.ndarray:
        return self.row(number)

    def rows(self, first: int, count: int) -> torch.Tensor:
        return torch.from_numpy(np.stack([self.row(number) for number in range(first, first + count)]))


@preserve_random_states()
def estimate(recipe: Recipe, *, processes: int = 1) -> Estimate:
    """Take three real steps of each stage on random tokens, two if they are long.

    Pairs are read from their files, nothing is written.

    Of several ``processes`` one takes its part of every batch here; what they exchange takes time as well, and is not
    counted.
    """
    check_machine(recipe, processes)
    for source in recipe.data.sources:
        existing(recipe, source.files + source.validation)
    model = prepare_model(recipe, write=False)
    objectives = prepare_objectives(recipe, model, RandomTexts(model.vocabulary))
    losses = {objective.name: objective.losses for objective in objectives}
    module = TrainingModule(model.model, losses, bf16=uses_bf16(recipe))
    module.to("cuda" if torch.cuda.is_available() else "cpu")
    module.train()
    optimizer = build_optimizer(module, recipe.optimizer)
    data = StepData(objectives, steps=recipe.steps, processes=processes)
    activations = ActivationMemory(module)
    tokens: dict[str, int] = {objective.name: 0 for objective in objectives}
    seconds, total, most = 0.0, 0, 0
    stages = _stages(recipe, objectives)
    for number, (step, count) in enumerate(stages, 1):
        item = send_to_device(data[step * processes], model.model.device)
        more = min(count, 2)
        with progress(1 + more, f"timing steps, stage {number} of {len(stages)}") as advance:
            with activations.counting():
                times = [_timed_step(module, objectives, optimizer, item)]
            advance(1)
            while len(times) <= more and (len(times) == 1 or sum(times) < _LONG_SECONDS):
                times.append(_timed_step(module, objectives, optimizer, item))
                advance(1)
        # The first step compiles and allocates; it is counted once and not averaged in.
        seconds += times[0] + sum(times[1:]) / len(times[1:]) * (count - 1)
        step_tokens = {name: tokens_in(batch) * processes for name, batch in item.items() if name in tokens}
        tokens |= {name: max(tokens[name], result) for name, result in step_tokens.items()}
        total += sum(step_tokens.values()) * count
        most = max(most, sum(step_tokens.values()))
    layers, sharding = model.layers, recipe.sharding
    memory = memory_use(module, layers, optimizer, activations=activations.peak, processes=processes, sharding=sharding)
    return Estimate(
        parameters=sum(p.numel() for part in (model.model, model.head) if part for p in part.parameters()),
        trained_parameters=sum(p.numel() for p in module.parameters() if p.requires_grad),
        objectives=tokens,
        tokens_per_step=most,
        tokens=total,
        seconds_per_step=seconds / recipe.steps,
        seconds=seconds,
        memory_mib=peak_memory_mib(),
        memory=memory,
    )


def _timed_step(module: TrainingModule, objectives: list[Objective], optimizer: Any, item: dict[str, Any]) -> float:
    start = time.perf_counter()
    run_step(module, objectives, item)
    optimizer.step()
    optimizer.zero_grad()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _stages(recipe: Recipe, objectives: list[Objective]) -> list[tuple[int, int]]:
    """Return a step of each stage, and how many steps it has: those in which the same objectives take part."""
    changes = sorted({step for objective in recipe.objectives for step, _ in objective.weight if step < recipe.steps})
    stages: dict[tuple[str, ...], tuple[int, int]] = {}
    for first, stop in pairwise([*changes, recipe.steps]):
        active = tuple(objective.name for objective in objectives if objective.is_active(first))
        begin, count = stages.get(active, (first, 0))
        stages[active] = (begin, count + stop - first)
    return list(stages.values())
