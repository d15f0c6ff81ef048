"""A plan verified without weights: on two random layers, for every plan, and refused where attention disobeys."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from gerund.attention import interface
from gerund.attention.interface import attach
from gerund.attention.layouts import attach_streams, decoder_layers
from gerund.errors import GerundError
from gerund.settings.plan import PLAN_NAMES, AttentionPlan
from gerund.training.trainable_model import outermost, two_layers_of, verify_on_two_layers


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
