"""Token caches are whole or absent, and their index says where each text begins."""

import errno
import json
import os
from itertools import pairwise

import numpy as np
import pytest

from gerund.data.corpus import read_documents
from gerund.data.passages import split_sentences
from gerund.errors import ConfigError, DataError, ModelError, ResourceError
from gerund.training.corpus import texts as token_cache
from gerund.training.corpus.texts import tokenize_corpus
from tests.training.corpus import tokenizers


@pytest.fixture
def cache(corpus, tokenizer, tmp_path):
    return tokenize_corpus([corpus / "a.train.jsonl"], tokenizer, tmp_path)


@pytest.fixture
def documents(corpus):
    return [document.text for document in read_documents([corpus / "a.train.jsonl"])]


def texts_of(cache):
    tokens, starts = cache.open().tolist(), cache.starts().tolist()
    assert (starts[0], starts[-1], len(starts)) == (0, cache.tokens, cache.texts + 1)
    return [tokens[start:end] for start, end in pairwise(starts)]


def written(path, *texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), "utf-8")
    return path


def test_texts_are_the_documents_between_bos_and_eos(tokenizer, cache, documents):
    expected = [[0, *tokenizer(text, add_special_tokens=False).input_ids, 1] for text in documents]
    assert texts_of(cache) == expected
    assert (cache.tokens, cache.documents, cache.texts) == (sum(map(len, expected)), 30, 30)
    assert (cache.dtype, cache.specials_before, cache.specials_after) == ("uint16", 1, 1)
    assert cache.text_bytes == sum(len(text.encode()) for text in documents)
    assert cache.starts().dtype == np.int64
    assert not cache.starts().flags.writeable


def test_two_processes_have_temporary_names_of_their_own(corpus, tokenizer, cache, tmp_path):
    files = [path for path in tmp_path.iterdir() if path.is_file()]
    assert len(files) == 3
    for path in files:
        path.unlink()
        path.with_name(f".{path.name}.part").mkdir()
    assert tokenize_corpus([corpus / "a.train.jsonl"], tokenizer, tmp_path) == cache


def test_a_control_token_that_is_spelled_is_text(tokenizer, tmp_path):
    spelled = f"a {tokenizer.eos_token} b {tokenizer.bos_token}"
    cache = tokenize_corpus([written(tmp_path / "a.jsonl", spelled)], tokenizer, tmp_path)
    [[before, *inside, after]] = texts_of(cache)
    assert (before, after) == (tokenizer.bos_token_id, tokenizer.eos_token_id)
    assert not {before, after} & set(inside)
    assert tokenizer.decode(inside) == spelled


@pytest.mark.parametrize(
    "build, before, after",
    [
        (tokenizers.without_bos, [], [2]),
        (tokenizers.one_token_for_both, [], [2]),
        (tokenizers.without_either, [], []),
        (tokenizers.with_both, [1], [2]),
    ],
)
def test_what_a_tokenizer_lacks_is_left_out(tmp_path, build, before, after):
    tokenizer = build()
    cache = tokenize_corpus([written(tmp_path / "a.jsonl", "the cat", "in")], tokenizer, tmp_path)
    bare = [tokenizer(text, add_special_tokens=False).input_ids for text in ("the cat", "in")]
    assert texts_of(cache) == [[*before, *ids, *after] for ids in bare]
    assert (cache.specials_before, cache.specials_after) == (len(before), len(after))


def test_sentences_of_enough_words(corpus, tokenizer, tmp_path, documents):
    paths = [corpus / "a.train.jsonl"]
    sentences = [text[one.start : one.end] for text in documents for one in split_sentences(text)]
    cache = tokenize_corpus(paths, tokenizer, tmp_path, unit="sentences")
    assert texts_of(cache) == [[0, *tokenizer(text, add_special_tokens=False).input_ids, 1] for text in sentences]
    assert (cache.texts, cache.documents) == (len(sentences), 30)
    long = [text for text in sentences if len(text.split()) >= 8]
    assert 0 < len(long) < len(sentences)
    cache = tokenize_corpus(paths, tokenizer, tmp_path, unit="sentences", min_words=8)
    assert texts_of(cache) == [[0, *tokenizer(text, add_special_tokens=False).input_ids, 1] for text in long]
    assert cache.text_bytes == sum(len(text.encode()) for text in long)


