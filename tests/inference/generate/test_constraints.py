"""Limits of which tokens follow and where a text ends, each against something slow and obvious."""

import json
from typing import Any

import pytest
import torch

from gerund import ConfigError, GenerationConfig, Rerank, Sampling, TextError
from gerund.inference.generate.constraints import SpelledVocabulary
from gerund.inference.generate.detokenizing import TextTail, token_bytes, vocabulary_bytes
from gerund.language_model import LanguageModel
from tests.inference.generate.test_sequence import by_hand
from tests.tiny import byte_tokenizer, tiny_lm

SAMPLED = Sampling(temperature=1.0, seed=6)
PROMPTS = ["the cat", "x", "in another the thing"]


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return tiny_lm()


def choosing(lm: LanguageModel, prompt: str, count: int, may: Any) -> list[int]:
    """Write greedily, one whole pass of the model per token, with what ``may`` says of a token after the new ones."""

    def change(logits_V: torch.Tensor, _ids: list[int], new: list[int]) -> torch.Tensor:
        allowed_V = torch.tensor([may(token, new) for token in range(len(logits_V))])
        return torch.where(allowed_V, logits_V, -torch.inf)

    return by_hand(lm, prompt, count, change)


def spelled(lm: LanguageModel, tokens: list[int]) -> bytes:
    return b"".join(token_bytes(lm.tokenizer, token) for token in tokens)


def printable(lm: LanguageModel) -> list[int]:
    """Return the tokens that are a letter of ASCII."""
    return [token for token in range(len(lm.tokenizer)) if token_bytes(lm.tokenizer, token).isalpha()]


def test_only_allowed_tokens_are_generated(lm: LanguageModel) -> None:
    allowed = [70, 71, 75, 80]
    for prompt, one in zip(PROMPTS, lm.generate(PROMPTS, 8, allowed_token_ids=allowed), strict=True):
        assert one.token_ids == choosing(lm, prompt, 8, lambda token, _: token in allowed)
        assert one.finish_reason == "length"
    with_end = [*allowed, lm.tokenizer.eos_token_id]
    [one] = lm.generate("x", 40, Sampling(temperature=1.0, seed=0), allowed_token_ids=with_end)
    assert (one.finish_reason, set(one.token_ids) <= set(allowed)) == ("stop", True)


def test_bad_words_occur_nowhere_not_even_across_tokens(lm: LanguageModel) -> None:
    letters = printable(lm)
    plain = lm.generate(PROMPTS, 8, allowed_token_ids=letters)
    words = [one.text[at : at + size] for one, at, size in zip(plain, (1, 3, 0), (3, 1, 2), strict=True)]

    def may(token: int, new: list[int]) -> bool:
        return token in letters and not any(word.encode() in spelled(lm, [*new, token]) for word in words)

    found = lm.generate(PROMPTS, 8, bad_words=words, allowed_token_ids=letters)
    for prompt, one, other in zip(PROMPTS, found, plain, strict=True):
        assert one.token_ids == choosing(lm, prompt, 8, may)
        assert not any(word in one.text for word in words)
        assert one.token_ids != other.token_ids


def test_what_tokens_spell_in_one_go(lm: LanguageModel) -> None:
    size = len(lm.tokenizer) + 3  # models have more rows than their tokenizer has tokens
    assert vocabulary_bytes(lm.tokenizer, size) == [token_bytes(lm.tokenizer, token) for token in range(size)]


def test_which_tokens_spell_a_word(lm: LanguageModel) -> None:
    pieces = vocabulary_bytes(lm.tokenizer, len(lm.tokenizer))
    vocabulary = SpelledVocabulary(pieces)
    for word in (b"t", b"th", b" the", b"e", b" ", b"an", b"hin", b"\xff", b"absent", "日".encode()):
        expected = [token for token, piece in enumerate(pieces) if word in piece]
        assert vocabulary.containing(word) == expected, word
        assert sorted(vocabulary.starting(word)) == [token for token in expected if pieces[token].startswith(word)]


