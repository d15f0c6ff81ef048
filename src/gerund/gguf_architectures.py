"""The architectures that are read from GGUF files: how llama.cpp writes the settings of each.

Each entry of ``LAYOUTS`` was compared with llama.cpp: a random model of the architecture, written as llama.cpp's
converter writes it, has the same log-probabilities there and here (``tests/models/test_gguf_architectures.py``). Where
llama.cpp itself departs from the model's authors, such as in Phi 3's sliding windows, this follows the authors.

Settings have the names of transformers, which has the same in a ``config.json``. Imports no torch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import log
from typing import Any

from gerund.errors import ModelError, one_line
from gerund.gguf_file import GgufFile

Settings = dict[str, Any]

_SLIDING, _FULL, _CONV, _LINEAR = "sliding_attention", "full_attention", "conv", "linear_attention"
_LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"
FACTORS = "factors"
"""The type of positions whose frequencies are divided by ``factors``, which transformers does not have."""
_ROPE_HEADS = ("attention.head_count", "attention.key_length", "rope.dimension_count")
_NEVER_ZERO = ("block_count", "embedding_length", *_ROPE_HEADS)
# Settings that size a part of a model.
_SIZES = (
    "embedding_length", "feed_forward_length", "attention.head_count_kv", "expert_count", "expert_used_count",
    "expert_feed_forward_length", "expert_shared_feed_forward_length", "shortconv.l_cache", "ssm.conv_kernel",
    "ssm.state_size", "ssm.group_count", "ssm.inner_size", "ssm.time_step_rank",
)  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """How llama.cpp lays out an architecture.

    Attributes:
        name: the architecture, as llama.cpp calls it.
        model_type: transformers' name; ``config`` may name another one.
        models: the models of this architecture, for people.
        config: the fields of the config that only this architecture has.
        pairs: whether the rows of queries and keys are stored in pairs, as they are rotated; transformers rotates the
            two halves of a head.
        offset_norms: whether norms are stored with one added.
        scalings: the ways in which positions may be scaled.
        exports: the model types, by transformers' names, that are written as GGUF in this layout.
    """

    name: str
    model_type: str
    models: str
    config: Callable[[GgufFile], Settings] = lambda _file: {}
    pairs: bool = False
    offset_norms: bool = False
    scalings: tuple[str, ...] = ()
    exports: tuple[str, ...] = ()


def _has(file: GgufFile, name: str) -> bool:
    return f"blk.0.{name}" in file.tensors.infos


def _head(file: GgufFile) -> int:
    """Return the size of a head, by default the width divided by the heads."""
    heads = file.number("attention.head_count")
    return file.number("attention.key_length", 0) or file.number("embedding_length") // heads


def _partial(file: GgufFile) -> float:
    """Return the rotated part of a head."""
    return file.number("rope.dimension_count", _head(file)) / _head(file)


def _rope(file: GgufFile, **more: Any) -> Settings:
    return {"rope_type": "default", "rope_theta": file.fraction("rope.freq_base", 1e4), **more}


def _partial_rope(file: GgufFile) -> Settings:
    return {"rope_parameters": _rope(file, partial_rotary_factor=_partial(file))}


def _pattern(file: GgufFile, every: int) -> list[str]:
    """Return layer types: sliding windows, but in one layer of so many."""
    layers = range(file.number("block_count"))
    return [_FULL if (layer + 1) % every == 0 else _SLIDING for layer in layers]


def _experts(file: GgufFile) -> Settings:
    return {
        "num_experts": file.number("expert_count"),
        "num_experts_per_tok": file.number("expert_used_count"),
        "moe_intermediate_size": file.number("expert_feed_forward_length", 0) or file.number("feed_forward_length"),
    }


def _local_experts(file: GgufFile) -> Settings:
    settings = _experts(file)
    return {
        "num_local_experts": settings["num_experts"],
        "num_experts_per_tok": settings["num_experts_per_tok"],
        "intermediate_size": settings["moe_intermediate_size"],
    }


def _with_shared_expert(file: GgufFile) -> Settings:
    # Qwen 2's files of this architecture may lack the size of the shared expert.
    shared = file.tensors.infos.get("blk.0.ffn_down_shexp.weight")
    size = file.number("expert_shared_feed_forward_length", 0) or (0 if shared is None else shared.shape[-1])
    return {**_experts(file), "shared_expert_intermediate_size": size}


def _llama(file: GgufFile) -> Settings:
    head = file.number("attention.key_length", file.number("rope.dimension_count", 0)) or None
    if file.value("expert_count"):
        return {"model_type": "mixtral", "head_dim": head, **_local_experts(file)}
    biases = {"attention_bias": _has(file, "attn_q.bias"), "mlp_bias": _has(file, "ffn_up.bias")}
    return {"head_dim": head, **biases}


def _headed(file: GgufFile) -> Settings:
    return {"head_dim": _head(file), "attention_bias": _has(file, "attn_q.bias")}


def _qwen3(file: GgufFile) -> Settings:
    return {"head_dim": file.number("attention.key_length", 0) or 128}


def _linear_attention(file: GgufFile) -> Settings:
    every, layers = file.number("full_attention_interval", 4), _layers_of(file)
    values = file.number("ssm.time_step_rank")
    if not every or not values:
        raise ModelError(f"cannot load {file.path}: its interval of attention layers or its value heads are 0")
    return {
        "head_dim": _head(file),
        "layer_types": [_FULL if (layer + 1) % every == 0 else _LINEAR for layer in range(layers)],
        "linear_conv_kernel_dim": file.number("ssm.conv_kernel"),
        "linear_key_head_dim": file.number("ssm.state_size"),
        "linear_num_key_heads": file.number("ssm.group_count"),
        "linear_num_value_heads": values,
        "linear_value_head_dim": file.number("ssm.inner_size") // values,
        **_partial_rope(file),
    }


def _qwen35(file: GgufFile) -> Settings:
    sections = [size for size in file.value("rope.dimension_sections") or () if size]
    rope = _rope(file, partial_rotary_factor=_partial(file), mrope_section=sections, mrope_interleaved=True)
    return {**_linear_attention(file), "rope_parameters": rope}


def _gemma2(file: GgufFile) -> Settings:
    # Only the largest size, with 46 layers, scales queries by hidden size / heads.
    large = file.number("block_count") == 46
    width, heads = file.number("embedding_length"), file.number("attention.head_count")
    return {
        "head_dim": _head(file),
        "query_pre_attn_scalar": width // heads if large else _head(file),
        "sliding_window": file.number("attention.sliding_window", 4096),
        "attn_logit_softcapping": file.fraction("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": file.fraction("final_logit_softcapping", 30.0),
    }


def _gemma3(file: GgufFile) -> Settings:
    head, layers = file.number("attention.key_length"), file.number("block_count")
    full, sliding = (
        {"rope_type": "default", "rope_theta": file.fraction(key, usual)}
        for key, usual in (("rope.freq_base", 1e6), ("rope.freq_base_swa", 1e4))
    )
    # Only the largest size, with 62 layers, scales queries by hidden size / heads.
    scalar = file.number("embedding_length") // file.number("attention.head_count") if layers == 62 else head
    return {
        "head_dim": head,
        "query_pre_attn_scalar": scalar,
        "sliding_window": file.number("attention.sliding_window"),
        "layer_types": _pattern(file, 6),
        "final_logit_softcapping": file.fraction("final_logit_softcapping"),
        "rope_parameters": {_FULL: _scaled(file, full, ("linear",)), _SLIDING: sliding},
    }


def _layer_norms(file: GgufFile, name: str = "layer_norm_eps") -> Settings:
    return {name: file.fraction("attention.layer_norm_epsilon", 1e-5)}


def _gpt_neox(file: GgufFile) -> Settings:
    residual = bool(file.value("use_parallel_residual", True))
    return {**_layer_norms(file), **_partial_rope(file), "use_parallel_residual": residual}


def _stablelm(file: GgufFile) -> Settings:
    if _has(file, "attn_q_norm.weight"):
        raise ModelError(f"cannot load {file.path}: a StableLM with normalized queries is not read from GGUF")
    residual = "blk.0.ffn_norm.weight" not in file.tensors.infos
    biased = _has(file, "attn_q.bias")
    return {**_layer_norms(file), **_partial_rope(file), "use_parallel_residual": residual, "use_qkv_bias": biased}


def _olmo2(file: GgufFile) -> Settings:
    """Return OLMo 2's settings, or OLMo 3's, which has sliding windows and scales positions in the other layers."""
    if not file.value("attention.sliding_window"):
        return {}
    return {
        "model_type": "olmo3",
        "sliding_window": file.number("attention.sliding_window"),
        "layer_types": _pattern(file, 4),
        "rope_parameters": {_FULL: _scaled(file, _rope(file), ("yarn",)), _SLIDING: _rope(file)},
    }


def _phi3(file: GgufFile) -> Settings:
    window = file.number("attention.sliding_window", 0) or None
    if window is not None and window >= file.number("context_length"):
        window = None
    original = file.number("rope.scaling.original_context_length", file.number("context_length"))
    return {
        "sliding_window": window,
        "original_max_position_embeddings": original,
        "rope_parameters": _long_rope(file, _rope(file, partial_rotary_factor=_partial(file)), original),
    }


def _long_rope(file: GgufFile, plain: Settings, original: int) -> Settings:
    """Return the positions of a model with a divisor per frequency, for short and for long texts."""
    names = {kind: f"rope_factors_{kind}.weight" for kind in ("short", "long")}
    if not any(name in file.tensors.infos for name in names.values()):
        if file.value("rope.scaling.type") not in (None, "none"):
            raise ModelError(f"cannot load {file.path}: its positions are scaled, and it has no factors for them")
        return plain
    if any(name not in file.tensors.infos for name in names.values()):
        raise ModelError(f"cannot load {file.path}: it has only one of {' and '.join(names.values())}")
    factors = {f"{kind}_factor": file.tensors.read(name).tolist() for kind, name in names.items()}
    factor = file.fraction("rope.scaling.attn_factor")
    return {
        **plain,
        **factors,
        "rope_type": "longrope",
        "factor": max(1.0, file.number("context_length") / max(original, 1)),
        "original_max_position_embeddings": original,
        **({} if factor is None else {"attention_factor": factor}),
    }


def _granite(file: GgufFile) -> Settings:
    return {
        "attention_multiplier": file.fraction("attention.scale", 1.0),
        "embedding_multiplier": file.fraction("embedding_scale", 1.0),
        "residual_multiplier": file.fraction("residual_scale", 1.0),
        "logits_scaling": file.fraction("logit_scale", 1.0),
        "attention_bias": _has(file, "attn_q.bias"),
    }


def _granite_dense(file: GgufFile) -> Settings:
    return {**_granite(file), "mlp_bias": _has(file, "ffn_up.bias")}


def _granite_moe(file: GgufFile) -> Settings:
    shared = file.tensors.infos.get("blk.0.ffn_down_shexp.weight")
    other = {} if shared is None else {"model_type": "granitemoeshared", "shared_intermediate_size": shared.shape[-1]}
    return {**_granite(file), **_local_experts(file), **other}


def _mamba2(file: GgufFile) -> Settings:
    heads, inner = file.number("ssm.time_step_rank"), file.number("ssm.inner_size")
    first = next((name for name in file.tensors.infos if name.endswith(".ssm_in.weight")), "blk.0.ssm_in.weight")
    layer = first.removesuffix("ssm_in.weight")
    if not heads:
        raise ModelError(f"cannot load {file.path}: its {file.architecture}.ssm.time_step_rank is 0")
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_n_groups": file.number("ssm.group_count"),
        "mamba_d_state": file.number("ssm.state_size"),
        "mamba_d_conv": file.number("ssm.conv_kernel"),
        "mamba_expand": max(1, inner // file.number("embedding_length")),
        "mamba_conv_bias": f"{layer}ssm_conv1d.bias" in file.tensors.infos,
        "mamba_proj_bias": f"{layer}ssm_in.bias" in file.tensors.infos,
    }


def _granite_hybrid(file: GgufFile) -> Settings:
    heads = file.numbers("attention.head_count_kv")
    attending = [bool(count) for count in heads]
    dense = not file.value("expert_count")
    shared = file.number("feed_forward_length") if dense else file.number("expert_shared_feed_forward_length", 0)
    rotates = file.value("rope.scaling.finetuned", True)
    experts = {"num_local_experts": 0, "num_experts_per_tok": 0} if dense else _local_experts(file)
    return {
        **_granite(file),
        **_mamba2(file),
        **experts,
        "num_key_value_heads": max(heads),
        "layer_types": [_FULL if attends else _LINEAR for attends in attending],
        "shared_intermediate_size": shared,
        "position_embedding_type": "rope" if rotates else None,
    }


def _falcon_h1(file: GgufFile) -> Settings:
    # The converter multiplies the weights by all multipliers.
    return {
        **_mamba2(file),
        "mamba_d_ssm": file.number("ssm.inner_size"),
        "mamba_rms_norm": _has(file, "ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        "head_dim": _head(file),
        "attention_bias": _has(file, "attn_q.bias"),
        "mlp_bias": _has(file, "ffn_up.bias"),
        "projectors_bias": _has(file, "ssm_out.bias"),
    }


def _lfm2(file: GgufFile) -> Settings:
    heads = file.numbers("attention.head_count_kv")
    return {
        "block_auto_adjust_ff_dim": False,
        "num_key_value_heads": max(heads),
        "layer_types": [_FULL if count else _CONV for count in heads],
        "norm_eps": file.fraction("attention.layer_norm_rms_epsilon", 1e-5),
        "conv_L_cache": file.number("shortconv.l_cache"),
        "conv_bias": _has(file, "shortconv.conv.bias"),
    }


_SIGMOID = 2  # llama.cpp's number of the function that weighs experts


def _lfm2_moe(file: GgufFile) -> Settings:
    if file.value("expert_gating_func", _SIGMOID) != _SIGMOID:
        raise ModelError(f"cannot load {file.path}: experts that are not weighed by a sigmoid are not read")
    dense = file.number("leading_dense_block_count", 0)
    return {
        **_lfm2(file),
        **_experts(file),
        "num_dense_layers": dense,
        "use_expert_bias": f"blk.{dense}.exp_probs_b.bias" in file.tensors.infos,
        "routed_scaling_factor": file.fraction("expert_weights_scale", 1.0),
    }


def _cohere(file: GgufFile) -> Settings:
    scale = file.fraction("logit_scale", 0.0625)
    return {**_layer_norms(file), "logit_scale": scale, "use_qk_norm": _has(file, "attn_q_norm.weight")}


def _cohere2(file: GgufFile) -> Settings:
    settings = _cohere(file)
    if settings.pop("use_qk_norm"):
        raise ModelError(f"cannot load {file.path}: a model of this architecture with normalized queries is not read")
    window = file.number("attention.sliding_window")
    return {**settings, "head_dim": _head(file), "sliding_window": window, "layer_types": _pattern(file, 4)}


def _exaone4(file: GgufFile) -> Settings:
    """Return EXAONE 4's settings; only the size with 64 layers has sliding windows."""
    layers = file.number("block_count")
    windows = layers == 64
    return {
        "head_dim": _head(file),
        "sliding_window": file.number("attention.sliding_window", 4096) if windows else None,
        "sliding_window_pattern": 4 if windows else None,
        "layer_types": _pattern(file, 4) if windows else [_FULL] * layers,
    }


