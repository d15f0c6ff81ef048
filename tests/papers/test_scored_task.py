"""Ranks and recalls of the right one among many."""

import numpy as np
import pytest

import gerund
from gerund.evaluation.systems.language_model import language_model_system
from gerund.evaluation.systems.search import BM25System
from gerund.papers.rankgen_suffixes import rank_of, recalls
from gerund.scoring.word_overlap import OverlapScorer

QUERIES = ["the cat in the rain", "an inn"]
TEXTS = ["a cat", "an inn in the rain", "the end"]


def test_ranks_are_those_of_sorting():
    rng = np.random.default_rng(0)
    for _ in range(50):
        scores = rng.permutation(20).astype(float)
        right = int(rng.integers(20))
        assert rank_of(scores, right) == sorted(scores, reverse=True).index(scores[right]) + 1
    assert rank_of(np.zeros(4), 2) == 4


def test_recalls():
    found = recalls([1, 2, 7, 60])
    assert [found[f"recall_at_{depth}"] for depth in (1, 3, 5, 10, 50)] == [0.25, 0.5, 0.5, 0.75, 0.75]
    assert found["mrr"] == pytest.approx((1 + 1 / 2 + 1 / 7 + 1 / 60) / 4)


def test_scores_by_scorer_by_vectors_and_by_bm25(tiny_folder):
    one = language_model_system("tiny", gerund.load(tiny_folder))
    own = OverlapScorer()
    np.testing.assert_allclose(
        one.candidate_scores(QUERIES, TEXTS, scorer=own, prompt=None), own.score(QUERIES, [TEXTS, TEXTS])
    )
    vectors = one.lm.encode(TEXTS, normalize=True) @ one.lm.encode(QUERIES, normalize=True).T
    np.testing.assert_allclose(one.candidate_scores(QUERIES, TEXTS, scorer=None, prompt=None), vectors.T, atol=1e-5)
    pytest.importorskip("bm25s")
    found = BM25System().candidate_scores(QUERIES, TEXTS)
    assert found.shape == (2, 3)
    assert found[1].argmax() == 1
