"""A formatted training text is what the encoder reads."""

import random
import warnings

import numpy as np
import pytest
from transformers import AutoTokenizer

from gerund.errors import ConfigError, ModelError, TextError
from gerund.inference.tokens import InputFormat, Tokens, tokenize
from gerund.training.corpus.tokenizer import InputFormatter, train_tokenizer
from tests.tiny import byte_tokenizer
from tests.training.conftest import sentences
from tests.training.corpus import tokenizers

PROMPTS = ["", "Query: ", "Query:", "x", "th", "Given the sentence, find its representation:", "日本 ", "Q\n"]
TEXTS = [
    "the cat", " the cat", "he", "e", "a", "", "in the thing, a queen", "an\nother", "  two", "é", "日本",
    " ".join(["the thing in an inn, a thing:"] * 12), "x" * 80, " " * 40 + "x", ":a", "'s own", "7 of 9",
]  # fmt: skip
BUILD = {
    "byte": byte_tokenizer,
    "no-bos": tokenizers.without_bos,
    "gpt2": tokenizers.one_token_for_both,
    "both": tokenizers.with_both,
    "sentencepiece": tokenizers.sentencepiece,
    "trained": lambda: train_tokenizer([sentences(i, 30) for i in range(20)], vocab_size=320, max_length=64),
}


@pytest.fixture(scope="module", params=[*BUILD, "stories"])
def tokenizer(request):
    if request.param == "stories":
        return AutoTokenizer.from_pretrained(request.getfixturevalue("stories_folder"))
    return BUILD[request.param]()


def encoder(tokenizer, text, **settings):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        [tokens] = tokenize(tokenizer, [text], InputFormat(**settings))
    return tokens


def bare(tokenizer, text):
    return tokenizer(text, add_special_tokens=False).input_ids


def spelled(tokenizer, ids):
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


@pytest.mark.sweep(quick=10, check=10)
@pytest.mark.parametrize("append_eos", [False, True])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_frame_is_what_the_encoder_reads(tokenizer, prompt, append_eos):
    formatter = InputFormatter(tokenizer, prompt=prompt, append_eos=append_eos)
    compared = 0
    for ids in filter(None, (bare(tokenizer, text) for text in TEXTS)):
        text = spelled(tokenizer, ids)
        if not text.strip() or bare(tokenizer, text) != ids:
            continue
        compared += 1
        formatted = formatter.format(np.array(ids))
        longest = formatter.overhead + len(ids)
        assert formatted == encoder(tokenizer, text, prompt=prompt, append_eos=append_eos, max_length=longest), text
        assert all(type(token) is int for token in formatted.ids)
        assert formatter.format_text(text, longest) == formatted
    assert compared >= 9


@pytest.mark.parametrize("prompt", ["", "Query: ", "th"])
def test_pieces_out_of_a_longer_text(tokenizer, prompt):
    formatter = InputFormatter(tokenizer, prompt=prompt, append_eos=True)
    ids = bare(tokenizer, sentences(1, 40))
    compared = 0
    for start in range(0, 120, 3):
        piece = ids[start : start + 70]
        formatted = formatter.format(piece)
        text = spelled(tokenizer, piece)
        longest = formatter.overhead + len(piece)
        # Whatever the border does, what follows is there token by token; the last one may have had no room.
        places = formatter.places(formatted)
        tail = formatted.ids[places.start : places.stop][-20:]
        assert tail == piece[-20:] or (len(formatted) == longest and tail == piece[-21:-1])
        if bare(tokenizer, text) == piece:
            compared += 1
            assert formatted == encoder(tokenizer, text, prompt=prompt, append_eos=True, max_length=longest)
    assert compared >= 3


def test_the_parts_of_a_frame():
    formatter = InputFormatter(tokenizers.with_both(), append_eos=True)
    assert formatter.overhead == 2  # the tokenizer's own EOS is enough
    formatted = formatter.format([70, 71])
    assert formatted == Tokens([1, 70, 71, 2], 1, 1)
    assert formatter.places(formatted) == range(1, 3)
    formatter = InputFormatter(byte_tokenizer(), prompt="ab", append_eos=True)
    assert formatter.overhead == 4
    formatted = formatter.format([70, 71])
    assert formatted == Tokens([1, *bare(byte_tokenizer(), "ab"), 70, 71, 2], 3, 1)
    assert formatter.places(formatted) == range(3, 5)
    assert formatter.places(InputFormatter(byte_tokenizer(), prompt="ab").format([70])) == range(3, 3)
    assert len(InputFormatter(byte_tokenizer()).format_text("abcdefgh", None)) == 9


