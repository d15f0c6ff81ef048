"""Files of evaluation data: what is read of texts, pairs, choices and collections, and how the rest is refused."""

import gzip
import json
import lzma

import pytest

from gerund.errors import DataError
from gerund.evaluation.data_files import (
    LabelledTexts,
    RatedPairs,
    check_labels,
    collection_files,
    corpora_in,
    has_stories,
    labelled_splits,
    named_files,
    read_candidates,
    read_choices,
    read_collection,
    read_labelled,
    read_labelled_pairs,
    read_scored_pairs,
    read_texts,
    single_files,
    story_files,
)
from gerund.evaluation.tasks.retrieval import Retrieval
from tests.evaluation.tables import write_collection, write_lines, write_pairs


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
    assert single_files(swag.parent) == {"swag": (swag,), "tales": (tales,)}
    assert story_files(swag.parent) == {"tales": (tales,)}
    assert single_files(tmp_path / "none") == {}


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


def test_names_splits_and_cleaning(tmp_path):
    folder = tmp_path / "lm"
    folder.mkdir()
    for name in ("wiki.test.jsonl", "wiki.valid.jsonl", "books.test.txt", "wiki.train.jsonl", "notes.md"):
        (folder / name).write_text(json.dumps({"text": "Fraile () is a mountain."}) + "\n")
    found = corpora_in(folder)
    assert {name: sorted(files) for name, files in found.items()} == {"books": ["test"], "wiki": ["test", "validation"]}
    assert list(read_texts(found["wiki"]["test"])) == ["Fraile is a mountain."]
    assert corpora_in(tmp_path / "none") == {}


def test_empty_texts_are_passed_over(tmp_path):
    path = tmp_path / "news.test.jsonl"
    path.write_text('{"text": "one"}\n{"text": "  "}\n')
    assert list(read_texts(path)) == ["one"]


DOCUMENTS = {"d1": "one", "d2": "two", "3": "three"}
QUERIES = {"q1": "first", "q2": "second", "q3": "third"}
JUDGED = [("q3", "3", 2), ("q1", "d1", 1), ("q1", "d2", 0)]


@pytest.fixture
def folder(tmp_path):
    return write_collection(tmp_path / "small", DOCUMENTS, QUERIES, JUDGED)


def read(folder, split="test"):
    return read_collection(collection_files(folder), split)


def test_queries_with_judgements_are_kept_in_their_order(folder):
    collection = read(folder)
    assert list(collection.queries.items()) == [("q1", "first"), ("q3", "third")]
    assert collection.judgements == {"q1": {"d1": 1, "d2": 0}, "q3": {"3": 2}}
    assert collection.unjudged == 1
    assert collection.hopeless == 0
    assert collection.documents == DOCUMENTS


def test_limit_keeps_all_documents(folder):
    collection = read(folder).first(1)
    assert list(collection.queries) == list(collection.judgements) == ["q1"]
    assert collection.documents == DOCUMENTS


def test_titles_stand_before_texts_and_may_be_missing(folder):
    rows = [{"_id": "d1", "title": "T", "text": " one "}, {"_id": "d2", "text": "two "}, {"_id": 3, "title": None}]
    rows[2]["text"] = ""
    write_lines(folder / "corpus.jsonl", rows)
    assert read(folder).documents == {"d1": "T  one", "d2": "two", "3": ""}


def test_queries_without_anything_relevant_are_counted(folder):
    write_pairs(folder / "qrels" / "test.tsv", ("query-id", "corpus-id", "score"), [("q1", "d1", 0), ("q2", "d1", -1)])
    assert read(folder).hopeless == 2


def test_compressed_files_and_validation(folder):
    with gzip.open(folder / "corpus.jsonl.gz", "wb") as file:
        file.write((folder / "corpus.jsonl").read_bytes())
    (folder / "corpus.jsonl").unlink()
    write_pairs(folder / "qrels" / "dev.tsv", ("query-id", "corpus-id", "score"), [("q2", "d2", 1)])
    assert read(folder).documents == DOCUMENTS
    assert list(read(folder, "validation").queries) == ["q2"]


def test_collections_have_corpus_queries_and_a_test_set(tmp_path):
    for name, split in (("small", "test"), ("only-dev", "dev")):
        write_collection(tmp_path / "retrieval" / name, DOCUMENTS, QUERIES, JUDGED, split=split)
    (tmp_path / "retrieval" / "notes.txt").touch()
    assert [task.title for task in Retrieval.find(tmp_path)] == ["small"]
    assert Retrieval.find(tmp_path / "absent") == []


def refused(folder, *said, split="test"):
    with pytest.raises(DataError) as caught:
        read(folder, split)
    for part in said:
        assert part in str(caught.value)


def test_ids_that_are_there_twice_are_refused_with_their_line(folder):
    lines = [json.dumps({"_id": one, "text": "x"}) for one in ("d1", "d2", "d1")]
    (folder / "corpus.jsonl").write_text("\n".join(lines))
    refused(folder, "corpus.jsonl, line 3", "'d1' is there twice")


def test_judgements_of_what_is_not_there_name_ten_ids(folder):
    path = folder / "qrels" / "test.tsv"
    header = ("query-id", "corpus-id", "score")
    write_pairs(path, header, [("q1", f"x{number:02}", 1) for number in range(12)])
    refused(folder, str(path), "no such document: x00, x01", "x09 and 2 more")
    write_pairs(path, header, [("q9", "d1", 1)])
    refused(folder, str(path), "no such query: q9")


@pytest.mark.parametrize(
    "rows, said",
    [
        ([("q1", "d1", "high")], "line 2: 'score' is not a number"),
        ([("q1", "d1", 0.5)], "line 2: 'score' is 0.5, and must be a whole number"),
        ([("q1", "d1", 1), ("q1", "d1", 2)], "line 3: the pair of query and document 'd1' is there twice"),
        ([("q1", "d1")], "line 2: expected 3 fields"),
        ([], "nothing after the header"),
    ],
)
def test_malformed_judgements_name_file_and_line(folder, rows, said):
    path = write_pairs(folder / "qrels" / "test.tsv", ("query-id", "corpus-id", "score"), rows)
    refused(folder, str(path), said)


def test_judgements_without_a_header_would_lose_their_first_row(folder):
    write_pairs(folder / "qrels" / "test.tsv", JUDGED[0], JUDGED[1:])
    refused(folder, "line 1: expected the header query-id, corpus-id, score")


def test_without_dev_there_is_nothing_to_validate_on(folder):
    refused(folder, "no qrels/dev.tsv", split="validation")


def candidates(folder, rows):
    path = write_pairs(folder / "candidates" / "test.tsv", ("query-id", "corpus-id"), rows)
    return read_candidates(path, read(folder))


def test_candidates_of_scored_queries_in_their_order(folder):
    found = candidates(folder, [("q2", "d1"), ("q1", "d2"), ("q1", "d1")])
    assert found == {"q1": ["d2", "d1"], "q3": []}


def test_unknown_and_repeated_candidates_are_refused(folder):
    with pytest.raises(DataError, match="no such document: d9"):
        candidates(folder, [("q1", "d9")])
    with pytest.raises(DataError, match=r"line 3: .*'d1' is there twice"):
        candidates(folder, [("q1", "d1"), ("q1", "d1")])
