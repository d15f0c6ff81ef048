"""Attention maps against plain transformers and against explicit masks in eager attention; those of texts by hand."""

import pytest
import torch

import gerund
from gerund.attention.bound_plan import BoundPlan
from gerund.errors import TextError, UnsupportedModelError
from gerund.inference.inspection import (
    attention_maps,
    causal_plan,
    even_fraction,
    inspect_attention,
    mean_maps,
    resample,
    sink_fraction,
    unplanned_maps,
)
from gerund.settings.plan import PLAN_NAMES, AttentionPlan, Direction, View
from tests.attention.reference import ReferenceModel
from tests.tiny import CONFIGS, N_LAYERS, REFUSED, batch, byte_tokenizer, ready, tiny, tiny_lm

IDS = batch("none", (9,))["input_ids"][0].tolist()


def resolved(name, **settings):
    return AttentionPlan(name, **settings).resolve(N_LAYERS)


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_causal_maps_equal_those_of_plain_transformers(name):
    ours = attention_maps(ready(name), IDS, causal_plan(N_LAYERS))
    eager = tiny(name, attn_implementation="eager")
    plain = eager(torch.tensor([IDS]), output_attentions=True, use_cache=False).attentions
    assert [(item.layer, item.run) for item in ours] == [(i, 0) for i in range(N_LAYERS)]
    for item, expected in zip(ours, plain, strict=True):
        torch.testing.assert_close(item.weights, expected[0], atol=2e-6, rtol=1e-5)


@pytest.mark.sweep(quick=4, check=4)
@pytest.mark.parametrize("plan", [name for name in PLAN_NAMES if name != "hybrid" and not resolved(name).stream])
@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_maps_under_a_plan_equal_explicit_masks_in_eager_attention(name, plan):
    k = {"mask0+bidir": 3}.get(plan, 2) if AttentionPlan(plan).takes_k else None
    settings = AttentionPlan(plan, k=k).with_defaults(N_LAYERS)
    ours = attention_maps(ready(name), IDS, settings.resolve(N_LAYERS))
    reference = ReferenceModel(tiny(name), settings)
    seen = []
    handles = [
        module.register_forward_hook(lambda _module, _args, output: seen.append(output[1]))
        for layer in reference.layers
        for module in layer.modules()
        if getattr(module, "layer_idx", None) is not None and "Attention" in type(module).__name__
    ]
    reference.hidden_states({"input_ids": torch.tensor([IDS]), "attention_mask": torch.ones(1, len(IDS)).long()})
    for handle in handles:
        handle.remove()
    assert len(seen) == N_LAYERS
    for item, expected in zip(ours, seen, strict=True):
        torch.testing.assert_close(item.weights, expected[0], atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "gpt_oss"])
@torch.no_grad()
def test_recording_changes_no_state_by_a_bit(name):
    model = ready(name)
    inputs = batch("left")

    def states(plan, record):
        bound = BoundPlan(resolved(plan), inputs["attention_mask"], record=record)
        return model.base_model(**inputs, use_cache=False, attention_plan=bound).last_hidden_state

    for plan in ("mask0-bidir", "inter-back"):
        layers = set()
        recorded = states(plan, lambda layer, _twin, _weights, layers=layers: layers.add(layer))
        assert torch.equal(recorded, states(plan, None))
        assert layers == set(range(N_LAYERS))


@torch.no_grad()
def test_a_padded_batch_records_what_single_texts_do():
    model = ready("llama")
    inputs = batch("left", (9, 6))
    notes = []
    bound = BoundPlan(resolved("mask0-bidir"), inputs["attention_mask"], record=lambda *note: notes.append(note))
    model.base_model(**inputs, use_cache=False, attention_plan=bound)
    alone = attention_maps(model, inputs["input_ids"][1, 3:].tolist(), resolved("mask0-bidir"))
    for (_, _, weights), single in zip(notes, alone, strict=True):
        torch.testing.assert_close(weights[1, :, 3:, 3:], single.weights, atol=1e-5, rtol=1e-4)
        assert not weights[1, :, 3:, :3].any()


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (AttentionPlan("inter-back", k=2), [(0, 0), (1, 0), (2, 0), (2, 1), (3, 0), (3, 1)]),
        (AttentionPlan("extra-bidir", k=2), [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (3, 0)]),
        (AttentionPlan("extend-bidir", k=2), [(0, 0), (1, 0), (2, 0), (3, 0), (3, 1), (3, 2)]),
    ],
    ids=lambda item: getattr(item, "name", ""),
)
def test_twins_are_recorded_with_their_own_view(plan, expected):
    maps = attention_maps(ready("llama"), IDS, plan.resolve(N_LAYERS))
    assert [(item.layer, item.run) for item in maps] == expected
    way = Direction.BACKWARD if plan.name.endswith("back") else Direction.BIDIRECTIONAL
    for item in maps:
        assert item.view == View(way if item.run else Direction.CAUSAL)
        below, above = bool(item.weights.tril(-1).any()), bool(item.weights.triu(1).any())
        assert (below, above) == (item.view.direction is not Direction.BACKWARD, item.run > 0)


def test_means_over_heads_and_texts_of_one_length():
    model = ready("llama")
    texts = [IDS, IDS[::-1]]
    plan = resolved("mask0-bidir")
    single = [attention_maps(model, ids, plan) for ids in texts]
    for mean, first, second in zip(mean_maps(model, texts, plan), *single, strict=True):
        expected = (first.weights.mean(0) + second.weights.mean(0)) / 2
        torch.testing.assert_close(mean.weights, expected)


