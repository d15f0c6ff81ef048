"""Linear layers in 8 bits: against the same rounding written out, and what a model makes of them."""

import gc
import threading

import numpy as np
import pytest
import torch
from torch.nn import functional

import gerund
from gerund.errors import ConfigError, ModelError
from gerund.inference.encode import runtime as precision_check
from gerund.inference.generate.compiled_step import without_hooks
from gerund.models import fast_lora, int8_matmul, loading
from gerund.models.adapters import adapter_computation
from gerund.models.int8_matmul import Int8Linear, cpu_has_int8
from gerund.scoring.t5 import T5Scorer
from tests.adapters import PEFT_WARNINGS, make_adapter
from tests.tiny import save_tiny, save_tiny_t5

TEXTS = ["the cat", "a dog in the garden and another thing", "x"]
pytestmark = [
    pytest.mark.skipif(not cpu_has_int8(), reason="this processor has no products in 8 bits"),
    pytest.mark.filterwarnings(*PEFT_WARNINGS),
]


@pytest.fixture(autouse=True)
def tiny_too(monkeypatch):
    """Let weights as small as those of tiny models be read in 8 bits."""
    monkeypatch.setattr(int8_matmul, "_SMALLEST", 8)


def by_hand(input_NI, weight_OI, bias_O=None):
    """Round and multiply number by number."""
    out_NO = np.zeros((len(input_NI), len(weight_OI)))
    for row, token in enumerate(input_NI.double().tolist()):
        step = max(abs(number) for number in token) / 127
        whole = [int(np.floor(number / step + 0.5)) for number in token]
        for column, weights in enumerate(weight_OI.double().tolist()):
            own = max(abs(number) for number in weights) / 127
            total = sum(a * round(b / own) for a, b in zip(whole, weights, strict=True))
            out_NO[row, column] = total * step * own + (0 if bias_O is None else float(bias_O[column]))
    return out_NO


@torch.no_grad()
@pytest.mark.parametrize("bias", [True, False])
def test_products_are_those_written_out(bias):
    torch.manual_seed(0)
    layer, input_NI = Int8Linear(24, 16, bias=bias), torch.randn(7, 24)
    with int8_matmul.int8_matmul():
        found_NO = layer(input_NI)
    np.testing.assert_allclose(found_NO, by_hand(input_NI, layer.weight, layer.bias), atol=1e-5)
    exact_NO = layer(input_NI)
    assert 1e-4 < (found_NO - exact_NO).abs().max() < 0.05 * exact_NO.abs().max()


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_comes_out_as_it_went_in(dtype):
    torch.manual_seed(0)
    layer, input_BTI = Int8Linear(64, 32).to(dtype), torch.randn(2, 3, 64).to(dtype)
    with int8_matmul.int8_matmul():
        found_BTO = layer(input_BTI)
    assert found_BTO.dtype == dtype
    assert found_BTO.shape == (2, 3, 32)
    slow_NO = by_hand(input_BTI.view(6, 64), layer.weight, layer.bias)
    np.testing.assert_allclose(found_BTO.float().view(6, 32), slow_NO, atol=0.03)


@torch.no_grad()
def test_under_autocast_the_type_is_autocasts():
    layer, input_NI = Int8Linear(64, 32), torch.randn(5, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16), int8_matmul.int8_matmul():
        assert layer(input_NI).dtype == torch.bfloat16


@torch.no_grad()
def test_a_token_does_not_depend_on_those_beside_it():
    torch.manual_seed(0)
    layer, input_NI = Int8Linear(384, 128), torch.randn(50, 384) * torch.logspace(-3, 3, 50)[:, None]
    with int8_matmul.int8_matmul():
        whole_NO = layer(input_NI)
        assert all(torch.equal(layer(input_NI[row : row + 1])[0], whole_NO[row]) for row in range(50))


@torch.no_grad()
def test_nothing_and_what_is_no_number():
    layer, input_NI = Int8Linear(16, 16), torch.randn(4, 16)
    input_NI[1] = 0
    input_NI[2, 3] = torch.nan
    with int8_matmul.int8_matmul():
        found_NO = layer(input_NI)
        assert layer(input_NI[:0]).shape == (0, 16)
    assert torch.equal(found_NO[1], layer.bias)
    assert found_NO[2].isnan().all()
    assert found_NO[[0, 1, 3]].isfinite().all()


@torch.no_grad()
def test_changed_weights_and_inputs_are_rounded_anew():
    torch.manual_seed(0)
    layer, input_NI = Int8Linear(16, 16, bias=False), torch.randn(4, 16)
    with int8_matmul.int8_matmul():
        before = layer(input_NI)
        input_NI.mul_(2)
        torch.testing.assert_close(layer(input_NI), 2 * before)
        layer.weight.mul_(3)
        torch.testing.assert_close(layer(input_NI), 6 * before)


