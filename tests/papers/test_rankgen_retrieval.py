"""The continuation of a prefix among those of its own document."""

import copy
import json
from dataclasses import replace

import numpy as np
import pytest

import gerund
from gerund.errors import ConfigError, DataError
from gerund.evaluation.run import key_of
from gerund.evaluation.systems.language_model import language_model_system
from gerund.evaluation.systems.search import BM25System
from gerund.evaluation.task import EvaluationConfig
from gerund.papers.rankgen_retrieval import BookRetrieval, QuotationRetrieval, candidates_of, read_quotations
from gerund.scoring.registry import find_scorer

TITLES = [f"Book{number}" for number in range(3)]


def book(title):
    """Sentences of which each shares its number with the next one alone, so that words tell what follows."""
    return " ".join(f"{title}x{i} {title}x{i + 1} goes on and on and on over here." for i in range(60))


@pytest.fixture
def task(tmp_path):
    (tmp_path / "lm").mkdir()
    rows = [{"text": book(title)} for title in TITLES] + [{"text": "Too short."}]
    (tmp_path / "lm" / "tales.test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    [found] = BookRetrieval.find(tmp_path)
    return replace(found, prefix_words=20, continuation_words=10, samples=20, candidates=30)


@pytest.fixture
def lm(tiny_folder):
    lm = gerund.load(tiny_folder)
    lm.tokenizer.model_max_length = lm.model.config.max_position_embeddings = 1024
    return lm


def test_what_follows_is_found_by_its_words(task, lm):
    assert (task.name, type(task)) == ("book-retrieval/tales", BookRetrieval)
    score = replace(task, scorer="overlap").run(language_model_system("tiny", lm), EvaluationConfig())
    assert (score.main, score.size) == ("recall_at_1", 20)
    # The sentence before the prefix shares as many words with it; its own two share more, and are no candidates.
    assert score.metrics["recall_at_1"] < score.metrics["recall_at_3"] == 1
    assert 20 < int(score.notes[0].split()[0]) < 30


def test_no_right_answer_is_a_miss_and_none_stands_in_the_prefix(task, lm):
    """Every candidate is compared with the characters of the passage, and the ranks with those of a literal loop."""
    own = replace(task, scorer="random", candidates=55)
    asked = masked = 0
    ranks = []
    for title, passages in zip(TITLES, own._documents(own.files[0], np.random.default_rng(0)), strict=True):
        text = book(title)
        spans = {one.continuation: text.index(one.continuation) for one in passages}
        for passage in passages[: 7 if title != TITLES[2] else 6]:
            start = text.index(f"{passage.prefix} {passage.continuation}")
            taken = set(range(start, start + len(f"{passage.prefix} {passage.continuation}")))
            free = [one for one, first in spans.items() if taken.isdisjoint(range(first, first + len(one)))]
            found = candidates_of(passage, passages)
            assert found[0] == passage.continuation
            assert sorted(found[1:]) == sorted(free)
            asked, masked = asked + 1, masked + len(spans) - 1 - len(free)
            scorer = find_scorer("random", lm, seed=0)
            [scores] = scorer.score([passage.prefix], [[f" {one}" for one in found]])
            ranks.append(sum(score >= scores[0] for score in scores))
    assert asked == 20
    assert masked > 1.5 * asked  # what stood among the candidates before
    score = own.run(language_model_system("tiny", lm), EvaluationConfig())
    assert score.metrics["mrr"] == pytest.approx(np.mean([1 / rank for rank in ranks]))


def test_without_a_scorer_by_vectors(task, lm):
    score = task.run(language_model_system("tiny", lm), EvaluationConfig(limit=6))
    assert score.size == 6
    assert any("cosine" in note for note in score.notes)
    pytest.importorskip("bm25s")
    best = task.run(BM25System(), EvaluationConfig())
    assert best.metrics["recall_at_10"] > score.metrics["recall_at_10"]


def test_every_document_gives_as_many(task):
    documents = list(task._documents(task.files[0], np.random.default_rng(0)))
    assert [len(passages) for passages in documents] == [30, 30, 30]
    for title, passages in zip(TITLES, documents, strict=True):
        assert all(title in passage.prefix and title in passage.continuation for passage in passages)


def test_the_scorers_files_decide_too(task, lm, tmp_path):
    folder = tmp_path / "scorer"
    folder.mkdir()
    (folder / "weights").write_text("1")
    own, one = replace(task, scorer=str(folder)), language_model_system("tiny", lm)
    before = key_of(own, one, EvaluationConfig())
    assert before == key_of(own, one, EvaluationConfig())
    (folder / "weights").write_text("2")
    assert before != key_of(own, one, EvaluationConfig())


def test_mistakes(task, lm):
    with pytest.raises(DataError, match="no document has two prefixes of 900 words"):
        replace(task, prefix_words=900).run(language_model_system("tiny", lm), EvaluationConfig())
    with pytest.raises(ConfigError, match="unknown scorer 'overlp'"):
        replace(task, scorer="overlp").run(language_model_system("tiny", lm), EvaluationConfig())
    with pytest.raises(ConfigError, match="at least 10 words"):
        replace(task, prefix_words=3)
    with pytest.raises(ConfigError, match="two candidates"):
        replace(task, candidates=1)


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
