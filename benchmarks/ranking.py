"""A search's first documents ranked anew by the measures of `rerank`, alone and fused with the search's scores.

    python benchmarks/ranking.py --data DATA --model MODEL --work FILE [--candidates 50] [--limit 30] [--first hybrid]

For each query of a collection (`DATA/retrieval/NAME`) the first documents of BM25, or of hybrid search, are ranked by
each measure of `rerank` (`--ways`), alone and fused with the search's scores as `rerank(scores=...)` does it. One
weight for all collections is chosen on a third of the shuffled queries and measured on the others; by the default
weight, which was not chosen here, all queries are measured. nDCG@10 has linear gains and the ideal order of all judged
documents, as trec_eval; intervals are bootstrapped, and differences from BM25 on the same queries tested by
randomization. Scores are kept in `--work`, so that an interrupted run continues, and further ways are added to it;
vectors of hybrid search are kept beside it. Checks first that documents whose keys and values are kept get the scores
of whole passes. A model that is trained to embed keeps its adapter for `maxsim` and `vectors`.
"""

import random
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

import gerund
import harness
from gerund.evaluation.data_files import Collection, collection_files, read_collection
from gerund.evaluation.statistics import difference_of, interval_of
from gerund.evaluation.systems.base import EmbeddingCache
from gerund.evaluation.systems.language_model import language_model_system
from gerund.evaluation.systems.search import BM25, HYBRID, HybridSystem
from gerund.evaluation.task import Examples
from gerund.evaluation.tuning import WEIGHTS, Candidates, Offers, ScoreFile
from gerund.inference.likelihood import continuation_logprobs
from gerund.models.kinds import packed_network
from gerund.scoring import query_likelihood
from gerund.settings.ranking import DEFAULT_WEIGHT, MAXSIM, QUERY_MEASURES, RELEVANCE_MEASURES
from results import Column, Row, Table

DEV = 3
"""One query in so many is for choices."""
_TIMED = 3
WAYS = (*QUERY_MEASURES, MAXSIM, "vectors")

# The candidates of the queries for choices and of the others, by collection.
Found = dict[str, tuple[list[Candidates], list[Candidates]]]


class HybridOffers(Offers):
    """What hybrid search offers: an encoder's vectors fused with BM25. Vectors are saved beside the scores."""

    def __init__(self, lm: Any, work: Path | None, collection: Collection, count: int) -> None:
        super().__init__(collection, count)
        cache = EmbeddingCache(work and work.with_suffix(".vectors"))
        search = HybridSystem(language_model_system(HYBRID, lm, cache))
        asked = [collection.queries[query] for query in self.queries]
        scores_QN = search.candidate_scores(asked, list(collection.documents.values()), scorer=None, prompt=None)
        self._scores = dict(zip(self.queries, scores_QN, strict=True))

    def ranked(self, query: str, count: int) -> list[tuple[int, float]]:
        """Return places and scores of the first documents for a query, best first."""
        scores_N = self._scores[query]
        return [(int(row), float(scores_N[row])) for row in np.argsort(-scores_N, kind="stable")[:count]]


