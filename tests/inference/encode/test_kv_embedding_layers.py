"""KV-Embedding against keys and values that are really put before the text, one text at a time."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import repeat_kv

import gerund
from gerund import AttentionPlan, ConfigError, EncoderConfig, UnsupportedModelError
from gerund.attention.interface import FUSED
from gerund.attention.masks import visible
from gerund.inference.encode.kv_embedding_layers import chosen_layers, intrinsic_dimension
from gerund.language_model import LanguageModel
from gerund.settings.model_spec import parse_encoder_spec
from gerund.settings.templates import rerouted_layers
from tests.inference.encode.test_methods import ROOM, TEXTS, build

PROMPT = "Context: {} Compress the Context in one word:"


class Slow:
    """An attention function that puts the last key and value before the others, in some layers."""

    def __init__(self, layers: set[int], lm: LanguageModel) -> None:
        self.layers, self.lm = layers, lm

    def __call__(self, module, query, key, value, attention_mask, scaling=None, **kwargs):
        del attention_mask
        length, groups = query.shape[2], query.shape[1] // key.shape[1]
        keys, values = repeat_kv(key, groups), repeat_kv(value, groups)
        view = self.lm.runtime.plan.views[module.layer_idx]
        window = kwargs.get("sliding_window")
        see = visible(view, length, real_BT=None, span_BT=None, window=window, device=query.device)
        see = see.expand(1, 1, length, length)
        if module.layer_idx in self.layers:
            keys = torch.cat([keys[:, :, -1:], keys], dim=2)
            values = torch.cat([values[:, :, -1:], values], dim=2)
            see = torch.cat([torch.ones(1, 1, length, 1, dtype=torch.bool), see], dim=3)
        scores = query @ keys.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        if module.layer_idx in self.layers:
            scores[..., 0] += 1.0
        weights = scores.masked_fill(~see, -torch.inf).softmax(dim=-1)
        return (weights @ values).transpose(1, 2).contiguous(), None


def slow_states(lm: LanguageModel, text: str, layers: set[int]) -> torch.Tensor:
    """The last hidden states ``(T, D)`` of one text."""
    functions, config = AttentionInterface._global_mapping, lm.model.config
    own = functions[FUSED]
    assert config._attn_implementation == FUSED
    functions[FUSED] = Slow(layers, lm)
    try:
        with torch.no_grad():
            return lm.model.base_model(**lm.tokenizer(text, return_tensors="pt")).last_hidden_state[0]
    finally:
        functions[FUSED] = own


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("reroute", ["3", "2-3", "all"])
@pytest.mark.parametrize("model_type", ["llama", "gpt2", "qwen3", "mistral"])
def test_rerouting_equals_a_key_put_before_the_text(model_type: str, reroute: str, side: str) -> None:
    lm = build(model_type, side=side, template="kv-embedding", pooling="last-mean", pool_prompt=True, reroute=reroute)
    layers = {number - 1 for number in rerouted_layers(reroute, 4)}
    slow = []
    for text in TEXTS:
        states = slow_states(lm, PROMPT.format(text), layers)
        slow.append((states[-1] + states.mean(0)) / 2)
    np.testing.assert_allclose(lm.encode(TEXTS, normalize=False), torch.stack(slow).numpy(), atol=3e-5, rtol=1e-4)
    plain = lm.with_encoder(replace(lm.encoder, reroute="none"))
    assert not np.allclose(lm.encode(TEXTS), plain.encode(TEXTS), atol=1e-3)


@pytest.mark.parametrize("plan", ["mask0-bidir", "inplace-back", "mask0-all"])
def test_under_another_plan_the_key_has_more_weight_where_it_is_seen_already(plan: str) -> None:
    lm = build(attention=AttentionPlan(plan), reroute="2-4", pooling="last")
    slow = [slow_states(lm, text, {1, 2, 3})[-1] for text in TEXTS]
    np.testing.assert_allclose(lm.encode(TEXTS, normalize=False), torch.stack(slow).numpy(), atol=3e-5, rtol=1e-4)


def test_the_first_token_comes_to_know_of_the_last() -> None:
    lm = build(reroute="2", template="none")
    plain = build()
    [one], [other] = (lm.encode_tokens([text]) for text in ("the cat sat", "the cat ran"))
    assert not np.allclose(one[0], other[0], atol=1e-4)
    [one], [other] = (plain.encode_tokens([text]) for text in ("the cat sat", "the cat ran"))
    np.testing.assert_array_equal(one[:3], other[:3])


def test_a_template_brings_its_pooling(tiny_folder) -> None:
    lm = gerund.load(tiny_folder, attention="causal", template="kv-embedding", reroute="2-3")
    assert (lm.encoder.pooling, lm.encoder.pool_prompt, lm.encoder.reroute) == ("last-mean", True, "2-3")
    said = parse_encoder_spec("causal:template=kv-embedding,pooling=mean,pool_prompt=false").applied_to(lm.encoder)
    assert (said.pooling, said.pool_prompt) == ("mean", False)


def test_a_saved_folder_keeps_the_layers(tiny_folder, tmp_path) -> None:
    lm = gerund.load(tiny_folder, attention="causal", reroute="2-3", max_length=60)
    lm.save(tmp_path / "saved")
    again = gerund.load(tmp_path / "saved")
    assert again.encoder == lm.encoder
    assert again.fingerprint() == lm.fingerprint()
    assert again.fingerprint() != gerund.load(tiny_folder, attention="causal", max_length=60).fingerprint()
    np.testing.assert_array_equal(again.encode(TEXTS[:1]), lm.encode(TEXTS[:1]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reroute": "9"}, "reroute=9: the model has 4 layers"),
        ({"reroute": "0-2"}, "layers are counted from 1"),
        ({"reroute": "middle"}, "none of none, all, 6, 4-8 and 1"),
        ({"reroute": "4-2"}, "runs backwards"),
        ({"reroute": "2", "attention": "inter-back"}, "for plans that run each layer once, not for"),
        ({"reroute": "2", "attention": "causal", "skips": 1}, "reroute and skips do not go together"),
    ],
)
def test_what_cannot_be_is_one_sentence(tiny_folder, settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        gerund.load(tiny_folder, **settings)


@pytest.mark.parametrize("model_type", ["mpt", "bloom", "mamba"])
def test_what_cannot_be_rerouted_is_refused(model_type: str) -> None:
    lm = build_any(model_type)
    assert lm.encode("the cat").shape == (lm.dimensions,)
    with pytest.raises(
        UnsupportedModelError, match=r"reroute is for attention|cannot have its last token's key before"
    ):
        lm.with_encoder(EncoderConfig(AttentionPlan("causal"), reroute="2")).encode("the cat")


def test_exact_where_attention_takes_a_mask() -> None:
    """GPT-J computes attention by itself: the mask of a rerouted layer is what it adds."""
    lm = build_any("gptj")
    lm = lm.with_encoder(EncoderConfig(AttentionPlan("causal"), reroute="all"))
    for text, one in zip(TEXTS, lm.encode_tokens(TEXTS), strict=True):
        np.testing.assert_allclose(one, lm.encode_tokens([text])[0], atol=3e-5, rtol=1e-4)


def build_any(model_type: str) -> LanguageModel:
    from tests.tiny import byte_tokenizer, tiny

    tokenizer = byte_tokenizer()
    tokenizer.model_max_length = ROOM
    return LanguageModel(tiny(model_type, vocab_size=len(tokenizer)), tokenizer, EncoderConfig(AttentionPlan("causal")))


def test_the_dimension_of_a_surface_is_found() -> None:
    generator = torch.Generator().manual_seed(0)
    for wanted in (1, 2, 5):
        flat = torch.randn(1500, wanted, generator=generator) @ torch.randn(wanted, 40, generator=generator)
        assert intrinsic_dimension(flat) == pytest.approx(wanted, rel=0.12)


def test_layers_are_those_of_the_lowest_dimension(tiny_folder) -> None:
    assert chosen_layers([9.0, 8, 7, 6, 5, 4, 3, 2, 3, 4]) == [8, 9]
    assert chosen_layers([1.0, 9, 5, 9, 3, 9, 4, 9, 8, 9]) == [5, 7]  # not U-shaped: none of the first fifth
    lm = gerund.load(tiny_folder)
    texts = [f"{one} cat {other} the mat" for one in ("the", "a", "one", "my") for other in ("on", "by", "near")]
    chosen = lm.rerouting_layers(texts)
    assert set(rerouted_layers(chosen, 4)) <= {1, 2, 3, 4}
    assert chosen == lm.rerouting_layers(texts)
    with pytest.raises(gerund.DataError, match="too few to estimate a dimension"):
        lm.rerouting_layers(["a"])
