"""Hybrid search: rank chunks by BM25 and by vectors, fuse the two rankings, and re-rank the hits.

The default fusion is a convex sum (Bruch, Gai and Ingber, "An Analysis of Fusion Functions for Hybrid Retrieval",
2023): BM25 scores are divided by the top score, cosines are unchanged, and the vectors have the weight ``weight``, BM25
the rest. Cosines are not stretched to 0 to 1 per query, as is often done: where an encoder finds all documents about
equally near, it has little to say and must not outvote BM25. Reciprocal rank fusion, which uses ranks only, weights
both equally.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar, get_args

import numpy as np

from gerund.checks import check_unicode, demand_number
from gerund.errors import ConfigError, TextError
from gerund.retrieval.store import KeywordQuery, Match, VectorStore, one_of_sources
from gerund.settings.ranking import SecondStage
from gerund.types import Hit, Hits, Ranking, RerankCost

Mode = Literal["hybrid", "words", "vectors"]
MODES: tuple[Mode, ...] = get_args(Mode)

DEPTH = 100
"""Matches of each ranking that are fused."""

# Cormack, Clarke and Buettcher 2009, who found it near the best for all of their collections.
RRF_K = 60
# Chunks of the vector matches' documents in which a phrase is searched.
_PHRASE_DEPTH = 100_000

Document = TypeVar("Document", bound=Hashable)


def check_weight(weight: float) -> float:
    """Return a weight of the vectors, from 0 to 1."""
    demand_number("the weight", weight)
    if not 0 <= weight <= 1:
        raise ConfigError(f"the weight {weight} is not a number from 0 (words alone) to 1 (vectors alone)")
    return float(weight)


def check_query(query: Any, name: str = "query") -> None:
    """Refuse an empty query; ``name`` is its name in messages."""
    if not isinstance(query, str):
        raise TextError(f"a {name} must be a string, got {query!r}")
    check_unicode(f"the {name}", query)
    if not query.strip():
        raise TextError(f"the {name} is empty")


def convex(words: Mapping[Document, float], vectors: Mapping[Document, float], weight: float) -> dict[Document, float]:
    """Fuse by a convex sum of cosines and BM25 scores, divided by the top score; a missing score counts as 0.

    >>> convex({"a": 8.0, "b": 2.0}, {"b": 0.75, "c": 0.5, "a": 0.25}, 0.5)
    {'a': 0.625, 'b': 0.5, 'c': 0.25}
    """
    best = max(words.values(), default=0.0) or 1.0
    scores = {
        document: (1 - weight) * words.get(document, 0.0) / best + weight * vectors.get(document, 0.0)
        for document in dict.fromkeys((*words, *vectors))
    }
    return _best_first(scores)


def rrf(rankings: Sequence[Sequence[Document]], k: int = RRF_K) -> dict[Document, float]:
    """Fuse rankings, best first, by reciprocal rank fusion (Cormack et al. 2009): the sum of 1 / (60 + rank).

    Ties keep the order in which the documents occur, reading the rankings one after the other.

    >>> rrf([["a", "b"], ["b", "c"]]) == {"b": 1 / 62 + 1 / 61, "a": 1 / 61, "c": 1 / 62}
    True
    """
    scores: dict[Document, float] = {}
    for ranking in rankings:
        for rank, document in enumerate(ranking, start=1):
            scores[document] = scores.get(document, 0.0) + 1 / (k + rank)
    return _best_first(scores)


def _best_first(scores: Mapping[Document, float]) -> dict[Document, float]:
    return dict(sorted(scores.items(), key=lambda item: -item[1]))


def rankings(
    store: VectorStore, queries: Sequence[str], query_ND: np.ndarray | None, mode: Mode, limit: int, where: str | None
) -> tuple[list[Match], list[Match]]:
    """Return the matches of BM25 and of the vectors, as a mode needs them.

    ``queries`` has the query, then its expansions, and ``query_ND`` their vectors; None for BM25 only. Phrases are
    taken from the query only. The vectors' query is the mean of ``query_ND``.
    """
    if query_ND is None or mode == "words":
        return store.words(_keywords(queries), limit, where), []
    if mode == "vectors":
        return [], _vector_matches(store, query_ND, limit, where)
    return hybrid_rankings(store, queries, query_ND, limit, where)


def hybrid_rankings(
    store: VectorStore, queries: Sequence[str], query_ND: np.ndarray, limit: int, where: str | None
) -> tuple[list[Match], list[Match]]:
    """Return the matches of BM25 and of the vectors for fusion; the latter include every match of BM25."""
    vectors = with_phrases(store, queries[0], _vector_matches(store, query_ND, limit, where), where)
    if not vectors:
        return store.words(_keywords(queries), limit, where), []
    words, cosines = store.words_with_cosines(_keywords(queries), _mean(query_ND), limit, where)
    ids = {chunk.id for chunk, _ in vectors}
    vectors += [(chunk, cosine) for (chunk, _), cosine in zip(words, cosines, strict=True) if chunk.id not in ids]
    return words, sorted(vectors, key=lambda match: -match[1])


def _vector_matches(store: VectorStore, query_ND: np.ndarray, limit: int, where: str | None) -> list[Match]:
    vector_D = _mean(query_ND)
    return store.vectors(vector_D, limit, where) if vector_D.any() else []


def _keywords(queries: Sequence[str]) -> KeywordQuery:
    keywords = KeywordQuery.of(queries[0])
    return KeywordQuery(" ".join([keywords.text, *queries[1:]]).strip(), keywords.phrases)


def _mean(query_ND: np.ndarray) -> np.ndarray:
    """Return the mean of vectors, of length 1; zeros where it is zero."""
    vector_D: np.ndarray = query_ND.mean(axis=0)
    length = float(np.linalg.norm(vector_D))
    return vector_D / length if length > 0 else np.zeros_like(vector_D)


def with_phrases(store: VectorStore, query: str, matches: list[Match], where: str | None) -> list[Match]:
    """Return the vector matches that contain the query's phrases, as BM25 reads them; all for a query without one."""
    phrases = tuple(phrase for phrase in KeywordQuery.of(query).phrases if any(map(str.isalnum, phrase)))
    if not phrases or not matches:
        return matches
    of_matches = one_of_sources(list(dict.fromkeys(chunk.source for chunk, _ in matches)))
    condition = of_matches if where is None else f"({where}) AND {of_matches}"
    ids = {chunk.id for chunk, _ in store.words(KeywordQuery("", phrases), _PHRASE_DEPTH, condition)}
    return [match for match in matches if match[0].id in ids]


