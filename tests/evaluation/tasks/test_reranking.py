"""Re-ranking: candidates from a file or from BM25, measured against trec_eval's definitions."""

import numpy as np
import pytest

from gerund.errors import ConfigError, DataError
from gerund.evaluation.systems.search import BM25Index, BM25System
from gerund.evaluation.task import EvaluationConfig
from gerund.evaluation.tasks import retrieval as reranking
from gerund.evaluation.tasks.retrieval import Reranking
from tests.evaluation.tables import forbid_network, random_table, write_collection, write_pairs
from tests.evaluation.tasks import trec

ROUNDED = 6e-6


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    forbid_network(monkeypatch)


ANIMALS = ("cat", "dog", "cow", "cat dog", "cat cow", "cat cat stone", "stone", "dog dog cow")
DOCUMENTS = {f"d{number}": text for number, text in enumerate(ANIMALS)}
QUERIES = {"q1": "cat", "q2": "dog cow", "q3": "bird"}
JUDGED = [("q1", "d0", 2), ("q1", "d4", 1), ("q1", "d6", 1), ("q2", "d7", 1), ("q2", "d1", 0), ("q3", "d1", 1)]
GRADES = {query: {d: g for q, d, g in JUDGED if q == query} for query in QUERIES}
TEXTS = [*DOCUMENTS.values(), *QUERIES.values()]


@pytest.fixture
def folder(tmp_path):
    return write_collection(tmp_path / "retrieval" / "small", DOCUMENTS, QUERIES, JUDGED).parent.parent


def task_in(folder, **options):
    [task] = Reranking.find(folder)
    return reranking.Reranking(name=task.name, files=task.files, **options)


def cosine(table, one, other):
    left, right = (np.asarray(table.vectors[text]) for text in (one, other))
    return float(left @ right / (np.linalg.norm(left) * np.linalg.norm(right)))


def cosines(table, query, documents):
    return {one: cosine(table, QUERIES[query], DOCUMENTS[one]) for one in documents}


def agrees(score, by_query):
    wanted = trec.mean([trec.measures(by_query[query], GRADES[query]) for query in QUERIES])
    assert set(score.metrics) == {"map_at_1000", "mrr_at_1000", "ndcg_at_10"}
    for name, value in score.metrics.items():
        assert value == pytest.approx(wanted[name], abs=ROUNDED), name


def test_candidates_are_what_bm25_finds_and_what_it_misses_counts(folder):
    table = random_table(TEXTS)
    score = task_in(folder).run(table, EvaluationConfig())
    # d6 is relevant to q1 and shares no word with it; nothing is about birds.
    offered = {"q1": ("d0", "d3", "d4", "d5"), "q2": ("d1", "d2", "d3", "d4", "d7"), "q3": ()}
    agrees(score, {query: cosines(table, query, documents) for query, documents in offered.items()})
    assert score.main == "map_at_1000"
    assert score.size == 3
    assert score.notes == (
        "candidates are BM25's first 100, 3.0 a query on average",
        "queries without candidates, which count as 0: 1",
    )


def test_fewer_candidates_are_bm25s_first(folder):
    table = random_table(TEXTS)
    score = task_in(folder, candidates=2).run(table, EvaluationConfig())
    # Most words of the query, fewest others; of equals the first document.
    offered = {"q1": ("d0", "d5"), "q2": ("d7", "d1"), "q3": ()}
    agrees(score, {query: cosines(table, query, documents) for query, documents in offered.items()})
    with pytest.raises(ConfigError, match="candidates is 1 or more"):
        task_in(folder, candidates=0)


def test_candidates_from_a_file(folder):
    offered = {"q1": ("d6", "d1", "d0"), "q2": (), "q3": ("d1", "d2")}
    rows = [(query, document) for query, documents in offered.items() for document in documents]
    path = write_pairs(folder / "retrieval" / "small" / "candidates" / "test.tsv", ("query-id", "corpus-id"), rows)
    task = task_in(folder)
    assert path in task.files
    table = random_table(TEXTS)
    score = task.run(table, EvaluationConfig())
    agrees(score, {query: cosines(table, query, documents) for query, documents in offered.items()})
    assert score.notes[0] == "candidates from candidates/test.tsv, 1.7 a query on average"
    path.write_text(path.read_text() + "q1\tnothing\n")
    with pytest.raises(DataError, match="no such document: nothing"):
        task.run(table, EvaluationConfig())


def test_bm25_ranks_candidates_by_its_own_scores(folder):
    offered = {"q1": ("d6", "d5", "d0"), "q2": ("d2", "d7"), "q3": ("d1", "d2")}
    rows = [(query, document) for query, documents in offered.items() for document in documents]
    write_pairs(folder / "retrieval" / "small" / "candidates" / "test.tsv", ("query-id", "corpus-id"), rows)
    index = BM25Index(list(DOCUMENTS.values()))
    places = {one: place for place, one in enumerate(DOCUMENTS)}
    scores = {query: index.scores(text) for query, text in QUERIES.items()}
    by_query = {query: {one: scores[query][places[one]] for one in offered[query]} for query in QUERIES}
    agrees(task_in(folder).run(BM25System(), EvaluationConfig()), by_query)


def test_all_that_is_encoded_with_the_prompt_is_known_before(folder):
    task = task_in(folder)
    for config in (EvaluationConfig(), EvaluationConfig(limit=2, prompts={"reranking/small": "Find: "})):
        table = random_table(TEXTS)
        task.run(table, config)
        prompt = task.prompt(config)
        assert set(task.texts(config)) == {text for asked, text in table.heard() if asked == prompt}
        assert {text for asked, text in table.heard() if asked is None} >= set(DOCUMENTS.values())


@pytest.mark.parametrize("from_a_file", [False, True])
def test_a_query_that_is_a_document_is_no_candidate_of_its_own(folder, from_a_file):
    # The second has a document's id by chance.
    queries = {"d3": "cat dog", "d6": "dog cow"}
    judged = [("d3", "d4", 1), ("d6", "d6", 1), ("d6", "d7", 1)]
    collection = write_collection(folder / "retrieval" / "small", DOCUMENTS, queries, judged)
    # By words the nearest to the first are itself, d1 and d7; to the second, d7 and d1.
    offered = {"d3": ("d1", "d7"), "d6": ("d7", "d1")}
    if from_a_file:
        rows = [("d3", "d3"), *((query, one) for query, documents in offered.items() for one in documents)]
        write_pairs(collection / "candidates" / "test.tsv", ("query-id", "corpus-id"), rows)
    table = random_table([*DOCUMENTS.values(), *queries.values()])
    score = task_in(folder, candidates=2).run(table, EvaluationConfig())
    wanted = []
    for query, documents in offered.items():
        scores = {one: cosine(table, queries[query], DOCUMENTS[one]) for one in documents}
        wanted.append(trec.measures(scores, {one: grade for own, one, grade in judged if own == query}))
    for name, value in score.metrics.items():
        assert value == pytest.approx(trec.mean(wanted)[name], abs=ROUNDED), name
    origin = "candidates from candidates/test.tsv" if from_a_file else "candidates are BM25's first 2"
    told = "queries that are documents too, left out of their own rankings: 1"
    assert score.notes == (f"{origin}, 2.0 a query on average", told)
