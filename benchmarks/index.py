"""What an index finds: nDCG@10 of words, vectors, both joined, and of both put into a new order by a model.

    python benchmarks/index.py --data ../shared/data [--sets medline,cranfield,cisi] [--outside ./all-MiniLM-L6-v2]

Collections are in BEIR's layout and go through the store that `gerund search` asks; a document scores as its best
chunk. What it costs is measured by `index_cost.py`.

`quality`: whole documents, early and late chunks, with `--titles` also behind their titles. With `--outside`
a folder of sentence-transformers embeds the same chunks.

`reranked`: the first queries of each collection, their first hits in the order of `lm.rerank`'s measures.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import gerund
import harness
from gerund import Chunking, Document
from gerund.evaluation.data_files import collection_files, read_collection
from gerund.evaluation.tuning import measures_of
from gerund.retrieval.documents import cut
from gerund.retrieval.embedding import Embedder
from gerund.retrieval.hybrid_search import DEPTH, convex, hybrid_rankings, rrf, to_hits
from gerund.retrieval.lance_store import LanceStore
from gerund.retrieval.store import IndexMetadata, Match
from gerund.settings.ranking import TRAINED_FUSION
from results import Column, Row, Table

WEIGHTS = [place / 10 for place in range(11)]
OWN, CAUSAL = "own", gerund.AttentionPlan("causal")
AS_FOUND = "as found"
_SPARE = 16

# What words and what vectors find for a query.
Sides = tuple[list[Match], list[Match]]


@dataclass(frozen=True)
class Set:
    """A collection: its documents, queries, and which documents are relevant."""

    name: str
    documents: list[Document]
    queries: dict[str, str]
    judgements: dict[str, Any]

    @classmethod
    def read(cls, name: str, options: Any) -> "Set":
        """Read one from the data folder, or as much of it as is asked for."""
        collection = read_collection(collection_files(options.data / "retrieval" / name)).first(options.queries)
        documents = [Document(one, collection.bodies[one], title) for one, title in collection.titles.items()]
        documents = documents[: options.documents]
        kept = {one.source for one in documents}
        judgements = {query: grades for query, grades in collection.judgements.items() if kept & grades.keys()}
        return cls(name, documents, collection.queries, judgements)

    @property
    def has_titles(self) -> bool:
        """Whether any document has one."""
        return any(one.title for one in self.documents)

    def ndcg(self, scores: Mapping[str, Mapping[str, float]]) -> float:
        """Return the mean nDCG@10 of the documents' scores, in percent; of the queries that are scored."""
        import pytrec_eval

        evaluator = pytrec_eval.RelevanceEvaluator(self.judgements, {"ndcg_cut.10"})
        found = evaluator.evaluate({query: dict(own) for query, own in scores.items()})
        return 100 * float(np.mean([found[one]["ndcg_cut_10"] if scores[one] else 0.0 for one in scores]))


@dataclass(frozen=True)
class Encoder:
    """What embeds: chunks of documents, and queries."""

    name: str
    plan: str
    tokenizer: Any
    max_length: int
    chunks: Callable[[Chunking, list[list[Any]]], np.ndarray]
    queries: Callable[[list[str]], np.ndarray]
    dimensions: int
    is_own: bool = True


def own_encoder(lm: Any, plan: str) -> Encoder:
    """Return one of gerund's models."""
    return Encoder(
        lm.name, plan, lm.tokenizer, lm.max_length,
        lambda chunking, documents: Embedder(lm, chunking).chunks(documents),
        lambda texts: Embedder(lm, Chunking()).queries(texts), lm.dimensions,
    )  # fmt: skip


def outside_encoder(folder: Path, tokenizer: Any) -> Encoder:
    """Return one of sentence-transformers, for the same chunks."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder), device="cpu", local_files_only=True)

    def encode(texts: list[str]) -> np.ndarray:
        return np.asarray(model.encode(texts, normalize_embeddings=True, show_progress_bar=False), dtype=np.float32)

    def chunks(chunking: Chunking, documents: list[list[Any]]) -> np.ndarray:
        listed = [one for own in documents for one in own]
        return encode(
            [f"{one.context}\n{one.text}" if chunking.context and one.context else one.text for one in listed]
        )

    size = int(model.get_embedding_dimension())
    return Encoder("all-MiniLM-L6-v2", "its own", tokenizer, 1024, chunks, encode, size, is_own=False)


def ways(encoder: Encoder, tokens: Sequence[int], *, titles: bool) -> Iterator[tuple[str, Chunking]]:
    """Yield the ways to cut and embed that are compared, with their names."""
    yield "whole", Chunking(tokens=encoder.max_length - _SPARE, context=True)
    for most in tokens:
        for late in (False, True) if encoder.is_own else (False,):
            for context in (False, True) if titles else (False,):
                name = f"{'late' if late else 'early'} {most}{', with title' if context else ''}"
                yield name, Chunking(tokens=most, late=late, context=context)


@contextmanager
def indexed(encoder: Encoder, chunking: Chunking, own: Set) -> Iterator[LanceStore]:
    """Yield a store of a collection's chunks."""
    with tempfile.TemporaryDirectory() as folder:
        store = LanceStore(Path(folder) / "my.index")
        store.create(IndexMetadata("fingerprint", encoder.name, encoder.dimensions, "", chunking))
        for first in range(0, len(own.documents), 128):
            listed = [cut(one, encoder.tokenizer, chunking) for one in own.documents[first : first + 128]]
            chunks = [one for chunks in listed for one in chunks]
            vectors_ND = encoder.chunks(chunking, listed)
            store.replace([one.source for one in own.documents[first : first + 128]], chunks, vectors_ND)
        store.tidy()
        yield store


