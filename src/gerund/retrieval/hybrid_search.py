"""One query's two rankings: asked of a store, joined into hits, put into a scorer's order.

Knows: stores, fusion, hits. Does not know: how a query becomes a vector, files.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

import numpy as np

from gerund.checks import check_unicode, demand_number, one_of
from gerund.errors import ConfigError, TextError
from gerund.retrieval.store import KeywordQuery, Match, VectorStore, one_of_sources
from gerund.types import Hit

if TYPE_CHECKING:
    from gerund.language_model import LanguageModel


FusionMethod = Literal["convex", "rrf"]
METHODS: tuple[FusionMethod, ...] = get_args(FusionMethod)

DEPTH = 100
"""How many of each ranking are joined."""

WEIGHT = 0.5
"""What the vectors of an encoder count that nobody has tuned."""

# Cormack, Clarke and Buettcher 2009, who found it near the best for all of their collections.
RRF_K = 60

Document = TypeVar("Document", bound=Hashable)


def check_weight(weight: float) -> float:
    """Return a weight of the vectors.

    Raises:
        ConfigError: it is no number from 0 to 1.
    """
    demand_number("the weight", weight)
    if not 0 <= weight <= 1:
        raise ConfigError(f"the weight {weight} is not a number from 0 (words alone) to 1 (vectors alone)")
    return float(weight)


def fuse(
    words: Mapping[Document, float],
    vectors: Mapping[Document, float],
    *,
    method: str = "convex",
    weight: float = WEIGHT,
) -> dict[Document, float]:
    """Join the scores that words and vectors give documents.

    Args:
        words: BM25's scores of what the words found, each above 0, best first.
        vectors: cosines of what the vectors found, best first; best of what the words found too.
        method: ``convex`` or ``rrf``.
        weight: what the vectors count in a convex sum, from 0 to 1.

    Returns:
        The score of every document of either, best first; of equals the one that was met first.

    Raises:
        ConfigError: there is no such method, or no such weight.
    """
    one_of("fusion", method, METHODS)
    return convex(words, vectors, check_weight(weight)) if method == "convex" else rrf([list(words), list(vectors)])


def convex(
    words: Mapping[Document, float], vectors: Mapping[Document, float], weight: float = WEIGHT
) -> dict[Document, float]:
    """Join scores by a convex sum of cosines and of BM25's part of the best; what a side lacks has 0 from it.

    >>> convex({"a": 8.0, "b": 2.0}, {"b": 0.75, "c": 0.5, "a": 0.25}, 0.5)
    {'a': 0.625, 'b': 0.5, 'c': 0.25}
    """
    best = max(words.values(), default=0.0) or 1.0
    scores = {
        document: (1 - weight) * words.get(document, 0.0) / best + weight * vectors.get(document, 0.0)
        for document in (*words, *(one for one in vectors if one not in words))
    }
    return _best_first(scores)


def rrf(rankings: Sequence[Sequence[Document]], k: int = RRF_K) -> dict[Document, float]:
    """Join rankings by reciprocal rank fusion (Cormack et al. 2009): the sum of 1 / (60 + place).

    Args:
        rankings: documents, best first. One that a ranking lacks has nothing from it.
        k: what is added to each place.

    Returns:
        The score of every document of any ranking, best first; of equals the one that was met first, reading the
        rankings one after the other.

    >>> rrf([["a", "b"], ["b", "c"]]) == {"b": 1 / 62 + 1 / 61, "a": 1 / 61, "c": 1 / 62}
    True
    """
    scores: dict[Document, float] = {}
    for ranking in rankings:
        for place, document in enumerate(ranking, start=1):
            scores[document] = scores.get(document, 0.0) + 1 / (k + place)
    return _best_first(scores)


def _best_first(scores: Mapping[Document, float]) -> dict[Document, float]:
    return dict(sorted(scores.items(), key=lambda item: -item[1]))


Mode = Literal["hybrid", "words", "vectors"]
MODES: tuple[Mode, ...] = get_args(Mode)

RERANK_BY = "likelihood"
"""The default measure of relevance for re-ranking hits."""

# Chunks of the documents found by vectors in which a phrase is looked for.
_MOST_WITH_PHRASE = 100_000


def check_query(query: Any, what: str = "query") -> None:
    """Refuse what is no query.

    Args:
        query: it.
        what: what messages call it.

    Raises:
        TextError: it is empty, or no text.
    """
    if not isinstance(query, str):
        raise TextError(f"a {what} is a text, not {query!r}")
    check_unicode(f"the {what}", query)
    if not query.strip():
        raise TextError(f"the {what} is empty")


def sides(
    store: VectorStore,
    asked: Sequence[str],
    asked_ND: np.ndarray | None,
    mode: Mode,
    limit: int,
    where: str | None,
) -> tuple[list[Match], list[Match]]:
    """Return what words find and what vectors find, as far as a mode asks for it, to be joined.

    Args:
        store: where the chunks are.
        asked: the query, and other ways to ask it; phrases are the query's alone.
        asked_ND: a vector of each; None for words alone.
        mode: what is asked.
        limit: how many at most of either.
        where: a filter.
    """
    if asked_ND is None or mode == "words":
        return _found_by_words(store, asked, limit, where), []
    if mode == "vectors":
        return [], _found_by_vectors(store, asked_ND, limit, where)
    return found_by_both(store, asked, asked_ND, limit, where)


def _found_by_words(store: VectorStore, asked: Sequence[str], limit: int, where: str | None) -> list[Match]:
    """Return what BM25 finds for a query and other ways to ask it; phrases are the query's alone.

    Args:
        store: where the chunks are.
        asked: the query, and the other ways.
        limit: how many at most.
        where: a filter.
    """
    return store.words(_words_of(asked), limit, where)


def _found_by_vectors(store: VectorStore, asked_ND: np.ndarray, limit: int, where: str | None) -> list[Match]:
    """Return the chunks that are nearest to the mean of vectors; none where that is zero.

    Args:
        store: where the chunks are.
        asked_ND: the vector of a query, and of other ways to ask it.
        limit: how many at most.
        where: a filter.
    """
    vector_D = _mean_of(asked_ND)
    return store.vectors(vector_D, limit, where) if vector_D.any() else []


def found_by_both(
    store: VectorStore, asked: Sequence[str], asked_ND: np.ndarray, limit: int, where: str | None
) -> tuple[list[Match], list[Match]]:
    """Return what words find and what vectors find, both to be joined: among the latter, what words found stands too.

    Args:
        store: where the chunks are.
        asked: the query, and other ways to ask it; phrases are the query's alone.
        asked_ND: a vector of each.
        limit: how many at most of either.
        where: a filter.
    """
    vectors = with_phrases(store, asked[0], _found_by_vectors(store, asked_ND, limit, where), where)
    if not vectors:
        return _found_by_words(store, asked, limit, where), []
    words, cosines = store.words_with_cosines(_words_of(asked), _mean_of(asked_ND), limit, where)
    known = {chunk.id for chunk, _ in vectors}
    vectors += [(chunk, own) for (chunk, _), own in zip(words, cosines, strict=True) if chunk.id not in known]
    return words, sorted(vectors, key=lambda found: -found[1])


def _words_of(asked: Sequence[str]) -> KeywordQuery:
    own = KeywordQuery.of(asked[0])
    return KeywordQuery(" ".join([own.text, *asked[1:]]).strip(), own.phrases)


def _mean_of(asked_ND: np.ndarray) -> np.ndarray:
    """Return the mean of vectors, of length 1; zeros where it is zero."""
    vector_D: np.ndarray = asked_ND.mean(axis=0)
    length = float(np.linalg.norm(vector_D))
    return vector_D / length if length > 0 else np.zeros_like(vector_D)


def with_phrases(store: VectorStore, query: str, found: list[Match], where: str | None) -> list[Match]:
    """Return those of the chunks that vectors found in which the query's phrases stand, as BM25 reads them.

    Args:
        store: where the chunks are.
        query: it; without a phrase all chunks stay.
        found: the chunks.
        where: the filter by which they were found.
    """
    phrases = tuple(one for one in KeywordQuery.of(query).phrases if any(letter.isalnum() for letter in one))
    if not phrases or not found:
        return found
    there = one_of_sources(list(dict.fromkeys(chunk.source for chunk, _ in found)))
    condition = there if where is None else f"({where}) AND {there}"
    kept = {chunk.id for chunk, _ in store.words(KeywordQuery("", phrases), _MOST_WITH_PHRASE, condition)}
    return [one for one in found if one[0].id in kept]


def joined(words: Sequence[Match], vectors: Sequence[Match], mode: Mode, weight: float) -> list[Hit]:
    """Return what was found as hits, best first.

    Args:
        words: what BM25 found, best first.
        vectors: what the vectors found, best first.
        mode: whose scores count.
        weight: what the vectors count in ``hybrid``.
    """
    chunks = {chunk.id: chunk for chunk, _ in (*words, *vectors)}
    by_words = {chunk.id: score for chunk, score in words}
    by_vectors = {chunk.id: score for chunk, score in vectors}
    scores = {
        "words": lambda: by_words,
        "vectors": lambda: by_vectors,
        "hybrid": lambda: convex(by_words, by_vectors, weight),
    }[mode]()
    return [
        Hit(
            source=chunks[one].source,
            start=chunks[one].start,
            end=chunks[one].end,
            text=chunks[one].text,
            score=score,
            rank=rank,
            title=chunks[one].title,
            heading=chunks[one].heading,
            words=by_words.get(one),
            similarity=by_vectors.get(one),
        )
        for rank, (one, score) in enumerate(scores.items(), start=1)
    ]


def reranked(query: str, hits: Sequence[Hit], count: int, lm: "LanguageModel", by: str) -> list[Hit]:
    """Put the first hits into an order of the model's own; their scores stay, and ``relevance`` is the new one.

    Args:
        query: what is sought.
        hits: what was found, best first.
        count: how many of the first get another order.
        lm: the model.
        by: the measure of ``lm.rerank``.

    Raises:
        ConfigError: the model has no such measure.
    """
    first, rest = hits[:count], hits[count:]
    found = lm.rerank(query, [one.text for one in first], by=by)  # type: ignore[arg-type]
    scored = zip(found.indices, found.scores, strict=True)
    listed = [*(replace(first[place], relevance=score) for place, score in scored), *rest]
    return [replace(one, rank=rank) for rank, one in enumerate(listed, start=1)]
