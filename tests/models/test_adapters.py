"""An adapter changes what is encoded and never what is written, by PEFT's layers and by gerund's quicker ones."""

import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import gerund
from gerund import AttentionPlan, Sampling
from gerund.errors import ConfigError, DataError, ModelError
from gerund.models import adapters
from gerund.models.adapters import (
    active_adapter,
    adapter_computation,
    base_state,
    count_parameters,
    load_adapters,
)
from tests.adapters import PEFT_WARNINGS, make_adapter
from tests.models.test_loading import refusal
from tests.threads import at_once
from tests.tiny import save_tiny

TEXTS = ["the cat", "a dog in the garden and another thing", "x"]
IDS = torch.arange(3, 20)[None]
pytestmark = pytest.mark.filterwarnings(
    *PEFT_WARNINGS, "ignore:The following:RuntimeWarning", "ignore:.*checkpointing:FutureWarning"
)

KINDS: dict[str, dict] = {
    "lora": {},
    "dora": {"use_dora": True},
    "rslora": {"use_rslora": True},
    "all-linear": {"target_modules": "all-linear"},
    "embeddings": {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
    "embeddings kept whole": {"modules_to_save": ["embed_tokens"]},
    "norm and head kept whole": {"modules_to_save": ["norm", "lm_head"]},
    "dropout": {"lora_dropout": 0.5},
}
ARCHITECTURES: dict[str, dict] = {
    "gpt2": {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True},  # its layers are transposed
    "qwen2_moe": {"target_modules": "all-linear"},
    "deepseek_v3": {"target_modules": "all-linear"},
}


@pytest.fixture(scope="module")
def adapter_folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(tiny_folder, tmp_path_factory.mktemp("adapters") / "lora")


@pytest.fixture(scope="module")
def tied_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tied", tie_word_embeddings=True)


@pytest.fixture(params=[*KINDS, *(f"tied, {kind}" for kind in KINDS if "kept" in kind or kind == "embeddings")])
def adapted(request, tiny_folder: Path, tied_folder: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A model's folder and an adapter for it."""
    tied, kind = request.param.startswith("tied, "), request.param.removeprefix("tied, ")
    base = tied_folder if tied else tiny_folder
    return base, make_adapter(base, tmp_path / "lora", **KINDS[kind])


def load(folder: Path, adapter: Path | None = None, **options) -> gerund.LanguageModel:
    return gerund.load(folder, adapter=adapter, dtype="float32", **options)


def peft_means(base: Path, adapter: Path, lm: gerund.LanguageModel) -> np.ndarray:
    """Encode with nothing but PEFT, one text at a time, causally, mean over all tokens."""
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter).eval()
    with torch.no_grad():
        rows = [lm.tokenizer(text, return_tensors="pt").input_ids for text in TEXTS]
        return torch.cat([model.base_model.model.base_model(ids).last_hidden_state.mean(1) for ids in rows]).numpy()


@torch.no_grad()
def logits(lm: gerund.LanguageModel) -> torch.Tensor:
    return lm.model(IDS).logits


def check_encoding(base: Path, adapter: Path, out: Path) -> None:
    plain, lm = load(base, attention="causal"), load(base, adapter, attention="causal")
    assert torch.equal(logits(lm), logits(plain))
    written = [[item.token_ids for item in one.generate(TEXTS, max_new_tokens=4)] for one in (lm, plain)]
    assert written[0] == written[1]
    found = lm.encode(TEXTS, normalize=False)
    assert np.abs(found - plain.encode(TEXTS, normalize=False)).max() > 0.1
    np.testing.assert_allclose(found, peft_means(base, adapter, lm), atol=1e-5)
    own, before = base_state(lm.model), plain.model.state_dict()
    assert own.keys() == before.keys()
    assert all(torch.equal(own[name], before[name]) for name in own)

    lm.save(out)
    again = load(out, attention="causal")
    assert np.array_equal(again.encode(TEXTS, normalize=False), found)
    assert again.fingerprint() == lm.fingerprint() != plain.fingerprint()
    assert torch.equal(AutoModelForCausalLM.from_pretrained(out)(IDS).logits, logits(plain))
    saved, original = (load_file(folder / "model.safetensors") for folder in (out, base))
    assert saved.keys() == original.keys()
    assert all(torch.equal(saved[name], original[name]) for name in saved)
    assert sorted(path.name for path in (out / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


def check_merging(base: Path, adapter: Path, out: Path) -> None:
    lm = load(base, adapter, k=2)
    before = {name: tensor.clone() for name, tensor in lm.model.state_dict().items()}
    lm.export(out, "merged")
    merged = load(out)
    np.testing.assert_allclose(merged.encode(TEXTS), lm.encode(TEXTS), atol=1e-5)
    assert merged.fingerprint() in (out / "gerund.json").read_text()
    assert merged.adapters.folders == {}
    assert merged.encoder.attention == lm.encoder.attention.with_defaults(4)
    with active_adapter("encode"):
        np.testing.assert_allclose(logits(merged), logits(lm), atol=1e-4)
    assert all(torch.equal(before[name], tensor) for name, tensor in lm.model.state_dict().items())


@pytest.mark.sweep(quick=0, check=4)
def test_every_kind(adapted: tuple[Path, Path], tmp_path: Path) -> None:
    check_encoding(*adapted, tmp_path / "saved")
    check_merging(*adapted, tmp_path / "merged")


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture(name: str, tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base", name)
    adapter = make_adapter(base, tmp_path / "lora", **ARCHITECTURES[name])
    check_encoding(base, adapter, tmp_path / "saved")
    check_merging(base, adapter, tmp_path / "merged")


def test_half_precision(tiny_folder: Path, adapter_folder: Path, tmp_path: Path) -> None:
    plain = gerund.load(tiny_folder, dtype="bfloat16")
    lm = gerund.load(tiny_folder, adapter=adapter_folder, dtype="bfloat16")
    assert torch.equal(logits(lm), logits(plain))
    lm.export(tmp_path / "merged", "merged")
    merged = gerund.load(tmp_path / "merged", dtype="bfloat16")
    assert merged.model.dtype == torch.bfloat16
    assert (merged.encode(TEXTS) * lm.encode(TEXTS)).sum(axis=1).min() > 0.999


def test_the_switch_belongs_to_the_thread(tiny_folder: Path, adapter_folder: Path) -> None:
    lm = load(tiny_folder, adapter_folder)
    inactive = logits(lm)
    with active_adapter("encode"):
        adapted = logits(lm)
        seen: list[torch.Tensor] = []
        thread = threading.Thread(target=lambda: seen.append(logits(lm)))
        thread.start()
        thread.join()
    assert not torch.equal(adapted, inactive)
    assert torch.equal(seen[0], inactive)
    assert torch.equal(logits(lm), inactive)
    with pytest.raises(ValueError, match="x"), active_adapter("encode"):
        raise ValueError("x")
    assert torch.equal(logits(lm), inactive)


def test_an_adapter_is_not_counted_among_the_parameters(tiny_folder: Path, adapter_folder: Path) -> None:
    plain, adapted = gerund.load(tiny_folder).model, gerund.load(tiny_folder, adapter=adapter_folder).model
    own = sum(parameter.numel() for parameter in plain.parameters())
    assert count_parameters(plain) == count_parameters(adapted) == own
    assert sum(parameter.numel() for parameter in adapted.parameters()) > own


@pytest.mark.slow
def test_saving_over_the_folder_that_it_came_from(tiny_folder: Path, adapter_folder: Path, tmp_path: Path) -> None:
    lm = load(tiny_folder, adapter_folder)
    lm.save(tmp_path / "out")
    again = load(tmp_path / "out")
    again.save(tmp_path / "out", overwrite=True)
    assert load(tmp_path / "out").fingerprint() == lm.fingerprint()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hidden_size": 64}, "does not fit this model"),
        ({"num_hidden_layers": 6}, "is not for this model: it has weights for"),
        ({"num_hidden_layers": 2}, "is not for this model: it lacks weights for"),
        ({"model_type": "gpt2"}, "does not fit this model"),
    ],
)
def test_an_adapter_for_another_model(tiny_folder: Path, tmp_path: Path, changes: dict, says: str) -> None:
    layers = {"target_modules": ["c_attn"]} if "model_type" in changes else {}
    adapter = make_adapter(save_tiny(tmp_path / "other", **changes), tmp_path / "lora", **layers)
    assert says in refusal(tiny_folder, adapter=adapter)


ALWAYS = "changes the model even while it is inactive"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"bias": "all"}, ALWAYS),
        ({"bias": "lora_only"}, ALWAYS),
        ({"init_lora_weights": "pissa"}, ALWAYS),
        ({"trainable_token_indices": [3, 4]}, "trains single tokens"),
    ],
)
def test_an_adapter_that_would_change_what_is_written(tmp_path: Path, settings: dict, says: str) -> None:
    base = save_tiny(tmp_path / "base", "qwen2")
    assert says in refusal(base, adapter=make_adapter(base, tmp_path / "lora", **settings))


