"""Books to make passages of, and a model that continues them."""

import json

import pytest

import gerund
from tests.papers.rankgen_negatives.runs import SENTENCES


@pytest.fixture(scope="module")
def lm(tiny_folder):
    return gerund.load(tiny_folder, attention="causal")


@pytest.fixture
def books(tmp_path):
    path = tmp_path / "books.jsonl"
    texts = [" ".join(SENTENCES[i : i + 20]) for i in (0, 10, 20, 30)] + ["Too short."]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path
