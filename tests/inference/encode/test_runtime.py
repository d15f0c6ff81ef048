"""Encoding against the slow way: one text at a time, pooled by hand."""

import numpy as np
import pytest
import torch

import gerund
from gerund import AttentionPlan, ConfigError, TextError
from gerund.attention import interface
from gerund.attention.bound_plan import BoundPlan
from gerund.errors import ResourceError
from gerund.inference.encode import runtime as encoding
from gerund.inference.tokens import token_batches
from gerund.poolings import POOLINGS, pool
from tests.tiny import tiny_lm

TEXTS = ["the cat", "a", "in the other thing and another", "x" * 50, "é 日本", "the cat"]


def build(plan=None, model_type="llama", *, padding_side="right", **settings):
    lm = tiny_lm(model_type, attention=plan or AttentionPlan(k=2), **settings)
    lm.tokenizer.padding_side = padding_side
    return lm


def by_hand(lm, text, prompt="", pooling="mean"):
    ids = lm.tokenizer(prompt + text, return_tensors="pt").input_ids
    bound = BoundPlan(lm.encoder.attention.resolve(lm.n_layers))
    with torch.no_grad():
        states = lm.model.base_model(ids, attention_plan=bound, use_cache=False).last_hidden_state[0]
    hides = any(view.hidden for view in bound.plan.views)
    first = len(lm.tokenizer(prompt).input_ids) if prompt else int(hides)
    states = states[first:]
    if pooling == "mean":
        return states.mean(0).numpy()
    if pooling == "weighted-mean":
        weight = torch.arange(1, len(states) + 1).float()
        return (states * weight[:, None]).sum(0).numpy() / weight.sum().item()
    if pooling == "max":
        return states.amax(0).numpy()
    if pooling == "mean-sqrt":
        return states.sum(0).numpy() / len(states) ** 0.5
    if pooling == "first+mean":
        return torch.cat([states[0], states.mean(0)]).numpy()
    if pooling == "last-mean":
        return ((states[-1] + states.mean(0)) / 2).numpy()
    return states[{"last": -1, "first": 0}[pooling]].numpy()


@pytest.mark.sweep(quick=5, check=6)
@pytest.mark.parametrize("padding_side", ["left", "right"])
@pytest.mark.parametrize("pooling", [*POOLINGS, "first+mean"])
@pytest.mark.parametrize("plan", ["causal", "bidir", "mask0-bidir", "inter-back", "extend-bidir"])
@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gemma2", "mistral", "opt"])
def test_batches_equal_single_texts_pooled_by_hand(model_type, plan, pooling, padding_side):
    lm = build(AttentionPlan(plan), model_type, pooling=pooling, padding_side=padding_side)
    slow = np.stack([by_hand(lm, text, pooling=pooling) for text in TEXTS])
    np.testing.assert_allclose(lm.encode(TEXTS, normalize=False), slow, atol=3e-5, rtol=1e-4)


def test_prompt_tokens_are_not_pooled():
    lm = build(prompts={"query": "Find:\n"})
    slow = np.stack([by_hand(lm, text, prompt="Find:\n") for text in TEXTS])
    for given in ({"prompt_name": "query"}, {"prompt": "Find:\n"}):
        np.testing.assert_allclose(lm.encode(TEXTS, normalize=False, **given), slow, atol=2e-5, rtol=1e-4)
    pooled = build(pool_prompt=True).encode(TEXTS, "Find:\n", normalize=False)
    assert np.abs(pooled - slow).max() > 1e-3


