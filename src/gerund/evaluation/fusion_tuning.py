"""Chooses what an encoder's vectors count beside words: eleven weights, each text encoded once.

Knows: weights, scores. Does not know: tasks' insides, files.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from gerund.errors import ConfigError
from gerund.evaluation.run import ProgressReporter, cache_in, evaluate
from gerund.evaluation.systems.embeddings import EmbeddingCache
from gerund.evaluation.systems.hybrid import Fusion, HybridSystem
from gerund.evaluation.systems.language_model import language_model_system
from gerund.evaluation.task import EvaluationConfig, Task
from gerund.language_model import LanguageModel

KIND = "retrieval"
WEIGHTS = tuple(place / 10 for place in range(11))
"""From words alone to vectors alone."""


@dataclass(frozen=True)
class FusionTrial:
    """One weight and its scores.

    Attributes:
        weight: what the vectors count.
        scores: by task.
    """

    weight: float
    scores: Mapping[str, float]

    @property
    def mean(self) -> float:
        """Mean over the tasks."""
        return fmean(self.scores.values())


@dataclass(frozen=True)
class TunedFusion:
    """What was tried.

    Attributes:
        trials: by rising weight.
    """

    trials: Sequence[FusionTrial]

    @property
    def best(self) -> FusionTrial:
        """The best mean; of equal ones the one nearest to a half, the default."""
        return min(self.trials, key=lambda trial: (-trial.mean, abs(trial.weight - 0.5)))


def demand_rankings(tasks: Sequence[Task]) -> None:
    """Refuse tasks in which nothing is ranked by words and vectors.

    Raises:
        ConfigError: there is one, or none at all.
    """
    others = [task.name for task in tasks if task.kind != KIND]
    if others or not tasks:
        raise ConfigError(f"the weight of a fusion is chosen on {KIND} tasks, not on {', '.join(others) or 'none'}")


def tune_fusion(
    lm: LanguageModel,
    tasks: Sequence[Task],
    config: EvaluationConfig,
    *,
    folder: Path | None = None,
    reporter: ProgressReporter | None = None,
) -> TunedFusion:
    """Choose what a model's vectors count beside words by the mean score over tasks.

    Args:
        lm: the model, read as it is.
        tasks: retrieval tasks.
        config: of the evaluation; ``split="validation"`` where tasks have one.
        folder: where embeddings and finished scores are kept, so that an interrupted search goes on.
        reporter: called before and after each measurement.

    Raises:
        ConfigError: a task ranks nothing.
    """
    demand_rankings(tasks)
    cache = EmbeddingCache() if folder is None else cache_in(folder)
    dense = language_model_system("model", lm, cache)
    systems = {weight: HybridSystem(dense, Fusion(weight=weight)) for weight in WEIGHTS}
    results = evaluate(list(systems.values()), tasks, config, folder=folder, reporter=reporter).results
    by_label: dict[str, dict[str, float]] = {}
    for result in results:
        by_label.setdefault(result.system, {})[result.task] = result.score.value
    return TunedFusion([FusionTrial(weight, by_label[system.label]) for weight, system in systems.items()])
