"""Quantised checkpoints load, encode and generate where the kernels are, and else say what is missing."""

import importlib.util
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import gerund
from gerund.errors import ModelError
from tests.tiny import save_tiny

TEXTS = ["a dog in the garden", "an owl"]
METHODS = {
    "gptq": dict(bits=4, group_size=16),
    "awq": dict(bits=4, group_size=16),
    "bitsandbytes": dict(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "compressed-tensors": dict(format="pack-quantized"),
    "torchao": dict(quant_type="int4_weight_only"),
    "hqq": dict(quant_config={}),
}
# What each needs here; where it is installed, another test would have to be written.
PACKAGES = {"gptq": "gptqmodel", "awq": "gptqmodel", "bitsandbytes": "bitsandbytes", "torchao": "torchao",
            "compressed-tensors": "compressed_tensors", "hqq": "hqq"}  # fmt: skip


def change(folder, **quantization):
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("method", METHODS)
def test_what_is_missing_is_said_in_a_sentence(method, tmp_path):
    if importlib.util.find_spec(PACKAGES[method]):
        pytest.skip(f"{PACKAGES[method]} is installed")
    folder = save_tiny(tmp_path / method)
    change(folder, quant_method=method, **METHODS[method])
    with pytest.raises(ModelError, match="cannot load") as caught:
        gerund.load(folder)
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert method.split("-", maxsplit=1)[0] in sentence.lower() or PACKAGES[method] in sentence


def to_fp8(folder):
    """Store every linear layer of the decoder in eight bits with a scale a block, as DeepSeek's checkpoints are."""
    path = folder / "model.safetensors"
    stored = {}
    for name, weight in load_file(path).items():
        if weight.ndim != 2 or "proj" not in name:
            stored[name] = weight
            continue
        scale = weight.abs().max() / torch.finfo(torch.float8_e4m3fn).max
        stored[name] = (weight / scale).to(torch.float8_e4m3fn)
        blocks = [-(-size // 16) for size in weight.shape]
        stored[f"{name}_scale_inv"] = torch.full(blocks, float(scale))
    save_file(stored, path, {"format": "pt"})
    change(folder, quant_method="fp8", activation_scheme="dynamic", weight_block_size=[16, 16])


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has kernels for eight bits, which need large blocks")
def test_eight_bits_are_read_encode_generate_and_are_saved(tmp_path):
    plain = gerund.load(save_tiny(tmp_path / "plain"), attention="mask0-bidir", k=2, dtype="float32")
    folder = save_tiny(tmp_path / "fp8")
    to_fp8(folder)
    lm = gerund.load(folder, attention="mask0-bidir", k=2, dtype="float32")
    cosine = (lm.encode(TEXTS) * plain.encode(TEXTS)).sum(-1)
    assert (cosine > 0.99).all()
    assert not (cosine == 1).all()
    assert len(lm.generate(TEXTS, 4)) == 2
    lm.save(tmp_path / "saved")
    again = gerund.load(tmp_path / "saved", dtype="float32")
    assert abs(again.encode(TEXTS) - lm.encode(TEXTS)).max() < 1e-5


# The sixteen numbers of four bits: a sign, two bits of exponent, one of mantissa (OCP Microscaling, E2M1).
FOUR_BITS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
FOUR_BITS = torch.cat([FOUR_BITS, -FOUR_BITS])


def to_mxfp4(folder, plain):
    """Store the experts in four bits with an exponent for each 32 numbers, as gpt-oss has; `plain` gets the values."""
    stored = load_file(folder / "model.safetensors")
    meant = dict(stored)
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in stored if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, width, outputs = stored.pop(name).shape
        codes = torch.randint(0, 16, (experts, outputs, width // 32, 32), generator=generator)
        exponents = torch.randint(118, 122, (experts, outputs, width // 32), generator=generator)
        stored[f"{name}_blocks"] = (codes[..., 0::2] + 16 * codes[..., 1::2]).to(torch.uint8)
        stored[f"{name}_scales"] = exponents.to(torch.uint8)
        numbers = FOUR_BITS[codes] * 2.0 ** (exponents[..., None] - 127)
        meant[name] = numbers.reshape(experts, outputs, width).transpose(1, 2).contiguous()
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    save_file(meant, plain / "model.safetensors", {"format": "pt"})
    change(folder, quant_method="mxfp4", modules_to_not_convert=[])


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has kernels for four bits, which need large experts")
def test_four_bits_of_gpt_oss_are_the_numbers_that_they_mean(tmp_path):
    folders = [save_tiny(tmp_path / name, "gpt_oss", intermediate_size=64) for name in ("mxfp4", "plain")]
    to_mxfp4(*folders)
    lm, plain = (gerund.load(folder, attention="mask0-bidir", k=2, dtype="float32") for folder in folders)
    assert abs(lm.encode(TEXTS) - plain.encode(TEXTS)).max() < 1e-5
    assert lm.generate(TEXTS, 4) == plain.generate(TEXTS, 4)
    lm.save(tmp_path / "saved")
    again = gerund.load(tmp_path / "saved", dtype="float32")
    assert abs(again.encode(TEXTS) - lm.encode(TEXTS)).max() < 1e-5