def test_a_prompt_tuning(tiny_folder: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_folder)
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    get_peft_model(model, config).save_pretrained(tmp_path / "prompt")
    assert "changes no layer" in refusal(tiny_folder, adapter=tmp_path / "prompt")


def test_one_that_cannot_be_merged(tiny_folder: Path, tmp_path: Path) -> None:
    adapter = make_adapter(tiny_folder, tmp_path / "lora", lora_bias=True)
    lm = load(tiny_folder, adapter)
    with pytest.raises(ModelError, match="cannot be merged into the weights"):
        lm.export(tmp_path / "out", "merged")
    assert not (tmp_path / "out").exists()


def test_folders_that_are_no_adapters(tiny_folder: Path, adapter_folder: Path, tmp_path: Path) -> None:
    assert "it has no adapter_config.json" in refusal(tiny_folder, DataError, adapter=tmp_path)
    spoiled = shutil.copytree(adapter_folder, tmp_path / "spoiled")
    (spoiled / "adapter_model.safetensors").write_bytes(b"x")
    assert "cannot be read: Error while deserializing" in refusal(tiny_folder, adapter=spoiled)
    (spoiled / "adapter_model.safetensors").unlink()
    (spoiled / "adapter_model.bin").write_bytes(b"x")
    assert "has no adapter_model.safetensors" in refusal(tiny_folder, DataError, adapter=spoiled)
    shutil.copy(adapter_folder / "adapter_model.safetensors", spoiled)
    (spoiled / "adapter_config.json").write_text("{")
    assert "does not fit this model" in refusal(tiny_folder, adapter=spoiled)


