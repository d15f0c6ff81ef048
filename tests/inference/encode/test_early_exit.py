"""Early exit: the lower layers and the final norm read a text, and those above are not computed."""

from pathlib import Path

import numpy as np
import pytest
import torch

import gerund
from gerund import AttentionPlan, ConfigError, EncoderConfig
from gerund.attention.layouts import decoder_layers, lower_layers
from gerund.inference.encode.runtime import hidden_states
from gerund.language_model import LanguageModel
from gerund.models.saved_settings import saved_fields, settings_from
from gerund.settings.model_spec import EncoderSpec
from tests.cli.helpers import run_cli
from tests.tiny import N_LAYERS, tiny, tiny_lm

TEXTS = ["A dog", "is it a cat?", "the other thing, in the rain."]
EXIT = N_LAYERS - 2


def layers_run(lm: LanguageModel, work) -> set[int]:
    """Return which layers compute something."""
    ran: set[int] = set()
    hooks = [
        layer.register_forward_hook(lambda *_, index=index: ran.add(index))
        for index, layer in enumerate(decoder_layers(lm.model))
    ]
    work()
    for hook in hooks:
        hook.remove()
    return ran


def alone(lm: LanguageModel, n_layers: int) -> LanguageModel:
    """Return a model that was made with so many layers and has their weights: the slow way."""
    config = {"llama": "num_hidden_layers", "gpt2": "n_layer", "gemma3": "num_hidden_layers", "bloom": "n_layer"}
    kind = lm.model.config.model_type.removesuffix("_text")
    small = tiny(kind, vocab_size=len(lm.tokenizer), **{config[kind]: n_layers})
    wanted = small.state_dict()
    state = lm.model.state_dict()
    small.load_state_dict({name: state[name] for name in wanted})
    return LanguageModel(small, lm.tokenizer, EncoderConfig(lm.encoder.attention, pooling=lm.encoder.pooling))


@pytest.mark.sweep(quick=5, check=5)
@pytest.mark.parametrize("plan", ["causal", "mask0-bidir", "inter-back", "extra-bidir", "extend-back"])
@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_vectors_are_those_of_a_model_of_so_many_layers(model_type: str, plan: str) -> None:
    lm = tiny_lm(model_type, attention=AttentionPlan(plan, k=None if plan == "causal" else 1), exit_layer=EXIT)
    other = alone(lm, EXIT)
    np.testing.assert_array_equal(lm.encode(TEXTS), other.encode(TEXTS))
    assert lm.n_layers == N_LAYERS
    assert layers_run(lm, lambda: lm.encode(TEXTS)) == set(range(EXIT))
    # What generates is the whole model, as it was.
    whole = tiny_lm(model_type)
    whole.model.load_state_dict(lm.model.state_dict())
    assert layers_run(lm, lambda: lm.generate("A dog", 2)) == set(range(N_LAYERS))
    assert [one.token_ids for one in lm.generate(TEXTS, 5)] == [one.token_ids for one in whole.generate(TEXTS, 5)]


def test_layers_above_those_that_are_mixed_are_not_computed() -> None:
    lm = tiny_lm(attention=AttentionPlan("causal"), layers=f"1+{EXIT}")
    with torch.no_grad():
        ids = lm.tokenizer("A dog", return_tensors="pt").input_ids
        hidden = lm.model(ids, output_hidden_states=True).hidden_states
    slow = (hidden[1] + hidden[EXIT])[0].mean(0) / 2
    np.testing.assert_allclose(lm.encode("A dog", normalize=False), slow.numpy(), atol=1e-5)
    for plan, expected in (("mask0-bidir", EXIT), ("inter-back", EXIT), ("extra-back", N_LAYERS)):
        own = lm.with_encoder(EncoderConfig(AttentionPlan(plan), layers=str(EXIT)))
        assert layers_run(own, lambda own=own: own.encode(TEXTS)) == set(range(expected))
        both = own.with_encoder(EncoderConfig(AttentionPlan(plan), layers=f"{EXIT}+{N_LAYERS}"))
        last = own.with_encoder(EncoderConfig(AttentionPlan(plan)))
        lower, mean, top = (one.encode(TEXTS, normalize=False) for one in (own, both, last))
        np.testing.assert_allclose(mean, (lower + top) / 2, atol=1e-5)


