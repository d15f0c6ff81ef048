"""The probe passes what is right on every architecture, and detects each way to get it wrong."""

import time
from dataclasses import replace
from threading import Thread, current_thread, main_thread

import pytest
import torch
from transformers import AttentionInterface, BertConfig, BertLMHeadModel
from transformers.masking_utils import AttentionMaskInterface

from gerund.attention import interface
from gerund.attention.interface import ADDITIVE, FUSED, attach
from gerund.attention.layouts import decoder_layers
from gerund.attention.probe import _separate_copy, probe, verify, verify_once
from gerund.errors import ModelError, UnsupportedModelError
from gerund.settings.plan import PLAN_NAMES, AttentionPlan, Direction, View
from tests.tiny import CONFIGS, N_LAYERS, REFUSED, ready, tiny

CAUSAL = AttentionPlan("causal").resolve(N_LAYERS)
RESOLVED = {name: AttentionPlan(name).resolve(N_LAYERS) for name in PLAN_NAMES}
CONVERTED = {name: plan for name, plan in RESOLVED.items() if not plan.is_causal}


@pytest.fixture
def sabotage(monkeypatch):
    """Return a function that puts another attention function in the place of both of gerund's."""

    def install(make):
        for name, own in ((FUSED, interface.fused_attention), (ADDITIVE, interface.additive_attention)):
            monkeypatch.setitem(AttentionInterface._global_mapping, name, make(own))

    return install


def wrong_layers(model, plan):
    """Return the layers that are found wrong; all of them where the probe refuses outright."""
    try:
        return probe(model, plan).wrong_layers
    except UnsupportedModelError:
        return list(range(N_LAYERS))


def with_view(change):
    """Make an attention function that looks through ``change(view, layer)`` instead of the plan's view."""

    def make(own):
        def attend(module, query, key, value, attention_mask, attention_plan=None, **kwargs):
            if attention_plan is None:
                return own(module, query, key, value, attention_mask, **kwargs)
            asked = attention_plan.view(module.layer_idx)
            other = attention_plan.seen_through(change(asked, module.layer_idx))
            return own(module, query, key, value, attention_mask, attention_plan=other, **kwargs)

        return attend

    return make


def with_bound(change):
    """Make an attention function that changes what it was told of the batch."""

    def make(own):
        def attend(module, query, key, value, attention_mask, attention_plan=None, **kwargs):
            if attention_plan is not None:
                attention_plan.view(module.layer_idx)
                attention_plan = attention_plan.seen_through(attention_plan.view(module.layer_idx))
                attention_plan._masks = {}
                change(attention_plan)
            return own(module, query, key, value, attention_mask, attention_plan=attention_plan, **kwargs)

        return attend

    return make


@pytest.mark.sweep(quick=0, check=4)
@pytest.mark.parametrize("name", CONFIGS)
def test_every_architecture_passes_every_plan(name):
    model = ready(name)
    for plan_name, plan in RESOLVED.items():
        report = verify(model, plan)  # with padding
        assert report.wrong_layers == [], plan_name
        if plan.stream is None:
            assert probe(model, plan, padded=False).wrong_layers == [], plan_name


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_architectures_that_no_plan_reaches_are_refused_by_name(name):
    model = ready(name)
    for plan_name, plan in CONVERTED.items():
        with pytest.raises(UnsupportedModelError, match=rf"{name}.*attention='causal'"):
            verify(model, plan)
        assert wrong_layers(model, plan), plan_name
    assert verify(model, CAUSAL).wrong_layers == []
    assert verify(model, RESOLVED["echo"]).wrong_layers == []


@pytest.mark.parametrize("name", ["bloom", "falcon", "gpt_neo", "deepseek_v32"])
def test_architectures_with_attention_of_their_own_are_left_alone(name, monkeypatch):
    model = tiny(name)
    monkeypatch.setattr(model, "set_attn_implementation", lambda _: pytest.fail("it would print a warning"))
    before = model.config._attn_implementation
    attach(model)
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.parametrize("plan", CONVERTED)
def test_attention_that_asks_for_the_mask_and_ignores_it(sabotage, name, plan):
    def make(own):
        def attend(module, query, key, value, attention_mask, attention_plan=None, **kwargs):
            if attention_plan is not None:
                attention_plan.mask(module.layer_idx, query, None, None)
            return own(module, query, key, value, attention_mask, **kwargs)

        return attend

    sabotage(make)
    model = ready(name)
    with pytest.raises(UnsupportedModelError, match=f"this {name} model"):
        verify(model, CONVERTED[plan])
    if CONVERTED[plan].stream is None:
        converted = [i for i, view in enumerate(CONVERTED[plan].views) if view != View(Direction.CAUSAL)]
        assert set(converted) <= set(wrong_layers(model, CONVERTED[plan]))


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
@pytest.mark.parametrize("plan", CONVERTED)
def test_attention_that_never_asks(sabotage, name, plan):
    def make(own):
        def attend(*args, attention_plan=None, **kwargs):
            return own(*args, **kwargs)

        return attend

    sabotage(make)
    with pytest.raises(UnsupportedModelError, match="no layer of this"):
        verify(ready(name), CONVERTED[plan])


