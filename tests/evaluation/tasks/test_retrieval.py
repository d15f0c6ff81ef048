"""Retrieval: MTEB's measures against trec_eval's definitions, and how queries without answers count."""

import json
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest

import gerund
from gerund.errors import ConfigError, DataError
from gerund.evaluation.systems.base import Ranks
from gerund.evaluation.systems.language_model import language_model_system
from gerund.evaluation.systems.search import BM25Index, BM25System, HybridSystem
from gerund.evaluation.task import EvaluationConfig
from gerund.evaluation.tasks import retrieval as reranking
from gerund.evaluation.tasks import retrieval as title_retrieval
from gerund.evaluation.tasks.retrieval import Reranking, Retrieval, TitleRetrieval, passages_of
from tests.evaluation.tables import forbid_network, random_table, same_vectors, write_collection, write_pairs
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


ANIMALS = ("cat", "dog", "cow", "cat dog", "cat cow", "cat cat stone", "stone", "dog dog cow")
DOCUMENTS_reranking = {f"d{number}": text for number, text in enumerate(ANIMALS)}
QUERIES_reranking = {"q1": "cat", "q2": "dog cow", "q3": "bird"}
JUDGED_reranking = [
    ("q1", "d0", 2),
    ("q1", "d4", 1),
    ("q1", "d6", 1),
    ("q2", "d7", 1),
    ("q2", "d1", 0),
    ("q3", "d1", 1),
]
GRADES = {query: {d: g for q, d, g in JUDGED_reranking if q == query} for query in QUERIES_reranking}
TEXTS_reranking = [*DOCUMENTS_reranking.values(), *QUERIES_reranking.values()]


@pytest.fixture
def folder(tmp_path):
    return write_collection(
        tmp_path / "retrieval" / "small", DOCUMENTS_reranking, QUERIES_reranking, JUDGED_reranking
    ).parent.parent


def task_in(folder, **options):
    [task] = Reranking.find(folder)
    return reranking.Reranking(name=task.name, files=task.files, **options)


def cosine(table, one, other):
    left, right = (np.asarray(table.vectors[text]) for text in (one, other))
    return float(left @ right / (np.linalg.norm(left) * np.linalg.norm(right)))


def cosines(table, query, documents):
    return {one: cosine(table, QUERIES_reranking[query], DOCUMENTS_reranking[one]) for one in documents}


def agrees_reranking(score, by_query):
    wanted = trec.mean([trec.measures(by_query[query], GRADES[query]) for query in QUERIES_reranking])
    assert set(score.metrics) == {"map_at_1000", "mrr_at_1000", "ndcg_at_10"}
    for name, value in score.metrics.items():
        assert value == pytest.approx(wanted[name], abs=ROUNDED), name


def test_candidates_are_what_bm25_finds_and_what_it_misses_counts(folder):
    table = random_table(TEXTS_reranking)
    score = task_in(folder).run(table, EvaluationConfig())
    # d6 is relevant to q1 and shares no word with it; nothing is about birds.
    offered = {"q1": ("d0", "d3", "d4", "d5"), "q2": ("d1", "d2", "d3", "d4", "d7"), "q3": ()}
    agrees_reranking(score, {query: cosines(table, query, documents) for query, documents in offered.items()})
    assert score.main == "map_at_1000"
    assert score.size == 3
    assert score.notes == (
        "candidates are BM25's first 100, 3.0 a query on average",
        "queries without candidates, which count as 0: 1",
    )


def test_fewer_candidates_are_bm25s_first(folder):
    table = random_table(TEXTS_reranking)
    score = task_in(folder, candidates=2).run(table, EvaluationConfig())
    # Most words of the query, fewest others; of equals the first document.
    offered = {"q1": ("d0", "d5"), "q2": ("d7", "d1"), "q3": ()}
    agrees_reranking(score, {query: cosines(table, query, documents) for query, documents in offered.items()})
    with pytest.raises(ConfigError, match="candidates is 1 or more"):
        task_in(folder, candidates=0)


def test_candidates_from_a_file(folder):
    offered = {"q1": ("d6", "d1", "d0"), "q2": (), "q3": ("d1", "d2")}
    rows = [(query, document) for query, documents in offered.items() for document in documents]
    path = write_pairs(folder / "retrieval" / "small" / "candidates" / "test.tsv", ("query-id", "corpus-id"), rows)
    task = task_in(folder)
    assert path in task.files
    table = random_table(TEXTS_reranking)
    score = task.run(table, EvaluationConfig())
    agrees_reranking(score, {query: cosines(table, query, documents) for query, documents in offered.items()})
    assert score.notes[0] == "candidates from candidates/test.tsv, 1.7 a query on average"
    path.write_text(path.read_text() + "q1\tnothing\n")
    with pytest.raises(DataError, match="no such document: nothing"):
        task.run(table, EvaluationConfig())


