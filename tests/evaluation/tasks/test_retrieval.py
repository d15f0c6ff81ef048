"""Retrieval: MTEB's measures against trec_eval's definitions, and how queries without answers count."""

from typing import ClassVar

import numpy as np
import pytest

from gerund.errors import DataError
from gerund.evaluation.run import key_of
from gerund.evaluation.systems.search import BM25System
from gerund.evaluation.task import EvaluationConfig, Task
from gerund.evaluation.tasks import retrieval
from gerund.evaluation.tasks.retrieval import Retrieval
from tests.evaluation.tables import Table, forbid_network, random_table, same_vectors, write_collection, write_pairs
from tests.evaluation.tasks import trec

# MTEB rounds its means to five digits.
ROUNDED = 6e-6


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    forbid_network(monkeypatch)


DOCUMENTS = {f"d{number}": f"document {number}" for number in range(14)} | {"e": ""}
QUERIES = {"q1": "one", "q2": "two", "q3": "three", "q4": "four"}
# Graded; q3 has judgements and nothing relevant, q4 none.
JUDGED = [
    *(("q1", f"d{number}", grade) for number, grade in [(0, 3), (3, 1), (5, 2), (6, 0), (9, 1)]),
    *(("q2", f"d{number}", 1) for number in range(13)),
    ("q3", "d1", 0),
]
TEXTS = [*DOCUMENTS.values(), *QUERIES.values()]


@pytest.fixture
def task(tmp_path):
    write_collection(tmp_path / "retrieval" / "small", DOCUMENTS, QUERIES, JUDGED)
    [found] = Retrieval.find(tmp_path)
    return found


def expected(table, judged=JUDGED):
    """Measure by hand, with cosines in double precision."""
    grades: dict[str, dict[str, int]] = {}
    for query, document, grade in judged:
        grades.setdefault(query, {})[document] = grade
    found = []
    for query, own in grades.items():
        asked = np.asarray(table.vectors[QUERIES[query]], dtype=float)
        scores = {}
        for one, text in DOCUMENTS.items():
            vector = np.asarray(table.vectors[text], dtype=float)
            length = np.linalg.norm(asked) * np.linalg.norm(vector)
            scores[one] = round(float(asked @ vector / length), 6) if length else 0.0
        found.append(trec.measures(scores, own))
    return trec.mean(found)


def agrees(score, wanted):
    assert set(score.metrics) == {"ndcg_at_10", "recall_at_10", "recall_at_100", "mrr_at_10", "map_at_1000"}
    for name, value in score.metrics.items():
        assert value == pytest.approx(wanted[name], abs=ROUNDED), name


def test_measures_are_trec_evals(task):
    table = random_table(TEXTS)
    score = task.run(table, EvaluationConfig())
    agrees(score, expected(table))
    assert score.main == "ndcg_at_10"
    assert score.size == 3
    assert score.notes == (
        "queries without judgements, which are not scored: 1",
        "queries without a relevant document, which count as 0: 1",
    )


def test_equal_documents_rank_as_in_trec_eval(task):
    # Four directions only: most documents tie, exactly.
    corners = np.eye(4)
    table = Table({text: corners[index % 4] for index, text in enumerate(TEXTS)})
    agrees(task.run(table, EvaluationConfig()), expected(table))


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_constant_embeddings_have_a_score(task, value):
    table = same_vectors(TEXTS, value)
    agrees(task.run(table, EvaluationConfig()), expected(table))


def test_limit_counts_queries_that_are_scored(task):
    table = random_table(TEXTS)
    score = task.run(table, EvaluationConfig(limit=1))
    agrees(score, expected(table, [row for row in JUDGED if row[0] == "q1"]))
    assert score.size == 1


def test_validation_has_judgements_of_its_own(task, tmp_path):
    assert not task.has_validation
    with pytest.raises(DataError, match=r"no qrels/dev.tsv"):
        task.run(random_table(TEXTS), EvaluationConfig(split="validation"))
    judged = [("q4", "d2", 2), ("q4", "d7", 1)]
    path = tmp_path / "retrieval" / "small" / "qrels" / "dev.tsv"
    write_pairs(path, ("query-id", "corpus-id", "score"), judged)
    [task] = Retrieval.find(tmp_path)
    assert task.has_validation
    assert path in task.files
    table = random_table(TEXTS)
    agrees(task.run(table, EvaluationConfig(split="validation")), expected(table, judged))


def test_documents_have_no_prompt(task):
    for config in (EvaluationConfig(), EvaluationConfig(limit=2, prompts={"retrieval": "Find: "})):
        table = random_table(TEXTS)
        task.run(table, config)
        prompt = task.prompt(config)
        queries = set(list(QUERIES.values())[: config.limit or 3])
        assert table.heard() == {(prompt, text) for text in queries} | {(None, text) for text in DOCUMENTS.values()}
        # What is filled in before is what has the prompt.
        assert set(task.texts(config)) == {text for asked, text in table.heard() if asked == prompt}


def test_titles_are_read_as_well(task, tmp_path):
    path = tmp_path / "retrieval" / "small" / "corpus.jsonl"
    path.write_text(path.read_text().replace('"title": "", "text": "document 3"', '"title": "T", "text": " three "'))
    table = random_table([*TEXTS, "T  three"])
    task.run(table, EvaluationConfig())
    assert (None, "T  three") in table.heard()
    assert "T  three" in task.texts(EvaluationConfig())


