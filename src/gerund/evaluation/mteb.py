"""Evaluate with MTEB: encoders as MTEB models, local data as MTEB tasks, and MTEB's tasks by name."""

import logging
import math
import random
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from typing import Any, ClassVar

import numpy as np
import torch

from gerund.errors import DataError, MissingDependencyError
from gerund.evaluation.systems.base import Encoder, EncoderForMTEB, Encodes, Ranks
from gerund.evaluation.systems.language_model import language_model_system
from gerund.evaluation.task import EvaluationConfig, Examples, Score, Side, Task
from gerund.language_model import LanguageModel

# MTEB seeds its own tasks with 42, so that our default seed 0 samples what MTEB samples.
_MTEB_SEED = 42
# Rows per batch of MTEB; gerund collects all of them and makes its own batches.
_ROWS = 256
_SUBSET = "default"
_DOCUMENT = "document"
# Where the scores of single queries stand among MTEB's, the names that trec_eval has for the main metrics, and how far
# MTEB rounds their means.
_BY_QUERY = "by_query"
_NOTES = "notes"
_TREC_EVAL = {"ndcg_at_10": "ndcg_cut_10", "map_at_1000": "map_cut_1000"}
_ROUNDING = 1e-5

# What is said about results that are expected and handled: MTEB stops the logistic regression after 100 iterations
# on purpose, few-shot classifiers leave classes unpredicted, constant embeddings make correlations undefined, and
# the papers' tasks have successors.
_EXPECTED = (
    ("sklearn.exceptions", "ConvergenceWarning", "lbfgs failed to converge"),
    ("sklearn.exceptions", "UndefinedMetricWarning", "(Precision|Recall|F-score) is ill-defined"),
    ("builtins", "UserWarning", "The task '.*' is (superseded|currently in beta)"),
    ("scipy.stats", "ConstantInputWarning", "An input array is constant"),
)


class MTEBEncoder(EncoderForMTEB):
    """An encoder that ``mteb.evaluate`` accepts (``mteb.models.EncoderProtocol``).

    All texts of a call are encoded at once, so that gerund sorts and batches them by length. Unless ``normalize`` says
    otherwise, vectors that are clustered have length 1, as ``encode`` gives them, and all others are given as they were
    pooled. K-means compares distances (1,000 StackOverflow titles by SmolLM2's adapter: V-measure 54.6 normalized,
    42.8 raw), while the logistic regression that MTEB classifies with loses most of what is in normalized vectors of
    a plain language model (Banking77 with a causal model of 260k parameters: .369 raw, .196 normalized). Similarities
    are cosines either way.

    Args:
        model: a language model, or an encoder among the systems, whose embeddings are cached.
        name: what MTEB calls the model in its results; None takes the model's name.
        prompts: by MTEB task name (``STSBenchmark``) or type (``STS``), the name first. Documents of retrieval
            and re-ranking do not get it: there the prompt belongs to the query (Look Both Ways, appendix B).
            Queries and documents without one are encoded with the encoder's own prompt ``query`` or ``document``,
            where it has that, and all other texts with its default one.
        document_prompts: those of documents by MTEB task name, where they have one.
        normalize: give every vector length 1; None for those of clustering alone.
        show_progress: None shows a bar on a terminal.

    ::

        mteb.evaluate(MTEBEncoder(gerund.load("./model")), mteb.get_task("STSBenchmark"))
    """

    def __init__(
        self,
        model: LanguageModel | Encoder,
        *,
        name: str | None = None,
        prompts: Mapping[str, str] | None = None,
        document_prompts: Mapping[str, str] | None = None,
        normalize: bool | None = None,
        show_progress: bool | None = None,
    ) -> None:
        system = model if isinstance(model, Encoder) else language_model_system(model.name, model)
        settings: dict[str, Any] = {"normalize": normalize, "show_progress": show_progress}
        super().__init__(system, name=name, prompts=prompts, document_prompts=document_prompts, **settings)


