"""Local data scored by MTEB's own evaluators, so that the scores are MTEB's.

Knows: how MTEB's task objects are made, seeded and run, which of their warnings are expected. Does not know: files.
"""

import logging
import math
import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np

from gerund.evaluation.contender import Contender
from gerund.evaluation.task import Score, Settings

# MTEB seeds its own tasks with 42, so that our default seed 0 draws what MTEB draws.
_MTEB_SEED = 42
# Rows that MTEB hands over at once; gerund collects them all and forms its own batches.
_ROWS = 256
_SUBSET = "default"

# What is said about results that are expected and handled: MTEB stops the logistic regression after 100 iterations
# on purpose, few-shot classifiers leave classes unpredicted, constant embeddings make correlations undefined, and
# the papers' tasks have successors.
_EXPECTED = (
    ("sklearn.exceptions", "ConvergenceWarning", "lbfgs failed to converge"),
    ("sklearn.exceptions", "UndefinedMetricWarning", "(Precision|Recall|F-score) is ill-defined"),
    ("builtins", "UserWarning", "The task '.*' is (superseded|currently in beta)"),
    ("scipy.stats", "ConstantInputWarning", "An input array is constant"),
)


@dataclass(frozen=True)
class LocalTask:
    """What makes local data one of MTEB's tasks.

    Attributes:
        name: what errors and prompts call it.
        base: the class in ``mteb.abstasks``.
        type: MTEB's type of task.
        main: MTEB's name of the main metric.
        splits: columns of equal length by split.
        attributes: attributes of the task class, as MTEB documents them.
    """

    name: str
    base: str
    type: str
    main: str
    splits: Mapping[str, Mapping[str, Any]]
    attributes: Mapping[str, Any] = field(default_factory=dict)


def mteb_seed(settings: Settings) -> int:
    """Return the seed of MTEB's draws; our default is MTEB's own.

    >>> mteb_seed(Settings())
    42
    """
    return _MTEB_SEED + settings.seed


def run_local(local: LocalTask, contender: Contender, settings: Settings, prompt: str | None) -> Mapping[str, Any]:
    """Score a contender on rows of texts.

    Returns:
        MTEB's scores of the split ``test``, by MTEB's names.
    """
    from datasets import Dataset, DatasetDict

    splits = {name: Dataset.from_dict(dict(columns)) for name, columns in local.splits.items()}
    return _scores(local, DatasetDict(splits), contender, settings, prompt)


def run_search(
    local: LocalTask,
    judgements: Mapping[str, Mapping[str, int]],
    contender: Contender,
    settings: Settings,
    prompt: str | None,
    candidates: Mapping[str, list[str]] | None = None,
) -> Mapping[str, Any]:
    """Score a contender, BM25 among them, on finding documents.

    Args:
        local: its splits are ``corpus`` (``id``, ``title``, ``text``) and ``queries`` (``id``, ``text``).
        judgements: grades by query and document; what is not judged is not relevant.
        contender: who; a model, BM25, or both together.
        settings: seed and progress.
        prompt: put before queries, never before documents.
        candidates: documents to be ranked by query; None ranks all.

    Returns:
        MTEB's scores, by MTEB's names.
    """
    from datasets import Dataset

    split = {
        "corpus": Dataset.from_dict(dict(local.splits["corpus"])),
        "queries": Dataset.from_dict(dict(local.splits["queries"])),
        "relevant_docs": {query: dict(grades) for query, grades in judgements.items()},
        "top_ranked": None if candidates is None else dict(candidates),
    }
    return _scores(local, {_SUBSET: {"test": split}}, contender, settings, prompt)


def score_of(scores: Mapping[str, Any], main: str, others: Sequence[str] = (), **known: Any) -> Score:
    """Return MTEB's scores as ours.

    Args:
        scores: MTEB's.
        main: the name of the main metric.
        others: the names of those reported beside it.
        known: further fields of ``Score``; its notes come first.

    Returns:
        The score; what is not defined is 0, with a note.
    """
    metrics = {name: float(scores[name]) for name in (main, *others)}
    undefined = [name for name, value in metrics.items() if not math.isfinite(value)]
    notes = tuple(known.pop("notes", ()))
    if undefined:
        notes += (f"{', '.join(undefined)} cannot be computed (all similarities or all ratings are equal); shown as 0",)
    return Score(main, {name: 0.0 if name in undefined else metrics[name] for name in metrics}, notes=notes, **known)


def evaluate(model: Any, task: Any) -> Any:
    """Run one of MTEB's task objects without a cache, and without a trace elsewhere.

    Args:
        model: what MTEB's protocols want.
        task: an ``mteb.AbsTask``, fresh: its random numbers are used up by a run.

    Returns:
        MTEB's ``TaskResult``.
    """
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
    """Give back the process's random state afterwards: MTEB seeds it wherever it makes a task or evaluator."""
    import torch

    before = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=list(range(torch.cuda.device_count()))):
            yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the bars of ``datasets``, MTEB's log, and those warnings that are expected of its evaluators."""
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
    local: LocalTask, dataset: Any, contender: Contender, settings: Settings, prompt: str | None
) -> Mapping[str, Any]:
    with own_random_state():
        task = _task(local, mteb_seed(settings))
        task.dataset = dataset
        task.data_loaded = True
        result = evaluate(_model(contender, settings, {} if prompt is None else {local.name: prompt}), task)
    scores: Mapping[str, Any] = result.scores["test"][0]
    return scores


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


def _model(contender: Contender, settings: Settings, prompts: Mapping[str, str]) -> Any:
    from gerund.evaluation.bm25 import BM25Search
    from gerund.evaluation.hybrid import Hybrid, HybridSearch
    from gerund.evaluation.mteb_encoder import MTEBEncoder

    if contender.is_bm25:
        return BM25Search()
    if isinstance(contender, Hybrid):
        return HybridSearch(MTEBEncoder(contender.dense, prompts=prompts, show_progress=settings.show_progress))
    return MTEBEncoder(contender, prompts=prompts, show_progress=settings.show_progress)
