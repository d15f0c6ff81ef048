"""Both fusions against their formulas, under MTEB's search protocol and as a system."""

import numpy as np
import pytest

import gerund
from gerund.errors import ConfigError
from gerund.evaluation.run import evaluate, key_of
from gerund.evaluation.systems.base import EmbeddingCache, Encodes, Ranks, ScoresCandidates
from gerund.evaluation.systems.language_model import CausalModelSystem, language_model_system, precompute
from gerund.evaluation.systems.search import (
    BM25Index,
    BM25System,
    Fusion,
    HybridSystem,
    fused,
    fused_scores,
    parse_fusion,
)
from gerund.evaluation.systems.selection import systems_of
from gerund.evaluation.task import EvaluationConfig
from gerund.evaluation.tasks.retrieval import Reranking, Retrieval
from gerund.text_analysis import VERSION
from tests.evaluation.tables import random_table, write_collection, write_pairs
from tests.evaluation.tasks import trec
from tests.evaluation.toys import ToyTask

WORDS = ("cow", "pig", "ant", "bug", "dog", "cat")
DOCUMENTS = {f"d{n:02}": f"{WORDS[n % 6]} {WORDS[n % 5]} {WORDS[n // 6]} {n}" for n in range(30)} | {"e": "nothing"}
QUERIES = {"q1": "cow dog", "q2": "ant", "q3": "bird"}
JUDGED = [("q1", "d04", 2), ("q1", "d10", 1), ("q2", "d02", 1), ("q2", "d20", 1), ("q3", "d05", 1), ("q3", "e", 1)]


RRF, CONVEX = Fusion("rrf"), Fusion(weight=0.4)


def by_reciprocal_rank(dense, lexical):
    rankings = [sorted(side, key=lambda one, side=side: -side[one]) for side in (dense, lexical)]
    found: dict[str, float] = {}
    for ranking in rankings:
        for document in ranking:
            found.setdefault(document, sum(1 / (60 + own.index(document) + 1) for own in rankings if document in own))
    return found


def by_convex_sum(dense, lexical, weight=0.4):
    """Join scores document by document, as the formula stands on paper; no side has more than 100."""
    best = max(lexical.values(), default=1)
    return {one: weight * dense[one] + (1 - weight) * lexical.get(one, 0) / best for one in dense}


FORMULAS = {RRF: by_reciprocal_rank, CONVEX: by_convex_sum}


def by_hand(table, query, how, candidates=tuple(DOCUMENTS)):
    """Rank documents by cosine and by BM25, and join them."""
    asked = table.encode([QUERIES[query]], normalize=True)[0].astype(float)
    cosines = {one: float(asked @ table.encode([text], normalize=True)[0]) for one, text in DOCUMENTS.items()}
    words = dict(zip(DOCUMENTS, BM25Index(list(DOCUMENTS.values())).scores(QUERIES[query]), strict=True))
    lexical = {one: float(words[one]) for one in candidates if words[one] > 0}
    return FORMULAS[how]({one: cosines[one] for one in candidates}, lexical)


@pytest.fixture
def table():
    return random_table([*DOCUMENTS.values(), *QUERIES.values()])


@pytest.fixture
def folder(tmp_path):
    write_collection(tmp_path / "retrieval" / "small", DOCUMENTS, QUERIES, JUDGED)
    return tmp_path


@pytest.mark.parametrize("how", [RRF, CONVEX], ids=["rrf", "convex"])
def test_scores_of_candidates_are_the_formula(how):
    draw = np.random.default_rng(0)
    for _ in range(20):
        dense, lexical = draw.normal(size=30), np.maximum(0, draw.normal(size=30))
        wanted = FORMULAS[how](dict(enumerate(dense)), {place: own for place, own in enumerate(lexical) if own > 0})
        assert fused_scores(dense, lexical, how) == pytest.approx([wanted[place] for place in range(30)])


def test_nobody_shares_a_word_with_the_query():
    assert fused_scores(np.array([0.1, 0.9]), np.zeros(2), RRF) == pytest.approx([1 / 62, 1 / 61])
    assert fused_scores(np.array([0.1, 0.9]), np.zeros(2), CONVEX) == pytest.approx([0.04, 0.36])


def test_only_the_first_of_each_ranking_count_by_their_places(monkeypatch):
    monkeypatch.setattr("gerund.evaluation.systems.search.DEPTH", 1)
    assert fused_scores(np.array([0.1, 0.9, 0.5]), np.array([2.0, 0.0, 3.0]), RRF).tolist() == [0, 1 / 61, 1 / 61]


def test_a_convex_sum_is_that_of_the_first_hundred_and_the_rest_stands_below(monkeypatch):
    monkeypatch.setattr("gerund.retrieval.hybrid_search.DEPTH", 2)
    dense = {"a": 0.9, "b": 0.8, "c": 0.7, "d": 0.6}
    found = fused(dense, {"d": 4.0, "a": 1.0, "c": 0.5}, CONVEX)
    # Of the vectors a and b count, of the words d and a, with their cosines; c is below on both sides.
    assert found == pytest.approx({"d": 0.24 + 0.6, "a": 0.36 + 0.6 / 4, "b": 0.32, "c": -1.0})
    assert list(found) == ["d", "a", "b", "c"]


@pytest.mark.parametrize("how", [RRF, CONVEX], ids=["rrf", "convex"])
def test_retrieval_measures_the_joined_ranking(folder, table, how):
    [task] = Retrieval.find(folder)
    score = task.run(HybridSystem(table, how), EvaluationConfig())
    judged: dict[str, dict[str, int]] = {}
    for query, document, grade in JUDGED:
        judged.setdefault(query, {})[document] = grade
    wanted = trec.mean([trec.measures(by_hand(table, query, how), own) for query, own in judged.items()])
    for name, value in score.metrics.items():
        assert value == pytest.approx(wanted[name], abs=6e-6), name
    assert {"recall_at_100", "mrr_at_10"} <= set(score.metrics)


