"""Files of rated pairs: what is read and what is refused."""

import pytest

from gerund.errors import DataError
from gerund.evaluation.data_files import RatedPairs, read_labelled_pairs, read_scored_pairs
from tests.evaluation.tables import write_lines


def test_scored_pairs_are_read_without_quoting(tmp_path):
    path = tmp_path / "a.tsv"
    path.write_text('5.0\tHe said "no.\tHe left.\n\n0.25\t\tnothing\r\n', encoding="utf-8")
    assert read_scored_pairs(path) == RatedPairs(['He said "no.', ""], ["He left.", "nothing"], [5.0, 0.25])


@pytest.mark.parametrize(
    "line, said",
    [
        ("five\ta\tb", "line 2: 'score' is not a number: 'five'"),
        ("nan\ta\tb", "line 2: 'score' is not a number"),
        ("1.0\ta", "line 2: expected 3 fields"),
        ("1.0\ta\tb\tc", "line 2: expected 3 fields"),
    ],
)
def test_malformed_scored_pairs_name_file_and_line(tmp_path, line, said):
    path = tmp_path / "a.tsv"
    path.write_text(f"1.0\ta\tb\n{line}\n")
    with pytest.raises(DataError, match=said) as caught:
        read_scored_pairs(path)
    assert str(path) in str(caught.value)


def test_labelled_pairs_are_read(tmp_path):
    rows = [{"text1": "a", "text2": "b", "label": 1}, {"text1": "c", "text2": "d", "label": "0"}]
    path = write_lines(tmp_path / "a.jsonl", rows)
    assert read_labelled_pairs(path) == RatedPairs(["a", "c"], ["b", "d"], [1.0, 0.0])


@pytest.mark.parametrize(
    "row, said",
    [
        ({"text1": "a", "text2": "b", "label": 2}, "line 2: 'label' is 2, and must be 0 or 1"),
        ({"text1": "a", "text2": "b", "label": True}, "line 2: 'label' is not a number"),
        ({"text1": "a", "label": 1}, "line 2: no field 'text2'"),
        ({"text1": None, "text2": "b", "label": 1}, "line 2: 'text1' is not a text"),
    ],
)
def test_malformed_labelled_pairs_name_file_and_line(tmp_path, row, said):
    path = write_lines(tmp_path / "a.jsonl", [{"text1": "a", "text2": "b", "label": 1}, row])
    with pytest.raises(DataError, match=said) as caught:
        read_labelled_pairs(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("read", [read_scored_pairs, read_labelled_pairs])
def test_empty_and_missing_files_are_refused(tmp_path, read):
    with pytest.raises(DataError, match="no such file"):
        read(tmp_path / "a")
    (tmp_path / "a").touch()
    with pytest.raises(DataError, match="empty"):
        read(tmp_path / "a")


def test_the_first_pairs_stay_together():
    pairs = RatedPairs(["a", "b", "c"], ["d", "e", "f"], [1.0, 2.0, 3.0])
    assert pairs.first(2) == RatedPairs(["a", "b"], ["d", "e"], [1.0, 2.0])
    assert pairs.first(None) == pairs
