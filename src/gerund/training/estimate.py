"""What ``--dry-run`` finds out: sizes, memory and time, from two real steps on random tokens.

Knows: how to take a step without any corpus. Does not know: files of a run.
"""

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gerund.training.corpus.sources import existing
from gerund.training.machine import check_machine, peak_memory_mib, uses_bf16
from gerund.training.objectives.base import Objective, TextConfig
from gerund.training.objectives.batches import tokens_in
from gerund.training.objectives.registry import prepare_objectives
from gerund.training.optimizer import build_optimizer
from gerund.training.recipe import Recipe
from gerund.training.step import StepData, TrainingModule, run_step
from gerund.training.trainable_model import prepare_model


@dataclass(frozen=True)
class Estimate:
    """What ``--dry-run`` finds out."""

    parameters: int
    """Parameters of the model."""
    trained_parameters: int
    """Parameters that are trained, heads for the training included."""
    objectives: dict[str, int]
    """For each objective, by name, the tokens of a step; texts as long as they may be."""
    tokens: int
    """Tokens of the whole training, at most."""
    seconds_per_step: float
    """Mean of two real steps with every objective that ever takes part."""
    seconds: float
    """Estimated time of all steps."""
    memory_mib: int
    """Peak memory of these steps: of the GPU where there is one, else of the process."""

    @property
    def tokens_per_step(self) -> int:
        """Tokens of an optimizer step, at most."""
        return sum(self.objectives.values())


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


class _RandomRows:
    """Rows of random tokens."""

    skipped = 0

    def __init__(self, vocabulary: int, length: int, seed: int) -> None:
        self.vocabulary, self.length, self.seed = vocabulary, length, seed

    def row(self, number: int) -> np.ndarray:
        return np.random.default_rng([self.seed, number]).integers(self.vocabulary, size=self.length)

    def rows(self, first: int, count: int) -> torch.Tensor:
        return torch.from_numpy(np.stack([self.row(number) for number in range(first, first + count)]))


def estimate(recipe: Recipe) -> Estimate:
    """Take two real steps on random tokens; pairs are read from their files, nothing is written.

    Raises:
        ConfigError: As ``train`` would.
    """
    check_machine(recipe)
    for source in recipe.data.sources:
        existing(recipe, source.files + source.validation)
    model = prepare_model(recipe, write=False)
    objectives = prepare_objectives(recipe, model, RandomTexts(model.vocabulary))
    losses = {objective.name: objective.losses for objective in objectives}
    module = TrainingModule(model.model, losses, bf16=uses_bf16(recipe))
    module.to("cuda" if torch.cuda.is_available() else "cpu")
    module.train()
    optimizer = build_optimizer(module, recipe.optimizer)
    data = StepData(objectives, steps=recipe.steps)
    item = _moved(data[_busiest(recipe, objectives)], model.model.device)
    times = []
    for _ in range(3):
        start = time.perf_counter()
        run_step(module, objectives, item)
        optimizer.step()
        optimizer.zero_grad()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    # The first step compiles and allocates; it is counted once and not averaged in.
    per_step = sum(times[1:]) / 2
    tokens = {objective.name: tokens_in(item.get(objective.name, {})) for objective in objectives}
    active = {o.name: sum(o.is_active(step) for step in range(recipe.steps)) for o in objectives}
    return Estimate(
        parameters=sum(p.numel() for part in (model.model, model.head) if part for p in part.parameters()),
        trained_parameters=sum(p.numel() for p in module.parameters() if p.requires_grad),
        objectives=tokens,
        tokens=sum(count * active[name] for name, count in tokens.items()),
        seconds_per_step=per_step,
        seconds=times[0] + per_step * (recipe.steps - 1),
        memory_mib=peak_memory_mib(),
    )


def _busiest(recipe: Recipe, objectives: list[Objective]) -> int:
    """Return the step in which most objectives take part."""
    changes = {step for objective in recipe.objectives for step, _ in objective.weight if step < recipe.steps}
    return max(sorted(changes), key=lambda step: sum(objective.is_active(step) for objective in objectives))


def _moved(item: Any, device: torch.device) -> Any:
    if isinstance(item, torch.Tensor):
        return item.to(device)
    if isinstance(item, dict):
        return {name: _moved(value, device) for name, value in item.items()}
    return item