def test_only_one_adapter(tiny_folder: Path, adapter_folder: Path) -> None:
    lm = load(tiny_folder, adapter_folder)
    with pytest.raises(ConfigError, match="carries an adapter already"):
        load_adapters(lm.model, {"encode": adapter_folder})


SPAN = ("the old man", " looked at", " the sea")
SAMPLED = Sampling(temperature=1.0, top_p=0.9, seed=3)
ROUNDS = 6
LAYERS = {"llama": ["q_proj", "v_proj", "down_proj"], "gpt2": ["c_attn", "c_proj"]}


@pytest.fixture(params=["llama", "gpt2"])
def models(request, tmp_path: Path) -> tuple[gerund.LanguageModel, gerund.LanguageModel]:
    """The same model without and with an adapter."""
    base = save_tiny(tmp_path / "base", request.param)
    adapter = make_adapter(base, tmp_path / "lora", target_modules=LAYERS[request.param])
    return tuple(gerund.load(base, k=2, adapter=folder, dtype="float32") for folder in (None, adapter))


def same(one: object, other: object) -> bool:
    if isinstance(one, (np.ndarray, torch.Tensor)):
        return bool((one == other).all())
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def inactive(lm: gerund.LanguageModel) -> dict[str, Callable[[], object]]:
    """Return the verbs that an adapter takes no part in."""
    return {
        "logits": lambda: logits(lm),
        "generate": lambda: lm.generate(TEXTS, 4, SAMPLED),
        "stream": lambda: list(lm.stream(TEXTS[0], 4)),
        "left only": lambda: lm.span_logprobs(*SPAN, mode="causal"),
    }


def verbs_with_adapter(lm: gerund.LanguageModel) -> dict[str, Callable[[], object]]:
    """Return the verbs that it takes part in: encoding, under plans of every kind, and infilling."""
    plans = [AttentionPlan(name) for name in ("causal", "bidir", "mask0-bidir", "inter-back", "extra-bidir")]
    encoders = {plan.name: lm.with_encoder(replace(lm.encoder, attention=plan)) for plan in plans}
    found = {name: (lambda own=own: own.encode(TEXTS)) for name, own in encoders.items()}
    return found | {
        "tokens": lambda: lm.encode_tokens(TEXTS),
        "both sides": lambda: lm.span_logprobs(*SPAN, mode="infill"),
        "infill": lambda: lm.infill("a dog in [blank] thing", lengths=[2, 3]).scores,
    }


