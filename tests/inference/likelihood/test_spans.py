"""Spans are scored as under explicit 4-D masks; which tokens belong to them; what is refused."""

import numpy as np
import pytest
import torch

from gerund.attention import probe
from gerund.errors import ConfigError, TextError, UnsupportedModelError
from gerund.inference.likelihood.spans import SpannedText, span_logprobs
from gerund.language_model import LanguageModel
from gerund.settings.plan import AttentionPlan
from tests.attention.reference import ReferenceModel
from tests.tiny import CONFIGS, byte_tokenizer, tiny

TEXTS = [
    SpannedText.between("He ran to", " the other", " side."),
    SpannedText("In the end a man and a cat ran.", ((3, 6), (11, 16), (23, 31))),
    SpannedText.between("", "Another", " man"),
    SpannedText.between("xyz", "w", ""),
]


def model_and_tokenizer(name="llama", bos=True):
    tokenizer = byte_tokenizer(bos)
    return tiny(name, vocab_size=len(tokenizer)), tokenizer


def labels_of(tokenizer, text):
    """Say for each token which span it belongs to, character by character."""
    batch = tokenizer(text.text, return_offsets_mapping=True, return_special_tokens_mask=True)
    of_character = [0] * len(text.text)
    for number, (start, stop) in enumerate(text.spans, start=1):
        of_character[start:stop] = [number] * (stop - start)
    labels = []
    for (start, stop), special in zip(batch.offset_mapping, batch.special_tokens_mask, strict=True):
        labels.append(0 if special else max(of_character[start:stop], default=0))
    return batch.input_ids, labels


@torch.no_grad()
def slow(name, text, plan, bos=True):
    """Score one text alone: eager attention, a mask that is written out, the whole vocabulary."""
    model, tokenizer = model_and_tokenizer(name, bos)
    ids, labels = labels_of(tokenizer, text)
    batch = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
    span = torch.tensor([labels]) if plan == "hybrid" else None
    states = ReferenceModel(model, AttentionPlan(plan)).hidden_states(batch, span)
    logits = model.get_output_embeddings()(states)
    config = model.config
    if getattr(config, "final_logit_softcapping", None):
        logits = torch.tanh(logits / config.final_logit_softcapping) * config.final_logit_softcapping
    logits = logits * getattr(config, "logit_scale", 1.0) / getattr(config, "logits_scaling", 1.0)
    logprobs = logits.log_softmax(dim=-1)[0]
    return [
        [logprobs[place - 1, ids[place]].item() for place, label in enumerate(labels) if label == number]
        for number in range(1, len(text.spans) + 1)
    ]


@pytest.mark.sweep(quick=5, check=20)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", CONFIGS)
def test_spans_score_as_under_masks_that_are_written_out(name, side):
    model, tokenizer = model_and_tokenizer(name)
    tokenizer.padding_side = side
    for mode, plan in [("infill", "hybrid"), ("causal", "causal")]:
        found = span_logprobs(model, tokenizer, TEXTS, mode)
        for text, own in zip(TEXTS, found, strict=True):
            for logprobs, expected in zip(own, slow(name, text, plan), strict=True):
                assert logprobs.dtype == np.float32
                np.testing.assert_allclose(logprobs, expected, atol=2e-5, err_msg=f"{mode}: {text}")


def test_small_batches_change_nothing():
    model, tokenizer = model_and_tokenizer(bos=False)
    texts = [TEXTS[0], TEXTS[3], TEXTS[1]]
    for mode, plan in [("infill", "hybrid"), ("causal", "causal")]:
        for own, text in zip(span_logprobs(model, tokenizer, texts, mode, batch_tokens=1), texts, strict=True):
            for logprobs, expected in zip(own, slow("llama", text, plan, bos=False), strict=True):
                np.testing.assert_allclose(logprobs, expected, atol=2e-5)


def test_infilling_sees_the_right_side_and_a_causal_reading_does_not():
    model, tokenizer = model_and_tokenizer()
    for mode, moves in [("infill", True), ("causal", False)]:
        a, b = (
            span_logprobs(model, tokenizer, [SpannedText.between("He ran", " far", right)], mode)[0][0]
            for right in (" away", " home")
        )
        assert (np.abs(a - b).max() > 1e-4) == moves