def _gpt_oss(file: GgufFile) -> Settings:
    rope = _scaled(file, _rope(file), ("yarn",))
    # The authors don't round the frequencies between which positions are scaled, and the file doesn't say so.
    return {
        **_local_experts(file),
        "head_dim": _head(file),
        "sliding_window": file.number("attention.sliding_window"),
        "layer_types": [_FULL if layer % 2 else _SLIDING for layer in range(file.number("block_count"))],
        "rope_parameters": {**rope, "truncate": False} if rope["rope_type"] == "yarn" else rope,
    }


def _ministral3(file: GgufFile) -> Settings:
    beta = file.fraction("attention.temperature_scale", 0.0)
    length = file.number("attention.temperature_length", 0)
    rope = _scaled(file, _rope(file), ("yarn",))
    if multiplier := file.fraction(_LOG_MULTIPLIER, 0.0):
        rope |= {"mscale": 1.0, "mscale_all_dim": multiplier}
    original = rope.setdefault("original_max_position_embeddings", length or file.number("context_length"))
    if beta and length != original:
        raise ModelError(f"cannot load {file.path}: its attention.temperature_length is {length}, not {original}")
    return {"head_dim": _head(file), "rope_parameters": {**rope, "llama_4_scaling_beta": beta}}


# Most scale positions by two ways; some have Llama 3's factors, as a tensor, too.
_SCALED = ("linear", "yarn")
_BY_FACTORS = (*_SCALED, "llama3")

LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout(
            "llama", "llama", "Llama, Mistral, Mixtral, SmolLM 2", _llama, pairs=True, scalings=_BY_FACTORS,
            exports=("llama", "mistral"),
        ),
        Layout("mistral3", "ministral3", "Ministral 3", _ministral3, pairs=True, scalings=("yarn",)),
        Layout("qwen2", "qwen2", "Qwen 2 and 2.5", scalings=_SCALED, exports=("qwen2",)),
        Layout("qwen2moe", "qwen2_moe", "Qwen 1.5 and 2 with experts", _with_shared_expert, scalings=_SCALED),
        Layout("qwen3", "qwen3", "Qwen 3", _qwen3, scalings=_SCALED, exports=("qwen3",)),
        Layout(
            "qwen3moe", "qwen3_moe", "Qwen 3 with experts",
            lambda file: {**_qwen3(file), **_experts(file), "norm_topk_prob": True}, scalings=_SCALED,
        ),
        Layout(
            "qwen3next", "qwen3_next", "Qwen3-Next",
            lambda file: {**_linear_attention(file), **_with_shared_expert(file)}, offset_norms=True,
        ),
        Layout("qwen35", "qwen3_5_text", "Qwen 3.5", _qwen35, offset_norms=True),
        Layout(
            "qwen35moe", "qwen3_5_moe_text", "Qwen 3.5 with experts",
            lambda file: {**_qwen35(file), **_with_shared_expert(file)}, offset_norms=True,
        ),
        Layout("gemma", "gemma", "Gemma", lambda file: {"head_dim": _head(file)}, offset_norms=True),
        Layout("gemma2", "gemma2", "Gemma 2", _gemma2, offset_norms=True),
        Layout(
            "gemma3", "gemma3_text", "Gemma 3", _gemma3, offset_norms=True, scalings=("linear",),
            exports=("gemma3_text",),
        ),
        Layout("phi2", "phi", "Phi 1.5 and 2", lambda file: {**_layer_norms(file), **_partial_rope(file)}),
        Layout("phi3", "phi3", "Phi 3, 3.5 and 4", _phi3, scalings=("longrope",)),
        Layout("olmo", "olmo", "OLMo", lambda file: {"clip_qkv": file.fraction("attention.clamp_kqv")}, pairs=True),
        Layout("olmo2", "olmo2", "OLMo 2 and 3", _olmo2, scalings=("yarn",)),
        Layout("olmoe", "olmoe", "OLMoE", _local_experts),
        Layout(
            "smollm3", "smollm3", "SmolLM 3", lambda file: {"attention_bias": _has(file, "attn_q.bias")},
            pairs=True, scalings=_BY_FACTORS,
        ),
        Layout("granite", "granite", "Granite 3 and 4", _granite_dense, pairs=True),
        Layout("granitemoe", "granitemoe", "Granite 3 with experts", _granite_moe, pairs=True),
        Layout("granitehybrid", "granitemoehybrid", "Granite 4 with recurrent layers", _granite_hybrid, pairs=True),
        Layout("falcon-h1", "falcon_h1", "Falcon-H1", _falcon_h1),
        Layout("lfm2", "lfm2", "LFM 2", _lfm2),
        Layout("lfm2moe", "lfm2_moe", "LFM 2 with experts", _lfm2_moe),
        Layout("command-r", "cohere", "Command R", _cohere),
        Layout("cohere2", "cohere2", "Command R7B and Command A", _cohere2),
        Layout("gpt2", "gpt2", "GPT-2", lambda file: _layer_norms(file, "layer_norm_epsilon")),
        Layout("gptneox", "gpt_neox", "GPT-NeoX, Pythia", _gpt_neox),
        Layout("starcoder2", "starcoder2", "StarCoder 2", lambda file: _layer_norms(file, "norm_epsilon")),
        Layout("stablelm", "stablelm", "StableLM 2", _stablelm),
        Layout("gpt-oss", "gpt_oss", "gpt-oss", _gpt_oss, scalings=("yarn",)),
        Layout("exaone4", "exaone4", "EXAONE 4", _exaone4, scalings=("llama3",)),
        Layout("seed_oss", "seed_oss", "Seed-OSS", _headed),
        Layout("arcee", "arcee", "AFM", _llama, pairs=True, scalings=_BY_FACTORS),
        Layout("glm4", "glm4", "GLM 4", lambda file: {**_headed(file), **_partial_rope(file)}),
        Layout("ernie4_5", "ernie4_5", "ERNIE 4.5", _qwen3),
        Layout("hunyuan-dense", "hunyuan_v1_dense", "Hunyuan", lambda file: {"head_dim": _head(file)}),
    )
}  # fmt: skip
"""The supported architectures, by llama.cpp's names."""