@pytest.mark.slow
def test_no_verb_ever_sees_the_weights_of_another(models) -> None:
    plain, lm = models
    verbs = inactive(lm) | verbs_with_adapter(lm)
    wanted = {name: verb() for name, verb in (inactive(plain) | verbs_with_adapter(lm)).items()}
    without = {name: verb() for name, verb in verbs_with_adapter(plain).items()}
    assert not any(same(wanted[name], without[name]) for name in without)
    found = {name: verb() for name, verb in verbs.items()}
    assert [name for name in verbs if not same(found[name], wanted[name])] == []

    def repeat(name: str) -> bool:
        return all(same(verbs[name](), wanted[name]) for _ in range(ROUNDS))

    found = at_once([partial(repeat, name) for name in verbs])
    assert dict(zip(verbs, found, strict=True)) == dict.fromkeys(verbs, True)


@pytest.fixture
def fast(tiny_folder: Path, tmp_path: Path) -> Callable[..., gerund.LanguageModel]:
    """Loads the tiny model with an adapter that gerund computes more quickly than PEFT."""
    adapter = make_adapter(tiny_folder, tmp_path / "lora", target_modules="all-linear")
    return partial(gerund.load, tiny_folder, adapter=adapter, k=2)


def by_peft(lm, texts=TEXTS):
    """What PEFT's own layers give."""
    layers = [module for module in lm.model.modules() if getattr(module, "gerund_fast", None)]
    assert layers
    with pytest.MonkeyPatch.context() as patch:
        for layer in layers:
            patch.setattr(layer, "gerund_fast", {})
        return lm.encode(texts)


@pytest.mark.parametrize("largest", [2**29, 0], ids=["merged", "low-rank"])
def test_both_ways_are_what_peft_computes(fast, monkeypatch, largest):
    monkeypatch.setattr(adapters, "LARGEST_COPIES", largest)
    lm = fast(dtype="float32")
    assert adapter_computation(lm.model).way == ("merged" if largest else "low-rank")
    np.testing.assert_allclose(lm.encode(TEXTS), by_peft(lm), atol=2e-6)
    plain = fast(dtype="float32", adapter=None).encode(TEXTS)
    assert np.abs(lm.encode(TEXTS) - plain).max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("largest", [2**29, 0], ids=["merged", "low-rank"])
def test_in_bfloat16_they_differ_from_float32_no_more_than_peft_does(fast, monkeypatch, largest):
    monkeypatch.setattr(adapters, "LARGEST_COPIES", largest)
    exact, rounded = fast(dtype="float32").encode(TEXTS), fast(dtype="bfloat16")
    own, peft = ((exact * vectors).sum(1) for vectors in (rounded.encode(TEXTS), by_peft(rounded)))
    assert (1 - own).max() < 2 * (1 - peft).max() + 1e-4


def test_gradients_go_peft_s_way(fast):
    lm = fast(dtype="float32")
    layer = next(module for module in lm.model.modules() if getattr(module, "gerund_fast", None))
    weight = layer.lora_B["encode"].weight.requires_grad_(True)
    with active_adapter("encode"):
        layer(torch.randn(2, layer.base_layer.in_features)).sum().backward()
    assert weight.grad is not None
    assert weight.grad.abs().sum() > 0


def test_changed_weights_are_seen(fast):
    lm = fast(dtype="float32")
    before = lm.encode(TEXTS)
    layers = [module for module in lm.model.modules() if getattr(module, "gerund_fast", None)]
    with torch.no_grad():
        for layer in layers:
            layer.lora_B["encode"].weight.mul_(0)
    plain = fast(dtype="float32", adapter=None).encode(TEXTS)
    np.testing.assert_allclose(lm.encode(TEXTS), plain, atol=2e-6)
    assert np.abs(before - plain).max() > 1e-3
    with torch.no_grad():
        layers[0].base_layer.weight.add_(0.1)
    assert np.abs(lm.encode(TEXTS) - plain).max() > 1e-3


def test_other_adapters_are_left_to_peft(tiny_folder, tmp_path):
    lm = load(tiny_folder, make_adapter(tiny_folder, tmp_path / "dora", target_modules=["q_proj"], use_dora=True))
    found = adapter_computation(lm.model)
    assert found.way is None
    assert found.others > 0
    assert "PEFT" in found.summary()
    assert lm.encode(TEXTS).shape == (3, lm.dimensions)


def test_the_bundled_model_s_are_merged_copies(bundled):
    found = adapter_computation(bundled.model)
    assert found.way == "merged"
    assert found.others == 0
    assert found.copies <= adapters.LARGEST_COPIES
    assert "as quickly as the model without" in found.summary()