def test_bm25_ranks_candidates_by_its_own_scores(folder):
    offered = {"q1": ("d6", "d5", "d0"), "q2": ("d2", "d7"), "q3": ("d1", "d2")}
    rows = [(query, document) for query, documents in offered.items() for document in documents]
    write_pairs(folder / "retrieval" / "small" / "candidates" / "test.tsv", ("query-id", "corpus-id"), rows)
    index = BM25Index(list(DOCUMENTS_reranking.values()))
    places = {one: place for place, one in enumerate(DOCUMENTS_reranking)}
    scores = {query: index.scores(text) for query, text in QUERIES_reranking.items()}
    by_query = {query: {one: scores[query][places[one]] for one in offered[query]} for query in QUERIES_reranking}
    agrees_reranking(task_in(folder).run(BM25System(), EvaluationConfig()), by_query)


def test_all_that_is_encoded_with_the_prompt_is_known_before(folder):
    task = task_in(folder)
    for config in (EvaluationConfig(), EvaluationConfig(limit=2, prompts={"reranking/small": "Find: "})):
        table = random_table(TEXTS_reranking)
        task.run(table, config)
        prompt = task.prompt(config)
        assert set(task.texts(config)) == {text for asked, text in table.heard() if asked == prompt}
        assert {text for asked, text in table.heard() if asked is None} >= set(DOCUMENTS_reranking.values())


@pytest.mark.parametrize("from_a_file", [False, True])
def test_a_query_that_is_a_document_is_no_candidate_of_its_own(folder, from_a_file):
    # The second has a document's id by chance.
    queries = {"d3": "cat dog", "d6": "dog cow"}
    judged = [("d3", "d4", 1), ("d6", "d6", 1), ("d6", "d7", 1)]
    collection = write_collection(folder / "retrieval" / "small", DOCUMENTS_reranking, queries, judged)
    # By words the nearest to the first are itself, d1 and d7; to the second, d7 and d1.
    offered = {"d3": ("d1", "d7"), "d6": ("d7", "d1")}
    if from_a_file:
        rows = [("d3", "d3"), *((query, one) for query, documents in offered.items() for one in documents)]
        write_pairs(collection / "candidates" / "test.tsv", ("query-id", "corpus-id"), rows)
    table = random_table([*DOCUMENTS_reranking.values(), *queries.values()])
    score = task_in(folder, candidates=2).run(table, EvaluationConfig())
    wanted = []
    for query, documents in offered.items():
        scores = {one: cosine(table, queries[query], DOCUMENTS_reranking[one]) for one in documents}
        wanted.append(trec.measures(scores, {one: grade for own, one, grade in judged if own == query}))
    for name, value in score.metrics.items():
        assert value == pytest.approx(trec.mean(wanted)[name], abs=ROUNDED), name
    origin = "candidates from candidates/test.tsv" if from_a_file else "candidates are BM25's first 2"
    told = "queries that are documents too, left out of their own rankings: 1"
    assert score.notes == (f"{origin}, 2.0 a query on average", told)


ROWS = [
    {"title": "Herons", "text": "Herons are birds. They eat fish. They stand still for a long while. They fly."},
    {"title": "Rivers", "text": "A river is water. It flows to the sea."},
    {"title": "", "text": "Nobody has named this. It says that herons like rivers."},
    {"title": "Herons", "text": "Another text about them."},
]


