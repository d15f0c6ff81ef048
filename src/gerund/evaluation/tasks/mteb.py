"""MTEB's own tasks by name. Their data are fetched by MTEB on first use, the only tasks here that need a network.

Knows: MTEB's registry, the papers' selection. Does not know: how anything is measured.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

from gerund.errors import DataError, MissingDependencyError, unknown_name
from gerund.evaluation.mteb import MTEBEncoder, evaluate, mteb_seed, own_random_state, quiet, score_of
from gerund.evaluation.systems.base import Encoder, Encodes
from gerund.evaluation.task import EvaluationConfig, Score, Side, Task

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
    one, as in MTEB's English benchmark. ``config.limit`` is at most so many rows of each split, or so many
    queries; MTEB may pack several texts into a row.
    """

    kind: ClassVar[str] = "mteb"
    side: ClassVar[Side] = "representation"
    requires: ClassVar[type] = Encodes

    def run(self, system: Encoder, config: EvaluationConfig) -> Score:
        """Fetch the data where they are not there yet, and measure.

        Raises:
            DataError: the data cannot be fetched.
        """
        prompt = self.prompt(config)
        prompts = {} if prompt is None else {self.title: prompt}
        with own_random_state(), quiet():
            task = _task(self.title, mteb_seed(config))
            self._load(task)
            if config.limit is not None:
                _shorten(task, config.limit)
            own = config.document_prompts.get(self.name)
            documents = {} if own is None else {self.title: own}
            encoder = MTEBEncoder(
                system, prompts=prompts, document_prompts=documents, show_progress=config.show_progress
            )
            result = evaluate(encoder, task)
        return _score(result, task.metadata.main_score, _notes(task, config))

    def _load(self, task: Any) -> None:
        try:
            task.load_data()
        # Whatever stands between here and the hub has errors of its own.
        except Exception as error:
            raise DataError(
                f"{self.name}: MTEB could not fetch the data ({type(error).__name__}); they are fetched once, "
                "with a network and without HF_HUB_OFFLINE, and then kept"
            ) from error


def named_tasks(names: Sequence[str]) -> list[Task]:
    """Return MTEB's tasks of these names, each once.

    Args:
        names: MTEB's names; ``MTEB15`` stands for the fifteen tasks of Look Both Ways and UniMAE.

    Raises:
        ConfigError: MTEB has no text task of a name.
        MissingDependencyError: mteb is not installed.
    """
    wanted = [one for name in names for one in (TASKS_15 if name == MTEB15 else (name,))]
    for name in wanted:
        if name not in known_names():
            raise unknown_name("MTEB task", name, [MTEB15, "what mteb.get_tasks() lists"])
    return [MtebNamed(name=f"{MtebNamed.kind}/{name}") for name in dict.fromkeys(wanted)]


@cache
def known_names() -> list[str]:
    """Return the names of MTEB's text tasks, sorted.

    Raises:
        MissingDependencyError: mteb is not installed.
    """
    return sorted(_registry())


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
        one.metadata.name: one
        for one in TASK_LIST
        if one.metadata.modalities == ["text"] and not issubclass(one, AbsTaskAggregate)
    }


def _task(name: str, seed: int) -> Any:
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
            # MTEB leaves out queries without judgements by itself.
            value["relevant_docs"] = dict(list(judged.items())[:limit])
        elif isinstance(value, dict):
            _shorten_in(value, limit, splits)
        elif key in splits:
            dataset[key] = value.select(range(min(limit, len(value))))


def _score(result: Any, main: str, notes: Sequence[str]) -> Score:
    """Return the mean over splits and subsets, and the subsets beside it where there are several."""
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
