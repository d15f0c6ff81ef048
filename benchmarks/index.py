"""What an index finds, how quickly it is made, and how quickly it answers.

    python benchmarks/index.py --data ../shared/data [--sets medline,cranfield,cisi] [--tables quality,making,asking]

`quality`: nDCG@10 on collections in BEIR's layout, through the store that `gerund search` asks: words, vectors, both
joined with the usual weight and with the best of eleven, and by reciprocal ranks; whole documents, early and late
chunks, with and without the title in front, under the model's own plan and under `causal`. A document scores as its
best chunk.

`making`: documents a second, beside sentence-transformers and LanceDB with the same weights, plan and chunks.

`asking`: time of one query to an index of random vectors, and which part of the nearest ten it finds.
"""

import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import gerund
import harness
from gerund import Chunking, Document
from gerund.evaluation.sets.beir import collection_files, read_collection
from gerund.retrieval import fusion
from gerund.retrieval.documents import Chunk
from gerund.retrieval.lance_store import LanceStore
from gerund.retrieval.searching import found_by_vectors, found_by_words
from gerund.retrieval.store import About, Words
from inputs import demo_texts, random_llama, save
from results import Column, Row, Table

WEIGHTS = [place / 10 for place in range(11)]
PEER = "sentence-transformers + LanceDB"
_SPARE = 16


def ways(lm: Any, tokens: Sequence[int]) -> Iterator[tuple[str, Chunking]]:
    """Yield the ways to cut and embed that are compared, with their names."""
    yield "whole", Chunking(tokens=lm.max_length - _SPARE, context=True)
    for most in tokens:
        for late in (False, True):
            for context in (False, True):
                name = f"{'late' if late else 'early'} {most}{', with title' if context else ''}"
                yield name, Chunking(tokens=most, late=late, context=context)


def quality(options: Any) -> Table:
    """Measure nDCG@10."""
    rows = []
    own = gerund.load(options.model)
    for name in options.sets.split(","):
        collection = read_collection(collection_files(options.data / "retrieval" / name)).first(options.queries)
        documents = [Document(one, collection.bodies[one], title) for one, title in collection.titles.items()][
            : options.documents
        ]
        kept = {one.source for one in documents}
        judgements = {query: grades for query, grades in collection.judgements.items() if kept & grades.keys()}
        for plan, lm in (("own", own), ("causal", own.with_encoder(replace(own.encoder, attention=CAUSAL)))):
            for way, chunking in ways(lm, [int(one) for one in options.tokens.split(",")]):
                scores = scored(lm, chunking, documents, collection.queries, judgements)
                rows.append({"set": name, "plan": plan, "way": way, **scores})
    columns = [
        Column("way", "chunks"), Column("set", "collection"), Column("plan", "plan"),
        Column("words", "words", "%", 1), Column("vectors", "vectors", "%", 1, "higher"),
        Column("fused", f"joined, weight {fusion.WEIGHT}", "%", 1, "higher"), Column("best", "best weight", "", 1),
        Column("tuned", "joined, best weight", "%", 1), Column("rrf", "reciprocal ranks", "%", 1),
    ]  # fmt: skip
    caption = "nDCG@10 of an index; the best weight is chosen on the very queries that are scored."
    return Table("quality", caption, columns, rows)


CAUSAL = gerund.AttentionPlan("causal")


