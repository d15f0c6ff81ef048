"""Recurrent layers under a plan: causal, or on the text and on the text reversed; exact, whatever pads the text."""

import inspect
import warnings
from functools import partial

import pytest
import torch

from gerund import ModelSpec
from gerund.attention.bound_plan import BoundPlan
from gerund.attention.interface import attach
from gerund.attention.layouts import attach_streams, decoder_layers
from gerund.attention.probe import probe, verify
from gerund.attention.recurrent import kind_of
from gerund.entry import load
from gerund.errors import ConfigError, UnsupportedModelError
from gerund.inference.encode.sweep import Sweep
from gerund.language_model import LanguageModel
from gerund.models.fingerprint import fingerprint
from gerund.settings.encoder import EncoderConfig
from gerund.settings.model_spec import EncoderSpec, parse_encoder_spec
from gerund.settings.plan import AttentionPlan
from tests.attention.in_threads import wrong_in_threads
from tests.attention.reference import ReferenceModel, kinds
from tests.tiny import N_LAYERS, RECURRENT, batch, byte_tokenizer, save_tiny, tiny

# Spelled out here, so that what the library takes for recurrent is not asked of itself.
MODULES = {
    "qwen3_next": "Qwen3NextGatedDeltaNet",
    "qwen3_5_text": "Qwen3_5GatedDeltaNet",
    "qwen3_5_moe_text": "Qwen3_5MoeGatedDeltaNet",
    "olmo_hybrid": "OlmoHybridGatedDeltaNet",
    "kimi_linear": "KimiLinearDeltaAttention",
    "minimax": "MiniMaxLightningAttention",
    "lfm2": "Lfm2ShortConv",
    "lfm2_moe": "Lfm2MoeShortConv",
    "lfm3": "Lfm3ShortConv",
    "bamba": "BambaMixer",
    "granitemoehybrid": "GraniteMoeHybridMambaLayer",
    "falcon_h1": "FalconH1Mixer",
    "jamba": "JambaMambaMixer",
    "nemotron_h": "NemotronHMamba2Mixer",
    "bailing_hybrid": "BailingHybridDeltaAttention",
    "mamba": "MambaMixer",
    "mamba2": "Mamba2Mixer",
}
# One of each kind of call and of layer: by keyword, with convolutions, unasked by the layer, both in a layer, by place.
SOME = ["qwen3_next", "lfm2", "jamba", "falcon_h1", "nemotron_h", "mamba"]
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
PLANS = [*TURNED, *STILL]
# What tells the ways apart that a recurrent layer may run.
FEW = [TURNED[0], TURNED[1], TURNED[3], TURNED[6], TURNED[9], STILL[2], STILL[4]]


def ready(name, **changes):
    model = tiny(name, **changes)
    attach(model)
    attach_streams(decoder_layers(model))
    return model


def run(model, plan, inputs):
    bound = BoundPlan(plan.resolve(N_LAYERS), inputs["attention_mask"])
    states = model.base_model(**inputs, use_cache=False, attention_plan=bound).last_hidden_state
    bound.check_all_asked("tiny")
    return states


class SlowModel(ReferenceModel):
    """Explicit masks, and recurrent modules that are called on each text alone, without padding, as it is or reversed.

    A layer that has nothing but such a module and leaves it causal is not converted, so no plan runs it twice.
    """

    def __init__(self, model, plan):
        super().__init__(model, plan)
        self.kind = MODULES[model.config.model_type]

    def hidden_states(self, batch, span_BT=None):
        real_BT = batch["attention_mask"].bool()
        turned = self.plan.recurrent == "both"
        way = "back" if self.plan.name.endswith("back") else "both"
        for layer, (kind, _) in zip(self.layers, kinds(self.plan, len(self.layers)), strict=True):
            self._slow(layer, kind if turned else "forward", real_BT)
        for layer in [*self.copies.values(), *getattr(self, "tops", [])]:
            self._slow(layer, way if turned else "forward", real_BT)
        return super().hidden_states(batch, span_BT)

    def _slow(self, layer, kind, real_BT):
        for module in layer.modules():
            if type(module).__name__ == self.kind:
                module.forward = partial(slowly, type(module).forward, module, kind, real_BT)

    def _streams(self, i, n, second_masks, tower):
        layer = self.layers[i]
        attends = any(type(m).__name__.endswith("Attention") and type(m).__name__ != self.kind for m in layer.modules())
        as_in_paper = self.plan.name.startswith("inter") and self.plan.variant == "paper"
        turned = self.plan.recurrent == "both" and any(type(m).__name__ == self.kind for m in layer.modules())
        if as_in_paper and not attends and not turned:
            return lambda layer, args, kwargs, output: None
        return super()._streams(i, n, second_masks, tower)


