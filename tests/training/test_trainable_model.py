"""What is trained of a model: where a new adapter goes, plans verified without weights, and recurrent layers."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import gerund
from gerund.attention import interface
from gerund.attention.bound_plan import BoundPlan
from gerund.attention.interface import attach
from gerund.attention.layouts import attach_streams, decoder_layers, text_half
from gerund.attention.recurrent import read_by_weight, recurrent_modules
from gerund.errors import ConfigError, GerundError, ModelError
from gerund.settings.plan import PLAN_NAMES, AttentionPlan
from gerund.training.recipe import LoraConfig, load_recipe
from gerund.training.run import train
from gerund.training.trainable_model import (
    TrainableModel,
    _check_same_shape,
    _with_adapter,
    outermost,
    two_layers_of,
    verify_on_two_layers,
)
from tests.models.test_multimodal import build
from tests.tiny import N_LAYERS, RECURRENT, batch, ready, save_tiny
from tests.training.conftest import sentences
from tests.training.outcomes import read_log


def recipe(**lora):
    return SimpleNamespace(model=SimpleNamespace(lora=LoraConfig(rank=2, **lora)))


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


@pytest.fixture(scope="module")
def skeleton():
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=1000, num_hidden_layers=5, pad_token_id=999, **sizes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    attach(model)
    attach_streams(decoder_layers(model))
    return model


@pytest.mark.parametrize("name", PLAN_NAMES)
def test_every_plan_holds_on_two_layers(skeleton, name):
    plan = AttentionPlan(name).resolve(5)
    small = outermost(plan)
    assert small.views == (plan.views[0], plan.views[-1])
    assert (small.stream is None) == (plan.stream is None)
    verify_on_two_layers(skeleton, plan)
    assert all(parameter.is_meta for parameter in skeleton.parameters())


def test_the_random_numbers_of_the_training_are_left_alone(skeleton):
    before = torch.get_rng_state()
    verify_on_two_layers(skeleton, AttentionPlan("bidir").resolve(5))
    assert torch.equal(torch.get_rng_state(), before)


def test_attention_that_stays_causal_is_refused(skeleton, monkeypatch):
    def causal(module, query, key, value, attention_mask, attention_plan=None, **kwargs):
        if attention_plan is not None:
            attention_plan.mask(module.layer_idx, query, None, None)  # it asks, and makes no use of the answer
        kwargs["is_causal"] = True
        return interface.sdpa_attention_forward(module, query, key, value, None, **kwargs)

    table = interface.AttentionInterface._global_mapping
    monkeypatch.setitem(table, interface.FUSED, causal)
    with pytest.raises(GerundError, match="llama"):
        verify_on_two_layers(skeleton, AttentionPlan("bidir").resolve(5))


def test_lists_of_layers_keep_their_ends():
    config = LlamaConfig(num_hidden_layers=4, vocab_size=1000, eos_token_id=900)
    config.kinds = ["a", "b", "b", "c"]
    small = two_layers_of(config)
    assert (small.kinds, small.num_hidden_layers, small.vocab_size, small.eos_token_id) == (["a", "c"], 2, 64, None)
    assert config.num_hidden_layers == 4


TEXTS = [sentences(i, 1) for i in range(3)]


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    """Return the folder of a small random LFM 2: convolutions among attention layers."""
    return save_tiny(tmp_path_factory.mktemp("hybrid"), "lfm2")


@pytest.mark.sweep(quick=0, check=2)
@pytest.mark.parametrize("recurrent", ["causal", "both"])
@pytest.mark.parametrize("objective", ["simcse", "unimae"])
def test_an_adapter_is_trained_and_read_again(hybrid, adapting, write_recipe, tmp_path, objective, recurrent):
    adapting["model"]["base"] = str(hybrid)
    plan = {"name": "bidir", "recurrent": recurrent}
    pooling = {"pooling": "last", "append_eos": True} if objective == "unimae" else {"pooling": "mean"}
    plan = {"name": "causal"} if objective == "unimae" else plan
    adapting["encoder"] = {"attention": plan, **pooling}
    dropout = {"dropout": 0} if objective == "simcse" else {}  # LFM 2 has none in attention; the adapter's is enough
    adapting["model"]["lora"]["dropout"] = 0.1
    adapting["objectives"] = [{"kind": objective, "length": 16, "batch_size": 4, **dropout}]
    model = train(load_recipe(write_recipe(adapting), [f"output={tmp_path / 'out'}", "steps=6"]))
    log = read_log(tmp_path / "out")
    assert all(np.isfinite(line["loss"]) for line in log if "loss" in line)

    base, lm = gerund.load(hybrid, attention="causal", dtype="float32"), gerund.load(model, dtype="float32")
    assert lm.encoder.attention.name == plan["name"]
    assert lm.generate(TEXTS, 5) == base.generate(TEXTS, 5)  # the adapter takes no part in it
    if objective == "simcse":
        assert lm.encoder.attention.recurrent == recurrent
    read = replace(lm.encoder, attention=gerund.AttentionPlan("bidir", recurrent=recurrent))
    lm, base = lm.with_encoder(read), base.with_encoder(read)
    way = "both" if recurrent == "causal" else "causal"
    other = lm.with_encoder(replace(read, attention=gerund.AttentionPlan("bidir", recurrent=way)))
    assert not np.allclose(lm.encode(TEXTS), other.encode(TEXTS), atol=1e-3)
    assert not np.allclose(lm.encode(TEXTS), base.encode(TEXTS), atol=1e-3)
