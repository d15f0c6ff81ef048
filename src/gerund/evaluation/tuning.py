"""Choose an attention plan, the weight of vectors in hybrid search, or how a model re-ranks, on validation data."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import numpy as np

from gerund.attention.layouts import decoder_layers
from gerund.attention.recurrent import kind_of
from gerund.errors import ConfigError, DataError, GerundError
from gerund.evaluation.data_files import Collection
from gerund.evaluation.run import ProgressReporter, cache_in, data_digest, evaluate
from gerund.evaluation.search_space import (
    BASELINES,
    DEFAULT_BUDGET,
    ONE_K,
    PLANS,
    TWO_K,
    distinct_configs,
    method_passes,
    plans_named,
    readings_of,
    require_settings,
    spread,
    transforms_of,
)
from gerund.evaluation.systems.base import EmbeddingCache
from gerund.evaluation.systems.language_model import language_model_system, precompute
from gerund.evaluation.systems.search import BM25, BM25Index, Fusion, HybridSystem
from gerund.evaluation.systems.selection import label_of, read_as, refusal
from gerund.evaluation.task import EvaluationConfig, Task
from gerund.evaluation.tasks.classification import Classification
from gerund.evaluation.tasks.retrieval import CollectionTask
from gerund.jobs.files import write_atomic
from gerund.language_model import LanguageModel
from gerund.models.kinds import is_encoder_decoder
from gerund.progress import progress
from gerund.scoring.prompted import prompt_measures_of
from gerund.scoring.query_likelihood import QueryLikelihood
from gerund.scoring.relevance import standardized
from gerund.settings.encoder import EncoderConfig, same_pass
from gerund.settings.plan import AttentionPlan
from gerund.settings.ranking import MAXSIM, QUERY_MEASURES
from gerund.settings.templates import HIDDEN, LAST_LAYER, NO_REROUTE, NO_TRANSFORM

# At most this fraction of the budget is for methods.
_FOR_METHODS = 0.5
# How often classification is repeated with other examples.
_RUNS = 3
# LBW, Figure 2: "In the EXTEND architecture, k is bounded by 5 due to the consistent downward trend."
_MOST_EXTENDED = 5
# Vectors of several plans that are held at once, so that their shared layers run once.
_MOST_BYTES, _FEWEST_TOGETHER = 1 << 30, 8
# Fractions of the budget: evenly spread k, then the gaps next to the best; the rest is for k0.
_SPREAD, _REFINED = 0.65, 0.8
# With fewer places for each plan than this, its usual k and what lies next to the best tell more than the ends.
_FEWEST_PLACES = 4
# Examples of each task on which settings are compared first; then four times as many, as long as that is not all.
_FIRST_EXAMPLES, _GROWTH = 64, 4
# A smaller sample with more than this part of the texts of the next one saves too little.
_MOST_OF_TEXTS = 0.6
# Passes that go on to a larger sample and to the last one, readings of each, and those that get transforms.
_PASSES, _FINAL_PASSES, _READINGS, _TRANSFORMED = 8, 4, 3, 2
# Of one plan with several k, or one template with several layers: so many go on.
_ALIKE = 2


@dataclass(frozen=True)
class Trial:
    """One setting and how it scored."""

    config: EncoderConfig  # the encoder config
    label: str  # its short name
    scores: dict[str, float]  # the main metric by task
    rung: int = 0  # on which of the growing samples it was measured: scores of one rung compare
    limit: int | None = None  # examples a task there; None for all

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
    budget: int  # in how many passes the model might have been read
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
    def final(self) -> list[Trial]:
        """The trials on the largest sample."""
        rung = max(trial.rung for trial in self.trials)
        return [trial for trial in self.trials if trial.rung == rung]

    @property
    def first(self) -> list[Trial]:
        """The trials on the smallest sample, which has all plans."""
        return [trial for trial in self.trials if trial.rung == 0]

    @property
    def passes(self) -> int:
        """In how many passes the model was read."""
        return len(_by_pass(self.trials))

    @property
    def best(self) -> Trial:
        """The best mean on the largest sample; of equal ones the one that changes the model least."""
        return min(self.final, key=_rank)

    @property
    def baseline(self) -> Trial:
        """The untouched causal model with mean pooling, or the first pooling that was tried."""
        return next(trial for trial in self.final if trial.plan.name == "causal")

    def best_of(self, plan: str) -> Trial | None:
        """Return the best trial of one plan on the smallest sample."""
        return min((trial for trial in self.first if trial.plan.name == plan), key=_rank, default=None)

    def curves(self, pooling: str, task: str | None = None) -> dict[str, list[tuple[int, float]]]:
        """Return for every plan with one k its points (k, score), by k: LBW's Figures 2 and 4."""
        by_plan: dict[str, list[tuple[int, float]]] = {}
        for trial in self.first:
            plain = trial.is_plain_with(pooling) and trial.plan.recurrent == self.recurrent
            if trial.plan.name in ONE_K and plain and trial.plan.k is not None:
                score = trial.mean if task is None else trial.scores[task]
                by_plan.setdefault(trial.plan.name, []).append((trial.plan.k, score))
        return {name: sorted(points) for name, points in by_plan.items()}

    def k0_curves(self, pooling: str, task: str | None = None) -> dict[str, list[tuple[int, float]]]:
        """Return the points (k, score) of ``mask0+bidir`` for every k0: LBW's Figure 6."""
        points: dict[int, list[tuple[int, float]]] = {}
        for trial in self.first:
            plan = trial.plan
            plain = trial.is_plain_with(pooling) and plan.recurrent == self.recurrent
            if plan.name == TWO_K and plain and plan.k is not None and plan.k0 is not None:
                score = trial.mean if task is None else trial.scores[task]
                points.setdefault(plan.k0, []).append((plan.k, score))
        return {f"k0 = {k0}": sorted(points[k0]) for k0 in sorted(points)}


