"""Attention that takes its mask as an argument, and latent attention: exact, whatever pads the text."""

import inspect
import warnings

import pytest
import torch

from gerund.attention import masked
from gerund.attention.bound_plan import BoundPlan
from gerund.attention.interface import ADDITIVE, FUSED, attach
from gerund.attention.layer_state import hands_on
from gerund.attention.layouts import attach_streams, decoder_layers
from gerund.attention.masked import way_of
from gerund.attention.preemption import pausing
from gerund.attention.probe import verify
from gerund.errors import ConfigError, UnsupportedModelError
from gerund.inference.encode.sweep import Sweep, encode_each
from gerund.inference.tokens import InputFormat, tokenize
from gerund.language_model import LanguageModel
from gerund.settings.encoder import EncoderConfig
from gerund.settings.plan import AttentionPlan
from tests.architectures.slow import SlowModel
from tests.attention.in_threads import wrong_in_threads
from tests.tiny import GIVEN, LATENT, N_LAYERS, ODD, batch, byte_tokenizer, tiny

NAMES = [*GIVEN, *LATENT, *ODD]
INDEXED = ["deepseek_v32", "glm_moe_dsa", "axk2", "dots3_note_text"]
PLANS = [
    AttentionPlan("bidir"),
    AttentionPlan("mask0-bidir", k=2),
    AttentionPlan("mask0-all", k=3, sink_tokens=2),
    AttentionPlan("inplace-back", k=3),
    AttentionPlan("mask0-bidir", k=3, skips=2),
    AttentionPlan("inter-back", k=3),
    AttentionPlan("inter-bidir", k=2, combine="mean"),
    AttentionPlan("extra-back", k=3),
    AttentionPlan("extend-bidir", k=2),
]
FEW = [PLANS[0], PLANS[1], PLANS[3], PLANS[5]]


def ready(name, **changes):
    model = tiny(name, **changes)
    attach(model)
    attach_streams(decoder_layers(model))
    return model


def takes(model):
    return "position_ids" in inspect.signature(model.base_model.forward).parameters


def run(model, plan, inputs):
    bound = BoundPlan(plan.resolve(N_LAYERS), inputs["attention_mask"])
    if not takes(model):
        inputs = {name: value for name, value in inputs.items() if name != "position_ids"}
    states = model.base_model(**inputs, use_cache=False, attention_plan=bound).last_hidden_state
    bound.check_all_asked("tiny")
    return states


def slow_states(name, plan, inputs, **changes):
    """Each text alone, in the order of the batch."""
    slow = SlowModel(tiny(name, attn_implementation="eager", **changes))
    return [slow.states(ids[real.bool()].tolist(), plan)
            for ids, real in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)]  # fmt: skip


def assert_near(found, expected, label):
    difference = (found - expected).abs().max().item()
    assert difference <= 2e-5 * max(1.0, expected.abs().max().item()), (label, difference)


@pytest.mark.sweep(quick=5, check=5)
@pytest.mark.parametrize("plans", [PLANS[0::3], PLANS[1::3], PLANS[2::3]], ids=["0", "1", "2"])
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_every_plan_equals_masks_that_are_written_out(name, plans):
    inputs = batch("both")
    model = ready(name)
    for plan in plans:
        if plan.name == "extra-back" and hands_on(decoder_layers(model)):
            continue  # refused, see below
        found = run(model, plan, inputs)
        for row, expected in enumerate(slow_states(name, plan, inputs)):
            assert_near(found[row][inputs["attention_mask"][row].bool()], expected, (plan, row))


@pytest.mark.slow
@torch.no_grad()
def test_a_slow_model_without_a_plan_is_the_model():
    inputs = batch("none")
    for name in NAMES[::3]:
        plain = tiny(name)
        attach(plain)  # which finds the body of llama4
        expected = plain.base_model(inputs["input_ids"], use_cache=False).last_hidden_state
        for own in (None, AttentionPlan("causal")):
            for row, states in enumerate(slow_states(name, own, inputs)):
                assert_near(states, expected[row], name)


