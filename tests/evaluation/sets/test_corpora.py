"""Sources are found by their names, and read clean."""

import json

from gerund.evaluation.data_files import corpora_in, read_texts


def test_names_splits_and_cleaning(tmp_path):
    folder = tmp_path / "lm"
    folder.mkdir()
    for name in ("wiki.test.jsonl", "wiki.valid.jsonl", "books.test.txt", "wiki.train.jsonl", "notes.md"):
        (folder / name).write_text(json.dumps({"text": "Fraile () is a mountain."}) + "\n")
    found = corpora_in(tmp_path)
    assert {name: sorted(files) for name, files in found.items()} == {"books": ["test"], "wiki": ["test", "validation"]}
    assert list(read_texts(found["wiki"]["test"])) == ["Fraile is a mountain."]
    assert corpora_in(tmp_path / "none") == {}


def test_empty_texts_are_passed_over(tmp_path):
    path = tmp_path / "news.test.jsonl"
    path.write_text('{"text": "one"}\n{"text": "  "}\n')
    assert list(read_texts(path)) == ["one"]
