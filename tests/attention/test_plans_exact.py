"""Every plan equals explicit 4-D masks in eager attention, on every architecture and padding side."""

import warnings

import pytest
import torch

from gerund.attention import interface
from gerund.attention.bound_plan import BoundPlan
from gerund.attention.interface import attach
from gerund.attention.layouts import attach_streams, decoder_layers
from gerund.settings.plan import PLAN_NAMES, AttentionPlan
from tests.attention.reference import ReferenceModel
from tests.tiny import CONFIGS, N_LAYERS, SIDES, batch, tiny

PLANS = [AttentionPlan(name, k=2 if AttentionPlan(name).takes_k else None).with_defaults(4) for name in PLAN_NAMES]
PLANS += [
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
IDS = [f"{p.name}-{p.k}-{p.k0}-{p.sink_tokens}-{p.combine}-{p.variant}-{p.skips}" for p in PLANS]


def run(model, plan, inputs, span=None):
    bound = BoundPlan(plan.resolve(N_LAYERS), inputs["attention_mask"], span)
    states = model.base_model(**inputs, use_cache=False, attention_plan=bound).last_hidden_state
    bound.check_all_asked("tiny")
    return states


def spans(real):
    """Make the last two tokens of each text span 1, and one in its middle span 2."""
    span = torch.zeros_like(real)
    for row, mask in enumerate(real):
        places = mask.nonzero().flatten()
        span[row, places[-2:]] = 1
        span[row, places[len(places) // 2 - 1]] = 2
    return span


@pytest.mark.sweep(quick=0, check=5)
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_every_plan_equals_explicit_masks(name, side):
    inputs = batch(side)
    real = inputs["attention_mask"].bool()
    model = tiny(name)
    attach(model)
    attach_streams(decoder_layers(model))
    eager = tiny(name)
    for plan, label in zip(PLANS, IDS, strict=True):
        span = spans(inputs["attention_mask"])
        ours = run(model, plan, inputs, span)
        slow = ReferenceModel(eager, plan).hidden_states(inputs, span)
        difference = (ours - slow)[real].abs().max().item()
        assert difference <= 1e-5 * max(1.0, slow[real].abs().max().item()), (label, difference)


@pytest.mark.sweep(quick=0, check=2)
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "mistral", "opt"])
@torch.no_grad()
def test_left_and_right_padding_and_single_texts_agree(name):
    model = tiny(name)
    attach(model)
    attach_streams(decoder_layers(model))
    lengths = (7, 5, 3)
    right = batch("right", lengths)
    texts = [right["input_ids"][row, :length] for row, length in enumerate(lengths)]
    left = {key: torch.zeros_like(value) for key, value in right.items()}
    for row, text in enumerate(texts):
        left["input_ids"][row, -len(text) :] = text
        left["attention_mask"][row, -len(text) :] = 1
    left["position_ids"] = (left["attention_mask"].cumsum(1) - 1).clamp(min=0)
    for plan in PLANS:
        if plan.name == "hybrid":
            continue
        together = [(run(model, plan, inputs), inputs["attention_mask"].bool()) for inputs in (left, right)]
        for row, text in enumerate(texts):
            alone = model.base_model(
                text[None], attention_plan=BoundPlan(plan.resolve(N_LAYERS)), use_cache=False
            ).last_hidden_state[0]
            for states, real in together:
                torch.testing.assert_close(states[row][real[row]], alone, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_without_a_plan_nothing_changes_by_a_bit(name):
    inputs = batch("left")
    plain, ours = tiny(name), tiny(name)
    attach(ours)
    attach_streams(decoder_layers(ours))
    assert torch.equal(plain(**inputs).logits, ours(**inputs).logits)


@pytest.mark.sweep(quick=7, check=7)
@pytest.mark.parametrize("plan", PLANS, ids=IDS)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_gradients_equal_the_reference_with_and_without_checkpointing(name, plan):
    inputs = batch("left")
    real = inputs["attention_mask"].bool()
    span = spans(inputs["attention_mask"])
    generator = torch.Generator().manual_seed(5)

    def gradients(states, model, extra=()):
        weight = torch.randn(states.shape, generator=generator.manual_seed(5))
        model.zero_grad()
        (states * weight)[real].sum().backward()
        total = {key: p.grad.clone() for key, p in model.base_model.named_parameters() if p.grad is not None}
        for layer_index, copy_ in extra:
            prefix = _layer_prefix(model, layer_index)
            for key, p in copy_.named_parameters():
                if p.grad is not None:
                    total[prefix + key] = total[prefix + key] + p.grad
        return total

    slow_model = tiny(name)
    reference = ReferenceModel(slow_model, plan)
    extra = [*reference.copies.items(), *[(N_LAYERS - 1, top) for top in getattr(reference, "tops", [])]]
    slow = gradients(reference.hidden_states(inputs, span), slow_model, extra)

    model = tiny(name)
    attach(model)
    attach_streams(decoder_layers(model))
    fast = gradients(run(model, plan, inputs, span), model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # renamed in newer transformers
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    checkpointed = gradients(run(model, plan, inputs, span), model)
    for key, expected in slow.items():
        torch.testing.assert_close(fast[key], expected, atol=2e-4, rtol=1e-3, msg=lambda m, key=key: f"{key}: {m}")
        torch.testing.assert_close(checkpointed[key], fast[key], atol=1e-5, rtol=1e-4)


def _layer_prefix(model, index):
    layer = decoder_layers(model)[index]
    return next(key for key, module in model.base_model.named_modules() if module is layer) + "."


@pytest.mark.sweep(quick=4, check=4)
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", CONFIGS)
def test_short_texts_are_trained_as_long_ones(name, side, monkeypatch):
    inputs = batch(side)
    real = inputs["attention_mask"].bool()
    model = tiny(name)
    attach(model)
    attach_streams(decoder_layers(model))
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
            states = run(model, plan, inputs, spans(inputs["attention_mask"]))
            states[real].pow(2).sum().backward()
            # Where the scores are capped it is the architecture's own function in any case, looked up by name.
            assert bool(called) == (short > 0 and model.config._attn_implementation == interface.FUSED)
            gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
            found.append([states.detach()[real], *gradients])
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, atol=5e-4 * max(1.0, other.abs().max().item()), rtol=1e-3)
