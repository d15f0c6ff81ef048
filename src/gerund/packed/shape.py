"""Sizes and details of a decoder, read from a GGUF file's metadata: what distinguishes the architectures.

All are the same network: attention, then a gated feed-forward network, each added to its input. They differ in norms,
scales, soft caps, windows and rotary positions.

Shapes: B batch, T tokens, R half of the rotated dimensions.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import ceil, floor, log, pi, sqrt
from typing import Any

import numpy as np

from gerund.errors import ModelError
from gerund.gguf_file import GgufFile


@dataclass(frozen=True)
class Rope:
    """Rotary positions.

    Attributes:
        theta: their base.
        size: how many dimensions of a head are rotated.
        divisors: of each frequency, if the positions are scaled.
        scale: factor of cosines and sines.
        long_divisors: instead of these, for texts longer than ``long_from`` tokens.
        long_from: see ``long_divisors``.
    """

    theta: float
    size: int
    divisors: tuple[float, ...] | None = None
    scale: float = 1.0
    long_divisors: tuple[float, ...] | None = None
    long_from: int = 0

    def angles(self, position_BT: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return cosines and sines, (B, T, R) each."""
        frequencies = self.theta ** (-np.arange(0, self.size, 2, dtype=np.float64) / self.size)
        divisors = self.divisors
        if self.long_divisors is not None and position_BT.max(initial=0) >= self.long_from:
            divisors = self.long_divisors
        if divisors is not None:
            frequencies = frequencies / np.asarray(divisors)
        angle_BTR = position_BT[..., None] * frequencies
        return (np.cos(angle_BTR) * self.scale).astype(np.float32), (np.sin(angle_BTR) * self.scale).astype(np.float32)


