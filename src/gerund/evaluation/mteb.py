"""MTEB's evaluators on our systems and on local data, so that the scores are MTEB's.

Knows: MTEB's encoder protocol; how its task objects are made, seeded and run; which of their warnings are expected.
Does not know: files, how vectors are made.
"""

import logging
import math
import random
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module
from typing import Any

import numpy as np
import torch

from gerund.errors import ModelError
from gerund.evaluation.systems.base import Encoder, Ranks, System
from gerund.evaluation.systems.language_model import language_model_system
from gerund.evaluation.task import EvaluationConfig, Examples, Score
from gerund.language_model import LanguageModel
from gerund.settings.templates import PromptText

# MTEB seeds its own tasks with 42, so that our default seed 0 samples what MTEB samples.
_MTEB_SEED = 42
# Rows that MTEB hands over at once; gerund collects them all and forms its own batches.
_ROWS = 256
_SUBSET = "default"
_DOCUMENT = "document"
# Where the scores of single queries stand among MTEB's, the names that trec_eval has for the main metrics, and how far
# MTEB rounds their means.
_BY_QUERY = "by_query"
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


class MTEBEncoder:
    """An encoder that ``mteb.evaluate`` accepts (``mteb.models.EncoderProtocol``).

    All texts of a call are encoded at once, so that gerund sorts and batches them by length. Vectors are given
    as they were pooled unless told otherwise: similarities are cosines either way, while the logistic regression
    that MTEB classifies with loses most of what lies in normalised vectors of a plain language model (Banking77
    with a causal model of 260k parameters: .369 raw, .196 normalised).

    Args:
        model: a language model, or an encoder among the systems, whose embeddings are kept.
        name: what MTEB calls the model in its results; None takes the model's name.
        prompts: by MTEB task name (``STSBenchmark``) or type (``STS``), the name first. Documents of retrieval
            and re-ranking do not get it: there the prompt belongs to the query (Look Both Ways, appendix B).
            Queries and documents without one are encoded with the encoder's own prompt ``query`` or ``document``,
            where it has that, and all other texts with its default one.
        document_prompts: those of documents by MTEB task name, where they have one.
        normalize: give every vector length 1.
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
        normalize: bool = False,
        show_progress: bool | None = None,
    ) -> None:
        self._system = model if isinstance(model, System) else language_model_system(model.name, model)
        self._name = name or self._system.name
        self._prompts, self._document_prompts = dict(prompts or {}), dict(document_prompts or {})
        self._normalize = normalize
        self._show = show_progress

    @cached_property
    def mteb_model_meta(self) -> Any:
        """MTEB's description of the model; its revision is our fingerprint, so that no cache mixes two plans."""
        from mteb.models import ModelMeta

        one = self._system
        known = {"revision": one.fingerprint, "embed_dim": one.dimensions, "max_tokens": one.max_length}
        return ModelMeta.create_empty(overwrites={"name": self._name, **known})

    def encode(
        self, inputs: Iterable[Mapping[str, Any]], *, task_metadata: Any, prompt_type: Any = None, **_kwargs: Any
    ) -> np.ndarray:
        """Encode the texts of MTEB's batches.

        Args:
            inputs: batches with a list of ``text`` each.
            task_metadata: MTEB's; its name and type choose the prompt.
            prompt_type: ``query``, ``document`` or None.

        Returns:
            ``(n, D)`` float32.

        Raises:
            ModelError: the model gives vectors that are not finite.
        """
        texts = [text for batch in inputs for text in batch["text"]]
        prompt = self._prompt_for(task_metadata)
        if prompt_type == _DOCUMENT:
            prompt = self._document_prompts.get(task_metadata.name)
        if prompt is None and prompt_type is not None:
            # A member of MTEB's enumeration, or its value.
            own = self._system.stored_prompts.get(str(getattr(prompt_type, "value", prompt_type)))
            prompt = None if own is None else PromptText(own)
        vectors = self._system.encode(texts, prompt=prompt, normalize=self._normalize, show=self._show)
        if not np.isfinite(vectors).all():
            raise ModelError(f"{self._name} gives vectors that are not finite numbers, which nothing can be scored on")
        return vectors

    def similarity(self, embeddings1: Any, embeddings2: Any) -> torch.Tensor:
        """Return the cosine of each vector ``(n, D)`` with each of ``(m, D)``: ``(n, m)``; 0 for a zero vector."""
        return _directions(embeddings1) @ _directions(embeddings2).T

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> torch.Tensor:
        """Return the cosine of each vector ``(n, D)`` with its partner: ``(n,)``; 0 for a zero vector."""
        return (_directions(embeddings1) * _directions(embeddings2)).sum(dim=-1)

    def _prompt_for(self, task_metadata: Any) -> str | None:
        return self._prompts.get(task_metadata.name, self._prompts.get(task_metadata.type))


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


