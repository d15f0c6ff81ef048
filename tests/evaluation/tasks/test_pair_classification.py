"""Pair classification: MTEB's average precision against its definition, and what is refused."""

import numpy as np
import pytest

from gerund.errors import DataError
from gerund.evaluation.task import EvaluationConfig
from gerund.evaluation.tasks.similarity import PairClassification
from tests.evaluation.tables import forbid_network, random_table, same_vectors, write_lines


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    forbid_network(monkeypatch)


PAIRS = [("a", "b", 1), ("c", "d", 0), ("a", "e", 1), ("b", "f", 0), ("d", "e", 0), ("e", "d", 1), ("f", "a", 0)]


@pytest.fixture
def task(tmp_path):
    rows = [{"text1": left, "text2": right, "label": label} for left, right, label in PAIRS]
    write_lines(tmp_path / "pairs" / "small.jsonl", rows)
    [found] = PairClassification.find(tmp_path)
    return found


def average_precision(scores, labels):
    """Sum over thresholds of precision times the recall gained: pairs of one score are taken together."""
    total, gained = 0.0, 0
    for threshold in sorted(set(scores), reverse=True):
        taken = [label for score, label in zip(scores, labels, strict=True) if score >= threshold]
        total += sum(taken) / len(taken) * (sum(taken) - gained)
        gained = sum(taken)
    return total / sum(labels)


def test_average_precision_by_its_definition(task):
    table = random_table("abcdef", seed=3)
    labels = [label for *_, label in PAIRS]
    sides = [[np.asarray(table.vectors[pair[side]]) for pair in PAIRS] for side in (0, 1)]
    pairs = list(zip(*sides, strict=True))
    similarities = {
        "cosine": [a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in pairs],
        "dot": [a @ b for a, b in pairs],
        "euclidean": [-np.linalg.norm(a - b) for a, b in pairs],
        "manhattan": [-np.abs(a - b).sum() for a, b in pairs],
    }
    # (d, e) and (e, d) tie exactly.
    wanted = {name: average_precision(np.round(values, 9), labels) for name, values in similarities.items()}
    score = task.run(table, EvaluationConfig())
    assert len(set(wanted.values())) > 1
    assert score.main == "max_ap"
    assert score.metrics["cosine_ap"] == pytest.approx(wanted["cosine"], abs=1e-6)
    assert score.value == pytest.approx(max(wanted.values()), abs=1e-6)
    told = [
        np.mean([(cosine >= threshold) == label for cosine, label in zip(similarities["cosine"], labels, strict=True)])
        for threshold in np.linspace(0, 1, 100)
    ]
    assert score.metrics["accuracy"] == pytest.approx(max(told), abs=1e-6)
    assert score.size == 7


def test_constant_embeddings_score_the_share_of_ones(task):
    for value in (0.0, 1.0):
        score = task.run(same_vectors("abcdef", value), EvaluationConfig())
        precision = {"max_ap": pytest.approx(3 / 7), "cosine_ap": pytest.approx(3 / 7)}
        # The threshold 0 takes all of them; one that takes none is there where the cosine is below 1.
        assert score.metrics == {**precision, "accuracy": pytest.approx(4 / 7, abs=(1 / 7 + 1e-6) * value + 1e-6)}


def test_all_that_is_encoded_is_known_before(task):
    for config in (EvaluationConfig(), EvaluationConfig(limit=2, prompts={"pair-classification/small": "P: "})):
        table = random_table("abcdef")
        task.run(table, config)
        assert table.heard() == {(task.prompt(config), text) for text in task.texts(config)}


def test_pairs_of_one_kind_are_refused(task):
    with pytest.raises(DataError, match=r"small.jsonl: all pairs have label 1; both 0 and 1 are needed"):
        task.run(random_table("abcdef"), EvaluationConfig(limit=1))


def test_tasks_are_the_files_of_a_folder(task, tmp_path):
    assert task.name == "pair-classification/small"
    assert not task.has_validation
    assert PairClassification.find(tmp_path / "absent") == []
