"""Where a new adapter goes: every linear layer that text goes through by its forward, and no other."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gerund.attention.bound_plan import BoundPlan
from gerund.attention.interface import attach
from gerund.attention.layouts import attach_streams, decoder_layers, text_half
from gerund.attention.recurrent import read_by_weight, recurrent_modules
from gerund.errors import ConfigError, ModelError
from gerund.settings.plan import AttentionPlan
from gerund.training.recipe import LoraConfig
from gerund.training.trainable_model import TrainableModel, _check_same_shape, _with_adapter
from tests.models.test_multimodal import build
from tests.tiny import N_LAYERS, RECURRENT, batch, tiny


def recipe(**lora):
    return SimpleNamespace(model=SimpleNamespace(lora=LoraConfig(rank=2, **lora)))


def ready(name):
    model = tiny(name)
    attach(model)
    attach_streams(decoder_layers(model))
    return model


def adapted_layers(model):
    return {name for name, part in model.named_modules() if hasattr(part, "lora_A")}


def test_an_adapter_that_is_trained_further_has_its_own_lowest_layer():
    model = ready("llama")
    adapter = _with_adapter(model, recipe(lowest_layer=1), None)
    _check_same_shape(model, adapter, LoraConfig(rank=2, lowest_layer=1), Path("a"))
    with pytest.raises(ModelError, match=r"updates from layer 1 on, and model\.lora\.lowest_layer asks for 2"):
        _check_same_shape(model, adapter, LoraConfig(rank=2, lowest_layer=2), Path("a"))


@pytest.mark.sweep(quick=0, check=5)
@pytest.mark.parametrize("name", RECURRENT)
def test_every_adapted_layer_of_a_hybrid_gets_a_gradient(name):
    model = ready(name)
    unseen = set(read_by_weight(model))
    adapter = _with_adapter(model, recipe(), None)
    adapter.train()
    torch.manual_seed(0)
    for key, parameter in model.named_parameters():
        if "lora_" in key:
            parameter.data.normal_(0, 0.1)
    inputs = batch("both")
    bound = BoundPlan(AttentionPlan("bidir", recurrent="both").resolve(N_LAYERS), inputs["attention_mask"])
    states = model.base_model(**inputs, use_cache=False, attention_plan=bound).last_hidden_state
    states[inputs["attention_mask"].bool()].square().sum().backward()
    targets = adapted_layers(model)
    mixers = {name for name, part in model.named_modules() if part in recurrent_modules(model)}
    assert any(target.startswith(tuple(mixers)) for target in targets)
    assert not targets & unseen
    still = {key for key, value in model.named_parameters() if "lora_" in key and value.grad is None}
    # An expert or a router that no token came to has none.
    assert not {key for key in still if "expert" not in key and "gate" not in key}


def test_layers_that_are_read_past_an_adapter_are_refused_by_name():
    with pytest.raises(ConfigError, match=r"target_modules: .*out_proj"):
        _with_adapter(ready("bamba"), recipe(target_modules=["out_proj"]), None)
    with pytest.raises(ConfigError, match=r"target_modules: .*out_proj"):
        _with_adapter(ready("mamba2"), recipe(target_modules=["out_proj"]), None)


def test_an_adapter_that_is_trained_further_gets_the_recipes_dropout_and_keeps_its_layers(tmp_path):
    first = _with_adapter(ready("llama"), recipe(target_modules=["q_proj", "v_proj"]), None)
    first.save_pretrained(tmp_path)

    def dropouts(**lora):
        adapter = _with_adapter(ready("llama"), recipe(**lora), tmp_path)
        parts = [part.lora_dropout["default"] for part in adapter.modules() if hasattr(part, "lora_A")]
        assert len(parts) == 2 * N_LAYERS
        return {getattr(part, "p", 0.0) for part in parts}, adapter.peft_config["default"].lora_dropout

    assert dropouts() == ({0.0}, 0.0)
    assert dropouts(dropout=0.3) == ({0.3}, 0.3)
    assert dropouts(target_modules=["v_proj", "q_proj"]) == ({0.0}, 0.0)
    assert dropouts(target_modules=".*self_attn.[qv]_proj") == ({0.0}, 0.0)
    for asked in ("all-linear", ["q_proj"], ".*self_attn.[qk]_proj"):
        with pytest.raises(ModelError, match=r"has layers q_proj, v_proj, and model\.lora\.target_modules asks for"):
            _with_adapter(ready("llama"), recipe(target_modules=asked), tmp_path)
    _with_adapter(ready("llama"), recipe(), None).save_pretrained(tmp_path / "all")
    _with_adapter(ready("llama"), recipe(target_modules="all-linear"), tmp_path / "all")


def test_how_many_embeddings_there_are_beside_an_adapter_of_theirs():
    model = ready("llama")
    before = TrainableModel.vocabulary.fget(SimpleNamespace(model=model))
    _with_adapter(model, recipe(target_modules=["q_proj", "embed_tokens"]), None)
    assert TrainableModel.vocabulary.fget(SimpleNamespace(model=model)) == before == model.config.vocab_size


@pytest.mark.parametrize("kind", ["llava", "qwen3_vl"])
def test_towers_get_no_adapter(kind):
    model = build(kind)
    half = text_half(model)
    own = {name for name, part in model.named_modules() if part in set(half.modules())}
    _with_adapter(model, recipe(), None)
    targets = adapted_layers(model)
    assert len(targets) >= N_LAYERS * 4
    assert targets <= own
