"""Errors say which text they are about, and which name was meant."""

import pickle

import numpy as np
import pytest

import gerund
from gerund.errors import TextError, unknown_name

VERBS = {
    "encode": (lambda lm, texts: lm.encode(texts), "text"),
    "generate": (lambda lm, texts: lm.generate(texts, 2), "prompt"),
    "score": (lambda lm, texts: lm.score(texts, [["a"]] * len(texts), scorer=vectors()), "prefix"),
}


def vectors():
    from gerund.scoring.dual_encoder import VectorScorer

    encode = lambda texts: np.ones((len(texts), 2))  # noqa: E731
    return VectorScorer("ones", encode, encode)


@pytest.fixture(scope="module")
def lm(tiny_folder):
    return gerund.load(tiny_folder)


@pytest.mark.parametrize("verb", VERBS)
def test_the_index_is_an_attribute(lm, verb):
    call, kind = VERBS[verb]
    bad = " " if kind != "prompt" else "a" * 100
    with pytest.raises(TextError, match=f"{kind} 2 ") as caught:
        call(lm, ["a", "b", bad])
    assert (caught.value.index, caught.value.kind) == (2, kind)
    assert str(caught.value) == f"{kind} 2 {caught.value.reason}"


@pytest.mark.parametrize("bad", ["\ud800", 5])
def test_also_of_what_is_no_text(lm, bad):
    for verb in (lm.encode, lm.generate):
        with pytest.raises(TextError) as caught:
            verb(["a", bad])
        assert caught.value.index == 1


def test_an_error_without_a_number_has_none():
    error = TextError("the text is empty")
    assert (error.index, error.reason) == (None, "the text is empty")
    copied = pickle.loads(pickle.dumps(TextError.about("text", 4, "is empty")))
    assert (str(copied), copied.index) == ("text 4 is empty", 4)


@pytest.mark.parametrize(
    ("name", "hint"),
    [("bidr", "'bidir'"), ("BIDIR", "'bidir'"), ("mask0-bdir", "'mask0-bidir'"), ("sideways", None), ("", None),
     ("x" * 10**6, None), (None, None)],
)  # fmt: skip
def test_a_mistyped_name_is_recognised(name, hint):
    message = str(unknown_name("plan", name, gerund.PLAN_NAMES))
    assert message.startswith("unknown plan ")
    assert message.endswith(f"; did you mean {hint}?") if hint else "did you mean" not in message


def test_prompts_plans_and_poolings_that_are_mistyped(lm):
    with pytest.raises(gerund.ConfigError, match=r"unknown attention plan 'bidr'; .*; did you mean 'bidir'\?"):
        gerund.AttentionPlan("bidr")
    with pytest.raises(gerund.ConfigError, match=r"did you mean 'weighted-mean'\?"):
        gerund.EncoderConfig(pooling="weighted_mean")
    named = lm.with_encoder(gerund.EncoderConfig(prompts={"query": "Q: ", "document": "D: "}))
    with pytest.raises(gerund.ConfigError, match=r"unknown prompt 'qurey'; valid are: query, document; did you mean"):
        named.encode("a", prompt_name="qurey")


class TestUsage:
    TEXTS = ("the cat", "a" * 100, "x")

    def test_counts_and_cuts(self, lm):
        found = lm.encode_with_usage(self.TEXTS)  # warnings are errors here
        lengths = [len(lm.tokenizer(text).input_ids) for text in self.TEXTS]
        assert found.token_counts == [lengths[0], lm.max_length, lengths[2]]
        assert found.truncated == [False, True, False]
        with pytest.warns(UserWarning, match="1 of 3 texts were longer"):
            np.testing.assert_array_equal(found.vectors, lm.encode(self.TEXTS))

    def test_the_prompt_is_counted_and_settings_are_those_of_encode(self, lm):
        found = lm.encode_with_usage(["b", ""], "Q: ", False, 5, empty="zeros")
        assert found.token_counts == [len(lm.tokenizer("Q: b").input_ids), 0]
        assert found.truncated == [False, False]
        np.testing.assert_array_equal(found.vectors, lm.encode(["b", ""], "Q: ", False, 5, empty="zeros"))
        assert lm.encode_with_usage("one").vectors.shape == (1, lm.dimensions)

    def test_nothing_is_cut_where_that_is_an_error(self, lm):
        with pytest.raises(TextError, match="there is room for 64"):
            lm.encode_with_usage(self.TEXTS, overflow="error")
