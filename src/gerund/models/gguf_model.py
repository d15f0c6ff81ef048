"""Make transformers' config of a GGUF file, and unpack its weights, undoing what llama.cpp's converter did to them.

Names come from the ``gguf`` package's table. A ``Rule`` is for weights that llama.cpp stores under several names, or
with other values. A file with a weight that the model has no place for is refused, as it would be computed without it.

Shapes: D width, F width of a feed-forward layer, E experts, H heads, K and V heads of keys and values.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from gerund.errors import ModelError
from gerund.gguf_architectures import FACTORS, layout_of, read_settings
from gerund.gguf_file import GgufFile
from gerund.models.library_calls import guarded
from gerund.packed.shape import llama3_divisors

Convert = Callable[[Sequence[Tensor], Any], Tensor]

# Tensors that are settings, which the config is made of, or that belong to drafting several tokens at once.
_NO_WEIGHTS = re.compile(r"rope_(freqs|factors_\w+)\.weight|.*\.(attn_rot_embd|rope_freqs)(\.weight)?|.*\.nextn\..*")


@dataclass(frozen=True)
class Rule:
    """How a weight is stored that is not simply renamed.

    Attributes:
        name: regular expression that transformers' name of the weight ends with.
        stored: the possible lists of llama.cpp's names; the first one that the file has is read. Names are those in a
            layer.
        convert: makes the weight from these tensors and the model's config; None for one tensor that is the weight.
    """

    name: str
    stored: tuple[tuple[str, ...], ...]
    convert: Convert | None = None


def _joined(parts: Sequence[Tensor], config: Any) -> Tensor:
    """Join the gate and the other half (each E, F, D or F, D)."""
    del config
    return torch.cat(list(parts), dim=-2) if len(parts) > 1 else parts[0]


def _log_of_negative(parts: Sequence[Tensor], config: Any) -> Tensor:
    del config
    return torch.log(-parts[0])


GENERAL = (
    Rule(r"experts\.gate_up_proj",
         (("ffn_gate_up_exps.weight",), ("ffn_gate_exps.weight", "ffn_up_exps.weight")), _joined),
    Rule(r"experts\.down_proj", (("ffn_down_exps.weight",),)),
    Rule(r"\.expert_bias", (("exp_probs_b.bias",),)),
    Rule(r"\.dt_bias", (("ssm_dt.bias",),)),
    Rule(r"\.A_log", (("ssm_a",),), _log_of_negative),
    Rule(r"mamba\.D", (("ssm_d",),)),
    Rule(r"self_attn\.sinks", (("attn_sinks.weight",),)),
)  # fmt: skip
"""Rules of all architectures; those of one come first."""

GRANITE = (
    Rule(r"block_sparse_moe\.router\.weight", (("ffn_gate_inp.weight",),)),
    Rule(
        r"shared_mlp\.input_linear\.weight",
        (("ffn_gate_shexp.weight", "ffn_up_shexp.weight"), ("ffn_gate.weight", "ffn_up.weight")),
        _joined,
    ),
    Rule(r"shared_mlp\.output_linear\.weight", (("ffn_down_shexp.weight",), ("ffn_down.weight",))),
)
"""Granite's: experts, and a feed-forward layer beside them, alone in models without experts."""


def _by_turns(parts: Sequence[Tensor], config: Any) -> Tensor:
    """Lay gate and up (each E, F, D or E, F) side by side, with the experts' inputs first."""
    del config
    mixed = torch.stack(list(parts), dim=2).flatten(1, 2)
    return mixed.transpose(1, 2) if mixed.dim() > 2 else mixed


def _turned(parts: Sequence[Tensor], config: Any) -> Tensor:
    del config
    return parts[0].transpose(-1, -2)


