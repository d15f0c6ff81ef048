"""The attention dropout of SimCSE reaches every architecture's attention, and is put back."""

import pytest
import torch
from torch import nn

from gerund.attention.interface import attach
from gerund.errors import ConfigError
from gerund.inference.encode.runtime import EncoderRuntime
from gerund.settings.encoder import EncoderConfig
from gerund.settings.plan import AttentionPlan
from gerund.training.losses.vectors import dropout_settings
from gerund.training.objectives.contrastive import ContrastiveLosses
from tests.tiny import CONFIGS, N_LAYERS, VOCAB, tiny

# Other dropouts than that of the probabilities.
OTHERS = {"gpt2": {"embd_pdrop": 0.0, "resid_pdrop": 0.0}, "opt": {"dropout": 0.0}}


def case(name, dropout):
    model = tiny(name, **OTHERS.get(name, {})).train()
    attach(model)
    encoder = EncoderConfig(attention=AttentionPlan("bidir"))
    runtime = EncoderRuntime(model, None, encoder, encoder.attention.resolve(N_LAYERS))
    losses = ContrastiveLosses(runtime, temperature=1.0, similarity="cosine", dropout=dropout)
    ids = torch.randint(3, VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))
    real = torch.ones_like(ids).bool()
    return model, losses, {"input_ids": ids, "real": real, "pooled": real}


def rates(model):
    return [getattr(*place) for place in dropout_settings(model)]


@pytest.mark.sweep(quick=4, check=4)
@pytest.mark.parametrize("name", CONFIGS)
def test_every_layer_of_every_architecture(name):
    model, losses, part = case(name, 0.3)
    before = rates(model)
    assert len(before) == N_LAYERS
    everything = {key: module.p for key, module in model.named_modules() if isinstance(module, nn.Dropout)}
    torch.manual_seed(0)
    with torch.no_grad(), losses.heads.during(model):
        assert rates(model) == [0.3] * N_LAYERS
        one, other = losses(model, part), losses(model, part)
        assert not torch.allclose(one, other, rtol=1e-3)
        model.eval()
        assert torch.equal(losses(model, part), losses(model, part))
    assert rates(model) == before
    assert everything == {key: module.p for key, module in model.named_modules() if isinstance(module, nn.Dropout)}


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_single_layer_that_drops_shows(name):
    """Every place is one that the attention reads: in each layer alone it makes two passes differ."""
    model, losses, part = case(name, 0.0)
    with torch.no_grad(), losses.heads.during(model):
        for module, attribute in dropout_settings(model):
            setattr(module, attribute, 0.4)
            assert not torch.equal(losses(model, part), losses(model, part))
            setattr(module, attribute, 0.0)
            assert torch.equal(losses(model, part), losses(model, part))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_it_is_put_back_after_an_error(name):
    model, losses, _ = case(name, 0.3)
    for place, (module, attribute) in enumerate(dropout_settings(model)):
        setattr(module, attribute, 0.1 * place)
    before = rates(model)

    def fail():
        with losses.heads.during(model):
            assert rates(model) == [0.3] * N_LAYERS
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        fail()
    assert rates(model) == before


def test_the_models_own_dropout_is_left_alone():
    model, losses, part = case("gpt2", None)
    assert rates(model) == [0.1] * N_LAYERS  # GPT-2's default
    with torch.no_grad(), losses.heads.during(model):
        assert rates(model) == [0.1] * N_LAYERS
        assert not torch.equal(losses(model, part), losses(model, part))


def test_an_architecture_without_such_a_dropout(monkeypatch):
    monkeypatch.setattr("gerund.training.losses.vectors._DROPOUTS", ())
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM has no attention dropout to set; set dropout: 0 and give"):
        case("llama", 0.3)
    # What the message advises works.
    model, losses, part = case("llama", 0.0)
    with torch.no_grad(), losses.heads.during(model):
        assert torch.equal(losses(model, part), losses(model, part))
