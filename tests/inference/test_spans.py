"""Spans are scored as explicit masks in eager attention score them, whatever else is in the batch."""

import numpy as np
import pytest
import torch

import gerund
from gerund.attention.interface import attach
from gerund.attention.plan import AttentionPlan
from gerund.attention.streams import attach_streams, decoder_layers
from gerund.errors import ConfigError, TextError, UnsupportedModelError
from gerund.inference.spans import SpannedText, span_logprobs
from tests.attention.reference import ReferenceModel
from tests.tiny import byte_tokenizer, save_tiny, tiny

TEXTS = [
    SpannedText("the cat sat in the rain", ((7, 11),)),
    SpannedText("another day in the inn", ((4, 7), (12, 14), (18, 22))),
    SpannedText("an end", ((2, 6),)),
]


def ready(name, **changes):
    tokenizer = byte_tokenizer()
    model = tiny(name, vocab_size=len(tokenizer), **changes)
    attach(model)
    attach_streams(decoder_layers(model))
    return model, tokenizer


def by_hand(name, tokenizer, item, kind):
    """Score one text alone, in eager attention, with every mask written out."""
    read = tokenizer(item.text, return_offsets_mapping=True)
    ids, offsets = read["input_ids"], read["offset_mapping"]
    span = [0] * len(ids)
    for number, (start, end) in enumerate(item.spans, start=1):
        for place, (first, last) in enumerate(offsets):
            if span[place] == 0 and last > first and first < end and last > start:
                span[place] = number
    model = tiny(name, vocab_size=len(tokenizer))
    batch = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
    plan = AttentionPlan("hybrid" if kind == "infill" else "causal")
    hidden = ReferenceModel(model, plan).hidden_states(batch, torch.tensor([span]))
    scores = torch.log_softmax(model.get_output_embeddings()(hidden).float(), dim=-1)[0]
    return [
        np.array([scores[place - 1, ids[place]].item() for place in range(len(ids)) if span[place] == number])
        for number in range(1, len(item.spans) + 1)
    ]


@pytest.mark.parametrize("kind", ["infill", "causal"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2", "opt", "qwen3", "olmo3", "phi3"])
@torch.no_grad()
def test_spans_equal_explicit_masks(name, side, kind):
    model, tokenizer = ready(name)
    tokenizer.padding_side = side
    ours = span_logprobs(model, tokenizer, TEXTS, reading=kind, show=False)
    for item, found in zip(TEXTS, ours, strict=True):
        slow = by_hand(name, tokenizer, item, kind)
        assert len(found) == len(item.spans)
        for own, expected in zip(found, slow, strict=True):
            np.testing.assert_allclose(own, expected, atol=2e-5)


def test_only_infilling_sees_what_follows(tiny_folder):
    lm = gerund.load(tiny_folder)
    ways = {
        reading: [lm.span_logprobs("the cat", " sat in", right, reading=reading) for right in (" the rain", " an inn")]
        for reading in ("infill", "causal")
    }
    np.testing.assert_allclose(*ways["causal"], atol=1e-6)
    assert np.abs(ways["infill"][0] - ways["infill"][1]).max() > 1e-3


def test_the_causal_reading_is_that_of_the_untouched_model(tiny_folder):
    lm = gerund.load(tiny_folder)
    ids = lm.tokenizer("the cat sat")["input_ids"]
    before = len(lm.tokenizer("the cat")["input_ids"])
    scores = torch.log_softmax(lm.model(torch.tensor([ids])).logits[0].float(), dim=-1)
    expected = [scores[place - 1, ids[place]].item() for place in range(before, len(ids))]
    np.testing.assert_allclose(lm.span_logprobs("the cat", " sat", " in", reading="causal"), expected, atol=1e-5)


def test_a_token_that_straddles_belongs_to_the_span(tiny_folder):
    """` the` is one token here: whichever of its characters are the span's, it is the span's."""
    lm = gerund.load(tiny_folder)
    whole = lm.span_logprobs("in", " the", " rain")
    assert len(whole) == 1
    np.testing.assert_array_equal(lm.span_logprobs("in ", "the", " rain"), whole)
    np.testing.assert_array_equal(lm.span_logprobs("in t", "h", "e rain"), whole)


def test_the_first_token_is_scored_after_the_beginning_token_only(tiny_folder, tmp_path):
    assert len(gerund.load(tiny_folder).span_logprobs("", "a", " cat")) == 1
    bare = gerund.load(save_tiny(tmp_path / "bare", bos=False))
    with pytest.raises(TextError, match="text on its left"):
        bare.span_logprobs("", "a", " cat")


@pytest.mark.parametrize(
    ("pieces", "message"),
    [(("a", "", "b"), "is empty"), (("", "", ""), "is empty"), (("a" * 70, "b", ""), "context ends at 64")],
)
def test_mistakes(tiny_folder, pieces, message):
    with pytest.raises(TextError, match=message):
        gerund.load(tiny_folder).span_logprobs(*pieces)


def test_an_unknown_reading(tiny_folder):
    with pytest.raises(ConfigError, match="unknown reading of a span 'both'; valid are: infill, causal"):
        gerund.load(tiny_folder).span_logprobs("a", "b", "c", reading="both")


def test_models_that_no_mask_reaches_are_read_causally_only(tmp_path):
    lm = gerund.load(save_tiny(tmp_path / "stablelm", "stablelm"), attention="causal")
    assert len(lm.span_logprobs("a", "b", "c", reading="causal")) == 1
    with pytest.raises(UnsupportedModelError):
        lm.span_logprobs("a", "b", "c")
