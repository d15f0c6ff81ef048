"""Classification: MTEB's accuracy against logistic regressions of our own on the same samples."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gerund.errors import ConfigError, DataError
from gerund.evaluation.task import EvaluationConfig
from gerund.evaluation.tasks import classification
from gerund.evaluation.tasks.classification import Classification, Clustering, ZeroShot
from tests.evaluation.tables import (
    FakeEncoder,
    Letters,
    Table,
    forbid_network,
    fruits,
    same_vectors,
    write_classification,
    write_lines,
)


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    forbid_network(monkeypatch)


LABELS = ("red", "green", "blue")
TRAIN = [(f"train {number}", LABELS[number % 3]) for number in range(40)] + [("alone", "black")]
TEST = [(f"test {number}", LABELS[number % 3]) for number in range(20)]
VALID = [(f"valid {number}", LABELS[number % 3]) for number in range(9)]


@pytest.fixture
def folder(tmp_path):
    write_classification(tmp_path, "small", train=TRAIN, test=TEST, valid=VALID)
    return tmp_path


def task_in(folder, **options):
    [task] = Classification.find(folder)
    return classification.Classification(name=task.name, files=task.files, **options)


def table_of(rows=(*TRAIN, *TEST, *VALID)):
    """Give every text its colour with noise."""
    rng = np.random.default_rng(0)
    centres = {label: rng.normal(size=4) for label in ("red", "green", "blue", "black")}
    return Table({text: centres[label] + rng.normal(size=4) for text, label in rows})


def test_accuracy_over_runs_on_samples_of_the_training_set(folder):
    score = task_in(folder).run(table_of(), EvaluationConfig())
    assert (score.main, score.runs, score.size) == ("accuracy", 10, 20)
    assert set(score.metrics) == {"accuracy", "f1"}
    assert 0.5 < score.value < 1
    assert 0 < score.spread < 0.2
    assert score == task_in(folder).run(table_of(), EvaluationConfig())
    assert task_in(folder, per_label=2, runs=3).run(table_of(), EvaluationConfig()).runs == 3
    whole = task_in(folder, per_label=14).run(table_of(), EvaluationConfig())
    assert (whole.runs, whole.spread) == (1, 0.0), "runs that learn from the same texts"
    for wrong in ({"per_label": 0}, {"runs": 0}):
        with pytest.raises(ConfigError, match="1 or more"):
            task_in(folder, **wrong)


def test_limit_and_split_choose_what_is_scored_and_all_that_is_encoded_is_known_before(folder):
    few = EvaluationConfig(seed=3, limit=4, prompts={"classification": "P: "})
    for config, rows in ((few, TEST), (EvaluationConfig(split="validation"), VALID)):
        table, task = table_of(), task_in(folder, per_label=2, runs=2)
        score = task.run(table, config)
        chosen = task.picture_data(config)
        assert set(zip(chosen.texts, chosen.labels, strict=True)) <= set(rows)
        assert score.size == len(chosen.texts) == (config.limit or len(rows))
        assert table.heard() == {(task.prompt(config), text) for text in task.texts(config)}
        assert not set(task.texts(config)) >= {text for text, _ in TRAIN}, "two examples per label and run are sampled"


def test_constant_embeddings_score_one_class(folder):
    score = task_in(folder, runs=2).run(same_vectors([text for text, _ in [*TRAIN, *TEST]], 0.0), EvaluationConfig())
    assert 6 / 20 <= score.value <= 7 / 20
    assert score.notes == ()


def test_tasks_are_folders_with_a_training_and_a_test_set(folder):
    write_classification(folder, "untested", train=TRAIN, valid=VALID)
    [task] = Classification.find(folder)
    assert task.name == "classification/small"
    assert task.has_validation
    assert Classification.find(folder / "absent") == []


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
    assert task.run(FakeEncoder("constant"), EvaluationConfig()).value == pytest.approx(1 / 3)
    write_classification(tmp_path, test=[("x", "plum")])
    assert task.run(FakeEncoder("constant"), EvaluationConfig()).value == 0.0
    write_classification(tmp_path, test=[("x", "apple_tree")])
    assert task.run(FakeEncoder("constant"), EvaluationConfig()).value == 1.0


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


@pytest.mark.parametrize("label", [3, "-7", "_", "4.5"])
def test_labels_that_say_nothing_are_refused(tmp_path: Path, task: ZeroShot, label: object) -> None:
    write_classification(tmp_path, train=[("a text", label)])
    with pytest.raises(
        DataError, match=r"train.jsonl: the label '[^a-z]+' has no letter, so its embedding means nothing"
    ):
        task.run(Letters(), EvaluationConfig())


ROWS = [(f"text {number}", "abc"[number * number % 3]) for number in range(40)] + [("alone", "d")]
TEXTS = [text for text, _ in ROWS]


@pytest.fixture
def task_clustering(tmp_path):
    write_lines(tmp_path / "clustering" / "small.jsonl", [{"text": text, "label": label} for text, label in ROWS])
    [found] = Clustering.find(tmp_path)
    return found


def table_of_clustering():
    rng = np.random.default_rng(0)
    centres = {label: 2 * rng.normal(size=3) for label in "abcd"}
    return Table({text: centres[label] + rng.normal(size=3) for text, label in ROWS})


def test_v_measure_over_runs(task_clustering):
    score = task_clustering.run(table_of_clustering(), EvaluationConfig())
    assert (score.main, score.runs, score.size) == ("v_measure", 10, 41)
    assert 0.05 < score.value < 0.95
    assert score.spread > 0
    assert score == task_clustering.run(table_of_clustering(), EvaluationConfig())
    apart = Table({text: np.eye(4)["abcd".index(label)] for text, label in ROWS})
    assert task_clustering.run(apart, EvaluationConfig()).value == pytest.approx(1, abs=0.05)


def test_limit_samples_texts(task_clustering):
    config = EvaluationConfig(limit=9)
    chosen = task_clustering.picture_data(config)
    rows = list(zip(chosen.texts, chosen.labels, strict=True))
    assert rows != ROWS[:9]
    assert set(rows) < set(ROWS)
    assert task_clustering.run(table_of_clustering(), config).size == len(rows) == 9


def test_all_that_is_encoded_is_known_before_clustering(task_clustering):
    for config in (EvaluationConfig(), EvaluationConfig(limit=9, prompts={"clustering": "P: "})):
        table = table_of_clustering()
        task_clustering.run(table, config)
        assert table.heard() == {(task_clustering.prompt(config), text) for text in task_clustering.texts(config)}


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_constant_embeddings_score_nothing(task_clustering, value):
    assert task_clustering.run(same_vectors(TEXTS, value), EvaluationConfig()).value == pytest.approx(0.0, abs=1e-9)


def test_a_single_label_is_refused(tmp_path):
    write_lines(tmp_path / "clustering" / "flat.jsonl", [{"text": text, "label": "a"} for text in TEXTS])
    [task_clustering] = Clustering.find(tmp_path)
    with pytest.raises(DataError, match=r"flat.jsonl: every text has the label 'a'"):
        task_clustering.run(table_of_clustering(), EvaluationConfig())


def test_tasks_are_the_files_of_a_folder(task_clustering, tmp_path):
    assert task_clustering.name == "clustering/small"
    assert not task_clustering.has_validation
    assert Clustering.find(tmp_path / "absent") == []
