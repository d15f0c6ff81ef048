"""A folder runs as transformers runs it, or with its weights rounded to blocks."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from gerund.errors import ConfigError, ModelError
from gerund.packed.network import PackedNetwork
from gerund.packed.shape import MODEL_TYPES
from tests.models.test_gguf_architectures import CASES, SMALL, built
from tests.packed.test_architectures import IDS, PACKED

FOLDERS = {
    **{name: case[1:] for name, case in PACKED.items()},
    "mistral": ("mistral", dict(SMALL, sliding_window=3)),
    "qwen2, windows": ("qwen2", dict(SMALL, sliding_window=3, use_sliding_window=True, max_window_layers=1)),
}


def saved(folder: Path, kind: str, config: dict, **shards: str) -> torch.nn.Module:
    model = built(kind, config)
    model.save_pretrained(str(folder), **shards)
    return model


def states(model: torch.nn.Module) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor(IDS), use_cache=False).logits.numpy()


def logits(folder: Path, **options: object) -> np.ndarray:
    return PackedNetwork.open(folder, threads=1, **options).run(IDS, outputs=["logits"]).logits


@pytest.mark.parametrize("case", FOLDERS)
def test_unrounded_weights_compute_what_transformers_computes(tmp_path: Path, case: str):
    model = saved(tmp_path, *FOLDERS[case])
    found = logits(tmp_path, weights="float32", accuracy=0)
    np.testing.assert_allclose(found, states(model), atol=2e-4, rtol=1e-3)


def test_every_architecture_is_tried():
    assert {kind for kind, _ in FOLDERS.values()} == set(MODEL_TYPES)


@pytest.mark.parametrize(("weights", "kind"), [("int8", "Q8_0"), ("int4", "Q4_1")])
def test_weights_are_rounded_as_llama_cpp_rounds_them(tmp_path: Path, weights: str, kind: str):
    model = saved(tmp_path, "llama", SMALL)
    plain = states(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Rows that are no whole blocks stay as they are.
            if name.endswith(("proj.weight", "lm_head.weight")) and parameter.shape[1] % 32 == 0:
                stored = gguf.GGMLQuantizationType["Q8_0" if name == "lm_head.weight" else kind]
                rounded = gguf.quants.dequantize(gguf.quants.quantize(parameter.numpy(), stored), stored)
                parameter.copy_(torch.from_numpy(rounded))
    assert np.abs(states(model) - plain).max() > 1e-3
    found = logits(tmp_path, weights=weights, accuracy=0)
    np.testing.assert_allclose(found, states(model), atol=2e-4, rtol=1e-3)
    assert np.corrcoef(logits(tmp_path, weights=weights).ravel(), found.ravel())[0, 1] > 0.998


def test_half_precision_and_several_files(tmp_path: Path):
    built("llama", SMALL).to(torch.bfloat16).save_pretrained(str(tmp_path), max_shard_size="20KB")
    model = AutoModelForCausalLM.from_pretrained(str(tmp_path), dtype=torch.float32)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    found = logits(tmp_path, weights="float32", accuracy=0)
    np.testing.assert_allclose(found, states(model), atol=2e-4, rtol=1e-3)


def test_settings_of_older_versions(tmp_path: Path):
    model = saved(tmp_path, *CASES["gemma3"][1:])
    config = json.loads((tmp_path / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope["full_attention"]["rope_theta"]
    config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
    del config["layer_types"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"sliding_window_pattern": 6}))
    np.testing.assert_allclose(logits(tmp_path, weights="float32", accuracy=0), states(model), atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "phimoe"}, "its model type is 'phimoe'"),
        ({"hidden_act": "relu"}, "its activation is 'relu'"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "scaled by 'dynamic'"),
        ({"num_hidden_layers": "two"}, "not that of a model"),
        ({"num_hidden_layers": 3}, "attention_norm_2 are missing"),
        ({"intermediate_size": 30}, r"gate_proj\.weight is \(48, 32\), not \(30, 32\)"),
    ],
)
def test_folders_that_are_refused(tmp_path: Path, changes: dict, message: str):
    saved(tmp_path, "llama", SMALL)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(ModelError, match=message):
        PackedNetwork.open(tmp_path)


def test_what_is_missing(tmp_path: Path):
    with pytest.raises(ModelError, match="config"):
        PackedNetwork.open(tmp_path)
    saved(tmp_path, "llama", SMALL)
    with pytest.raises(ConfigError, match="int8 or int4, not 'int3'"):
        PackedNetwork.open(tmp_path, weights="int3")  # type: ignore[arg-type]
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        PackedNetwork.open(tmp_path)