def test_lengths_dimensions_and_shapes():
    lm = build()
    whole = lm.encode(TEXTS)
    assert whole.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(whole, axis=1), 1, atol=1e-6)
    cut = lm.encode(TEXTS, dimensions=8)
    expected = whole[:, :8] / np.linalg.norm(whole[:, :8], axis=1, keepdims=True)
    np.testing.assert_allclose(cut, expected, atol=1e-6)
    single = lm.encode(TEXTS[0])
    assert single.shape == (32,)
    np.testing.assert_allclose(single, whole[0], atol=1e-6)
    assert isinstance(lm.encode(TEXTS, output="torch"), torch.Tensor)
    assert lm.encode([]).shape == (0, 32)
    with pytest.raises(ConfigError, match="dimensions=33 is not between 1 and the model's 32"):
        lm.encode(TEXTS, dimensions=33)
    with pytest.raises(ConfigError, match="`batch_tokens` must be at least 1, got 0"):
        lm.encode(TEXTS, batch_tokens=0)
    for name in ("dimensions", "batch_tokens"):
        with pytest.raises(ConfigError, match=f"{name} is a whole number, not '32'"):
            lm.encode(TEXTS, **{name: "32"})
    with pytest.raises(ConfigError, match="a prompt is a text, and so is the name of one, not 4"):
        lm.encode(TEXTS, prompt=4)
    with pytest.raises(ConfigError, match="valid are: numpy, torch"):
        lm.encode(TEXTS, output="list")


@pytest.mark.parametrize("batch_tokens", [1, 7, 64, 10_000])
def test_the_budget_changes_nothing(batch_tokens):
    lm = build()
    np.testing.assert_allclose(lm.encode(TEXTS, batch_tokens=batch_tokens), lm.encode(TEXTS), atol=1e-5)


def test_empty_texts_become_zeros_only_on_request():
    lm = build()
    vectors = lm.encode(["the cat", "", " "], empty="zeros")
    assert np.abs(vectors[1:]).max() == 0
    np.testing.assert_allclose(vectors[0], lm.encode("the cat"), atol=1e-6)
    for text in ("", "  ", "\n\t"):
        with pytest.raises(TextError, match="text 1 is empty; set empty to zeros"):
            lm.encode(["the cat", text])
    assert lm.encode_tokens(["", "a"], empty="zeros")[0].shape == (0, 32)


def test_encode_tokens_gives_the_state_of_every_token():
    lm = build(AttentionPlan("causal"))
    for text, states in zip(TEXTS, lm.encode_tokens(TEXTS), strict=True):
        ids = lm.tokenizer(text, return_tensors="pt").input_ids
        with torch.no_grad():
            plain = lm.model.base_model(ids).last_hidden_state[0].numpy()
        np.testing.assert_allclose(states, plain, atol=2e-5, rtol=1e-4)
    unit = lm.encode_tokens(TEXTS, normalize=True)
    np.testing.assert_allclose(np.linalg.norm(unit[2], axis=1), 1, atol=1e-6)


def test_encode_tokens_leaves_the_prompt_out():
    lm = build()
    [states] = lm.encode_tokens(["the cat"], prompt="Find:\n")
    assert len(states) == len(lm.tokenizer("the cat").input_ids)


def test_words_are_means_of_their_tokens():
    lm = build()
    sentence = ["the", "thing", "é", "a"]
    [vectors] = lm.encode_words([sentence])
    [states] = lm.encode_tokens([" ".join(sentence)])
    ids = lm.tokenizer(" ".join(sentence)).input_ids
    pieces = [lm.tokenizer.decode([token]) for token in ids]
    assert pieces[:4] == ["<s>", "th", "e", " th"]
    np.testing.assert_allclose(vectors[0], states[1:3].mean(0), atol=1e-5)
    np.testing.assert_allclose(vectors[1], states[3:6].mean(0), atol=1e-5)
    np.testing.assert_allclose(vectors[2], states[7:9].mean(0), atol=1e-5)  # its bytes; the space before it is a token
    np.testing.assert_allclose(vectors[3], states[-1], atol=1e-5)
    [first] = lm.encode_words([sentence], pooling="first")
    np.testing.assert_allclose(first[1], states[3], atol=1e-5)
    [shifted] = lm.encode_words([sentence], shift=True)
    np.testing.assert_allclose(shifted[1], states[2:5].mean(0), atol=1e-5)
    np.testing.assert_allclose(shifted[0], states[0:2].mean(0), atol=1e-5)


