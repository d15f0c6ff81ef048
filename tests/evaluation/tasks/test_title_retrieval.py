"""Passages by the titles of their documents: what is asked, what is searched, and how first sentences stand in."""

import json
from dataclasses import replace

import pytest

import gerund
from gerund.errors import ConfigError, DataError
from gerund.evaluation.systems.base import Ranks
from gerund.evaluation.systems.language_model import language_model_system
from gerund.evaluation.systems.search import BM25System, HybridSystem
from gerund.evaluation.task import EvaluationConfig
from gerund.evaluation.tasks import retrieval as title_retrieval
from gerund.evaluation.tasks.retrieval import TitleRetrieval, passages_of
from tests.evaluation.tables import forbid_network, random_table
from tests.evaluation.tasks import trec

ROWS = [
    {"title": "Herons", "text": "Herons are birds. They eat fish. They stand still for a long while. They fly."},
    {"title": "Rivers", "text": "A river is water. It flows to the sea."},
    {"title": "", "text": "Nobody has named this. It says that herons like rivers."},
    {"title": "Herons", "text": "Another text about them."},
]


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    forbid_network(monkeypatch)


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


def test_measures_are_trec_evals(tmp_path):
    task = written(tmp_path, ROWS)
    found = collection(task)
    table = random_table(task.texts(EvaluationConfig()))
    score = task.run(table, EvaluationConfig())
    wanted = []
    for query, title in found.queries.items():
        asked = table.encode([title], normalize=True)[0]
        cosines = {one: float(asked @ table.encode([text], normalize=True)[0]) for one, text in found.bodies.items()}
        wanted.append(trec.measures(cosines, dict(found.judgements[query])))
    for name in ("ndcg_at_10", "recall_at_100", "mrr_at_10"):
        assert score.metrics[name] == pytest.approx(trec.mean(wanted)[name], abs=6e-6), name
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
