"""Combine several LoRA adapters of one model into one, whose rank is the sum of theirs."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from gerund.checks import read_json, write_json
from gerund.errors import ModelError
from gerund.jobs.disk_cache import DiskCache, user_cache
from gerund.models.fingerprint import adapter_hash
from gerund.models.heads import read_tensors
from gerund.models.peft_folders import PEFT_CONFIG, PEFT_WEIGHTS

_PREFIX, _FULL = "base_model.model.", "base_model.model.model."
_DOWN, _UP = ".lora_A.weight", ".lora_B.weight"
# Settings under which an adapter is more than a product of two matrices.
_MORE = ("use_dora", "modules_to_save", "trainable_token_indices", "layer_replication", "lora_bias", "fan_in_fan_out")


def stacked(folders: Sequence[Path]) -> Path:
    """Return a PEFT folder that does what several LoRA adapters do together; it is kept in the user's cache.

    Raises:
        ModelError: one of them is no plain LoRA adapter.
    """
    if len(folders) == 1:
        return folders[0]
    key = hashlib.blake2b("".join(map(adapter_hash, folders)).encode(), digest_size=16).hexdigest()
    cache = DiskCache(user_cache("adapters"))
    cached = cache.get(key)
    if cached is None:
        cache.put(key, lambda folder: _write(folders, folder))
        cached = cache.get(key)
    if cached is None:
        raise ModelError(f"the adapters {' and '.join(map(str, folders))} are too large for the cache {cache.folder}")
    return cached


def _write(folders: Sequence[Path], target: Path) -> None:
    """Put the matrices of all adapters side by side, with the factor of each in its second one."""
    parts: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for folder in folders:
        config = read_json(folder / PEFT_CONFIG)
        _demand_plain(folder, config)
        weights = {key.replace(_FULL, _PREFIX, 1): value for key, value in read_tensors(folder / PEFT_WEIGHTS).items()}
        modules = sorted(key.removesuffix(_DOWN) for key in weights if key.endswith(_DOWN))
        if len(weights) != 2 * len(modules) or any(f"{name}{_UP}" not in weights for name in modules):
            raise ModelError(f"{folder} has weights that are not those of a plain LoRA adapter")
        for name in modules:
            down, up = weights[f"{name}{_DOWN}"].float(), weights[f"{name}{_UP}"].float()
            parts.setdefault(name, []).append((down, up * _factor(config, name, len(down))))
    tensors = {}
    for name, pairs in parts.items():
        tensors[f"{name}{_DOWN}"] = torch.cat([down for down, _ in pairs]).contiguous()
        tensors[f"{name}{_UP}"] = torch.cat([up for _, up in pairs], dim=1).contiguous()
    names = [name.removeprefix(_PREFIX) for name in parts]
    ranks = {name: len(tensors[f"{_PREFIX}{name}{_DOWN}"]) for name in names}
    rank = max(ranks.values())
    others = {name: other_rank for name, other_rank in ranks.items() if other_rank != rank}
    settings = {"peft_type": "LORA", "task_type": "FEATURE_EXTRACTION", "r": rank, "lora_alpha": rank}
    settings |= {"target_modules": names, "rank_pattern": others, "alpha_pattern": others, "bias": "none"}
    write_json(target / PEFT_CONFIG, settings)
    save_file(tensors, target / PEFT_WEIGHTS)


def _demand_plain(folder: Path, config: Any) -> None:
    plain = isinstance(config, dict) and config.get("peft_type") == "LORA" and config.get("bias", "none") == "none"
    if not plain or any(config.get(name) for name in _MORE) or config.get("megatron_config"):
        raise ModelError(
            f"{folder} is no plain LoRA adapter, and only those are used several at a time; merge it first"
        )


def _factor(config: dict[str, Any], name: str, rank: int) -> float:
    """Return by what PEFT multiplies the product of the matrices of a module."""
    patterns = (config.get("alpha_pattern") or {}).items()
    # As PEFT tells which pattern a module's name ends in.
    alpha = next((value for key, value in patterns if name == key or name.endswith(f".{key}")), config["lora_alpha"])
    return float(alpha) / (rank**0.5 if config.get("use_rslora") else rank)