def scored(
    lm: Any, chunking: Chunking, documents: Sequence[Document], queries: dict[str, str], judgements: dict[str, Any]
) -> Row:
    """Return the scores of one way."""
    import pytrec_eval

    evaluator = pytrec_eval.RelevanceEvaluator(judgements, {"ndcg_cut.10"})
    with tempfile.TemporaryDirectory() as folder:
        index = gerund.open_index(Path(folder) / "my.index", lm, chunking=chunking)
        index.add_documents(documents)
        ids = list(judgements)
        vectors_ND = index._demand_embedder().queries([queries[one] for one in ids])
        sides = {
            one: (
                {chunk.id: (chunk, score) for chunk, score in found_by_words(index.store, [queries[one]], 100, None)},
                {chunk.id: (chunk, score) for chunk, score in found_by_vectors(index.store, vector[None], 100, None)},
            )
            for one, vector in zip(ids, vectors_ND, strict=True)
        }  # fmt: skip

    def ndcg(join: Any) -> float:
        run = {}
        for query, (words, vectors) in sides.items():
            scores = join({id_: score for id_, (_, score) in words.items()}, {i: s for i, (_, s) in vectors.items()})
            best: dict[str, float] = {}
            for id_, score in scores.items():
                source = (words.get(id_) or vectors[id_])[0].source
                best[source] = max(score, best.get(source, -1.0))
            run[query] = best
        found = evaluator.evaluate(run)
        return 100 * float(np.mean([found[query]["ndcg_cut_10"] if run[query] else 0.0 for query in judgements]))

    by_weight = {weight: ndcg(lambda w, v, weight=weight: fusion.convex(w, v, weight)) for weight in WEIGHTS}
    best = max(by_weight, key=lambda weight: by_weight[weight])
    return {
        "words": ndcg(lambda words, _: words), "vectors": ndcg(lambda _, vectors: vectors),
        "fused": by_weight[fusion.WEIGHT], "best": best, "tuned": by_weight[best],
        "rrf": ndcg(lambda words, vectors: fusion.rrf([list(words), list(vectors)])),
    }  # fmt: skip


def making(options: Any) -> Table:
    """Time indexing, with the embedding of the same chunks by sentence-transformers as the peer."""
    import lancedb
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    texts = demo_texts(8 * options.making)
    documents = [Document(f"d{row}", " ".join(texts[8 * row : 8 * row + 8])) for row in range(options.making)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sizes = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 6}
        save(random_llama(**sizes, num_key_value_heads=6), folder / "model")
        lm = gerund.load(folder / "model", attention="causal", dtype="float32", max_length=512)
        body = Transformer(str(folder / "model"), max_seq_length=512)
        peer = SentenceTransformer(modules=[body, Pooling(384, "mean")], device="cpu")
        count = 0

        def ours(late: bool) -> list[str]:
            nonlocal count
            count += 1
            index = gerund.open_index(folder / f"{count}.index", lm, chunking=Chunking(late=late))
            index.add_documents(documents)
            return [one.text for one in index.store.chunks_of([document.source for document in documents])]

        chunks = ours(False)

        def theirs() -> None:
            nonlocal count
            count += 1
            vectors = peer.encode(chunks, normalize_embeddings=True)
            rows = [{"text": text, "vector": vector} for text, vector in zip(chunks, vectors, strict=True)]
            table = lancedb.connect(folder / f"{count}.lance").create_table("chunks", rows)
            table.create_index("text", config=lancedb.index.FTS())

        theirs()
        difference = harness.largest_difference(
            peer.encode(chunks[:32], normalize_embeddings=True), lm.encode(chunks[:32])
        )
        check = harness.require("largest difference of the vectors", difference, 1e-4)
        systems = {PEER: theirs, "gerund, early": lambda: ours(False), "gerund, late": lambda: ours(True)}
        rounds = harness.alternate(systems, options.rounds)
    caption = (
        f"Making an index of {len(documents)} documents ({len(chunks)} chunks of at most 64 tokens), a random 6-layer "
        "Llama of width 384; the peer is given the chunks, ours cuts them too."
    )
    return rounds.table("making", caption, base=PEER, checks=[check])