def layout_of(file: GgufFile) -> Layout:
    """Return the layout of a file's architecture, or raise ``ModelError`` if it is not read."""
    layout = LAYOUTS.get(file.architecture)
    if layout is None:
        known = ", ".join(LAYOUTS)
        raise ModelError(
            f"cannot load {file.path}: GGUF files of architecture {file.architecture!r} are not read; give the folder "
            f"of the model in safetensors (read are {known})"
        )
    return layout


def read_settings(file: GgufFile) -> Settings:
    """Return the config of the model in a file, as transformers has it in a ``config.json``.

    Positions may be of the type ``FACTORS``.
    """
    layout, vocabulary = layout_of(file), file.vocabulary
    _refuse_absurd_sizes(file)
    try:
        specific = layout.config(file)
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise ModelError(
            f"cannot load {file.path}: its settings contradict each other ({one_line(str(error))})"
        ) from error
    settings = {"model_type": layout.model_type, "vocab_size": vocabulary, **_shared_settings(file, specific)}
    settings |= specific
    if "rope_parameters" not in specific:
        settings["rope_parameters"] = _scaled(file, _rope(file), layout.scalings)
    elif file.value("rope.scaling.type") not in (None, "none") and not layout.scalings:
        raise ModelError(f"cannot load {file.path}: its positions are scaled, which is not read for this architecture")
    return settings


