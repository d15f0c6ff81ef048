"""The tokenizer gives every text back, puts BOS in front, and is the same every time; which token hides another."""

import os
import random

import pytest
from transformers import AutoTokenizer

from gerund.errors import ConfigError
from gerund.training.corpus import tokenizer as trained
from gerund.training.corpus.tokenizer import (
    MASK,
    SPECIAL_TOKENS,
    load_tokenizer,
    pick_mask_token,
    prepare_tokenizer,
    train_tokenizer,
)
from gerund.training.recipe import load_recipe
from tests.tiny import byte_tokenizer
from tests.training.conftest import sentences
from tests.training.corpus import tokenizers

RANGES = [(0x20, 0x7F), (0xA0, 0x2FF), (0x370, 0x5FF), (0x4E00, 0x4F00), (0x1F300, 0x1F6FF), (0x300, 0x36F)]
BETWEEN = ["", "", " ", "  ", "\n", "\n\n ", "\t", "1", "1984", "'s", "\r\n", "\u200d"]


def random_text(rng):
    characters = (chr(rng.randrange(*rng.choice(RANGES))) + rng.choice(BETWEEN) for _ in range(rng.randint(1, 40)))
    return "".join(characters)


def test_every_text_comes_back(tokenizer):
    rng = random.Random(0)
    for text in [*(random_text(rng) for _ in range(300)), "", " ", "\n", " a  b ", "don't", "\x00\x01", "\u2028"]:
        ids = tokenizer(text).input_ids
        assert ids[0] == tokenizer.bos_token_id
        assert tokenizer.decode(ids[1:]) == text
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_special_tokens_have_the_first_ids(tokenizer):
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == list(range(16))
    found = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.mask_token_id)
    assert found == (0, 1, 2, 3)


def test_digits_stand_alone(tokenizer):
    assert len(tokenizer("1984", add_special_tokens=False).input_ids) == 4


def test_saved_folder_opens_the_same_way(tokenizer, tmp_path):
    tokenizer.save_pretrained(str(tmp_path))
    text = "The cat sleeps — 三 cats."
    for again in (AutoTokenizer.from_pretrained(str(tmp_path)), load_tokenizer(tmp_path)):
        assert again(text).input_ids == tokenizer(text).input_ids
        assert again.decode(again(text).input_ids, skip_special_tokens=True) == text
        assert (again.model_max_length, again.mask_token, again.pad_token_id) == (64, "<|mask|>", 2)


def test_pairs_and_padding(tokenizer):
    batch = tokenizer(["The cat", "The cat sleeps under"], padding=True)
    assert len(batch.input_ids[0]) == len(batch.input_ids[1])
    assert set(batch) == {"input_ids", "attention_mask"}


def test_training_is_deterministic():
    texts = [sentences(i, 30) for i in range(20)]
    one, other = (train_tokenizer(texts, vocab_size=320, max_length=64) for _ in range(2))
    assert one.backend_tokenizer.to_str() == other.backend_tokenizer.to_str()


def test_one_of_two_trainings_at_a_time_takes_the_others(settings, write_recipe, monkeypatch, tmp_path):
    settings["data"]["cache"] = str(tmp_path / "cache")
    recipe = load_recipe(write_recipe(settings))
    train = trained.train_tokenizer

    def train_slowly(*texts, **options):
        monkeypatch.setattr(trained, "train_tokenizer", train)
        prepare_tokenizer(recipe)
        return train(*texts, **options)

    monkeypatch.setattr(trained, "train_tokenizer", train_slowly)
    assert len(prepare_tokenizer(recipe)) == 320
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_an_edit_that_keeps_the_size_trains_another(settings, write_recipe, corpus, tmp_path):
    texts, cache = tmp_path / "a.jsonl", tmp_path / "cache"
    texts.write_bytes((corpus / "a.train.jsonl").read_bytes())
    settings["data"] |= {"cache": str(cache), "sources": [{"name": "a", "files": [str(texts)]}]}
    recipe = load_recipe(write_recipe(settings))
    prepare_tokenizer(recipe)
    texts.write_text(texts.read_text("utf-8").replace("cat", "cut"), "utf-8")
    os.utime(texts, ns=(0, 0))
    prepare_tokenizer(recipe)
    assert len(list(cache.iterdir())) == 2


def test_mistakes(tmp_path):
    with pytest.raises(ConfigError, match="vocab_size 271 is too small; bytes and special tokens need 272"):
        train_tokenizer(["x"], vocab_size=271, max_length=8)
    with pytest.raises(ConfigError, match=r"no tokenizer\.json there"):
        load_tokenizer(tmp_path)


def test_the_bundled_models_tokenizer_has_its_name(bundled):
    text = "The cat sleeps in 1825."
    assert load_tokenizer("default")(text).input_ids == bundled.tokenizer(text).input_ids


@pytest.fixture(scope="module")
def masked():
    return train_tokenizer(["a small text"], vocab_size=280, max_length=64)


def test_a_wish_comes_before_the_tokenizers_own(masked):
    assert pick_mask_token(masked, None) == masked.convert_tokens_to_ids(MASK)
    assert pick_mask_token(masked, "#") == masked.convert_tokens_to_ids("#") != masked.mask_token_id


def test_an_underscore_where_there_is_none():
    tokenizer = byte_tokenizer()
    assert tokenizer.convert_ids_to_tokens(pick_mask_token(tokenizer, None)) == "_"
    assert pick_mask_token(tokenizer, "_") == pick_mask_token(tokenizer, None)
    # Or what is a token only as it is written in the vocabulary.
    assert tokenizer.convert_ids_to_tokens(pick_mask_token(tokenizer, " a")) == "Ġa"


def test_llamas_underscore_is_the_one_without_a_space():
    tokenizer = tokenizers.sentencepiece()
    assert tokenizer.tokenize("_") == ["▁_"]  # what encoding would give
    assert tokenizer.convert_ids_to_tokens(pick_mask_token(tokenizer, None)) == "_"
    assert tokenizer.convert_ids_to_tokens(pick_mask_token(tokenizer, "▁_")) == "▁_"


@pytest.mark.parametrize("wanted, pieces", [("[MASK]", 6), ("", 0), ("ab", 2)])
def test_a_wish_that_is_no_token(wanted, pieces):
    with pytest.raises(ConfigError, match=rf"mask_token .* is no token of this tokenizer but {pieces} pieces"):
        pick_mask_token(byte_tokenizer(), wanted)


def test_no_token_to_fall_back_on():
    tokenizer = tokenizers.words_only()  # gives <unk> for whatever it does not know
    with pytest.raises(ConfigError, match="no mask token and '_' is no token of it either; set mask_token"):
        pick_mask_token(tokenizer, None)
    with pytest.raises(ConfigError, match="mask_token 'c' is no token of this tokenizer"):
        pick_mask_token(tokenizer, "c")
    assert pick_mask_token(tokenizer, "b") == 3
