"""Vectors of stretches of a text against states that are pooled by hand."""

import unicodedata

import numpy as np
import pytest

import gerund
from gerund.errors import ConfigError, TextError
from gerund.inference.encode.texts import text_tokens
from gerund.models.vectors import unit

TEXTS = ["The cat sat. A dog ran.", "é over there", "Short."]
SPANS = [[(0, 12), (13, 23), (4, 20), (0, 23)], [(0, 1), (2, 12)], []]


def by_hand(lm, text, span):
    """Pool the states of every token that has a character of the stretch, one text alone."""
    [states] = lm.encode_tokens([text])
    [tokens] = text_tokens(lm.runtime, [text], offsets=True)
    before = len(states) - len(tokens.offsets)
    own = [states[before + row] for row, (a, b) in enumerate(tokens.offsets) if a < b and a < span[1] and b > span[0]]
    ranks = np.arange(1, len(own) + 1, dtype=np.float32)
    weights = {"mean": np.ones(len(own)), "weighted-mean": ranks, "last": ranks == len(own), "first": ranks == 1}
    weights["last-mean"] = weights["mean"] + len(own) * weights["last"]
    own_weights = weights[lm.encoder.pooling].astype(np.float32)
    return (np.stack(own) * own_weights[:, None]).sum(0) / own_weights.sum()


@pytest.mark.parametrize("pooling", ["mean", "weighted-mean", "last", "first", "last-mean"])
@pytest.mark.parametrize("plan", ["mask0-bidir", "causal"])
def test_each_is_pooled_from_its_own_tokens(tiny_folder, pooling, plan):
    lm = gerund.load(tiny_folder, attention=plan, pooling=pooling, dtype="float32")
    found = lm.encode_spans(TEXTS, SPANS, normalize=False, batch_tokens=64)
    for text, spans, vectors in zip(TEXTS, SPANS, found, strict=True):
        assert vectors.shape == (len(spans), lm.dimensions)
        for span, vector in zip(spans, vectors, strict=True):
            assert vector == pytest.approx(by_hand(lm, text, span), abs=1e-5)
    lengths = np.linalg.norm(np.concatenate(lm.encode_spans(TEXTS, SPANS)), axis=1)
    assert lengths == pytest.approx(np.ones(6))


def test_a_stretch_that_is_its_whole_text_is_that_text(tiny_folder):
    lm = gerund.load(tiny_folder, dtype="float32", pool_bos="never", transform="all-but-the-top-1").fitted(
        [f"{one} {other}" for one in "abcdefgh" for other in "stuv"]
    )
    found = lm.encode_spans(TEXTS, [[(0, len(text))] for text in TEXTS], normalize=False)
    assert np.concatenate(found) == pytest.approx(lm.encode(TEXTS, normalize=False), abs=1e-4)


def test_a_prompt_is_read_and_not_pooled(tiny_folder):
    lm = gerund.load(tiny_folder, dtype="float32")
    [plain] = lm.encode_spans(["The cat sat."], [[(np.int64(4), 7)]])
    [prompted] = lm.encode_spans(["The cat sat."], [[(4, 7)]], prompt="About: ")
    assert not np.allclose(plain, prompted, atol=1e-3)  # its tokens have seen the prompt
    both = text_tokens(lm.runtime, ["The cat sat."], "About: ", offsets=True)[0]
    states = lm.encode_tokens(["The cat sat."], prompt="About: ")[0]
    own = [states[both.specials_before + row] for row, (a, b) in enumerate(both.offsets) if a < 7 and b > 4 and a < b]
    assert prompted[0] == pytest.approx(unit(np.mean(own, axis=0)), abs=1e-5)


