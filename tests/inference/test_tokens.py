"""Texts to tokens: prompts, empty and over-long texts, the echo layout, words."""

import pytest

from gerund import ConfigError, TextError
from gerund.checks import check_texts
from gerund.inference.encode.spans import check_words
from gerund.inference.tokens import InputFormat, tokenize
from tests.ready_made import closed
from tests.tiny import byte_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


def one(tokenizer, text, **settings):
    [tokens] = tokenize(tokenizer, [text], InputFormat(**settings))
    return tokens


def words(tokenizer, ids):
    return tokenizer.decode(ids)


def test_without_a_prompt_the_tokens_are_the_tokenizers(tokenizer):
    tokens = one(tokenizer, "the thing")
    assert tokens.ids == tokenizer("the thing").input_ids
    assert (tokens.specials_before, tokens.text_from) == (1, 1)


@pytest.mark.parametrize("prompt", ["Query: ", "x", "th", "Ünï → ", "日本 "])
@pytest.mark.parametrize("text", ["the thing", " the", "e", "é", "\nnew line"])
def test_the_text_is_told_from_the_prompt_by_offsets(tokenizer, prompt, text):
    tokens = one(tokenizer, text, prompt=prompt)
    assert tokens.ids == tokenizer(prompt + text).input_ids
    after = words(tokenizer, tokens.ids[tokens.text_from :])
    before = words(tokenizer, tokens.ids[1 : tokens.text_from])
    assert before + after == prompt + text
    # A token may span the border; then it counts as text. Never the other way round.
    assert after.endswith(text)
    assert len(before) <= len(prompt)


def test_over_long_texts_are_cut_with_one_warning(tokenizer):
    with pytest.warns(UserWarning, match="2 of 3 texts were longer than 5 tokens and were cut") as caught:
        result = tokenize(tokenizer, ["abcdefghij", "ab", "klmnopqrs"], InputFormat(max_length=5))
    assert len(caught) == 1
    assert [len(tokens) for tokens in result] == [5, 3, 5]
    assert words(tokenizer, result[0].ids[1:]) == "abcd"
    with pytest.raises(TextError, match="room for 5; shorten it, or set overflow to truncate"):
        tokenize(tokenizer, ["abcdefghij"], InputFormat(max_length=5, overflow="error"))


def test_a_text_that_just_fits_is_not_cut(tokenizer):
    assert len(one(tokenizer, "abcd", max_length=5)) == 5  # and there is no warning


def test_append_eos_keeps_its_place_when_cut(tokenizer):
    assert one(tokenizer, "ab", append_eos=True).ids == [*tokenizer("ab").input_ids, 2]
    with pytest.warns(UserWarning, match="were cut"):
        tokens = one(tokenizer, "abcdefgh", append_eos=True, max_length=5)
    assert len(tokens) == 5
    assert tokens.ids[-1] == 2


def test_echo_gives_the_text_twice_and_marks_the_second(tokenizer):
    tokens = one(tokenizer, "abc", prompt="Q:", repeat_text=True)
    assert words(tokenizer, tokens.ids[1:]) == "Q:abcabc"
    assert words(tokenizer, tokens.ids[tokens.text_from :]) == "abc"
    with pytest.warns(UserWarning, match="were cut"):
        cut = one(tokenizer, "abcdefghij", prompt="Q:", repeat_text=True, max_length=10)
    assert words(tokenizer, cut.ids[1:]) == "Q:abcabc"


def test_a_prompt_that_fills_everything(tokenizer):
    with pytest.raises(ConfigError, match="leaves no room for text"):
        one(tokenizer, "a", prompt="0123456789", max_length=8)


@pytest.mark.parametrize("texts", [3, None, b"bytes", {"a": 1}])
def test_what_is_no_text(texts):
    with pytest.raises(TextError, match="texts are strings or a list of strings"):
        check_texts(texts)


def test_the_odd_one_is_named():
    with pytest.raises(TextError, match="text 1 is not a string but int"):
        check_texts(["a", 5])


def test_unknown_choices(tokenizer):
    with pytest.raises(ConfigError, match="valid are: error, zeros"):
        one(tokenizer, "a", empty="skip")
    with pytest.raises(ConfigError, match="valid are: truncate, error"):
        one(tokenizer, "a", overflow="split")


@pytest.mark.parametrize("append_eos", [True, False])
def test_a_tokenizer_that_ends_texts_by_itself_uses_all_the_room(append_eos):
    tokenizer = closed(byte_tokenizer())
    before, text = tokenizer.backend_tokenizer.to_str(), "the cat sat on the mat " * 30
    with pytest.warns(UserWarning, match="1 of 2 texts were longer than 10 tokens"):
        [long, short] = tokenize(tokenizer, [text, "x"], InputFormat(max_length=10, append_eos=append_eos))
    assert tokenizer.backend_tokenizer.to_str() == before
    assert (long.ids[0], long.ids[-1]) == (short.ids[0], short.ids[-1]) == (1, 2)
    assert long.ids == tokenizer(text, truncation=True, max_length=10).input_ids


@pytest.mark.parametrize(
    ("sentences", "message"),
    [
        ("a b", "give lists of words"),
        (["a b"], "sentence 0 is not a list of words but str"),
        ([["a"], []], "sentence 1 has no words"),
        ([["a", " "]], "word 1 of sentence 0 is empty"),
        ([["a", 3]], "word 1 of sentence 0 is empty or not a string"),
    ],
)
def test_what_are_no_words(sentences, message):
    with pytest.raises(TextError, match=message):
        check_words(sentences)


def test_half_a_surrogate_pair_is_named(tokenizer):
    with pytest.raises(TextError, match="text 1 is not valid Unicode: a lone surrogate at character 2"):
        tokenize(tokenizer, ["a", "ab\udcff"], InputFormat())
    with pytest.raises(TextError, match="the prompt is not valid Unicode"):
        tokenize(tokenizer, ["a"], InputFormat(prompt="\ud800"))