def test_before_min_tokens_nothing_ends_the_text(lm: LanguageModel) -> None:
    end = lm.tokenizer.eos_token_id
    eager = Sampling(temperature=1.0, seed=3, logit_bias={end: 12})
    [short] = lm.generate("x", 20, eager)
    assert len(short.token_ids) < 6
    [one] = lm.generate("x", 20, eager, min_tokens=6)
    assert (len(one.token_ids), one.finish_reason) == (6, "stop")
    [other] = lm.generate("x", 20, eager, min_tokens=20)
    assert (len(other.token_ids), other.finish_reason) == (20, "length")


def test_stop_strings_before_min_tokens_are_none(lm: LanguageModel) -> None:
    letters = printable(lm)
    [plain] = lm.generate("the cat", 12, allowed_token_ids=letters)
    letter = plain.text[2]
    cut = lm.generate("the cat", 12, stop=letter, allowed_token_ids=letters)[0].text
    assert cut == plain.text.partition(letter)[0]
    assert lm.generate("the cat", 12, stop=letter, allowed_token_ids=letters, min_tokens=12)[0].text.startswith(
        plain.text[:11]
    )
    # A stop string that begins in what was given out already cannot end the text any more.
    tail = TextTail(byte_tokenizer(), [], ["ab"])
    ids = byte_tokenizer()("abcab", add_special_tokens=False).input_ids
    pieces = [tail.put(token, may_stop=place > 0) for place, token in enumerate(ids)]
    assert "".join(pieces) + tail.end() == tail.text == "abc"


def test_stop_tokens_end_the_text_and_are_named(lm: LanguageModel) -> None:
    [plain] = lm.generate("the cat", 12)
    token = plain.token_ids[5]
    at = plain.token_ids.index(token)
    [one] = lm.generate("the cat", 12, stop_token_ids=[token])
    assert (one.token_ids, one.stop, one.finish_reason) == (plain.token_ids[:at], token, "stop")
    [kept] = lm.generate("the cat", 12, stop_token_ids=[token], include_stop_str_in_output=True)
    assert (kept.token_ids, kept.stop, kept.finish_reason) == (plain.token_ids[: at + 1], token, "stop")
    assert kept.text.startswith(one.text)
    assert kept.usage.completion_tokens == one.usage.completion_tokens == at + 1


def test_the_stop_string_may_stay(lm: LanguageModel) -> None:
    [plain] = lm.generate("the cat", 12)
    stop = plain.text[3:5]
    [one] = lm.generate("the cat", 12, stop=stop, include_stop_str_in_output=True)
    assert one.text == plain.text[: plain.text.index(stop) + len(stop)]
    with lm.stream("the cat", 12, stop=stop, include_stop_str_in_output=True) as stream:
        assert "".join(stream) == one.text


def test_end_tokens_may_end_nothing(lm: LanguageModel) -> None:
    end = lm.tokenizer.eos_token_id
    eager = Sampling(temperature=1.0, seed=3, logit_bias={end: 12})
    for one in lm.generate(PROMPTS, 9, eager, ignore_eos=True):  # several at once: the model's own loop ends none
        assert (len(one.token_ids), one.finish_reason) == (9, "length")
        assert end in one.token_ids
    [one] = lm.generate("x", 9, eager, ignore_eos=True, stop_token_ids=[end])
    assert (one.stop, one.finish_reason) == (end, "stop")


LIMITS: list[dict[str, Any]] = [
    {"min_tokens": 5},
    {"bad_words": ["e", "th"]},
    {"allowed_token_ids": list(range(60, 110))},
    {"stop_token_ids": [72, 90], "min_tokens": 3},
    {"ignore_eos": True},
]


