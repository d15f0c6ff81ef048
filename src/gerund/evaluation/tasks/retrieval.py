"""Retrieval: are the relevant documents of a collection the nearest to a query?

Knows: collections in BEIR's layout, which of MTEB's evaluators scores them. Does not know: models.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

from gerund.evaluation.mteb import LocalTask, run_search, score_of
from gerund.evaluation.sets.beir import Collection, collection_files, collections_in, read_collection
from gerund.evaluation.systems.base import Ranks
from gerund.evaluation.task import EvaluationConfig, Score, Side, Split, Task

FOLDER = "retrieval"


@dataclass(frozen=True, kw_only=True)
class CollectionTask(Task):
    """A task on a collection of documents. A prompt goes before queries, never before documents.

    ``config.limit`` is at most so many queries, the first that have judgements; all documents stay.

    Attributes:
        files: those of the collection, which lie in one folder (``qrels`` and ``candidates`` below it).
    """

    side: ClassVar[Side] = "representation"
    requires: ClassVar[type] = Ranks

    @property
    def places(self) -> dict[str, Path]:
        """The files by what they hold."""
        return collection_files(self.files[0].parent)

    @property
    def has_validation(self) -> bool:
        """Whether there are judgements of the split dev."""
        return "validation" in self.places

    def collection(self, config: EvaluationConfig) -> Collection:
        """Return the documents, and the queries that are scored.

        Raises:
            DataError: a file is malformed.
        """
        return read_collection(self.places, config.split).first(config.limit)

    def key_parts(self, config: EvaluationConfig) -> tuple[str, ...]:
        """Return what tells scores from those of versions that ranked a query's own document as well."""
        states = tuple((path, path.stat().st_mtime_ns, path.stat().st_size) for path in self.files)
        return ("without itself",) if _has_itself(self, config.split, config.limit, states) else ()

    def texts(self, config: EvaluationConfig) -> list[str]:
        """Return the queries, and the documents too unless only queries have the prompt."""
        return texts_of(self.collection(config), self.prompt(config))


@dataclass(frozen=True, kw_only=True)
class Retrieval(CollectionTask):
    """nDCG@10 of ranking all documents by cosine, as MTEB and BEIR compute it (with trec_eval's measures).

    The files are ``retrieval/NAME/{corpus,queries}.jsonl`` and ``qrels/test.tsv``. A query without judgements
    is not scored; one whose judgements name no relevant document counts as 0. A query that is itself a document, with
    the same id and the same text, is left out of its own ranking unless it is judged relevant.
    """

    kind: ClassVar[str] = "retrieval"
    data_folder: ClassVar[str] = FOLDER

    def run(self, system: Ranks, config: EvaluationConfig) -> Score:
        """Measure.

        Raises:
            DataError: the collection is malformed.
        """
        collection = self.collection(config)
        return retrieved(self.name, collection, system, config, self.prompt(config), notes_on(collection))


def retrieved(
    name: str,
    collection: Collection,
    system: Ranks,
    config: EvaluationConfig,
    prompt: str | None,
    notes: Sequence[str] = (),
) -> Score:
    """Rank all documents of a collection for each of its queries.

    Args:
        name: the task's.
        collection: what is ranked, and for whom.
        system: what ranks them.
        config: the evaluation's.
        prompt: put before queries.
        notes: what a reader of the score has to know.

    Returns:
        nDCG@10, and beside it the measures that the papers report.
    """
    local = search_task(name, "Retrieval", "ndcg_at_10", collection)
    scores = run_search(local, collection.judgements, system, config, prompt, itself=collection.itself)
    others = ("recall_at_10", "recall_at_100", "mrr_at_10", "map_at_1000")
    return score_of(scores, local.main, others, size=len(collection.queries), notes=notes)


def texts_of(collection: Collection, prompt: str | None) -> list[str]:
    """Return the queries, and the documents too unless only queries have the prompt."""
    documents = list(collection.documents.values()) if prompt is None else []
    return [*collection.queries.values(), *documents]


def search_task(name: str, type_: str, main: str, collection: Collection) -> LocalTask:
    """Return a collection as one of MTEB's tasks of retrieval or re-ranking."""
    corpus = {
        "id": list(collection.titles),
        "title": list(collection.titles.values()),
        "text": list(collection.bodies.values()),
    }
    queries = {"id": list(collection.queries), "text": list(collection.queries.values())}
    return LocalTask(name, "AbsTaskRetrieval", type_, main, {"corpus": corpus, "queries": queries})


def notes_on(collection: Collection) -> tuple[str, ...]:
    """Return what a reader of a collection's scores has to know."""
    notes = []
    if collection.unjudged:
        notes.append(f"queries without judgements, which are not scored: {collection.unjudged}")
    if collection.hopeless:
        notes.append(f"queries without a relevant document, which count as 0: {collection.hopeless}")
    if collection.itself:
        notes.append(f"queries that are documents too, left out of their own rankings: {len(collection.itself)}")
    return tuple(notes)


@lru_cache(maxsize=16)
def _has_itself(task: CollectionTask, split: Split, limit: int | None, states: object) -> bool:
    """Tell whether a query is itself a document; read once for all systems as long as the files stay as they are."""
    del states
    return bool(read_collection(task.places, split).first(limit).itself)


def find(folder: Path) -> list[Task]:
    """Return a task for every collection in ``retrieval/``."""
    found = collections_in(folder / FOLDER)
    return [Retrieval(name=f"retrieval/{name}", files=tuple(files.values())) for name, files in found.items()]