@pytest.mark.parametrize("how", [RRF, CONVEX], ids=["rrf", "convex"])
def test_reranking_joins_the_rankings_of_the_candidates_alone(folder, table, how):
    offered = {"q1": ["d07", "d04", "e", "d10"], "q2": ["d02", "d03"]}
    rows = [(query, document) for query, own in offered.items() for document in own]
    path = folder / "retrieval" / "small" / "candidates" / "test.tsv"
    write_pairs(path, ("query-id", "corpus-id"), rows)
    [task] = Reranking.find(folder)
    wanted = []
    for query, own in offered.items():
        judged = {document: grade for asked, document, grade in JUDGED if asked == query}
        wanted.append(trec.measures(by_hand(table, query, how, own), judged))
    found = task.run(HybridSystem(table, how), EvaluationConfig(limit=2))
    assert found.value == pytest.approx(trec.mean(wanted)["map_at_1000"], abs=6e-6)


@pytest.mark.parametrize("how", [RRF, CONVEX], ids=["rrf", "convex"])
def test_candidates_of_other_tasks_are_joined(table, how):
    queries, texts = list(QUERIES.values()), list(DOCUMENTS.values())
    found = HybridSystem(table, how).candidate_scores(queries, texts, scorer=None, prompt=None)
    for row, query in zip(found, QUERIES, strict=True):
        wanted = by_hand(table, query, how)
        assert row == pytest.approx([wanted[one] for one in DOCUMENTS])


@pytest.mark.slow
def test_every_model_gains_one_and_its_vectors_are_computed_once(folder, tiny_folder, monkeypatch):
    lm = gerund.load(tiny_folder)
    found = systems_of([lm, "bm25", "hybrid"])
    assert [type(one) for one in found] == [CausalModelSystem, BM25System, HybridSystem]
    assert [isinstance(one, Encodes) for one in found] == [True, False, False]
    assert all(isinstance(one, Ranks) and isinstance(one, ScoresCandidates) for one in found)
    dense, _, hybrid = found
    assert hybrid.label == f"{dense.label} + BM25"
    encoded = []
    encode = type(lm).encode
    monkeypatch.setattr(
        type(lm), "encode", lambda self, texts, *a, **k: encoded.extend(texts) or encode(self, texts, *a, **k)
    )
    [task] = Retrieval.find(folder)
    done = evaluate(found, [task])
    assert [result.system for result in done.results] == [one.label for one in found]
    assert len(encoded) == len(set(encoded))
    assert len({result.score.value for result in done.results}) > 1


def test_it_is_left_out_where_bm25_is(tiny_folder):
    lm = gerund.load(tiny_folder)
    done = evaluate(systems_of([lm, "hybrid"]), [ToyTask(name="toy/a")])
    assert len(done.results) == 1
    with pytest.raises(ConfigError, match="can only rank documents and score candidates"):
        evaluate([HybridSystem(language_model_system("tiny", lm))], [ToyTask(name="toy/a")])


def test_it_shares_no_score_with_the_model_alone(folder, tiny_folder):
    [task] = Retrieval.find(folder)
    dense = language_model_system("tiny", gerund.load(tiny_folder), EmbeddingCache())
    hybrid = HybridSystem(dense)
    assert key_of(task, hybrid, EvaluationConfig()) != key_of(task, dense, EvaluationConfig())
    assert hybrid.fingerprint == hybrid.describe()["fingerprint"] != dense.fingerprint
    described = hybrid.describe()
    assert (described["with"], described["fusion"], described["weight"]) == ("bm25", "convex", 0.5)
    assert "weights" not in hybrid.describe()
    precompute([hybrid, hybrid], task.texts(EvaluationConfig()), prompt=None, show=False)  # encodes nothing


@pytest.mark.parametrize("names", [["hybrid"], ["hybrid", "bm25"]])
def test_without_a_model_there_is_nothing_to_join(names):
    with pytest.raises(ConfigError, match="name a model too"):
        systems_of(names)


def test_the_weight_is_the_encoders_own_where_nothing_is_said(tiny_folder):
    lm = gerund.load(tiny_folder, fusion=0.7)
    named = [HybridSystem(language_model_system("tiny", lm), parse_fusion(name)) for name in NAMES]
    assert [one.fusion for one in named] == [Fusion("convex", 0.7), Fusion("rrf"), Fusion("convex", 0.2)]
    assert [one.label for one in named] == ["tiny + BM25", "tiny + BM25 (RRF)", "tiny + BM25 (0.2 vectors)"]
    assert len({one.fingerprint for one in named}) == 3
    # Scores that were measured with other words are measured again.
    assert named[1].cache_key == f"{named[1].dense.cache_key}+bm25-words{VERSION}"
    assert [one.label for one in systems_of([lm, *NAMES])][1:] == [
        f"{systems_of([lm])[0].label}{end}" for end in (" + BM25", " + BM25 (RRF)", " + BM25 (0.2 vectors)")
    ]


NAMES = ("hybrid", "hybrid:rrf", "hybrid:0.2")


@pytest.mark.parametrize("name", ["hybrid:", "hybrid:best", "hybrid:1.5", "hybrid:nan"])
def test_a_fusion_that_there_is_none_of(name):
    with pytest.raises(ConfigError, match=r"hybrid: must be followed by rrf or|is not a number from 0"):
        parse_fusion(name)