def slowly(forward, module, kind, real_BT, hidden_states, *args, **kwargs):
    needed = {
        name: None
        for name, parameter in list(inspect.signature(forward).parameters.items())[2:]
        if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    }
    rows, is_tuple = [], False
    for hidden_TD, real_T in zip(hidden_states, real_BT, strict=True):
        text_1LD = hidden_TD[real_T][None]
        total = 0
        for wanted, order in ((("forward", "both"), lambda text: text), (("back", "both"), lambda text: text.flip(1))):
            if kind in wanted:
                found = forward(module, order(text_1LD), **needed)
                is_tuple = isinstance(found, tuple)
                total = total + order(found[0] if is_tuple else found)
        row_TD = torch.zeros_like(hidden_TD)
        row_TD[real_T] = total[0]
        rows.append(row_TD)
    states = torch.stack(rows)
    return (states, None) if is_tuple else states


def assert_near(found, expected, label):
    difference = (found - expected).abs().max().item()
    # A delta rule solves for what it corrects, and rounds more than attention.
    assert difference <= 3e-5 * max(1.0, expected.abs().max().item()), (label, difference)


@pytest.mark.sweep(quick=0, check=4)
@pytest.mark.parametrize("plans", [PLANS[0::3], PLANS[1::3], PLANS[2::3]], ids=["0", "1", "2"])
@pytest.mark.parametrize("side", ["both", "none", "left"])
@pytest.mark.parametrize("name", RECURRENT)
@torch.no_grad()
def test_every_plan_equals_the_modules_themselves_on_the_reversed_text(name, side, plans):
    inputs = batch(side)
    real = inputs["attention_mask"].bool()
    model = ready(name)
    for plan in plans:
        slow = SlowModel(tiny(name), plan).hidden_states(inputs)
        assert_near(run(model, plan, inputs)[real], slow[real], plan)


@pytest.mark.parametrize("name", SOME)
@torch.no_grad()
def test_the_two_directions_give_other_states_than_one(name):
    model, inputs = ready(name), batch("none")
    for turned in TURNED[:-1]:  # the last one runs the last layer again, which attends in some
        still = AttentionPlan.from_dict({**turned.to_dict(), "recurrent": "causal"})
        assert (run(model, turned, inputs) - run(model, still, inputs)).abs().max() > 1e-3, turned


@pytest.mark.sweep(quick=3, check=4)
@pytest.mark.parametrize("name", SOME)
@torch.no_grad()
def test_a_text_has_the_same_states_alone_and_padded_on_either_side(name):
    model = ready(name)
    lengths = (7, 5, 1)
    both = batch("both", lengths)
    for plan in FEW:
        together = run(model, plan, both)
        for row, (ids, real) in enumerate(zip(both["input_ids"], both["attention_mask"].bool(), strict=True)):
            alone = model.base_model(
                ids[real][None], use_cache=False, attention_plan=BoundPlan(plan.resolve(N_LAYERS))
            ).last_hidden_state[0]
            assert_near(together[row][real], alone, (plan, row))


@pytest.mark.sweep(quick=3, check=4)
@pytest.mark.parametrize("name", RECURRENT)
@torch.no_grad()
def test_without_a_plan_nothing_changes_by_a_bit(name):
    inputs = batch("left")
    model = ready(name)
    plain = tiny(name)
    assert torch.equal(plain(**inputs).logits, model(**inputs).logits)
    # Nor after a plan was in use, whether it came to its end or not.
    run(model, TURNED[0], inputs)
    with pytest.raises(ConfigError, match="cached"):
        model.base_model(inputs["input_ids"], use_cache=True, attention_plan=BoundPlan(TURNED[0].resolve(N_LAYERS)))
    assert torch.equal(plain(**inputs).logits, model(**inputs).logits)


@pytest.mark.parametrize("name", ["qwen3_next", "lfm2", "minimax", "bamba", "nemotron_h", "mamba2"])
@torch.no_grad()
def test_generation_is_that_of_plain_transformers(name):
    prompt = batch("none", (5,))["input_ids"]
    settings = dict(max_new_tokens=6, do_sample=False, output_scores=True, return_dict_in_generate=True)
    expected = tiny(name).generate(prompt, **settings)
    model = ready(name)
    run(model, TURNED[0], batch("left"))
    found = model.generate(prompt, **settings)
    assert torch.equal(found.sequences, expected.sequences)
    assert all(torch.equal(a, b) for a, b in zip(found.scores, expected.scores, strict=True))


