"""Claims and their quotations, in the layout of RELiC."""

import copy
import json
from dataclasses import replace

import pytest

import gerund
from gerund.errors import ConfigError, DataError
from gerund.evaluation.systems.language_model import language_model_system
from gerund.evaluation.systems.search import BM25System
from gerund.evaluation.task import EvaluationConfig
from gerund.papers.rankgen_retrieval import QuotationRetrieval, read_quotations

BOOKS = {
    "Sea": {
        "sentences": ["The sea rose.", "The ship sank.", "A man swam.", "He lived.", "The end."],
        "quotes": {
            "one": [["He says that the ship", "sank."], 1, 1, ["So it did."]],
            "two": [["Of swam, A man"], 2, 2, ["he lived on."]],
            "silent": [[], 0, 1, ["The sea is meant."]],
        },
        "candidates": {"1_sentence": [0, 1, 2, 3], "2_sentence": [0, 2]},
    },
    "Inn": {"sentences": ["An inn stood.", "It fell."], "quotes": {"x": [["An inn, they say"], 0, 1, []]}},
}


def write(folder, books=BOOKS, name="relic.test.json"):
    (folder / "quotations").mkdir(exist_ok=True)
    (folder / "quotations" / name).write_text(json.dumps(books))
    return folder


def test_claims_are_grouped_by_book_and_length(tmp_path):
    [task] = QuotationRetrieval.find(write(tmp_path))
    assert task.name == "quotation-retrieval/relic"
    one, two, inn = read_quotations(task.files[0])
    assert (one.book, one.before, one.right) == ("Sea", ("He says that the ship sank.", ""), (1, 0))
    assert one.candidates == ("The sea rose.", "The ship sank.", "A man swam.", "He lived.")
    assert two.candidates == ("The sea rose. The ship sank.", "A man swam. He lived.")
    assert (two.right, two.after) == ((1,), ("he lived on.",))
    assert inn.candidates == ("An inn stood.", "It fell.")  # everywhere


def test_quotations_are_found_by_their_words(tmp_path, tiny_folder):
    [task] = QuotationRetrieval.find(write(tmp_path))
    one = language_model_system("tiny", gerund.load(tiny_folder))
    by_words = replace(task, scorer="overlap")
    score = by_words.run(one, EvaluationConfig())
    assert (score.size, score.metrics["recall_at_1"]) == (3, 1.0)
    assert score.notes[-1].endswith("left out: 1")
    assert replace(by_words, context="both").run(one, EvaluationConfig()).size == 4
    assert task.run(one, EvaluationConfig(limit=2)).size == 2
    pytest.importorskip("bm25s")
    assert task.run(BM25System(), EvaluationConfig()).metrics["recall_at_1"] == 1.0


def test_a_validation_file(tmp_path):
    write(tmp_path)
    [task] = QuotationRetrieval.find(write(tmp_path, name="relic.valid.json"))
    assert task.has_validation


def changed(path, value):
    books = copy.deepcopy(BOOKS)
    place = books
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return books


@pytest.mark.parametrize(
    ("books", "message"),
    [
        ([], "expected an object with a book"),
        ({"Sea": 3}, "book 'Sea': expected an object"),
        (changed(["Sea", "sentences"], "text"), "'sentences' is not a list"),
        (changed(["Sea", "quotes"], []), "'quotes' is not an object"),
        (changed(["Sea", "quotes", "one"], [["a"], 1, 1]), "quote 'one': expected"),
        (changed(["Sea", "quotes", "one"], [["a"], 4, 2, []]), "2 sentences from 4 on are not in a book of 5"),
        (changed(["Sea", "candidates"], {"1_sentence": [0]}), "at sentence 1 is not among the candidates"),
        (changed(["Sea", "candidates"], {"2_sentence": [0]}), "no list of places '1_sentence'"),
        ({"Inn": {"sentences": ["A."], "quotes": {"x": [[" "], 0, 1, []]}}}, "no claim has a text before"),
    ],
)
def test_a_broken_file_is_named(tmp_path, tiny_folder, books, message):
    [task] = QuotationRetrieval.find(write(tmp_path, books))
    with pytest.raises(DataError, match=message):
        replace(task, scorer="overlap").run(language_model_system("tiny", gerund.load(tiny_folder)), EvaluationConfig())


def test_no_json(tmp_path):
    [task] = QuotationRetrieval.find(write(tmp_path))
    task.files[0].write_text("{")
    with pytest.raises(DataError, match="not readable JSON"):
        list(read_quotations(task.files[0]))
    with pytest.raises(ConfigError, match="before or both"):
        replace(task, context="after")
