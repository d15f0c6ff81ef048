"""Sizes and details of a decoder, read from the ``config.json`` of a folder as transformers writes it."""

from collections.abc import Callable, Mapping
from math import log, pi, sqrt
from pathlib import Path
from typing import Any

import numpy as np

from gerund.checks import read_json
from gerund.errors import GerundError, ModelError
from gerund.packed.shape import NetworkShape, Rope, yarn_divisors

Config = Mapping[str, Any]
_SLIDING, _FULL = "sliding_attention", "full_attention"


def _plain(config: Config) -> dict[str, Any]:
    del config
    return {}


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


def _olmo2(config: Config) -> dict[str, Any]:
    del config
    return {"query_norm": "row", "norms_before": False, "norms_after": True}


def _olmo3(config: Config) -> dict[str, Any]:
    types = _types(config, _pattern(config, 4))
    rope = config.get("rope_parameters") or {}
    by_kind = rope if _FULL in rope else {_FULL: _old_rope(config), _SLIDING: {"rope_theta": config["rope_theta"]}}
    return {
        **_olmo2(config),
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
    "llama": _plain,
    "mistral": _windows,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "phi3": _windows,
    "smollm3": _smollm3,
    "olmo2": _olmo2,
    "olmo3": _olmo3,
    "granite": _granite,
}
"""The details of the architectures that can be run, by transformers' names."""

_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu"}


def read_folder_shape(folder: Path) -> NetworkShape:
    """Return the shape of a folder's network; raise ``ModelError`` if it cannot be run packed."""
    try:
        config = read_json(folder / "config.json")
        kind = config["model_type"]
        if kind not in MODEL_TYPES:
            raise ModelError(f"its model type is {kind!r}, and {', '.join(MODEL_TYPES)} can be")
        return _shape(config, MODEL_TYPES[kind](config))
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelError(f"cannot load {folder}: its config.json is not that of a model ({error!r})") from error
    except GerundError as error:
        raise ModelError(f"cannot run {folder} packed: {error}; use runtime='torch'") from error


def _shape(config: Config, specific: dict[str, Any]) -> NetworkShape:
    layers, width, heads = config["num_hidden_layers"], config["hidden_size"], config["num_attention_heads"]
    activation = config.get("hidden_activation") or config.get("hidden_act", "silu")
    if activation not in _ACTIVATIONS:
        activation = "gelu_pytorch_tanh" if specific.get("activation") == "gelu" else activation
    if activation not in _ACTIVATIONS:
        raise ModelError(f"its activation is {activation!r}")
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
    return NetworkShape(**(shared | specific | {"activation": _ACTIVATIONS[activation]}))


def _head_dim(config: Config) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _old_rope(config: Config) -> Config:
    """Return the rotary settings of a config as transformers wrote it before version 5."""
    return {**(config.get("rope_scaling") or {}), "rope_theta": config.get("rope_theta", 1e4)}


def _rope(config: Config, rope: Config) -> Rope:
    """Return rotary positions: plain, linear, Llama 3's, YaRN or LongRoPE."""
    kind, theta = rope.get("rope_type", rope.get("type", "default")), float(rope.get("rope_theta", 1e4))
    size = int(_head_dim(config) * rope.get("partial_rotary_factor", config.get("partial_rotary_factor") or 1.0))
    original = rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    if kind == "default":
        return Rope(theta, size)
    if kind == "linear":
        return Rope(theta, size, (float(rope["factor"]),) * (size // 2))
    if kind == "llama3":
        return Rope(theta, size, _llama3_divisors(theta, size, rope))
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


def _llama3_divisors(theta: float, size: int, rope: Config) -> tuple[float, ...]:
    """Return Llama 3's divisor of each frequency (transformers, ``_compute_llama3_parameters``)."""
    waves = 2 * pi * theta ** (np.arange(0, size, 2, dtype=np.float64) / size)
    original, low, high = (
        rope[name] for name in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    smooth = (original / waves - low) / (high - low)
    between = 1.0 / ((1 - smooth) / rope["factor"] + smooth)
    divisors = np.where(waves > original / low, rope["factor"], np.where(waves < original / high, 1.0, between))
    return tuple(divisors.tolist())