@dataclass(frozen=True)
class LocalTask:
    """What makes local data one of MTEB's tasks."""

    name: str  # what errors and prompts call it
    base: str  # the class in ``mteb.abstasks``
    type: str  # MTEB's type of task
    main: str  # MTEB's name of the main metric
    splits: Mapping[str, Mapping[str, Any]]  # columns of equal length by split
    attributes: Mapping[str, Any] = field(default_factory=dict)  # attributes of the task class, as MTEB documents them


def mteb_seed(config: EvaluationConfig) -> int:
    """Return the seed of MTEB's sampling; our default is MTEB's own.

    >>> mteb_seed(EvaluationConfig())
    42
    """
    return _MTEB_SEED + config.seed


def run_local(local: LocalTask, system: Encoder, config: EvaluationConfig, prompt: str | None) -> Mapping[str, Any]:
    """Score an encoder on rows of texts."""
    from datasets import Dataset, DatasetDict

    splits = {name: Dataset.from_dict(dict(columns)) for name, columns in local.splits.items()}
    return _scores(local, DatasetDict(splits), system, config, prompt)


def run_search(
    local: LocalTask,
    judgements: Mapping[str, Mapping[str, int]],
    system: Ranks,
    config: EvaluationConfig,
    prompt: str | None,
    candidates: Mapping[str, list[str]] | None = None,
    itself: Collection[str] = (),
) -> Mapping[str, Any]:
    """Score a system on finding documents, by MTEB's names of metrics.

    ``local`` has the splits ``corpus`` (``id``, ``title``, ``text``) and ``queries`` (``id``, ``text``); ``candidates``
    restricts the documents by query. ``itself`` are queries whose own document is left out of their ranking.
    """
    from datasets import Dataset

    corpus, queries = dict(local.splits["corpus"]), dict(local.splits["queries"])
    renamed = _renamed(queries["id"], corpus["id"], itself) if itself else {}
    if itself:
        local = replace(local, attributes={**local.attributes, "ignore_identical_ids": True})
    queries["id"] = [renamed.get(query, query) for query in queries["id"]]
    split = {
        "corpus": Dataset.from_dict(corpus),
        "queries": Dataset.from_dict(queries),
        "relevant_docs": {renamed.get(query, query): dict(grades) for query, grades in judgements.items()},
        "top_ranked": candidates and {renamed.get(query, query): offered for query, offered in candidates.items()},
    }
    scores = _scores(local, {_SUBSET: {"test": split}}, system, config, prompt)
    known = {name: query for query, name in renamed.items()}
    return {**scores, _BY_QUERY: {known.get(name, name): values for name, values in scores[_BY_QUERY].items()}}


def _renamed(queries: Sequence[str], documents: Sequence[str], itself: Collection[str]) -> dict[str, str]:
    """Return new ids for queries that share a document's id by chance: MTEB leaves documents out by id alone."""
    taken, renamed = {*queries, *documents}, {}
    for query in set(queries).intersection(documents).difference(itself):
        name = f"query {query}"
        while name in taken:
            name = f"query {name}"
        taken.add(name)
        renamed[query] = name
    return renamed


def score_of(scores: Mapping[str, Any], main: str, others: Sequence[str] = (), **known: Any) -> Score:
    """Return MTEB's scores as ours."""
    metrics = {name: float(scores[name]) for name in (main, *others)}
    undefined = [name for name, value in metrics.items() if not math.isfinite(value)]
    notes = (*known.pop("notes", ()), *scores.get(_NOTES, ()))
    known.setdefault("examples", _examples(scores, main))
    if undefined:
        notes += (f"{', '.join(undefined)} cannot be computed (all similarities or all ratings are equal); shown as 0",)
    return Score(main, {name: 0.0 if name in undefined else metrics[name] for name in metrics}, notes=notes, **known)


def _examples(scores: Mapping[str, Any], main: str) -> Examples | None:
    """Return what the queries contribute to the main metric; None where its mean over them is another number."""
    measured = _TREC_EVAL.get(main)
    by_query = {query: values[measured] for query, values in scores.get(_BY_QUERY, {}).items() if measured in values}
    if not by_query or abs(float(np.mean(list(by_query.values()))) - float(scores[main])) > _ROUNDING:
        return None
    return Examples.of_mean(by_query.values(), by_query)