@pytest.mark.sweep(quick=4, check=4)
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_without_a_plan_nothing_changes_by_a_bit(name):
    inputs, model, plain = batch("left"), ready(name), tiny(name)
    if not takes(model):
        inputs.pop("position_ids")
    real = inputs["attention_mask"].bool()
    before = plain(**inputs).logits[real]
    assert torch.equal(before, model(**inputs).logits[real])
    run(model, PLANS[0], batch("both"))
    with pytest.raises((ConfigError, UnsupportedModelError), match=r"cached|KV cache"):
        model.base_model(inputs["input_ids"], use_cache=True, attention_plan=BoundPlan(PLANS[5].resolve(N_LAYERS)))
    assert torch.equal(before, model(**inputs).logits[real])
    prompt = batch("none", (6,))["input_ids"]
    settings = dict(max_new_tokens=6, do_sample=False, output_scores=True, return_dict_in_generate=True)
    expected, found = plain.generate(prompt, **settings), model.generate(prompt, **settings)
    assert torch.equal(found.sequences, expected.sequences)
    assert all(torch.equal(a, b) for a, b in zip(found.scores, expected.scores, strict=True))


@pytest.mark.sweep(quick=4, check=4)
@pytest.mark.parametrize("plan", [PLANS[1], PLANS[5]], ids=lambda plan: plan.name)
@pytest.mark.parametrize("name", ["stablelm", "bloom", "gptj", "mpt", "xglm", "deepseek_v3", "deepseek_v32"])
def test_gradients_equal_the_slow_ones_with_and_without_checkpointing(name, plan):
    inputs = batch("both")
    real = inputs["attention_mask"].bool()
    weight = torch.randn((*real.shape, 32), generator=torch.Generator().manual_seed(5))

    def gradients(model, states, weights):
        sum((own * scale).sum() for own, scale in zip(states, weights, strict=True)).backward()
        found = {key: p.grad.clone() for key, p in model.base_model.named_parameters() if p.grad is not None}
        model.zero_grad()
        return found

    slow = SlowModel(tiny(name, attn_implementation="eager"))
    rows = [ids[own] for ids, own in zip(inputs["input_ids"], real, strict=True)]
    weights = [own[mask] for own, mask in zip(weight, real, strict=True)]
    expected = gradients(slow.model, [slow.states(ids.tolist(), plan) for ids in rows], weights)
    model = ready(name)
    fast = gradients(model, [run(model, plan, inputs)[real]], [weight[real]])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # renamed in newer transformers
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    for part in model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
    checkpointed = gradients(model, [run(model, plan, inputs)[real]], [weight[real]])
    assert expected.keys() == fast.keys() == checkpointed.keys()
    for key, own in expected.items():
        scale = max(1.0, own.abs().max().item())
        torch.testing.assert_close(fast[key], own, atol=1e-4 * scale, rtol=1e-3, msg=lambda m, k=key: f"{k}: {m}")
        torch.testing.assert_close(checkpointed[key], fast[key], atol=1e-5 * scale, rtol=1e-4)


@pytest.mark.parametrize("by_place", [True, False])
def test_attention_that_hands_a_plan_on_gets_it_for_a_mask_by_place_or_by_name(by_place):
    class StableLmAttention(torch.nn.Module):
        def forward(self, hidden_states, attention_mask=None, attention_plan=None):
            return hidden_states, attention_mask, attention_plan

    module, states, plan = StableLmAttention(), torch.zeros(1, 2, 4), object.__new__(BoundPlan)
    masked._attach_module(0, module)
    given = module(states, plan) if by_place else module(states, attention_mask=plan)
    assert given == (states, None, plan)


@pytest.mark.parametrize("name", ["stablelm", "bloom", "xglm", "longcat_flash", "deepseek_v32"])
@torch.no_grad()
def test_a_sweep_equals_each_plan_alone(name):
    inputs, model = batch("both"), ready(name)
    real = inputs["attention_mask"].bool()
    sweep = Sweep([plan.resolve(N_LAYERS) for plan in PLANS], inputs["attention_mask"])
    own = inputs if takes(model) else {key: value for key, value in inputs.items() if key != "position_ids"}
    together = model.base_model(**own, use_cache=False, attention_plan=sweep.bound).last_hidden_state
    for plan, states in zip(PLANS, together.split(len(real)), strict=True):
        assert_near(states[real], run(model, plan, inputs)[real], plan)


