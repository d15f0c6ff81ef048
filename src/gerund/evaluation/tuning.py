"""Choose an attention plan, or the weight of vectors in hybrid search, on validation data."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Literal

from gerund.attention.layouts import decoder_layers
from gerund.attention.recurrent import kind_of
from gerund.errors import ConfigError, GerundError
from gerund.evaluation.run import ProgressReporter, cache_in, evaluate
from gerund.evaluation.search_space import (
    BASELINES,
    DEFAULT_BUDGET,
    ONE_K,
    PLANS,
    TWO_K,
    method_configs,
    plans_named,
    require_settings,
    spread,
)
from gerund.evaluation.systems.base import EmbeddingCache
from gerund.evaluation.systems.language_model import language_model_system
from gerund.evaluation.systems.search import Fusion, HybridSystem
from gerund.evaluation.systems.selection import label_of, read_as, refusal
from gerund.evaluation.task import EvaluationConfig, Task
from gerund.language_model import LanguageModel
from gerund.models.kinds import is_encoder_decoder
from gerund.settings.encoder import EncoderConfig
from gerund.settings.plan import AttentionPlan
from gerund.settings.templates import NO_TRANSFORM

# At most this fraction of the budget is for methods.
_FOR_METHODS = 0.5
# LBW, Figure 2: "In the EXTEND architecture, k is bounded by 5 due to the consistent downward trend."
_MOST_EXTENDED = 5
# Vectors of several plans that are held at once, so that their shared layers run once.
_MOST_BYTES, _FEWEST_TOGETHER = 1 << 30, 8
# Fractions of the budget: evenly spread k, then the gaps next to the best; the rest is for k0.
_SPREAD, _REFINED = 0.65, 0.8


@dataclass(frozen=True)
class Trial:
    """One setting and how it scored."""

    config: EncoderConfig  # the encoder config
    label: str  # its short name
    scores: dict[str, float]  # the main metric by task

    @property
    def plan(self) -> AttentionPlan:
        """The plan, with its k and k0."""
        return self.config.attention

    @property
    def mean(self) -> float:
        """Mean of the main metrics over the tasks."""
        return fmean(self.scores.values())

    @property
    def converted(self) -> int:
        """How much of the model is changed; of equal scores the one with less is taken."""
        beyond = bool(self.plan.skips) + (self.plan.recurrent == "both") + len(self.config.methods)
        return (self.plan.k or 0) + (self.plan.name != "causal") + beyond

    def is_plain_with(self, pooling: str) -> bool:
        """Whether it is a plan with that pooling and nothing else, as on the curves over k."""
        return self.config.pooling == pooling and self.plan.skips is None and not self.config.methods


@dataclass
class Tuned:
    """What was tried and what was chosen."""

    n_layers: int  # of the model
    budget: int  # how many settings might have been tried
    trials: list[Trial] = field(default_factory=list)  # in the order in which they were tried
    sample: Sequence[str] = ()  # texts on which transforms were fitted
    # What becomes of recurrent layers while plans are compared: ``both`` only where no layer attends.
    recurrent: Literal["causal", "both"] = "causal"
    # Settings that the model cannot be read with, and why, by their label.
    refused: dict[str, GerundError] = field(default_factory=dict)
    # Settings with methods for which the budget was too small, by their label.
    untried: list[str] = field(default_factory=list)

    def chosen(self, lm: LanguageModel) -> LanguageModel:
        """Return the model that was tuned, read as what won."""
        return read_as(lm, self.best.config, self.sample)

    @property
    def best(self) -> Trial:
        """The best mean; of equal ones the one that changes the model least."""
        return min(self.trials, key=lambda trial: (-trial.mean, trial.converted))

    @property
    def baseline(self) -> Trial:
        """The untouched causal model with mean pooling, or the first pooling that was tried."""
        return next(trial for trial in self.trials if trial.plan.name == "causal")

    def best_of(self, plan: str) -> Trial | None:
        """Return the best trial of one plan."""
        trials = [trial for trial in self.trials if trial.plan.name == plan]
        return min(trials, key=lambda trial: (-trial.mean, trial.converted)) if trials else None

    def curves(self, pooling: str, task: str | None = None) -> dict[str, list[tuple[int, float]]]:
        """Return for every plan with one k its points (k, score), by k: LBW's Figures 2 and 4."""
        by_plan: dict[str, list[tuple[int, float]]] = {}
        for trial in self.trials:
            plain = trial.is_plain_with(pooling) and trial.plan.recurrent == self.recurrent
            if trial.plan.name in ONE_K and plain and trial.plan.k is not None:
                score = trial.mean if task is None else trial.scores[task]
                by_plan.setdefault(trial.plan.name, []).append((trial.plan.k, score))
        return {name: sorted(points) for name, points in by_plan.items()}

    def k0_curves(self, pooling: str, task: str | None = None) -> dict[str, list[tuple[int, float]]]:
        """Return the points (k, score) of ``mask0+bidir`` for every k0: LBW's Figure 6."""
        points: dict[int, list[tuple[int, float]]] = {}
        for trial in self.trials:
            plan = trial.plan
            plain = trial.is_plain_with(pooling) and plan.recurrent == self.recurrent
            if plan.name == TWO_K and plain and plan.k is not None and plan.k0 is not None:
                score = trial.mean if task is None else trial.scores[task]
                points.setdefault(plan.k0, []).append((plan.k, score))
        return {f"k0 = {k0}": sorted(points[k0]) for k0 in sorted(points)}