def test_where_it_does_not_pay_or_gradients_are_wanted_nothing_changes():
    torch.manual_seed(0)
    narrow, input_NI = Int8Linear(16, 4), torch.randn(4, 16)
    with torch.no_grad(), int8_matmul.int8_matmul():
        assert torch.equal(narrow(input_NI), functional.linear(input_NI, narrow.weight, narrow.bias))
    layer = Int8Linear(16, 16)
    with int8_matmul.int8_matmul():
        with_gradients = layer(input_NI)
    assert torch.equal(with_gradients, layer(input_NI))
    with_gradients.sum().backward()
    assert layer.weight.grad is not None


@torch.no_grad()
def test_what_was_rounded_goes_with_the_weight():
    before = len(int8_matmul._packed)
    layer = Int8Linear(16, 16)
    with int8_matmul.int8_matmul():
        layer(torch.randn(4, 16))
    assert len(int8_matmul._packed) == before + 1
    del layer
    gc.collect()
    assert len(int8_matmul._packed) == before


def test_a_model_encodes_in_8_bits_and_writes_as_before(tmp_path):
    folder = save_tiny(tmp_path / "base", "llama")
    adapter = make_adapter(folder, tmp_path / "lora", target_modules="all-linear")
    own, lm = (gerund.load(folder, k=2, adapter=adapter, device="cpu", dtype=one) for one in ("float32", "int8"))
    assert lm.compute_dtype == torch.int8
    assert lm.model.dtype == torch.float32
    assert lm.fingerprint() == own.fingerprint()
    exact, found = own.encode(TEXTS), lm.encode(TEXTS)
    assert 1e-5 < 1 - (exact * found).sum(1).min() < 0.02
    assert lm.generate(TEXTS, 6) == own.generate(TEXTS, 6)
    assert any(type(module) is Int8Linear for module in lm.model.modules())
    assert not any(
        type(module) is Int8Linear for module in without_hooks(lm.model).modules()
    )  # a compiler reads that one
    assert lm.with_encoder(lm.encoder).compute_dtype == torch.int8
    assert not lm.runtime.in_own_type().int8


@pytest.mark.parametrize("kind", ["t5", "gemma2", "qwen2_moe", "gpt2"])
def test_other_architectures(tmp_path, kind):
    folder = save_tiny_t5(tmp_path / kind) if kind == "t5" else save_tiny(tmp_path / kind, kind)
    exact, found = (gerund.load(folder, device="cpu", dtype=one).encode(TEXTS) for one in ("float32", "int8"))
    assert (exact * found).sum(1).min() > 0.98


def test_other_threads_compute_as_before():
    layer, input_NI, found = Int8Linear(16, 16), torch.randn(4, 16), []
    with torch.no_grad():
        exact = layer(input_NI)

    @torch.no_grad()
    def other():
        found.append(layer(input_NI))

    with torch.no_grad(), int8_matmul.int8_matmul():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert not torch.equal(layer(input_NI), exact)
    assert torch.equal(found[0], exact)


@pytest.mark.parametrize("largest", [2**29, 0], ids=["merged", "low-rank"])
def test_adapters_are_read_both_ways(tmp_path, monkeypatch, largest):
    monkeypatch.setattr(fast_lora, "LARGEST_COPIES", largest)
    folder = save_tiny(tmp_path / "base", "llama")
    adapter = make_adapter(folder, tmp_path / "lora", target_modules="all-linear")
    lm = gerund.load(folder, k=2, adapter=adapter, device="cpu", dtype="int8")
    assert adapter_computation(lm.model).way == ("merged" if largest else "low-rank")
    exact = gerund.load(folder, k=2, adapter=adapter, device="cpu", dtype="float32").encode(TEXTS)
    assert 1e-5 < 1 - (exact * lm.encode(TEXTS)).sum(1).min() < 0.02


def test_the_bundled_model_hardly_changes():
    own, lm = gerund.load(device="cpu", dtype="float32"), gerund.load(device="cpu", dtype="int8")
    texts = ["A cat sleeps.", "The central bank raised its rates. " * 20, "Rain."]
    assert (own.encode(texts) * lm.encode(texts)).sum(1).min() > 0.9995


def test_who_cannot_have_it_is_told(tmp_path, monkeypatch):
    folder = save_tiny(tmp_path / "base", "llama")
    with pytest.raises(ConfigError, match="whitening scales small directions up"):
        gerund.load(folder, device="cpu", dtype="int8", transform="whitening").fitted(TEXTS * 40)
    with pytest.raises(ConfigError, match="support int8"):
        T5Scorer.load(folder, dtype="int8")
    monkeypatch.setattr(precision_check, "int8_cosine", lambda runtime: 0.97)
    with pytest.raises(ModelError, match=r"falls to 0\.970"):
        gerund.load(folder, device="cpu", dtype="int8")
    monkeypatch.setattr(loading, "cpu_has_int8", lambda: False)
    with pytest.raises(ConfigError, match="this one has neither"):
        gerund.load(folder, device="cpu", dtype="int8")