def to_hits(words: Sequence[Match], vectors: Sequence[Match], mode: Mode, weight: float) -> list[Hit]:
    """Return matches as hits, best first; ``weight`` is that of the vectors in ``hybrid``."""
    chunks = {chunk.id: chunk for chunk, _ in (*words, *vectors)}
    by_words = {chunk.id: score for chunk, score in words}
    by_vectors = {chunk.id: score for chunk, score in vectors}
    if mode == "hybrid":
        scores = convex(by_words, by_vectors, weight)
    else:
        scores = by_words if mode == "words" else by_vectors
    return [
        Hit(
            source=chunks[key].source,
            start=chunks[key].start,
            end=chunks[key].end,
            text=chunks[key].text,
            score=score,
            rank=rank,
            title=chunks[key].title,
            heading=chunks[key].heading,
            words=by_words.get(key),
            similarity=by_vectors.get(key),
        )
        for rank, (key, score) in enumerate(scores.items(), start=1)
    ]


Rank = Callable[..., Ranking]
"""Ranks hits for a query: called with both and the keywords of ``rerank`` for a first stage."""


def reranked(query: str, hits: Sequence[Hit], rank: Rank, second: SecondStage) -> Hits:
    """Re-rank the first hits, with their scores, which stay; ``relevance`` is the new score."""
    first, rest = hits[: second.rerank], hits[second.rerank :]
    if not first:
        return Hits(hits)
    ranking = rank(
        query,
        first,
        scores=[hit.score for hit in first],
        weight=second.rerank_weight,
        depth=len(first),
        deadline=second.rerank_deadline,
    )
    read = ranking.read or 0
    ordered = [
        replace(first[index], relevance=score if place < read else None) for place, (index, score) in enumerate(ranking)
    ]
    whole = (replace(hit, rank=rank) for rank, hit in enumerate([*ordered, *rest], start=1))
    return Hits(whole, RerankCost.of(ranking, len(first)))