def test_echo_pools_the_second_copy():
    lm = build(AttentionPlan("echo"))
    text = "the cat"
    ids = lm.tokenizer(text).input_ids
    twice = torch.tensor([ids + ids[1:]])
    with torch.no_grad():
        states = lm.model.base_model(twice).last_hidden_state[0, len(ids) :]
    np.testing.assert_allclose(lm.encode(text, normalize=False), states.mean(0).numpy(), atol=1e-5)


def test_memory_running_out_halves_the_batch(monkeypatch):
    lm = build()
    expected = lm.encode(TEXTS)
    states, sizes = encoding.EncoderRuntime.states, []

    def short_of_memory(self, texts):
        sizes.append(len(texts))
        if len(texts) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return states(self, texts)

    monkeypatch.setattr(encoding.EncoderRuntime, "states", short_of_memory)
    np.testing.assert_allclose(lm.encode(TEXTS, batch_tokens=10_000), expected, atol=1e-5)
    assert max(sizes) > 1

    for says in ("DefaultCPUAllocator: can't allocate memory", "Failed to allocate memory for requested buffer"):

        def no_memory(self, texts, says=says):
            raise RuntimeError(says)

        monkeypatch.setattr(encoding.EncoderRuntime, "states", no_memory)
        with pytest.raises(ResourceError, match="a single text"):
            lm.encode(TEXTS)

    def broken(self, texts):
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(encoding.EncoderRuntime, "states", broken)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        lm.encode(TEXTS)


def test_batches_hold_every_text_once_within_the_budget():
    generator = np.random.default_rng(0)
    for _ in range(50):
        lengths = generator.integers(1, 200, size=generator.integers(1, 300)).tolist()
        budget = int(generator.integers(1, 4000))
        batches = token_batches(lengths, budget)
        assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
        for batch in batches:
            assert len(batch) == 1 or len(batch) * max(lengths[index] for index in batch) <= budget


def test_pooling_ignores_what_padding_holds():
    states = torch.randn(2, 4, 3)
    counted = torch.tensor([[True, True, False, False], [False, False, False, False]])
    spoiled = states.masked_fill(~counted[..., None], float("nan"))
    for name in (*POOLINGS, "first+max"):
        assert torch.equal(pool(spoiled, counted, name), pool(states, counted, name))
        assert pool(spoiled, counted, name)[1].abs().max() == 0


def test_similarity_of_texts_and_vectors():
    lm = build()
    vectors = lm.encode(TEXTS)
    np.testing.assert_allclose(lm.similarity(TEXTS, vectors), vectors @ vectors.T, atol=1e-5)
    with pytest.raises(ConfigError, match="32 and 8 dimensions"):
        lm.similarity(TEXTS, vectors[:, :8])


def test_bfloat16_is_used_only_where_it_is_near_enough(tiny_folder, monkeypatch):
    monkeypatch.setattr(interface, "cpu_has_bfloat16", lambda: True)
    monkeypatch.setattr(encoding, "bfloat16_cosine", lambda runtime: 0.9995)
    near = gerund.load(tiny_folder, device="cpu")
    assert near.compute_dtype == torch.bfloat16
    assert near.model.dtype == torch.float32  # generation keeps its own precision
    monkeypatch.setattr(encoding, "bfloat16_cosine", lambda runtime: 0.998)
    assert gerund.load(tiny_folder, device="cpu").compute_dtype == torch.float32
    assert gerund.load(tiny_folder, device="cpu", dtype="float32").compute_dtype == torch.float32
    monkeypatch.setattr(interface, "cpu_has_bfloat16", lambda: False)
    assert gerund.load(tiny_folder, device="cpu").compute_dtype == torch.float32


def test_a_hybrid_plan_loads_for_infilling_and_refuses_to_encode(tiny_folder, monkeypatch):
    monkeypatch.setattr(interface, "cpu_has_bfloat16", lambda: True)
    lm = gerund.load(tiny_folder, attention="hybrid", device="cpu")
    with pytest.raises(ConfigError, match="'hybrid' fills spans"):
        lm.encode("the cat")