GPT_OSS = (
    Rule(r"experts\.gate_up_proj", (("ffn_gate_exps.weight", "ffn_up_exps.weight"),), _by_turns),
    Rule(r"experts\.gate_up_proj_bias", (("ffn_gate_exps.bias", "ffn_up_exps.bias"),), _by_turns),
    Rule(r"experts\.down_proj", (("ffn_down_exps.weight",),), _turned),
    Rule(r"experts\.down_proj_bias", (("ffn_down_exps.bias",),)),
)
"""GPT-OSS's, whose experts multiply from the other side."""

GPT2 = (
    Rule(r"attn\.c_attn\.weight", (("attn_qkv.weight",),), _turned),
    Rule(r"attn\.c_proj\.weight", (("attn_output.weight",),), _turned),
    Rule(r"mlp\.c_fc\.weight", (("ffn_up.weight",),), _turned),
    Rule(r"mlp\.c_proj\.weight", (("ffn_down.weight",),), _turned),
)
"""GPT-2's, whose layers multiply from the other side."""


def _in_heads(parts: Sequence[Tensor], config: Any) -> Tensor:
    """Return queries, keys and values by head, from all queries, all keys and all values."""
    heads, stored = config.num_attention_heads, parts[0]
    return stored.reshape(3, heads, -1, *stored.shape[1:]).transpose(0, 1).reshape(stored.shape)


GPT_NEOX = (Rule(r"attention\.query_key_value\.(weight|bias)", (("attn_qkv.",),), _in_heads),)
"""GPT-NeoX's queries, keys and values."""


def _value_order(config: Any) -> Tensor:
    """Return the stored place of each value head of Qwen 3.5; the file has them go round the key heads."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    return torch.argsort(torch.arange(values).reshape(keys, values // keys).T.flatten())


def _value_rows(config: Any) -> Tensor:
    size = config.linear_value_head_dim
    return (_value_order(config)[:, None] * size + torch.arange(size)).flatten()


def _heads_sorted(parts: Sequence[Tensor], config: Any) -> Tensor:
    return parts[0][_value_order(config)]


def _decay_sorted(parts: Sequence[Tensor], config: Any) -> Tensor:
    return torch.log(-parts[0])[_value_order(config)]


def _rows_sorted(parts: Sequence[Tensor], config: Any) -> Tensor:
    return parts[0][_value_rows(config)]


def _columns_sorted(parts: Sequence[Tensor], config: Any) -> Tensor:
    return parts[0][:, _value_rows(config)]


def _last_rows_sorted(parts: Sequence[Tensor], config: Any) -> Tensor:
    """Sort the values of stored queries, keys and values."""
    before = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    return torch.cat([parts[0][:before], parts[0][before:][_value_rows(config)]])


QWEN35 = (
    Rule(r"\.dt_bias", (("ssm_dt.bias",),), _heads_sorted),
    Rule(r"\.A_log", (("ssm_a",),), _decay_sorted),
    Rule(r"linear_attn\.in_proj_a\.weight", (("ssm_alpha.weight",),), _heads_sorted),
    Rule(r"linear_attn\.in_proj_b\.weight", (("ssm_beta.weight",),), _heads_sorted),
    Rule(r"linear_attn\.in_proj_z\.weight", (("attn_gate.weight",),), _rows_sorted),
    Rule(r"linear_attn\.in_proj_qkv\.weight", (("attn_qkv.weight",),), _last_rows_sorted),
    Rule(r"linear_attn\.conv1d\.weight", (("ssm_conv1d.weight",),), _last_rows_sorted),
    Rule(r"linear_attn\.out_proj\.weight", (("ssm_out.weight",),), _columns_sorted),
)
"""Qwen 3.5's gated delta net."""


def _grouped(parts: Sequence[Tensor], config: Any) -> Tensor:
    """Return queries, keys, values and gates by key head, from each kind for all heads."""
    keys, state = config.linear_num_key_heads, config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    width = parts[0].shape[-1]
    kinds = [*parts[0].split([keys * state, keys * state, values]), parts[1]]
    return torch.cat([kind.reshape(keys, -1, width) for kind in kinds], dim=1).reshape(-1, width)