def evaluate(model: Any, task: Any) -> Any:
    """Run a new task object of MTEB without a cache; a run uses up its random numbers."""
    import mteb
    from threadpoolctl import threadpool_limits

    # The matrices are small: several threads of BLAS wait for each other four times longer than one works.
    with threadpool_limits(1, user_api="blas"), quiet():
        result = mteb.evaluate(
            model,
            task,
            cache=None,
            co2_tracker=False,
            show_progress_bar=False,
            encode_kwargs={"batch_size": _ROWS, "show_progress_bar": False},
        )
    return result.task_results[0]


@contextmanager
def own_random_state() -> Iterator[None]:
    """Restore the process's random state after the block: MTEB seeds it wherever it makes a task or evaluator."""
    before = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=list(range(torch.cuda.device_count()))):
            yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the progress bars of ``datasets``, MTEB's log, and expected warnings of its evaluators."""
    import datasets

    log = logging.getLogger("mteb")
    level = log.level
    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            for module, category, message in _EXPECTED:
                warnings.filterwarnings("ignore", message, getattr(import_module(module), category))
            yield
    finally:
        log.setLevel(level)
        if shown:
            datasets.enable_progress_bars()


def _scores(
    local: LocalTask, dataset: Any, system: Ranks, config: EvaluationConfig, prompt: str | None
) -> Mapping[str, Any]:
    with own_random_state():
        by_query: dict[str, Mapping[str, float]] = {}

        def note(
            _task: Any, scores_by_query: Mapping[str, Mapping[str, float]], *_: Any, **__: Any
        ) -> dict[str, float]:
            by_query.update(scores_by_query)
            return {}

        # Called with what pytrec_eval has measured, query by query; MTEB keeps the means alone.
        task = _task(replace(local, attributes={**local.attributes, "task_specific_scores": note}), mteb_seed(config))
        task.dataset = dataset
        task.data_loaded = True
        model = system.search_model({} if prompt is None else {local.name: prompt}, show=config.show_progress)
        result = evaluate(model, task)
    scores: Mapping[str, Any] = result.scores["test"][0]
    return {**scores, _BY_QUERY: by_query, _NOTES: getattr(model, "notes", ())}


def _task(local: LocalTask, seed: int) -> Any:
    from mteb import abstasks
    from mteb.abstasks.task_metadata import TaskMetadata

    metadata = TaskMetadata(
        name=local.name,
        description="Local data.",
        type=local.type,
        eval_langs=["eng-Latn"],
        eval_splits=["test"],
        main_score=local.main,
        dataset={"path": "local", "revision": "local"},
    )
    base = getattr(abstasks, local.base)
    return type("Local", (base,), {"metadata": metadata, **local.attributes})(seed=seed)


MTEB15 = "MTEB15"
TASKS_15 = (
    "SciFact",
    "ArguAna",
    "NFCorpus",
    "StackOverflowDupQuestions",
    "SciDocsRR",
    "BiorxivClusteringS2S",
    "MedrxivClusteringS2S",
    "TwentyNewsgroupsClustering",
    "SprintDuplicateQuestions",
    "Banking77Classification",
    "EmotionClassification",
    "MassiveIntentClassification",
    "STS17",
    "SICK-R",
    "STSBenchmark",
)
"""The selection of LLM2Vec that Look Both Ways and UniMAE use (UniMAE, table 3)."""

_TEST = "test"