@pytest.mark.parametrize("limits", LIMITS)
def test_limits_hold_alike_in_batches_streams_and_sessions(lm: LanguageModel, limits: dict[str, Any]) -> None:
    together = lm.generate(PROMPTS, 8, SAMPLED, n=2, **limits)
    alone = [one for prompt in PROMPTS for one in lm.generate(prompt, 8, SAMPLED, n=2, **limits)]
    assert [one.token_ids for one in together] == [one.token_ids for one in alone]
    assert [one.text for one in together] == [one.text for one in alone]
    with lm.stream(PROMPTS[0], 8, SAMPLED, **limits) as stream:
        assert "".join(stream) == together[0].text
    assert lm.prefill(PROMPTS[0]).generate(8, SAMPLED, **limits).text == together[0].text


def test_limits_and_a_form_hold_together(lm: LanguageModel) -> None:
    pytest.importorskip("llguidance")
    schema = {"enum": ["abc", "ad", "xyz"]}
    for seed in range(6):
        [one] = lm.generate("x", 30, Sampling(temperature=1.0, seed=seed), schema=schema, bad_words=["d", "x"])
        assert json.loads(one.text) == "abc"
    # A complete form ends the text, however short, and a stop token may be a token of the form.
    [short] = lm.generate("x", 30, choice=["a", "b"], min_tokens=20)
    assert (short.text in ("a", "b"), short.finish_reason) == (True, "stop")
    token = lm.tokenizer("c", add_special_tokens=False).input_ids[0]
    [cut] = lm.generate("x", 30, regex="abcd", stop_token_ids=[token])
    assert (cut.text, cut.stop) == ("ab", token)
    assert lm.generate("x", 30, choice=["a\x7f"])[0].text == "a\x7f"
    for broken in ({"choice": ["\ud800"]}, {"regex": "\ud800"}, {"stop": "\ud800"}):
        with pytest.raises(TextError, match="is not valid Unicode"):
            lm.generate("x", 30, **broken)
    with pytest.raises(ConfigError, match="No token can come next under `bad_words` and"):
        lm.generate("x", 30, choice=["ab"], bad_words=["b"])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"min_tokens": -1}, "min_tokens=-1 is negative"),
        ({"min_tokens": 9}, "min_tokens=9 is more than max_new_tokens=8"),
        ({"min_tokens": 1.5}, "min_tokens is a whole number"),
        ({"stop_token_ids": [5, -1]}, "stop_token_ids has the token id -1"),
        ({"stop_token_ids": 5}, "stop_token_ids is a list of token ids"),
        ({"stop_token_ids": [10**9]}, "`stop_token_ids` has the token 1000000000"),
        ({"allowed_token_ids": []}, "allowed_token_ids is empty"),
        ({"allowed_token_ids": ["a"]}, "a token id of allowed_token_ids is a whole number"),
        ({"allowed_token_ids": [10**9]}, "`allowed_token_ids` has the token 1000000000"),
        ({"bad_words": ["a", ""]}, "bad_words has an empty string"),
        ({"bad_words": [5]}, "bad_words is a text or a list of texts"),
        ({"ignore_eos": "yes"}, "ignore_eos is True or False"),
        ({"ignore_eos": True, "choice": ["a"]}, "ignore_eos contradicts choice"),
        ({"allowed_token_ids": [2], "min_tokens": 1}, "under `allowed_token_ids` and `min_tokens`"),
        ({"allowed_token_ids": [70], "bad_words": ["d"]}, "under `allowed_token_ids` and `bad_words`"),
    ],
)
def test_impossible_limits(lm: LanguageModel, given: dict[str, Any], said: str) -> None:
    assert lm.tokenizer.eos_token_id == 2
    with pytest.raises(ConfigError, match=said):
        lm.generate("x", 8, **given)


@pytest.mark.parametrize("given", [{"min_tokens": 2}, {"bad_words": "a"}, {"ignore_eos": True}])
def test_a_search_among_continuations_takes_none(given: Any) -> None:
    with pytest.raises(ConfigError, match="can't be combined with `rerank`"):
        GenerationConfig.of(8, SAMPLED, given).refuse_with_rerank()
    assert Rerank().width  # the search itself knows none of them
