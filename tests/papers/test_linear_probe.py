from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import gerund
from gerund.errors import ConfigError, DataError
from gerund.evaluation.run import evaluate
from gerund.evaluation.systems.language_model import language_model_system
from gerund.evaluation.systems.search import BM25System
from gerund.evaluation.task import EvaluationConfig
from gerund.papers.linear_probes import LinearProbe
from tests.evaluation.made_up import Constant, Letters, fruits, write_classification


@pytest.fixture
def task(tmp_path: Path) -> LinearProbe:
    write_classification(tmp_path, train=fruits(12), valid=fruits(3, start=12), test=fruits(5, start=15))
    [found] = LinearProbe.find(tmp_path)
    return found


def test_found_where_there_are_files(task: LinearProbe, tmp_path: Path) -> None:
    assert task.name == "linear-probe/made-up"
    assert task.has_validation
    assert LinearProbe.find(tmp_path / "classification") == []


def test_what_letters_tell_apart_is_learnt(task: LinearProbe) -> None:
    score = task.run(Letters(), EvaluationConfig())
    assert (score.main, score.size, score.notes, score.spread) == ("accuracy", 15, (), None)
    assert score.metrics == {"accuracy": 1.0, "weighted_f1": 1.0, "macro_f1": 1.0}
    assert task.run(Letters(), EvaluationConfig(split="validation")).size == 9


def test_the_score_is_that_of_a_plain_fit(task: LinearProbe, tiny_folder: Path) -> None:
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import accuracy_score, f1_score

    lm = gerund.load(tiny_folder, attention="causal")
    score = task.run(language_model_system("tiny", lm), EvaluationConfig(prompts={"linear-probe": "fruit: "}))
    texts, labels = zip(*fruits(12), strict=True)
    test_texts, test_labels = zip(*fruits(5, start=15), strict=True)
    vectors, test_vectors = (lm.encode(list(some), prompt="fruit: ", normalize=False) for some in (texts, test_texts))
    predicted = LogisticRegression(max_iter=10000).fit(vectors, labels).predict(test_vectors)
    assert score.value == pytest.approx(accuracy_score(test_labels, predicted))
    for average in ("macro", "weighted"):  # LBW's Table 2 has the weighted one
        assert score.metrics[f"{average}_f1"] == pytest.approx(f1_score(test_labels, predicted, average=average))


def test_classes_weigh_in_the_weighted_f1_as_often_as_they_occur(tmp_path: Path, tiny_folder: Path) -> None:
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import f1_score

    # Five apples, five figs and a plum, and a training that calls most plums apples.
    train, test = fruits(12), fruits(5, start=15)[:11]
    mixed = [(text, "apple_tree" if label == "plum" else label) for text, label in train[:-2]] + train[-2:]
    write_classification(tmp_path, train=mixed, test=test)
    [task] = LinearProbe.find(tmp_path)
    lm = gerund.load(tiny_folder, attention="causal")
    score = task.run(language_model_system("tiny", lm), EvaluationConfig())
    texts, labels = zip(*mixed, strict=True)
    vectors, test_vectors = (lm.encode(some, normalize=False) for some in (list(texts), [text for text, _ in test]))
    predicted = LogisticRegression(max_iter=10000).fit(vectors, labels).predict(test_vectors)
    gold = [label for _, label in test]
    weighted, macro = (f1_score(gold, predicted, average=average) for average in ("weighted", "macro"))
    assert abs(weighted - macro) > 0.02
    assert score.metrics["weighted_f1"] == pytest.approx(weighted)
    assert score.metrics["macro_f1"] == pytest.approx(macro)


def test_the_texts_are_those_that_are_encoded(task: LinearProbe) -> None:
    for config in (
        EvaluationConfig(),
        EvaluationConfig(limit=7, seed=3),
        EvaluationConfig(split="validation", prompts={task.name: "say: "}),
    ):
        letters = Letters()
        task.run(letters, config)
        assert letters.encoded == task.texts(config)
        assert set(letters.prompts) == {task.prompt(config)}