def mteb_seed(config: EvaluationConfig) -> int:
    """Return the seed of MTEB's sampling; our default is MTEB's own.

    >>> mteb_seed(EvaluationConfig())
    42
    """
    return _MTEB_SEED + config.seed


def run_local(local: LocalTask, system: Encoder, config: EvaluationConfig, prompt: str | None) -> Mapping[str, Any]:
    """Score an encoder on rows of texts.

    Returns:
        MTEB's scores of the split ``test``, by MTEB's names.
    """
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
    """Score a system on finding documents.

    Args:
        local: its splits are ``corpus`` (``id``, ``title``, ``text``) and ``queries`` (``id``, ``text``).
        judgements: grades by query and document; what is not judged is not relevant.
        system: an encoder, BM25, or both together.
        config: seed and progress.
        prompt: put before queries, never before documents.
        candidates: documents to be ranked by query; None ranks all.
        itself: queries in whose ranking the document with the query's own id is left out.

    Returns:
        MTEB's scores, by MTEB's names.
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
    return {**scores, _BY_QUERY: {known.get(name, name): found for name, found in scores[_BY_QUERY].items()}}


def _renamed(queries: Sequence[str], documents: Sequence[str], itself: Collection[str]) -> dict[str, str]:
    """Return other ids for the queries that have a document's by chance: MTEB leaves documents out by id alone."""
    taken, found = {*queries, *documents}, {}
    for query in set(queries).intersection(documents).difference(itself):
        name = f"query {query}"
        while name in taken:
            name = f"query {name}"
        taken.add(name)
        found[query] = name
    return found


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
    known.setdefault("examples", _examples(scores, main))
    if undefined:
        notes += (f"{', '.join(undefined)} cannot be computed (all similarities or all ratings are equal); shown as 0",)
    return Score(main, {name: 0.0 if name in undefined else metrics[name] for name in metrics}, notes=notes, **known)


def _examples(scores: Mapping[str, Any], main: str) -> Examples | None:
    """Return what the queries contribute to the main metric; None where its mean over them is another number."""
    measured = _TREC_EVAL.get(main)
    by_query = {query: own[measured] for query, own in scores.get(_BY_QUERY, {}).items() if measured in own}
    if not by_query or abs(float(np.mean(list(by_query.values()))) - float(scores[main])) > _ROUNDING:
        return None
    return Examples.of_mean(by_query.values(), by_query)


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
    local: LocalTask, dataset: Any, system: Ranks, config: EvaluationConfig, prompt: str | None
) -> Mapping[str, Any]:
    with own_random_state():
        by_query: dict[str, Mapping[str, float]] = {}

        def note(_task: Any, found: Mapping[str, Mapping[str, float]], *_: Any, **__: Any) -> dict[str, float]:
            by_query.update(found)
            return {}

        # Called with what pytrec_eval has measured, query by query; MTEB keeps the means alone.
        task = _task(replace(local, attributes={**local.attributes, "task_specific_scores": note}), mteb_seed(config))
        task.dataset = dataset
        task.data_loaded = True
        model = system.search_model({} if prompt is None else {local.name: prompt}, show=config.show_progress)
        result = evaluate(model, task)
    scores: Mapping[str, Any] = result.scores["test"][0]
    return {**scores, _BY_QUERY: by_query}


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


def _directions(vectors: Any) -> torch.Tensor:
    """Return vectors of length 1, in float32; zero vectors stay zero."""
    return torch.nn.functional.normalize(torch.atleast_2d(torch.as_tensor(vectors, dtype=torch.float32)), dim=-1)