def asking(options: Any) -> Table:
    """Time queries to many chunks, and compare what is found with a comparison of every vector."""
    rows = []
    draw = np.random.default_rng(0)
    words = [f"word{number}" for number in range(5000)]
    for size in [int(one) for one in options.chunks.split(",")]:
        centres_CD = draw.normal(size=(100, options.width)).astype(np.float32)
        vectors_ND = centres_CD[draw.integers(100, size=size)]
        vectors_ND += draw.normal(size=(size, options.width)).astype(np.float32)
        vectors_ND /= np.linalg.norm(vectors_ND, axis=1, keepdims=True)
        with tempfile.TemporaryDirectory() as folder:
            store = LanceStore(Path(folder) / "my.index")
            store.create(About("fingerprint", "random", options.width, "", Chunking()))
            for first in range(0, size, 20_000):
                own = range(first, min(first + 20_000, size))
                texts = [" ".join(words[place] for place in draw.zipf(1.3, size=40) % 5000) for _ in own]
                chunks = [_chunk(row, text) for row, text in zip(own, texts, strict=True)]
                store.replace([one.source for one in chunks], chunks, vectors_ND[own.start : own.stop])
            begin = time.perf_counter()
            store.tidy()
            tidied = time.perf_counter() - begin
            queries_QD = vectors_ND[draw.integers(size, size=options.queries_timed)]
            queries_QD = queries_QD + 0.5 * draw.normal(size=queries_QD.shape).astype(np.float32) / options.width**0.5
            queries_QD /= np.linalg.norm(queries_QD, axis=1, keepdims=True)
            recall = np.mean([_recall(store, vectors_ND, query_D) for query_D in queries_QD])

            def by_words(store: LanceStore = store) -> None:
                for number in range(options.queries_timed):
                    store.words(Words(f"word{number % 50} word{number % 500} word{number}"), fusion.DEPTH)

            def by_vectors(store: LanceStore = store, queries_QD: np.ndarray = queries_QD) -> None:
                for query_D in queries_QD:
                    store.vectors(query_D, fusion.DEPTH)

            rounds = harness.alternate({"words": by_words, "vectors": by_vectors}, options.rounds)
        scale = 1000 / options.queries_timed
        for row in rounds.rows(scale=scale, chunks=size):
            found = {"recall": float(recall)} if row["system"] == "vectors" else {}
            rows.append({**row, **found, "tidied": tidied, "memory": harness.peak_memory()})
    columns = [
        Column("system", "search"), Column("chunks", "chunks"), Column("cpu", "processor time a query", "ms", 1),
        Column("wall", "wall time a query", "ms", 1), Column("recall", "recall@10", "", 3),
        Column("tidied", "putting into shape", "s", 1), Column("memory", "peak memory so far", "MiB", 0),
        Column("ratio", "ratio"),
    ]  # fmt: skip
    return Table(
        "asking",
        f"One query for 100 chunks, random vectors of {options.width} numbers around 100 centres.",
        columns,
        rows,
    )


def _chunk(row: int, text: str) -> Chunk:
    return Chunk(f"d{row}", 0, len(text), text, 0, 40, "", "", "", "")


def _recall(store: LanceStore, vectors_ND: np.ndarray, query_D: np.ndarray) -> float:
    wanted = {f"d{row}" for row in np.argsort(-(vectors_ND @ query_D))[:10]}
    return len(wanted & {chunk.source for chunk, _ in store.vectors(query_D, 10)}) / 10


def main(argv: list[str] | None = None) -> None:
    """Measure what is asked for."""
    parser = harness.parser(__doc__, rounds=5)
    parser.add_argument("--data", type=Path, help="a folder with retrieval/; without one `quality` is left out")
    parser.add_argument("--model", default="default", help="for `quality` (%(default)s)")
    parser.add_argument("--tables", default="quality,making,asking")
    parser.add_argument("--sets", default="medline,cranfield,cisi")
    parser.add_argument("--tokens", default="64,128", help="tokens of a chunk (%(default)s)")
    parser.add_argument("--documents", type=int, help="at most so many of a collection")
    parser.add_argument("--queries", type=int, help="at most so many of a collection")
    parser.add_argument("--making", type=int, default=500, help="documents that are indexed (%(default)s)")
    parser.add_argument("--chunks", default="10000,100000", help="sizes of the index that is asked (%(default)s)")
    parser.add_argument("--width", type=int, default=256, help="numbers in a vector that is asked for (%(default)s)")
    parser.add_argument("--queries-timed", type=int, default=50)
    small = {"sets": "medline", "tokens": "64", "documents": 20, "queries": 5, "making": 6, "chunks": "300"}
    options = harness.parse(parser, argv, quick={**small, "queries_timed": 3, "width": 16})
    torch.set_num_threads(options.threads)
    makers = {"quality": quality, "making": making, "asking": asking}
    wanted = [name for name in options.tables.split(",") if name != "quality" or options.data is not None]
    tables = [makers[name](options) for name in wanted]
    harness.report(options, __file__, tables, libraries=("lancedb", "sentence-transformers"))


if __name__ == "__main__":
    main()
