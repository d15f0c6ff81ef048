"""The weights of a GGUF file or a folder by the names that the graph has for them.

Unquantized ones can be quantized to blocks of 32 values. 8 bits have one scale a block, as llama.cpp's Q8_0; 4 bits a
scale and an offset, as Q4_1. The output layer has 8 bits in both.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

from gerund.errors import ConfigError, ModelError
from gerund.gguf_architectures import LAYOUTS, layout_of
from gerund.gguf_file import GgufFile, StoredRows
from gerund.packed.blocks import Blocks, repack
from gerund.packed.safetensors_file import SafetensorsFile
from gerund.packed.shape import GROUPS, MODULES, NetworkShape

_NAMES = {
    "query": "attn_q",
    "key": "attn_k",
    "value": "attn_v",
    "output": "attn_output",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
    "attention_norm": "attn_norm",
    "feed_norm": "ffn_norm",
    "attention_after_norm": "post_attention_norm",
    "feed_after_norm": "post_ffw_norm",
    "query_norm": "attn_q_norm",
    "key_norm": "attn_k_norm",
    "final_norm": "output_norm",
    "head": "output",
    "embeddings": "token_embd",
}


Precision = Literal["int8", "int4", "float32"]
_TYPES = {"int8": Type.Q8_0, "int4": Type.Q4_1, "float32": None}
_BLOCK = 32


def _quantized(values: np.ndarray, precision: Precision, *, is_head: bool) -> Blocks | np.ndarray:
    """Return a matrix in blocks; one whose rows are no whole blocks stays as it is."""
    if precision not in _TYPES:
        raise ConfigError(f"weights are int8 or int4, not {precision!r}")
    kind = _TYPES["int8" if is_head and precision == "int4" else precision]
    if kind is None or values.shape[1] % _BLOCK:
        return values
    return repack(gguf.quants.quantize(np.ascontiguousarray(values), kind), kind)


@dataclass(frozen=True)
class GgufWeights:
    """Weights of a file; see ``graph.Weights``. Those that are not quantized are brought to ``precision``."""

    file: GgufFile
    shape: NetworkShape
    precision: Precision = "float32"

    def matrix(self, name: str, layer: int | None = None) -> Blocks | np.ndarray:
        """Return a matrix (outputs, inputs)."""
        stored, rows = self._place(name, layer)
        info = self.file.tensors.infos.get(stored)
        if info is None:
            raise ModelError(f"cannot load {self.file.path}: {stored} is missing from its weights")
        try:
            matrix = repack(self.file.tensors.stored(stored)[rows], info.ggml_type)
        except (NotImplementedError, KeyError) as error:
            raise ModelError(
                f"cannot run {self.file.path} packed: {stored} is of type {info.ggml_type}, which cannot be unpacked"
            ) from error
        if matrix.shape != self.shape.size_of(name):
            expected = self.shape.size_of(name)
            raise ModelError(f"cannot run {self.file.path} packed: {stored} is {matrix.shape}, not {expected}")
        order = self._order(name, matrix.shape[0])
        if order is not None:
            matrix = matrix.rows(order) if isinstance(matrix, Blocks) else matrix[order]
        return matrix if isinstance(matrix, Blocks) else _quantized(matrix, self.precision, is_head=layer is None)

    def _place(self, name: str, layer: int | None) -> tuple[str, slice]:
        """Return the tensor that has a matrix, and its rows there; some files store several as one."""
        stored, infos = self._stored_name(name, layer, "weight"), self.file.tensors.infos
        if name in ("gate", "up") and self._stored_name("gate", layer, "weight") not in infos:
            up = infos.get(self._stored_name("up", layer, "weight"))
            if up is not None and up.shape[0] == 2 * self.shape.inner:
                return up.name, self.shape.rows_in("gate_up", name)
        if stored in infos or layer is None:
            tied = name == "head" and stored not in infos
            return self._stored_name("embeddings", None, "weight") if tied else stored, slice(None)
        joined = f"blk.{layer}.attn_qkv.weight"
        if name in GROUPS["qkv"] and joined in infos:
            return joined, self.shape.rows_in("qkv", name)
        return stored, slice(None)

    def vector(self, name: str, layer: int | None = None) -> np.ndarray | None:
        """Return a norm's weights or a bias; None if the file has none."""
        kind = "bias" if name.endswith("_bias") else "weight"
        name = name.removesuffix("_bias")
        stored = self._stored_name(name, layer, kind)
        if stored not in self.file.tensors.infos:
            return None
        vector = self.file.tensors.read(stored)
        order = self._order(name, len(vector)) if kind == "bias" else None
        return vector if order is None else vector[order]

    def embeddings(self, ids_N: np.ndarray) -> np.ndarray:
        """Return the embeddings of tokens (N, D), float32, as they are stored."""
        rows, kind = self._embedding_rows
        matrix = repack(rows.read(ids_N), kind)
        return matrix.unpack() if isinstance(matrix, Blocks) else matrix

    @cached_property
    def _embedding_rows(self) -> tuple[StoredRows, int]:
        name = self._stored_name("embeddings", None, "weight")
        return self.file.tensors.rows_of(name), self.file.tensors.infos[name].ggml_type

    def _stored_name(self, name: str, layer: int | None, kind: str) -> str:
        prefix = "" if layer is None else f"blk.{layer}."
        return f"{prefix}{_NAMES[name]}.{kind}"

    def _order(self, name: str, n_rows: int) -> Any:
        """Return where the graph's rows of queries and keys are in the file; None for those in the same order."""
        if name not in ("query", "key") or not layout_of(self.file).pairs:
            return None
        heads = self.shape.n_heads if name == "query" else self.shape.n_kv_heads
        return np.arange(n_rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


_LAYER = {
    **MODULES,
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
_JOINED = {"qkv": "self_attn.qkv_proj", "gate_up": "mlp.gate_up_proj"}
# Architectures that multiply by one more than a norm's weights.
_ONE_MORE = frozenset(layout.model_type for layout in LAYOUTS.values() if layout.offset_norms)


class FolderWeights:
    """Weights of a folder; see ``graph.Weights``.

    Raises:
        ModelError: the folder has no safetensors, or a weight is missing or of another shape.
    """

    def __init__(
        self, folder: Path, shape: NetworkShape, precision: Precision, files: Sequence[Path] | None = None
    ) -> None:
        self.folder, self.shape, self.precision = folder, shape, precision
        self.files = list(files) if files else weight_files(folder)

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
        return _quantized(values, self.precision, is_head=layer is None)

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
        for group, module in _JOINED.items():
            joined = f"layers.{layer}.{module}.weight"
            if name in GROUPS[group] and stored not in self._places and joined in self._places:
                return self._read(joined)[self.shape.rows_in(group, name)]
        return self._read(stored)

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
