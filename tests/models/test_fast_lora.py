"""LoRA layers read quickly: what PEFT makes of them, at no more cost, and never in the way of the untouched weights."""

from pathlib import Path

import numpy as np
import pytest
import torch

import gerund
from gerund.models import adapters
from gerund.models.adapters import active_adapter, adapter_computation
from tests.adapters import PEFT_WARNINGS, make_adapter
from tests.tiny import save_tiny

TEXTS = ["the cat", "a dog in the garden and another thing", "x"]
pytestmark = pytest.mark.filterwarnings(*PEFT_WARNINGS)


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    base = save_tiny(tmp_path / "base", "llama")
    return base, make_adapter(base, tmp_path / "lora", target_modules="all-linear")


def load(folders, dtype="float32"):
    return gerund.load(folders[0], k=2, adapter=folders[1], dtype=dtype)


def by_peft(lm, texts=TEXTS):
    """What PEFT's own layers give."""
    layers = [module for module in lm.model.modules() if getattr(module, "gerund_fast", None)]
    before = [layer.gerund_fast for layer in layers]
    assert layers
    for layer in layers:
        layer.gerund_fast = {}
    try:
        return lm.encode(texts)
    finally:
        for layer, own in zip(layers, before, strict=True):
            layer.gerund_fast = own


@pytest.mark.parametrize("largest", [2**29, 0], ids=["merged", "low-rank"])
def test_both_ways_are_what_peft_computes(folders, monkeypatch, largest):
    monkeypatch.setattr(adapters, "LARGEST_COPIES", largest)
    lm = load(folders)
    assert adapter_computation(lm.model).way == ("merged" if largest else "low-rank")
    np.testing.assert_allclose(lm.encode(TEXTS), by_peft(lm), atol=2e-6)
    plain = gerund.load(folders[0], k=2, dtype="float32").encode(TEXTS)
    assert np.abs(lm.encode(TEXTS) - plain).max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("largest", [2**29, 0], ids=["merged", "low-rank"])
def test_in_bfloat16_they_differ_from_float32_no_more_than_peft_does(folders, monkeypatch, largest):
    monkeypatch.setattr(adapters, "LARGEST_COPIES", largest)
    exact, rounded = load(folders).encode(TEXTS), load(folders, "bfloat16")
    own, peft = ((exact * vectors).sum(1) for vectors in (rounded.encode(TEXTS), by_peft(rounded)))
    assert (1 - own).max() < 2 * (1 - peft).max() + 1e-4


def test_gradients_go_peft_s_way(folders):
    lm = load(folders)
    layer = next(module for module in lm.model.modules() if getattr(module, "gerund_fast", None))
    weight = layer.lora_B["encode"].weight.requires_grad_(True)
    with active_adapter("encode"):
        layer(torch.randn(2, layer.base_layer.in_features)).sum().backward()
    assert weight.grad is not None
    assert weight.grad.abs().sum() > 0


def test_changed_weights_are_seen(folders):
    lm = load(folders)
    before = lm.encode(TEXTS)
    layers = [module for module in lm.model.modules() if getattr(module, "gerund_fast", None)]
    with torch.no_grad():
        for layer in layers:
            layer.lora_B["encode"].weight.mul_(0)
    plain = gerund.load(folders[0], k=2, dtype="float32").encode(TEXTS)
    np.testing.assert_allclose(lm.encode(TEXTS), plain, atol=2e-6)
    assert np.abs(before - plain).max() > 1e-3
    with torch.no_grad():
        layers[0].base_layer.weight.add_(0.1)
    assert np.abs(lm.encode(TEXTS) - plain).max() > 1e-3


def test_other_adapters_are_left_to_peft(tmp_path):
    base = save_tiny(tmp_path / "base", "llama")
    dora = make_adapter(base, tmp_path / "dora", target_modules=["q_proj"], use_dora=True)
    lm = gerund.load(base, k=2, adapter=dora, dtype="float32")
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
