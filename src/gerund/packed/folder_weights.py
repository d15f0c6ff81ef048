"""A folder's weights by the names that the graph has for them, quantized to blocks of 32 values.

8 bits have one scale a block, as llama.cpp's Q8_0; 4 bits a scale and an offset, as Q4_1. Embeddings and the output
layer have 8 bits in both.
"""

import json
from functools import cached_property
from pathlib import Path
from typing import Literal

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

from gerund.errors import ConfigError, ModelError
from gerund.packed.blocks import Blocks, repack
from gerund.packed.safetensors_file import SafetensorsFile
from gerund.packed.shape import NetworkShape

Precision = Literal["int8", "int4", "float32"]
_TYPES = {"int8": Type.Q8_0, "int4": Type.Q4_1, "float32": None}
_BLOCK = 32

_LAYER = {
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "output": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "attention_norm": "input_layernorm",
    "query_norm": "self_attn.q_norm",
    "key_norm": "self_attn.k_norm",
}
# The norms before the feed-forward network and after both have other names where there are norms after.
_NORMS = {
    False: {"feed_norm": "post_attention_layernorm"},
    True: {
        "attention_after_norm": "post_attention_layernorm",
        "feed_norm": "pre_feedforward_layernorm",
        "feed_after_norm": "post_feedforward_layernorm",
    },
}
_JOINED = {"query": "qkv", "key": "qkv", "value": "qkv", "gate": "gate_up", "up": "gate_up"}
_JOINED_NAMES = {"qkv": "self_attn.qkv_proj", "gate_up": "mlp.gate_up_proj"}
_JOINED_PARTS = {"qkv": ("query", "key", "value"), "gate_up": ("gate", "up")}
# Architectures that multiply by one more than a norm's weights.
_ONE_MORE = ("gemma", "gemma2", "gemma3_text")


class FolderWeights:
    """Weights of a folder; see ``graph.Weights``.

    Raises:
        ConfigError: an unknown precision.
        ModelError: the folder has no safetensors, or a weight is missing or of another shape.
    """

    def __init__(self, folder: Path, shape: NetworkShape, precision: Precision) -> None:
        if precision not in _TYPES:
            raise ConfigError(f"weights are int8 or int4, not {precision!r}")
        self.folder, self.shape, self.type = folder, shape, _TYPES[precision]
        self.files = weight_files(folder)

    @cached_property
    def _places(self) -> dict[str, SafetensorsFile]:
        return {name.removeprefix("model."): file for file in map(SafetensorsFile, self.files) for name in file}

    def matrix(self, name: str, layer: int | None = None) -> Blocks | np.ndarray:
        """Return a matrix (outputs, inputs)."""
        if layer is None:
            stored = "lm_head.weight" if name == "head" and "lm_head.weight" in self._places else "embed_tokens.weight"
            values = self._read(stored)
        else:
            stored, values = f"layers.{layer}.{_LAYER[name]}.weight", self._of_layer(name, layer)
        if values.shape != self.shape.size_of(name):
            expected = self.shape.size_of(name)
            raise ModelError(f"cannot run {self.folder} packed: {stored} is {values.shape}, not {expected}")
        kind = self.type if layer is not None or self.type is None else Type.Q8_0
        if kind is None or values.shape[1] % _BLOCK:
            return values
        return repack(gguf.quants.quantize(np.ascontiguousarray(values), kind), kind)

    def vector(self, name: str, layer: int | None = None) -> np.ndarray | None:
        """Return a norm's weights or a bias; None if the model has none."""
        kind = "bias" if name.endswith("_bias") else "weight"
        name = name.removesuffix("_bias")
        if layer is None:
            stored = {"final_norm": "norm.weight", "head": "lm_head.bias"}[name]
        else:
            module = _LAYER.get(name) or _NORMS[self.shape.norms_after][name]
            stored = f"layers.{layer}.{module}.{kind}"
        if stored not in self._places:
            return None
        values = self._read(stored)
        return values + 1 if kind == "weight" and self.shape.architecture in _ONE_MORE else values

    def embeddings(self, ids_N: np.ndarray) -> np.ndarray:
        """Return the embeddings of tokens (N, D), float32, as they are stored."""
        return self._places["embed_tokens.weight"].rows(self._full("embed_tokens.weight"), ids_N)

    def _of_layer(self, name: str, layer: int) -> np.ndarray:
        stored = f"layers.{layer}.{_LAYER[name]}.weight"
        joined = _JOINED.get(name)
        together = f"layers.{layer}.{_JOINED_NAMES.get(joined or '', '')}.weight"
        if stored in self._places or joined is None or together not in self._places:
            return self._read(stored)
        parts = _JOINED_PARTS[joined]
        sizes = [self.shape.size_of(part)[0] for part in parts]
        index = parts.index(name)
        return self._read(together)[sum(sizes[:index]) : sum(sizes[: index + 1])]

    def _full(self, name: str) -> str:
        file = self._places[name]
        return name if name in file else f"model.{name}"

    def _read(self, name: str) -> np.ndarray:
        if name not in self._places:
            raise ModelError(f"cannot load {self.folder}: {name} is missing from its weights")
        return self._places[name][self._full(name)]


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder."""
    index = folder / "model.safetensors.index.json"
    names = {"model.safetensors"}
    if index.is_file():
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise ModelError(f"cannot load {folder}: {index.name} is damaged ({error})") from error
    missing = next((name for name in sorted(names) if not (folder / name).is_file()), None)
    if missing is not None:
        raise ModelError(f"cannot load {folder}: it has no {missing}")
    return [folder / name for name in sorted(names)]
