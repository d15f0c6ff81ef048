"""Searches by the states of a running conversation beside searches by an encoded query: nDCG@10 and processor time.

    python benchmarks/query_head.py --data ../shared/data [--model default] [--collections medline cranfield]

Documents are all relevant ones of the sampled queries and random others, in chunks of 128 tokens; a document's score is
that of its best chunk: by vectors alone, and joined with BM25's as `ask` does it, which searches both turns' words
where the conversation's states search. Conversations of two turns are made from queries: the first turn has the first
half of the words, and the second turn the rest, with an answer that says nothing in between.
"""

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import gerund
import harness
from gerund.evaluation.data_files import collection_files, read_collection
from gerund.retrieval.hybrid_search import rankings, to_hits
from gerund.retrieval.query_head import ConversationReader
from gerund.retrieval.question_answering import Question
from results import Column, Row, Table

DEPTH = 10
ANSWER = "I see."
FEWEST_WORDS = 8


@dataclass
class Sample:
    """Queries with their judgements, and an index of the sampled documents."""

    queries: dict[str, str]
    judgements: Mapping[str, Mapping[str, int]]
    index: gerund.Index


def sampled(folder: Path, lm: Any, queries: int, documents: int) -> Sample:
    """Return a sample of a collection."""
    collection, chance = read_collection(collection_files(folder)), random.Random(0)
    judged = {query: {one: grade for one, grade in grades.items() if grade > 0}
              for query, grades in collection.judgements.items()}  # fmt: skip
    chosen = sorted(query for query in collection.queries if judged.get(query))
    chosen = sorted(chance.sample(chosen, min(queries, len(chosen))))
    relevant = {one for query in chosen for one in judged[query]}
    others = sorted(one for one in collection.documents if one not in relevant)
    kept = sorted(relevant) + chance.sample(others, max(0, min(len(others), documents - len(relevant))))
    index = gerund.open_index(None, lm)
    index.add_documents([gerund.Document(one, collection.documents[one]) for one in kept if collection.documents[one]])
    return Sample({query: collection.queries[query] for query in chosen}, judged, index)


def ndcgs(sample: Sample, query: str, vector_D: np.ndarray, text: str) -> tuple[float, float]:
    """Return the nDCG@10 of one query's vector alone, and joined with BM25 by the words of a text."""
    store, limit = sample.index.store, len(sample.index)
    alone = dict.fromkeys(chunk.source for chunk, _ in store.vectors(vector_D, limit))
    matches = rankings(store, [text], vector_D[None], "hybrid", limit, None)
    joined = dict.fromkeys(hit.source for hit in to_hits(*matches, "hybrid", sample.index.encoder.fusion_weight))
    return gain(sample.judgements[query], list(alone)), gain(sample.judgements[query], list(joined))


def gain(grades: Mapping[str, int], found: list[str]) -> float:
    """Return the nDCG@10 of a ranking."""
    gains = [grades.get(source, 0) for source in found[:DEPTH]]
    best = sorted(grades.values(), reverse=True)[:DEPTH]

    def total(values: list[int]) -> float:
        return sum(value / np.log2(place + 2) for place, value in enumerate(values))

    return total(gains) / total(best)


def row(
    sample: Sample,
    name: str,
    asked: str,
    by: str,
    vector_of: Callable[[str], np.ndarray],
    texts: Mapping[str, str],
    words_of: Callable[[str], str] = str,
) -> Row:
    """Return the mean nDCG@10 of some queries, by one way to make their vectors and to choose their words."""
    start = time.process_time()
    vectors = {query: vector_of(text) for query, text in texts.items()}
    spent = time.process_time() - start
    values = [ndcgs(sample, query, vector, words_of(texts[query])) for query, vector in vectors.items()]
    alone, joined = (float(np.mean(column)) for column in zip(*values, strict=True))
    return {"by": by, "collection": name, "asked": asked, "queries": len(values), "ndcg": alone, "joined": joined,
            "ms": 1000 * spent / len(values)}  # fmt: skip


