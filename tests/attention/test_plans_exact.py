"""Every plan equals masks that are written out, on every architecture: exact, whatever pads the text."""

from itertools import product

import pytest
import torch

from gerund import ModelSpec
from gerund.attention import interface, masked
from gerund.attention.bound_plan import BoundPlan
from gerund.attention.interface import ADDITIVE, FUSED, attach
from gerund.attention.layer_state import hands_on
from gerund.attention.layouts import decoder_layers
from gerund.attention.masked import way_of
from gerund.attention.preemption import pausing
from gerund.attention.probe import probe, verify
from gerund.attention.recurrent import kind_of
from gerund.entry import load
from gerund.errors import ConfigError, UnsupportedModelError
from gerund.inference.encode.sweep import Sweep, encode_each
from gerund.inference.tokens import InputFormat, tokenize
from gerund.models.fingerprint import fingerprint
from gerund.settings.encoder import EncoderConfig
from gerund.settings.model_spec import EncoderSpec, parse_encoder_spec
from gerund.settings.plan import PLAN_NAMES, AttentionPlan
from tests.architectures import slow
from tests.architectures.slow import SlowModel
from tests.attention import reference
from tests.attention.reference import assert_gradients_near, gradients, read, taken
from tests.threads import at_once
from tests.tiny import (
    CONFIGS,
    GIVEN,
    LATENT,
    N_LAYERS,
    ODD,
    RECURRENT,
    SIDES,
    batch,
    byte_tokenizer,
    ready,
    save_tiny,
    tiny,
    tiny_lm,
)

NAMES = [*GIVEN, *LATENT, *ODD]
INDEXED = ["deepseek_v32", "glm_moe_dsa", "axk2", "dots3_note_text"]
# One of each kind of call and of layer: by keyword, with convolutions, unasked by the layer, both in a layer, by place.
SOME = ["qwen3_next", "lfm2", "jamba", "falcon_h1", "nemotron_h", "mamba"]
USUAL = [AttentionPlan(name, k=2 if AttentionPlan(name).takes_k else None).with_defaults(4) for name in PLAN_NAMES]
USUAL += [
    AttentionPlan("mask0-bidir", k=3, sink_tokens=2),
    AttentionPlan("mask0+bidir", k=3, k0=1),
    AttentionPlan("inter-back", k=2, combine="mean"),
    AttentionPlan("inter-back", k=3, variant="released"),
    AttentionPlan("inter-bidir", k=2, variant="released", combine="mean"),
    AttentionPlan("extra-bidir", k=3, combine="mean"),
    AttentionPlan("inplace-back", k=N_LAYERS),
    AttentionPlan("mask0-bidir", k=0),
    AttentionPlan("mask0-bidir", k=2, sink_tokens=7),
    AttentionPlan("extend-bidir", k=6),
    AttentionPlan("mask0-bidir", k=3, skips=1),
    AttentionPlan("mask0-bidir", k=1, skips=3, variant="released"),
    AttentionPlan("mask0+bidir", k=4, k0=1, skips=2),
    AttentionPlan("causal", skips=3),
    AttentionPlan("bidir", skips=2),
]
# Where a layer takes its mask as an argument.
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
# Where layers are recurrent: turned round, and left causal.
TURNED = [
    AttentionPlan("bidir", recurrent="both"),
    AttentionPlan("inplace-back", k=3, recurrent="both"),
    AttentionPlan("mask0-bidir", k=2, recurrent="both"),
    AttentionPlan("mask0-all", k=3, recurrent="both"),
    AttentionPlan("mask0+bidir", k=3, k0=1, recurrent="both"),
    AttentionPlan("mask0-bidir", k=3, skips=2, recurrent="both"),
    AttentionPlan("inter-back", k=3, recurrent="both"),
    AttentionPlan("inter-bidir", k=3, combine="mean", recurrent="both"),
    AttentionPlan("inter-bidir", k=2, variant="released", recurrent="both"),
    AttentionPlan("extra-back", k=3, recurrent="both"),
    AttentionPlan("extend-bidir", k=2, recurrent="both"),
]
STILL = [
    AttentionPlan("bidir"),
    AttentionPlan("inplace-back", k=3),
    AttentionPlan("mask0-bidir", k=2),
    AttentionPlan("mask0-for", k=4),
    AttentionPlan("inter-back", k=3),
    AttentionPlan("extra-bidir", k=3),
]
PLANS_OF = {
    **dict.fromkeys(CONFIGS, USUAL),
    **dict.fromkeys(NAMES, PLANS),
    **{name: [*TURNED, *STILL] for name in RECURRENT},
}
# What tells the ways apart that a recurrent layer may run.
FEW = [TURNED[0], TURNED[1], TURNED[3], TURNED[6], TURNED[9], STILL[2], STILL[4]]
TEXTS = ["a dog in the garden", "an owl", "the end"]
every_name = pytest.mark.parametrize("name", PLANS_OF)


