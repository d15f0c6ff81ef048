"""Ranked lists made of texts: what asks, what is offered, and what an interrupted run keeps."""

import json

import pytest

from gerund.errors import DataError
from gerund.training.corpus import ranked_lists
from gerund.training.corpus.ranked_lists import LISTS, _Lines, read_lists


@pytest.fixture
def settings(adapting, corpus, tmp_path):
    adapting["data"] = {"folder": str(corpus), "sources": [{"name": "a", "files": ["a.train.jsonl"]}]}
    adapting["data"]["cache"] = str(tmp_path / "cache")
    late = {"kind": "late", "batch_size": 2, "length": 32, "candidates": 3, "dimensions": 8, "lists": 6}
    adapting["objectives"] = [late | {"questions": "written"}]
    adapting["encoder"] = {"attention": "causal"}
    return adapting


def asking(monkeypatch, made):
    """Let the model ask by the first words of a text, and note which texts."""

    def questions_to(_, texts, seed):
        made.append((len(texts), seed))
        return [[f"{' '.join(text.split()[:9])}?", "never reached?"] for text in texts]

    monkeypatch.setattr(ranked_lists, "questions_to", questions_to)


def test_questions_are_written_once(run, settings, monkeypatch):
    made = []
    asking(monkeypatch, made)
    lists = read_lists([run("out", "steps=1").parent / LISTS])
    assert len(lists) == 6
    assert all(ranked.documents[0].startswith(ranked.query[:-1]) for ranked in lists)
    assert made
    written = list(made)
    monkeypatch.setattr(ranked_lists, "_lift", lambda *_: pytest.fail("scored again"))
    again = read_lists([run("again", "steps=1").parent / LISTS])
    assert (again, made) == (lists, written)


def test_half_of_the_questions_are_sentences(run, settings, monkeypatch):
    asking(monkeypatch, [])
    lists = read_lists([run("out", "steps=1", "objectives.late.questions=both").parent / LISTS])
    assert [ranked.query.endswith("?") for ranked in lists] == 3 * [False] + 3 * [True]


def test_a_model_that_cannot_ask_is_told(run, settings, monkeypatch):
    monkeypatch.setattr(ranked_lists, "questions_to", lambda _, texts, seed: [["zebra?"] for _ in texts])
    with pytest.raises(DataError, match="late: the model wrote no question that finds its text"):
        run("out", "steps=1")


def test_an_interrupted_run_keeps_what_was_made(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_text("[1]\n[2]\n[3", "utf-8")
    lines = _Lines(path)
    assert [lines.get(lambda: pytest.fail("made again")) for _ in range(2)] == [[1], [2]]
    assert lines.get(lambda: [4]) == [4]
    assert [json.loads(line) for line in path.read_text().splitlines()] == [[1], [2], [4]]