QWEN3_NEXT = (
    Rule(r"linear_attn\.in_proj_qkvz\.weight", (("ssm_in.weight",), ("attn_qkv.weight", "attn_gate.weight")),
         lambda parts, config: parts[0] if len(parts) == 1 else _grouped(parts, config)),
)  # fmt: skip
"""Qwen3-Next's gated delta net."""


RULES = {
    "qwen3next": QWEN3_NEXT,
    "qwen35": QWEN35,
    "qwen35moe": QWEN35,
    "granitemoe": GRANITE,
    "granitehybrid": GRANITE,
    "gpt2": GPT2,
    "gptneox": GPT_NEOX,
    "gpt-oss": GPT_OSS,
}
"""The rules of single architectures, by llama.cpp's names."""


def read_config(file: GgufFile) -> PreTrainedConfig:
    """Return the config of the model in a file."""
    settings, kinds = read_settings(file), set(file.types)
    if settings["rope_parameters"].get("rope_type") == FACTORS:
        settings["rope_parameters"] = _without_factors(file, settings["rope_parameters"])
    settings["architectures"] = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[settings["model_type"]]]
    # Quantized blocks become bfloat16.
    settings["dtype"] = "float32" if kinds == {"F32"} else "float16" if kinds <= {"F16", "F32"} else "bfloat16"
    return guarded(f"cannot load {file.path}", AutoConfig.for_model, **settings)


