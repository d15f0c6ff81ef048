"""Adapters bundled with gerund, for models downloaded separately, and whether two models have the same weights.

The folders of adapters are as gerund saves them, without the weights of the model. That model, the base, is recognized
by its numbers, its tokens and a sample of its weights, whatever they are stored as. Norms are never quantized, and must
be the same. Of matrices, the stored value lies within half a step of the original one; so what two files store may be
at most both their half steps apart, which a model that was trained further soon is. Imports no torch.
"""

from collections.abc import Callable, Sequence
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
# Values that share the step of a quantization, in every type.
_GROUP = 16
_HALF_PRECISION = 2.0**-8
_SLACK = 1.05
# Tensors that are missing, or stored in a way that nothing here reads.
_UNREADABLE = (ModelError, NotImplementedError, ValueError, IndexError)
# Types whose step was chosen for the mean error cut off a few values; those of a model trained further are more.
MOST_BEYOND = 0.01
"""The share of sampled weights that may be further from the other's than storing them explains."""


@dataclass(frozen=True)
class WeightSample:
    """Rows of a model's weights.

    Attributes:
        rows: the numbers of the rows by the tensor's name; of a vector none, since all of it is compared.
        tensors: the rows themselves, float32.
    """

    rows: dict[str, list[int]]
    tensors: dict[str, np.ndarray]

    @classmethod
    def of(cls, files: Sequence[Path], n_layers: int) -> "WeightSample":
        """Read a sample.

        Args:
            files: the weights of a model: one GGUF file, or the files of a folder in safetensors.
            n_layers: how many layers it has, of which a few are read.

        Raises:
            ModelError: a tensor is missing or cannot be read.
        """
        read = _reader(files)
        chosen = sorted({round(place * (n_layers - 1) / (_LAYERS - 1)) for place in range(_LAYERS)})
        rows: dict[str, list[int]] = {}
        tensors: dict[str, np.ndarray] = {}
        for kind, (name, _) in _NAMES.items():
            for layer in chosen if "{}" in name else [""]:
                part = read(kind, str(layer), None)
                count = min(len(part), _ROWS.get(kind, len(part)))
                numbers = np.linspace(0, len(part) - 1, count).round().astype(int)
                key = f"{kind}.{layer}" if layer != "" else kind
                rows[key], tensors[key] = ([] if part.ndim == 1 else numbers.tolist()), part[numbers]
        return cls(rows, tensors)

    def beyond(self, files: Sequence[Path]) -> float:
        """Return the share of the sample that is further from a model's weights than storing both explains.

        Raises:
            ModelError: a tensor is missing, of another size, or cannot be read.
        """
        read, worst = _reader(files), 0.0
        counts: dict[str, list[int]] = {}
        for name, rows in self.rows.items():
            kind, _, layer = name.partition(".")
            expected, actual = self.tensors[name], read(kind, layer, np.array(rows))
            if expected.shape != actual.shape:
                raise ModelError(f"{name} is of another size")
            too_far = np.abs(actual - expected) > _SLACK * (_half_step(actual) + _half_step(expected))
            count = counts.setdefault(kind, [0, 0])
            count[0] += int(too_far.sum())
            count[1] += too_far.size
        for beyond, total in counts.values():
            worst = max(worst, beyond / total)
        return worst

    def is_of(self, files: Sequence[Path]) -> bool:
        """Whether weights are those that were sampled, however they are stored."""
        try:
            return self.beyond(files) <= MOST_BEYOND
        except _UNREADABLE:
            return False


def same_weights(files: Sequence[Path], others: Sequence[Path], n_layers: int) -> bool:
    """Whether files hold the weights of others; False for an architecture whose tensors have other names."""
    try:
        return WeightSample.of(others, n_layers).is_of(files)
    except _UNREADABLE:
        return False


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


BASE, SAMPLE = "base.json", "base.safetensors"
"""What is in a folder of adapters to recognize their base by: numbers and tokens, and a sample of its weights."""

# What is compared of a config.
_NUMBERS = ("num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads", "intermediate_size")


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

    @property
    def sample(self) -> WeightSample:
        """A sample of the weights of the base."""
        stored, rows = SafetensorsFile(self.folder / SAMPLE), self.base["sample"]
        return WeightSample(rows, {name: stored[name] for name in rows})


def bundled_folders() -> list[Path]:
    """Return the folders of adapters that come with gerund."""
    assets = Path(str(resources.files("gerund") / "assets"))
    return sorted(path.parent for path in assets.glob(f"*/{BASE}"))


def bundled_for(spec: ModelSpec, config: Any, files: Callable[[], Sequence[Path]]) -> BundledAdapters | None:
    """Return the adapters that come with gerund for a model; None where there are none or the user wants none.

    ``files`` returns the model's weights, and is called for a config like that of a base alone.
    """
    if not takes_bundled(spec):
        return None
    fitting = (bundle for bundle in map(BundledAdapters, bundled_folders()) if bundle.fits_config(config))
    return next((bundle for bundle in fitting if bundle.sample.is_of(files())), None)


def takes_bundled(spec: ModelSpec) -> bool:
    """Whether a model's settings leave its adapters to gerund."""
    return spec.adapter == AUTO_ADAPTER or (spec.adapter is None and not spec.says_reading)


def tell_bundled(name: str) -> None:
    """Say that a model encodes with an adapter that was not asked for."""
    say_once(
        f"{name} encodes with the adapter that comes with gerund for it. The setting adapter (--adapter): none encodes "
        "without it, auto leaves out this note"
    )


def numbers_of(config: Any) -> dict[str, Any]:
    """Return the numbers of an architecture that are compared."""
    return {"model_type": config.model_type, **{name: getattr(config, name, None) for name in _NUMBERS}}