def test_gradients_come_from_the_lower_layers_alone() -> None:
    lm = tiny_lm(attention=AttentionPlan("bidir"), exit_layer=EXIT)
    ids = lm.tokenizer("A dog", return_tensors="pt").input_ids
    real = torch.ones_like(ids, dtype=torch.bool)

    def train() -> None:
        hidden_states(lm.model, ids, real, lm.runtime.plan).square().sum().backward()

    assert layers_run(lm, train) == set(range(EXIT))
    with_gradient = [layer.mlp.up_proj.weight.grad is not None for layer in decoder_layers(lm.model)]
    assert with_gradient == [True] * EXIT + [False] * (N_LAYERS - EXIT)
    own = lm.encode_tokens(["A dog"])[0]
    np.testing.assert_allclose(hidden_states(lm.model, ids, real, lm.runtime.plan)[0].detach().numpy(), own, atol=1e-5)
    assert lower_layers(lm.model, N_LAYERS) is lm.model


def test_it_is_saved_and_changes_the_fingerprint(tiny_folder: Path, tmp_path: Path) -> None:
    lm = gerund.load(tiny_folder, exit_layer=EXIT)
    assert lm.encoder.attention.k is None
    assert lm.spec.k == AttentionPlan().with_defaults(EXIT).k
    assert lm.fingerprint() != gerund.load(tiny_folder, k=lm.spec.k).fingerprint()
    again = gerund.load(gerund.load(lm.spec).save(tmp_path / "saved") or tmp_path / "saved")
    assert again.encoder.exit_layer == EXIT
    np.testing.assert_array_equal(again.encode(TEXTS), lm.encode(TEXTS))
    whole = gerund.load(tmp_path / "saved", exit_layer="auto", k="auto")
    np.testing.assert_array_equal(whole.encode(TEXTS), gerund.load(tiny_folder).encode(TEXTS))
    assert settings_from(saved_fields(EncoderSpec.of_config(lm.encoder))).applied_to(EncoderConfig()) == lm.encoder
    assert "exit_layer" not in saved_fields(EncoderSpec.of_config(EncoderConfig()))


def test_mistakes_are_one_sentence(tiny_folder: Path, tmp_path: Path) -> None:
    for settings, why in (
        ({"exit_layer": N_LAYERS + 1}, f"exit_layer={N_LAYERS + 1}: the model has {N_LAYERS} layers"),
        ({"exit_layer": 0}, "exit_layer must be at least 1, got 0"),
        ({"exit_layer": 2, "k": 3}, "k=3 is larger than the model's 2 layers"),
        ({"exit_layer": 2, "layers": "3"}, "layers=3: the model has 2 layers"),
    ):
        with pytest.raises(ConfigError, match=why):
            gerund.load(tiny_folder, **settings)
    lm = gerund.load(tiny_folder, attention="causal", exit_layer=2)
    with pytest.raises(ConfigError, match="takes no exit_layer"):
        lm.encode_and_prefill("A dog")
    (tmp_path / "texts.txt").write_text("A dog")
    ran = run_cli("embed", tmp_path / "texts.txt", "-o", tmp_path / "out.npy", "-m", tiny_folder, "--exit-layer", 99)
    assert "exit_layer=99: the model has" in ran.mistake


@pytest.mark.slow
@pytest.mark.parametrize("format", ["sentence-transformers", pytest.param("onnx", marks=pytest.mark.full)])
def test_an_export_leaves_the_upper_layers_out(tiny_folder: Path, tmp_path: Path, format: str) -> None:
    lm = gerund.load(tiny_folder, attention="bidir", exit_layer=EXIT, dtype="float32")
    lm.export(tmp_path / "out", format)
    assert lm.model.config.num_hidden_layers == N_LAYERS == lm.n_layers
    if format == "sentence-transformers":
        again = gerund.load(tmp_path / "out", dtype="float32")
        assert (again.n_layers, again.encoder.exit_layer) == (EXIT, None)
        np.testing.assert_allclose(again.encode(TEXTS), lm.encode(TEXTS), atol=1e-5)
    with pytest.raises(ConfigError, match="an export as merged takes no exit_layer"):
        lm.export(tmp_path / "merged", "merged")
