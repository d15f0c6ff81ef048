"""Rows of texts: the order of a mixture, single texts, and packed blocks, each a pure function of seed and number."""

import json
import time

import numpy as np
import pytest

from gerund.errors import ConfigError, DataError
from gerund.training.corpus.texts import Mixture, PackedBlocks, Sample, SpreadBlocks, Texts, TokenCache, tokenize_corpus
from tests.tiny import byte_tokenizer
from tests.training.corpus import tokenizers


def slow_order(sizes, counts, seed, shifts, rows):
    """Order rows the slow way: one after the other, each source with a pile of its own."""
    pattern = np.random.default_rng([seed, 0]).permutation(np.repeat(np.arange(len(sizes)), counts))
    piles, epochs, samples = [[] for _ in sizes], [-1] * len(sizes), []
    shift = [0] * len(sizes)
    for number in range(rows):
        source = int(pattern[number % 1000])
        if not piles[source]:
            epochs[source] += 1
            rng = np.random.default_rng([seed, 1, source, epochs[source]])
            shift[source] = int(rng.integers(shifts))
            piles[source] = rng.permutation(sizes[source]).tolist()
        samples.append(Sample(source, epochs[source], piles[source].pop(0), shift[source]))
    return samples


@pytest.mark.parametrize(
    "sizes, weights, counts",
    [([7], [3.0], [1000]), ([70, 11, 300], [2.0, 1.0, 1.0], [500, 250, 250]), ([5, 5], [2.0, 1.0], [667, 333])],
)
def test_samples_are_those_of_choosing_one_by_one(sizes, weights, counts):
    expected = slow_order(sizes, counts, 3, 16, 2500)
    mixture = Mixture(sizes, weights, seed=3, shifts=16)
    assert [mixture.sample(number) for number in range(2500)] == expected
    # Asked in any order, and by an object that has not seen the others.
    jumping = Mixture(sizes, weights, seed=3, shifts=16)
    for number in (2499, 0, 1203, 2, 1203):
        assert jumping.sample(number) == expected[number]


@pytest.mark.parametrize(
    ("weights", "counts"), [([3.0, 996.4, 0.6], [3, 996, 1]), ([0.6, 0.6, 0.6, 998.2], [1, 1, 1, 997])]
)
def test_a_source_of_small_weight_is_read(weights, counts):
    mixture = Mixture([5] * len(weights), weights, seed=0)
    sources = [mixture.sample(number).source for number in range(1000)]
    assert [sources.count(place) for place in range(len(weights))] == counts
    with pytest.raises(ConfigError, match="has the weight 1 of 3001 in all, which is less than one text in 2,000"):
        Mixture([3, 2], [3000.0, 1.0], seed=0)


def test_epochs():
    assert Mixture([10, 50], [3.0, 1.0], seed=0).epochs(2000) == [150.0, 10.0]


def cache_of(folder, tokenizer, texts, **settings):
    path = folder / f"{len(list(folder.iterdir()))}.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), "utf-8")
    return tokenize_corpus([path], tokenizer, folder, **settings)


def letters(*lengths):
    """Return texts of so many tokens: one a letter, and no two texts alike."""
    return ["".join(chr(65 + (start + 5 * place) % 26) for place in range(n)) for start, n in enumerate(lengths)]


def cut(ids, length, min_tokens):
    if len(ids) < min_tokens:
        return []
    pieces = [ids[start : start + length] for start in range(0, len(ids), length)]
    return [piece for piece in pieces if len(piece) in (length,) or len(piece) >= min_tokens]


@pytest.mark.parametrize(
    "build", [byte_tokenizer, tokenizers.without_bos, tokenizers.without_either, tokenizers.one_token_for_both]
)
def test_an_epoch_is_every_text_once(tmp_path, build):
    tokenizer = build()
    texts = letters(3, 40, 10, 8, 7, 16, 24, 9, 11, 47)
    texts_ids = [tokenizer(text, add_special_tokens=False).input_ids for text in texts]
    expected = [piece for ids in texts_ids for piece in cut(ids, 16, 8)]
    data = Texts([cache_of(tmp_path, tokenizer, texts)], [1.0], length=16, seed=5)
    assert (len(data), data.skipped) == (len(expected), 2)
    order = Mixture([len(expected)], [1.0], seed=5)
    for number in range(3 * len(expected)):
        row = data.row(number)
        assert row.dtype == np.int64
        assert row.tolist() == expected[order.sample(number).item]
    first = [data.row(number).tolist() for number in range(len(expected))]
    assert sorted(first) == sorted(expected)
    assert first != expected


def test_a_short_last_piece_counts_only_if_nothing_else_is_left(tmp_path):
    tokenizer = byte_tokenizer()
    cache = cache_of(tmp_path, tokenizer, letters(20, 5, 8))
    pieces = Texts([cache], [1.0], length=16, seed=0)
    assert (len(pieces), pieces.skipped) == (2, 1)  # 16 of 20, all of 8
    everything = Texts([cache], [1.0], length=16, seed=0, min_tokens=1)
    assert (len(everything), everything.skipped) == (4, 0)


def test_sources_alternate_by_weight(tmp_path):
    tokenizer = byte_tokenizer()
    caches = [cache_of(tmp_path, tokenizer, texts) for texts in (letters(9, 10), ["th" * 10, "er" * 12, "in" * 9])]
    data = Texts(caches, [3.0, 1.0], length=64, seed=0)
    mine = [data.row(number).max() < 259 for number in range(1000)]  # the pairs of letters are later tokens
    assert sum(mine) == 750


def test_rows_are_copies(tmp_path):
    data = Texts([cache_of(tmp_path, byte_tokenizer(), letters(20))], [1.0], length=20, seed=0)
    row = data.row(0)
    row[:] = 0
    assert data.row(0).min() > 0


def test_a_source_without_long_enough_texts(tmp_path):
    tokenizer = byte_tokenizer()
    caches = [cache_of(tmp_path, tokenizer, texts) for texts in (letters(20), letters(4, 6))]
    with pytest.raises(DataError, match=r"none of 2 texts has 8 tokens; the longest has 6"):
        Texts(caches, [1.0, 1.0], length=16, seed=0)


def test_mistakes_are_named(tmp_path):
    cache = cache_of(tmp_path, byte_tokenizer(), letters(20))
    for length, least in ((7, 8), (8, 0)):
        with pytest.raises(ConfigError, match="min_tokens must be 1 to length"):
            Texts([cache], [1.0], length=length, seed=0, min_tokens=least)


def test_millions_of_texts_take_no_loop(tmp_path):
    texts, each = 2_000_000, 10
    path = tmp_path / "big.tokens"
    np.tile(np.arange(each, dtype="uint16"), texts).tofile(path)
    np.save(path.with_suffix(".starts.npy"), np.arange(texts + 1, dtype="<i8") * each)
    cache = TokenCache(path, "uint16", texts * each, texts, 0, texts, 1, 1)
    start = time.perf_counter()
    data = Texts([cache], [1.0], length=8, seed=0)
    rows = [data.row(number) for number in range(1000)]
    # A quiet machine takes a twentieth of this; a loop over the texts would take longer than all of it.
    assert time.perf_counter() - start < 3
    assert len(data) == texts
    assert all(row.tolist() == list(range(1, 9)) for row in rows)


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
