"""A GGUF file's weights by the names that the graph has for them."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from gerund.errors import ModelError
from gerund.gguf_file import GgufFile
from gerund.packed.blocks import Blocks, repack
from gerund.packed.shape import NetworkShape, architecture_of

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


_JOINED = ("query", "key", "value")


@dataclass(frozen=True)
class GgufWeights:
    """Weights of a file; see ``graph.Weights``."""

    file: GgufFile
    shape: NetworkShape

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
        if order is None:
            return matrix
        return matrix.rows(order) if isinstance(matrix, Blocks) else matrix[order]

    def _place(self, name: str, layer: int | None) -> tuple[str, slice]:
        """Return the tensor that has a matrix, and its rows there; some files store several as one."""
        stored, infos = self._stored_name(name, layer, "weight"), self.file.tensors.infos
        if name in ("gate", "up") and self._stored_name("gate", layer, "weight") not in infos:
            up = infos.get(self._stored_name("up", layer, "weight"))
            if up is not None and up.shape[0] == 2 * self.shape.inner:
                half = self.shape.inner
                return up.name, slice(half) if name == "gate" else slice(half, None)
        if stored in infos or layer is None:
            tied = name == "head" and stored not in infos
            return self._stored_name("embeddings", None, "weight") if tied else stored, slice(None)
        joined = f"blk.{layer}.attn_qkv.weight"
        if name in _JOINED and joined in infos:
            sizes = [self.shape.head_dim * self.shape.n_heads, *[self.shape.head_dim * self.shape.n_kv_heads] * 2]
            index = _JOINED.index(name)
            return joined, slice(sum(sizes[:index]), sum(sizes[: index + 1]))
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
        matrix = repack(rows[ids_N], kind)
        return matrix.unpack() if isinstance(matrix, Blocks) else matrix

    @cached_property
    def _embedding_rows(self) -> tuple[np.ndarray, int]:
        # Plain rows of the mapped file: an index of numpy's memmap takes ten times as long.
        name = self._stored_name("embeddings", None, "weight")
        return self.file.tensors.stored(name).view(np.ndarray), self.file.tensors.infos[name].ggml_type

    def _stored_name(self, name: str, layer: int | None, kind: str) -> str:
        prefix = "" if layer is None else f"blk.{layer}."
        return f"{prefix}{_NAMES[name]}.{kind}"

    def _order(self, name: str, n_rows: int) -> Any:
        """Return where the graph's rows of queries and keys are in the file; None for those in the same order."""
        if name not in ("query", "key") or not architecture_of(self.file).pairs:
            return None
        heads = self.shape.n_heads if name == "query" else self.shape.n_kv_heads
        return np.arange(n_rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