@dataclass(frozen=True, kw_only=True)
class MtebNamed(Task):
    """One of MTEB's tasks, scored by the metric that MTEB's leaderboard shows.

    The test split is scored where there is one, and of a multilingual task the English part where there is
    one, as in MTEB's English benchmark. ``config.limit`` takes the first rows of each split, or
    the first queries; MTEB may pack several texts into a row.
    """

    kind: ClassVar[str] = "mteb"
    side: ClassVar[Side] = "representation"
    requires: ClassVar[type] = Encodes

    def run(self, system: Encoder, config: EvaluationConfig) -> Score:
        """Fetch the data where they are not there yet, and measure."""
        prompt = self.prompt(config)
        prompts = {} if prompt is None else {self.title: prompt}
        with own_random_state(), quiet():
            task = _named_task(self.title, mteb_seed(config))
            self._load(task)
            if config.limit is not None:
                _shorten(task, config.limit)
            document_prompt = config.document_prompts.get(self.name)
            documents = {} if document_prompt is None else {self.title: document_prompt}
            encoder = MTEBEncoder(
                system, prompts=prompts, document_prompts=documents, show_progress=config.show_progress
            )
            result = evaluate(encoder, task)
        return _score(result, task.metadata.main_score, _notes(task, config))

    @classmethod
    def known_names(cls) -> list[str]:
        """Return the names of MTEB's text tasks, sorted."""
        return sorted(_registry())

    def _load(self, task: Any) -> None:
        try:
            task.load_data()
        # Every library between here and the hub has its own errors.
        except Exception as error:
            raise DataError(
                f"{self.name}: MTEB could not fetch the data ({type(error).__name__}); they are fetched once, "
                "with a network and without HF_HUB_OFFLINE, and then kept"
            ) from error


@cache
def _registry() -> Mapping[str, Any]:
    """Return the classes of MTEB's text tasks by name."""
    try:
        with own_random_state():
            from mteb.abstasks.aggregated_task import AbsTaskAggregate
            from mteb.get_tasks import TASK_LIST
    except ImportError as error:
        raise MissingDependencyError("MTEB's tasks need mteb: pip install 'gerund[eval]'") from error
    # An aggregate holds tasks that are made already, with a seed of their own, when mteb is imported.
    return {
        task.metadata.name: task
        for task in TASK_LIST
        if task.metadata.modalities == ["text"] and not issubclass(task, AbsTaskAggregate)
    }


def _named_task(name: str, seed: int) -> Any:
    """Return a fresh task object that samples by ``seed`` and scores the English part of the test split."""
    task = _registry()[name](seed=seed)
    english = [
        subset
        for subset, languages in task.metadata.hf_subsets_to_langscripts.items()
        if all(language.startswith("eng-") for language in languages)
    ]
    if english:
        task.hf_subsets = english
    if _TEST in task.metadata.eval_splits:
        task.filter_eval_splits([_TEST])
    return task


def _shorten(task: Any, limit: int) -> None:
    """Leave at most ``limit`` rows, or queries, in the splits that are scored."""
    if hasattr(task, "convert_v1_dataset_format_to_v2"):
        task.convert_v1_dataset_format_to_v2(num_proc=None)
    _shorten_in(task.dataset, limit, task.eval_splits)


def _shorten_in(dataset: dict[str, Any], limit: int, splits: Sequence[str]) -> None:
    for key, value in dataset.items():
        if isinstance(value, dict) and "relevant_docs" in value:
            judged = {query: grades for query, grades in value["relevant_docs"].items() if grades}
            # MTEB skips queries without judgements.
            value["relevant_docs"] = dict(list(judged.items())[:limit])
        elif isinstance(value, dict):
            _shorten_in(value, limit, splits)
        elif key in splits:
            dataset[key] = value.select(range(min(limit, len(value))))


def _score(result: Any, main: str, notes: Sequence[str]) -> Score:
    """Return the mean over splits and subsets, and each subset where there are several."""
    parts = [(split, part) for split, scores in result.scores.items() for part in scores]
    by_part = {f"{main} ({split}, {part['hf_subset']})": part["main_score"] for split, part in parts}
    others = tuple(by_part) if len(parts) > 1 else ()
    return score_of({main: result.get_score(), **by_part}, main, others, notes=notes)


def _notes(task: Any, config: EvaluationConfig) -> list[str]:
    notes = []
    if task.metadata.superseded_by:
        notes.append(f"MTEB recommends {task.metadata.superseded_by} instead")
    if len(task.hf_subsets) < len(task.metadata.hf_subsets):
        notes.append(f"of {len(task.metadata.hf_subsets)} subsets only {', '.join(task.hf_subsets)}")
    if config.limit is not None:
        notes.append(f"the first {config.limit} rows or queries")
    return notes