def yarn_divisors(theta: float, size: int, factor: float, original: int, fast: float, slow: float) -> tuple[float, ...]:
    """Return YaRN's divisor of each frequency (transformers, ``_compute_yarn_parameters``).

    Args:
        theta: the base.
        size: the rotated dimensions.
        factor: by how much texts became longer.
        original: how long they were, in tokens.
        fast: turns over ``original`` tokens from which a frequency is kept.
        slow: turns up to which it is divided by ``factor``.
    """

    def dimension(turns: float) -> float:
        return size * log(original / (turns * 2 * pi)) / (2 * log(theta))

    first, last = max(floor(dimension(fast)), 0), min(ceil(dimension(slow)), size - 1)
    ramp = np.clip((np.arange(size // 2) - first) / max(last - first, 0.001), 0, 1)
    return tuple((1 / (ramp / factor + 1 - ramp)).tolist())


@dataclass(frozen=True)
class NetworkShape:
    """Sizes and details of a decoder.

    Attributes:
        architecture: llama.cpp's name of it.
        inner: width of the feed-forward network.
        context: the longest text that it was trained for, in tokens.
        windows: per layer, how many tokens it sees, itself included; None for all.
        ropes: the kinds of rotary positions.
        rope_of_layer: which of them a layer takes; None for none.
        attention_scale: factor of the products of queries and keys.
        soft_cap: bound of these products; 0 for none.
        logit_cap: bound of the logits; 0 for none.
        logit_scale: factor of the logits.
        embedding_scale: factor of the embeddings.
        residual_scale: factor of what attention and feed-forward network add.
        activation: ``silu`` or ``gelu`` (its tanh form).
        norms_before: whether attention and feed-forward network are normed before.
        norms_after: whether they are normed after.
        query_norm: whether queries and keys are normed: ``head`` by head, the ``row``, or None.
    """

    architecture: str
    n_layers: int
    width: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    inner: int
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

    def size_of(self, matrix: str) -> tuple[int, int]:
        """Return the rows and columns of one of the graph's matrices."""
        queries, keys = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        rows = {"query": queries, "key": keys, "value": keys, "gate": self.inner, "up": self.inner}
        columns = {"output": queries, "down": self.inner}
        return rows.get(matrix, self.vocabulary if matrix == "head" else self.width), columns.get(matrix, self.width)


@dataclass(frozen=True)
class Architecture:
    """How llama.cpp stores an architecture, and what its shape has in addition.

    Attributes:
        models: the models of this architecture, for people.
        details: fields of its shape that depend on the file.
        fixed: fields that do not.
        pairs: whether the rows of queries and keys are stored in pairs, as they are rotated; the graph rotates the two
            halves of a head.
    """

    models: str
    details: Callable[[GgufFile], dict[str, Any]] = lambda _file: {}
    fixed: Mapping[str, Any] = field(default_factory=dict)
    pairs: bool = False


def _llama(file: GgufFile) -> dict[str, Any]:
    if file.value("expert_count"):
        raise ModelError(f"cannot run {file.path} packed: it is a mixture of experts; use runtime='torch'")
    return {}


def _gemma(file: GgufFile) -> dict[str, Any]:
    return {"embedding_scale": sqrt(file.number("embedding_length"))}


def _gemma2(file: GgufFile) -> dict[str, Any]:
    window = file.number("attention.sliding_window", 4096)
    return {
        **_gemma(file),
        "windows": tuple(None if layer % 2 else window for layer in range(file.number("block_count"))),
        "attention_scale": _gemma_scale(file, 46),
        "soft_cap": file.fraction("attn_logit_softcapping", 50.0),
        "logit_cap": file.fraction("final_logit_softcapping", 30.0),
    }


def _gemma3(file: GgufFile) -> dict[str, Any]:
    sliding, head_dim = _pattern(file, 6), _head_dim(file)
    rope = _rope(file, 1e6)
    return {
        **_gemma(file),
        "windows": tuple(file.number("attention.sliding_window") if slides else None for slides in sliding),
        "attention_scale": _gemma_scale(file, 62),
        "logit_cap": file.fraction("final_logit_softcapping") or 0.0,
        "ropes": (rope, Rope(file.fraction("rope.freq_base_swa", 1e4) or 1e4, head_dim)),
        "rope_of_layer": tuple(int(slides) for slides in sliding),
    }


def _gemma_scale(file: GgufFile, layers_of_largest: int) -> float:
    """Return the scale of queries; only the largest size takes it from the width."""
    large = file.number("block_count") == layers_of_largest
    heads = file.number("attention.head_count")
    return float((file.number("embedding_length") // heads if large else _head_dim(file)) ** -0.5)


def _pattern(file: GgufFile, every: int) -> list[bool]:
    """Return whether each layer has a window: all but one of so many."""
    return [(layer + 1) % every != 0 for layer in range(file.number("block_count"))]


def _phi3(file: GgufFile) -> dict[str, Any]:
    layers, context = file.number("block_count"), file.number("context_length")
    window = file.number("attention.sliding_window", 0) or None
    rope = Rope(file.fraction("rope.freq_base", 1e4) or 1e4, file.number("rope.dimension_count", _head_dim(file)))
    names = [f"rope_factors_{kind}.weight" for kind in ("short", "long")]
    if all(name in file.tensors.infos for name in names):
        short, long = (tuple(file.tensors.read(name).tolist()) for name in names)
        original = file.number("rope.scaling.original_context_length", context)
        longer = max(1.0, context / max(original, 1))
        scale = file.fraction("rope.scaling.attn_factor", sqrt(1 + log(longer) / log(original)))
        rope = Rope(rope.theta, rope.size, short, scale or 1.0, long, original)
    elif file.value("rope.scaling.type") not in (None, "none"):
        raise ModelError(f"cannot run {file.path} packed: its positions are scaled, and it has no factors for them")
    return {"windows": (None if window is None or window >= context else window,) * layers, "ropes": (rope,)}


def _smollm3(file: GgufFile) -> dict[str, Any]:
    return {"rope_of_layer": tuple(0 if rotates else None for rotates in _pattern(file, 4))}


def _olmo2(file: GgufFile) -> dict[str, Any]:
    """Return OLMo 2's details, or OLMo 3's, which has windows and scales positions in the other layers."""
    if not file.value("attention.sliding_window"):
        return {}
    sliding, rope = _pattern(file, 4), _rope(file)
    return {
        "windows": tuple(file.number("attention.sliding_window") if slides else None for slides in sliding),
        "ropes": (rope, Rope(rope.theta, rope.size)),
        "rope_of_layer": tuple(int(slides) for slides in sliding),
    }


def _granite(file: GgufFile) -> dict[str, Any]:
    return {
        "attention_scale": file.fraction("attention.scale", 1.0),
        "embedding_scale": file.fraction("embedding_scale", 1.0),
        "residual_scale": file.fraction("residual_scale", 1.0),
        "logit_scale": 1 / (file.fraction("logit_scale", 1.0) or 1.0),
    }


_GEMMA = {"activation": "gelu", "norms_after": True}

ARCHITECTURES = {
    "llama": Architecture("Llama, Mistral, SmolLM 2", _llama, pairs=True),
    "qwen2": Architecture("Qwen 2 and 2.5"),
    "qwen3": Architecture("Qwen 3", fixed={"query_norm": "head"}),
    "gemma": Architecture("Gemma", _gemma, {"activation": "gelu"}),
    "gemma2": Architecture("Gemma 2", _gemma2, _GEMMA),
    "gemma3": Architecture("Gemma 3", _gemma3, {**_GEMMA, "query_norm": "head"}),
    "phi3": Architecture("Phi 3, 3.5 and 4", _phi3),
    "smollm3": Architecture("SmolLM 3", _smollm3, pairs=True),
    "olmo2": Architecture("OLMo 2 and 3", _olmo2, {"query_norm": "row", "norms_before": False, "norms_after": True}),
    "granite": Architecture("Granite 3 and 4", _granite, pairs=True),
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
    specific = {**architecture.fixed, **architecture.details(file)}
    shared: dict[str, Any] = {
        "architecture": file.architecture,
        "n_layers": n_layers,
        "width": width,
        "n_heads": n_heads,
        "n_kv_heads": file.number("attention.head_count_kv", n_heads),
        "head_dim": _head_dim(file),
        "inner": file.number("feed_forward_length"),
        "vocabulary": file.vocabulary,
        "context": file.number("context_length"),
        "epsilon": file.fraction("attention.layer_norm_rms_epsilon", 1e-6),
        "windows": (None,) * n_layers,
        "ropes": () if "ropes" in specific else (_rope(file),),
        "rope_of_layer": (0,) * n_layers,
        "attention_scale": _head_dim(file) ** -0.5,
    }
    return NetworkShape(**(shared | specific))


def _head_dim(file: GgufFile) -> int:
    heads = file.number("attention.head_count")
    if not heads:
        raise ModelError(f"cannot run {file.path} packed: its {file.architecture}.attention.head_count is 0")
    return file.number("attention.key_length", 0) or file.number("embedding_length") // heads


def _rope(file: GgufFile, base: float = 1e4) -> Rope:
    """Return a file's rotary positions: plain, scaled by one factor, by YaRN, or by factors that are a tensor."""
    theta = file.fraction("rope.freq_base", base) or base
    size = file.number("rope.dimension_count", _head_dim(file))
    kind, factor = file.value("rope.scaling.type"), file.fraction("rope.scaling.factor")
    if "rope_freqs.weight" in file.tensors.infos:
        return Rope(theta, size, tuple(file.tensors.read("rope_freqs.weight").tolist()))
    if kind in (None, "none") or not factor:
        return Rope(theta, size)
    if kind == "linear":
        return Rope(theta, size, (factor,) * (size // 2))
    if kind != "yarn" or any(file.value(name) for name in _UNKNOWN_YARN):
        raise ModelError(f"cannot run {file.path} packed: positions that are scaled by {kind!r} are not read")
    turns = [file.fraction(f"rope.scaling.yarn_beta_{end}", usual) or usual for end, usual in _TURNS]
    original = file.number("rope.scaling.original_context_length")
    extra = file.fraction("rope.scaling.attn_factor", file.fraction("rope.scaling.yarn_attn_factor"))
    scale = (0.1 * log(factor) + 1) * (1.0 if extra is None else extra)
    return Rope(theta, size, yarn_divisors(theta, size, factor, original, *turns), scale)


_TURNS = (("fast", 32.0), ("slow", 1.0))
_UNKNOWN_YARN = ("rope.scaling.yarn_ext_factor", "rope.scaling.yarn_log_multiplier")
