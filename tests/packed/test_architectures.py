"""Each architecture computes what transformers computes from the same file."""

from pathlib import Path

import numpy as np
import pytest
import torch

from gerund.errors import ModelError
from gerund.packed import network as packed_network
from gerund.packed.network import KeyValues, PackedNetwork
from gerund.packed.shape import MODEL_TYPES
from tests.models.gguf_writer import write_gguf
from tests.models.test_gguf_architectures import CASES, HEADED, SMALL, TOKENIZER, YARN, built

LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.5, 2.0, 3.0],
        "long_factor": [1.0, 4.0, 8.0, 9.0], "original_max_position_embeddings": 16}  # fmt: skip
PACKED = {
    **{name: case for name, case in CASES.items() if case[1] in MODEL_TYPES},
    "phi3, long": ("phi3", "phi3", dict(
        SMALL, rope_parameters=LONG, max_position_embeddings=512, original_max_position_embeddings=16)),
    "gemma3, linear": ("gemma3", "gemma3_text", {**CASES["gemma3"][2], "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}}),
    "qwen3, yarn": ("qwen3", "qwen3", dict(HEADED, rope_parameters=YARN)),
}  # fmt: skip
IDS = np.random.default_rng(0).integers(3, 259, (1, 40))


@pytest.mark.parametrize("case", PACKED)
def test_architecture(tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch):
    arch, kind, config = PACKED[case]
    model = built(kind, config)
    path = write_gguf(model, TOKENIZER, tmp_path / "model.gguf", arch)
    network = PackedNetwork.open(path, threads=1, accuracy=0)
    with torch.no_grad():
        expected = model(torch.tensor(IDS), output_hidden_states=True, use_cache=False)
    run = network.run(IDS, outputs=["logits", "hidden_states"])
    for mine, other in zip(run.hidden_states, expected.hidden_states, strict=True):
        np.testing.assert_allclose(mine, other.numpy(), atol=2e-4, rtol=1e-3)
    np.testing.assert_allclose(run.logits, expected.logits.numpy(), atol=2e-4, rtol=1e-3)
    cache = KeyValues(network.shape, 1, 48)
    monkeypatch.setattr(packed_network, "_MOST_AT_ONCE", 32)
    parts: list[None] = []
    begun = network.run(IDS[:, :33], cache=cache, outputs=["logits"], between=lambda: parts.append(None))
    assert len(parts) == 2
    np.testing.assert_allclose(begun.logits, run.logits[:, :33], atol=2e-4, rtol=1e-3)
    if network.shape.ropes[0].long_divisors is not None:
        return  # a text that has become long keeps the keys of a short one
    steps = [
        network.run(IDS[:, place : place + 1], cache=cache, write_B=np.array([place]), outputs=["logits"]).logits
        for place in range(33, 40)
    ]
    np.testing.assert_allclose(np.concatenate(steps, 1), run.logits[:, 33:], atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("case", ["phi2", "qwen3moe", "mixtral"])
def test_others_are_refused_by_name(tmp_path: Path, case: str):
    arch, kind, config = CASES[case]
    path = write_gguf(built(kind, config), TOKENIZER, tmp_path / "model.gguf", arch)
    with pytest.raises(ModelError, match="runtime='torch'"):
        PackedNetwork.open(path)
