from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import gerund
from gerund.errors import ConfigError, DataError
from gerund.evaluation.systems.language_model import language_model_system
from gerund.evaluation.task import EvaluationConfig
from gerund.evaluation.tasks.classification import ZeroShot
from tests.evaluation.made_up import Constant, Letters, fruits, write_classification

NAMES = ["apple tree", "fig tree", "plum"]


@pytest.fixture
def task(tmp_path: Path) -> ZeroShot:
    write_classification(tmp_path, train=fruits(2), test=fruits(4, start=2))
    [found] = ZeroShot.find(tmp_path)
    return found


def test_found_where_there_is_a_test_set(tmp_path: Path) -> None:
    write_classification(tmp_path, "b", test=fruits(1))
    write_classification(tmp_path, "a", test=fruits(1), valid=fruits(1))
    write_classification(tmp_path, "c", train=fruits(1))
    assert [(task.name, task.has_validation) for task in ZeroShot.find(tmp_path)] == [
        ("zero-shot/a", True),
        ("zero-shot/b", False),
    ]


def test_the_nearest_name_wins(task: ZeroShot) -> None:
    score = task.run(Letters(), EvaluationConfig())
    texts, labels = zip(*fruits(4, start=2), strict=True)
    right = 0
    for vector, label in zip(Letters().encode(texts), labels, strict=True):
        cosines = [vector @ name / np.linalg.norm(vector) / np.linalg.norm(name) for name in Letters().encode(NAMES)]
        right += ["apple_tree", "fig-tree", "plum"][int(np.argmax(cosines))] == label
    assert score.value == pytest.approx(right / 12)
    assert 0.5 < score.value <= 1
    assert score.metrics["accuracy_at_5"] == 1.0
    assert score.notes == ("chance is 33.33% with 3 classes, 100.00% within the 5 nearest",)
    assert score.size == 12


def test_within_the_five_nearest(tmp_path: Path) -> None:
    # The text is nearest to the names with the most a, and its own class has one less each time.
    labels = [f"{'a' * (9 - n)}{'b' * n}" for n in range(9)]
    write_classification(tmp_path, train=[("any", label) for label in labels], test=[("a" * 9, labels[4])])
    [task] = ZeroShot.find(tmp_path)
    assert task.run(Letters(), EvaluationConfig()).metrics == {"accuracy": 0.0, "accuracy_at_5": 1.0}
    write_classification(tmp_path, test=[("a" * 9, labels[5])])
    score = task.run(Letters(), EvaluationConfig())
    assert score.metrics == {"accuracy": 0.0, "accuracy_at_5": 0.0}
    assert score.notes == ("chance is 11.11% with 9 classes, 55.56% within the 5 nearest",)


def test_equally_near_names_go_by_the_alphabet(tmp_path: Path, task: ZeroShot) -> None:
    # All three classes are equally near; apple_tree comes first.
    assert task.run(Constant(), EvaluationConfig()).value == pytest.approx(1 / 3)
    write_classification(tmp_path, test=[("x", "plum")])
    assert task.run(Constant(), EvaluationConfig()).value == 0.0
    write_classification(tmp_path, test=[("x", "apple_tree")])
    assert task.run(Constant(), EvaluationConfig()).value == 1.0


def test_a_text_without_a_vector_is_no_error(tmp_path: Path, task: ZeroShot) -> None:
    write_classification(tmp_path, test=[("", "apple_tree"), ("", "plum")])
    assert task.run(Letters(), EvaluationConfig()).value == 0.5


def test_names_and_template(task: ZeroShot) -> None:
    assert task.texts(EvaluationConfig())[-3:] == NAMES
    asking = replace(task, label_template="It is about {} {").texts(EvaluationConfig())
    assert asking[-1] == "It is about plum {"
    with pytest.raises(ConfigError, match=r"label_template='about' has no \{\} for the name"):
        replace(task, label_template="about")


def test_the_texts_are_those_that_are_encoded(task: ZeroShot) -> None:
    for config in (EvaluationConfig(), EvaluationConfig(limit=3, seed=1, prompts={"zero-shot": "say: "})):
        letters = Letters()
        score = task.run(letters, config)
        assert letters.encoded == task.texts(config)
        assert set(letters.prompts) == {task.prompt(config)}
        assert score.size == len(letters.encoded) - 3


def test_a_real_model(task: ZeroShot, tiny_folder: Path) -> None:
    lm = gerund.load(tiny_folder, attention="causal")
    texts, labels = zip(*fruits(4, start=2), strict=True)
    nearest = lm.similarity(list(texts), NAMES).argmax(axis=1)
    expected = np.mean(
        [["apple_tree", "fig-tree", "plum"][place] == label for place, label in zip(nearest, labels, strict=True)]
    )
    assert task.run(language_model_system("tiny", lm), EvaluationConfig()).value == pytest.approx(expected)


@pytest.mark.parametrize("label", [3, "-7", "_", "4.5"])
def test_labels_that_say_nothing_are_refused(tmp_path: Path, task: ZeroShot, label: object) -> None:
    write_classification(tmp_path, train=[("a text", label)])
    with pytest.raises(
        DataError, match=r"train.jsonl: the label '[^a-z]+' has no letter, so its embedding means nothing"
    ):
        task.run(Letters(), EvaluationConfig())
