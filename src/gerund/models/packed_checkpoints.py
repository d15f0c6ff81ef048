"""Checkpoints with quantized weights, by the ``quant_method`` in their config.json: what each needs to run.

transformers reads them. Before it does, what is missing on this machine is reported, with a way on.
"""

import importlib.util
from dataclasses import dataclass
from typing import Any

import torch

from gerund.errors import ModelError


@dataclass(frozen=True)
class Packing:
    """A way to store quantized weights.

    Attributes:
        name: the name that its authors use.
        packages: modules that transformers needs to read it, and the names pip knows them by where these differ.
        needs_gpu: whether only a CUDA GPU computes with it.
        is_unpacked: whether transformers unpacks it to plain weights where no GPU computes with it.
    """

    name: str
    packages: tuple[tuple[str, str], ...] = ()
    needs_gpu: bool = False
    is_unpacked: bool = False


def _of(*modules: str, **pip_names: str) -> tuple[tuple[str, str], ...]:
    return tuple((module, pip_names.get(module.replace(".", "_"), module)) for module in modules)


PACKINGS: dict[str, Packing] = {
    "fp8": Packing("FP8", is_unpacked=True),
    "mxfp8": Packing("MXFP8", is_unpacked=True),
    "mxfp4": Packing("MXFP4", is_unpacked=True),
    "metal": Packing("MLX's integers", is_unpacked=True),
    "bitnet": Packing("BitNet"),
    "gptq": Packing("GPTQ", _of("optimum", "gptqmodel")),
    "awq": Packing("AWQ", _of("gptqmodel")),
    "auto-round": Packing("AutoRound", _of("auto_round", auto_round="auto-round")),
    "bitsandbytes": Packing("bitsandbytes", _of("bitsandbytes")),
    "compressed-tensors": Packing(
        "compressed-tensors", _of("compressed_tensors", compressed_tensors="compressed-tensors")
    ),
    "torchao": Packing("torchao", _of("torchao")),
    "quanto": Packing("Quanto", _of("optimum.quanto", optimum_quanto="optimum-quanto")),
    "quark": Packing("Quark", _of("quark", quark="amd-quark")),
    "aqlm": Packing("AQLM", _of("aqlm", aqlm="aqlm[cpu]")),
    "hqq": Packing("HQQ", _of("hqq"), needs_gpu=True),
    "vptq": Packing("VPTQ", _of("vptq"), needs_gpu=True),
    "spqr": Packing("SpQR", _of("spqr_quant", spqr_quant="spqr_quant[gpu]"), needs_gpu=True),
    "higgs": Packing("HIGGS", _of("flute", flute="flute-kernel"), needs_gpu=True),
    "eetq": Packing("EETQ", _of("kernels"), needs_gpu=True),
    "fbgemm_fp8": Packing("FBGEMM's FP8", _of("fbgemm_gpu", fbgemm_gpu="fbgemm-gpu"), needs_gpu=True),
    "fp_quant": Packing("FP-Quant", _of("fp_quant"), needs_gpu=True),
    "fouroversix": Packing("Four Over Six", _of("fouroversix"), needs_gpu=True),
    "sinq": Packing("SINQ", _of("sinq"), needs_gpu=True),
}
"""Every packing that transformers reads from a folder, by ``quant_method``; docs/how-to/get-a-model.md lists them."""

_WAY_ON = "use a GGUF file of this model, or its checkpoint without quantization"
_MLX = ("group_size", "bits")


def packing_of(stored: Any, name: str) -> Packing | None:
    """Return how a checkpoint's weights are packed, by its config.json; None if they are not.

    Raises:
        ModelError: this machine can't run it, or transformers doesn't read it.
    """
    settings = _settings(stored)
    if settings is None:
        return None
    method = settings.get("quant_method")
    if settings.get("load_in_4bit") or settings.get("load_in_8bit"):
        method = "bitsandbytes"
    if method is None and all(key in settings for key in _MLX):
        raise ModelError(f"cannot load {name}: its weights are packed for MLX, which gerund does not read; {_WAY_ON}")
    packing = PACKINGS.get(method) if isinstance(method, str) else None
    if packing is None:
        known = ", ".join(PACKINGS)
        raise ModelError(
            f"cannot load {name}: its weights are quantized as {method!r} (quantization_config in config.json), which "
            f"is not one of {known}; {_WAY_ON}"
        )
    absent = [pip for module, pip in packing.packages if not _is_installed(module)]
    if packing.needs_gpu and not torch.cuda.is_available():
        raise ModelError(
            f"cannot load {name}: its weights are quantized as {packing.name}, which only a CUDA GPU computes with, "
            f"and there is none; {_WAY_ON}"
        )
    if absent:
        raise ModelError(
            f"cannot load {name}: its weights are quantized as {packing.name}, which needs {' and '.join(absent)} (pip "
            f"install {' '.join(absent)}); or {_WAY_ON}"
        )
    return packing


def _settings(stored: Any) -> dict[str, Any] | None:
    """Return the quantization settings of a config, which multimodal models may have in the config of their text."""
    if not isinstance(stored, dict):
        return None
    for part in (stored, stored.get("text_config")):
        if isinstance(part, dict):
            for key in ("quantization_config", "quantization"):
                if isinstance(part.get(key), dict):
                    settings: dict[str, Any] = part[key]
                    return settings
    return None


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that the module is in
        return False