def spans(real_BT):
    """Make the last two tokens of each text span 1, and one in its middle span 2."""
    span_BT = torch.zeros_like(real_BT)
    for row, real_T in enumerate(real_BT):
        places = real_T.nonzero().flatten()
        span_BT[row, places[-2:]] = 1
        span_BT[row, places[len(places) // 2 - 1]] = 2
    return span_BT


def slow_states(model, plan, inputs):
    """Each text alone, in the order of the batch."""
    real_BT, span_BT = inputs["attention_mask"].bool(), spans(inputs["attention_mask"])
    rows = zip(inputs["input_ids"], real_BT, span_BT, strict=True)
    return [model.states(ids[real].tolist(), plan, span[real].tolist()) for ids, real, span in rows]


def assert_near(found, expected, label):
    # A delta rule solves for what it corrects, and rounds more than attention.
    reference.assert_near(found, expected, label, rounding=3e-5)


def assert_equals_slow(model, slow_model, plan, inputs):
    real = inputs["attention_mask"].bool()
    found = read(model, plan, inputs, spans(inputs["attention_mask"]))
    assert_near(found[real], torch.cat(slow_states(slow_model, plan, inputs)), plan)


@pytest.mark.sweep(quick=5, check=8)
@pytest.mark.parametrize("part", range(3))
@every_name
@torch.no_grad()
def test_every_plan_equals_masks_that_are_written_out(name, part):
    model, slow_model = ready(name), SlowModel(tiny(name, attn_implementation="eager"))
    for plan in PLANS_OF[name][part::3]:
        if plan.name == "extra-back" and hands_on(decoder_layers(model)):
            continue  # refused, see below
        for inputs in (batch("both", (7, 5, 1)), batch("none", (6, 6))):
            assert_equals_slow(model, slow_model, plan, inputs)


@pytest.mark.slow
@torch.no_grad()
def test_a_slow_model_without_a_plan_is_the_model():
    inputs = batch("none")
    for name in [*PLANS_OF][::5]:
        plain = tiny(name)
        attach(plain)  # which finds the body of llama4
        expected = plain.base_model(inputs["input_ids"], use_cache=False).last_hidden_state
        for own in (None, AttentionPlan("causal")):
            slow_model = SlowModel(tiny(name, attn_implementation="eager"))
            assert_near(torch.stack(slow_states(slow_model, own, inputs)), expected, name)


@pytest.mark.sweep(quick=5, check=8)
@every_name
@torch.no_grad()
def test_without_a_plan_nothing_changes_by_a_bit(name):
    model, plain = ready(name), tiny(name)
    inputs = taken(model, batch("left"))
    real = inputs["attention_mask"].bool()
    before = plain(**inputs).logits[real]
    assert torch.equal(before, model(**inputs).logits[real])
    # Nor after a plan was in use, whether it came to its end or not.
    plan = TURNED[0] if name in RECURRENT else PLANS[5]
    read(model, plan, batch("both"))
    with pytest.raises((ConfigError, UnsupportedModelError), match=r"cached|KV cache"):
        model.base_model(inputs["input_ids"], use_cache=True, attention_plan=BoundPlan(plan.resolve(N_LAYERS)))
    assert torch.equal(before, model(**inputs).logits[real])
    prompt = batch("none", (6,))["input_ids"]
    settings = dict(max_new_tokens=6, do_sample=False, output_scores=True, return_dict_in_generate=True)
    expected, found = plain.generate(prompt, **settings), model.generate(prompt, **settings)
    assert torch.equal(found.sequences, expected.sequences)
    assert all(torch.equal(a, b) for a, b in zip(found.scores, expected.scores, strict=True))


GIVE_GRADIENTS = ["stablelm", "bloom", "gptj", "mpt", "xglm", "deepseek_v3", "deepseek_v32"]


@pytest.mark.sweep(quick=6, check=12)
@pytest.mark.parametrize(
    ("name", "plan"),
    [
        *product(["llama", "gpt2"], USUAL),
        *product(GIVE_GRADIENTS, [PLANS[1], PLANS[5]]),
        *product(SOME, [TURNED[1], TURNED[2], TURNED[6], STILL[0]]),
    ],
)
def test_gradients_equal_the_slow_ones_with_and_without_checkpointing(name, plan):
    inputs = batch("both")
    real = inputs["attention_mask"].bool()
    weight = torch.randn((*real.shape, 32), generator=torch.Generator().manual_seed(5))[real]
    slow_model, model = SlowModel(tiny(name, attn_implementation="eager")), ready(name)
    expected = gradients(slow_model.model, torch.cat(slow_states(slow_model, plan, inputs)) * weight)
    span = spans(inputs["attention_mask"])
    assert_gradients_near(model, lambda: read(model, plan, inputs, span)[real] * weight, expected)


@pytest.mark.sweep(quick=4, check=4)
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", CONFIGS)
def test_short_texts_are_trained_as_long_ones(name, side, monkeypatch):
    inputs = batch(side)
    real = inputs["attention_mask"].bool()
    model = ready(name)
    called = []
    plain = interface.additive_attention
    monkeypatch.setattr(
        interface, "additive_attention", lambda *args, **kwargs: called.append(1) or plain(*args, **kwargs)
    )
    for plan in (AttentionPlan("mask0+bidir", k=3, k0=1), AttentionPlan("hybrid"), AttentionPlan("inter-back", k=2)):
        found = []
        for short in (192, 0):
            monkeypatch.setattr(interface, "_SHORT", short)
            called.clear()
            model.zero_grad()
            states = read(model, plan, inputs, spans(inputs["attention_mask"]))
            states[real].pow(2).sum().backward()
            # Where the scores are capped it is the architecture's own function in any case, looked up by name.
            assert bool(called) == (short > 0 and model.config._attn_implementation == interface.FUSED)
            own = [weight.grad for weight in model.parameters() if weight.grad is not None]
            found.append([states.detach()[real], *own])
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, atol=5e-4 * max(1.0, other.abs().max().item()), rtol=1e-3)


@pytest.mark.sweep(quick=5, check=8)
@pytest.mark.parametrize("name", ["stablelm", "bloom", "xglm", "longcat_flash", "deepseek_v32", *SOME])
@torch.no_grad()
def test_a_sweep_equals_each_plan_alone(name):
    inputs, model = batch("both"), ready(name)
    real = inputs["attention_mask"].bool()
    sweep = Sweep([plan.resolve(N_LAYERS) for plan in PLANS_OF[name]], inputs["attention_mask"])
    given = taken(model, inputs)
    together = model.base_model(**given, use_cache=False, attention_plan=sweep.bound).last_hidden_state
    for plan, states in zip(PLANS_OF[name], together.split(len(real)), strict=True):
        assert_near(states[real], read(model, plan, inputs)[real], plan)


@pytest.mark.sweep(quick=5, check=7)
@pytest.mark.parametrize("name", [*NAMES, *SOME])
def test_a_model_encodes_generates_and_fills_gaps_or_says_why_not(name):
    changes = {"vocab_size_per_layer_input": len(byte_tokenizer())} if name.startswith("gemma") else {}
    plan = AttentionPlan("mask0-bidir", k=3, recurrent="both" if name in SOME else "causal")
    lm = tiny_lm(name, changes=changes, attention=plan)
    together = lm.encode(TEXTS)
    for side in ("left", "right"):
        lm.tokenizer.padding_side = side
        padded, states = lm.encode(TEXTS), lm.encode_tokens(TEXTS)
        assert abs(padded - together).max() < 1e-5
        for row, text in enumerate(TEXTS):
            assert abs(padded[row] - lm.encode(text)).max() < 1e-5
            assert abs(states[row] - lm.encode_tokens([text])[0]).max() < 1e-4
    written = [one.text for one in lm.generate(TEXTS, 4)]
    plain = tiny_lm(name, changes=changes, attention=AttentionPlan("causal"))
    assert written == [one.text for one in plain.generate(TEXTS, 4)]
    refusals = {"infill": "recurrent layers would show the context", "left-only": "keeps states"}
    if name in INDEXED:
        refusals = {"infill": f"infilling isn't possible with this {name} model"}
    elif name not in SOME:
        refusals = {}
        if "position_ids" in taken(lm.model, batch("none")):
            assert lm.infill("the [blank] garden", lengths=2).lengths == [2]
    for method, why in refusals.items():
        with pytest.raises(UnsupportedModelError, match=why):
            lm.infill("the [blank] garden", lengths=2, method=method)


# ------------------------------------------------------------------------------------------------- masks as arguments


@pytest.mark.parametrize("by_place", [True, False])
def test_attention_that_hands_a_plan_on_gets_it_for_a_mask_by_place_or_by_name(by_place):
    class StableLmAttention(torch.nn.Module):
        def forward(self, hidden_states, attention_mask=None, attention_plan=None):
            return hidden_states, attention_mask, attention_plan

    module, states, plan = StableLmAttention(), torch.zeros(1, 2, 4), object.__new__(BoundPlan)
    masked._attach_module(0, module)
    given = module(states, plan) if by_place else module(states, attention_mask=plan)
    assert given == (states, None, plan)


@pytest.mark.parametrize("name", INDEXED)
@torch.no_grad()
def test_an_indexer_chooses_among_what_the_plan_shows(name):
    inputs, model = batch("none", (12,)), ready(name)
    sparse = read(model, PLANS[0], inputs)
    assert (sparse - read(ready(name, index_topk=2048), PLANS[0], inputs)).abs().max() > 1e-3  # it leaves keys out
    assert model.config._attn_implementation not in (FUSED, ADDITIVE)
    inputs["input_ids"][0, -1] = 5 if inputs["input_ids"][0, -1] != 5 else 6
    assert (read(model, PLANS[0], inputs)[0, 0] - sparse[0, 0]).abs().max() > 0


@pytest.mark.slow
def test_layers_that_look_where_another_has_looked_take_one_view_only():
    shared = dict(indexer_types=["full", "shared"] * 2)
    model = ready("glm_moe_dsa", **shared)
    slow_model = SlowModel(tiny("glm_moe_dsa", attn_implementation="eager", **shared))
    assert hands_on(decoder_layers(model))
    with torch.no_grad():
        for plan in (PLANS[0], AttentionPlan("mask0-bidir", k=2), AttentionPlan("inplace-back", k=4)):
            # With an indexer that leaves few keys, the probe would miss most looks.
            verify(ready("glm_moe_dsa", **shared, index_topk=64), plan.resolve(N_LAYERS))
            assert_equals_slow(model, slow_model, plan, batch("both"))
    for name, k in (("mask0-bidir", 1), ("inter-bidir", 2), ("extend-back", 1)):
        with pytest.raises(UnsupportedModelError, match=r"looks where layer [02] has looked"):
            verify(model, AttentionPlan(name, k=k).resolve(N_LAYERS))
    with pytest.raises(UnsupportedModelError, match="no second tower can run beside the first"):
        verify(model, AttentionPlan("extra-back", k=2).resolve(N_LAYERS))


@pytest.mark.parametrize("name", ["glm_moe_dsa", "bloom"])
def test_plans_are_compared_one_at_a_time_where_layers_hand_more_on(name):
    lm = tiny_lm(name, attention=AttentionPlan("bidir"))
    plans = [AttentionPlan("bidir"), AttentionPlan("mask0-bidir", k=4), AttentionPlan("causal")]
    models = [lm.with_encoder(EncoderConfig(attention=plan)) for plan in plans]
    found = encode_each([one.runtime for one in models], tokenize(lm.tokenizer, TEXTS, InputFormat()))
    for own, one in zip(found, models, strict=True):
        assert abs(own - one.encode(TEXTS, normalize=False)).max() < 1e-5


def test_positions_that_are_told_by_places_fill_no_gaps():
    lm = tiny_lm("falcon", changes={"alibi": True}, attention=AttentionPlan("bidir"))
    with pytest.raises(UnsupportedModelError, match="takes no position_ids"):
        lm.infill("the [blank] garden", lengths=2)


@pytest.mark.slow
@torch.no_grad()
def test_falcon_with_a_bias_of_positions_and_with_many_keys():
    inputs = batch("both")
    for changes in (dict(alibi=True), dict(alibi=True, multi_query=False), dict(new_decoder_architecture=True)):
        model = ready("falcon", **changes)
        for plan in (PLANS[0], PLANS[1], PLANS[3], PLANS[5]):
            found = read(model, plan, inputs)
            for own, ids, real in zip(found, inputs["input_ids"], inputs["attention_mask"].bool(), strict=True):
                alone = {"input_ids": ids[real][None], "attention_mask": torch.ones_like(ids[real][None])}
                assert_near(own[real], read(model, plan, alone)[0], (changes, plan))


@torch.no_grad()
def test_parts_of_a_text_are_counted_from_its_first_token():
    inputs = batch("left", (11, 6))
    states = read(ready("llama4_text"), PLANS[0], inputs)[1, -6:]
    alone = dict(batch("none", (6,)), input_ids=inputs["input_ids"][1:, -6:].clone())
    assert_near(states, read(ready("llama4_text"), PLANS[0], alone)[0], "left")
    first = ready("llama4_text", num_hidden_layers=1, layer_types=["chunked_attention"])
    before = read(first, PLANS[0], alone)[0]
    alone["input_ids"][0, 5] = 9
    after = read(first, PLANS[0], alone)[0]
    assert (before - after).abs().amax(-1).gt(0).tolist() == [False] * 4 + [True] * 2


def test_keys_of_lower_layers_make_no_second_tower():
    for name in ("gemma3n_text", "gemma4_text"):
        for plan in (AttentionPlan("extra-back", k=2), AttentionPlan("inter-bidir", k=2, variant="released")):
            with pytest.raises(UnsupportedModelError, match=f"{name}.*no second tower can run beside the first"):
                verify(ready(name), plan.resolve(N_LAYERS))


def test_layers_and_prepend_are_for_single_states():
    changes = {"vocab_size_per_layer_input": len(byte_tokenizer())}
    lm = tiny_lm("gemma3n_text", changes=changes, attention=AttentionPlan("bidir"), layers="3-4")
    with pytest.raises(UnsupportedModelError, match="several residual streams"):
        lm.encode("an owl")


def test_an_unknown_module_is_left_alone():
    assert way_of(torch.nn.Linear(2, 2)) is None


@pytest.mark.parametrize("name", ["bloom", "stablelm"])
@torch.no_grad()
def test_a_pass_between_two_layers_leaves_the_plan_alone(name):
    model, inputs, plan = ready(name), batch("left"), AttentionPlan("bidir")
    expected = read(model, plan, inputs)
    with pausing(lambda: model.base_model(inputs["input_ids"][:, :2], use_cache=False)):
        assert torch.equal(read(model, plan, inputs), expected)


# --------------------------------------------------------------------------------------------------- recurrent layers


@pytest.mark.parametrize("name", SOME)
@torch.no_grad()
def test_the_two_directions_give_other_states_than_one(name):
    model, inputs = ready(name), batch("none")
    for turned in TURNED[:-1]:  # the last one runs the last layer again, which attends in some
        still = AttentionPlan.from_dict({**turned.to_dict(), "recurrent": "causal"})
        assert (read(model, turned, inputs) - read(model, still, inputs)).abs().max() > 1e-3, turned


@pytest.mark.sweep(quick=3, check=5)
@pytest.mark.parametrize("name", RECURRENT)
def test_the_probe_knows_what_every_layer_sees(name):
    model = ready(name)
    layers = decoder_layers(model)
    turns = [layer for layer, module in enumerate(layers) if kind_of(module).recurrent]
    kinds = [[type(module).__name__.endswith(slow.RECURRENT) for module in layer.modules()] for layer in layers]
    assert turns == [layer for layer, own in enumerate(kinds) if any(own)]
    nothing = {"mamba": STILL, "mamba2": STILL, "nemotron_h": [STILL[2]]}.get(
        name, []
    )  # the upper two are an MLP and recurrent
    for plan in FEW:
        if plan in nothing:
            with pytest.raises(ConfigError, match="would convert nothing"):
                verify(model, plan.resolve(N_LAYERS))
        else:
            assert not verify(model, plan.resolve(N_LAYERS)).wrong_layers
    both = probe(model, AttentionPlan("bidir", recurrent="both").resolve(N_LAYERS)).layers
    back = probe(model, AttentionPlan("inplace-back", k=N_LAYERS, recurrent="both").resolve(N_LAYERS)).layers
    for layer in turns:
        right = torch.ones(6, 6).triu(1).bool()
        assert (both[layer].moves & right).any()
        assert (both[layer].moves & right.T).any()
        assert (back[layer].moves & right).any()
        assert not (back[layer].moves & right.T).any()


def test_the_probe_finds_a_recurrent_layer_that_does_not_do_what_the_plan_says(monkeypatch):
    model = ready("qwen3_next")
    for hook in list(decoder_layers(model)[2].linear_attn._forward_hooks):
        del decoder_layers(model)[2].linear_attn._forward_hooks[hook]
    with pytest.raises(UnsupportedModelError, match="layer 2"):
        verify(model, AttentionPlan("bidir", recurrent="both").resolve(N_LAYERS))


def test_an_unknown_recurrent_layer_is_refused_by_name(monkeypatch):
    monkeypatch.setattr("gerund.attention.recurrent._MODULES", {"NoSuchModule": None})
    model = ready("qwen3_next")
    for recurrent in ("causal", "both"):
        with pytest.raises((UnsupportedModelError, ConfigError), match="qwen3_next"):
            verify(model, AttentionPlan("bidir", recurrent=recurrent).resolve(N_LAYERS))
    verify(model, AttentionPlan("causal").resolve(N_LAYERS))


def test_what_has_no_meaning_is_refused_in_a_sentence():
    hybrid, pure, dense = ready("lfm2"), ready("mamba2"), ready("llama")
    with pytest.raises(UnsupportedModelError, match="would show the context the spans"):
        verify(hybrid, AttentionPlan("hybrid").resolve(N_LAYERS))
    with pytest.raises(ConfigError, match="this llama model has none"):
        verify(dense, AttentionPlan("bidir", recurrent="both").resolve(N_LAYERS))
    with pytest.raises(ConfigError, match=r"would convert nothing in this mamba2 model.*; take recurrent='both'$"):
        verify(pure, AttentionPlan("mask0-bidir", k=2).resolve(N_LAYERS))
    with pytest.raises(ConfigError, match=r"would convert nothing in this mamba2 model.* stay causal$"):
        verify(pure, AttentionPlan("mask0-for", k=2).resolve(N_LAYERS))
    with pytest.raises(ConfigError, match="take recurrent='both'"):
        verify(ready("nemotron_h"), AttentionPlan("extend-back", k=2).resolve(N_LAYERS))
    for name in ("causal", "echo", "mask0-for", "hybrid"):
        with pytest.raises(ConfigError, match="recurrent='both' belongs to plans that look to the right"):
            AttentionPlan(name, recurrent="both")
    with pytest.raises(ConfigError, match="recurrent"):
        AttentionPlan("bidir", recurrent="backward")
    with pytest.raises(ConfigError, match="cached"):
        hybrid.base_model(
            batch("none")["input_ids"], use_cache=True,
            attention_plan=BoundPlan(AttentionPlan("bidir", recurrent="both").resolve(N_LAYERS)),
        )  # fmt: skip


def test_the_setting_goes_through_specs_and_leaves_what_was_written_before_alone():
    plan = AttentionPlan("mask0-bidir", k=2, recurrent="both")
    assert AttentionPlan.from_dict(plan.to_dict()) == plan
    assert "recurrent" not in AttentionPlan("mask0-bidir", k=2).to_dict()
    assert parse_encoder_spec("mask0-bidir:k=2,recurrent=both").plan(AttentionPlan()) == plan
    spec = ModelSpec(attention=plan)
    assert ModelSpec.model_validate_json(spec.model_dump_json()) == spec
    assert spec.plan(AttentionPlan("bidir")) == plan
    assert EncoderSpec(recurrent="causal").plan(plan) == AttentionPlan("mask0-bidir", k=2)
    config = EncoderConfig(attention=plan)
    assert EncoderSpec.of_config(config, N_LAYERS).applied_to(EncoderConfig()) == config
    still = EncoderConfig(attention=AttentionPlan("mask0-bidir", k=2))
    assert fingerprint("w", "", config, N_LAYERS) != fingerprint("w", "", still, N_LAYERS)
    with pytest.raises(ConfigError, match="recurrent"):
        parse_encoder_spec("mask0-bidir:recurrent=backward")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "one", "other"),
    [
        ("qwen3_next", AttentionPlan("bidir", recurrent="both"), AttentionPlan("bidir")),
        ("bloom", AttentionPlan("bidir"), AttentionPlan("inplace-back", k=2)),
    ],
)
def test_threads_encode_under_other_plans_while_one_generates(name, one, other):
    lm = tiny_lm(name, attention=one)
    again = lm.with_encoder(EncoderConfig(attention=other))
    wanted = lm.encode(TEXTS), again.encode(TEXTS), lm.generate("a dog", 4)
    jobs = [
        lambda: abs(lm.encode(TEXTS) - wanted[0]).max() < 1e-6,
        lambda: abs(again.encode(TEXTS) - wanted[1]).max() < 1e-6,
        lambda: lm.generate("a dog", 4) == wanted[2],
    ]
    assert all(map(all, at_once([lambda job=job: [job() for _ in range(5)] for job in jobs * 2])))


def test_a_model_without_attention_is_read_both_ways_where_nobody_says_otherwise(tmp_path):
    lm = load(save_tiny(tmp_path, "mamba2"))
    assert lm.encoder.attention == AttentionPlan("mask0-bidir", recurrent="both")
    texts = ["a dog in the garden", "an owl"]
    assert abs(lm.encode(texts) - load(tmp_path, attention="causal").encode(texts)).max() > 1e-3
    lm.save(tmp_path / "saved")
    assert load(tmp_path / "saved").spec.recurrent == "both"
