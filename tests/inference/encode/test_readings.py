"""Readings of one pass equal those that a pass each gives, whatever is read."""

from dataclasses import replace

import numpy as np
import pytest

from gerund.errors import ConfigError
from gerund.evaluation.systems.base import EmbeddingCache, key_of_text
from gerund.evaluation.systems.language_model import language_model_system, precompute
from gerund.inference.encode import runtime as runtimes
from gerund.inference.encode.sweep import by_pass, encode_readings
from gerund.inference.encode.texts import template_tokens
from gerund.settings.encoder import EncoderConfig, same_pass
from gerund.settings.plan import AttentionPlan
from gerund.settings.templates import settings_of_template
from tests.tiny import byte_tokenizer, tiny_lm

TEXTS = ["a cat sat", "", "two dogs ran away", "rain"]
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
def lm():
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
def test_each_reading_equals_its_own_pass(lm, name, monkeypatch):
    models = [lm.with_encoder(config) for config in readings(PASSES[name])]
    models += [lm.with_encoder(replace(PASSES[name], transform="standardization")).fitted(SAMPLE)]
    alone = [model.encode(TEXTS, normalize=False, empty="zeros") for model in models]
    ran = []
    run = runtimes.EncoderRuntime.run
    monkeypatch.setattr(runtimes.EncoderRuntime, "run", lambda self, *given: ran.append(self) or run(self, *given))
    cache = EmbeddingCache()
    systems = [language_model_system(str(place), model, cache) for place, model in enumerate(models)]
    precompute(systems, TEXTS, prompt=None, show=False)
    assert len(ran) == len(PASSES[name].templates or [None])
    for system, expected in zip(systems, alone, strict=True):
        store = cache.store(system.cache_key, system.prompt_text(None))
        np.testing.assert_allclose(store.rows(list(map(key_of_text, TEXTS))), expected, rtol=1e-4, atol=1e-5)


def test_other_passes_are_refused_and_grouped_apart(lm):
    configs = [CAUSAL, PASSES["masked"], replace(CAUSAL, layers="1"), replace(CAUSAL, max_length=9)]
    given = [lm.with_encoder(config).runtime for config in configs]
    assert by_pass("abcd", given) == [["a", "c"], ["b"], ["d"]]
    [tokens] = template_tokens(given[0], ["a cat"])
    with pytest.raises(ConfigError, match="in different passes"):
        encode_readings(given[:2], tokens)
    # Settings that could not be one config are compared all the same.
    assert not same_pass(EncoderConfig(AttentionPlan("causal", skips=1)), replace(CAUSAL, states="attention"))
