"""Encoding under many plans at once equals encoding under each."""

from dataclasses import replace

import numpy as np
import pytest

import gerund
from gerund.errors import ConfigError
from gerund.inference.encode import batches
from gerund.inference.encode.sweep import encode_each, encode_tokens_each
from gerund.inference.tokens import InputFormat, tokenize
from gerund.settings.plan import AttentionPlan

TEXTS = ["a", "the cat in the garden", "rain", "another longer text, with the rain and the cat", "an end"]


@pytest.fixture(params=["left", "right"])
def lm(request, tiny_folder):
    lm = gerund.load(tiny_folder)
    lm.tokenizer.padding_side = request.param
    return lm


def runtimes(lm):
    plans = [
        AttentionPlan("causal"),
        *(AttentionPlan("mask0-bidir", k=k) for k in (1, 3)),
        AttentionPlan("inter-back", k=2),
    ]
    configs = [replace(lm.encoder, attention=plan, pooling=p) for plan in plans for p in ("mean", "last")]
    return [lm.with_encoder(config).runtime for config in configs]


@pytest.mark.parametrize("prompt", ["", "Say: "])
def test_vectors(lm, prompt):
    tokens = [*tokenize(lm.tokenizer, TEXTS, InputFormat(prompt=prompt)), None]
    each = runtimes(lm)
    together = encode_each(each, tokens)
    assert together.shape == (len(each), len(TEXTS) + 1, lm.dimensions)
    for runtime, ours in zip(each, together, strict=True):
        np.testing.assert_allclose(ours, batches.encode(runtime, tokens), atol=2e-6)
    assert not together[:, -1].any()


def test_token_states(lm):
    tokens = tokenize(lm.tokenizer, TEXTS, InputFormat())
    each = runtimes(lm)
    found = {}
    encode_tokens_each(each, tokens, lambda place, row, states: found.update({(place, row): states}))
    for place, runtime in enumerate(each):
        for row, states in enumerate(batches.encode_tokens(runtime, tokens)):
            np.testing.assert_allclose(found[place, row], states, atol=2e-6)


def test_two_models_are_no_sweep(tiny_folder):
    one, two = gerund.load(tiny_folder), gerund.load(tiny_folder)
    with pytest.raises(ConfigError, match="several models"):
        encode_each([one.runtime, two.runtime], tokenize(one.tokenizer, TEXTS, InputFormat()))
