"""Adapters that come with gerund, for models that do not: folders as gerund saves them, but without the weights.

A base is recognized by its numbers, its tokens and a sample of its weights, whatever they are stored as: norms are
never quantized, and must be the same. Of matrices, the stored value lies within half a step of the original one; so
what two files store may be at most both their half steps apart, which a model that was trained further soon is.
Imports no torch.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from gerund.checks import read_json
from gerund.errors import ModelError
from gerund.gguf_file import read_file
from gerund.packed.safetensors_file import SafetensorsFile
from gerund.progress import say_once
from gerund.settings.fields import AUTO_ADAPTER
from gerund.settings.model_spec import ModelSpec

BASE, SAMPLE = "base.json", "base.safetensors"
"""What is in a folder of adapters to recognize their base by: numbers and tokens, and a sample of its weights."""

# Names of what is sampled in a GGUF file and in a folder; at most so many rows of each.
_NAMES = {
    "final_norm": ("output_norm.weight", "model.norm.weight"),
    "embeddings": ("token_embd.weight", "model.embed_tokens.weight"),
    "attention_norm": ("blk.{}.attn_norm.weight", "model.layers.{}.input_layernorm.weight"),
    "feed_norm": ("blk.{}.ffn_norm.weight", "model.layers.{}.post_attention_layernorm.weight"),
    "value": ("blk.{}.attn_v.weight", "model.layers.{}.self_attn.v_proj.weight"),
    "output": ("blk.{}.attn_output.weight", "model.layers.{}.self_attn.o_proj.weight"),
    "gate": ("blk.{}.ffn_gate.weight", "model.layers.{}.mlp.gate_proj.weight"),
    "down": ("blk.{}.ffn_down.weight", "model.layers.{}.mlp.down_proj.weight"),
}
_ROWS = {"embeddings": 32, "value": 4, "output": 4, "gate": 4, "down": 2}
_LAYERS = 6
# What is compared of a config.
_NUMBERS = ("num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads", "intermediate_size")
_TEXT = "Naïve cafés — 12,345 µm of snow; def f(x): return x['key'] \n\t日本語 <|end|>"
# Values that share the step of a quantization, in every type.
_GROUP = 16
_HALF_PRECISION = 2.0**-8
_SLACK = 1.05
# Types whose step was chosen for the mean error cut off a few values; those of a model trained further are more.
MOST_BEYOND = 0.01
"""The share of sampled weights that may be further from the base's than storing them explains."""


@dataclass(frozen=True)
class BundledAdapters:
    """A folder of adapters that come with gerund."""

    folder: Path

    @cached_property
    def base(self) -> dict[str, Any]:
        """What ``base.json`` says."""
        data = read_json(self.folder / BASE)
        assert isinstance(data, dict)
        return data

    def fits_config(self, config: Any) -> bool:
        """Whether a config has the numbers of the base."""
        return bool(numbers_of(config) == self.base["numbers"])

    def fits_tokens(self, tokenizer: Any) -> bool:
        """Whether a tokenizer reads a text as that of the base does."""
        return bool(tokenizer([self.base["text"]], add_special_tokens=False)["input_ids"] == [self.base["ids"]])

    def beyond(self, files: Sequence[Path]) -> float:
        """Return the share of sampled weights that are further from the base's than storing them explains.

        Args:
            files: the weights of a model: one GGUF file, or the files of a folder in safetensors.

        Raises:
            ModelError: a tensor is missing or cannot be read.
        """
        read = _reader(files)
        worst, sample = 0.0, SafetensorsFile(self.folder / SAMPLE)
        counts: dict[str, list[int]] = {}
        for name, rows in self.base["sample"].items():
            kind, _, layer = name.partition(".")
            expected, actual = sample[name], read(kind, layer, np.array(rows))
            if expected.shape != actual.shape:
                raise ModelError(f"{name} is of another size")
            too_far = np.abs(actual - expected) > _SLACK * (_half_step(actual) + _half_step(expected))
            count = counts.setdefault(kind, [0, 0])
            count[0] += int(too_far.sum())
            count[1] += too_far.size
        for beyond, total in counts.values():
            worst = max(worst, beyond / total)
        return worst

    def recognizes(self, files: Sequence[Path]) -> bool:
        """Whether weights are those of the base, however they are stored."""
        try:
            return self.beyond(files) <= MOST_BEYOND
        except (ModelError, NotImplementedError, ValueError, IndexError):
            return False  # stored in a way that nothing here reads


def bundled_folders() -> list[Path]:
    """Return the folders of adapters that come with gerund."""
    assets = Path(str(resources.files("gerund") / "assets"))
    return sorted(path.parent for path in assets.glob(f"*/{BASE}"))