def test_what_is_cut_off_has_zeros_and_there_is_a_warning(tiny_folder):
    lm = gerund.load(tiny_folder)
    text = "word " * 40
    with pytest.warns(UserWarning, match="were cut"):
        [vectors] = lm.encode_spans([text], [[(0, 4), (190, 194)]])
    assert vectors[0].any()
    assert not vectors[1].any()


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([[(0, 5)]], "give a list of stretches for each text"),
        ("ab", "give a list of stretches for each text"),
        ([[(0, 99)], []], r"\(0, 99\) is no stretch of text 0, which has 5 characters"),
        ([[], [(2, 2)]], "is no stretch of text 1"),
        ([[], [(-1, 2)]], "is no stretch of text 1"),
        ([[], [3]], "3 is no stretch of text 1"),
        ([[], [(0.0, 1.0)]], "is no stretch of text 1"),
        ([(0, 2), []], "0 is no stretch of text 0"),
    ],
)
def test_what_is_no_stretch(tiny_folder, spans, message):
    with pytest.raises(TextError, match=message):
        gerund.load(tiny_folder).encode_spans(["Hello", "there"], spans)


@pytest.mark.slow
def test_what_reads_a_text_several_times_has_none(bundled):
    lm = gerund.load(template="metaeol")
    with pytest.raises(ConfigError, match="only encode can"):
        lm.encode_spans(["Hello"], [[(0, 5)]])
    with pytest.raises(TextError, match="is empty"):
        bundled.encode_spans([" "], [[]])


@pytest.mark.parametrize(
    ("text", "other"),
    [
        ("Müller in Zürich", unicodedata.normalize("NFD", "Müller in Zürich")),
        ("photosynthesis is", "photo\u00adsyn\u200bthesis is"),
        ("an efficient one", "an ef\ufb01cient one"),
        ("it is reorganised", "it is reor-\nganised"),
    ],
)
def test_texts_that_read_the_same_have_the_same_vectors(bundled, text, other):
    for verb in (
        bundled.encode,
        lambda one: bundled.encode_tokens([one])[0],
        lambda one: bundled.encode(one, prompt="So: "),
    ):
        np.testing.assert_allclose(verb(text), verb(other), atol=1e-5)
    first, last = other.rindex(" ") + 1, len(other)
    [[one], [same]] = bundled.encode_spans([text, other], [[(text.rindex(" ") + 1, len(text))], [(first, last)]])
    assert one @ same == pytest.approx(1, abs=1e-5)
    [tokens] = text_tokens(bundled.runtime, [other], offsets=True)
    assert tokens.offsets[-1][1] == last


def test_words_keep_their_places(bundled):
    words = ["Zürich", "liegt", "schön"]
    found = bundled.encode_words([words, [unicodedata.normalize("NFD", one) for one in words]])
    np.testing.assert_allclose(found[0], found[1], atol=1e-5)


def test_texts_may_be_encoded_as_they_are(tiny_folder):
    lm = gerund.load(tiny_folder, text_normalization="none", dtype="float32")
    usual = gerund.load(tiny_folder, dtype="float32")
    assert lm.encoder.to_dict()["text_normalization"] == "none"
    assert "text_normalization" not in usual.encoder.to_dict()
    assert lm.fingerprint() != usual.fingerprint()
    nfd = unicodedata.normalize("NFD", "Zürich")
    assert text_tokens(lm.runtime, [nfd])[0].ids == lm.tokenizer(nfd).input_ids
    assert text_tokens(usual.runtime, [nfd])[0].ids == lm.tokenizer("Zürich").input_ids
    np.testing.assert_array_equal(lm.encode(TEXTS), usual.encode(TEXTS))  # these have their form
    with pytest.raises(ConfigError, match="text_normalization"):
        gerund.load(tiny_folder, text_normalization="nfd")


def test_what_is_written_from_is_left_as_it_is(tiny_folder):
    lm = gerund.load(tiny_folder)
    prompt = "Zu\u0308rich photo\u00adsyn-\nthesis"
    [found] = lm.generate([prompt], 1)
    assert found.usage.prompt_tokens == len(lm.tokenizer(prompt).input_ids)
