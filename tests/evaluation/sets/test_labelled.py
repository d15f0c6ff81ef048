"""Files of texts with labels: what is read, what is refused, and with which words."""

import gzip
import json
import lzma

import pytest

from gerund.errors import DataError
from gerund.evaluation.data_files import LabelledTexts, check_labels, labelled_splits, named_files, read_labelled


def rows(*pairs):
    return "".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in pairs)


@pytest.mark.parametrize("ending, opener", [("jsonl", open), ("jsonl.xz", lzma.open), ("jsonl.gz", gzip.open)])
def test_texts_and_labels_keep_their_order(tmp_path, ending, opener):
    path = tmp_path / f"set.{ending}"
    with opener(path, "wb") as file:
        file.write(rows(("b", "x"), ("", 3), ("a", "x")).encode())
    assert read_labelled(path) == LabelledTexts(["b", "", "a"], ["x", "3", "x"])


@pytest.mark.parametrize(
    "line, said",
    [
        ('{"text": "a"}', "line 2: no field 'label'"),
        ('{"text": 5, "label": "x"}', "line 2: 'text' is not a text"),
        ('{"text": "a", "label": " "}', "line 2: 'label' is empty"),
        ('{"text": "a", "label": 1.5}', "line 2: 'label'"),
        ("[1]", "line 2: expected a JSON object"),
        ("{", "line 2: not valid JSON"),
        pytest.param('{"text": ' + "[" * 100_000, "line 2: not valid JSON", id="nested too deep"),
    ],
)
def test_malformed_rows_are_refused_with_file_and_line(tmp_path, line, said):
    path = tmp_path / "set.jsonl"
    path.write_text(rows(("a", "x")) + line + "\n")
    with pytest.raises(DataError, match=said) as caught:
        read_labelled(path)
    assert str(path) in str(caught.value)


def test_an_empty_or_missing_file_is_refused(tmp_path):
    path = tmp_path / "set.jsonl"
    with pytest.raises(DataError, match="no such file"):
        read_labelled(path)
    path.write_text("\n")
    with pytest.raises(DataError, match="empty"):
        read_labelled(path)


@pytest.mark.parametrize("name", ["valid.jsonl", "validation.jsonl", "dev.jsonl.gz"])
def test_splits_go_by_any_of_their_names(tmp_path, name):
    for file in ("train.jsonl.xz", name, "test.jsonl", "README.md"):
        (tmp_path / file).touch()
    assert labelled_splits(tmp_path) == {
        "train": tmp_path / "train.jsonl.xz",
        "validation": tmp_path / name,
        "test": tmp_path / "test.jsonl",
    }


def test_a_folder_without_splits_has_none(tmp_path):
    assert labelled_splits(tmp_path) == {}
    assert labelled_splits(tmp_path / "absent") == {}


def check(train, test, tmp_path):
    made = [LabelledTexts([str(i) for i in range(len(labels))], labels) for labels in (train, test)]
    check_labels(*made, train_path=tmp_path / "train.jsonl", test_path=tmp_path / "test.jsonl")


def test_labels_that_can_be_learnt_pass(tmp_path):
    check(["a", "b", "c"], ["b", "a"], tmp_path)


def test_labels_only_in_the_test_set_are_named_ten_at_most(tmp_path):
    with pytest.raises(DataError) as caught:
        check(["a", "b"], ["a", "z", "y"], tmp_path)
    assert "label 'y', 'z'" in str(caught.value)
    assert "train.jsonl" in str(caught.value)
    assert "test.jsonl" in str(caught.value)
    with pytest.raises(DataError, match="'n09' and 2 more"):
        check(["a", "b"], [f"n{number:02}" for number in range(12)], tmp_path)


def test_a_single_class_is_refused(tmp_path):
    with pytest.raises(DataError, match="every example has the label 'a'"):
        check(["a", "a"], ["a"], tmp_path)


def test_files_by_name_and_the_first_ending_counts(tmp_path):
    for name in ("b.jsonl", "a.jsonl.gz", "a.jsonl", "c.txt"):
        (tmp_path / name).touch()
    assert named_files(tmp_path) == {"a": tmp_path / "a.jsonl", "b": tmp_path / "b.jsonl"}
    assert named_files(tmp_path, (".txt",)) == {"c": tmp_path / "c.txt"}
    assert named_files(tmp_path / "absent") == {}