def _rank(trial: Trial) -> tuple[float, int]:
    """Return what the best trial has the least of."""
    return -trial.mean, trial.converted


def _by_pass(trials: Iterable[Trial]) -> list[list[Trial]]:
    """Return trials in groups that read one pass, in their order."""
    groups: list[list[Trial]] = []
    for trial in trials:
        group = next((group for group in groups if same_pass(group[0].config, trial.config)), None)
        if group is None:
            groups.append([trial])
        else:
            group.append(trial)
    return groups


def _leading(trials: Iterable[Trial], most: int) -> list[list[Trial]]:
    """Return the trials of the best passes, best ones first; of those that differ in a number alone at most two."""
    passes = sorted((sorted(group, key=_rank) for group in _by_pass(trials)), key=lambda group: _rank(group[0]))
    kept: list[list[Trial]] = []
    counts = Counter[tuple[str | bool, ...]]()
    for group in passes:
        config = group[0].config
        changed = (bool(config.attention.skips), bool(config.prepend), config.reroute != NO_REROUTE)
        kind = (config.attention.name, config.template, *changed)
        counts[kind] += 1
        if counts[kind] <= _ALIKE and len(kept) < most:
            kept.append(group)
    return kept


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

    Successive halving: all passes and their promising readings are compared on a few examples of each task; the best
    passes, with every reading and its transforms, on growing samples; the winner is the best of the last ones.

    Args:
        lm: the model.
        tasks: what counts; each must depend on the encoder config.
        config: of the evaluation; ``split="validation"`` where tasks have one.
        plans: names of the plans that are tried; ``causal`` always is, and the model's own where an adapter was
            trained under it.
        poolings: tried with every plan; none takes the model's own.
        methods: names of ``search_space.METHODS``, tried after the plans; ``transforms`` need a sample.
        sample: texts on which transforms are fitted; none that is scored should be among them.
        budget: maximum number of passes to try; layers, states, poolings and transforms of a pass count no further.
        folder: where finished scores are saved, so that an interrupted search continues.
        reporter: called before and after each measurement.

    Raises:
        ConfigError: an unknown plan, pooling or method, no task, a task that no plan changes, or a budget for nothing.
        UnsupportedModelError: the model can be read by none of the plans.
    """
    plans = plans_named(plans)
    require_settings(plans, poolings, methods, sample, budget)
    require_tunable_tasks(tasks)
    # Scoring hundreds of readings ten times over would take longer than reading the texts.
    tasks = [replace(task, runs=min(task.runs, _RUNS)) if isinstance(task, Classification) else task for task in tasks]
    # A bundled adapter is for its own settings; all others read the weights alone, and all of their layers.
    usual = lm.encoder if lm.bundled is None else EncoderConfig(max_length=lm.encoder.max_length)
    configs = [replace(usual, pooling=pooling) for pooling in poolings or (usual.pooling,)]
    done = Tuned(usual.depth(lm.n_layers), budget, sample=sample)
    kinds = [] if is_encoder_decoder(lm.model) else [kind_of(layer) for layer in decoder_layers(lm.model)]
    if not any(kind.recurrent for kind in kinds):
        methods = [name for name in methods if name != "recurrent"]
    elif not any(kind.attends for kind in kinds):
        done.recurrent = "both"
    rungs = _rungs(tasks, config)
    measurers = _measurers(lm, tasks, rungs, done, folder, reporter)
    search = _Search(measurers[0], configs, done)
    search.reserve(methods)
    search.run(plans, trained=None if lm.runtime.adapter is None else lm.encoder.with_defaults(lm.n_layers))
    if done.refused and all(trial.plan.name in BASELINES for trial in done.trials):
        raise next(iter(done.refused.values()))
    search.try_methods(methods)
    search.halve(methods, lm.dimensions, measurers)
    return done


def _rungs(tasks: Sequence[Task], config: EvaluationConfig) -> list[EvaluationConfig]:
    """Return configs with growing limits, the last of which is what was asked for.

    >>> _rungs([], EvaluationConfig(limit=50)) == [EvaluationConfig(limit=50)]
    True
    """

    def count(of: EvaluationConfig) -> int:
        return sum(len(set(task.texts(of))) for task in tasks)

    rungs, texts, limit = [config], count(config), _FIRST_EXAMPLES
    smaller: list[EvaluationConfig] = []
    while config.limit is None or limit < config.limit:
        rung = replace(config, limit=limit)
        if count(rung) > _MOST_OF_TEXTS * texts:
            break
        smaller.append(rung)
        limit *= _GROWTH
    return [*smaller, *rungs]


def require_tunable_tasks(tasks: Sequence[Task]) -> None:
    """Refuse tasks on which nothing can be chosen."""
    fixed = [task.name for task in tasks if not task.reads_plan or not task.higher_is_better]
    if not tasks or fixed:
        raise ConfigError(f"no plan improves the score of {', '.join(fixed)}" if fixed else "tuning needs a task")


class _Search:
    def __init__(self, measure: Measure, configs: list[EncoderConfig], done: Tuned) -> None:
        self.configs = configs
        self.done = done
        self._measure = measure
        self._tried: set[AttentionPlan] = set()
        self._reserved = 0

    def reserve(self, methods: Sequence[str]) -> None:
        """Keep a part of the budget for methods."""
        # Only how many there are counts, and the causal plan takes every method.
        causal = replace(self.configs[0], attention=AttentionPlan("causal"))
        count = len(method_passes(methods, causal, causal, self.done.n_layers))
        count += sum(AttentionPlan(name).takes_recurrent for name in PLANS) * ("recurrent" in methods)
        self._reserved = max(0, min(2 * count, int(_FOR_METHODS * self.done.budget), self.done.budget - 2))

    def try_methods(self, methods: Sequence[str]) -> None:
        """Try what needs a pass of its own, on the causal model; skips on the best plan that takes them, too.

        Recurrent layers are read both ways before, under the best setting of every plan, since it is plans that gain.
        Of each pass its promising readings are tried, and of the best plan and the causal model.
        """
        if "recurrent" in methods:
            self._try_passes(self._turned(), methods=())
        able = [trial for trial in self.done.trials if trial.plan.takes_skips and trial.plan.name not in BASELINES]
        skipping = min(able, key=_rank, default=self.done.baseline).config
        causal = self.done.baseline.config
        starts = (self.done.best.config, skipping, causal)
        self._try_passes([*starts, *method_passes(methods, causal, skipping, self.done.n_layers)], methods)

    def _turned(self) -> list[EncoderConfig]:
        """Return the best setting of every plan that takes it with recurrent layers read both ways, best ones first."""
        best = [trial for name in PLANS if (trial := self.done.best_of(name)) and trial.plan.takes_recurrent]
        best.sort(key=_rank)
        return [replace(trial.config, attention=replace(trial.plan, recurrent="both")) for trial in best]

    def _try_passes(self, configs: Iterable[EncoderConfig], methods: Sequence[str]) -> None:
        """Measure settings with their promising readings, as far as the budget allows new passes."""
        for config in configs:
            tried = [trial.config for trial in self.done.trials]
            if self.done.passes >= self.done.budget and not any(same_pass(config, other) for other in tried):
                self.done.untried.append(label_of(config, self.done.n_layers))
                continue
            wanted = [config, *readings_of(config, methods, self.done.n_layers, every=False)]
            fresh = distinct_configs(reading for reading in wanted if reading not in tried)
            self.done.trials += self._measure(fresh) if fresh else []

    def halve(self, methods: Sequence[str], dimensions: int, measurers: Sequence[Measure]) -> None:
        """Measure the best passes on growing samples, with every reading and its transforms; fewer each time."""
        for rung, measure in enumerate(measurers):
            if rung == 0 and len(measurers) > 1:
                continue
            trials = [trial for trial in self.done.trials if trial.rung == max(0, rung - 1)]
            is_last = rung == len(measurers) - 1
            configs = [next(trial for trial in trials if trial.plan.name == "causal").config]
            for group in _leading(trials, _FINAL_PASSES if is_last else _PASSES):
                configs += [trial.config for trial in group[:_READINGS]]
                if rung <= 1:
                    configs += self._around(group, methods, dimensions)
            tried = [trial.config for trial in self.done.trials if trial.rung == rung]
            fresh = distinct_configs(config for config in configs if config not in tried)
            self.done.trials += measure(fresh) if fresh else []

    def _around(self, group: Sequence[Trial], methods: Sequence[str], dimensions: int) -> list[EncoderConfig]:
        """Return what is left of a pass: every other reading, and transforms of the best ones."""
        best = group[0].config
        plain = next((trial.config for trial in group if trial.config.layers == LAST_LAYER), best)
        configs = readings_of(plain, methods, self.done.n_layers, every=True) if plain.states == HIDDEN else []
        if "transforms" in methods:
            configs += [made for trial in group[:_TRANSFORMED] for made in transforms_of(trial.config, dimensions)]
        return configs

    def run(self, plans: Sequence[str], trained: EncoderConfig | None = None) -> None:
        """Find the best k of every plan; ``trained`` is what the model's adapter was trained under."""
        n = self.done.n_layers
        first = [AttentionPlan("causal"), *(AttentionPlan(name) for name in BASELINES[1:] if name in plans)]
        self._try(first[:1])
        if trained is not None and self._budget() > 1:
            self._tried.add(trained.attention)
            self.done.trials += self._measure([trained])
        self._try(first[1:])
        one_k = [name for name in ONE_K if name in plans]
        if one_k:
            # Nothing has to be left over where no k0 is sought.
            fraction, most = (_SPREAD, int(_REFINED * self._budget())) if TWO_K in plans else (1.0, self._budget())
            places = max(2, int(fraction * (self._budget() - len(self._tried))) // len(one_k))
            if places < _FEWEST_PLACES and any(most_k(name, n) > places for name in one_k):
                self._try((AttentionPlan(name).with_defaults(n) for name in one_k), most)
            else:
                self._try(AttentionPlan(name, k=k) for name in one_k for k in spread(most_k(name, n), places))
            self._refine(one_k, most)
        if TWO_K in plans:
            self._try_two(n)

    def _budget(self) -> int:
        """Return how many plans may be tried; poolings read the same pass."""
        return self.done.budget - self._reserved

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
        """Return the middles of the gaps on both sides of a plan's k, up to both ends."""
        ends = {0, most_k(plan.name, self.done.n_layers) + 1}
        known = sorted({other.k for other in self._tried if other.name == plan.name and other.k is not None} | ends)
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


def _measurers(
    lm: LanguageModel,
    tasks: Sequence[Task],
    rungs: Sequence[EvaluationConfig],
    done: Tuned,
    folder: Path | None,
    reporter: ProgressReporter | None,
) -> list[Measure]:
    """Return what measures settings on each of the growing samples, and keeps vectors from one to the next."""
    cache = EmbeddingCache(unfinished=folder and folder / "unfinished")

    def measure(configs: list[EncoderConfig], rung: int) -> list[Trial]:
        able = [config for config in configs if not _refuses(lm, config, done)]
        texts = sum(len(set(task.texts(rungs[rung]))) for task in tasks)
        together = max(_FEWEST_TOGETHER, _MOST_BYTES // max(1, 4 * lm.dimensions * texts))
        if rung > 0 or len(rungs) == 1:
            # Of what is measured on: the vectors of the smaller sample.
            kept = [replace(config, transform=NO_TRANSFORM) for config in able] if rung > 0 else []
            cache.keep_only(language_model_system("", lm.with_encoder(config)).cache_key for config in kept)
        trials: list[Trial] = []
        for start in range(0, len(able), together):
            part = able[start : start + together]
            trials += _measured(lm, part, tasks, rungs[rung], cache, done, folder, reporter)
        return [replace(trial, rung=rung, limit=rungs[rung].limit) for trial in trials]

    return [partial(measure, rung=rung) for rung in range(len(rungs))]


def _refuses(lm: LanguageModel, config: EncoderConfig, done: Tuned) -> bool:
    """Whether a model cannot be read so, which is noted."""
    label = label_of(config, lm.n_layers)
    # The baseline is what everything is compared with: whatever it raises is the caller's to know.
    is_baseline = config.attention.name == "causal" and not config.methods
    error = done.refused.get(label) or (None if is_baseline else refusal(lm, config))
    if error is not None:
        done.refused[label] = error
    return error is not None


def _measured(
    lm: LanguageModel,
    configs: list[EncoderConfig],
    tasks: Sequence[Task],
    config: EvaluationConfig,
    cache: EmbeddingCache,
    done: Tuned,
    folder: Path | None,
    reporter: ProgressReporter | None,
) -> list[Trial]:
    read = _fitted(lm, configs, cache, done)
    systems = [language_model_system(label, model, cache) for label, (_, model) in read.items()]
    results = evaluate(systems, tasks, config, folder=folder, reporter=reporter).results if systems else []
    cache.forget_unfinished()
    scores = {
        label: {result.task: result.score.value for result in results if result.system == label} for label in read
    }
    return [Trial(encoder, label, scores[label]) for label, (encoder, _) in read.items()]


def _fitted(
    lm: LanguageModel, configs: list[EncoderConfig], cache: EmbeddingCache, done: Tuned
) -> dict[str, tuple[EncoderConfig, LanguageModel]]:
    """Return by label the model under each setting; transforms are fitted on vectors that their passes give once."""
    models = [lm.with_encoder(replace(config, transform=NO_TRANSFORM)) for config in configs]
    plain = [language_model_system("", model, cache) for model in models]
    sample = [text for text in done.sample if text.strip()]
    fitted = [system for system, config in zip(plain, configs, strict=True) if config.transform != NO_TRANSFORM]
    precompute(fitted, sample, prompt=None, show=None)
    read: dict[str, tuple[EncoderConfig, LanguageModel]] = {}
    for config, system in zip(configs, plain, strict=True):
        label, model = label_of(config, lm.n_layers), system.lm
        if config.transform != NO_TRANSFORM:
            try:
                model = lm.with_encoder(config).fitted_on(system.encode(sample, show=False))
            except ConfigError as error:
                done.refused[label] = error  # the sample is too small for it
                continue
        read[label] = config, model
    return read


def most_k(plan: str, n_layers: int) -> int:
    """Return the largest k that is tried."""
    return min(_MOST_EXTENDED, n_layers) if plan.startswith("extend") else n_layers


KIND = "retrieval"
WEIGHTS = tuple(place / 10 for place in range(11))
"""Fusion weights to try, from keywords alone to vectors alone."""


@dataclass(frozen=True)
class WeightTrial:
    """One weight and its scores."""

    weight: float  # of the vectors, or of the measure that re-ranks; 0 is BM25 alone
    scores: Mapping[str, float]  # by task
    by: str = ""  # the measure that re-ranks; empty for vectors in hybrid search

    @property
    def mean(self) -> float:
        """Mean over the tasks."""
        return fmean(self.scores.values())


@dataclass(frozen=True)
class TunedWeight:
    """What was tried, by rising weight, measure by measure."""

    trials: Sequence[WeightTrial]
    default: str = ""  # the measure where nothing is tuned

    @property
    def best(self) -> WeightTrial:
        """The best mean; of equal ones the default measure's, and the nearest to a half."""
        return min(self.trials, key=lambda trial: (-trial.mean, trial.by != self.default, abs(trial.weight - 0.5)))

    @property
    def baseline(self) -> WeightTrial:
        """BM25's own order."""
        return next(trial for trial in self.trials if trial.weight == 0)


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
) -> TunedWeight:
    """Choose the weight of a model's vectors in hybrid search by the mean score over tasks."""
    require_retrieval_tasks(tasks)
    cache = EmbeddingCache() if folder is None else cache_in(folder)
    dense = language_model_system("model", lm, cache)
    systems = {weight: HybridSystem(dense, Fusion(weight=weight)) for weight in WEIGHTS}
    results = evaluate(list(systems.values()), tasks, config, folder=folder, reporter=reporter).results
    by_label: dict[str, dict[str, float]] = {}
    for result in results:
        by_label.setdefault(result.system, {})[result.task] = result.score.value
    return TunedWeight([WeightTrial(weight, by_label[system.label]) for weight, system in systems.items()])


CANDIDATES = 20
"""Documents of a query that are ranked anew."""
_TOP = 10


@dataclass(frozen=True)
class Candidates:
    """A query's candidates in the order of BM25."""

    gains: list[int]  # their grades
    ideal: list[int]  # the ten best grades of all judged documents, best first
    scores: dict[str, list[float]]  # by BM25, and by each measure

    def ndcg(self, by: str, weight: float = 1.0) -> float:
        """Return nDCG@10 of a measure that counts ``weight`` beside BM25; 1 for the measure alone.

        Gains are linear and the ideal order is that of all judged documents, as in trec_eval. Of equal scores BM25's
        first comes first.
        """
        scores, first = (standardized(np.asarray(self.scores[name])) for name in (by, BM25))
        order = np.argsort(-(weight * scores + (1 - weight) * first), kind="stable")[:_TOP]
        return _gained(np.asarray(self.gains)[order]) / _gained(self.ideal)


def _gained(gains: Any) -> float:
    return float((np.asarray(gains) / np.log2(np.arange(len(gains)) + 2)).sum())


class Offers:
    """What BM25 offers the queries of a collection that have a relevant document."""

    def __init__(self, collection: Collection, count: int) -> None:
        self.collection, self.count = collection, count
        self.queries = [query for query in collection.queries if max(collection.judgements[query].values()) > 0]
        self._texts = collection.documents
        self._ids = list(self._texts)
        self._index = BM25Index(list(self._texts.values()))

    def top(self, query: str) -> tuple[list[str], list[float]]:
        """Return ids and scores of the first documents for a query; those without a word, and itself, are left out."""
        ranked = [(self._ids[row], score) for row, score in self.ranked(query, self.count + 1)]
        itself = query if query in self.collection.itself else None
        kept = [(one, score) for one, score in ranked if self._texts[one] and one != itself][: self.count]
        return [document for document, _ in kept], [score for _, score in kept]

    def ranked(self, query: str, count: int) -> list[tuple[int, float]]:
        """Return places and scores of the first documents for a query, best first."""
        return self._index.top(self.collection.queries[query], count)

    def text(self, document: str) -> str:
        """Return a document's title and text."""
        return self._texts[document]

    def scored(self, lm: LanguageModel, query: str, measures: Sequence[str]) -> Candidates:
        """Return a query's candidates with their scores by each measure; those of likelihood come from one pass."""
        ids, first = self.top(query)
        texts, asked = [self._texts[one] for one in ids], self.collection.queries[query]
        scores = {BM25: first}
        likelihoods = [by for by in measures if by in QUERY_MEASURES]
        if likelihoods:
            read = QueryLikelihood(lm.model, lm.tokenizer, asked, likelihoods[0], autocast=lm.runtime.autocast)
            scores |= {by: values.tolist() for by, values in read.scores(texts, likelihoods).items()}
        for by in measures:
            if by not in scores:
                ranking = lm.rerank(asked, texts, by=by)  # type: ignore[arg-type]
                by_place = dict(zip(ranking.indices, ranking.scores, strict=True))
                scores[by] = [by_place[place] for place in range(len(texts))]
        grades = self.collection.judgements[query]
        ideal = sorted((max(0, grade) for grade in grades.values()), reverse=True)[:_TOP]
        return Candidates([max(0, grades.get(one, 0)) for one in ids], ideal, scores)


class ScoreFile:
    """Candidates that were scored, by key, in a file to which each is added; None keeps them in memory alone."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._known = dict(self._lines())

    def _lines(self) -> Iterator[tuple[str, Candidates]]:
        if self._path is None or not self._path.exists():
            return
        text = self._path.read_text(encoding="utf-8")
        whole, _, torn = text.rpartition("\n")
        if torn:  # the end of an interrupted run
            write_atomic(self._path, f"{whole}\n" if whole else "")
        for number, line in enumerate(whole.splitlines(), start=1):
            try:
                key, fields = json.loads(line)
                yield key, Candidates(**fields)
            except (ValueError, TypeError) as error:
                raise DataError(
                    f"{self._path}, line {number} is not a score that gerund wrote ({error}); delete it"
                ) from error

    def find(self, key: str) -> Candidates | None:
        """Return what is known under a key."""
        return self._known.get(key)

    def add(self, key: str, candidates: Candidates) -> None:
        """Keep candidates."""
        self._known[key] = candidates
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps([key, asdict(candidates)]) + "\n")


def measures_of(lm: LanguageModel) -> list[str]:
    """Return the measures of relevance that a model has."""
    embeds = not lm.runtime.why_no_vectors
    reads = embeds and not is_encoder_decoder(lm.model)
    likelihoods = [*QUERY_MEASURES, *prompt_measures_of(lm)] if reads else []
    trained = ["model"] if lm.scorer is not None or lm.reranker is not None else []
    return [*likelihoods, *([MAXSIM, "vectors"] if embeds else []), *trained]


def tune_rerank(
    lm: LanguageModel,
    tasks: Sequence[Task],
    config: EvaluationConfig,
    *,
    candidates: int = CANDIDATES,
    folder: Path | None = None,
) -> TunedWeight:
    """Choose the measure by which a model re-ranks BM25's first documents, and its weight, by the mean over tasks.

    Args:
        lm: the model.
        tasks: retrieval tasks.
        config: of the evaluation; ``split="validation"`` where tasks have one.
        candidates: documents of each query.
        folder: where scores are saved, so that an interrupted run continues.

    Raises:
        ConfigError: a task does not rank documents.
        DataError: a task has no query with a relevant document, or a line of the saved scores is damaged.
    """
    require_retrieval_tasks(tasks)
    measures, known = measures_of(lm), ScoreFile(folder and folder / "scores" / "rerank.jsonl")
    scored: dict[str, list[Candidates]] = {}
    for task in tasks:
        assert isinstance(task, CollectionTask)
        offers = Offers(task.collection(config), candidates)
        if not offers.queries:
            raise DataError(f"{task.name}: no query that is scored has a relevant document")
        about = [task.name, data_digest(task), config.split, str(candidates)]
        scored[task.name] = []
        with progress(len(offers.queries), task.name, show=config.show_progress) as advance:
            for query in offers.queries:
                ranker = [] if lm.reranker is None else [lm.reranker.fingerprint]
                key = " ".join([lm.fingerprint(), *ranker, *about, *measures, query])
                each = known.find(key)
                if each is None:
                    each = offers.scored(lm, query, measures)
                    known.add(key, each)
                scored[task.name].append(each)
                advance(1)
    trials = [
        WeightTrial(
            weight, {task: fmean(one.ndcg(by, weight) for one in queries) for task, queries in scored.items()}, by
        )
        for by in measures
        for weight in WEIGHTS
    ]
    return TunedWeight(trials, lm.default_measure(is_second=True))
