"""Choose how a model re-ranks: nDCG@10 of BM25's first documents by relevance measure and weight."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from gerund.errors import DataError
from gerund.evaluation.data_files import Collection
from gerund.evaluation.run import data_digest
from gerund.evaluation.systems.search import BM25, BM25Index
from gerund.evaluation.task import EvaluationConfig, Task
from gerund.evaluation.tasks.retrieval import CollectionTask
from gerund.evaluation.tuning import WEIGHTS, TunedWeight, WeightTrial, require_retrieval_tasks
from gerund.jobs.files import write_atomic
from gerund.language_model import LanguageModel
from gerund.models.kinds import is_encoder_decoder
from gerund.progress import progress
from gerund.scoring.prompted import prompt_measures_of
from gerund.scoring.query_likelihood import QueryLikelihood
from gerund.scoring.relevance import standardized
from gerund.settings.ranking import MAXSIM, QUERY_MEASURES

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
        ranked = [
            (self._ids[row], score) for row, score in self._index.top(self.collection.queries[query], self.count + 1)
        ]
        itself = query if query in self.collection.itself else None
        kept = [(one, score) for one, score in ranked if self._texts[one] and one != itself][: self.count]
        return [document for document, _ in kept], [score for _, score in kept]

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