@pytest.mark.parametrize("name", INDEXED)
@torch.no_grad()
def test_an_indexer_chooses_among_what_the_plan_shows(name):
    inputs = batch("none", (12,))
    dense = dict(index_topk=2048)
    sparse = run(ready(name), PLANS[0], inputs)
    assert (sparse - run(ready(name, **dense), PLANS[0], inputs)).abs().max() > 1e-3  # it leaves keys out
    assert ready(name).config._attn_implementation not in (FUSED, ADDITIVE)
    first = sparse[0, 0]
    inputs["input_ids"][0, -1] = 5 if inputs["input_ids"][0, -1] != 5 else 6
    assert (run(ready(name), PLANS[0], inputs)[0, 0] - first).abs().max() > 0


@pytest.mark.slow
def test_layers_that_look_where_another_has_looked_take_one_view_only():
    shared = dict(indexer_types=["full", "shared"] * 2)
    model = ready("glm_moe_dsa", **shared)
    assert hands_on(decoder_layers(model))
    inputs = batch("both")
    with torch.no_grad():
        for plan in (PLANS[0], AttentionPlan("mask0-bidir", k=2), AttentionPlan("inplace-back", k=4)):
            # With an indexer that leaves few keys, the probe would miss most looks.
            verify(ready("glm_moe_dsa", **shared, index_topk=64), plan.resolve(N_LAYERS))
            found = run(model, plan, inputs)
            for row, expected in enumerate(slow_states("glm_moe_dsa", plan, inputs, **shared)):
                assert_near(found[row][inputs["attention_mask"][row].bool()], expected, (plan, row))
    for plan in (
        AttentionPlan("mask0-bidir", k=1),
        AttentionPlan("inter-bidir", k=2),
        AttentionPlan("extend-back", k=1),
    ):
        with pytest.raises(
            UnsupportedModelError, match=r"looks where layer 2 has looked|looks where layer 0 has looked"
        ):
            verify(model, plan.resolve(N_LAYERS))
    with pytest.raises(UnsupportedModelError, match="no second tower can run beside the first"):
        verify(model, AttentionPlan("extra-back", k=2).resolve(N_LAYERS))


def language_model(name, plan, **changes):
    tokenizer = byte_tokenizer()
    return LanguageModel(tiny(name, vocab_size=len(tokenizer), **changes), tokenizer, EncoderConfig(attention=plan))


@pytest.mark.parametrize("name", ["glm_moe_dsa", "bloom"])
def test_plans_are_compared_one_at_a_time_where_layers_hand_more_on(name):
    lm = language_model(name, AttentionPlan("bidir"))
    plans = [AttentionPlan("bidir"), AttentionPlan("mask0-bidir", k=4), AttentionPlan("causal")]
    runtimes = [lm.with_encoder(EncoderConfig(attention=plan)).runtime for plan in plans]
    texts = tokenize(lm.tokenizer, ["a dog in the garden", "an owl"], InputFormat())
    found = encode_each(runtimes, texts)
    for own, plan in zip(found, plans, strict=True):
        alone = lm.with_encoder(EncoderConfig(attention=plan)).encode(
            ["a dog in the garden", "an owl"], normalize=False
        )
        assert abs(own - alone).max() < 1e-5


@pytest.mark.sweep(quick=4, check=4)
@pytest.mark.parametrize("name", NAMES)
def test_a_model_encodes_generates_and_fills_gaps_or_says_why_not(name):
    more = {"vocab_size_per_layer_input": len(byte_tokenizer())} if name.startswith("gemma") else {}
    lm = language_model(name, AttentionPlan("mask0-bidir", k=2), **more)
    texts = ["a dog in the garden", "an owl", "the end"]
    together = lm.encode(texts)
    for side in ("left", "right"):
        lm.tokenizer.padding_side = side
        assert abs(lm.encode(texts) - together).max() < 1e-5
    written = [one.text for one in lm.generate(texts, 4)]
    assert written == [one.text for one in language_model(name, AttentionPlan("causal"), **more).generate(texts, 4)]
    if name in INDEXED:
        with pytest.raises(UnsupportedModelError, match=f"infilling isn't possible with this {name} model"):
            lm.infill("the [blank] garden", lengths=2)
    elif takes(lm.model):
        assert lm.infill("the [blank] garden", lengths=2).lengths == [2]


