"""Quantised checkpoints load, encode and generate where the kernels are, and else say what is missing."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

import gerund
from gerund.errors import ModelError
from gerund.models.weights import PACKINGS, _is_installed
from tests import ready_made
from tests.tiny import save_tiny

TEXTS = ["a dog in the garden", "an owl"]


def change(folder, **quantization):
    ready_made.change(folder / "config.json", quantization_config=quantization)


@pytest.mark.parametrize("method", [name for name, packing in PACKINGS.items() if packing.packages])
def test_what_is_missing_is_said(method, tiny_folder, tmp_path):
    packing = PACKINGS[method]
    gpu = packing.needs_gpu and not torch.cuda.is_available()
    absent = [pip for module, pip in packing.packages if not _is_installed(module)]
    if not (absent or gpu):
        pytest.skip(f"{method} runs here")
    folder = shutil.copytree(tiny_folder, tmp_path / "packed")
    change(folder, quant_method=method)
    with pytest.raises(ModelError) as caught:
        gerund.load(folder)
    said = str(caught.value)
    assert said.startswith(f"cannot load {folder}: ")
    assert f"quantized as {packing.name}, " in said
    assert "use a GGUF file of this model" in said
    assert "only a CUDA GPU computes with" in said if gpu else f"pip install {absent[0]}" in said


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "quantized as bitsandbytes"),
        ({"quant_method": "modelopt"}, "quantized as 'modelopt'"),
        ({"quant_method": ["fp8"]}, r"quantized as \['fp8'\]"),
        ({"bits": 4, "group_size": 64}, "packed for MLX"),
    ],
)
def test_other_settings(settings, says, tiny_folder, tmp_path):
    folder = shutil.copytree(tiny_folder, tmp_path / "packed")
    change(folder, **settings)
    if "load_in_4bit" in settings and _is_installed("bitsandbytes"):
        pytest.skip("bitsandbytes is installed")
    with pytest.raises(ModelError, match=says):
        gerund.load(folder)


def test_the_table_has_the_packings_of_transformers():
    """Those that a folder of safetensors can have; NVFP4 cannot be read from one, and Gemma's is for its own models."""
    known = {name.removesuffix("_4bit").removesuffix("_8bit") for name in AUTO_QUANTIZATION_CONFIG_MAPPING}
    assert known - {"gguf", "nvfp4", "gemma"} <= set(PACKINGS)
    page = (Path(__file__).resolve().parents[2] / "docs" / "how-to" / "get-a-model.md").read_text()
    assert [packing.name for packing in PACKINGS.values() if packing.name not in page] == []


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


def to_mlx(folder, plain):
    """Store the linear layers in four bits with a scale and an offset for each 16; `plain` gets the values."""
    stored = load_file(folder / "model.safetensors")
    meant = dict(stored)
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in stored if "proj" in name and name.endswith("weight")]:
        rows, width = stored.pop(name).shape
        codes = torch.randint(0, 16, (rows, width // 16, 16), generator=generator)
        scale, offset = 0.02 * torch.rand(2, rows, width // 16, generator=generator)
        base = name.removesuffix("weight")
        shifts = 4 * torch.arange(8)
        packed = (codes.reshape(rows, -1, 8) << shifts).sum(-1).to(torch.uint32)
        stored |= {name: packed, f"{base}scales": scale, f"{base}qbiases": -8 * offset}
        meant[name] = (codes * scale[..., None] - 8 * offset[..., None]).reshape(rows, width)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    save_file(meant, plain / "model.safetensors", {"format": "pt"})
    change(folder, quant_method="metal", bits=4, group_size=16)


NO_GPU = pytest.mark.skipif(
    torch.cuda.is_available(), reason="a GPU has kernels for four bits, which need large experts"
)
NO_MPS = pytest.mark.skipif(torch.backends.mps.is_available(), reason="this machine has kernels for it")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "pack"),
    [pytest.param("gpt_oss", to_mxfp4, marks=NO_GPU), pytest.param("llama", to_mlx, marks=NO_MPS)],
)
def test_few_bits_are_the_numbers_that_they_mean(tmp_path, model_type, pack):
    folders = [save_tiny(tmp_path / name, model_type, intermediate_size=64) for name in ("packed", "plain")]
    pack(*folders)
    lm, plain = (gerund.load(folder, attention="mask0-bidir", k=2, dtype="float32") for folder in folders)
    assert abs(lm.encode(TEXTS) - plain.encode(TEXTS)).max() < 1e-5
    assert lm.generate(TEXTS, 4) == plain.generate(TEXTS, 4)
    lm.save(tmp_path / "saved")
    again = gerund.load(tmp_path / "saved", dtype="float32")
    assert abs(again.encode(TEXTS) - lm.encode(TEXTS)).max() < 1e-5
