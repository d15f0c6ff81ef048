"""What ``--dry-run`` finds out: sizes, memory and time, from a few real steps of each stage on random tokens.

Knows: how to take a step without any corpus. Does not know: files of a run.
"""

import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gerund.progress import progress
from gerund.training.corpus.sources import existing
from gerund.training.machine import check_machine, peak_memory_mib, uses_bf16
from gerund.training.memory import KeptForBackward, MemoryUse, memory_use
from gerund.training.objectives.base import Objective, TextConfig
from gerund.training.objectives.batches import tokens_in
from gerund.training.objectives.registry import prepare_objectives
from gerund.training.optimizer import build_optimizer
from gerund.training.random_states import random_states_kept
from gerund.training.recipe import Recipe
from gerund.training.step import StepData, TrainingModule, run_step
from gerund.training.trainable_model import prepare_model

# Steps that take so long together vary little: another would only be waited for.
_LONG_SECONDS = 30.0


@dataclass(frozen=True)
class Estimate:
    """What ``--dry-run`` finds out."""

    parameters: int
    """Parameters of the model."""
    trained_parameters: int
    """Parameters that are trained, heads for the training included."""
    objectives: dict[str, int]
    """For each objective, by name, the tokens of a step in which it takes part; texts as long as they may be."""
    tokens_per_step: int
    """Tokens of an optimizer step, at most: those of the stage with most of them."""
    tokens: int
    """Tokens of the whole training, at most."""
    seconds_per_step: float
    """Mean over all steps, by two real ones of each stage, or one if they are long: of steps in which the same
    objectives take part."""
    seconds: float
    """Estimated time of all steps."""
    memory_mib: int
    """Peak memory of these steps, over all stages: of the GPU where there is one, else of the process."""
    memory: MemoryUse
    """What each process holds, by what it is."""


class RandomTexts:
    """Random tokens in the place of a corpus, every text as long as it may be.

    Args:
        vocabulary: How many tokens there are.
    """

    cache = None

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary

    def texts(self, config: TextConfig, length: int, seed: int) -> "_RandomRows":
        """Return random training texts."""
        del config
        return _RandomRows(self.vocabulary, length, seed)

    def validation_texts(self, config: TextConfig, length: int, seed: int) -> None:
        """Return nothing: nothing is validated."""

    def blocks(self, sources: list[str], length: int, seed: int) -> "_RandomRows":
        """Return random blocks."""
        del sources
        return _RandomRows(self.vocabulary, length, seed)

    def validation_blocks(self, sources: list[str], length: int, rows: int) -> dict[str, Any]:
        """Return nothing: nothing is validated."""
        del sources, length, rows
        return {}

    def reads(self, name: str, files: list[Path]) -> None:
        """Do nothing: nothing is resumed."""


class _RandomRows:
    """Rows of random tokens."""

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


@random_states_kept()
def estimate(recipe: Recipe, *, processes: int = 1) -> Estimate:
    """Take three real steps of each stage on random tokens, two if they are long.

    Pairs are read from their files, nothing is written.

    Args:
        recipe: The settings.
        processes: How many will share every batch. One process takes its part of it here; what they exchange takes
            time as well, and is not counted.

    Raises:
        ConfigError: As ``train`` would.
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
    kept = KeptForBackward(module)
    tokens: dict[str, int] = {objective.name: 0 for objective in objectives}
    seconds, total, most = 0.0, 0, 0
    stages = _stages(recipe, objectives)
    for number, (step, count) in enumerate(stages, 1):
        item = _moved(data[step * processes], model.model.device)
        more = min(count, 2)
        with progress(1 + more, f"timing steps, stage {number} of {len(stages)}") as advance:
            with kept.counting():
                times = [_timed_step(module, objectives, optimizer, item)]
            advance(1)
            while len(times) <= more and (len(times) == 1 or sum(times) < _LONG_SECONDS):
                times.append(_timed_step(module, objectives, optimizer, item))
                advance(1)
        # The first step compiles and allocates; it is counted once and not averaged in.
        seconds += times[0] + sum(times[1:]) / len(times[1:]) * (count - 1)
        own = {name: tokens_in(batch) * processes for name, batch in item.items() if name in tokens}
        tokens |= {name: max(tokens[name], found) for name, found in own.items()}
        total += sum(own.values()) * count
        most = max(most, sum(own.values()))
    layers, sharding = model.layers, recipe.sharding
    memory = memory_use(module, layers, optimizer, activations=kept.peak, processes=processes, sharding=sharding)
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
    """Take a step and return how long it took."""
    start = time.perf_counter()
    run_step(module, objectives, item)
    optimizer.step()
    optimizer.zero_grad()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _stages(recipe: Recipe, objectives: list[Objective]) -> list[tuple[int, int]]:
    """Return a step of each stage, and how many steps it has: those in which the same objectives take part."""
    changes = sorted({step for own in recipe.objectives for step, _ in own.weight if step < recipe.steps})
    stages: dict[tuple[str, ...], tuple[int, int]] = {}
    for first, stop in pairwise([*changes, recipe.steps]):
        active = tuple(objective.name for objective in objectives if objective.is_active(first))
        begin, count = stages.get(active, (first, 0))
        stages[active] = (begin, count + stop - first)
    return list(stages.values())


def _moved(item: Any, device: torch.device) -> Any:
    if isinstance(item, torch.Tensor):
        return item.to(device)
    if isinstance(item, dict):
        return {name: _moved(value, device) for name, value in item.items()}
    return item