# Measures settings, in their order.
Measure = Callable[[list[EncoderConfig]], list[Trial]]


def tune(
    lm: LanguageModel,
    tasks: Sequence[Task],
    config: EvaluationConfig,
    *,
    plans: Sequence[str] = PLANS,
    poolings: Sequence[str] = (),
    methods: Sequence[str] = (),
    sample: Sequence[str] = (),
    budget: int = DEFAULT_BUDGET,
    folder: Path | None = None,
    reporter: ProgressReporter | None = None,
) -> Tuned:
    """Choose plan, k and k0 (and pooling, and methods without training) by the mean score over tasks.

    Args:
        lm: the model.
        tasks: what counts; each must depend on the encoder config.
        config: of the evaluation; ``split="validation"`` where tasks have one.
        plans: names of the plans that are tried; ``causal`` always is, and the model's own where an adapter was
            trained under it.
        poolings: tried with every plan; none takes the model's own.
        methods: names of ``search_space.METHODS``, tried when the plans are through; ``transforms`` need a sample.
        sample: texts on which transforms are fitted; none that is scored should be among them.
        budget: maximum number of settings to try.
        folder: where finished scores are saved, so that an interrupted search continues.
        reporter: called before and after each measurement.

    Raises:
        ConfigError: an unknown plan, pooling or method, no task, a task that no plan changes, or a budget for nothing.
        UnsupportedModelError: the model can be read by none of the plans.
    """
    plans = plans_named(plans)
    require_settings(plans, poolings, methods, sample, budget)
    require_tunable_tasks(tasks)
    configs = [replace(lm.encoder, pooling=pooling) for pooling in poolings or (lm.encoder.pooling,)]
    done = Tuned(lm.n_layers, budget, sample=sample)
    kinds = [] if is_encoder_decoder(lm.model) else [kind_of(layer) for layer in decoder_layers(lm.model)]
    if not any(kind.recurrent for kind in kinds):
        methods = [name for name in methods if name != "recurrent"]
    elif not any(kind.attends for kind in kinds):
        done.recurrent = "both"
    search = _Search(_measurer(lm, tasks, config, done, folder, reporter), configs, done)
    search.reserve(methods, lm.dimensions)
    search.run(plans, own=None if lm.runtime.adapter is None else lm.encoder.with_defaults(lm.n_layers).attention)
    if done.refused and all(trial.plan.name in BASELINES for trial in done.trials):
        raise next(iter(done.refused.values()))
    search.try_methods(methods, lm.dimensions)
    return done


def require_tunable_tasks(tasks: Sequence[Task]) -> None:
    """Refuse tasks on which nothing can be chosen."""
    fixed = [task.name for task in tasks if not task.reads_plan or not task.higher_is_better]
    if not tasks or fixed:
        raise ConfigError(f"no plan improves the score of {', '.join(fixed)}" if fixed else "tuning needs a task")