def test_parts_share_the_documents_out(corpus, tokenizer, cache, tmp_path):
    whole = texts_of(cache)
    halves = [tokenize_corpus([corpus / "a.train.jsonl"], tokenizer, tmp_path, part=part) for part in ("1/2", "2/2")]
    assert [texts_of(half) for half in halves] == [whole[::2], whole[1::2]]
    third = tokenize_corpus([corpus / "a.train.jsonl"], tokenizer, tmp_path, part="3/3", limit=2)
    assert texts_of(third) == [whole[2], whole[5]]
    for part in ("0/2", "3/2", "1", "1/0", "a/b", "1/2/3", "-1/2", " 1/2"):
        with pytest.raises(ConfigError, match="is not written such as 1/2, the first of two"):
            tokenize_corpus([corpus / "a.train.jsonl"], tokenizer, tmp_path, part=part)


def test_documents_of_enough_words(tokenizer, tmp_path):
    path = written(tmp_path / "a.jsonl", "one two", "one two three", "one")
    cache = tokenize_corpus([path], tokenizer, tmp_path, min_words=2)
    assert (cache.texts, cache.documents) == (2, 2)


def test_lots_do_not_show(corpus, tokenizer, tmp_path, cache, monkeypatch):
    monkeypatch.setattr(token_cache, "_TEXTS_AT_ONCE", 7)
    few = tokenize_corpus([corpus / "a.train.jsonl"], tokenizer, tmp_path / "few")
    monkeypatch.setattr(token_cache, "_CHARACTERS_AT_ONCE", 1500)
    small = tokenize_corpus([corpus / "a.train.jsonl"], tokenizer, tmp_path / "small")
    for other in (few, small):
        assert texts_of(other) == texts_of(cache)
        assert other.summary() == cache.summary()


def test_second_call_reads_nothing(corpus, tokenizer, cache, tmp_path, monkeypatch):
    monkeypatch.setattr(token_cache, "read_documents", None)
    assert tokenize_corpus([corpus / "a.train.jsonl"], tokenizer, tmp_path) == cache


def test_padding_that_someone_left_on_does_not_matter(corpus, tokenizer, cache, tmp_path):
    tokenizer(["one", "two three"], padding=True, truncation=True, max_length=2)
    assert tokenize_corpus([corpus / "a.train.jsonl"], tokenizer, tmp_path) == cache
    again = tokenize_corpus([corpus / "a.train.jsonl"], tokenizer, tmp_path / "again")
    assert again.tokens == cache.tokens


@pytest.mark.parametrize(
    "ending, damage",
    [(ending, damage) for ending in (".tokens", ".starts.npy") for damage in ("cut", "empty", "absent")]
    + [(".json", "absent")],
)
def test_a_cache_that_is_not_whole_is_written_again(corpus, tokenizer, cache, tmp_path, ending, damage):
    path = cache.path.with_suffix(ending)
    whole = path.read_bytes()
    if damage == "absent":
        path.unlink()
    else:
        path.write_bytes(whole[:-2] if damage == "cut" else b"")
    assert tokenize_corpus([corpus / "a.train.jsonl"], tokenizer, tmp_path) == cache
    assert path.read_bytes() == whole


def test_an_index_of_another_corpus_is_not_taken(corpus, tokenizer, cache, tmp_path):
    path = cache.path.with_suffix(".starts.npy")
    whole = path.read_bytes()
    np.save(path, np.array([0, cache.tokens]))
    assert tokenize_corpus([corpus / "a.train.jsonl"], tokenizer, tmp_path) == cache
    assert path.read_bytes() == whole