def test_no_span_sees_another_one_when_infilling():
    model, tokenizer = model_and_tokenizer()
    for mode, moves in [("infill", False), ("causal", True)]:
        a, b = (
            span_logprobs(model, tokenizer, [SpannedText(f"He {word} very far.", ((2, 6), (11, 15)))], mode)[0][1]
            for word in ("rbn", "fly")
        )
        assert (np.abs(a - b).max() > 1e-4) == moves


@pytest.mark.parametrize(
    "text, counts",
    [
        (SpannedText.between("He ran ", "the", " end"), [1]),  # the space before it is part of the token " the"
        (SpannedText.between("He ran t", "h", "e end"), [1]),  # so is all of "the"
        (SpannedText.between("He ran", " ", "the end"), None),
        (SpannedText.between("na", "\u00ef", "ve"), [2]),  # two bytes
        (SpannedText("a the b the c", ((2, 3), (9, 10))), [1, 1]),
    ],
)
def test_a_token_with_any_character_of_a_span_belongs_to_it(text, counts):
    model, tokenizer = model_and_tokenizer()
    if counts is None:
        with pytest.raises(TextError, match="span of characters 6 to 7 is empty"):
            span_logprobs(model, tokenizer, [text], "infill")
        return
    assert [len(own) for own in span_logprobs(model, tokenizer, [text], "infill")[0]] == counts


@pytest.mark.parametrize(
    "text, said",
    [
        (SpannedText("abc", ()), "text 1 has no span"),
        (SpannedText("abc", ((1, 1),)), "characters 1 to 1 is empty"),
        (SpannedText("abc", ((2, 4),)), "outside the text of 3 characters"),
        (SpannedText("abcd", ((2, 3), (1, 2))), "begins before an earlier one ends"),
        (SpannedText("abcd", ((1, 2), (2, 3))), "spans 1 and 2 touch; make them one"),
        (SpannedText("a thex", ((1, 3), (4, 5))), "spans 1 and 2 touch"),  # both in " the"
        (SpannedText("x" * 70, ((1, 2),)), "has 71 tokens and the model's context ends at 64"),
        (SpannedText("ab\ud800", ((1, 2),)), "not valid Unicode"),
    ],
)
def test_impossible_spans_are_refused(text, said):
    with pytest.raises(TextError, match=said):
        span_logprobs(*model_and_tokenizer(), [TEXTS[0], text], "causal")


@pytest.mark.parametrize("mode", ["infill", "causal"])
def test_without_a_beginning_token_a_text_cannot_begin_with_a_span(mode):
    with pytest.raises(TextError, match="text 0 begins with a span, and this tokenizer puts no beginning token"):
        span_logprobs(*model_and_tokenizer(bos=False), [TEXTS[2]], mode)


def test_an_unknown_reading_is_refused():
    with pytest.raises(ConfigError, match="unknown mode of span log-probabilities 'both'; valid are: infill, causal"):
        span_logprobs(*model_and_tokenizer(), TEXTS, "both")


def test_no_texts():
    assert span_logprobs(*model_and_tokenizer(), [], "infill") == []


def test_a_model_that_no_plan_reaches_reads_spans_causally_only():
    model, tokenizer = model_and_tokenizer("gpt_neo")
    for _ in range(2):  # that it was refused once is no proof
        with pytest.raises(UnsupportedModelError, match="gpt_neo"):
            span_logprobs(model, tokenizer, TEXTS, "infill")
    assert len(span_logprobs(model, tokenizer, TEXTS, "causal")[1]) == 3


def test_a_model_is_verified_once(monkeypatch):
    model, tokenizer = model_and_tokenizer()
    verified = []
    monkeypatch.setattr(probe, "verify", lambda *given: verified.append(given))
    span_logprobs(model, tokenizer, TEXTS, "infill")
    span_logprobs(model, tokenizer, TEXTS, "infill")
    assert len(verified) == 1


def test_the_verb():
    lm = LanguageModel(*model_and_tokenizer())
    for mode, plan in [("infill", "hybrid"), ("causal", "causal")]:
        [expected] = slow("llama", TEXTS[0], plan)
        np.testing.assert_allclose(
            lm.span_logprobs("He ran to", " the other", " side.", mode=mode), expected, atol=2e-5
        )
    np.testing.assert_allclose(lm.span_logprobs("a", "b", "c"), lm.span_logprobs("a", "b", "c", mode="infill"))
    with pytest.raises(TextError, match="span of characters 1 to 1 is empty"):
        lm.span_logprobs("a", "", "c")
    with pytest.raises(TextError, match="text 1 is not a string"):
        lm.span_logprobs("a", None, "c")