def main(argv: list[str] | None = None) -> None:
    """Run the comparison."""
    parser = harness.parser(__doc__, rounds=1)
    parser.add_argument("--data", type=Path, required=True, help="the folder that holds retrieval/")
    parser.add_argument("--model", required=True, help="a folder, GGUF file or hub id")
    parser.add_argument("--runtime", default="auto", help="of the model (%(default)s)")
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=RELEVANCE_MEASURES, help="measures of rerank")
    parser.add_argument("--work", type=Path, help="a file of scores, to go on with")
    parser.add_argument("--collections", nargs="+", default=["medline", "cranfield", "cisi"])
    parser.add_argument("--first", choices=(BM25, HYBRID), default=BM25, help="what offers documents (%(default)s)")
    parser.add_argument("--candidates", type=int, default=50, help="documents that are ranked anew (%(default)s)")
    parser.add_argument("--limit", type=int, help="only so many queries of a collection")
    quick = {"collections": ["medline"], "limit": 6, "candidates": 4, "model": "default"}
    options = harness.parse(parser, argv, quick=quick)
    lm = gerund.load(options.model, runtime=options.runtime)
    offers: Any = partial(HybridOffers, lm, options.work) if options.first == HYBRID else Offers
    collections = {
        name: read_collection(collection_files(options.data / "retrieval" / name)) for name in options.collections
    }
    sets = {name: offers(collection, options.candidates) for name, collection in collections.items()}
    found = scored(lm, sets, options, options.ways)
    by_words = {name: Offers(collection, options.candidates) for name, collection in collections.items()}
    bm25 = scored(lm, by_words, options, [])
    # Packed, kept documents are in 8 bits, and any rounding moves what 8-bit products give.
    allowed = 0.05 if packed_network(lm.model) is None else 0.2
    checks = [harness.require("largest difference of a kept document's score", apart(lm), allowed)]
    weights = {way: best_weight(found, way) for way in options.ways}
    default = dict.fromkeys(options.ways, DEFAULT_WEIGHT)
    rows = [row for name in found for row in quality(name, found[name][1], bm25[name][1], weights, options.first)]
    spent = timed(lm, next(iter(sets.values())))
    all_of = {name: (found[name][0] + found[name][1], bm25[name][0] + bm25[name][1]) for name in found}
    usual = [row for name, pair in all_of.items() for row in quality(name, *pair, default, options.first)]
    tables = [
        quality_table("default", "all queries, by the default weight", usual, checks),
        quality_table("quality", "by the weight that is best on other queries, in brackets", rows, checks),
        weight_table(found, options.ways),
        time_table(options, spent),
    ]
    search = "BM25" if options.first == BM25 else "Hybrid search"
    first = f"{search}'s first {options.candidates} documents ranked anew by {Path(options.model).stem}"
    tables[:2] = [replace(table, caption=f"{first}: {table.caption}.") for table in tables[:2]]
    if options.first == HYBRID:
        tables = [replace(table, id=f"{table.id}-{HYBRID}") for table in tables]
    harness.report(options, __file__, tables, libraries=["bm25s"])


def scored(lm: Any, sets: dict[str, Offers], options: Any, ways: Sequence[str]) -> Found:
    """Return the scored candidates of every query, the collections in turn: an interrupted run has some of each."""
    known = ScoreFile(options.work)
    mark = f" {HYBRID}" if any(isinstance(offers, HybridOffers) for offers in sets.values()) else ""
    orders = {}
    for name, offers in sets.items():
        orders[name] = list(offers.queries)
        random.Random(0).shuffle(orders[name])
    found: Found = {name: ([], []) for name in sets}
    for number in range(max(map(len, orders.values()))):
        for name, order in orders.items():
            offers = sets[name]
            if number >= len(order[: options.limit]):
                continue
            key = f"{name} {order[number]} {options.candidates}{mark}"
            own = known.find(key)
            missing = [way for way in ways if own is None or way not in own.scores]
            if missing or own is None:
                fresh = offers.scored(lm, order[number], missing)
                own = fresh if own is None else replace(own, scores={**own.scores, **fresh.scores})
                known.add(key, own)
            found[name][number % DEV > 0].append(own)
    return found


def on_dev(found: Found, way: str, weight: float) -> float:
    """Return the mean over collections of a weight's nDCG@10 on the queries for choices."""
    return fmean(fmean(one.ndcg(way, weight) for one in dev) for dev, _ in found.values())


def best_weight(found: Found, way: str) -> float:
    """Return the best weight on the queries for choices; of equal ones the nearest to a half."""
    return min(WEIGHTS, key=lambda weight: (-on_dev(found, way, weight), abs(weight - 0.5)))


