"""Packed blocks are a pure function of the seed and their number."""

import pytest

from gerund.errors import DataError
from gerund.training.corpus.texts import PackedBlocks, SpreadBlocks, tokenize_corpus


@pytest.fixture
def caches(corpus, tokenizer, tmp_path):
    return [tokenize_corpus([corpus / f"{name}.train.jsonl"], tokenizer, tmp_path) for name in "ab"]


def blocks(caches, seed=0, weights=(2.0, 1.0)):
    return PackedBlocks(caches, list(weights), length=16, seed=seed)


def test_a_block_depends_on_seed_and_number_only(caches):
    one, other = blocks(caches), blocks(caches)
    expected = one.rows(0, 1600).tolist()
    for first in (1590, 12, 1000, 12, 0):
        assert other.rows(first, 4).tolist() == expected[first : first + 4]
    assert blocks(caches, seed=1).rows(0, 4).tolist() != expected[:4]
    assert one.rows(8, 4).shape == (4, 16)


@pytest.mark.slow
def test_an_epoch_reads_every_block_once(caches):
    data = blocks(caches[:1], weights=(1.0,))
    tokens = caches[0].open()
    count = len(tokens) // 16 - 1
    shifts = set()
    for epoch in range(5):
        rows = data.rows(epoch * count, count).tolist()
        cuts = [tokens[shift : shift + count * 16].reshape(count, 16).tolist() for shift in range(16)]
        found = [shift for shift, cut in enumerate(cuts) if sorted(rows) == sorted(cut)]
        assert len(found) == 1
        assert rows != cuts[found[0]]
        shifts.update(found)
    assert len(shifts) > 1


def test_blocks_come_from_both_sources_by_weight(caches):
    rows = blocks(caches[::-1], weights=(3.0, 1.0)).rows(0, 1000).tolist()
    texts = ["".join(f",{token}" for token in cache.open().tolist()) for cache in caches[::-1]]
    blocks_as_text = ["".join(f",{token}" for token in row) for row in rows]
    assert [sum(row in text for row in blocks_as_text) for text in texts] == [750, 250]


def test_too_few_tokens(caches):
    with pytest.raises(DataError, match="too few for blocks of 100000"):
        PackedBlocks(caches[:1], [1.0], length=100000, seed=0)


def test_validation_is_spread_and_limited(caches):
    tokens = caches[0].open()
    few = SpreadBlocks(caches[0], length=16, rows=2, limit=100)
    assert len(few) == 6
    assert few.rows(0, 2).flatten().tolist() == tokens[:32].tolist()
    whole = len(tokens) // 32
    starts = [whole * group // 3 * 32 for group in range(3)]
    assert few.rows(0, 6).reshape(3, 32).tolist() == [tokens[start : start + 32].tolist() for start in starts]
    everything = SpreadBlocks(caches[0], length=16, rows=2, limit=10**9)
    assert len(everything) == 2 * whole
    assert everything.rows(0, 2 * whole).flatten().tolist() == tokens[: 32 * whole].tolist()
    assert len(SpreadBlocks(caches[0], length=16, rows=2, limit=1)) == 2
    with pytest.raises(DataError, match="too few to validate"):
        SpreadBlocks(caches[0], length=100000, rows=2, limit=100)
