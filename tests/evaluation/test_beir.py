"""Collections in BEIR's layout: what is read and what is refused."""

import gzip
import json

import pytest

from gerund.errors import DataError
from gerund.evaluation.data_files import collection_files, read_candidates, read_collection
from gerund.evaluation.tasks.retrieval import Retrieval
from tests.evaluation.tables import write_collection, write_lines, write_pairs

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