def test_positions_that_are_told_by_places_fill_no_gaps():
    lm = language_model("falcon", AttentionPlan("bidir"), alibi=True)
    with pytest.raises(UnsupportedModelError, match="takes no position_ids"):
        lm.infill("the [blank] garden", lengths=2)


@pytest.mark.slow
@torch.no_grad()
def test_falcon_with_a_bias_of_positions_and_with_many_keys():
    inputs = batch("both")
    for changes in (dict(alibi=True), dict(alibi=True, multi_query=False), dict(new_decoder_architecture=True)):
        model = ready("falcon", **changes)
        for plan in FEW:
            found = run(model, plan, inputs)
            for row, ids in enumerate(inputs["input_ids"]):
                real = inputs["attention_mask"][row].bool()
                alone = dict(batch("none"), input_ids=ids[real][None])
                alone |= {"attention_mask": torch.ones_like(alone["input_ids"])}
                alone |= {"position_ids": torch.arange(int(real.sum()))[None]}
                assert_near(found[row][real], run(model, plan, alone)[0], (changes, plan))


@torch.no_grad()
def test_parts_of_a_text_are_counted_from_its_first_token():
    inputs = batch("left", (11, 6))
    model = ready("llama4_text")
    states = run(model, PLANS[0], inputs)[1, -6:]
    alone = batch("none", (6,))
    alone["input_ids"] = inputs["input_ids"][1:, -6:]
    assert_near(states, run(model, PLANS[0], alone)[0], "left")
    first = ready("llama4_text", num_hidden_layers=1, layer_types=["chunked_attention"])
    bound = AttentionPlan("bidir").resolve(1)
    before = first.base_model(**alone, attention_plan=BoundPlan(bound), use_cache=False).last_hidden_state[0]
    alone["input_ids"] = alone["input_ids"].clone()
    alone["input_ids"][0, 5] = 9
    after = first.base_model(**alone, attention_plan=BoundPlan(bound), use_cache=False).last_hidden_state[0]
    assert (before - after).abs().amax(-1).gt(0).tolist() == [False] * 4 + [True] * 2


def test_keys_of_lower_layers_make_no_second_tower():
    for name in ("gemma3n_text", "gemma4_text"):
        for plan in (AttentionPlan("extra-back", k=2), AttentionPlan("inter-bidir", k=2, variant="released")):
            with pytest.raises(UnsupportedModelError, match=f"{name}.*no second tower can run beside the first"):
                verify(ready(name), plan.resolve(N_LAYERS))


def test_layers_and_prepend_are_for_single_states():
    lm = language_model("gemma3n_text", AttentionPlan("bidir"), vocab_size_per_layer_input=len(byte_tokenizer()))
    read = lm.with_encoder(EncoderConfig(attention=AttentionPlan("bidir"), layers="3-4"))
    with pytest.raises(UnsupportedModelError, match="several residual streams"):
        read.encode("an owl")


def test_an_unknown_module_is_left_alone():
    assert way_of(torch.nn.Linear(2, 2)) is None


@pytest.mark.parametrize("name", ["bloom", "stablelm"])
@torch.no_grad()
def test_a_pass_between_two_layers_leaves_the_plan_alone(name):
    model, inputs, plan = ready(name), batch("left"), AttentionPlan("bidir")
    expected = run(model, plan, inputs)
    with pausing(lambda: model.base_model(inputs["input_ids"][:, :2], use_cache=False)):
        assert torch.equal(run(model, plan, inputs), expected)


@pytest.mark.slow
def test_threads_encode_under_other_plans_while_one_generates():
    texts = ["a dog in the garden", "an owl"]
    both = language_model("bloom", AttentionPlan("bidir"))
    back = both.with_encoder(EncoderConfig(attention=AttentionPlan("inplace-back", k=2)))
    assert not wrong_in_threads(both, back, texts)