def sides_of(store: LanceStore, encoder: Encoder, own: Set) -> dict[str, Sides]:
    """Return what words and vectors find for each query that is scored."""
    vectors_ND = encoder.queries([own.queries[one] for one in own.judgements])
    return {
        one: hybrid_rankings(store, [own.queries[one]], vector_D[None], DEPTH, None)
        for one, vector_D in zip(own.judgements, vectors_ND, strict=True)
    }


def by_document(scores: Mapping[str, float], sides: Sides) -> dict[str, float]:
    """Return each document's best score, of those of its chunks."""
    sources = {chunk.id: chunk.source for side in sides for chunk, _ in side}
    best: dict[str, float] = {}
    for id_, score in scores.items():
        best[sources[id_]] = max(score, best.get(sources[id_], float("-inf")))
    return best


def quality(options: Any) -> Table:
    """Measure nDCG@10."""
    rows: list[Row] = []
    scores: list[dict[float, float]] = []
    lm = gerund.load(options.model)
    encoders = [own_encoder(lm, OWN)] if "own" in options.encoders else []
    if options.causal:
        encoders.append(own_encoder(lm.with_encoder(replace(lm.encoder, attention=CAUSAL)), "causal"))
    if options.outside is not None and "outside" in options.encoders:
        encoders.append(outside_encoder(options.outside, lm.tokenizer))
    for name in options.sets.split(","):
        own = Set.read(name, options)
        for encoder in encoders:
            titles = options.titles and own.has_titles
            for way, chunking in ways(encoder, [int(one) for one in options.tokens.split(",")], titles=titles):
                if way.split()[0] not in options.ways:
                    continue
                with indexed(encoder, chunking, own) as store:
                    sides = sides_of(store, encoder, own)
                scores.append(weighed(own, sides))
                row = {"set": name, "encoder": encoder.name, "plan": encoder.plan, "way": way}
                rows.append({**row, **scored(own, sides, scores[-1])})
                print(rows[-1], flush=True)
    for row, by_weight in zip(rows, scores, strict=True):
        alike = [found for other, found in zip(rows, scores, strict=True) if _is_alike(row, other)]
        if alike:
            row["others"] = max(WEIGHTS, key=lambda weight: sum(found[weight] for found in alike))
            row["fair"] = by_weight[row["others"]]
    columns = [
        Column("way", "chunks"), Column("set", "collection"), Column("encoder", "encoder"), Column("plan", "plan"),
        Column("words", "words", "%", 1), Column("vectors", "vectors", "%", 1),
        Column("fused", f"joined, weight {TRAINED_FUSION}", "%", 1), Column("best", "best weight", "", 1),
        Column("tuned", "joined, best weight", "%", 1), Column("rrf", "reciprocal ranks", "%", 1),
        Column("others", "best weight of the other collections", "", 1),
        Column("fair", "joined, best weight of the others", "%", 1),
    ]  # fmt: skip
    caption = (
        "nDCG@10 of an index; the best weight is chosen on the very queries that are scored, that of the other "
        "collections by the mean of theirs."
    )
    return Table(options.id, caption, columns, rows)


def _is_alike(row: Row, other: Row) -> bool:
    """Whether two rows are of one way and encoder, and of different collections."""
    return row["set"] != other["set"] and all(row[key] == other[key] for key in ("encoder", "plan", "way"))


def weighed(own: Set, sides: Mapping[str, Sides]) -> dict[float, float]:
    """Return the score of each weight."""
    return {
        weight: joined_score(own, sides, lambda words, vectors, weight=weight: convex(words, vectors, weight))
        for weight in WEIGHTS
    }


