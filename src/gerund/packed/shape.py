"""Sizes and details of a decoder, read from its config: what distinguishes the architectures.

All are the same network: attention, then a gated feed-forward network, each added to its input. They differ in norms,
scales, soft caps, windows and rotary positions. A folder has a ``config.json`` as transformers writes it, and a GGUF
file is read as one.

Shapes: B batch, T tokens, R half of the rotated dimensions.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil, floor, log, pi, sqrt
from pathlib import Path
from typing import Any

import numpy as np

from gerund.checks import read_json
from gerund.errors import GerundError, ModelError
from gerund.gguf_architectures import FACTORS, LAYOUTS, read_settings
from gerund.gguf_file import GgufFile

Config = Mapping[str, Any]
_SLIDING, _FULL = "sliding_attention", "full_attention"

MODULES = {
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "output": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
"""The matrices of a layer, and the modules that transformers has them in."""

GROUPS = {"qkv": ("query", "key", "value"), "output": ("output",), "gate_up": ("gate", "up"), "down": ("down",)}
"""The matrices that share a product, since they read the same values."""


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


def llama3_divisors(theta: float, size: int, rope: Config) -> tuple[float, ...]:
    """Return Llama 3's divisor of each frequency (transformers, ``_compute_llama3_parameters``)."""
    waves = 2 * pi * theta ** (np.arange(0, size, 2, dtype=np.float64) / size)
    original, low, high = (
        rope[name] for name in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    smooth = (original / waves - low) / (high - low)
    between = 1.0 / ((1 - smooth) / rope["factor"] + smooth)
    divisors = np.where(waves > original / low, rope["factor"], np.where(waves < original / high, 1.0, between))
    return tuple(divisors.tolist())


@dataclass(frozen=True)
class NetworkShape:
    """Sizes and details of a decoder.

    Attributes:
        architecture: transformers' name of it (``model_type``).
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

    def rows_in(self, group: str, matrix: str) -> slice:
        """Return the rows of a matrix where those of its group lie below each other."""
        names = GROUPS[group]
        start = sum(self.size_of(before)[0] for before in names[: names.index(matrix)])
        return slice(start, start + self.size_of(matrix)[0])


def _windows(config: Config) -> dict[str, Any]:
    """Return windows of the layers whose type says so, or of all layers of a model without types."""
    window, layers = config.get("sliding_window"), config["num_hidden_layers"]
    if window is None or config.get("use_sliding_window") is False:
        return {}
    return {"windows": tuple(window if kind == _SLIDING else None for kind in _types(config, [_SLIDING] * layers))}


def _types(config: Config, usual: list[str]) -> list[str]:
    return list(config.get("layer_types") or usual)


def _pattern(config: Config, every: int) -> list[str]:
    return [_SLIDING if (layer + 1) % every else _FULL for layer in range(config["num_hidden_layers"])]


def _qwen2(config: Config) -> dict[str, Any]:
    return _windows(config) if config.get("use_sliding_window") else {}


def _qwen3(config: Config) -> dict[str, Any]:
    return {**_qwen2(config), "query_norm": "head"}


def _gemma(config: Config) -> dict[str, Any]:
    return {"activation": "gelu", "embedding_scale": sqrt(config["hidden_size"])}


def _gemma2(config: Config) -> dict[str, Any]:
    types = _types(config, _pattern(config, 2))
    return {
        **_gemma(config),
        "norms_after": True,
        "windows": tuple(config["sliding_window"] if kind == _SLIDING else None for kind in types),
        "attention_scale": config["query_pre_attn_scalar"] ** -0.5,
        "soft_cap": config.get("attn_logit_softcapping") or 0.0,
        "logit_cap": config.get("final_logit_softcapping") or 0.0,
    }


def _gemma3(config: Config) -> dict[str, Any]:
    if config.get("use_bidirectional_attention"):
        raise ModelError("its attention is not causal")
    types = _types(config, _pattern(config, config.get("sliding_window_pattern") or 6))
    rope = config.get("rope_parameters") or {
        _FULL: {**(config.get("rope_scaling") or {}), "rope_theta": config.get("rope_theta", 1e6)},
        _SLIDING: {"rope_theta": config.get("rope_local_base_freq", 1e4)},
    }
    return {
        **_gemma2({**config, "layer_types": types}),
        "query_norm": "head",
        "ropes": (_rope(config, rope[_FULL]), _rope(config, rope[_SLIDING])),
        "rope_of_layer": tuple(int(kind == _SLIDING) for kind in types),
    }


def _smollm3(config: Config) -> dict[str, Any]:
    layers, every = config["num_hidden_layers"], config.get("no_rope_layer_interval") or 4
    rotates = config.get("no_rope_layers") or [(layer + 1) % every for layer in range(layers)]
    return {**_qwen2(config), "rope_of_layer": tuple(0 if rotated else None for rotated in rotates[:layers])}


_OLMO2 = {"query_norm": "row", "norms_before": False, "norms_after": True}


def _olmo3(config: Config) -> dict[str, Any]:
    types = _types(config, _pattern(config, 4))
    rope = config.get("rope_parameters") or {}
    by_kind = rope if _FULL in rope else {_FULL: _old_rope(config), _SLIDING: {"rope_theta": config["rope_theta"]}}
    return {
        **_OLMO2,
        **_windows({**config, "layer_types": types}),
        "ropes": (_rope(config, by_kind[_FULL]), _rope(config, by_kind[_SLIDING])),
        "rope_of_layer": tuple(int(kind == _SLIDING) for kind in types),
    }


def _granite(config: Config) -> dict[str, Any]:
    return {
        "attention_scale": config["attention_multiplier"],
        "embedding_scale": config["embedding_multiplier"],
        "residual_scale": config["residual_multiplier"],
        "logit_scale": 1 / config["logits_scaling"],
    }


MODEL_TYPES: dict[str, Callable[[Config], dict[str, Any]]] = {
    "llama": lambda _config: {},
    "mistral": _windows,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "phi3": _windows,
    "smollm3": _smollm3,
    "olmo2": lambda _config: _OLMO2,
    "olmo3": _olmo3,
    "granite": _granite,
}
"""The details of the architectures that can be run, by transformers' names."""

_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu"}


def read_shape(file: GgufFile) -> NetworkShape:
    """Return the shape of a file's network; raise ``ModelError`` if it cannot be run packed."""
    known = [layout.name for layout in LAYOUTS.values() if layout.model_type in MODEL_TYPES]
    if file.architecture not in known:
        raise ModelError(
            f"cannot run {file.path} packed: its architecture is {file.architecture!r}, and {', '.join(known)} can be; "
            "use runtime='torch'"
        )
    return _shape_of(read_settings(file), file.path)


def read_folder_shape(folder: Path) -> NetworkShape:
    """Return the shape of a folder's network; raise ``ModelError`` if it cannot be run packed."""
    try:
        config = read_json(folder / "config.json")
    except GerundError as error:
        raise ModelError(f"cannot run {folder} packed: {error}; use runtime='torch'") from error
    if config.get("quantization_config"):
        raise ModelError(f"cannot run {folder} packed: its weights are quantized by other tools; use runtime='torch'")
    return _shape_of(config, folder)


def _shape_of(config: Config, path: Path) -> NetworkShape:
    try:
        kind = config["model_type"]
        if kind not in MODEL_TYPES:
            raise ModelError(f"its model type is {kind!r}, and {', '.join(MODEL_TYPES)} can be")
        return _shape(config, MODEL_TYPES[kind](config))
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelError(f"cannot load {path}: its config is not that of a model ({error!r})") from error
    except GerundError as error:
        raise ModelError(f"cannot run {path} packed: {error}; use runtime='torch'") from error


def _shape(config: Config, specific: dict[str, Any]) -> NetworkShape:
    layers, width, heads = config["num_hidden_layers"], config["hidden_size"], config["num_attention_heads"]
    named: Any = config.get("hidden_activation") or config.get("hidden_act")
    activation = _ACTIVATIONS.get(named, specific.get("activation", "silu" if named is None else None))
    if activation is None:
        raise ModelError(f"its activation is {named!r}")
    shared: dict[str, Any] = {
        "architecture": config["model_type"],
        "n_layers": layers,
        "width": width,
        "n_heads": heads,
        "n_kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": _head_dim(config),
        "inner": config["intermediate_size"],
        "vocabulary": config["vocab_size"],
        "context": config["max_position_embeddings"],
        "epsilon": config.get("rms_norm_eps", 1e-6),
        "windows": (None,) * layers,
        "ropes": () if "ropes" in specific else (_rope(config, config.get("rope_parameters") or _old_rope(config)),),
        "rope_of_layer": (0,) * layers,
        "attention_scale": _head_dim(config) ** -0.5,
    }
    return NetworkShape(**(shared | specific | {"activation": activation}))


def _head_dim(config: Config) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _old_rope(config: Config) -> Config:
    """Return the rotary settings of a config as transformers wrote it before version 5."""
    return {**(config.get("rope_scaling") or {}), "rope_theta": config.get("rope_theta", 1e4)}


def _rope(config: Config, rope: Config) -> Rope:
    """Return rotary positions: plain, linear, by factors, Llama 3's, YaRN or LongRoPE."""
    kind, theta = rope.get("rope_type", rope.get("type", "default")), float(rope.get("rope_theta", 1e4))
    size = int(_head_dim(config) * rope.get("partial_rotary_factor", config.get("partial_rotary_factor") or 1.0))
    original = rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    if kind == "default":
        return Rope(theta, size)
    if kind == "linear":
        return Rope(theta, size, (float(rope["factor"]),) * (size // 2))
    if kind == FACTORS:
        return Rope(theta, size, tuple(rope["factors"]))
    if kind == "llama3":
        return Rope(theta, size, llama3_divisors(theta, size, rope))
    if kind == "longrope" and original:
        short, long = (tuple(map(float, rope[f"{length}_factor"])) for length in ("short", "long"))
        longer = rope.get("factor") or config["max_position_embeddings"] / original
        scale = rope.get("attention_factor") or (sqrt(1 + log(longer) / log(original)) if longer > 1 else 1.0)
        return Rope(theta, size, short, scale, long, original)
    if kind != "yarn" or rope.get("mscale") or rope.get("truncate") is False:
        raise ModelError(f"its positions are scaled by {kind!r} in a way that is not read")
    factor, original = float(rope["factor"]), original or config["max_position_embeddings"]
    turns = (rope.get("beta_fast") or 32.0, rope.get("beta_slow") or 1.0)
    scale = rope.get("attention_factor") or (0.1 * log(factor) + 1 if factor > 1 else 1.0)
    return Rope(theta, size, yarn_divisors(theta, size, factor, original, *turns), scale)