def quality(
    name: str, tested: list[Candidates], bm25: list[Candidates], weights: dict[str, float], first: str
) -> list[Row]:
    """Return the rows of a collection: BM25, the search that offers documents, and each way alone and fused with it."""
    base = [each.ndcg(BM25) for each in bm25]
    rows: list[Row] = [{**row_of(name, BM25, base), "reference": True}]
    # Candidates call the scores of their search BM25's.
    ways = [] if first == BM25 else [(first, BM25, 1.0)]
    for way, weight in weights.items():
        ways += [(way, way, 1.0), (f"{way} + {'BM25' if first == BM25 else first} ({weight:g})", way, weight)]
    for label, way, share in ways:
        values = [each.ndcg(way, share) for each in tested]
        apart = difference_of(Examples.of_mean(values), Examples.of_mean(base))
        gain = np.array(values) - np.array(base)
        beats = f"{int((gain > 1e-9).sum())} / {int((gain < -1e-9).sum())}"
        more: Row = {} if apart is None else {"gain": round(apart.value, 4), "p": apart.p, "beats": beats}
        rows.append({**row_of(name, label, values), **more})
    return rows


def row_of(name: str, way: str, values: list[float]) -> Row:
    """Return a row with a mean and its interval."""
    interval = interval_of(Examples.of_mean(values))
    shown = "" if interval is None else f"{interval.low:.3f} to {interval.high:.3f}"
    return {"way": way, "collection": name, "queries": len(values), "ndcg": float(np.mean(values)), "interval": shown}


def quality_table(name: str, caption: str, rows: list[Row], checks: list[str]) -> Table:
    """Return a table of nDCG."""
    columns = [
        Column("way", "ranked by"), Column("collection", "collection"), Column("queries", "queries"),
        Column("ndcg", "nDCG@10", "", 4, "higher"), Column("interval", "95% interval"),
        Column("gain", "more than BM25", "", 3), Column("p", "p", "", 4), Column("beats", "queries better / worse"),
    ]  # fmt: skip
    return Table(name, caption, columns, rows, checks=checks)


def weight_table(found: Found, ways: Sequence[str]) -> Table:
    """Return nDCG@10 by weight, on the queries for choices."""
    count = sum(len(dev) for dev, _ in found.values())
    rows: list[Row] = [
        {"weight": f"{weight:g}", **{way: on_dev(found, way, weight) for way in ways}} for weight in WEIGHTS
    ]
    columns = [Column("weight", "weight"), *(Column(way, way, "", 4, "higher") for way in ways)]
    caption = (
        f"nDCG@10 by a measure's weight beside the search: mean over the collections, {count} queries for choices."
    )
    return Table("weights", caption, columns, rows)


def timed(lm: Any, offers: Offers) -> list[tuple[float, float]]:
    """Return the processor seconds of ranking documents that nothing is kept of, and again, for a few queries."""
    found = []
    for query in offers.queries[:_TIMED]:
        texts = [offers.text(one) for one in offers.top(query)[0]]
        query_likelihood.forget(lm.model)
        seconds = []
        for _ in range(2):
            start = time.process_time()
            lm.rerank(offers.collection.queries[query], texts, by="lift")
            seconds.append(time.process_time() - start)
        found.append((seconds[0], seconds[1]))
    return found


def time_table(options: Any, spent: list[tuple[float, float]]) -> Table:
    """Return the time of a query."""
    cold, kept = (float(np.median(column)) for column in zip(*spent, strict=True))
    rows: list[Row] = [{"state": "documents not read yet", "cpu": cold}, {"state": "documents kept", "cpu": kept}]
    columns = [Column("state", "state"), Column("cpu", "processor time a query", "s", 2, "lower")]
    caption = f"Ranking {options.candidates} documents for a query by lift; median of {len(spent)} queries."
    return Table("time", caption, columns, rows)


def apart(lm: Any) -> float:
    """Return how far scores of kept documents are from those of whole passes, one document at a time."""
    texts = [
        "Trains run on rails.",
        "Bread is baked of flour and water, and of yeast that makes it rise.",
        "Rain falls.",
    ]
    together = lm.rerank("how to bake bread", texts, by="likelihood")
    prompt = query_likelihood.QueryPrompt.of(lm.tokenizer)
    pairs = [(prompt.before(texts[place]), " how to bake bread") for place in together.indices]
    plain = continuation_logprobs(lm.model, lm.tokenizer, pairs, show=False)
    return harness.largest_difference(together.scores, [float(one.continuation.mean()) for one in plain])


if __name__ == "__main__":
    main()