def test_bm25_takes_part(task):
    score = task.run(BM25System(), EvaluationConfig())
    # No query shares a word with a document: the greatest ids come first.
    wanted = [trec.measures(dict.fromkeys(DOCUMENTS, 0.0), {d: g for q, d, g in JUDGED if q == query}) for query in
              ("q1", "q2", "q3")]  # fmt: skip
    agrees(score, trec.mean(wanted))


def test_bm25_reproduces_its_known_scores_on_medline(data_folder):
    [task] = [task for task in Retrieval.find(data_folder) if task.name == "retrieval/medline"]
    metrics = task.run(BM25System(), EvaluationConfig()).metrics
    for name, value in {"ndcg_at_10": 0.6957, "map_at_1000": 0.5348, "recall_at_100": 0.792}.items():
        assert metrics[name] == pytest.approx(value, abs=1e-3), name


def test_what_each_query_contributes(task):
    table = random_table(TEXTS)
    score = task.run(table, EvaluationConfig())
    found = dict(zip(score.examples.ids, score.examples.values, strict=True))
    for query, value in found.items():
        alone = expected(table, [one for one in JUDGED if one[0] == query])
        assert value == pytest.approx(alone["ndcg_at_10"], abs=ROUNDED), query
    assert found.keys() == {"q1", "q2", "q3"}
    assert np.mean(list(found.values())) == pytest.approx(score.value, abs=ROUNDED)


def ranked_by_hand(table, documents, queries, judged, left_out):
    """Measure with some documents left out of single rankings."""
    by_query = {}
    for query, text in queries.items():
        asked = table.vectors[text] / np.linalg.norm(table.vectors[text])
        vectors = {one: table.vectors[own] for one, own in documents.items() if (query, one) not in left_out}
        scores = {one: float(asked @ vector / np.linalg.norm(vector)) for one, vector in vectors.items()}
        by_query[query] = trec.measures(scores, {document: grade for own, document, grade in judged if own == query})
    return by_query


class TestQueriesThatAreDocuments:
    documents: ClassVar = {f"d{number}": f"document {number}" for number in range(14)}
    # The first two are documents; the third has a document's id by chance, as where both are numbered; the fourth is
    # what is asked for.
    queries: ClassVar = {"d0": "document 0", "d1": " document  1", "d2": "another text", "d3": "document 3"}
    judged: ClassVar = [("d0", "d4", 1), ("d1", "d5", 1), ("d1", "d1", 0), ("d2", "d2", 1), ("d3", "d3", 1)]
    note = "queries that are documents too, left out of their own rankings: 2"

    def task(self, folder, queries, judged):
        write_collection(folder / "retrieval" / "same", self.documents, queries, judged)
        [task] = Retrieval.find(folder)
        return task

    def test_do_not_find_themselves(self, tmp_path):
        task = self.task(tmp_path, self.queries, self.judged)
        table = random_table([*self.documents.values(), *self.queries.values()])
        # Equal texts have equal vectors.
        table.vectors[" document  1"] = table.vectors["document 1"]
        wanted = ranked_by_hand(table, self.documents, self.queries, self.judged, {("d0", "d0"), ("d1", "d1")})
        score = task.run(table, EvaluationConfig())
        agrees(score, trec.mean(list(wanted.values())))
        assert score.notes == (self.note,)
        assert score.examples.ids == tuple(self.queries)
        for query, value in zip(score.examples.ids, score.examples.values, strict=True):
            assert value == pytest.approx(wanted[query]["ndcg_at_10"], abs=ROUNDED), query

    def test_titles_may_be_part_of_the_text_or_not(self, tmp_path):
        task = self.task(tmp_path, self.queries, self.judged)
        path = tmp_path / "retrieval" / "same" / "corpus.jsonl"
        path.write_text(
            path.read_text().replace('"title": "", "text": "document 0"', '"title": "T", "text": "document 0"')
        )
        assert task.run(BM25System(), EvaluationConfig()).notes == (self.note,)
        path.write_text(
            path.read_text().replace('"title": "", "text": "document 1"', '"title": "document", "text": "1"')
        )
        assert task.run(BM25System(), EvaluationConfig()).notes == (self.note,)

    def test_ids_that_are_equal_by_chance_change_nothing(self, tmp_path):
        queries = {"d0": "one", "d1": "two"}
        judged = [("d0", "d0", 1), ("d1", "d5", 1)]
        table = random_table([*self.documents.values(), *queries.values()])
        score = self.task(tmp_path, queries, judged).run(table, EvaluationConfig())
        wanted = ranked_by_hand(table, self.documents, queries, judged, set())
        agrees(score, trec.mean(list(wanted.values())))
        assert score.notes == ()

    def test_scores_of_earlier_versions_are_finished_for_other_collections_only(self, tmp_path, monkeypatch):
        own = self.task(tmp_path / "own", self.queries, self.judged)
        other = self.task(tmp_path / "other", {"d0": "one"}, [("d0", "d0", 1)])
        keys = [key_of(task, BM25System(), EvaluationConfig()) for task in (own, other)]
        monkeypatch.setattr(Task, "key_parts", lambda *_: ())
        monkeypatch.setattr(retrieval.CollectionTask, "key_parts", Task.key_parts)
        earlier = [key_of(task, BM25System(), EvaluationConfig()) for task in (own, other)]
        assert keys[0] != earlier[0]
        assert keys[1] == earlier[1]