@pytest.mark.sweep(quick=4, check=4)
@pytest.mark.parametrize("plan", [TURNED[1], TURNED[2], TURNED[6], STILL[0]], ids=lambda plan: plan.name)
@pytest.mark.parametrize("name", SOME)
def test_gradients_equal_the_reference_with_and_without_checkpointing(name, plan):
    inputs = batch("both")
    real = inputs["attention_mask"].bool()
    weight = torch.randn((*real.shape, 32), generator=torch.Generator().manual_seed(5))

    def gradients(model, states, copies=()):
        (states * weight)[real].sum().backward()
        total = {key: p.grad.clone() for key, p in model.base_model.named_parameters() if p.grad is not None}
        names = {id(module): key for key, module in model.base_model.named_modules()}
        for index, layer in copies:
            prefix = names[id(decoder_layers(model)[index])] + "."
            for key, p in layer.named_parameters():
                if p.grad is not None:
                    total[prefix + key] = total.get(prefix + key, 0) + p.grad
        model.zero_grad()
        return total

    slow_model = tiny(name)
    reference = SlowModel(slow_model, plan)
    slow = gradients(slow_model, reference.hidden_states(inputs), reference.copies.items())
    model = ready(name)
    fast = gradients(model, run(model, plan, inputs))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # renamed in newer transformers
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    checkpointed = gradients(model, run(model, plan, inputs))
    assert slow.keys() == fast.keys() == checkpointed.keys()
    for key, expected in slow.items():
        scale = max(1.0, expected.abs().max().item())
        torch.testing.assert_close(fast[key], expected, atol=2e-4 * scale, rtol=1e-3, msg=lambda m, k=key: f"{k}: {m}")
        torch.testing.assert_close(checkpointed[key], fast[key], atol=1e-5 * scale, rtol=1e-4)


@pytest.mark.sweep(quick=3, check=4)
@pytest.mark.parametrize("name", SOME)
@torch.no_grad()
def test_a_sweep_equals_each_plan_alone(name):
    inputs = batch("both")
    model = ready(name)
    real = inputs["attention_mask"].bool()
    sweep = Sweep([plan.resolve(N_LAYERS) for plan in PLANS], inputs["attention_mask"])
    together = model.base_model(**inputs, use_cache=False, attention_plan=sweep.bound).last_hidden_state
    for plan, states in zip(PLANS, together.split(len(real)), strict=True):
        assert_near(states[real], run(model, plan, inputs)[real], plan)


@pytest.mark.sweep(quick=3, check=5)
@pytest.mark.parametrize("name", RECURRENT)
def test_the_probe_knows_what_every_layer_sees(name):
    model = ready(name)
    layers = decoder_layers(model)
    turns = [layer for layer, module in enumerate(layers) if kind_of(module).recurrent]
    expected = [i for i, layer in enumerate(layers) if any(type(m).__name__ == MODULES[name] for m in layer.modules())]
    assert turns == expected
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


def hybrid_lm(name, plan):
    tokenizer = byte_tokenizer()
    return LanguageModel(tiny(name, vocab_size=len(tokenizer)), tokenizer, EncoderConfig(attention=plan))


@pytest.mark.sweep(quick=1, check=3)
@pytest.mark.parametrize("name", SOME)
def test_a_hybrid_model_encodes_generates_and_refuses_to_infill(name):
    lm = hybrid_lm(name, AttentionPlan("mask0-bidir", k=3, recurrent="both"))
    texts = ["a dog in the garden", "an owl", "the end"]
    together = lm.encode(texts)
    for side in ("left", "right"):
        lm.tokenizer.padding_side = side
        padded = lm.encode(texts)
        assert abs(padded - together).max() < 1e-5
        for row, text in enumerate(texts):
            assert abs(padded[row] - lm.encode(text)).max() < 1e-5
            states = lm.encode_tokens(texts)[row]
            assert abs(states - lm.encode_tokens([text])[0]).max() < 1e-4
    assert lm.encode_words([["a", "dog"], ["owls"]])[0].shape == (2, 32)
    written = [generation.text for generation in lm.generate(texts, 4)]
    assert written == [item.text for item in hybrid_lm(name, AttentionPlan("causal")).generate(texts, 4)]
    for method, why in {"infill": "recurrent layers would show the context", "left-only": "keeps states"}.items():
        with pytest.raises(UnsupportedModelError, match=why):
            lm.infill("the [blank] garden", max_tokens=4, method=method)


@pytest.mark.slow
def test_threads_encode_under_other_plans_while_one_generates():
    texts = ["a dog in the garden", "an owl"]
    both = hybrid_lm("qwen3_next", AttentionPlan("bidir", recurrent="both"))
    still = both.with_encoder(EncoderConfig(attention=AttentionPlan("bidir")))
    assert not wrong_in_threads(both, still, texts)


def test_a_model_without_attention_is_read_both_ways_where_nobody_says_otherwise(tmp_path):
    lm = load(save_tiny(tmp_path, "mamba2"))
    assert lm.encoder.attention == AttentionPlan("mask0-bidir", recurrent="both")
    texts = ["a dog in the garden", "an owl"]
    assert abs(lm.encode(texts) - load(tmp_path, attention="causal").encode(texts)).max() > 1e-3
    lm.save(tmp_path / "saved")
    assert load(tmp_path / "saved").spec.recurrent == "both"