def rows_of(sample: Sample, name: str, sentences: int, two_turns: int) -> list[Row]:
    """Return the rows of a collection."""
    index = sample.index
    start = time.process_time()
    head = index.fit_query_head(sentences)
    fitted = time.process_time() - start
    reader, encode = ConversationReader(index.lm, head), index._require_embedder().queries

    def encoded(text: str) -> np.ndarray:
        return encode([text])[0]

    def by_states(text: str) -> np.ndarray:
        return reader.vector(Question.of(text, DEPTH, {"chat": True}))

    def in_two_turns(text: str) -> np.ndarray:
        first, last = halves(text)
        by_states(first)
        history = [{"role": "user", "content": first}, {"role": "assistant", "content": ANSWER}]
        return reader.vector(Question.of(last, DEPTH, {"chat": True, "history": history}))

    whole, chance = sample.queries, random.Random(1)
    long = sorted(query for query, text in whole.items() if len(text.split()) >= FEWEST_WORDS)
    split = {query: whole[query] for query in sorted(chance.sample(long, min(two_turns, len(long))))}
    rows = [
        row(sample, name, "the query", "the encoder", encoded, whole),
        row(sample, name, "the query", "the states", by_states, whole),
        row(
            sample,
            name,
            "two turns",
            "the encoder: the last turn",
            lambda text: encoded(last_turn(text)),
            split,
            last_turn,
        ),
        row(sample, name, "two turns", "the encoder: both turns joined", encoded, split),
        row(sample, name, "two turns", "the states", in_two_turns, split),
    ]
    reference = {"the query": rows[0], "two turns": rows[2]}
    # What is read for the states is read for the answer anyway; the search itself costs the product with the head.
    states, start = reader._states, time.process_time()
    for _ in range(100):
        head.vector(states)
    product = 10 * (time.process_time() - start)
    return [
        {
            **one, "ratio": one["ndcg"] / reference[one["asked"]]["ndcg"],
            "joined_ratio": one["joined"] / reference[one["asked"]]["joined"], "fit": fitted,
            "documents": len(index.sources()), **({"ms": product} if one["by"] == "the states" else {}),
        }
        for one in rows
    ]  # fmt: skip


def halves(text: str) -> tuple[str, str]:
    """Return the first half of a text's words, and the rest."""
    words = text.split()
    return " ".join(words[: len(words) // 2]), " ".join(words[len(words) // 2 :])


def last_turn(text: str) -> str:
    """Return the last half of a text's words."""
    return halves(text)[1]


def main(argv: list[str] | None = None) -> None:
    """Run the comparison."""
    parser = harness.parser(__doc__, rounds=1)
    parser.add_argument("--data", type=Path, required=True, help="the folder that holds retrieval/")
    parser.add_argument("--model", default="default", help="a folder or hub id; the bundled model")
    parser.add_argument("--collections", nargs="+", default=["medline", "cranfield"])
    parser.add_argument("--queries", type=int, default=60, help="of a collection at most (%(default)s)")
    parser.add_argument("--documents", type=int, default=500, help="of a collection at least (%(default)s)")
    parser.add_argument("--sentences", type=int, default=3000, help="that the head is fitted on (%(default)s)")
    parser.add_argument("--two-turns", type=int, default=25, help="conversations of a collection (%(default)s)")
    quick = {"collections": ["medline"], "queries": 3, "documents": 10, "sentences": 30, "two_turns": 2}
    options = harness.parse(parser, argv, quick=quick)
    lm = gerund.load(options.model)
    rows: list[Row] = []
    for name in options.collections:
        sample = sampled(options.data / "retrieval" / name, lm, options.queries, options.documents)
        rows += rows_of(sample, name, options.sentences, options.two_turns)
    columns = [
        Column("by", "the vector is by"), Column("collection", "collection"), Column("asked", "asked"),
        Column("queries", "queries", "", 0), Column("documents", "documents", "", 0),
        Column("ndcg", "nDCG@10", "", 3, "higher"), Column("ratio", "to the first row of its kind", "", 3, "higher"),
        Column("joined", "joined with BM25", "", 3, "higher"),
        Column("joined_ratio", "to the first row of its kind", "", 3, "higher"),
        Column("ms", "processor time a search, beside the reading", "ms", 2),
        Column("fit", "processor time of the fit", "s", 0),
    ]  # fmt: skip
    caption = f"Searches by a conversation's own states, {Path(options.model).name} (goal: 0.97 of the encoder)."
    harness.report(options, __file__, [Table("query_head", caption, columns, rows)])


if __name__ == "__main__":
    main()
