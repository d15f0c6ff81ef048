"""Beginnings with continuations, read from both layouts; every malformed row is named."""

import json

import pytest

from gerund.errors import DataError
from gerund.evaluation.data_files import choice_files, has_stories, read_choices


def write(path, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_both_layouts(tmp_path):
    swag = write(tmp_path / "suffix" / "swag.jsonl", {"prefix": "a b", "suffixes": ["c", "d", "e"], "gold": 2})
    tales = write(tmp_path / "suffix" / "tales.jsonl", {"sentences": ["A.", "B."], "endings": ["C.", "D."], "gold": 0})
    [one], [other] = read_choices(swag), read_choices(tales)
    assert (one.prefix, one.candidates, one.gold) == ("a b", ("c", "d", "e"), 2)
    assert (other.prefix, other.story) == ("A. B.", ("A.", "B.", "C."))
    assert [has_stories(path) for path in (swag, tales)] == [False, True]
    assert choice_files(tmp_path) == {"swag": swag, "tales": tales}
    assert choice_files(tmp_path / "none") == {}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"suffixes": ["a", "b"], "gold": 0}, "no field 'prefix'"),
        ({"prefix": "a", "suffixes": "b", "gold": 0}, "'suffixes' is not a list of texts"),
        ({"prefix": "a", "suffixes": ["b", " "], "gold": 0}, "'suffixes' contains an empty text"),
        ({"prefix": "a", "suffixes": ["b", 3], "gold": 0}, "'suffixes' is not a text but int"),
        ({"prefix": "a", "suffixes": ["b"], "gold": 0}, "a single candidate"),
        ({"prefix": "a", "suffixes": ["b", "c"], "gold": 2}, "'gold' is 2, and there are 2 candidates"),
        ({"prefix": "a", "suffixes": ["b", "c"], "gold": 0.5}, "'gold' is 0.5"),
        ({"sentences": ["A."], "gold": 0}, "'endings' is not a list of texts"),
    ],
)
def test_mistakes(tmp_path, row, message):
    good = {"prefix": "a", "suffixes": ["b", "c"], "gold": 1}
    path = write(tmp_path / "rows.jsonl", good, row)
    with pytest.raises(DataError, match=message) as caught:
        read_choices(path)
    assert str(caught.value).startswith(f"{path}, line 2")
