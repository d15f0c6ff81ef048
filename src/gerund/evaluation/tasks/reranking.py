"""Re-ranking: are the relevant ones of a few candidates the nearest to a query?

Knows: collections and candidates, which of MTEB's evaluators scores them. Does not know: models.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from gerund.errors import ConfigError
from gerund.evaluation.mteb import run_search, score_of
from gerund.evaluation.sets.beir import Collection, collections_in, read_candidates
from gerund.evaluation.systems.base import Ranks
from gerund.evaluation.systems.bm25 import bm25_candidates
from gerund.evaluation.task import EvaluationConfig, Score, Task
from gerund.evaluation.tasks.retrieval import FOLDER, CollectionTask, notes_on, search_task


@dataclass(frozen=True, kw_only=True)
class Reranking(CollectionTask):
    """Mean average precision of ranking each query's candidates by cosine, as MTEB computes it.

    The candidates are those of ``retrieval/NAME/candidates/test.tsv`` or, without that file, what BM25 finds
    first. Relevant documents that are no candidates are not added; they count as missed, so that the scores of
    retrieval and re-ranking can be compared. A query that is itself a document is no candidate of its own, unless it is
    judged relevant.
    """

    kind: ClassVar[str] = "reranking"

    candidates: int = field(default=100, metadata={"help": "Documents that BM25 offers a query, without a file."})

    def __post_init__(self) -> None:
        if self.candidates < 1:
            raise ConfigError(f"{self.kind}: candidates is 1 or more")

    def run(self, system: Ranks, config: EvaluationConfig) -> Score:
        """Measure.

        Raises:
            DataError: the collection or its candidates are malformed.
        """
        collection = self.collection(config)
        offered, origin = self._candidates(collection, config)
        local = search_task(self.name, "Reranking", "map_at_1000", collection)
        scores = run_search(local, collection.judgements, system, config, self.prompt(config), offered)
        mean = sum(map(len, offered.values())) / max(1, len(offered))
        notes = [f"{origin}, {mean:.1f} a query on average", *notes_on(collection)]
        if none := sum(not documents for documents in offered.values()):
            notes.append(f"queries without candidates, which count as 0: {none}")
        others = ("mrr_at_1000", "ndcg_at_10")
        return score_of(scores, local.main, others, size=len(collection.queries), notes=notes)

    def _candidates(self, collection: Collection, config: EvaluationConfig) -> tuple[dict[str, list[str]], str]:
        path = self.places.get(f"{config.split} candidates")
        if path is not None:
            found = _without_itself(read_candidates(path, collection), collection)
            return found, f"candidates from {path.parent.name}/{path.name}"
        # One more than are kept, where the query may be among them.
        count = self.candidates + bool(collection.itself)
        found = bm25_candidates(collection.documents, collection.queries, count)
        kept = {query: own[: self.candidates] for query, own in _without_itself(found, collection).items()}
        return kept, f"candidates are BM25's first {self.candidates}"


def _without_itself(found: Mapping[str, list[str]], collection: Collection) -> dict[str, list[str]]:
    """Return candidates without those that are the query itself."""
    own = collection.itself
    return {query: [one for one in offered if one != query or query not in own] for query, offered in found.items()}


def find(folder: Path) -> list[Task]:
    """Return a task for every collection in ``retrieval/``."""
    found = collections_in(folder / FOLDER)
    return [Reranking(name=f"reranking/{name}", files=tuple(files.values())) for name, files in found.items()]