@pytest.mark.sweep(quick=7, check=7)
@pytest.mark.parametrize("name", ["llama", "gemma2", "mistral"])
@pytest.mark.parametrize("plan", CONVERTED)
def test_attention_that_looks_at_padding(sabotage, name, plan):
    def look(bound):
        bound.real_BT, bound.side = None, "none"

    sabotage(with_bound(look))
    model = ready(name)
    seeing = [i for i, view in enumerate(CONVERTED[plan].views) if view.direction is not Direction.BACKWARD]
    # Padding lies on the left, out of sight for who looks to the right only.
    assert set(seeing) <= set(wrong_layers(model, CONVERTED[plan]))


def test_a_mask_function_that_drops_padding(monkeypatch):
    # What transformers does where no mask function has the attention function's name.
    monkeypatch.delitem(AttentionMaskInterface._global_mapping, FUSED)
    with pytest.raises(ModelError, match="reads padding as if it were text"):
        verify(ready("llama"), CAUSAL)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
@pytest.mark.parametrize("plan", ["mask0-for", "mask0-bidir", "mask0-all", "mask0+bidir"])
def test_attention_that_forgets_to_hide_the_first_token(sabotage, name, plan):
    sabotage(with_view(lambda view, _: replace(view, hidden=0)))
    hiding = [i for i, view in enumerate(RESOLVED[plan].views) if view.hidden]
    assert wrong_layers(ready(name), RESOLVED[plan]) == hiding


@pytest.mark.parametrize("name", ["llama", "gemma2", "opt"])
@pytest.mark.parametrize("layer", range(N_LAYERS))
def test_a_plan_that_reaches_a_single_layer(sabotage, name, layer):
    sabotage(with_view(lambda view, index: view if index == layer else View(Direction.CAUSAL)))
    model = ready(name)
    assert wrong_layers(model, RESOLVED["bidir"]) == [index for index in range(N_LAYERS) if index != layer]
    with pytest.raises(UnsupportedModelError, match="not layer"):
        verify(model, RESOLVED["bidir"])


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_attention_that_looks_the_other_way(sabotage, name):
    other = {Direction.BACKWARD: Direction.CAUSAL, Direction.BIDIRECTIONAL: Direction.BACKWARD}
    sabotage(with_view(lambda view, _: replace(view, direction=other.get(view.direction, view.direction))))
    model = ready(name)
    for plan in ("bidir", "inplace-back", "inplace-bidir", "mask0-bidir", "inter-back", "extra-back", "extend-back"):
        assert wrong_layers(model, RESOLVED[plan]), plan


@pytest.mark.parametrize("plan", [name for name, plan in RESOLVED.items() if plan.stream is not None])
def test_a_second_stream_that_never_runs(plan):
    model = tiny("llama")
    attach(model)
    with pytest.raises(UnsupportedModelError, match="reaches not layer"):
        verify(model, RESOLVED[plan])


@pytest.mark.parametrize("plan", ["bidir", "mask0-bidir"])
def test_a_sliding_window_that_is_forgotten(monkeypatch, plan):
    monkeypatch.setattr(interface, "layer_window", lambda module, kwargs: None)
    # The probe knows the window from the layer itself.
    assert wrong_layers(ready("mistral"), RESOLVED[plan])


def test_a_model_loaded_as_an_encoder_is_refused():
    config = BertConfig(vocab_size=97, hidden_size=32, num_hidden_layers=4, num_attention_heads=4,
                        intermediate_size=48, max_position_embeddings=64, is_decoder=False)  # fmt: skip
    model = BertLMHeadModel(config).eval()
    attach(model)
    for plan in (CAUSAL, RESOLVED["bidir"]):
        with pytest.raises(ModelError, match="bert model is no plain causal language model"):
            verify(model, plan)
    with pytest.raises(ModelError) as refusal:
        verify(model, CAUSAL)
    assert not isinstance(refusal.value, UnsupportedModelError)