def bundled_for(spec: ModelSpec, config: Any, files: Callable[[], Sequence[Path]]) -> BundledAdapters | None:
    """Return the adapters that come with gerund for a model; None where there are none or the user wants none.

    ``files`` returns the model's weights, and is called for a config like that of a base alone.
    """
    if not (spec.adapter == AUTO_ADAPTER or (spec.adapter is None and not spec.says_reading)):
        return None
    fitting = (bundle for bundle in map(BundledAdapters, bundled_folders()) if bundle.fits_config(config))
    return next((bundle for bundle in fitting if bundle.recognizes(files())), None)


def tell_bundled(name: str) -> None:
    """Say that a model encodes with an adapter that was not asked for."""
    say_once(
        f"{name} encodes with the adapter that comes with gerund for it; adapter none loads the model alone (and "
        "adapter auto does not say this)"
    )


def numbers_of(config: Any) -> dict[str, Any]:
    """Return the numbers of an architecture that are compared."""
    return {"model_type": config.model_type, **{name: getattr(config, name, None) for name in _NUMBERS}}


def write_base(folder: Path, config: Any, tokenizer: Any, files: Sequence[Path]) -> None:
    """Write into a folder of adapters how their base is recognized."""
    read, layers = _reader(files), config.num_hidden_layers
    chosen = sorted({round(place * (layers - 1) / (_LAYERS - 1)) for place in range(_LAYERS)})
    sample: dict[str, list[int]] = {}
    tensors: dict[str, np.ndarray] = {}
    for kind, (name, _) in _NAMES.items():
        for layer in chosen if "{}" in name else [""]:
            part = read(kind, str(layer), None)
            count = min(len(part), _ROWS.get(kind, len(part)))
            rows = np.linspace(0, len(part) - 1, count).round().astype(int) if part.ndim > 1 else np.arange(count)
            key = f"{kind}.{layer}" if layer != "" else kind
            sample[key], tensors[key] = ([] if part.ndim == 1 else rows.tolist()), part[rows]
    base = {
        "numbers": numbers_of(config),
        "text": _TEXT,
        "ids": tokenizer(_TEXT, add_special_tokens=False)["input_ids"],
        "sample": sample,
    }
    (folder / BASE).write_text(json.dumps(base, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    _write(tensors, folder / SAMPLE)


def _write(tensors: Mapping[str, np.ndarray], path: Path) -> None:
    from safetensors.numpy import save_file

    save_file({name: np.ascontiguousarray(tensor, np.float16) for name, tensor in tensors.items()}, str(path))


def _reader(files: Sequence[Path]) -> Callable[[str, str, np.ndarray | None], np.ndarray]:
    """Return a function that reads rows of a tensor, float32, all with None; of a vector all numbers."""
    if len(files) and files[0].suffix != ".safetensors":
        tensors = read_file(files[0]).tensors

        def from_gguf(kind: str, layer: str, rows: np.ndarray | None) -> np.ndarray:
            name = _NAMES[kind][0].format(layer)
            if name not in tensors.infos:
                raise ModelError(f"{name} is missing")
            return tensors.read(name, None if len(tensors.infos[name].shape) == 1 else rows)

        return from_gguf
    places = {name: file for file in map(SafetensorsFile, files) for name in file}

    def from_folder(kind: str, layer: str, rows: np.ndarray | None) -> np.ndarray:
        name = _NAMES[kind][1].format(layer)
        if name not in places:
            raise ModelError(f"{name} is missing")
        return places[name][name] if rows is None or not len(rows) else places[name].rows(name, rows)

    return from_folder


def _half_step(values: np.ndarray) -> np.ndarray:
    """Return how far a value may be from the one that was stored, judged by the values beside it.

    Quantized values are whole multiples of a step, the same for a group of them: half the smallest distance of two.
    """
    rounding = np.abs(values) * np.float32(_HALF_PRECISION) + np.float32(1e-6)
    if values.ndim == 1 or values.shape[-1] % _GROUP:
        return rounding
    groups = values.reshape(-1, _GROUP)
    gaps = np.diff(np.sort(groups, axis=1), axis=1)
    # Of equal values, after bfloat16 too, the distance is no step.
    gaps[gaps <= rounding.reshape(-1, _GROUP).max(axis=1, keepdims=True) / 2] = np.inf
    step = gaps.min(axis=1, keepdims=True)
    step[~np.isfinite(step)] = 0
    return np.broadcast_to(step / 2, groups.shape).reshape(values.shape) + rounding