def test_a_prompt_that_grows_into_the_text():
    tokenizer = byte_tokenizer()
    formatter = InputFormatter(tokenizer, prompt="Query: ")
    plain = bare(tokenizer, "Query: ") + bare(tokenizer, "the cat")
    formatted = formatter.format(bare(tokenizer, "the cat"))
    assert formatted.ids == tokenizer("Query: the cat").input_ids != [1, *plain]
    places = formatter.places(formatted)
    assert spelled(tokenizer, formatted.ids[places.start : places.stop]) == " the cat"
    assert len(formatted) < formatter.overhead + len(bare(tokenizer, "the cat"))


def test_a_frame_never_has_more_tokens_than_announced():
    # "x" is one token and "xt" another, so "xthe" makes three tokens of what alone were two.
    tokenizer = tokenizers.greedy()
    formatter = InputFormatter(tokenizer, prompt="x", append_eos=True)
    ids = bare(tokenizer, "the")
    assert len(encoder(tokenizer, "the", prompt="x", append_eos=True)) == formatter.overhead + len(ids) + 1
    formatted = formatter.format(ids)
    assert len(formatted) == formatter.overhead + len(ids)
    assert formatted == encoder(tokenizer, "the", prompt="x", append_eos=True, max_length=len(formatted))


def test_ids_that_spell_no_text_of_their_own_are_kept():
    tokenizer = byte_tokenizer()
    half = bare(tokenizer, "é")[:1]
    formatter = InputFormatter(tokenizer, prompt="Query: ")
    assert formatter.format(half).ids == [1, *bare(tokenizer, "Query: "), *half]
    blank = bare(tokenizer, "  ")
    assert formatter.format(blank).ids == [1, *bare(tokenizer, "Query: "), *blank]
    apart = [bare(tokenizer, letter)[0] for letter in "the"]  # the tokenizer would merge two of them
    assert formatter.format(apart).ids == [1, *bare(tokenizer, "Query: "), *apart]


def test_a_prompt_with_control_tokens_is_read_as_the_encoder_reads_it():
    tokenizer = byte_tokenizer()
    for prompt in (f"{tokenizer.eos_token}Query: ", f"{tokenizer.bos_token}Query: ", tokenizer.bos_token):
        formatter = InputFormatter(tokenizer, prompt=prompt)
        for text in ("the cat", "x"):
            ids = bare(tokenizer, text)
            assert formatter.format(np.array(ids)) == encoder(tokenizer, text, prompt=prompt), (prompt, text)


def test_room_is_what_an_endless_text_leaves(tokenizer):
    for prompt in PROMPTS:
        for append_eos in (False, True):
            formatter = InputFormatter(tokenizer, prompt=prompt, append_eos=append_eos)
            message = f"no room for text: prompt and special tokens take {formatter.overhead}"
            with pytest.raises(ConfigError, match=message):
                formatter.format_text("the cat", formatter.overhead)
            rng = random.Random(0)
            text = " ".join(rng.choices(["the", "thing", "in", "an", "inn"], k=60))
            formatted = formatter.format_text(text, formatter.overhead + 5)
            assert len(formatted) == formatter.overhead + 5
            assert formatted == encoder(
                tokenizer, text, prompt=prompt, append_eos=append_eos, max_length=len(formatted)
            )


def test_mistakes_are_named():
    formatter = InputFormatter(byte_tokenizer())
    with pytest.raises(TextError, match="without tokens"):
        formatter.format([])
    with pytest.raises(TextError, match="empty"):
        formatter.format_text(" ", 10)
    with pytest.raises(ConfigError, match="append_eos needs a tokenizer with an end token"):
        InputFormatter(tokenizers.without_either(), append_eos=True)
    with pytest.raises(TextError, match="the prompt is not valid Unicode"):
        InputFormatter(byte_tokenizer(), prompt="\ud800")


def test_a_prompt_needs_offsets():
    tokenizer = byte_tokenizer()
    slow = type("Slow", (type(tokenizer),), {"is_fast": property(lambda self: False)})
    slow_tokenizer = slow(tokenizer_object=tokenizer.backend_tokenizer, bos_token="<s>", eos_token="</s>")
    assert InputFormatter(slow_tokenizer).format([70]).ids == [1, 70]
    with pytest.raises(ModelError, match="fast tokenizer"):
        InputFormatter(slow_tokenizer, prompt="Query: ").format([70])