def _layers_of(file: GgufFile) -> int:
    """Return the number of layers without those that draft several tokens at once."""
    layers, drafting = file.number("block_count"), file.number("nextn_predict_layers", 0)
    if drafting >= layers:
        raise ModelError(f"cannot load {file.path}: {drafting} of its {layers} layers draft")
    return layers - drafting


def _shared_settings(file: GgufFile, specific: Mapping[str, Any]) -> Settings:
    """Return the settings of all architectures, but those that have an own form in this one."""
    heads = file.number("attention.head_count")
    # In some, only a model's experts have a size.
    size = specific.get("intermediate_size") or file.number(
        "feed_forward_length", specific.get("moe_intermediate_size")
    )
    key_value = specific.get("num_key_value_heads") or file.number("attention.head_count_kv", heads)
    return {
        "hidden_size": file.number("embedding_length"),
        "intermediate_size": size,
        "num_hidden_layers": _layers_of(file),
        "num_attention_heads": heads,
        "num_key_value_heads": key_value,
        "max_position_embeddings": file.number("context_length"),
        "rms_norm_eps": file.fraction("attention.layer_norm_rms_epsilon", 1e-6),
        "tie_word_embeddings": "output.weight" not in file.tensors.infos,
        "bos_token_id": file.token_id("bos"),
        "eos_token_id": file.token_id("eos"),
        "pad_token_id": file.token_id("padding"),
    }


