"""A corpus for every recipe of this folder."""

import json

import pytest

from tests.training.conftest import sentences
from tests.training.objectives.recipes import passage


@pytest.fixture(scope="module")
def paired_corpus(corpus):
    rows = [
        {
            "query": sentences(f"q{i}", 1),
            "positive": sentences(f"p{i}", 1),
            "negatives": [sentences(f"n{i}", 2), "The"],
            "opening": sentences(f"o{i}", 3),
        }
        for i in range(12)
    ]
    (corpus / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    rows = [{"sentence1": sentences(f"e{i}", 1), "sentence2": sentences(f"f{i}", 1), "score": i % 5} for i in range(12)]
    (corpus / "scored.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    passages = [
        passage(i, sentences(f"x{i}", 1), sentences(f"c{i}", 1), i // 6)
        | ({"generated": [sentences(f"g{i}", 1)]} if i % 3 else {})
        for i in range(18)
    ]
    (corpus / "passages.jsonl").write_text("".join(json.dumps(row) + "\n" for row in passages), "utf-8")
    return corpus
