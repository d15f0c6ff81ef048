"""Finding the right text among many candidates: scores of all of them, and where the right one stands.

Knows: contenders, scorers, ranks. Does not know: files, what the texts are.
"""

from collections.abc import Sequence

import numpy as np

from gerund.evaluation.contender import Contender
from gerund.evaluation.hybrid import Hybrid, fused_scores
from gerund.types import Scorer

DEPTHS = (1, 3, 5, 10, 50)


def scores_of(
    contender: Contender, scorer: Scorer | None, queries: Sequence[str], candidates: Sequence[str], prompt: str | None
) -> np.ndarray:
    """Return how well each candidate follows each query, ``(queries, candidates)`` float64.

    By the scorer; without one by BM25 where that is the contender, else by the cosine of the encoder's vectors. A
    hybrid joins what its model and BM25 rank.

    Args:
        contender: who is measured.
        scorer: scores continuations, or None.
        queries: texts.
        candidates: texts, the same for all queries.
        prompt: for the queries, where vectors are compared.
    """
    if isinstance(contender, Hybrid):
        dense_NM = scores_of(contender.dense, scorer, queries, candidates, prompt)
        return np.array([fused_scores(*pair) for pair in zip(dense_NM, _by_words(queries, candidates), strict=True)])
    if contender.is_bm25:
        return _by_words(queries, candidates)
    if scorer is not None:
        texts = [f" {one}" for one in candidates]
        return np.array(scorer.score(queries, [texts for _ in queries]), dtype=np.float64)
    query_ND = contender.encode(queries, prompt=prompt, normalize=True, show=False)
    candidate_MD = contender.encode(candidates, normalize=True, show=False)
    return query_ND.astype(np.float64) @ candidate_MD.astype(np.float64).T


def _by_words(queries: Sequence[str], candidates: Sequence[str]) -> np.ndarray:
    """Return BM25's scores ``(queries, candidates)``."""
    from gerund.evaluation.bm25 import BM25Index

    index = BM25Index(candidates)
    return np.array([index.scores(query) for query in queries], dtype=np.float64)


def rank_of(scores: np.ndarray, right: int) -> int:
    """Return the place of the right candidate, from 1 on; others that score the same stand before it.

    >>> rank_of(np.array([0.5, 0.9, 0.5]), 0)
    3
    """
    return int(np.count_nonzero(scores >= scores[right]))


def recalls(ranks: Sequence[int]) -> dict[str, float]:
    """Return the share of queries whose right candidate is among the first, and the mean of one over its place.

    >>> recalls([1, 4])["recall_at_3"], recalls([1, 4])["mrr"]
    (0.5, 0.625)
    """
    found = np.array(ranks, dtype=np.float64)
    return {
        **{f"recall_at_{depth}": float(np.mean(found <= depth)) for depth in DEPTHS},
        "mrr": float(np.mean(1 / found)),
    }
