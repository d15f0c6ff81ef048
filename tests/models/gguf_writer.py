"""Write a tiny model as llama.cpp's converter does, for tests of reading."""

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from gerund.exporting.gguf import frequency_factors, token_table, write_tokens


def write_gguf(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    path: Path,
    arch: str,
    weights: Mapping[str, Tensor] | None = None,
    **changes: Any,
) -> Path:
    """Write a model as a file of an architecture, or the given weights; ``changes`` are further settings."""
    writer = gguf.GGUFWriter(path, arch)
    settings = {**common_settings(model.config), **(EXTRA[arch](model.config) if arch in EXTRA else {}), **changes}
    for key, value in settings.items():
        put(writer, f"{arch}.{key}", value)
    write_tokens(writer, tokenizer, model, token_table(tokenizer, model.get_input_embeddings().weight.shape[0]))
    finish(writer, weights or tensors(model, arch))
    return path


def finish(writer: Any, weights: Mapping[str, Tensor]) -> None:
    for name, tensor in weights.items():
        writer.add_tensor(name, tensor.detach().float().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def put(writer: Any, key: str, value: Any) -> None:
    """Write a setting; None is left out."""
    if value is None:
        return
    add: dict[type, Callable[..., None]] = {
        bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string,
        list: writer.add_array,
    }  # fmt: skip
    add[type(value)](key, value)


def _head(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def common_settings(config: Any) -> dict[str, Any]:
    """Return the settings that most architectures have."""
    heads = config.num_attention_heads
    rope = _rope(config)
    return {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        "attention.head_count": heads,
        "attention.head_count_kv": getattr(config, "num_key_value_heads", None) or heads,
        "attention.key_length": _head(config),
        "attention.value_length": _head(config),
        "rope.dimension_count": int(_head(config) * rope.get("partial_rotary_factor", 1.0)),
        "rope.freq_base": float(rope["rope_theta"]) if "rope_theta" in rope else None,
        "attention.layer_norm_rms_epsilon": float(getattr(config, "rms_norm_eps", None) or 1e-5),
        **_scaling(rope),
    }


def _rope(config: Any) -> dict[str, Any]:
    rope = getattr(config, "rope_parameters", None) or {}
    return rope.get("full_attention", rope)


def _scaling(rope: dict[str, Any]) -> dict[str, Any]:
    kind = rope.get("rope_type", "default")
    if kind not in ("linear", "yarn", "longrope"):
        return {}
    return {
        "rope.scaling.type": kind,
        "rope.scaling.factor": float(rope["factor"]) if "factor" in rope else None,
        "rope.scaling.original_context_length": rope.get("original_max_position_embeddings"),
    }


def _layer_norm(config: Any, key: str = "layer_norm_eps") -> dict[str, Any]:
    return {"attention.layer_norm_epsilon": float(getattr(config, key)), "attention.layer_norm_rms_epsilon": None}


def _experts(config: Any) -> dict[str, Any]:
    count = getattr(config, "num_experts", None) or config.num_local_experts
    return {
        "expert_count": count,
        "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": getattr(config, "moe_intermediate_size", None) or config.intermediate_size,
    }


def _shared_expert(config: Any) -> dict[str, Any]:
    return {**_experts(config), "expert_shared_feed_forward_length": config.shared_expert_intermediate_size}


def _window(config: Any) -> dict[str, Any]:
    return {"attention.sliding_window": config.sliding_window}


def _gemma(config: Any) -> dict[str, Any]:
    return {
        **_window(config),
        "attn_logit_softcapping": getattr(config, "attn_logit_softcapping", None),
        "final_logit_softcapping": config.final_logit_softcapping,
    }


def _gemma3(config: Any) -> dict[str, Any]:
    rope = config.rope_parameters
    return {
        **_window(config),
        "rope.freq_base": float(rope["full_attention"]["rope_theta"]),
        "rope.freq_base_swa": float(rope["sliding_attention"]["rope_theta"]),
    }


def _granite(config: Any) -> dict[str, Any]:
    return {
        "attention.scale": float(config.attention_multiplier),
        "embedding_scale": float(config.embedding_multiplier),
        "residual_scale": float(config.residual_multiplier),
        "logit_scale": float(config.logits_scaling),
    }


def _mamba(config: Any) -> dict[str, Any]:
    inner = getattr(config, "mamba_d_ssm", None) or config.mamba_n_heads * config.mamba_d_head
    return {
        "ssm.conv_kernel": config.mamba_d_conv,
        "ssm.state_size": config.mamba_d_state,
        "ssm.group_count": config.mamba_n_groups,
        "ssm.inner_size": inner,
        "ssm.time_step_rank": config.mamba_n_heads,
    }


def _kv_heads(config: Any) -> list[int]:
    return [
        config.num_key_value_heads if kind.endswith("attention") and kind != "linear_attention" else 0
        for kind in config.layer_types
    ]


def _granite_hybrid(config: Any) -> dict[str, Any]:
    if not config.num_local_experts:
        sizes = {"feed_forward_length": config.shared_intermediate_size}
    else:
        sizes = {**_experts(config), "expert_shared_feed_forward_length": config.shared_intermediate_size}
    return {
        **_granite(config),
        **_mamba(config),
        **sizes,
        "attention.head_count_kv": _kv_heads(config),
        "rope.scaling.finetuned": config.position_embedding_type == "rope",
    }


def _lfm2(config: Any) -> dict[str, Any]:
    return {
        "shortconv.l_cache": config.conv_L_cache,
        "attention.head_count_kv": _kv_heads(config),
        "attention.layer_norm_rms_epsilon": float(config.norm_eps),
    }


def _lfm2_moe(config: Any) -> dict[str, Any]:
    return {
        **_lfm2(config),
        **_experts(config),
        "leading_dense_block_count": config.num_dense_layers,
        "expert_gating_func": 2,
    }


def _linear(config: Any) -> dict[str, Any]:
    return {
        "full_attention_interval": config.layer_types.index("full_attention") + 1,
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_value_head_dim * config.linear_num_value_heads,
    }


def _qwen35(config: Any) -> dict[str, Any]:
    sections = config.rope_parameters["mrope_section"]
    return {**_linear(config), "rope.dimension_sections": [*sections, 0]}


def _phi3(config: Any) -> dict[str, Any]:
    rope = config.rope_parameters
    factor = None
    if rope["rope_type"] == "longrope":
        original = rope["original_max_position_embeddings"]
        factor = math.sqrt(1 + math.log(config.max_position_embeddings / original) / math.log(original))
    return {"attention.sliding_window": config.sliding_window, "rope.scaling.attn_factor": factor}


def _ministral3(config: Any) -> dict[str, Any]:
    rope = config.rope_parameters
    return {
        "rope.scaling.yarn_log_multiplier": rope.get("mscale_all_dim"),
        "attention.temperature_scale": rope["llama_4_scaling_beta"],
        "attention.temperature_length": rope["original_max_position_embeddings"],
    }


# The settings that only one architecture has.
EXTRA: dict[str, Callable[[Any], dict[str, Any]]] = {
    "llama": lambda config: _experts(config) if hasattr(config, "num_local_experts") else {},
    "mistral3": _ministral3,
    "qwen2moe": _shared_expert,
    "qwen3moe": _experts,
    "qwen3next": lambda config: {**_linear(config), **_shared_expert(config)},
    "qwen35": _qwen35,
    "qwen35moe": lambda config: {**_qwen35(config), **_shared_expert(config)},
    "gemma2": _gemma,
    "gemma3": _gemma3,
    "gpt2": lambda config: _layer_norm(config, "layer_norm_epsilon"),
    "gptneox": lambda config: {**_layer_norm(config), "use_parallel_residual": config.use_parallel_residual},
    "olmo": lambda config: {
        **_layer_norm(type("", (), {"eps": 1e-5}), "eps"),
        "attention.clamp_kqv": None if config.clip_qkv is None else float(config.clip_qkv),
    },
    "olmo2": lambda config: _window(config) if hasattr(config, "sliding_window") else {},
    "olmoe": _experts,
    "phi2": _layer_norm,
    "phi3": _phi3,
    "phimoe": _experts,
    "granite": _granite,
    "granitemoe": lambda config: {
        **_granite(config),
        **_experts(config),
        "expert_shared_feed_forward_length": getattr(config, "shared_intermediate_size", None),
    },
    "granitehybrid": _granite_hybrid,
    "falcon-h1": _mamba,
    "lfm2": _lfm2,
    "lfm2moe": _lfm2_moe,
    "command-r": lambda config: {**_layer_norm(config), "logit_scale": float(config.logit_scale)},
    "cohere2": lambda config: {
        **_layer_norm(config),
        **_window(config),
        "logit_scale": float(config.logit_scale),
    },
    "starcoder2": lambda config: _layer_norm(config, "norm_epsilon"),
    "stablelm": lambda config: {**_layer_norm(config), "use_parallel_residual": config.use_parallel_residual},
    "gpt-oss": lambda config: {**_window(config), **_experts(config)},
    "exaone4": lambda config: _window(config) if config.sliding_window else {},
}  # fmt: skip


def tensors(model: PreTrainedModel, arch: str) -> dict[str, Tensor]:
    """Return the weights as llama.cpp's converter stores them."""
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(number, model.config.num_hidden_layers)
    stored: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if model.config.tie_word_embeddings and name == "lm_head.weight":
            continue
        for own, part in _converted(name, tensor, arch, model.config):
            known = own if own.startswith("blk.") else names.get_name(own, (".weight", ".bias"))
            assert known is not None, name
            stored[known] = part
    return {**stored, **_factors(model)}


def _factors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return what llama.cpp divides the frequencies by, of Llama 3's positions and Phi 3's."""
    rope = getattr(model.config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        return {f"rope_factors_{kind}.weight": torch.tensor(rope[f"{kind}_factor"]) for kind in ("short", "long")}
    factors = frequency_factors(model) if rope.get("rope_type") == "llama3" else None
    return {} if factors is None else {"rope_freqs.weight": factors}


def _pairs(tensor: Tensor, heads: int) -> Tensor:
    rows = tensor.shape[0]
    return tensor.reshape(heads, 2, rows // heads // 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


_IN_PAIRS = ("llama", "mistral3", "smollm3", "granite", "granitemoe", "granitehybrid", "olmo", "arcee")
_ONE_ADDED = ("gemma", "gemma2", "gemma3", "qwen3next", "qwen35", "qwen35moe")


def _converted(name: str, tensor: Tensor, arch: str, config: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield what a weight is stored as: llama.cpp's name or transformers' own, and the values."""
    block = f"blk.{name.split('.')[2]}" if name.count(".") > 2 else ""
    if arch in _IN_PAIRS and (".q_proj." in name or ".k_proj." in name):
        heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
        yield name, _pairs(tensor, heads)
    elif arch in _ONE_ADDED and name.endswith("norm.weight") and "linear_attn" not in name:
        yield name, tensor + 1
    elif arch == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
        yield name, tensor.T
    elif arch == "gpt-oss" and ".experts." in name:
        yield from _gpt_oss_experts(name, tensor, block)
    elif name.endswith(("experts.gate_up_proj", "shared_mlp.input_linear.weight")):
        what = "_exps" if "shared" not in name else "_shexp" if config.num_local_experts else ""
        gate, up = tensor.chunk(2, dim=-2)
        yield f"{block}.ffn_gate{what}.weight", gate
        yield f"{block}.ffn_up{what}.weight", up
    elif name.endswith("shared_mlp.output_linear.weight"):
        yield f"{block}.ffn_down{'_shexp' if config.num_local_experts else ''}.weight", tensor
    elif name.endswith("experts.down_proj"):
        yield f"{block}.ffn_down_exps.weight", tensor
    elif name.endswith("block_sparse_moe.router.weight"):
        yield f"{block}.ffn_gate_inp.weight", tensor
    elif name.endswith("expert_bias"):
        yield f"{block}.exp_probs_b.bias", tensor
    elif name.endswith("self_attn.sinks"):
        yield f"{block}.attn_sinks.weight", tensor
    elif "linear_attn" in name:
        yield from _delta_net(name, tensor, arch, block, config)
    elif ".mamba." in name:
        yield from _mamba_weights(name, tensor, block, config)
    elif name.endswith("conv.conv.weight"):
        yield name, tensor.squeeze(1)
    elif arch == "gptneox" and "query_key_value" in name:
        heads = config.num_attention_heads
        yield name, tensor.reshape(heads, 3, -1, *tensor.shape[1:]).transpose(0, 1).reshape(tensor.shape)
    else:
        yield name, tensor


def _gpt_oss_experts(name: str, tensor: Tensor, block: str) -> Iterator[tuple[str, Tensor]]:
    kind = "bias" if name.endswith("_bias") else "weight"
    tensor = tensor if kind == "bias" else tensor.transpose(-1, -2)
    if "gate_up" not in name:
        yield f"{block}.ffn_down_exps.{kind}", tensor
        return
    yield f"{block}.ffn_gate_exps.{kind}", tensor[:, ::2]
    yield f"{block}.ffn_up_exps.{kind}", tensor[:, 1::2]


def _mamba_weights(name: str, tensor: Tensor, block: str, config: Any) -> Iterator[tuple[str, Tensor]]:
    last = name.rpartition("mamba.")[2]
    if last == "dt_bias":
        yield f"{block}.ssm_dt.bias", tensor
    elif last == "A_log":
        yield f"{block}.ssm_a", -tensor.exp()[:, None]
    elif last == "D":
        yield f"{block}.ssm_d", tensor[:, None]
    elif last == "conv1d.weight":
        yield name, tensor.squeeze(1)
    elif last == "norm.weight":
        yield name, tensor.reshape(config.mamba_n_groups, -1)
    else:
        yield name, tensor


def _delta_net(name: str, tensor: Tensor, arch: str, block: str, config: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield a gated delta net's weights; Qwen 3.5's value heads go round the key heads."""
    last = name.rpartition("linear_attn.")[2]
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    head, state = config.linear_value_head_dim, config.linear_key_head_dim
    if arch == "qwen3next":
        order = torch.arange(values)
    else:
        order = torch.arange(values).reshape(keys, values // keys).T.flatten()
    rows = (order[:, None] * head + torch.arange(head)).flatten()
    before = torch.arange(2 * keys * state)
    if last == "dt_bias":
        yield f"{block}.ssm_dt.bias", tensor[order]
    elif last == "A_log":
        yield f"{block}.ssm_a", -tensor[order].exp()
    elif last == "conv1d.weight":
        yield f"{block}.ssm_conv1d.weight", tensor.squeeze(1)[torch.cat([before, len(before) + rows])]
    elif last == "in_proj_qkv.weight":
        yield f"{block}.attn_qkv.weight", tensor[torch.cat([before, len(before) + rows])]
    elif last == "in_proj_z.weight":
        yield f"{block}.attn_gate.weight", tensor[rows]
    elif last in ("in_proj_a.weight", "in_proj_b.weight"):
        yield f"{block}.ssm_{'alpha' if last[8] == 'a' else 'beta'}.weight", tensor[order]
    elif last == "out_proj.weight":
        yield f"{block}.ssm_out.weight", tensor[:, rows]
    elif last == "in_proj_qkvz.weight":
        grouped = tensor.reshape(keys, -1, tensor.shape[-1])
        sizes = [state, state, values // keys * head, values // keys * head]
        query, key, value, gate = (part.flatten(0, 1) for part in grouped.split(sizes, dim=1))
        yield f"{block}.attn_qkv.weight", torch.cat([query, key, value])
        yield f"{block}.attn_gate.weight", gate
    else:
        yield name, tensor


def llama_cpp_logprobs(server: Any, ids: list[int], vocabulary: int) -> np.ndarray:
    """Return llama.cpp's log-probabilities of each token after others."""
    import httpx

    # The bias makes it write a whole character, without which it lists nothing; what it lists is without the bias.
    body = dict(
        prompt=ids, n_predict=1, n_probs=vocabulary, temperature=0.0, cache_prompt=False, logit_bias=[[70, 1e4]]
    )
    answer = httpx.post(f"{server.listening_address}/completion", json=body, timeout=60).json()
    listed = answer["completion_probabilities"][0]["top_logprobs"]
    found = np.full(vocabulary, -np.inf)
    for entry in listed:
        found[entry["id"]] = entry["logprob"]
    return found