@pytest.mark.parametrize("size", [None, 4, 6, 30])
def test_texts_of_different_lengths_keep_rows_and_sinks(size):
    model = ready("llama")
    texts = [IDS, IDS[:5], IDS[2:9]]
    plan = resolved("inplace-bidir", k=2)
    maps = mean_maps(model, texts, plan, size=size)
    assert maps[0].weights.shape == ((size or 7),) * 2
    for token in (0, 1):
        fractions = torch.tensor([sink_fraction(attention_maps(model, ids, plan), token) for ids in texts]).mean(0)
        torch.testing.assert_close(torch.tensor(sink_fraction(maps, token)), fractions)
    for item in maps:
        torch.testing.assert_close(item.weights.sum(-1), torch.ones(size or 7))


def test_resampling_by_hand():
    weights = torch.tensor([[1.0, 0, 0, 0, 0], [0.5, 0.5, 0, 0, 0], [0.2, 0.8, 0, 0, 0],
                            [0.1, 0.2, 0.3, 0.4, 0], [0.3, 0, 0, 0.3, 0.4]])  # fmt: skip
    expected = torch.tensor([[1.0, 0, 0], [0.35, 0.65, 0], [0.2, 0.25, 0.55]])
    torch.testing.assert_close(resample(weights, 3), expected)
    torch.testing.assert_close(resample(resample(weights, 9), 5), weights, atol=0.2, rtol=0)
    assert resample(weights, 5) is weights


def test_sink_fraction_is_the_first_tokens_mean_column():
    model = ready("gpt2")
    maps = attention_maps(model, IDS, causal_plan(N_LAYERS))
    by_hand = [
        sum(float(item.weights[head, query, 0]) for head in range(4) for query in range(1, 9)) / 32 for item in maps
    ]
    assert sink_fraction(maps) == pytest.approx(by_hand)
    assert sink_fraction(attention_maps(model, IDS, resolved("mask0-all", k=2))) == [0.0] * N_LAYERS


def test_even_attention_has_the_even_fraction():
    for length in (2, 5, 40):
        even = torch.ones(length, length).tril()
        even /= even.sum(-1, keepdim=True)
        assert even_fraction([length]) == pytest.approx(float(even[1:, 0].mean()))
    assert even_fraction([2, 2]) == 0.5


@pytest.mark.parametrize("name", [*REFUSED, "llama", "gemma2"])
def test_architectures_that_no_plan_reaches_show_their_own_maps(name):
    model = ready(name)
    before = model.config._attn_implementation
    logits = model(torch.tensor([IDS])).logits
    if name in REFUSED:
        with pytest.raises(UnsupportedModelError, match=name):
            attention_maps(model, IDS, causal_plan(N_LAYERS))
    maps = unplanned_maps(model, IDS)
    assert len(maps) == N_LAYERS
    for item in maps:
        torch.testing.assert_close(item.weights.sum(-1), torch.ones(4, 9), atol=1e-5, rtol=0)
        assert not item.weights.triu(1).any()
    assert model.config._attn_implementation == before
    assert torch.equal(model(torch.tensor([IDS])).logits, logits)


def test_texts_that_show_nothing_are_refused():
    model = ready("llama")
    plan = causal_plan(N_LAYERS)
    with pytest.raises(TextError, match="no token"):
        attention_maps(model, [], plan)
    with pytest.raises(TextError, match="no text"):
        mean_maps(model, [], plan)
    with pytest.raises(TextError, match="at least 2 tokens"):
        sink_fraction(attention_maps(model, [5], plan))
    with pytest.raises(TextError, match="too short"):
        mean_maps(model, [[5], IDS], plan)


TEXTS = ["the cat", "an inn in the rain"]


@pytest.fixture(scope="module")
def lm(tiny_folder):
    return gerund.load(tiny_folder, attention="mask0-bidir", k=2, prompt="never looked at: ")


def test_maps_are_those_of_both_plans(lm):
    found = inspect_attention(lm.runtime, TEXTS)
    ids = [lm.tokenizer(text).input_ids for text in TEXTS]
    assert found.ids == ids
    assert found.cut == 0
    assert found.even == even_fraction([len(item) for item in ids])
    for maps, plan in ((found.before, causal_plan(lm.n_layers)), (found.after, lm.runtime.plan)):
        for item, expected in zip(maps, mean_maps(lm.model, ids, plan), strict=True):
            assert torch.equal(item.weights, expected.weights)
    assert not torch.equal(found.before[-1].weights, found.after[-1].weights)


def test_long_texts_are_cut_and_counted(lm):
    found = inspect_attention(lm.runtime, TEXTS, longest=9)
    assert [len(item) for item in found.ids] == [len(lm.tokenizer(TEXTS[0]).input_ids), 9]
    assert found.cut == 1
    # The model's own limit comes first.
    assert max(map(len, inspect_attention(lm.runtime, ["the rain " * 60]).ids)) == lm.max_length == 64


def test_a_single_token_has_nothing_to_look_at():
    lm = tiny_lm("llama", byte_tokenizer(bos=False))
    with pytest.raises(TextError, match="'x' is a single token"):
        inspect_attention(lm.runtime, ["the cat", "x"])
