"""Read LoRA adapters for the packed network, which applies one only where a run asks for it.

Matrices that read the same values share a product: their first factors stand beside each other, and their second ones
in the columns of their outputs.

Shapes: K inputs, N outputs, R rank.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np

from gerund.errors import ModelError
from gerund.packed.safetensors_file import SafetensorsFile
from gerund.packed.shape import GROUPS, MODULES, NetworkShape

_MATRICES = {module: name for name, module in MODULES.items()}
_NAME = re.compile(r"(?:base_model\.model\.)?model\.layers\.(\d+)\.(\w+\.\w+)\.lora_([AB])\.(?:default\.)?weight")
# Kinds of adapters that compute something else.
_OTHERS = ("use_dora", "modules_to_save", "fan_in_fan_out", "lora_bias", "layer_replication")


@dataclass(frozen=True)
class Adapter:
    """The factors of an adapter.

    Attributes:
        factors: by group and layer, the factors (K, R) and (R, N), the second one scaled.
    """

    factors: Mapping[tuple[str, int], tuple[np.ndarray, np.ndarray]]


Places = tuple[tuple[str, int], ...]
"""The groups and layers that adapters change."""


def places_of(adapters: Iterable[Adapter]) -> Places:
    """Return the places that any of the adapters changes."""
    return tuple(sorted({place for adapter in adapters for place in adapter.factors}))


def inputs_of(adapter: Adapter | None, places: Places, shape: NetworkShape) -> dict[str, np.ndarray]:
    """Return a graph's inputs: an adapter's factors, of rank 0 in places that it doesn't change."""
    inputs: dict[str, np.ndarray] = {}
    for group, layer in places:
        names = GROUPS[group]
        columns, rows = shape.size_of(names[0])[1], sum(shape.size_of(name)[0] for name in names)
        none = np.zeros((columns, 0), np.float32), np.zeros((0, rows), np.float32)
        first, second = none if adapter is None else adapter.factors.get((group, layer), none)
        inputs |= {f"adapter_first_{group}_{layer}": first, f"adapter_second_{group}_{layer}": second}
    return inputs


def read_adapter(folder: Path, shape: NetworkShape) -> Adapter:
    """Read an adapter that peft saved.

    Raises:
        ModelError: it is none, or computes something other than low-rank products of attention and feed-forward.
    """
    try:
        config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot load the adapter {folder}: {error}") from error
    other = next((name for name in _OTHERS if config.get(name)), None)
    if config.get("peft_type") != "LORA" or other or config.get("bias", "none") != "none":
        what = other or f"of type {config.get('peft_type')}"
        raise ModelError(f"the adapter {folder} is {what}, which is not run packed; use runtime='torch'")
    pairs: dict[tuple[int, str], dict[str, np.ndarray]] = {}
    tensors = SafetensorsFile(folder / "adapter_model.safetensors")
    for name in tensors:
        match = _NAME.fullmatch(name)
        if match is None or match[2] not in _MATRICES or int(match[1]) >= shape.n_layers:
            raise ModelError(f"the adapter {folder} has {name}, which is not run packed; use runtime='torch'")
        pairs.setdefault((int(match[1]), match[2]), {})[match[3]] = tensors[name]
    scaled = {}
    for (layer, module), factors in pairs.items():
        first, second = factors.get("A"), factors.get("B")
        rows, columns = shape.size_of(_MATRICES[module])
        if first is None or second is None or first.shape[1] != columns or second.shape[0] != rows:
            raise ModelError(f"the adapter {folder} does not fit the model: {module} of layer {layer}")
        scale = _scale(config, f"model.layers.{layer}.{module}", len(first))
        scaled[_MATRICES[module], layer] = (first.T, second.T * np.float32(scale))
    return Adapter(_grouped(scaled, shape))


def _scale(config: Mapping[str, Any], module: str, rank: int) -> float:
    """Return the factor of a module's product; its alpha may be its own."""
    patterns = config.get("alpha_pattern") or {}
    named = (alpha for key, alpha in patterns.items() if re.fullmatch(rf"(.*\.)?({key})", module))
    alpha = float(next(named, config.get("lora_alpha", rank)))
    return alpha / (sqrt(rank) if config.get("use_rslora") else rank)


def _grouped(
    factors: Mapping[tuple[str, int], tuple[np.ndarray, np.ndarray]], shape: NetworkShape
) -> dict[tuple[str, int], tuple[np.ndarray, np.ndarray]]:
    grouped = {}
    for layer in range(shape.n_layers):
        for group, names in GROUPS.items():
            present = [name for name in names if (name, layer) in factors]
            if not present:
                continue
            width = sum(shape.size_of(name)[0] for name in names)
            seconds = []
            for name in present:
                rows = shape.rows_in(group, name)
                seconds.append(np.pad(factors[name, layer][1], ((0, 0), (rows.start, width - rows.stop))))
            first = np.concatenate([factors[name, layer][0] for name in present], 1)
            # In the order of the graph's inputs, which share this memory.
            grouped[group, layer] = np.ascontiguousarray(first), np.ascontiguousarray(np.concatenate(seconds))
    return grouped
