"""The language model as GGUF, for llama.cpp and what is built on it: it writes and does not encode.

GGUF has no attention plans, so that only the untouched model goes there: no adapter, no pooling. What llama.cpp makes
of the file is compared with what the model itself makes of the same texts, before the file is put in place.

Knows: the names of GGUF, of Llama, Mistral and Qwen. Does not know: what llama.cpp computes, where the file goes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from gerund.errors import ConfigError
from gerund.exporting import llama_cpp
from gerund.exporting.gguf_tokens import TokenTable, token_table
from gerund.exporting.onnx import demand_installed
from gerund.inference.encode.runtime import EncoderRuntime
from gerund.models.adapters import base_state
from gerund.models.loading import NoHead

MODEL_FILE = "model.gguf"
_NEEDED = ("gguf", "xllamacpp")
_SHARE_A_SCALE = 32  # weights of Q8_0


@dataclass(frozen=True)
class _Kind:
    """How an architecture is called, and what is special about it.

    Attributes:
        name: in GGUF.
        pairs: whether llama.cpp turns neighbours by the position, where transformers turns the two halves of a head.
        scaled: whether llama.cpp reads factors by which frequencies are divided.
    """

    name: str
    pairs: bool = False
    scaled: bool = False


_KINDS = {
    "llama": _Kind("llama", pairs=True, scaled=True),
    "mistral": _Kind("llama", pairs=True, scaled=True),
    "qwen2": _Kind("qwen2"),
    "qwen3": _Kind("qwen3"),
}


def write(runtime: EncoderRuntime, folder: Path, *, eight_bits: bool = False) -> None:
    """Fill ``folder`` with the model and a README, after llama.cpp was asked to continue a few texts.

    Args:
        runtime: the model.
        folder: where to.
        eight_bits: hold weights in eight bits (Q8_0: 32 of them share a scale), rather than in their own type.

    Raises:
        ConfigError: an architecture, a setting of it or a tokenizer that is not written as GGUF.
        ModelError: llama.cpp refuses the file, or continues otherwise.
        MissingDependencyError: gguf or xllamacpp is not installed.
    """
    demand_installed(_NEEDED, "GGUF", "gguf")
    model, tokenizer = runtime.model, runtime.tokenizer
    kind = _kind_of(model)
    table = token_table(tokenizer, model.get_input_embeddings().weight.shape[0])
    _write_file(model, tokenizer, kind, table, folder / MODEL_FILE, eight_bits=eight_bits)
    farthest = llama_cpp.check(model, tokenizer, folder / MODEL_FILE, eight_bits=eight_bits)
    (folder / "README.md").write_text(_readme(model, farthest, eight_bits=eight_bits), encoding="utf-8")


def _kind_of(model: PreTrainedModel) -> _Kind:
    """Return what GGUF calls the architecture.

    Raises:
        ConfigError: it is none that is written, or llama.cpp would compute it otherwise.
    """
    config = model.config
    kind = _KINDS.get(config.model_type)
    if kind is None:
        known = ", ".join(_KINDS)
        raise ConfigError(
            f"a {config.model_type} model is not written as GGUF; {known} are (llama.cpp's repository has a converter "
            "for others, convert_hf_to_gguf.py)"
        )
    if isinstance(model.get_output_embeddings(), NoHead):
        raise ConfigError("this model was saved without an output head: it encodes, and GGUF is for generating")
    rope = config.rope_parameters.get("rope_type", "default")
    if rope not in (("default", "linear", "llama3") if kind.scaled else ("default",)):
        raise ConfigError(
            f"positions that are scaled by {rope!r} are not written as GGUF for a {config.model_type} model"
        )
    window = getattr(config, "sliding_window", None)
    if window is not None and window < config.max_position_embeddings:
        raise ConfigError(
            f"llama.cpp does not know the sliding window of {window} tokens of a {config.model_type} model"
        )
    if config.hidden_act != "silu":
        raise ConfigError(f"llama.cpp computes a {config.model_type} model with silu, not {config.hidden_act}")
    return kind


def _write_file(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    kind: _Kind,
    table: TokenTable,
    path: Path,
    *,
    eight_bits: bool,
) -> None:
    import gguf

    writer = gguf.GGUFWriter(path, kind.name)
    _write_settings(writer, model, table, eight_bits=eight_bits)
    _write_tokens(writer, tokenizer, model, table)
    for name, tensor in _tensors(model, kind).items():
        data, stored = _stored(tensor, eight_bits=eight_bits)
        writer.add_tensor(name, data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_settings(writer: Any, model: PreTrainedModel, table: TokenTable, *, eight_bits: bool) -> None:
    import gguf

    config = model.config
    own = {torch.bfloat16: gguf.LlamaFileType.MOSTLY_BF16, torch.float16: gguf.LlamaFileType.MOSTLY_F16}
    types = gguf.LlamaFileType
    writer.add_file_type(types.MOSTLY_Q8_0 if eight_bits else own.get(model.dtype, types.ALL_F32))
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    width = _head_width(config)
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_dimension_count(width)
    writer.add_rope_freq_base(float(config.rope_parameters["rope_theta"]))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(len(table.tokens))


def _write_tokens(writer: Any, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, table: TokenTable) -> None:
    writer.add_tokenizer_model(table.model)
    writer.add_tokenizer_pre(table.cut)
    writer.add_token_list(table.tokens)
    writer.add_token_types(table.types)
    if table.model == "gpt2":
        writer.add_token_merges(table.merges)
    else:
        writer.add_token_scores(table.scores)
        writer.add_add_space_prefix(table.space_before)
    ids = tokenizer("a").input_ids
    begin, ends = tokenizer.bos_token_id, _ends(tokenizer, model)
    writer.add_add_bos_token(begin is not None and ids[0] == begin)
    writer.add_add_eos_token(ids[-1] in ends)
    if begin is not None:
        writer.add_bos_token_id(begin)
    if ends:
        writer.add_eos_token_id(ends[0])
    for end in ends[1:2]:
        writer.add_eot_token_id(end)
    if tokenizer.pad_token_id is not None:
        writer.add_pad_token_id(tokenizer.pad_token_id)
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)


def _ends(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> list[int]:
    """Return the tokens at which generating ends, the model's own first."""
    own = model.generation_config.eos_token_id
    listed = [] if own is None else list(own) if isinstance(own, (list, tuple)) else [own]
    return listed or [one for one in (tokenizer.eos_token_id,) if one is not None]