def scored(own: Set, sides: Mapping[str, Sides], by_weight: Mapping[float, float]) -> Row:
    """Return the scores of one way."""
    best = max(by_weight, key=lambda weight: by_weight[weight])
    return {
        "words": joined_score(own, sides, lambda words, _: words),
        "vectors": joined_score(own, sides, lambda _, vectors: vectors),
        "fused": by_weight[TRAINED_FUSION], "best": best, "tuned": by_weight[best],
        "rrf": joined_score(own, sides, lambda words, vectors: rrf([[*words], [*vectors][: DEPTH]])),
    }  # fmt: skip


def joined_score(
    own: Set,
    sides: Mapping[str, Sides],
    join: Callable[[dict[str, float], dict[str, float]], Mapping[str, float]],
) -> float:
    """Return nDCG@10 of what words and vectors found, joined in some way."""
    return own.ndcg({query: by_document(join(*map(_scores, found)), found) for query, found in sides.items()})


def _scores(side: Sequence[Match]) -> dict[str, float]:
    return {chunk.id: score for chunk, score in side}


def reranked(options: Any) -> Table:
    """Measure what a new order of the first hits brings."""
    rows = []
    lm = gerund.load(options.model)
    measures = measures_of(lm)
    for name in options.sets.split(","):
        own = Set.read(name, options)
        own = replace(own, judgements=dict(list(own.judgements.items())[: options.reranked_queries]))
        encoder = own_encoder(lm, OWN)
        with indexed(encoder, Chunking(), own) as store:
            sides = sides_of(store, encoder, own)
        for measure in (AS_FOUND, *measures):
            runs = {
                one: _in_order(lm, own.queries[one], found, measure, options.rerank) for one, found in sides.items()
            }
            row = {"set": name, "by": measure, "queries": len(runs), "ndcg": own.ndcg(runs)}
            print(row, flush=True)
            rows.append(row)
    columns = [
        Column("by", "order of the first hits"), Column("set", "collection"), Column("queries", "queries"),
        Column("ndcg", "nDCG@10", "%", 1),
    ]  # fmt: skip
    caption = (
        f"The first {options.rerank} hits of `gerund search` (chunks of {Chunking().tokens} tokens, words and vectors "
        "joined) in a new order; a document stands where its first chunk stands."
    )
    return Table("reranked", caption, columns, rows)


def _in_order(lm: Any, query: str, sides: Sides, measure: str, count: int) -> dict[str, float]:
    """Return the documents' scores: minus the place of the first chunk of each."""
    hits = to_hits(*sides, "hybrid", TRAINED_FUSION)
    if measure != AS_FOUND:
        order = lm.rerank(query, [one.text for one in hits[:count]], by=measure).indices
        hits = [*(hits[place] for place in order), *hits[count:]]
    places: dict[str, float] = {}
    for place, one in enumerate(hits):
        places.setdefault(one.source, -float(place))
    return places


def main(argv: list[str] | None = None) -> None:
    """Measure what is asked for."""
    parser = harness.parser(__doc__, rounds=1)
    parser.add_argument("--data", type=Path, required=True, help="a folder with retrieval/")
    parser.add_argument("--model", default="default", help="(%(default)s)")
    parser.add_argument("--outside", type=Path, help="a folder of sentence-transformers, all-MiniLM-L6-v2's")
    parser.add_argument("--causal", action="store_true", help="measure the plan `causal` too")
    parser.add_argument("--encoders", default="own,outside", help="whose chunks (%(default)s)")
    parser.add_argument("--ways", default="whole,early,late", help="what chunks (%(default)s)")
    parser.add_argument("--id", default="quality", help="of the table in the result file (%(default)s)")
    parser.add_argument("--titles", action="store_true", help="also chunks that are read behind their titles")
    parser.add_argument("--tables", default="quality,reranked")
    parser.add_argument("--sets", default="medline,cranfield,cisi")
    parser.add_argument("--tokens", default="64", help="tokens of a chunk (%(default)s)")
    parser.add_argument("--documents", type=int, help="at most so many of a collection")
    parser.add_argument("--queries", type=int, help="at most so many of a collection")
    parser.add_argument("--rerank", type=int, default=20, help="hits that are put into a new order (%(default)s)")
    parser.add_argument("--reranked-queries", type=int, default=30, help="of each collection (%(default)s)")
    small = {"sets": "medline", "documents": 20, "queries": 5, "reranked_queries": 2, "rerank": 3}
    options = harness.parse(parser, argv, quick=small)
    torch.set_num_threads(options.threads)
    makers = {"quality": quality, "reranked": reranked}
    tables = [makers[name](options) for name in options.tables.split(",")]
    harness.report(options, __file__, tables, libraries=("lancedb", "sentence-transformers"))


if __name__ == "__main__":
    main()