def _without_factors(file: GgufFile, rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary settings that give a file's factors: one for all, or those of a released Llama 3.x model."""
    theta, factors = rope["rope_theta"], np.array(rope["factors"])
    if np.allclose(factors, factors[0]):
        return {"rope_type": "linear", "rope_theta": theta, "factor": float(factors[0])}
    for original in (8192, 4096, 16384, 2048, 16):
        for high in (4.0, 2.0):
            guess = {
                "factor": float(factors.max()),
                "low_freq_factor": 1.0,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
            if np.allclose(llama3_divisors(theta, 2 * len(factors), guess), factors, rtol=1e-3):
                return {"rope_type": "llama3", "rope_theta": theta, **guess}
    raise ModelError(f"cannot load {file.path}: the factors of its positions (rope_freqs.weight) are not Llama 3's")


def read_weights(file: GgufFile, model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Unpack a file's weights into a model on torch's meta device, built of the file's config.

    ``dtype`` is that of the weights in memory.

    Raises:
        ModelError: a weight is missing, has another shape, or has no place in the model.
    """
    import gguf

    config, layout, rules = model.config, layout_of(file), RULES.get(file.architecture, ())
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == file.architecture)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    state: dict[str, Tensor] = {}
    used: set[str] = set()
    for name, parameter in model.state_dict().items():
        if config.tie_word_embeddings and name == "lm_head.weight":
            continue
        stored, convert = _stored(file, name, rules, names)
        parts = [torch.from_numpy(_unpacked(file, part)) for part in stored]
        if layout.pairs and re.search(r"\.attn_[qk]\.", stored[0]):
            heads = config.num_attention_heads if ".attn_q." in stored[0] else config.num_key_value_heads
            if not heads or parts[0].shape[0] % (2 * heads):
                raise ModelError(f"cannot load {file.path}: {stored[0]} has {parts[0].shape[0]} rows for {heads} heads")
            parts = [halves_from_pairs(part, heads) for part in parts]
        if layout.offset_norms and stored[0].endswith("norm.weight") and not stored[0].endswith("ssm_norm.weight"):
            parts = [part - 1 for part in parts]
        state[name] = _shaped(file, stored[0], parts, convert, config, parameter.shape).to(dtype)
        used.update(stored)
    _refuse_unused(file, used, config.num_hidden_layers)
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()


def _stored(file: GgufFile, name: str, rules: Sequence[Rule], names: Any) -> tuple[tuple[str, ...], Convert | None]:
    """Return llama.cpp's names of the tensors that a weight is made of, and what makes it of them."""
    known = file.tensors.infos
    for rule in (*rules, *GENERAL):
        if (match := re.search(rf"(?:{rule.name})$", name)) is None:
            continue
        layer = re.search(r"\.(\d+)\.", name)
        assert layer is not None
        ending = (match.groups() or ("",))[0]
        lists = [tuple(f"blk.{layer[1]}.{part}{ending}" for part in parts) for parts in rule.stored]
        stored = next((parts for parts in lists if all(part in known for part in parts)), lists[-1])
        missing = next((part for part in stored if part not in known), None)
        if missing is not None:
            raise ModelError(f"cannot load {file.path}: {missing} is missing from its weights")
        return stored, rule.convert
    mapped = names.get_name(name, (".weight", ".bias"))
    if mapped is None or mapped not in known:
        raise ModelError(f"cannot load {file.path}: {mapped or name} is missing from its weights")
    return (mapped,), None


def _shaped(
    file: GgufFile, stored: str, parts: Sequence[Tensor], convert: Convert | None, config: Any, shape: torch.Size
) -> Tensor:
    """Return a weight, of which llama.cpp may have left out or added a dimension of size one."""
    try:
        tensor = parts[0] if convert is None else convert(parts, config)
        squeezed = [[size for size in sizes if size > 1] for sizes in (tensor.shape, shape)]
        if squeezed[0] == squeezed[1] or (".ssm_norm." in stored and tensor.numel() == shape.numel()):
            tensor = tensor.reshape(shape)
    except (RuntimeError, IndexError) as error:
        raise ModelError(f"cannot load {file.path}: {stored} is of shape {tuple(parts[0].shape)}") from error
    if tensor.shape != shape:
        raise ModelError(f"cannot load {file.path}: {stored} is of shape {tuple(tensor.shape)} and not {tuple(shape)}")
    return tensor


def _refuse_unused(file: GgufFile, used: Iterable[str], layers: int) -> None:
    """Refuse a file with weights that the model has no place for."""
    for name in sorted(set(file.tensors.infos) - set(used)):
        layer = re.match(r"blk\.(\d+)\.", name)
        drafts = layer is not None and int(layer[1]) >= layers and file.value("nextn_predict_layers", 0)
        if not drafts and not _NO_WEIGHTS.fullmatch(name):
            raise ModelError(
                f"cannot load {file.path}: it has a weight {name}, which gerund does not know in a model of "
                f"architecture {file.architecture}; give the folder of the model in safetensors"
            )


def _unpacked(file: GgufFile, name: str) -> np.ndarray:
    try:
        return np.ascontiguousarray(file.tensors.read(name))
    except (NotImplementedError, ValueError, KeyError) as error:
        kind = file.tensors.infos[name].ggml_type
        raise ModelError(f"cannot load {file.path}: {name} is of type {kind}, which cannot be unpacked") from error


def halves_from_pairs(tensor: Tensor, heads: int) -> Tensor:
    """Move the two dimensions that are rotated together half a head apart, as transformers has them.

    >>> halves_from_pairs(torch.tensor([0.0, 4.0, 1.0, 5.0, 2.0, 6.0, 3.0, 7.0]), 1).tolist()
    [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    """
    rows = tensor.shape[0]
    return tensor.reshape(heads, rows // heads // 2, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def pairs_from_halves(tensor: Tensor, heads: int) -> Tensor:
    """Undo ``halves_from_pairs``.

    >>> pairs_from_halves(torch.arange(8.0), 1).tolist()
    [0.0, 4.0, 1.0, 5.0, 2.0, 6.0, 3.0, 7.0]
    """
    rows = tensor.shape[0]
    return tensor.reshape(heads, 2, rows // heads // 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
