"""An adapter of a packed network computes what peft computes, and is left out where it is not wanted."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model

from gerund.errors import ConfigError, ModelError
from gerund.packed.network import PackedNetwork
from tests.models.gguf_writer import write_gguf
from tests.models.test_gguf_architectures import CASES, TOKENIZER, built

IDS = np.random.default_rng(0).integers(3, 259, (2, 9))


def saved(folder: Path, case: str, **details: Any) -> tuple[Path, Path, dict[bool, np.ndarray]]:
    """Return a file, an adapter of it, and the states without and with the adapter."""
    arch, kind, config = CASES[case]
    model = built(kind, config)
    path = write_gguf(model, TOKENIZER, folder / "model.gguf", arch)
    torch.manual_seed(0)
    adapted = get_peft_model(model, LoraConfig(**{"r": 4, "lora_alpha": 6, "init_lora_weights": False, **details}))
    adapted.save_pretrained(str(folder / "adapter"))
    states = {}
    with torch.no_grad():
        states[True] = model.model(torch.tensor(IDS)).last_hidden_state.numpy()
        with adapted.disable_adapter():
            states[False] = model.model(torch.tensor(IDS)).last_hidden_state.numpy()
    return path, folder / "adapter", states


pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # raised by peft
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.mark.parametrize(
    ("case", "details"),
    [
        ("llama", {"target_modules": ALL}),
        ("olmo2", {"target_modules": ["q_proj", "v_proj", "up_proj"], "use_rslora": True}),
        ("gemma3", {"target_modules": ["k_proj", "down_proj"], "rank_pattern": {"k_proj": 2},
                    "alpha_pattern": {"layers.1.self_attn.k_proj": 9}}),
    ],
)  # fmt: skip
def test_an_adapter_is_used_when_it_is_wanted(tmp_path: Path, case: str, details: dict[str, Any]):
    path, adapter, expected = saved(tmp_path, case, **details)
    network = PackedNetwork.open(path, threads=1, accuracy=0, adapters={"encode": adapter})
    assert np.abs(expected[True] - expected[False]).max() > 0.01
    for adapted in (True, False, True):
        states = network.run(IDS, adapted="encode" if adapted else None).states
        np.testing.assert_allclose(states, expected[adapted], atol=2e-4, rtol=1e-3)
    # ONNX Runtime shares memory in this order, and copies any other.
    assert all(factor.flags.c_contiguous for pair in network.adapters["encode"].factors.values() for factor in pair)
    with pytest.raises(ConfigError, match="without an adapter"):
        PackedNetwork.open(path, threads=1, accuracy=0).run(IDS, adapted="encode")


def test_several_adapters_in_one_graph(tmp_path: Path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    path, adapter, expected = saved(tmp_path / "a", "llama", target_modules=["q_proj", "up_proj"])
    lower = {"target_modules": ["q_proj", "down_proj"], "r": 2, "layers_to_transform": [1]}
    _, other, others = saved(tmp_path / "b", "llama", **lower)
    np.testing.assert_array_equal(expected[False], others[False])  # the same weights
    assert np.abs(expected[True] - others[True]).max() > 0.01
    network = PackedNetwork.open(path, threads=1, accuracy=0, adapters={"a": adapter, "b": other})
    for name, states in (("a", expected[True]), ("b", others[True]), (None, expected[False]), ("a", expected[True])):
        np.testing.assert_allclose(network.run(IDS, adapted=name).states, states, atol=2e-4, rtol=1e-3)


def test_other_adapters_are_refused(tmp_path: Path):
    path, adapter, _ = saved(tmp_path, "llama", target_modules=["q_proj"], use_dora=True)
    with pytest.raises(ModelError, match="use_dora"):
        PackedNetwork.open(path, adapters={"encode": adapter})
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "use_dora": False}))
    with pytest.raises(ModelError, match="magnitude_vector, which is not run packed"):
        PackedNetwork.open(path, adapters={"encode": adapter})
    (adapter / "adapter_model.safetensors").write_bytes(b"1234567890")
    with pytest.raises(ModelError, match="exceeds the file"):
        PackedNetwork.open(path, adapters={"encode": adapter})
    with pytest.raises(ModelError, match="cannot load the adapter"):
        PackedNetwork.open(path, adapters={"encode": tmp_path})
