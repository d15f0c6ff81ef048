import statistics
from dataclasses import replace
from pathlib import Path

import pytest

import gerund
from gerund.errors import ConfigError, DataError
from gerund.evaluation.systems.language_model import LanguageModelSystem
from gerund.evaluation.task import EvaluationConfig
from gerund.papers.linear_probes import FewShot, accuracy, logistic_regression
from tests.evaluation.made_up import Constant, Letters, fruits, write_classification

FEW = (
    "1 of 3 classes have fewer than 10 training examples and give all of theirs",
    "3 of 3 classes have fewer than 100 training examples and give all of theirs",
)


@pytest.fixture
def task(tmp_path: Path) -> FewShot:
    # 30 of two classes, a single one of the third.
    write_classification(tmp_path, train=fruits(30)[:61], test=fruits(5, start=40))
    [found] = FewShot.find(tmp_path)
    return found


def test_found_where_there_are_files(task: FewShot, tmp_path: Path) -> None:
    assert (task.name, task.runs, task.has_validation) == ("few-shot/made-up", 5, False)
    assert FewShot.find(tmp_path / "none") == []


def test_samples(task: FewShot) -> None:
    train, _ = task.learnt_and_scored(EvaluationConfig())
    samples = task._samples(train, EvaluationConfig())
    assert sorted(samples) == [(shots, number) for shots in (10, 100) for number in range(5)]
    for (shots, number), sample in samples.items():
        labels = [train.labels[place] for place in sample]
        assert len(set(sample)) == len(sample)
        expected = {"apple_tree": min(shots, 30), "fig-tree": min(shots, 30), "plum": 1}
        assert {label: labels.count(label) for label in set(labels)} == expected
        assert set(samples[10, number]) <= set(samples[100, number])
    assert len({tuple(samples[10, number]) for number in range(5)}) == 5
    assert task._samples(train, EvaluationConfig()) == samples
    assert task._samples(train, EvaluationConfig(seed=1)) != samples


def test_the_score_is_the_mean_over_the_samples(task: FewShot) -> None:
    score = task.run(Letters(), EvaluationConfig())
    train, test = task.learnt_and_scored(EvaluationConfig())
    found: dict[int, list[float]] = {10: [], 100: []}
    for (shots, _), sample in task._samples(train, EvaluationConfig()).items():
        predicted = logistic_regression(
            Letters().encode([train.texts[place] for place in sample]),
            [train.labels[place] for place in sample],
            Letters().encode(test.texts),
            seed=0,
        )
        found[shots].append(accuracy(test.labels, predicted))
    assert score.main == "accuracy_at_10"
    assert score.metrics == pytest.approx(
        {f"accuracy_at_{shots}": statistics.fmean(one) for shots, one in found.items()}
    )
    assert score.spread == pytest.approx(statistics.stdev(found[10]))
    assert (score.runs, score.size, score.notes) == (5, 15, FEW)
    assert 0.3 < score.value <= 1


@pytest.mark.slow
def test_every_system_learns_from_the_same_texts(task: FewShot, tiny_folder: Path) -> None:
    lm = gerund.load(tiny_folder, attention="causal")
    asked = []

    class Asked(LanguageModelSystem):
        def encode(self, texts, **more):
            asked.append(list(texts))
            return super().encode(texts, **more)

    letters = Letters()
    task.run(letters, EvaluationConfig(seed=2))
    task.run(Asked("causal", lm), EvaluationConfig(seed=2))
    assert asked == [letters.encoded]
    assert letters.encoded == task.texts(EvaluationConfig(seed=2))


@pytest.mark.slow
def test_the_same_seed_gives_the_same_score(tmp_path: Path) -> None:
    # Texts that say nothing of their class, so that the sample matters.
    rows = [
        (f"{number * 7919 % 1000:03b}".replace("1", "ab").replace("0", "c"), "xyz"[number % 3]) for number in range(150)
    ]
    write_classification(tmp_path, train=rows[:90], test=rows[90:])
    [task] = FewShot.find(tmp_path)
    first, second, other = (task.run(Letters(), EvaluationConfig(seed=seed)) for seed in (0, 0, 1))
    assert first == second
    assert first.value != other.value
    assert first.spread


def test_one_sample_has_no_spread(task: FewShot) -> None:
    score = replace(task, runs=1).run(Letters(), EvaluationConfig())
    assert (score.spread, score.runs) == (None, 1)


def test_a_limit_counts_the_texts_of_each_split(task: FewShot) -> None:
    letters = Letters()
    score = task.run(letters, EvaluationConfig(limit=6))
    assert score.size == 6
    assert len(letters.encoded) == 12
    assert task.run(letters, EvaluationConfig(limit=1)).size == 1


def test_a_constant_embedding_is_no_error(tmp_path: Path) -> None:
    rows = [("t", "b"), ("t", "b"), ("t", "a")]
    write_classification(tmp_path, train=rows, test=[*rows, ("t", "b")])
    [task] = FewShot.find(tmp_path)
    assert task.run(Constant(), EvaluationConfig()).metrics == {"accuracy_at_10": 0.75, "accuracy_at_100": 0.75}


def test_bad_input(task: FewShot) -> None:
    with pytest.raises(ConfigError, match="runs=0 leaves nothing"):
        replace(task, runs=0)
    write_classification(task.files[0].parents[2], test=[("a pear", "pear")])
    with pytest.raises(DataError, match="no example of label 'pear'"):
        task.run(Letters(), EvaluationConfig())
