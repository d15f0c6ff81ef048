"""Encoding under many plans, and many readings of one pass, at once equals encoding under each."""

from dataclasses import replace

import numpy as np
import pytest

import gerund
from gerund.errors import ConfigError
from gerund.evaluation.systems.base import EmbeddingCache, key_of_text
from gerund.evaluation.systems.language_model import language_model_system, precompute
from gerund.inference.encode import batches
from gerund.inference.encode.runtime import EncoderRuntime
from gerund.inference.encode.sweep import by_pass, encode_each, encode_readings, encode_tokens_each
from gerund.inference.encode.texts import template_tokens
from gerund.inference.tokens import InputFormat, tokenize
from gerund.settings.encoder import EncoderConfig, same_pass
from gerund.settings.plan import AttentionPlan
from gerund.settings.templates import settings_of_template
from tests.tiny import byte_tokenizer, tiny_lm

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


READ = ["a cat sat", "", "two dogs ran away", "rain"]
SAMPLE = [f"{one} {other}" for one in "abcd" for other in "wxyz"]
CAUSAL = EncoderConfig(AttentionPlan("causal"))
PASSES = {
    "causal": CAUSAL,
    "template": replace(CAUSAL, template="topic", **settings_of_template("topic")),
    "several templates": replace(CAUSAL, template="metaeol", **settings_of_template("metaeol")),
    "prepended": replace(CAUSAL, template="prompteol", prepend=3, **settings_of_template("prompteol")),
    "rerouted": replace(CAUSAL, reroute="2-3"),
    "masked": EncoderConfig(AttentionPlan("mask0-bidir", k=2)),
    "two streams": EncoderConfig(AttentionPlan("inter-back", k=2)),
    "echo": EncoderConfig(AttentionPlan("echo")),
}


@pytest.fixture(scope="module")
def roomy():
    tokenizer = byte_tokenizer()
    tokenizer.model_max_length = 1024
    return tiny_lm("llama", tokenizer, changes={"max_position_embeddings": 1024}, attention=CAUSAL.attention)


def readings(config):
    """Return settings that read one pass."""
    read = [config, replace(config, layers="1+4"), replace(config, layers="2", pooling="last-mean")]
    read += [replace(config, layers="0", pooling="weighted-mean")]
    if config.attention.takes_skips and not config.prepend and config.reroute == "none":
        read += [replace(config, states="values", layers="3"), replace(config, states="attention", layers="2-4")]
    return read


@pytest.mark.parametrize("name", PASSES)
def test_each_reading_equals_its_own_pass(roomy, name, monkeypatch):
    models = [roomy.with_encoder(config) for config in readings(PASSES[name])]
    models += [roomy.with_encoder(replace(PASSES[name], transform="standardization")).fitted(SAMPLE)]
    alone = [model.encode(READ, normalize=False, empty="zeros") for model in models]
    ran = []
    run = EncoderRuntime.run
    monkeypatch.setattr(EncoderRuntime, "run", lambda self, *given: ran.append(self) or run(self, *given))
    cache = EmbeddingCache()
    systems = [language_model_system(str(place), model, cache) for place, model in enumerate(models)]
    precompute(systems, READ, prompt=None, show=False)
    assert len(ran) == len(PASSES[name].templates or [None])
    for system, expected in zip(systems, alone, strict=True):
        store = cache.store(system.cache_key, system.prompt_text(None))
        np.testing.assert_allclose(store.rows(list(map(key_of_text, READ))), expected, rtol=1e-4, atol=1e-5)


def test_other_passes_are_refused_and_grouped_apart(roomy):
    configs = [CAUSAL, PASSES["masked"], replace(CAUSAL, layers="1"), replace(CAUSAL, max_length=9)]
    given = [roomy.with_encoder(config).runtime for config in configs]
    assert by_pass("abcd", given) == [["a", "c"], ["b"], ["d"]]
    [tokens] = template_tokens(given[0], ["a cat"])
    with pytest.raises(ConfigError, match="in different passes"):
        encode_readings(given[:2], tokens)
    # Settings that could not be one config are compared all the same.
    assert not same_pass(EncoderConfig(AttentionPlan("causal", skips=1)), replace(CAUSAL, states="attention"))
