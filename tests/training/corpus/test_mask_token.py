"""Which token stands for a hidden one."""

import pytest

from gerund.errors import ConfigError
from gerund.training.corpus.tokenizer import MASK, pick_mask_token, train_tokenizer
from tests.tiny import byte_tokenizer
from tests.training.corpus import tokenizers


@pytest.fixture(scope="module")
def masked():
    return train_tokenizer(["a small text"], vocab_size=280, max_length=64)


def test_the_tokenizers_own(masked):
    assert pick_mask_token(masked, None) == masked.convert_tokens_to_ids(MASK)


def test_a_wish_comes_before_the_tokenizers_own(masked):
    assert pick_mask_token(masked, "#") == masked.convert_tokens_to_ids("#") != masked.mask_token_id


def test_an_underscore_where_there_is_none():
    tokenizer = byte_tokenizer()
    assert tokenizer.convert_ids_to_tokens(pick_mask_token(tokenizer, None)) == "_"
    assert pick_mask_token(tokenizer, "_") == pick_mask_token(tokenizer, None)


def test_llamas_underscore_is_the_one_without_a_space():
    tokenizer = tokenizers.sentencepiece()
    assert tokenizer.tokenize("_") == ["▁_"]  # what encoding would give
    assert tokenizer.convert_ids_to_tokens(pick_mask_token(tokenizer, None)) == "_"
    assert tokenizer.convert_ids_to_tokens(pick_mask_token(tokenizer, "▁_")) == "▁_"


def test_text_that_is_a_token_only_as_written_in_the_vocabulary():
    tokenizer = byte_tokenizer()
    assert tokenizer.convert_ids_to_tokens(pick_mask_token(tokenizer, " a")) == "Ġa"


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
