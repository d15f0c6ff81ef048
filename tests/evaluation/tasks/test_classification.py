"""Classification: MTEB's accuracy against logistic regressions of our own on the same samples."""

import warnings
from collections import defaultdict

import numpy as np
import pytest
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import f1_score

from gerund.errors import ConfigError, DataError
from gerund.evaluation.mteb import mteb_seed
from gerund.evaluation.task import EvaluationConfig
from gerund.evaluation.tasks import classification
from gerund.evaluation.tasks.classification import Classification
from tests.evaluation.tables import Table, forbid_network, random_table, same_vectors, write_lines


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    forbid_network(monkeypatch)


LABELS = ("red", "green", "blue")
TRAIN = [(f"train {number}", LABELS[number % 3]) for number in range(40)] + [("alone", "black")]
TEST = [(f"test {number}", LABELS[number % 3]) for number in range(20)]
VALID = [(f"valid {number}", LABELS[number % 3]) for number in range(9)]


def write(folder, **splits):
    for split, rows in splits.items():
        write_lines(folder / f"{split}.jsonl", [{"text": text, "label": label} for text, label in rows])


@pytest.fixture
def folder(tmp_path):
    write(tmp_path / "classification" / "small", train=TRAIN, test=TEST, valid=VALID)
    return tmp_path


def task_in(folder, **options):
    [task] = Classification.find(folder)
    return classification.Classification(name=task.name, files=task.files, **options)


def table_of(rows=(*TRAIN, *TEST, *VALID)):
    """Give every text its colour with noise."""
    rng = np.random.default_rng(0)
    centres = {label: rng.normal(size=4) for label in ("red", "green", "blue", "black")}
    return Table({text: centres[label] + rng.normal(size=4) for text, label in rows})


def expected(table, test, config, *, per_label=8, runs=10):
    """Return accuracies and F1 of the runs, and all that was learnt from."""
    ids = {label: place for place, label in enumerate(sorted({label for _, label in TRAIN}))}
    order, seed = list(range(len(TRAIN))), mteb_seed(config)
    accuracies, scores, learnt = [], [], set()
    for _ in range(runs):
        np.random.RandomState(seed).shuffle(order)
        by_label = defaultdict(list)
        for place in order:
            by_label[TRAIN[place][1]].append(place)
        sampled = {place for places in by_label.values() for place in places[:per_label]}
        places = [place for place in order if place in sampled]
        learnt |= {TRAIN[place][0] for place in places}
        model = LogisticRegression(max_iter=100, random_state=seed)
        x_train, x_test = (
            np.array([table.vectors[text] for text in texts], dtype=np.float32)
            for texts in ([TRAIN[place][0] for place in places], [text for text, _ in test])
        )
        found = model.fit(x_train, [ids[TRAIN[place][1]] for place in places]).predict(x_test)
        gold = np.array([ids[label] for _, label in test])
        accuracies.append(float((found == gold).mean()))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            scores.append(f1_score(gold, found, average="macro"))
    return accuracies, scores, learnt


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 7])
def test_accuracy_is_that_of_logistic_regressions_on_the_same_samples(folder, seed):
    config = EvaluationConfig(seed=seed)
    table = table_of()
    accuracies, f1s, _ = expected(table, TEST, config)
    score = task_in(folder).run(table, config)
    assert score.main == "accuracy"
    assert score.value == pytest.approx(np.mean(accuracies), abs=1e-6)
    assert score.metrics["f1"] == pytest.approx(np.mean(f1s), abs=1e-6)
    assert score.spread == pytest.approx(np.std(accuracies), abs=1e-6)
    assert (score.runs, score.size) == (10, 20)
    assert score == task_in(folder).run(table, config)


def test_options_change_the_samples(folder):
    table = table_of()
    accuracies, _, _ = expected(table, TEST, EvaluationConfig(), per_label=2, runs=3)
    score = task_in(folder, per_label=2, runs=3).run(table, EvaluationConfig())
    assert score.value == pytest.approx(np.mean(accuracies), abs=1e-6)
    assert score.runs == 3
    for wrong in ({"per_label": 0}, {"runs": 0}):
        with pytest.raises(ConfigError, match="1 or more"):
            task_in(folder, **wrong)


@pytest.mark.slow
def test_limit_and_split_choose_what_is_scored(folder):
    table = table_of()
    accuracies, _, _ = expected(table, VALID, EvaluationConfig())
    score = task_in(folder).run(table, EvaluationConfig(split="validation"))
    assert score.value == pytest.approx(np.mean(accuracies), abs=1e-6)
    few = EvaluationConfig(limit=5)
    chosen = task_in(folder).picture_data(few)
    assert set(zip(chosen.texts, chosen.labels, strict=True)) < set(TEST)
    accuracies, _, _ = expected(table, list(zip(chosen.texts, chosen.labels, strict=True)), few)
    score = task_in(folder).run(table, few)
    assert score.size == 5
    assert score.value == pytest.approx(np.mean(accuracies), abs=1e-6)


@pytest.mark.slow
def test_all_that_is_encoded_is_known_before(folder):
    for config in (EvaluationConfig(), EvaluationConfig(seed=3, limit=4, prompts={"classification": "P: "})):
        table, task = table_of(), task_in(folder, per_label=2, runs=2)
        task.run(table, config)
        prompt = task.prompt(config)
        assert table.heard() == {(prompt, text) for text in task.texts(config)}
        _, _, learnt = expected(table, TEST, config, per_label=2, runs=2)
        assert learnt < {text for text, _ in TRAIN}
        assert learnt < set(task.texts(config))


@pytest.mark.slow
@pytest.mark.parametrize("value", [0.0, 1.0])
def test_constant_embeddings_score_one_class(folder, value):
    score = task_in(folder).run(same_vectors([text for text, _ in [*TRAIN, *TEST]], value), EvaluationConfig())
    assert 6 / 20 <= score.value <= 7 / 20
    assert score.notes == ()


@pytest.mark.slow
def test_unfinished_regressions_are_expected(folder):
    # Vectors far from the origin, which a hundred iterations do not separate.
    table = random_table([text for text, _ in [*TRAIN, *TEST]], width=4)
    far = Table({text: vector + 30 for text, vector in table.vectors.items()})
    with pytest.warns(ConvergenceWarning, match="lbfgs failed to converge"):
        accuracies, _, _ = expected(far, TEST, EvaluationConfig())
    assert task_in(folder).run(far, EvaluationConfig()).value == pytest.approx(np.mean(accuracies), abs=1e-6)


def test_a_label_that_cannot_be_learnt_is_refused(tmp_path):
    write(tmp_path / "classification" / "small", train=TRAIN, test=[*TEST, ("x", "white")])
    with pytest.raises(DataError, match="no example of label 'white'"):
        task_in(tmp_path).run(table_of(), EvaluationConfig())
    write(tmp_path / "classification" / "small", train=[TRAIN[0], TRAIN[3]], test=[TEST[0]])
    with pytest.raises(DataError, match="every example has the label 'red'"):
        task_in(tmp_path).run(table_of(), EvaluationConfig())


def test_tasks_are_folders_with_a_training_and_a_test_set(folder):
    write(folder / "classification" / "untested", train=TRAIN, valid=VALID)
    [task] = Classification.find(folder)
    assert task.name == "classification/small"
    assert task.has_validation
    assert Classification.find(folder / "absent") == []
