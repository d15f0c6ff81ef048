"""Reciprocal rank fusion against its formula, alone, under MTEB's search protocol and as a system."""

import numpy as np
import pytest

import gerund
from gerund.errors import ConfigError
from gerund.evaluation.results import key_of
from gerund.evaluation.run import evaluate
from gerund.evaluation.systems.base import Encodes, Ranks, ScoresCandidates
from gerund.evaluation.systems.bm25 import BM25Index, BM25System
from gerund.evaluation.systems.embeddings import EmbeddingCache
from gerund.evaluation.systems.hybrid import HybridSystem, fused, fused_scores
from gerund.evaluation.systems.language_model import CausalModelSystem, language_model_system
from gerund.evaluation.systems.prefill import prefill
from gerund.evaluation.systems.selection import systems_of
from gerund.evaluation.task import EvaluationConfig
from gerund.evaluation.tasks import reranking, retrieval
from tests.evaluation.tables import random_table, write_collection, write_pairs
from tests.evaluation.tasks import trec
from tests.evaluation.toys import ToyTask

WORDS = ("cow", "pig", "ant", "bug", "dog", "cat")
DOCUMENTS = {f"d{n:02}": f"{WORDS[n % 6]} {WORDS[n % 5]} {WORDS[n // 6]} {n}" for n in range(30)} | {"e": "nothing"}
QUERIES = {"q1": "cow dog", "q2": "ant", "q3": "bird"}
JUDGED = [("q1", "d04", 2), ("q1", "d10", 1), ("q2", "d02", 1), ("q2", "d20", 1), ("q3", "d05", 1), ("q3", "e", 1)]


def by_formula(rankings):
    found: dict[str, float] = {}
    for ranking in rankings:
        for document in ranking:
            found.setdefault(document, sum(1 / (60 + own.index(document) + 1) for own in rankings if document in own))
    return found


def by_hand(table, query, candidates=tuple(DOCUMENTS)):
    """Rank documents by cosine and by BM25, each as a list of ids, and join them."""
    asked = table.encode([QUERIES[query]], normalize=True)[0].astype(float)
    cosines = {one: float(asked @ table.encode([text], normalize=True)[0]) for one, text in DOCUMENTS.items()}
    words = dict(zip(DOCUMENTS, BM25Index(list(DOCUMENTS.values())).scores(QUERIES[query]), strict=True))
    dense = sorted(candidates, key=lambda one: -cosines[one])
    lexical = sorted((one for one in candidates if words[one] > 0), key=lambda one: -words[one])
    return by_formula([dense, lexical])


@pytest.fixture
def table():
    return random_table([*DOCUMENTS.values(), *QUERIES.values()])


@pytest.fixture
def folder(tmp_path):
    write_collection(tmp_path / "retrieval" / "small", DOCUMENTS, QUERIES, JUDGED)
    return tmp_path


def test_fusion_is_the_formula():
    draw = np.random.default_rng(0)
    for _ in range(20):
        rankings = [draw.permutation(9)[: draw.integers(0, 10)].tolist() for _ in range(3)]
        found = fused(rankings)
        assert found == pytest.approx(by_formula(rankings))
        assert list(found.values()) == sorted(found.values(), reverse=True)
    assert fused([]) == {}


def test_of_equals_the_one_met_first_comes_first():
    assert list(fused([["a", "b"], ["c", "d"]])) == ["a", "c", "b", "d"]


def test_scores_of_candidates():
    found = fused_scores(np.array([0.1, 0.9, 0.5]), np.array([2.0, 0.0, 3.0]))
    assert found == pytest.approx([1 / 63 + 1 / 62, 1 / 61, 1 / 62 + 1 / 61])
    # Nobody shares a word with the query: the model alone ranks.
    assert fused_scores(np.array([0.1, 0.9]), np.zeros(2)) == pytest.approx([1 / 62, 1 / 61])


def test_only_the_first_of_each_ranking_count(monkeypatch):
    monkeypatch.setattr("gerund.evaluation.systems.hybrid.DEPTH", 1)
    assert fused_scores(np.array([0.1, 0.9, 0.5]), np.array([2.0, 0.0, 3.0])).tolist() == [0, 1 / 61, 1 / 61]


def test_retrieval_measures_the_joined_ranking(folder, table):
    [task] = retrieval.find(folder)
    score = task.run(HybridSystem(table), EvaluationConfig())
    judged: dict[str, dict[str, int]] = {}
    for query, document, grade in JUDGED:
        judged.setdefault(query, {})[document] = grade
    wanted = trec.mean([trec.measures(by_hand(table, query), own) for query, own in judged.items()])
    for name, value in score.metrics.items():
        assert value == pytest.approx(wanted[name], abs=6e-6), name
    assert {"recall_at_100", "mrr_at_10"} <= set(score.metrics)


def test_reranking_joins_the_rankings_of_the_candidates_alone(folder, table):
    offered = {"q1": ["d07", "d04", "e", "d10"], "q2": ["d02", "d03"]}
    rows = [(query, document) for query, own in offered.items() for document in own]
    path = folder / "retrieval" / "small" / "candidates" / "test.tsv"
    write_pairs(path, ("query-id", "corpus-id"), rows)
    [task] = reranking.find(folder)
    wanted = []
    for query, own in offered.items():
        judged = {document: grade for asked, document, grade in JUDGED if asked == query}
        wanted.append(trec.measures(by_hand(table, query, own), judged))
    found = task.run(HybridSystem(table), EvaluationConfig(limit=2))
    assert found.value == pytest.approx(trec.mean(wanted)["map_at_1000"], abs=6e-6)


def test_candidates_of_other_tasks_are_joined(table):
    queries, texts = list(QUERIES.values()), list(DOCUMENTS.values())
    found = HybridSystem(table).candidate_scores(queries, texts, scorer=None, prompt=None)
    for row, query in zip(found, QUERIES, strict=True):
        wanted = by_hand(table, query)
        assert row == pytest.approx([wanted[one] for one in DOCUMENTS])


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
    [task] = retrieval.find(folder)
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
    [task] = retrieval.find(folder)
    dense = language_model_system("tiny", gerund.load(tiny_folder), EmbeddingCache())
    hybrid = HybridSystem(dense)
    assert key_of(task, hybrid, EvaluationConfig()) != key_of(task, dense, EvaluationConfig())
    assert hybrid.fingerprint == hybrid.describe()["fingerprint"] != dense.fingerprint
    assert hybrid.describe()["with"] == "bm25"
    assert "weights" not in hybrid.describe()
    prefill([hybrid, hybrid], task, EvaluationConfig())  # encodes nothing


@pytest.mark.parametrize("names", [["hybrid"], ["hybrid", "bm25"]])
def test_without_a_model_there_is_nothing_to_join(names):
    with pytest.raises(ConfigError, match="name a model too"):
        systems_of(names)
