"""Models of sentence-transformers as systems: the vectors are theirs, and they take part where vectors suffice."""

import json
import shutil

import numpy as np
import pytest

import gerund
from gerund.errors import ConfigError, ModelError
from gerund.evaluation.registry import select
from gerund.evaluation.run import cache_in, evaluate
from gerund.evaluation.systems.base import Encodes, Ranks, SentenceTransformersSystem, capabilities
from gerund.evaluation.systems.selection import systems_of
from gerund.evaluation.task import EvaluationConfig
from tests.cli.helpers import run_cli
from tests.evaluation.tables import write_data

pytest.importorskip("sentence_transformers")

TEXTS = ["a cat", "the rain in the inn", "the end"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def lm(tiny_folder):
    return gerund.load(tiny_folder, attention="bidir", dtype="float32")


@pytest.fixture(scope="module")
def folder(lm, tmp_path_factory):
    """Our own encoder as plain sentence-transformers reads it, so that it is known what comes out."""
    return lm.export(tmp_path_factory.mktemp("exported") / "minilm", "sentence-transformers").folder


def test_the_vectors_are_the_models(lm, folder):
    one = SentenceTransformersSystem(str(folder))
    np.testing.assert_allclose(one.encode(TEXTS, normalize=True), lm.encode(TEXTS), atol=1e-5)
    prompted = one.encode(TEXTS, prompt="Say: ", normalize=True)
    assert not np.allclose(prompted, lm.encode(TEXTS), atol=1e-3)
    assert one.dimensions == lm.dimensions
    assert capabilities(one) == [Encodes, Ranks]


@pytest.mark.slow
def test_it_scores_as_the_model_that_it_was_made_of_and_vectors_are_kept(lm, folder, data, tmp_path):
    tasks = select(["sts", "retrieval", "zero-shot", "linear-probe", "few-shot", "fine-tuning"], data)
    outside = SentenceTransformersSystem(str(folder))
    systems = systems_of([lm, outside, "hybrid"], cache=cache_in(tmp_path))
    done = evaluate(systems, tasks, EvaluationConfig(show_progress=False), folder=tmp_path)
    found = {(result.task, result.system): result for result in done.results}
    label = systems[0].label
    shared = [task.name for task in tasks if isinstance(outside, task.capability)]
    assert len(shared) == len(tasks) - 1
    assert all((task, "minilm") in found for task in shared)
    # Classifiers learn from vectors as they come, and the exported ones have length 1.
    for task in ("sts/small", "retrieval/small", "zero-shot/fruit"):
        assert found[task, "minilm"].score.value == pytest.approx(found[task, label].score.value, abs=1e-4), task
    assert ("retrieval/small", "minilm + BM25") in found
    assert ("fine-tuning/fruit", label) in found
    assert ("fine-tuning/fruit", "minilm") not in found
    description = found["sts/small", "minilm"].description
    assert description["dimensions"] == lm.dimensions
    assert description["fingerprint"] == outside.fingerprint
    again = evaluate(systems, tasks, EvaluationConfig(show_progress=False), folder=tmp_path)
    assert again.reused == len(again.results)


def test_other_weights_or_another_limit_are_another_model(lm, folder, tmp_path):
    first = SentenceTransformersSystem(str(folder))
    assert SentenceTransformersSystem(str(folder)).fingerprint == first.fingerprint
    assert SentenceTransformersSystem(str(folder), max_length=4).fingerprint != first.fingerprint
    moved = shutil.copytree(folder, tmp_path / "moved")
    assert SentenceTransformersSystem(str(moved)).fingerprint == first.fingerprint
    weights = next(lm.model.parameters())
    weights.data[5, 0] += 1
    try:
        changed = lm.export(tmp_path / "changed", "sentence-transformers").folder
    finally:
        weights.data[5, 0] -= 1
    assert SentenceTransformersSystem(str(changed)).fingerprint != first.fingerprint


@pytest.mark.slow
def test_from_the_command_line(tiny_folder, folder, data, tmp_path):
    ran = run_cli(
        "eval", tiny_folder, f"st:{folder}", "bm25", "--tasks", "sts,retrieval,perplexity", "--data", data,
        "-o", tmp_path / "r",
    )  # fmt: skip
    assert ran.code == 0, ran.err
    scores = json.loads((tmp_path / "r" / "results.json").read_text())["scores"]
    assert {row["task"] for row in scores if row["system"] == "minilm"} == {"sts/small", "retrieval/small"}
    page = (tmp_path / "r" / "report.html").read_text("utf-8")
    assert "minilm" in page
    assert "could not be drawn" not in page
    assert str(folder.parent) not in page


class TestMistakes:
    @pytest.mark.parametrize("name", ["st:/nowhere/at/all", "st:./nothing", "st:"])
    def test_no_such_folder(self, name, data, tmp_path):
        ran = run_cli("eval", name, "--tasks", "sts", "--data", data, "-o", tmp_path / "r")
        assert ran.code == 2
        assert "there is no folder" in ran.err

    def test_a_folder_of_something_else(self, data):
        with pytest.raises(ModelError, match="sentence-transformers cannot open"):
            SentenceTransformersSystem(str(data))

    def test_tasks_that_ask_for_more(self, folder, data):
        with pytest.raises(
            ConfigError, match="how probable a text is, and minilm can only encode whole texts and rank"
        ):
            evaluate(systems_of([SentenceTransformersSystem(str(folder)), "bm25"]), select(["perplexity"], data))

    def test_a_name_that_is_none(self):
        with pytest.raises(ConfigError, match="not 'bm52'"):
            systems_of(["bm52"])
