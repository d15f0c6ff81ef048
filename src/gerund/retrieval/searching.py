"""One query's two rankings: asked of a store, joined into hits, put into a scorer's order.

Knows: stores, fusion, hits. Does not know: how a query becomes a vector, files.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from gerund.checks import check_unicode
from gerund.errors import TextError
from gerund.retrieval import fusion
from gerund.retrieval.store import Found, VectorStore, Words, one_of_sources
from gerund.types import Hit

if TYPE_CHECKING:
    from gerund.language_model import LanguageModel

Mode = Literal["hybrid", "words", "vectors"]
MODES: tuple[Mode, ...] = get_args(Mode)

MEASURES = ("likelihood", "own", "vectors")
"""By which a new order may be made, as in ``lm.rerank``; the first where nothing is said."""
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
) -> tuple[list[Found], list[Found]]:
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


def _found_by_words(store: VectorStore, asked: Sequence[str], limit: int, where: str | None) -> list[Found]:
    """Return what BM25 finds for a query and other ways to ask it; phrases are the query's alone.

    Args:
        store: where the chunks are.
        asked: the query, and the other ways.
        limit: how many at most.
        where: a filter.
    """
    return store.words(_words_of(asked), limit, where)


def _found_by_vectors(store: VectorStore, asked_ND: np.ndarray, limit: int, where: str | None) -> list[Found]:
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
) -> tuple[list[Found], list[Found]]:
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


def _words_of(asked: Sequence[str]) -> Words:
    own = Words.of(asked[0])
    return Words(" ".join([own.text, *asked[1:]]).strip(), own.phrases)


def _mean_of(asked_ND: np.ndarray) -> np.ndarray:
    """Return the mean of vectors, of length 1; zeros where it is zero."""
    vector_D: np.ndarray = asked_ND.mean(axis=0)
    length = float(np.linalg.norm(vector_D))
    return vector_D / length if length > 0 else np.zeros_like(vector_D)


def with_phrases(store: VectorStore, query: str, found: list[Found], where: str | None) -> list[Found]:
    """Return those of the chunks that vectors found in which the query's phrases stand, as BM25 reads them.

    Args:
        store: where the chunks are.
        query: it; without a phrase all chunks stay.
        found: the chunks.
        where: the filter by which they were found.
    """
    phrases = tuple(one for one in Words.of(query).phrases if any(letter.isalnum() for letter in one))
    if not phrases or not found:
        return found
    there = one_of_sources(list(dict.fromkeys(chunk.source for chunk, _ in found)))
    condition = there if where is None else f"({where}) AND {there}"
    kept = {chunk.id for chunk, _ in store.words(Words("", phrases), _MOST_WITH_PHRASE, condition)}
    return [one for one in found if one[0].id in kept]


def joined(words: Sequence[Found], vectors: Sequence[Found], mode: Mode, weight: float) -> list[Hit]:
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
        "hybrid": lambda: fusion.convex(by_words, by_vectors, weight),
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
