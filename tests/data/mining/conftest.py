"""A corpus and where its pairs go."""

import pytest

from tests.data.mining.corpora import articles, write_jsonl


@pytest.fixture
def corpus(tmp_path):
    return write_jsonl(tmp_path / "corpus.jsonl", articles(60))


@pytest.fixture
def output(tmp_path):
    return tmp_path / "pairs.parquet"