def _tensors(model: PreTrainedModel, kind: _Kind) -> dict[str, Tensor]:
    """Return the weights under the names of GGUF.

    Raises:
        ConfigError: one has none.
    """
    import gguf

    config = model.config
    arch = next(one for one, name in gguf.MODEL_ARCH_NAMES.items() if name == kind.name)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    found: dict[str, Tensor] = {}
    for name, tensor in _untied(base_state(model), config).items():
        called = names.get_name(name, (".weight", ".bias"))
        if called is None:
            raise ConfigError(f"llama.cpp has no place for {name} of a {config.model_type} model")
        if kind.pairs and ".q_proj." in name:
            tensor = _as_pairs(tensor, config.num_attention_heads)
        elif kind.pairs and ".k_proj." in name:
            tensor = _as_pairs(tensor, config.num_key_value_heads)
        found[called] = tensor
    factors = _frequency_factors(model)
    if factors is not None:
        found["rope_freqs.weight"] = factors
    return found


def _untied(state: Mapping[str, Tensor], config: Any) -> dict[str, Tensor]:
    """Return the weights without an output head that is the embeddings."""
    return {name: one for name, one in state.items() if not (config.tie_word_embeddings and name == "lm_head.weight")}


def _as_pairs(tensor: Tensor, heads: int) -> Tensor:
    """Put the two numbers of a head that are turned together beside each other.

    >>> _as_pairs(torch.arange(8.0), 1).tolist()
    [0.0, 4.0, 1.0, 5.0, 2.0, 6.0, 3.0, 7.0]
    """
    rows = tensor.shape[0]
    return tensor.reshape(heads, 2, rows // heads // 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def _frequency_factors(model: PreTrainedModel) -> Tensor | None:
    """Return by what each frequency of the positions is divided; None where they are not scaled."""
    rope = model.config.rope_parameters
    if rope.get("rope_type", "default") == "default":
        return None
    own = model.base_model.rotary_emb.inv_freq.detach().float().cpu()
    steps = torch.arange(0, 2 * len(own), 2).float() / (2 * len(own))
    plain: Tensor = 1.0 / (float(rope["rope_theta"]) ** steps)
    return plain / own


def _head_width(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _stored(tensor: Tensor, *, eight_bits: bool) -> tuple[np.ndarray, Any]:
    """Return a weight as GGUF holds it: in eight bits or its own type, but float32 where it has one dimension."""
    import gguf

    kinds = gguf.GGMLQuantizationType
    whole = tensor.detach().cpu()
    if eight_bits and whole.dim() > 1 and whole.shape[-1] % _SHARE_A_SCALE == 0:
        return gguf.quants.quantize(whole.float().numpy(), kinds.Q8_0), kinds.Q8_0
    if whole.dtype == torch.bfloat16 and whole.dim() > 1:
        return whole.contiguous().view(torch.uint8).numpy(), kinds.BF16
    if whole.dtype == torch.float16 and whole.dim() > 1:
        return whole.contiguous().numpy(), kinds.F16
    return whole.float().contiguous().numpy(), kinds.F32


def _readme(model: PreTrainedModel, farthest: float, *, eight_bits: bool) -> str:
    kept = "weights in 8 bits (Q8_0)" if eight_bits else str(model.dtype).removeprefix("torch.")
    return (
        "# A language model as GGUF, exported by gerund\n\n"
        f"{model.config.model_type}, {model.config.num_hidden_layers} layers, {kept}. It generates. An encoder that "
        "gerund makes of the same weights, its attention plan and its adapter, is not in this file: llama.cpp has no "
        "such plans.\n\n"
        f'```sh\nllama-cli -m {MODEL_FILE} -p "Once upon a time"\n```\n\n'
        "Before it was put in place, llama.cpp continued a few texts by it: of each token that it chose, its "
        f"probability was within {farthest:.0e} of gerund's, in logarithms.\n"
    )
