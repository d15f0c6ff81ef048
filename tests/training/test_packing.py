"""Token caches are whole or absent; micro-batches are a pure function of the seed and their number."""

import json

import numpy as np
import pytest

from gerund.data.corpus import read_documents
from gerund.errors import DataError
from gerund.training.packing import PackedBlocks, tokenize_corpus, validation_blocks


@pytest.fixture
def caches(corpus, tokenizer, tmp_path):
    return [tokenize_corpus([corpus / f"{name}.train.jsonl"], tokenizer, tmp_path) for name in "ab"]


def blocks(caches, items=400, seed=0, weights=(2.0, 1.0)):
    return PackedBlocks(caches, list(weights), length=16, rows=4, items=items, seed=seed)


class TestCache:
    def test_tokens_are_the_documents_between_bos_and_eos(self, corpus, tokenizer, caches):
        texts = [document.text for document in read_documents([corpus / "a.train.jsonl"])]
        expected = []
        for text in texts:
            expected += [0, *tokenizer(text, add_special_tokens=False).input_ids, 1]
        cache = caches[0]
        assert cache.open().tolist() == expected
        assert (cache.tokens, cache.documents, cache.dtype) == (len(expected), 30, "uint16")
        assert cache.text_bytes == sum(len(text.encode()) for text in texts)

    def test_second_call_reads_nothing(self, corpus, tokenizer, caches, tmp_path, monkeypatch):
        monkeypatch.setattr("gerund.training.packing.read_documents", None)
        assert tokenize_corpus([corpus / "a.train.jsonl"], tokenizer, tmp_path) == caches[0]

    def test_padding_that_someone_left_on_does_not_matter(self, corpus, tokenizer, caches, tmp_path):
        tokenizer(["one", "two three"], padding=True, truncation=True, max_length=2)
        assert tokenize_corpus([corpus / "a.train.jsonl"], tokenizer, tmp_path) == caches[0]
        again = tokenize_corpus([corpus / "a.train.jsonl"], tokenizer, tmp_path / "again")
        assert again.tokens == caches[0].tokens

    def test_half_written_cache_is_written_again(self, corpus, tokenizer, caches, tmp_path):
        whole = caches[0].path.read_bytes()
        caches[0].path.write_bytes(whole[:-2])
        assert tokenize_corpus([corpus / "a.train.jsonl"], tokenizer, tmp_path) == caches[0]
        assert caches[0].path.read_bytes() == whole

    def test_failure_leaves_nothing_behind(self, tokenizer, tmp_path):
        source = tmp_path / "a.jsonl"
        source.write_text(json.dumps({"text": "fine"}) + "\nbroken\n", "utf-8")
        with pytest.raises(DataError, match="line 2"):
            tokenize_corpus([source], tokenizer, tmp_path / "cache")
        source.write_text(json.dumps({"text": " "}) + "\n", "utf-8")
        with pytest.raises(DataError, match="no text in there"):
            tokenize_corpus([source], tokenizer, tmp_path / "cache")
        assert list((tmp_path / "cache").iterdir()) == []

    def test_cleaning_and_content_change_the_cache(self, corpus, tokenizer, caches, tmp_path):
        path = corpus / "a.train.jsonl"
        assert tokenize_corpus([path], tokenizer, tmp_path, clean="gutenberg").path != caches[0].path
        with pytest.raises(DataError, match="no such file"):
            tokenize_corpus([corpus / "absent.jsonl"], tokenizer, tmp_path)


class TestBlocks:
    def test_item_depends_on_seed_and_number_only(self, caches):
        one, other = blocks(caches), blocks(caches, items=1000)
        for i in (399, 3, 250, 3, 0):
            assert one[i]["input_ids"].tolist() == other[i]["input_ids"].tolist()
        assert blocks(caches, seed=1)[0]["input_ids"].tolist() != one[0]["input_ids"].tolist()

    def test_shape_and_end(self, caches):
        data = blocks(caches, items=3)
        assert len(data) == 3
        assert data[2]["input_ids"].shape == (4, 16)
        with pytest.raises(IndexError):
            data[3]

    def test_sources_are_mixed_by_weight(self, caches):
        data = blocks(caches, weights=(3.0, 1.0))
        pattern = data._pattern
        assert np.bincount(pattern).tolist() == [750, 250]
        assert 0.5 < np.mean(pattern[:200] == 0) < 0.95

    def test_an_epoch_reads_every_block_once(self, caches):
        data = blocks(caches[:1], weights=(1.0,))
        tokens = caches[0].open()
        count = len(tokens) // 16 - 1
        for epoch in (0, 1, 2):
            offset, _ = data._epoch(0, epoch)
            rows = [data._row(epoch * count + i).tolist() for i in range(count)]
            cut = tokens[offset : offset + count * 16].reshape(count, 16).tolist()
            assert sorted(rows) == sorted(cut)
            assert rows != cut
        assert len({data._epoch(0, epoch)[0] for epoch in range(5)}) > 1

    def test_epochs_reported(self, caches):
        data = blocks(caches[:1], weights=(1.0,), items=50)
        assert data.epochs() == pytest.approx([200 / (caches[0].tokens // 16 - 1)])

    def test_too_few_tokens(self, caches):
        with pytest.raises(DataError, match="too few for blocks of 100000"):
            PackedBlocks(caches[:1], [1.0], length=100000, rows=1, items=1, seed=0)

    def test_validation_is_spread_and_limited(self, caches):
        tokens = caches[0].open()
        batches = validation_blocks(caches[0], length=16, rows=2, limit=100)
        assert len(batches) == 3
        assert batches[0]["input_ids"].flatten().tolist() == tokens[:32].tolist()
        everything = validation_blocks(caches[0], length=16, rows=2, limit=10**9)
        assert len(everything) == len(tokens) // 32
        with pytest.raises(DataError, match="too few to validate"):
            validation_blocks(caches[0], length=100000, rows=2, limit=100)