def test_a_limit_counts_the_texts_of_each_split(task: LinearProbe) -> None:
    letters = Letters()
    assert task.run(letters, EvaluationConfig(limit=7)).size == 7
    assert len(letters.encoded) == 14
    # A single class among what is left is no error.
    assert 0 <= task.run(letters, EvaluationConfig(limit=1)).value <= 1


def test_a_constant_embedding_gets_the_share_of_the_largest_class(tmp_path: Path) -> None:
    write_classification(tmp_path, train=fruits(4) + fruits(6)[-6:], test=fruits(5) + fruits(5)[-5:])
    [task] = LinearProbe.find(tmp_path)
    score = task.run(Constant(), EvaluationConfig())
    assert score.value == 0.5
    assert score.metrics["macro_f1"] == pytest.approx((2 / 3) / 3)


def test_smote_is_only_where_it_is_asked_for(task: LinearProbe) -> None:
    rare = [("only one", "rare"), *fruits(12), ("plums are um", "plum")]
    folder = task.files[0].parents[2]
    write_classification(folder, train=rare, test=fruits(5, start=15))
    balanced = replace(task, smote="balanced").run(Letters(), EvaluationConfig())
    assert balanced.notes == (
        "SMOTE: 38 training examples became 40",
        "SMOTE left classes of a single example as they are: rare",
    )
    released = replace(task, smote="released").run(Letters(), EvaluationConfig())
    assert released.notes[0] == "SMOTE: 38 training examples became 186"  # five times 37, and the single one
    assert task.run(Letters(), EvaluationConfig()).notes == ()


def test_smote_makes_examples_up_before_the_fit(tmp_path: Path) -> None:
    from sklearn.linear_model import LogisticRegression

    from gerund.papers.linear_probes import oversample

    rng = np.random.default_rng(0)
    rows = [("".join(rng.choice(list("abcde"), size=6)), str(rng.choice(["x", "y", "y", "y"]))) for _ in range(120)]
    write_classification(tmp_path, train=rows[:80], test=rows[80:])
    [task] = LinearProbe.find(tmp_path)
    train, test = task.learnt_and_scored(EvaluationConfig())
    accuracies = {}
    for rule, times in (("balanced", None), ("released", 5)):
        vectors, labels = oversample(Letters().encode(train.texts), train.labels, seed=5, times=times)
        predicted = LogisticRegression(max_iter=100).fit(vectors, labels).predict(Letters().encode(test.texts))
        accuracies[rule] = np.mean(predicted == np.array(test.labels))
        found = replace(task, smote=rule).run(Letters(), EvaluationConfig(seed=5))
        assert found.value == pytest.approx(accuracies[rule])
    # Balanced, "x" is said of three times as many as there are; as likely as it was, it costs no accuracy.
    never = task.run(Letters(), EvaluationConfig(seed=5)).value
    assert accuracies["balanced"] < never - 0.1
    assert accuracies["released"] >= never - 0.05


def test_whole_numbers_are_labels_too(tmp_path: Path) -> None:
    rows = [(text, ["apple_tree", "fig-tree", "plum"].index(label)) for text, label in fruits(12)]
    write_classification(tmp_path, train=rows, test=rows[:3])
    [task] = LinearProbe.find(tmp_path)
    assert task.run(Letters(), EvaluationConfig()).value == 1.0


def test_bad_input(task: LinearProbe) -> None:
    with pytest.raises(ConfigError, match="unknown value of smote 'maybe'; valid are: never, released"):
        replace(task, smote="maybe")
    write_classification(task.files[0].parents[2], test=[("a pear", "pear")])
    with pytest.raises(DataError, match="no example of label 'pear'"):
        task.run(Letters(), EvaluationConfig())
    with pytest.raises(ConfigError, match="can encode whole texts, and bm25 can only rank documents"):
        evaluate([BM25System()], [replace(task)])
