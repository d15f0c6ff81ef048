"""Rows of single texts against the obvious way to cut and order them."""

import json
import time

import numpy as np
import pytest

from gerund.errors import ConfigError, DataError
from gerund.training.corpus.texts import Mixture, Texts, TokenCache, tokenize_corpus
from tests.tiny import byte_tokenizer
from tests.training.corpus import tokenizers


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


def test_rows_depend_on_seed_and_number_only(tmp_path):
    tokenizer = byte_tokenizer()
    caches = [cache_of(tmp_path, tokenizer, letters(*range(9, 40))), cache_of(tmp_path, tokenizer, letters(50, 60))]
    one, other, third = (Texts(caches, [3.0, 1.0], length=12, seed=seed) for seed in (1, 1, 2))
    rows = [one.row(number).tolist() for number in range(200)]
    for number in (199, 3, 120, 3, 0):
        assert other.row(number).tolist() == rows[number]
    assert [third.row(number).tolist() for number in range(200)] != rows


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
