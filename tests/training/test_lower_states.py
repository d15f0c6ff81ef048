"""States of frozen layers from the cache beside computed ones, in value and gradient."""

import pytest
import torch

from gerund.attention.layouts import decoder_layers
from gerund.errors import ConfigError
from gerund.inference.encode.runtime import hidden_states
from gerund.settings.plan import AttentionPlan
from gerund.training.losses.vectors import LowerStates
from gerund.training.recipe import load_recipe
from gerund.training.trainable_model import prepare_model
from tests.tiny import ready
from tests.training.outcomes import losses_of


@pytest.fixture(params=["llama", "gemma2", "gpt2"])
def model(request):
    model = ready(request.param)
    model.requires_grad_(False)
    for layer in list(decoder_layers(model))[2:]:
        layer.requires_grad_(True)
    return model


def texts(*lengths):
    ids_BT = torch.randint(5, 60, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(len(lengths)))
    real_BT = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return ids_BT * real_BT, real_BT


@pytest.mark.parametrize("name", ["mask0-bidir", "inter-back"])
def test_states_and_gradients_are_those_of_the_whole_model(model, name):
    plan = AttentionPlan(name, k=2).resolve(4)
    cache = LowerStates(model, plan)
    assert cache.depth == 2
    ids_BT, real_BT = texts(7, 3, 5)
    reversed_BT = ids_BT.flip(0), real_BT.flip(0)
    for ids, real in [(ids_BT, real_BT), reversed_BT]:  # computed, then of the cache, in other rows
        gradients = []
        for read in (hidden_states, cache.read):
            model.zero_grad()
            hidden_BTD = read(model, ids, real, plan)[real]
            hidden_BTD.square().sum().backward()
            gradients.append((hidden_BTD.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]))
        (slow_ND, slow), (cached_ND, cached) = gradients
        torch.testing.assert_close(cached_ND, slow_ND, atol=1e-5, rtol=1e-4)
        assert len(slow) == len(cached) > 0
        torch.testing.assert_close(cached, slow, atol=1e-4, rtol=1e-3)


def test_lower_layers_compute_each_text_once(model):
    plan = AttentionPlan("mask0-bidir", k=2).resolve(4)
    cache, passes = LowerStates(model, plan), []
    ids_BT, real_BT = texts(6, 4)
    cache.read(model, ids_BT, real_BT, plan)  # the first pass is compared with the whole model
    attention = next(part for part in decoder_layers(model)[0].children() if "Attention" in type(part).__name__)
    attention.register_forward_hook(lambda _, args, output: passes.append(1))
    cache.read(model, ids_BT, real_BT, plan)
    assert not passes
    cache.read(model, *texts(6, 4, 5), plan)
    assert len(passes) == 1
    full = LowerStates(model, plan, most_bytes=0)
    for _ in range(2):
        full.read(model, ids_BT, real_BT, plan)
    assert full.bytes == 0


@pytest.mark.parametrize("name", ["extra-back", "inter-bidir"])
def test_plans_that_change_lower_layers_are_refused(model, name):
    with pytest.raises(ConfigError, match="the plan changes layers below 2"):
        LowerStates(model, AttentionPlan(name, k=3).resolve(4))


def test_a_model_that_is_trained_whole_is_refused(model):
    model.requires_grad_(True)
    with pytest.raises(ConfigError, match=r"set model\.lora\.lowest_layer"):
        LowerStates(model, None)


@pytest.fixture
def settings(adapting):
    return adapting


@pytest.mark.slow
def test_a_training_with_the_cache_takes_the_same_steps(run, settings, base):
    settings["model"] = {"base": str(base), "lora": {"rank": 4, "alpha": 8, "lowest_layer": 1}}
    settings["encoder"] = {"attention": "mask0-bidir", "k": 1}
    settings["objectives"] = [{"kind": "simcse", "length": 32, "batch_size": 8, "dropout": 0}]
    settings |= {"steps": 2, "log_steps": 1, "save_steps": 2, "precision": "fp32"}
    plain, cached = run("plain"), run("cached", "model.cache_below=true")
    assert losses_of(cached, "simcse") == pytest.approx(losses_of(plain, "simcse"), rel=1e-4)


@pytest.mark.parametrize(
    ("model", "changes", "reason"),
    [
        ({"lora": None, "cache_below": True}, {}, "needs lora"),
        ({"cache_below": True}, {"compile": True}, "neither compile nor sharding"),
        ({"cache_below": True}, {}, "set model.lora.lowest_layer"),
        ({"lora": {"lowest_layer": 9}}, {}, "number of layers, not 9"),
    ],
)
def test_mistakes(write_recipe, settings, model, changes, reason):
    settings["model"] |= model
    settings["objectives"] = [{"kind": "simcse", "length": 32, "batch_size": 8}]
    with pytest.raises(ConfigError, match=reason):
        prepare_model(load_recipe(write_recipe(settings | changes)), write=False)