class _Search:
    """The state of a search."""

    def __init__(self, measure: Measure, configs: list[EncoderConfig], done: Tuned) -> None:
        self.configs = configs
        self.done = done
        self._measure = measure
        self._tried: set[AttentionPlan] = set()
        self._reserved = 0

    def reserve(self, methods: Sequence[str], dimensions: int) -> None:
        """Keep a part of the budget for methods."""
        # Only how many there are counts, and the causal plan takes every method.
        causal = replace(self.configs[0], attention=AttentionPlan("causal"))
        count = len(method_configs(methods, (causal, causal, causal), self.done.n_layers, dimensions))
        count += sum(AttentionPlan(name).takes_recurrent for name in PLANS) * ("recurrent" in methods)
        self._reserved = max(0, min(2 * count, int(_FOR_METHODS * self.done.budget), self.done.budget - 2))

    def try_methods(self, methods: Sequence[str], dimensions: int) -> None:
        """Try methods on the best setting so far and on the causal model; skips on the best plan that takes them.

        Recurrent layers are read both ways before, under the best setting of every plan, since it is plans that gain.
        """
        if "recurrent" in methods:
            self._try_configs(self._turned())
        able = [trial for trial in self.done.trials if trial.plan.takes_skips and trial.plan.name not in BASELINES]
        skipping = min(able, key=lambda trial: (-trial.mean, trial.converted), default=self.done.baseline).config
        starts = (self.done.best.config, skipping, self.done.baseline.config)
        self._try_configs(method_configs(methods, starts, self.done.n_layers, dimensions))

    def _turned(self) -> list[EncoderConfig]:
        """Return the best setting of every plan that takes it with recurrent layers read both ways, best ones first."""
        best = [trial for name in PLANS if (trial := self.done.best_of(name)) and trial.plan.takes_recurrent]
        best.sort(key=lambda trial: (-trial.mean, trial.converted))
        return [replace(trial.config, attention=replace(trial.plan, recurrent="both")) for trial in best]

    def _try_configs(self, configs: Iterable[EncoderConfig]) -> None:
        """Measure settings that are new, as far as the budget allows."""
        tried, fresh = [trial.config for trial in self.done.trials], list[EncoderConfig]()
        for config in configs:
            fresh += [config] if config not in (*tried, *fresh) else []
        room = max(0, self.done.budget - len(self.done.trials))
        self.done.trials += self._measure(fresh[:room]) if fresh[:room] else []
        self.done.untried += [label_of(config, self.done.n_layers) for config in fresh[room:]]

    def run(self, plans: Sequence[str], own: AttentionPlan | None = None) -> None:
        n = self.done.n_layers
        first = [AttentionPlan("causal"), *(AttentionPlan(name) for name in BASELINES[1:] if name in plans)]
        self._try(first if own is None else [first[0], own, *first[1:]])
        one_k = [name for name in ONE_K if name in plans]
        if one_k:
            # Nothing has to be left over where no k0 is sought.
            fraction, most = (_SPREAD, int(_REFINED * self._budget())) if TWO_K in plans else (1.0, self._budget())
            places = max(2, int(fraction * (self._budget() - len(self._tried))) // len(one_k))
            self._try(AttentionPlan(name, k=k) for name in one_k for k in spread(most_k(name, n), places))
            self._refine(one_k, most)
        if TWO_K in plans:
            self._try_two(n)

    def _budget(self) -> int:
        """Return how many plans may be tried, each with every pooling."""
        return (self.done.budget - self._reserved) // len(self.configs)

    def _try(self, plans: Iterable[AttentionPlan], most: int | None = None) -> int:
        """Measure plans that are new, as far as the budget (or ``most``) allows; return how many."""
        turned = (replace(plan, recurrent=self.done.recurrent) if plan.takes_recurrent else plan for plan in plans)
        fresh = [plan for plan in dict.fromkeys(turned) if plan not in self._tried]
        fresh = fresh[: max(0, (most if most is not None else self._budget()) - len(self._tried))]
        self._tried |= set(fresh)
        configs = [replace(config, attention=plan) for plan in fresh for config in self.configs]
        self.done.trials += self._measure(configs) if configs else []
        return len(fresh)

    def _refine(self, names: list[str], most: int) -> None:
        """Bisect the gaps next to the best k, the most promising layouts first."""
        while True:
            best = sorted((self.done.best_of(name) for name in names), key=lambda trial: -trial.mean if trial else 0)
            leading = [trial.plan for trial in best[:3] if trial is not None]
            fresh = [replace(plan, k=k) for plan in leading for k in self._gaps(plan)]
            if not self._try(fresh, most):
                return

    def _gaps(self, plan: AttentionPlan) -> list[int]:
        """Return the middles of the gaps on both sides of a plan's k."""
        known = sorted(other.k for other in self._tried if other.name == plan.name and other.k is not None)
        place = known.index(plan.k or 0)
        neighbours = known[max(0, place - 1) : place + 2]
        return [(low + high) // 2 for low, high in pairwise(neighbours) if high - low > 1]

    def _try_two(self, n: int) -> None:
        """Try ``mask0+bidir``: first where LBW found its peak, then along k0, then along k, then around the best."""
        wide, narrow = self.done.best_of("inplace-bidir"), self.done.best_of("mask0-bidir")
        k0 = narrow.plan.k if narrow and narrow.plan.k else max(1, n // 2)
        k = max(k0, wide.plan.k if wide and wide.plan.k else n)
        # MASK0-LAST, MASK0-MID, MASK0-1, -2 and -3.
        first = [AttentionPlan(TWO_K, k=k, k0=other) for other in (k0, max(1, k0 // 2), 1, 2, 3) if other <= k]
        self._try(first)
        best = self.done.best_of(TWO_K)
        if best is None or best.plan.k0 is None:
            return
        left = max(2, self._budget() - len(self._tried) - 4)
        others = [other for other in spread(n, left) if other >= best.plan.k0]
        self._try(replace(best.plan, k=other) for other in others)
        while best := self.done.best_of(TWO_K):
            plan = best.plan
            around = [(plan.k + dk, plan.k0 + dk0) for dk, dk0 in ((0, 1), (0, -1), (1, 0), (-1, 0))]  # type: ignore[operator]
            fits = [AttentionPlan(TWO_K, k=k, k0=k0) for k, k0 in around if 1 <= k0 <= k <= n]
            if not self._try(fits):
                return


def _measurer(
    lm: LanguageModel,
    tasks: Sequence[Task],
    config: EvaluationConfig,
    done: Tuned,
    folder: Path | None,
    reporter: ProgressReporter | None,
) -> Measure:
    texts = sum(len(set(task.texts(config))) for task in tasks)
    together = max(_FEWEST_TOGETHER, _MOST_BYTES // max(1, 4 * lm.dimensions * texts))

    def measure(configs: list[EncoderConfig]) -> list[Trial]:
        trials, able = list[Trial](), list[EncoderConfig]()
        for candidate in configs:
            # The baseline is what everything is compared with: whatever it raises is the caller's to know.
            error = None if candidate.attention.name == "causal" and not candidate.methods else refusal(lm, candidate)
            if error is None:
                able.append(candidate)
            else:
                done.refused[label_of(candidate, lm.n_layers)] = error
        for start in range(0, len(able), together):
            trials += _measured(lm, able[start : start + together], tasks, config, done, folder, reporter)
        return trials

    return measure


def _measured(
    lm: LanguageModel,
    configs: list[EncoderConfig],
    tasks: Sequence[Task],
    config: EvaluationConfig,
    done: Tuned,
    folder: Path | None,
    reporter: ProgressReporter | None,
) -> list[Trial]:
    cache = EmbeddingCache(unfinished=folder and folder / "unfinished")  # each plan has its own vectors: not saved
    read: dict[str, tuple[EncoderConfig, LanguageModel]] = {}
    for encoder in configs:
        label = label_of(encoder, lm.n_layers)
        try:
            read[label] = encoder, read_as(lm, encoder, done.sample)
        except ConfigError as error:
            if encoder.transform == NO_TRANSFORM:
                raise
            done.refused[label] = error  # the sample is too small for it
    systems = [language_model_system(label, model, cache) for label, (_, model) in read.items()]
    results = evaluate(systems, tasks, config, folder=folder, reporter=reporter).results if systems else []
    cache.forget_unfinished()
    scores = {
        label: {result.task: result.score.value for result in results if result.system == label} for label in read
    }
    return [Trial(encoder, label, scores[label]) for label, (encoder, _) in read.items()]


def most_k(plan: str, n_layers: int) -> int:
    """Return the largest k that is tried."""
    return min(_MOST_EXTENDED, n_layers) if plan.startswith("extend") else n_layers


KIND = "retrieval"
WEIGHTS = tuple(place / 10 for place in range(11))
"""Fusion weights to try, from keywords alone to vectors alone."""


@dataclass(frozen=True)
class FusionTrial:
    """One weight and its scores."""

    weight: float  # what the vectors count
    scores: Mapping[str, float]  # by task

    @property
    def mean(self) -> float:
        """Mean over the tasks."""
        return fmean(self.scores.values())


@dataclass(frozen=True)
class TunedFusion:
    """What was tried."""

    trials: Sequence[FusionTrial]  # by rising weight

    @property
    def best(self) -> FusionTrial:
        """The best mean; of equal ones the one nearest to a half, the default."""
        return min(self.trials, key=lambda trial: (-trial.mean, abs(trial.weight - 0.5)))


def require_retrieval_tasks(tasks: Sequence[Task]) -> None:
    """Refuse tasks in which nothing is ranked by words and vectors."""
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
    """Choose the weight of a model's vectors in hybrid search by the mean score over tasks."""
    require_retrieval_tasks(tasks)
    cache = EmbeddingCache() if folder is None else cache_in(folder)
    dense = language_model_system("model", lm, cache)
    systems = {weight: HybridSystem(dense, Fusion(weight=weight)) for weight in WEIGHTS}
    results = evaluate(list(systems.values()), tasks, config, folder=folder, reporter=reporter).results
    by_label: dict[str, dict[str, float]] = {}
    for result in results:
        by_label.setdefault(result.system, {})[result.task] = result.score.value
    return TunedFusion([FusionTrial(weight, by_label[system.label]) for weight, system in systems.items()])