def _refuse_absurd_sizes(file: GgufFile) -> None:
    """Refuse sizes that contradict the file's tensors, before memory is allocated."""
    infos = file.tensors.infos
    rows = max((info.shape[0] for name, info in infos.items() if ".attn_q" in name), default=0)
    longest = max((size for info in infos.values() for size in info.shape), default=0)
    bounds = {**dict.fromkeys(_SIZES, longest), "block_count": len(infos), **dict.fromkeys(_ROPE_HEADS, rows)}
    if (positions := infos.get("position_embd.weight")) is not None:
        bounds["context_length"] = positions.shape[0]
    for key, most in bounds.items():
        value = file.value(key, 1)
        least = 1 if key in _NEVER_ZERO else 0
        for size in value if isinstance(value, list) else [file.number(key, 1)]:
            if not isinstance(size, int) or not least <= size <= most:
                raise ModelError(
                    f"cannot load {file.path}: its {file.architecture}.{key} is {size}, which its tensors do not fit"
                )


def _scaled(file: GgufFile, plain: Settings, scalings: tuple[str, ...]) -> Settings:
    """Return the rotary settings: plain, linear, YaRN, or factors that are a tensor of the file."""
    kind, factor = file.value("rope.scaling.type"), file.fraction("rope.scaling.factor")
    kind = None if kind == "none" else kind
    has_factors = "rope_freqs.weight" in file.tensors.infos
    if (kind is not None and kind not in scalings) or (has_factors and "llama3" not in scalings):
        raise ModelError(
            f"cannot load {file.path}: positions that are scaled by {kind or 'factors'!r} are not read for "
            f"architecture {file.architecture}"
        )
    if kind == "linear" and factor:
        return {**plain, "rope_type": "linear", "factor": factor}
    if kind == "yarn" and factor:
        return {**plain, **_yarn(file, factor)}
    if has_factors:
        return {**plain, "rope_type": FACTORS, "factors": file.tensors.read("rope_freqs.weight").tolist()}
    return dict(plain)


def _yarn(file: GgufFile, factor: float) -> Settings:
    unknown = ("rope.scaling.yarn_ext_factor", *(() if file.architecture == "mistral3" else (_LOG_MULTIPLIER,)))
    for name in unknown:
        if file.value(name):
            raise ModelError(f"cannot load {file.path}: positions that are scaled with a {name} are not read")
    settings: Settings = {
        "rope_type": "yarn",
        "factor": factor,
        "beta_fast": file.fraction("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": file.fraction("rope.scaling.yarn_beta_slow", 1.0),
        "original_max_position_embeddings": file.number("rope.scaling.original_context_length"),
    }
    attention = file.fraction("rope.scaling.attn_factor", file.fraction("rope.scaling.yarn_attn_factor"))
    if attention is not None:
        # In llama.cpp it is one more factor of the usual one.
        settings["attention_factor"] = attention * (0.1 * log(factor) + 1.0)
    return settings