class InOrder(torch.nn.ModuleList):
    """Layers that a model runs in another order than theirs."""

    order = ()

    def __getitem__(self, index):
        return [self[number] for number in self.order] if isinstance(index, slice) else super().__getitem__(index)


@pytest.mark.parametrize(
    ("order", "told"),
    [
        ((0, 1, 2, 1, 2, 3), "its layers run several times or in another order"),
        ((1, 0, 2, 3), "its layers run several times or in another order"),
        ((0, 0, 1, 2), "of its 4 layers 3 are run on text alone"),  # as many runs as layers
    ],
)
def test_layers_that_run_in_loops_are_refused(order, told):
    model = tiny("llama")
    attach(model)
    model.model.layers = InOrder(model.model.layers)
    model.model.layers.order = order
    with pytest.raises(UnsupportedModelError, match=told):
        probe(model, CAUSAL)


def test_the_probe_leaves_the_model_as_it_was():
    model = ready("llama").train()
    hooks = [len(layer._forward_hooks) + len(layer._forward_pre_hooks) for layer in decoder_layers(model)]
    state = torch.get_rng_state()
    verify(model, RESOLVED["mask0-bidir"])
    assert model.training
    assert [len(layer._forward_hooks) + len(layer._forward_pre_hooks) for layer in decoder_layers(model)] == hooks
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_another_thread_reads_on_as_if_nothing_were():
    model = ready("llama")
    layers = decoder_layers(model)
    ids = torch.arange(3, 12)[None]
    with torch.no_grad():
        alone = model(ids).logits
    meanwhile = []

    def read() -> None:
        with torch.no_grad():
            meanwhile.append(model(ids).logits)

    def interrupt(*_):
        if current_thread() is main_thread() and not meanwhile:
            thread = Thread(target=read)
            thread.start()
            thread.join()

    handle = layers[1].register_forward_hook(interrupt)
    verify(model, RESOLVED["bidir"])
    handle.remove()
    assert torch.equal(meanwhile[0], alone)


@pytest.mark.sweep(quick=0, check=2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_half_precision_passes_too(name, dtype):
    model = ready(name).to(dtype)
    for plan_name, plan in RESOLVED.items():
        assert verify(model, plan).wrong_layers == [], plan_name


def test_verifying_takes_milliseconds():
    model = ready("llama")
    verify(model, RESOLVED["mask0-bidir"])
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        verify(model, RESOLVED["mask0-bidir"])
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.5


@pytest.mark.parametrize("name", [*CONFIGS, *REFUSED])
def test_the_separate_copy_shares_every_tensor_and_nothing_else(name):
    model = ready(name)
    other = _separate_copy(model)
    assert type(other) is type(model)
    ids = torch.arange(3, 12)[None]
    with torch.no_grad():
        assert torch.equal(other(ids).logits, model(ids).logits)
    own, copied = dict(model.named_parameters()), dict(other.named_parameters())
    assert own.keys() == copied.keys()
    assert all(own[key] is copied[key] for key in own)
    assert not set(map(id, model.modules())) & set(map(id, other.modules()))
    decoder_layers(other)[0].register_forward_pre_hook(lambda *_: pytest.fail("the hook reached the model"))
    other.train()
    assert not model.training
    with torch.no_grad():
        model(ids)


def test_a_model_with_a_replaced_forward_is_probed_itself():
    model = ready("llama")
    layer = decoder_layers(model)[1]
    layer.forward = layer.forward
    assert _separate_copy(model) is None
    assert verify(model, RESOLVED["bidir"]).wrong_layers == []


def test_a_known_plan_of_a_known_model_is_not_verified_again(monkeypatch):
    from gerund.attention import probe as module

    model, calls = ready("llama"), []
    monkeypatch.setattr(module, "verify", lambda *given: calls.append(given))
    for plan in ("bidir", "mask0-bidir", "bidir"):
        verify_once(model, RESOLVED[plan])
    assert len(calls) == 2
    verify_once(ready("llama"), RESOLVED["bidir"])
    assert len(calls) == 3


def test_a_plan_that_was_refused_is_refused_again():
    model = ready("gpt_neo")
    for _ in range(2):
        with pytest.raises(UnsupportedModelError):
            verify_once(model, RESOLVED["bidir"])
