"""Ranked lists made of texts: what asks, what is offered, and what an interrupted run keeps."""

from types import SimpleNamespace

import pytest
import torch

from gerund.errors import DataError
from gerund.training.objectives import ranking
from gerund.training.objectives.ranking import LISTS, _Lines, read_lists
from gerund.training.objectives.settings import LateObjectiveConfig
from gerund.training.recipe import load_recipe
from gerund.training.trainable_model import prepare_model


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

    monkeypatch.setattr(ranking, "questions_to", questions_to)


def test_questions_are_written_once(run, settings, monkeypatch):
    made = []
    asking(monkeypatch, made)
    lists = read_lists([run("out", "steps=1").parent / LISTS])
    assert len(lists) == 6
    assert all(ranked.documents[0].startswith(ranked.query[:-1]) for ranked in lists)
    assert made
    written = list(made)
    monkeypatch.setattr(ranking, "_lift", lambda *_: pytest.fail("scored again"))
    again = read_lists([run("again", "steps=1").parent / LISTS])
    assert (again, made) == (lists, written)


def test_half_of_the_questions_are_sentences(run, settings, monkeypatch):
    asking(monkeypatch, [])
    lists = read_lists([run("out", "steps=1", "objectives.late.questions=both").parent / LISTS])
    assert [ranked.query.endswith("?") for ranked in lists] == 3 * [False] + 3 * [True]


def test_a_model_that_cannot_ask_is_told(run, settings, monkeypatch):
    monkeypatch.setattr(ranking, "questions_to", lambda _, texts, seed: [["zebra?"] for _ in texts])
    with pytest.raises(DataError, match="late: the model wrote no question that finds its text"):
        run("out", "steps=1")


def test_an_interrupted_run_keeps_what_was_made(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_text("[0, [1]]\n[1, [2]]\n[2, [3", "utf-8")
    lines = _Lines(path)
    assert [lines.get(at, lambda: pytest.fail("made again")) for at in range(2)] == [[1], [2]]
    assert lines.get(2, lambda: [4]) == [4]
    again = _Lines(path)
    assert [again.get(at, lambda: pytest.fail("made again")) for at in range(3)] == [[1], [2], [4]]


def test_two_runs_at_a_time_keep_each_result_at_its_place(tmp_path):
    runs = [_Lines(tmp_path / "lines.jsonl") for _ in range(2)]
    made = [run.get(number, lambda number=number: [number]) for number in range(3) for run in runs]
    read = _Lines(tmp_path / "lines.jsonl")
    assert made == [[0], [0], [1], [1], [2], [2]]
    assert [read.get(number, lambda: pytest.fail("made again")) for number in range(3)] == [[0], [1], [2]]


def test_an_adapter_that_is_trained_further_does_not_score(settings, write_recipe, monkeypatch, tmp_path):
    model = prepare_model(load_recipe(write_recipe(settings)))
    documents = ["the cat runs under the house", "a stone and a river", "red and blue dog"]
    model.model.eval()
    expected = ranking._lift(model.model, model.tokenizer, "the cat", documents)  # the adapter is new
    torch.manual_seed(0)
    for name, weight in model.adapter.named_parameters():
        if "lora_B" in name:
            weight.data.normal_()
    assert ranking._lift(model.model, model.tokenizer, "the cat", documents) != pytest.approx(expected, rel=0.1)
    config = LateObjectiveConfig(kind="late", lists=1, candidates=3)
    maker = ranking._Maker(SimpleNamespace(model=model, seed=lambda _: 0), config, documents, tmp_path)
    monkeypatch.setattr(maker, "_taken", lambda _, count: [("the cat", documents)] * count)
    [ranked] = maker.lists()
    assert ranked.scores == pytest.approx(expected, rel=1e-5)
    assert any(weight.requires_grad for weight in model.adapter.parameters())
