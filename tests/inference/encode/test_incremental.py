"""Texts that grow give the vectors that they have when they are read anew."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import gerund
from gerund.inference.encode import incremental
from gerund.inference.encode.incremental import IncrementalEncoder, can_encode_incrementally
from gerund.inference.encode.texts import text_tokens
from gerund.settings.plan import AttentionPlan
from tests.tiny import save_tiny, tiny_lm

ROUNDS = [
    ["the cat", "an inn", "the"],
    ["the cat sat in", "the cat in the rain", "an inn at the end", "a tin", "the cat"],
    ["the cat sat in the rain and then", "the cat sat", "rain", "a tin inn and the cat sat in it"],
]
# The window of the others counts places in the cache.
GROWING = ["gpt2", "gpt_neox", "granite", "llama", "olmo", "olmo2", "opt", "phi", "qwen2", "qwen3", "smollm3"]


def anew(lm, texts):
    return np.stack([lm.encode(text, normalize=False) for text in texts])


def grown(growing, lm, texts):
    return growing.encode(text_tokens(lm.runtime, texts))


@pytest.mark.sweep(quick=4, check=4)
@pytest.mark.parametrize("name", GROWING)
def test_equals_reading_anew_on_every_architecture(tmp_path, name):
    lm = gerund.load(save_tiny(tmp_path / name, name), attention="causal", dtype="float32")
    assert can_encode_incrementally(lm.runtime)
    growing = IncrementalEncoder(lm.runtime)
    for texts in ROUNDS:
        np.testing.assert_allclose(grown(growing, lm, texts), anew(lm, texts), atol=2e-5)


@pytest.mark.sweep(quick=4, check=4)
@pytest.mark.parametrize("pooling", ["mean", "weighted-mean", "last", "first", "last-mean"])
@pytest.mark.parametrize("append_eos", [False, True])
def test_every_pooling_with_a_prompt(tiny_folder, pooling, append_eos):
    lm = gerund.load(tiny_folder, attention="causal", dtype="float32", pooling=pooling, prompt="on: ")
    lm = lm.with_encoder(replace(lm.encoder, append_eos=append_eos))
    growing = IncrementalEncoder(lm.runtime)
    for texts in ROUNDS:
        np.testing.assert_allclose(grown(growing, lm, texts), anew(lm, texts), atol=2e-5)


def test_reads_what_is_new(tiny_folder, monkeypatch):
    lm = gerund.load(tiny_folder, attention="causal", dtype="float32")
    read = []
    run = IncrementalEncoder._run
    monkeypatch.setattr(
        IncrementalEncoder, "_run", lambda self, ids, *rest: (read.append(tuple(ids.shape)), run(self, ids, *rest))[1]
    )
    growing = IncrementalEncoder(lm.runtime)
    first = text_tokens(lm.runtime, ["the cat sat in the rain"])
    growing.encode(first)
    growing.encode(text_tokens(lm.runtime, ["the cat sat in the rain now"]))
    growing.encode(text_tokens(lm.runtime, ["the cat sat in the rain now"]))
    assert read == [
        (1, len(first[0])),
        (1, len(text_tokens(lm.runtime, [" now"])[0]) - text_tokens(lm.runtime, ["x"])[0].specials_before),
        (1, 1),
    ]


@pytest.mark.parametrize("plan", ["bidir", "mask0-bidir", "echo", "extra-bidir"])
def test_not_under_a_plan_that_looks_ahead(plan):
    assert not can_encode_incrementally(tiny_lm(attention=AttentionPlan(plan)).runtime)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("window_size", 8), ("attention_chunk_size", 8)),
        *(("sliding_window", 3), ("layer_types", ["full_attention", "linear_attention"])),
    ],
)
def test_not_with_a_window_whatever_its_name(name, value):
    lm = tiny_lm(attention=AttentionPlan("causal"))
    assert can_encode_incrementally(lm.runtime)
    setattr(lm.model.config, name, value)
    assert not can_encode_incrementally(lm.runtime)


def test_memory_that_runs_out_halves_a_batch(tiny_folder, monkeypatch):
    lm = gerund.load(tiny_folder, attention="causal", dtype="float32")
    run = IncrementalEncoder._run

    def small(self, ids, *rest):
        if len(ids) > 2:
            raise torch.OutOfMemoryError
        return run(self, ids, *rest)

    monkeypatch.setattr(IncrementalEncoder, "_run", small)
    np.testing.assert_allclose(grown(IncrementalEncoder(lm.runtime), lm, ROUNDS[1]), anew(lm, ROUNDS[1]), atol=2e-5)


def test_not_where_it_is_found_to_differ(tiny_folder, monkeypatch):
    lm = gerund.load(tiny_folder, attention=AttentionPlan("causal"))
    monkeypatch.setattr(incremental, "_anew", lambda runtime, texts: torch.randn(len(texts), runtime.width).numpy())
    assert not can_encode_incrementally(lm.runtime)
