from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from gerund.errors import DataError
from gerund.evaluation.data_files import LabelledTexts
from gerund.evaluation.task import EvaluationConfig, LabelledTask, Score, sampled
from tests.evaluation.tables import fruits, write_classification


@dataclass(frozen=True, kw_only=True)
class Counting(LabelledTask):
    kind: ClassVar[str] = "counting"

    def run(self, system, config: EvaluationConfig) -> Score:
        return Score("n", {"n": len(self.scored(config).texts)})


@dataclass(frozen=True, kw_only=True)
class TestOnly(Counting):
    __test__ = False
    needed_splits: ClassVar[tuple[str, ...]] = ("test",)


def test_tasks_are_found_by_the_splits_they_need(tmp_path: Path) -> None:
    assert Counting.find(tmp_path) == []
    write_classification(tmp_path, "b", train=fruits(1), test=fruits(1))
    write_classification(tmp_path, "a", train=fruits(1), dev=fruits(1), test=fruits(1))
    write_classification(tmp_path, "only-test", test=fruits(1))
    write_classification(tmp_path, "only-train", train=fruits(1))
    (tmp_path / "classification" / "notes.txt").write_text("no folder")
    first, second = Counting.find(tmp_path)
    assert (first.name, second.name) == ("counting/a", "counting/b")
    assert [path.name for path in first.files] == ["train.jsonl", "dev.jsonl", "test.jsonl"]
    assert (first.has_validation, second.has_validation) == (True, False)
    assert [task.title for task in TestOnly.find(tmp_path)] == ["a", "b", "only-test"]


def test_the_split_that_is_scored(tmp_path: Path) -> None:
    write_classification(tmp_path, train=fruits(3), valid=fruits(1, start=3), test=fruits(2, start=5))
    [task] = Counting.find(tmp_path)
    train, test = task.learnt_and_scored(EvaluationConfig())
    assert list(zip(train.texts, train.labels, strict=True)) == fruits(3)
    assert list(zip(test.texts, test.labels, strict=True)) == fruits(2, start=5)
    train, valid = task.learnt_and_scored(EvaluationConfig(split="validation"))
    assert list(zip(train.texts, train.labels, strict=True)) == fruits(3)
    assert list(zip(valid.texts, valid.labels, strict=True)) == fruits(1, start=3)
    assert task.picture_data(EvaluationConfig()) == test
    assert task.picture_data(EvaluationConfig(split="validation")) == valid


def test_a_split_that_is_not_there(tmp_path: Path) -> None:
    write_classification(tmp_path, train=fruits(1), test=fruits(1))
    [task] = Counting.find(tmp_path)
    with pytest.raises(DataError, match=r"made-up: there is no file of the validation split"):
        task.scored(EvaluationConfig(split="validation"))
    task.files[0].unlink()
    with pytest.raises(DataError, match=r"made-up: there is no file of the train split"):
        task.learnt_and_scored(EvaluationConfig())


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "test.jsonl: the file is empty"),
        ([("a pear", "pear")], "train.jsonl: no example of label 'pear'"),
        ([(3, "plum")], "test.jsonl, line 1: 'text' is not a text"),
    ],
)
def test_what_cannot_be_scored_is_refused(tmp_path: Path, rows: list, message: str) -> None:
    write_classification(tmp_path, train=fruits(1), test=rows)
    [task] = Counting.find(tmp_path)
    with pytest.raises(DataError, match=message):
        task.learnt_and_scored(EvaluationConfig())


def test_a_limit_draws_by_the_seed_and_keeps_the_order() -> None:
    texts = LabelledTexts([str(number) for number in range(50)], ["even", "odd"] * 25)
    some = sampled(texts, EvaluationConfig(limit=20))
    numbers = [int(text) for text in some.texts]
    assert numbers == sorted(set(numbers))
    assert len(numbers) == 20
    assert numbers != list(range(20))
    assert some.labels == ["odd" if number % 2 else "even" for number in numbers]
    assert sampled(texts, EvaluationConfig(limit=20)) == some
    assert sampled(texts, EvaluationConfig(limit=20, seed=1)) != some
    assert sampled(texts, EvaluationConfig(limit=50)) is texts
    assert sampled(texts, EvaluationConfig()) is texts


def test_texts_at_some_places() -> None:
    assert LabelledTexts(["a", "b", "c"], ["x", "y", "z"]).take([2, 0]) == LabelledTexts(["c", "a"], ["z", "x"])