def test_a_cache_of_the_first_format_is_left_alone(corpus, tokenizer, cache, tmp_path, monkeypatch):
    monkeypatch.setattr(token_cache, "_FORMAT", 1)
    assert tokenize_corpus([corpus / "a.train.jsonl"], tokenizer, tmp_path).path != cache.path


def test_the_index_is_there_before_the_card(corpus, tokenizer, tmp_path, monkeypatch):
    def killed(card, *_, **__):
        assert card.with_suffix(".starts.npy").is_file()
        assert card.with_suffix(".tokens").is_file()
        raise KeyboardInterrupt

    monkeypatch.setattr(token_cache, "write_atomic", killed)
    with pytest.raises(KeyboardInterrupt):
        tokenize_corpus([corpus / "a.train.jsonl"], tokenizer, tmp_path)
    monkeypatch.undo()
    cache = tokenize_corpus([corpus / "a.train.jsonl"], tokenizer, tmp_path)
    assert cache.path.with_suffix(".json").is_file()


def test_failure_leaves_nothing_behind(tokenizer, tmp_path):
    source = tmp_path / "a.jsonl"
    source.write_text(json.dumps({"text": "fine"}) + "\nbroken\n", "utf-8")
    with pytest.raises(DataError, match="line 2"):
        tokenize_corpus([source], tokenizer, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize(
    "texts, settings, message",
    [
        ((" ",), {}, "no usable text; documents read that are not blank: 0"),
        (("* * *", "***"), {"clean": "gutenberg"}, "no usable text; documents read that are not blank: 2"),
        (("one two.", "three."), {"unit": "sentences", "min_words": 3},
         "no usable sentence of at least 3 words; documents read that are not blank: 2"),
    ],
)  # fmt: skip
def test_a_corpus_without_usable_text(tokenizer, tmp_path, texts, settings, message):
    with pytest.raises(DataError, match=message):
        tokenize_corpus([written(tmp_path / "a.jsonl", *texts)], tokenizer, tmp_path / "cache", **settings)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_full_disk(corpus, tokenizer, tmp_path, monkeypatch):
    def full(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ResourceError, match=r"cannot write .*: No space left"):
        tokenize_corpus([corpus / "a.train.jsonl"], tokenizer, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_every_setting_makes_a_cache_of_its_own(corpus, tokenizer, cache, tmp_path):
    paths = [corpus / "a.train.jsonl"]
    settings = [{"clean": "gutenberg"}, {"unit": "sentences"}, {"unit": "sentences", "min_words": 5}, {"min_words": 5}]
    made = [tokenize_corpus(paths, tokenizer, tmp_path, **setting).path for setting in settings]
    made.append(tokenize_corpus(paths, tokenizers.with_both(), tmp_path).path)
    assert len({cache.path, *made}) == 6


def test_mistakes_are_named(corpus, tokenizer, tmp_path):
    path = corpus / "a.train.jsonl"
    with pytest.raises(DataError, match="no such file"):
        tokenize_corpus([corpus / "absent.jsonl"], tokenizer, tmp_path)

    class Slow:
        is_fast = False

    with pytest.raises(ModelError, match="fast tokenizer"):
        tokenize_corpus([path], Slow(), tmp_path)


def test_a_vocabulary_with_gaps_gets_room_for_its_largest_id(tmp_path):
    tokenizer = tokenizers.words_only()
    core = json.loads(tokenizer.backend_tokenizer.to_str())
    core["model"]["vocab"]["far"] = 70000
    far = type(tokenizer)(
        tokenizer_object=tokenizer.backend_tokenizer.from_str(json.dumps(core)), unk_token="<unk>", eos_token="<s>"
    )
    cache = tokenize_corpus([written(tmp_path / "a.jsonl", "a far b")], far, tmp_path)
    assert cache.open().tolist() == [2, 70000, 3, 1]
