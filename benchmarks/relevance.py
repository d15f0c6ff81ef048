"""Documents ranked by relevance: by vectors, by the model's own scorer, by the likelihood of the query.

    python benchmarks/relevance.py --data DATA [--model default] [--collections medline cranfield cisi] [--limit 50]

What BM25 finds first for each query of a collection (`DATA/retrieval/NAME`) is ranked anew by each measure of
`LanguageModel.rerank`, and scored by MTEB's evaluator of re-ranking; relevant documents that BM25 does not offer count
as missed. BM25's own order is the first row. The processor time of ranking is given a query. Checks first that the fast
ranking of a few documents is that of one document at a time. A model without a scorer of its own has no row for it.
The default of `rerank` is chosen by the mean, and by cost where means are level.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import gerund
import harness
from gerund.evaluation.data_files import Collection, collection_files, read_collection
from gerund.evaluation.mteb import run_search
from gerund.evaluation.systems.search import BM25, BM25System, bm25_candidates
from gerund.evaluation.task import EvaluationConfig
from gerund.evaluation.tasks.retrieval import search_task
from gerund.evaluation.tuning import measures_of
from gerund.settings.ranking import PROMPT_MEASURES
from results import Column, Row, Table

METRICS = {"ndcg_at_10": "nDCG@10", "map_at_1000": "MAP", "mrr_at_10": "MRR@10"}


@dataclass
class Measure:
    """One way to rank, as MTEB asks for it.

    Attributes:
        lm: the model.
        by: the measure.
        seconds: processor time of all ranking so far.
    """

    lm: Any
    by: str
    seconds: float = 0.0
    texts: dict[str, str] = field(default_factory=dict)

    def search_model(self, prompts: Mapping[str, str], *, show: bool | None = None) -> "Measure":
        """Return itself: it reads no prompts of tasks."""
        del prompts, show
        return self

    @cached_property
    def mteb_model_meta(self) -> Any:
        """MTEB's description of the ranker."""
        from mteb.models import ModelMeta

        return ModelMeta.create_empty(overwrites={"name": f"gerund/{self.by}", "revision": self.lm.fingerprint()})

    def index(self, corpus: Any, **_: Any) -> None:
        """Keep MTEB's documents, title and text together."""
        rows = zip(corpus["id"], corpus["title"], corpus["text"], strict=True)
        self.texts = {one: f"{title} {text}".strip() for one, title, text in rows}

    def search(self, queries: Any, *, top_ranked: Mapping[str, list[str]], **_: Any) -> dict[str, dict[str, float]]:
        """Rank each query's candidates; those without a word come last."""
        found: dict[str, dict[str, float]] = {}
        start = time.process_time()
        for query, text in zip(queries["id"], queries["text"], strict=True):
            ids = [one for one in top_ranked[query] if self.texts[one]]
            ranking = self.lm.rerank(text, [self.texts[one] for one in ids], by=self.by)
            found[query] = {ids[place]: score for place, score in zip(ranking.indices, ranking.scores, strict=True)}
        self.seconds += time.process_time() - start
        return found


def main(argv: list[str] | None = None) -> None:
    """Run the comparison."""
    parser = harness.parser(__doc__, rounds=1)
    parser.add_argument("--data", type=Path, required=True, help="the folder that holds retrieval/")
    parser.add_argument("--model", default="default", help="a folder or hub id; the bundled model")
    parser.add_argument("--collections", nargs="+", default=["medline", "cranfield", "cisi"])
    parser.add_argument("--candidates", type=int, default=100, help="documents that BM25 offers a query (%(default)s)")
    parser.add_argument("--limit", type=int, help="only the first so many queries of a collection")
    options = harness.parse(parser, argv, quick={"collections": ["medline"], "limit": 2, "candidates": 5})
    lm = gerund.load(options.model)
    measures = [by for by in measures_of(lm) if by not in PROMPT_MEASURES]  # these read documents together
    rows: list[Row] = []
    difference = 0.0
    for name in options.collections:
        collection = read_collection(collection_files(options.data / "retrieval" / name)).first(options.limit)
        candidates = bm25_candidates(collection.documents, collection.queries, options.candidates)
        difference = max(difference, apart(lm, collection, candidates, measures))
        rows.append(row(name, BM25, BM25System(), collection, candidates))
        for by in measures:
            system = Measure(lm, by)
            rows.append(row(name, by, system, collection, candidates, system))
    checks = [harness.require("largest difference from one document at a time", difference, 5e-3)]
    columns = [
        Column("by", "ranked by"), Column("collection", "collection"), Column("queries", "queries"),
        *(Column(key, title, "", 4, "higher") for key, title in METRICS.items()),
        Column("ms", "processor time a query", "ms", 0),
    ]  # fmt: skip
    caption = f"Relevance of BM25's first {options.candidates} documents, ranked anew by {Path(options.model).name}."
    harness.report(
        options, __file__, [Table("relevance", caption, columns, rows, checks=checks)], libraries=["mteb", "bm25s"]
    )


def row(
    name: str,
    by: str,
    system: Any,
    collection: Collection,
    candidates: Mapping[str, list[str]],
    measure: Measure | None = None,
) -> Row:
    """Return the scores of one way to rank one collection."""
    local = search_task(f"relevance/{name}", "Reranking", "map_at_1000", collection)
    scores = run_search(local, collection.judgements, system, EvaluationConfig(show_progress=False), None, candidates)
    count = len(collection.queries)
    spent = None if measure is None else 1000 * measure.seconds / count
    return {"by": by, "collection": name, "queries": count, "ms": spent, **{key: float(scores[key]) for key in METRICS}}


def apart(lm: Any, collection: Collection, candidates: Mapping[str, list[str]], measures: list[str]) -> float:
    """Return how far the scores of a few documents together are from each alone."""
    query, text = next(iter(collection.queries.items()))
    documents = [own for one in candidates[query][:4] if (own := collection.documents[one])]
    found = 0.0
    for by in measures:
        ranking = lm.rerank(text, documents, by=by)
        alone = [lm.rerank(text, [documents[place]], by=by).scores[0] for place in ranking.indices]
        found = max(found, harness.largest_difference(ranking.scores, alone) if alone else 0.0)
    return found


if __name__ == "__main__":
    main()
