"""Sizes and details of a decoder, read from a GGUF file's metadata: what distinguishes the architectures.

All are the same network: attention, then a gated feed-forward network, each added to its input. They differ in norms,
scales, soft caps, windows and rotary positions.

Shapes: B batch, T tokens, R half of the rotated dimensions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt
from typing import Any

import numpy as np

from gerund.errors import ModelError
from gerund.gguf_file import GgufFile


@dataclass(frozen=True)
class Rope:
    """Rotary positions.

    Attributes:
        theta: their base. size: how many dimensions of a head are rotated.
        divisors: of each frequency, if the positions are scaled. scale: factor of cosines and sines.
    """

    theta: float
    size: int
    divisors: tuple[float, ...] | None = None
    scale: float = 1.0

    def angles(self, position_BT: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return cosines and sines, (B, T, R) each."""
        frequencies = self.theta ** (-np.arange(0, self.size, 2, dtype=np.float64) / self.size)
        if self.divisors is not None:
            frequencies = frequencies / np.asarray(self.divisors)
        angle_BTR = position_BT[..., None] * frequencies
        return (np.cos(angle_BTR) * self.scale).astype(np.float32), (np.sin(angle_BTR) * self.scale).astype(np.float32)


@dataclass(frozen=True)
class NetworkShape:
    """Sizes and details of a decoder.

    Attributes:
        architecture: llama.cpp's name of it. context: the longest text that it was trained for, in tokens.
        windows: per layer, how many tokens it sees, itself included; None for all.
        ropes: the kinds of rotary positions. rope_of_layer: which of them a layer takes; None for none.
        attention_scale: factor of the products of queries and keys. soft_cap: bound of these; 0 for none.
        logit_cap: bound of the logits; 0 for none. logit_scale, embedding_scale, residual_scale: factors.
        activation: ``silu`` or ``gelu`` (its tanh form).
        norms_before, norms_after: whether attention and feed-forward network are normed before and after.
        query_norm: whether queries and keys are normed: ``head`` by head, the ``row``, or None.
    """

    architecture: str
    n_layers: int
    width: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocabulary: int
    context: int
    epsilon: float
    windows: tuple[int | None, ...]
    ropes: tuple[Rope, ...]
    rope_of_layer: tuple[int | None, ...]
    attention_scale: float
    soft_cap: float = 0.0
    logit_cap: float = 0.0
    logit_scale: float = 1.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    activation: str = "silu"
    norms_before: bool = True
    norms_after: bool = False
    query_norm: str | None = None


@dataclass(frozen=True)
class Architecture:
    """How llama.cpp stores an architecture, and what its shape has in addition.

    Attributes:
        details: fields of its shape. pairs: whether the rows of queries and keys are stored in pairs, as they are
            rotated; the graph rotates the two halves of a head.
    """

    details: Callable[[GgufFile], dict[str, Any]]
    pairs: bool = False


def _llama(file: GgufFile) -> dict[str, Any]:
    if file.value("expert_count"):
        raise ModelError(f"cannot load {file.path}: a mixture of experts is not run packed; use runtime='torch'")
    return {}


def _nothing(file: GgufFile) -> dict[str, Any]:
    del file
    return {}


def _qwen3(file: GgufFile) -> dict[str, Any]:
    del file
    return {"query_norm": "head"}


ARCHITECTURES = {
    "llama": Architecture(_llama, pairs=True),
    "qwen2": Architecture(_nothing),
    "qwen3": Architecture(_qwen3),
}
"""The architectures that can be run, by llama.cpp's names."""


def architecture_of(file: GgufFile) -> Architecture:
    """Return how a file's architecture is stored; raise ``ModelError`` if it cannot be run packed."""
    architecture = ARCHITECTURES.get(file.architecture)
    if architecture is None:
        known = ", ".join(ARCHITECTURES)
        raise ModelError(
            f"cannot run {file.path} packed: its architecture is {file.architecture!r}, and {known} can be; "
            "use runtime='torch'"
        )
    return architecture


def read_shape(file: GgufFile) -> NetworkShape:
    """Return the shape of a file's network; raise ``ModelError`` if it cannot be run packed."""
    architecture = architecture_of(file)
    n_layers, width, n_heads = (file.number(key) for key in ("block_count", "embedding_length", "attention.head_count"))
    head_dim = file.number("attention.key_length", width // n_heads)
    shared: dict[str, Any] = {
        "architecture": file.architecture,
        "n_layers": n_layers,
        "width": width,
        "n_heads": n_heads,
        "n_kv_heads": file.number("attention.head_count_kv", n_heads),
        "head_dim": head_dim,
        "vocabulary": file.vocabulary,
        "context": file.number("context_length"),
        "epsilon": file.fraction("attention.layer_norm_rms_epsilon", 1e-6),
        "windows": (None,) * n_layers,
        "ropes": (_rope(file, head_dim),),
        "rope_of_layer": (0,) * n_layers,
        "attention_scale": 1 / sqrt(head_dim),
    }
    return NetworkShape(**(shared | architecture.details(file)))


def _rope(file: GgufFile, head_dim: int) -> Rope:
    """Return a file's rotary positions: plain, scaled by one factor, or by factors that are a tensor."""
    theta, size = file.fraction("rope.freq_base", 10000.0), file.number("rope.dimension_count", head_dim)
    kind, factor = file.value("rope.scaling.type"), file.fraction("rope.scaling.factor")
    if kind not in (None, "none", "linear"):
        raise ModelError(f"cannot run {file.path} packed: positions that are scaled by {kind!r} are not read")
    divisors = None
    if "rope_freqs.weight" in file.tensors.infos:
        divisors = tuple(file.tensors.read("rope_freqs.weight").tolist())
    elif kind == "linear" and factor:
        divisors = (factor,) * (size // 2)
    return Rope(theta or 10000.0, size, divisors)