def written(folder, rows, name="zoo.test.jsonl"):
    (folder / "lm").mkdir(exist_ok=True)
    (folder / "lm" / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    [found] = TitleRetrieval.find(folder)
    return replace(found, words=8)


def collection(task):
    return title_retrieval._collection(task.files[0], task.words, task.files[0].stat().st_mtime_ns)[0]


def test_passages_are_whole_sentences():
    text = "One two. Three four five. Six! A sentence of more words than there is room for. Seven."
    assert list(passages_of(text, 5)) == [
        "One two. Three four five.",
        "Six!",
        "A sentence of more words than there is room for.",
        "Seven.",
    ]
    assert list(passages_of(text, 100)) == [text]
    assert list(passages_of(text, 5, skip=3)) == ["A sentence of more words than there is room for.", "Seven."]
    assert list(passages_of("", 5)) == list(passages_of("One.", 5, skip=1)) == []


def test_titles_ask_and_all_passages_are_searched(tmp_path):
    task = written(tmp_path, ROWS)
    assert (task.name, type(task), task.capability) == ("title-retrieval/zoo", TitleRetrieval, Ranks)
    found = collection(task)
    assert list(found.queries.values()) == ["Herons", "Rivers"]
    by_query = {found.queries[query]: {found.bodies[one] for one in own} for query, own in found.judgements.items()}
    assert by_query == {
        "Herons": {
            "Herons are birds. They eat fish.",
            ["They stand still for a long while.", "."][0],
            "They fly.",
            "Another text about them.",
        },
        "Rivers": {["A river is water.", " flows to the sea."][0], "It flows to the sea."},
    }
    assert {"Nobody has named this.", "It says that herons like rivers."} <= set(found.bodies.values())


def test_title_retrieval_says_what_it_measured(tmp_path):
    task = written(tmp_path, ROWS)
    table = random_table(task.texts(EvaluationConfig()))
    score = task.run(table, EvaluationConfig())
    assert score.main == "ndcg_at_10"
    assert score.notes == ("8 passages of 2 documents", "titles that begin a passage of their document: 1 of 2")
    assert {text for _, text in table.heard()} == set(task.texts(EvaluationConfig()))


def test_first_sentences_ask_where_nobody_has_a_title(tmp_path):
    task = written(tmp_path, [{"text": row["text"]} for row in ROWS] + [{"text": "Alone."}])
    found = collection(task)
    assert list(found.queries.values()) == ["Herons are birds.", "A river is water.", "Nobody has named this."]
    assert not set(found.queries.values()) & set(found.bodies.values())
    assert (
        "the file has no titles" in task.run(random_table(task.texts(EvaluationConfig())), EvaluationConfig()).notes[1]
    )


def test_a_limit_counts_queries_and_a_prompt_is_the_queries(tmp_path):
    task = written(tmp_path, ROWS)
    config = EvaluationConfig(limit=1, prompts={"title-retrieval": "Find: "})
    assert task.texts(config) == ["Herons"]
    table = random_table(task.texts(EvaluationConfig()))
    assert task.run(table, config).size == 1
    assert ("Find: ", "Herons") in table.heard()
    assert (None, "It flows to the sea.") in table.heard()


def test_bm25_and_both_together_take_part(tmp_path, tiny_folder):
    task = written(tmp_path, ROWS)
    bm25 = task.run(BM25System(), EvaluationConfig())
    both = task.run(HybridSystem(language_model_system("tiny", gerund.load(tiny_folder))), EvaluationConfig())
    # Somebody else's passage speaks of rivers, and is as short.
    assert bm25.metrics["mrr_at_10"] == 0.75
    assert both.metrics["recall_at_100"] == 1


def test_a_document_alone_is_no_corpus_of_titles(tmp_path):
    written(tmp_path, ROWS)
    (tmp_path / "lm" / "plain.test.txt").write_text("A text. Another.")
    (tmp_path / "lm" / "book.test.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    assert [task.name for task in TitleRetrieval.find(tmp_path)] == ["title-retrieval/zoo"]


def test_a_changed_file_is_read_anew(tmp_path):
    task = written(tmp_path, ROWS)
    assert len(collection(task).queries) == 2
    task = written(tmp_path, [*ROWS, {"title": "Ants", "text": "They are small."}])
    assert len(task.texts(EvaluationConfig())) == 3 + 9


def test_mistakes(tmp_path):
    with pytest.raises(ConfigError, match="words=0 leaves nothing"):
        replace(written(tmp_path, ROWS), words=0)
    with pytest.raises(DataError, match=r"zoo.test.jsonl: one document or none has a title"):
        written(tmp_path, [ROWS[0], ROWS[2]]).run(random_table(["a"]), EvaluationConfig())
    with pytest.raises(DataError, match="line 2: no field 'text'"):
        written(tmp_path, [ROWS[0], {"title": "x"}]).run(random_table(["a"]), EvaluationConfig())


@pytest.mark.slow
def test_bm25_finds_most_wikipedia_articles_by_their_titles(data_folder):
    [task] = [task for task in TitleRetrieval.find(data_folder) if task.title == "wiki"]
    score = task.run(BM25System(), EvaluationConfig(limit=50))
    assert score.size == 50
    assert 0.7 < score.value < 0.9
