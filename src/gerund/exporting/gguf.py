"""Export a language model to GGUF, verified with llama.cpp.

``gguf`` is the base model, which generates: no adapter, no pooling. ``gguf-embedding`` is the encoder, with its adapter
merged and its pooling in the file, for the plans that llama.cpp has: ``causal`` and ``bidir``.

The written file is read by gerund and by llama.cpp, which must agree (see ``llama_cpp``), and is compared with the
original model: what the type of its weights costs is reported.

Shapes: N texts, T tokens, V vocabulary.
"""

import ctypes
import json
import re
import shlex
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from gerund.errors import ConfigError, ModelError, TextError
from gerund.exporting import llama_cpp
from gerund.exporting.shared import TEXTS, Export, read_written, require_installed, sample_tokens
from gerund.gguf_architectures import LAYOUTS, Layout
from gerund.gguf_file import read_file
from gerund.inference.encode.batches import encode
from gerund.inference.encode.runtime import EncoderRuntime, smallest_cosine
from gerund.inference.generate.prompts import prompt_ids
from gerund.models.adapters import merged_state
from gerund.models.architectures import NoHead
from gerund.models.gguf_model import pairs_from_halves
from gerund.models.gguf_tokenizer import SPACE
from gerund.models.origin import GENERATED, front_matter
from gerund.models.saved_settings import POOLING_TYPES, encoder_settings
from gerund.models.sentence_transformers_folder import prompt_settings
from gerund.settings.encoder import GgufType
from gerund.settings.plan import Direction, View

_OUTPUT, _EMBEDDINGS = "output.weight", "token_embd.weight"
_IN_MORE_BITS = re.compile(r"blk\.(\d+)\.(attn_v|ffn_down)\.weight")
# The types that llama.cpp takes where a row is no multiple of a K type's block.
_FALLBACKS = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
# Rows that are packed in one call of llama.cpp.
_ROWS = 1024


@dataclass(frozen=True)
class FileType:
    """A type of a GGUF file.

    Attributes:
        name: as in ``--type``. file_type: its name in ``gguf.LlamaFileType``.
        ggml: the type of most matrices, by ggml's name.
        mixed: whether some layers get ``Q6_K``.
        divergence: the largest divergence from the original model that rounding explains, in nats per token.
    """

    name: GgufType
    file_type: str
    ggml: str
    mixed: bool = False
    divergence: float = 0.05

    @property
    def is_quantized(self) -> bool:
        """Whether weights share scales."""
        return self.ggml not in _PLAIN


_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
FILE_TYPES: dict[GgufType, FileType] = {
    kind.name: kind
    for kind in (
        FileType("f32", "ALL_F32", "F32"),
        FileType("bf16", "MOSTLY_BF16", "BF16"),
        FileType("f16", "MOSTLY_F16", "F16"),
        FileType("q8_0", "MOSTLY_Q8_0", "Q8_0", divergence=0.2),
        FileType("q6_k", "MOSTLY_Q6_K", "Q6_K", divergence=0.5),
        FileType("q5_k_m", "MOSTLY_Q5_K_M", "Q5_K", mixed=True, divergence=0.7),
        FileType("q4_k_m", "MOSTLY_Q4_K_M", "Q4_K", mixed=True, divergence=1.0),
        FileType("q4_0", "MOSTLY_Q4_0", "Q4_0", divergence=1.5),
    )
}
"""The types of a file, the largest first."""


def file_type_of(dtype: torch.dtype) -> FileType:
    """Return the type that keeps weights as they are."""
    return next((kind for kind in FILE_TYPES.values() if _PLAIN.get(kind.ggml) == dtype), FILE_TYPES["f32"])


def type_of(name: str, shape: Iterable[int], kind: FileType, *, tied: bool, n_layers: int) -> str:
    """Return the type of a tensor, by ggml's name.

    Args:
        name: its name in GGUF.
        shape: its shape, as in torch.
        kind: the type of the file.
        tied: whether the embeddings are the output head.
        n_layers: number of layers of the model.

    >>> q4 = FILE_TYPES["q4_k_m"]
    >>> type_of("blk.0.ffn_down.weight", (256, 512), q4, tied=True, n_layers=8)
    'Q6_K'
    >>> type_of("blk.1.ffn_down.weight", (256, 512), q4, tied=True, n_layers=8)
    'Q4_K'
    >>> type_of("blk.1.attn_q.weight", (576, 576), q4, tied=True, n_layers=8)
    'Q5_0'
    """
    import gguf

    rows = tuple(shape)
    if len(rows) < 2 or name.endswith("_norm.weight"):
        return "F32"
    if not kind.is_quantized:
        return kind.ggml
    chosen, width = kind.ggml, rows[-1]

    def fits(type_name: str) -> bool:
        return width % gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]][0] == 0

    layer = _IN_MORE_BITS.fullmatch(name)
    if (name == _OUTPUT or (tied and name == _EMBEDDINGS)) and chosen != "Q8_0":
        chosen = "Q6_K" if fits(chosen) else "Q8_0"
    elif kind.mixed and layer and _gets_more_bits(int(layer[1]), n_layers):
        chosen = "Q6_K"
    if not fits(chosen):
        chosen = _FALLBACKS.get(chosen, "F16")
    return chosen if fits(chosen) else "F16"


def _gets_more_bits(layer: int, n_layers: int) -> bool:
    """Whether llama.cpp gives a layer more bits: the first and the last eighth, and every third in between."""
    return layer < n_layers // 8 or layer >= 7 * n_layers // 8 or (layer - n_layers // 8) % 3 == 2


def packed(tensor: Tensor, type_name: str, name: str) -> np.ndarray:
    """Return a tensor as the file stores it.

    Args:
        tensor: the weights, of any float dtype.
        type_name: a type that its rows are a multiple of a block of.
        name: for messages.

    Raises:
        ConfigError: float16 can't hold its values, or this build of xllamacpp can't pack the type.
    """
    import gguf

    kind = gguf.GGMLQuantizationType[type_name]
    whole = tensor.detach().cpu().contiguous()
    if type_name in _PLAIN:
        whole = whole.to(_PLAIN[type_name])
        if not torch.isfinite(whole).all():
            raise ConfigError(f"float16 cannot hold the values of {name}; take the type bf16")
        return whole.view(torch.uint8).numpy() if type_name == "BF16" else whole.numpy()
    values = whole.float().numpy()
    if type_name in _FALLBACKS:
        return _pack_by_llama_cpp(values, kind)
    blocks: np.ndarray = gguf.quants.quantize(values, kind)
    return blocks


def _pack_by_llama_cpp(values: np.ndarray, kind: Any) -> np.ndarray:
    """Pack rows of float32 by llama.cpp's ``ggml_quantize_chunk``, several at once."""
    import gguf

    pack = _ggml_quantize_chunk()
    rows = values.reshape(-1, values.shape[-1])
    per_block, nbytes = gguf.GGML_QUANT_SIZES[kind]
    result = np.empty((len(rows), rows.shape[1] // per_block * nbytes), dtype=np.uint8)

    def pack_some(first: int) -> None:
        source, target = rows[first : first + _ROWS], result[first : first + _ROWS]
        count = pack(int(kind), source.ctypes.data, target.ctypes.data, 0, len(source), source.shape[1], None)
        if count != target.nbytes:
            raise ConfigError(f"llama.cpp packed {count} bytes as {kind.name}, and {target.nbytes} were expected")

    with ThreadPoolExecutor(max(1, torch.get_num_threads())) as pool:
        list(pool.map(pack_some, range(0, len(rows), _ROWS)))
    return result.reshape(*values.shape[:-1], -1)


def _ggml_quantize_chunk() -> Any:
    """Return the C function of ggml.h from the library that xllamacpp brings."""
    import xllamacpp.xllamacpp

    try:
        function = ctypes.CDLL(xllamacpp.xllamacpp.__file__).ggml_quantize_chunk
    except (OSError, AttributeError) as error:
        raise ConfigError(
            "the xllamacpp package of this system has no ggml_quantize_chunk, which packs K types; take q8_0 or q4_0, "
            "or export f16 and run llama.cpp's llama-quantize on the file"
        ) from error
    function.restype = ctypes.c_size_t
    whole = ctypes.c_int64
    function.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, whole, whole, whole, ctypes.c_void_p]
    return function


MODEL_FILE = "model.gguf"
_NEEDED = ("gguf", "xllamacpp")
# llama.cpp's names of pre-tokenizers, by their regular expressions.
_LETTERS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PRE_TOKENIZERS = {_LETTERS % "": "qwen2", _LETTERS % "{1,3}": "llama-bpe"}
_GPT2 = "gpt-2"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


@dataclass(frozen=True)
class TokenTable:
    """A tokenizer in GGUF's terms; tokens and types have one item per row of the embeddings."""

    model: str  # "gpt2" for byte-level BPE, "llama" for sentencepiece's
    pre_tokenizer: str
    tokens: list[str]
    types: list[int]
    merges: list[str]  # gpt2: pairs of tokens, in order
    scores: list[float]  # llama: tokens with higher scores are merged first
    space_before: bool  # llama: whether a space is put before a text


def token_table(tokenizer: PreTrainedTokenizerBase, rows: int) -> TokenTable:
    """Return a tokenizer in GGUF's terms, filled up to the rows of the embeddings."""
    if not tokenizer.is_fast:
        raise ConfigError("only fast tokenizers are written as GGUF, and this model's is none")
    data = json.loads(tokenizer.backend_tokenizer.to_str())
    model = data["model"]
    if model.get("type") != "BPE":
        raise ConfigError(f"a tokenizer of the kind {model.get('type')} is not written as GGUF; byte-pair encoding is")
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    added = {item["id"]: item for item in data["added_tokens"]}
    by_id = {number: token for token, number in model["vocab"].items()}
    by_id.update({number: item["content"] for number, item in added.items()})
    tokens = [by_id.get(number, f"[PAD{number}]") for number in range(rows)]
    types = [_type(by_id.get(number), added.get(number), model) for number in range(rows)]
    if model.get("byte_fallback"):
        scores = _scores(tokens, merges)
        # llama.cpp looks for these in the text as it is, before spaces become SentencePiece's.
        spelled = zip(tokens, types, strict=True)
        tokens = [token.replace(SPACE, " ") if kind == USER_DEFINED else token for token, kind in spelled]
        return TokenTable("llama", "default", tokens, types, [], scores, _begins_with_space(data))
    return TokenTable("gpt2", _pre_tokenizer(data), tokens, types, merges, [], False)


def _type(token: str | None, added: dict[str, Any] | None, model: dict[str, Any]) -> int:
    if token is None:
        return UNUSED
    if token == model.get("unk_token"):
        return UNKNOWN
    if added is not None:
        return CONTROL if added["special"] else USER_DEFINED
    return BYTE if model.get("byte_fallback") and _BYTE_TOKEN.fullmatch(token) else NORMAL


def _scores(tokens: list[str], merges: list[str]) -> list[float]:
    """Return scores with which llama.cpp, which merges the best token first, merges in the tokenizer's order."""
    rank: dict[str, int] = {}
    for number, merge in enumerate(merges):
        rank.setdefault(merge.replace(" ", "", 1), number)
    return [-float(rank.get(token, len(merges))) for token in tokens]


def _begins_with_space(data: dict[str, Any]) -> bool:
    """Return whether a space is put before a text."""
    steps = _steps(data.get("normalizer"), "normalizers")
    kinds = [step["type"] for step in steps]
    before = _steps(data.get("pre_tokenizer"), "pretokenizers")
    splits = [step["type"] for step in before]
    # Where spaces are replaced first, a split at spaces does nothing.
    if kinds in (["Prepend", "Replace"], ["Replace"]) and (
        not before or (splits == ["Split"] and before[0]["pattern"] == {"String": " "})
    ):
        return kinds[0] == "Prepend"
    if not kinds and [step["type"] for step in before] == ["Metaspace"] and before[0].get("prepend_scheme") != "never":
        return True
    raise _other(kinds + [step["type"] for step in before])


def _pre_tokenizer(data: dict[str, Any]) -> str:
    """Return llama.cpp's name for the pre-tokenizer."""
    normalizers = [step["type"] for step in _steps(data.get("normalizer"), "normalizers")]
    steps = _steps(data.get("pre_tokenizer"), "pretokenizers")
    kinds = [step["type"] for step in steps]
    plain = all(not step.get("add_prefix_space") for step in steps)
    if normalizers in ([], ["NFC"]) and plain:
        if kinds == ["ByteLevel"] and steps[0].get("use_regex", True):
            return _GPT2
        if kinds == ["Digits", "ByteLevel"] and steps[0]["individual_digits"] and steps[1].get("use_regex", True):
            return "smollm"
        pattern = steps[0].get("pattern", {}).get("Regex") if kinds == ["Split", "ByteLevel"] else None
        if pattern in _PRE_TOKENIZERS and not steps[1].get("use_regex", True):
            return _PRE_TOKENIZERS[pattern]
    raise _other(normalizers + kinds)


def _steps(part: dict[str, Any] | None, several: str) -> list[dict[str, Any]]:
    if part is None:
        return []
    return list(part[several]) if part["type"] == "Sequence" else [part]


def _other(kinds: list[str]) -> ConfigError:
    return ConfigError(
        f"how this tokenizer cuts a text ({', '.join(kinds) or 'not at all'}) has no name in llama.cpp that is known "
        "here; tokenizers as GPT-2, Llama 2, Llama 3 and Qwen 2 have them are written as GGUF"
    )


_LAYOUTS = {model_type: layout for layout in LAYOUTS.values() for model_type in layout.exports}


def write(
    runtime: EncoderRuntime, work: Path, folder: Path, *, type: GgufType | None = None, embeds: bool = False
) -> Export:
    """Fill ``work`` with the model and a README, and verify it.

    Args:
        runtime: the model.
        work: the folder to fill.
        folder: where it will be.
        type: the type of the weights; None keeps theirs.
        embeds: write the encoder, for embedding, instead of the base model.
    """
    require_installed(_NEEDED, "GGUF", "gguf")
    kind = file_type_of(runtime.model.dtype) if type is None else FILE_TYPES[type]
    if embeds:
        _refuse_as_embedder(runtime)
    path = work / MODEL_FILE
    write_file(runtime, path, kind, embeds=embeds)
    model, tokenizer = read_written(path, runtime.model.dtype)
    read = replace(runtime.in_own_type(), model=model, tokenizer=tokenizer, adapter=None)
    result = _check_vectors(runtime, read, path, kind) if embeds else _check_texts(runtime, read, path, kind)
    bits = 8 * path.stat().st_size / read_file(path).n_parameters
    about = f"{kind.name}, {path.stat().st_size / 1e6:.1f} MB, {bits:.2f} bits per weight; {result}"
    (work / "README.md").write_text(_readme(runtime, about, embeds=embeds), encoding="utf-8")
    target = shlex.quote(str(folder / MODEL_FILE))
    return Export(folder, f"{_program(embeds=embeds)} -m {target}", about=about)


def _program(*, embeds: bool) -> str:
    return "llama-server --embedding" if embeds else "llama-cli"


def _kind_of(model: PreTrainedModel, *, embeds: bool = False) -> Layout:
    """Return the architecture's layout, or raise ``ConfigError`` if llama.cpp would compute it differently."""
    config = model.config
    kind = _LAYOUTS.get(config.model_type)
    if kind is None:
        known = ", ".join(_LAYOUTS)
        raise ConfigError(
            f"a {config.model_type} model is not written as GGUF; {known} are (llama.cpp's repository has a converter "
            "for others, convert_hf_to_gguf.py)"
        )
    if isinstance(model.get_output_embeddings(), NoHead) and not embeds:
        raise ConfigError("this model was saved without an output head: it only encodes; take gguf-embedding")
    if kind.name == "gemma3":
        _refuse_other_gemma(config)
        return kind
    rope = config.rope_parameters.get("rope_type", "default")
    if rope not in (("default", "linear", "llama3") if "llama3" in kind.scalings else ("default",)):
        raise ConfigError(
            f"positions that are scaled by {rope!r} are not written as GGUF for a {config.model_type} model"
        )
    if (window := _window(config)) is not None:
        raise ConfigError(
            f"llama.cpp does not know the sliding window of {window} tokens of a {config.model_type} model"
        )
    if config.hidden_act != "silu":
        raise ConfigError(f"llama.cpp computes a {config.model_type} model with silu, not {config.hidden_act}")
    return kind


def _window(config: Any) -> int | None:
    """Return the sliding window, if it is shorter than the context."""
    window = getattr(config, "sliding_window", None)
    return None if window is None or window >= config.max_position_embeddings else int(window)


def _refuse_other_gemma(config: Any) -> None:
    """Refuse a Gemma 3 with settings that llama.cpp has no key for, or computes otherwise."""
    layers, rope = config.num_hidden_layers, config.rope_parameters
    # Only the largest size scales queries by hidden size / heads.
    scalar = config.hidden_size // config.num_attention_heads if layers == 62 else config.head_dim
    values = {
        "layer_types": (
            config.layer_types,
            ["full_attention" if layer % 6 == 5 else "sliding_attention" for layer in range(layers)],
        ),
        "query_pre_attn_scalar": (config.query_pre_attn_scalar, scalar),
        "rope_parameters of its windows": (
            (rope["sliding_attention"]["rope_type"], rope["sliding_attention"]["rope_theta"]),
            ("default", 1e4),
        ),
        "rope_type": (rope["full_attention"]["rope_type"] in ("default", "linear"), True),
        "hidden_activation": (config.hidden_activation, "gelu_pytorch_tanh"),
        "logit softcapping": ((config.final_logit_softcapping, config.attn_logit_softcapping), (None, None)),
        "use_bidirectional_attention": (bool(config.use_bidirectional_attention), False),
    }
    for name, (value, expected) in values.items():
        if value != expected:
            raise ConfigError(
                f"llama.cpp computes a Gemma 3 with other {name} than this model has; take onnx or merged"
            )


def _refuse_as_embedder(runtime: EncoderRuntime) -> None:
    """Refuse encoders that llama.cpp computes differently."""
    config = runtime.config
    both_ways = all(view == View(Direction.BIDIRECTIONAL) for view in runtime.plan.views)
    if not (both_ways or runtime.plan.is_causal) or runtime.plan.repeats_text or runtime.plan.skips:
        raise ConfigError(
            f"llama.cpp has no attention plan {config.attention.name!r}; causal and bidir are exported as "
            "gguf-embedding, and every plan as onnx"
        )
    window = _window(runtime.model.config)
    if (
        not runtime.plan.is_causal
        and window is not None
        and (runtime.max_length is None or runtime.max_length > window)
    ):
        raise ConfigError(
            f"llama.cpp has no window of {window} tokens that looks both ways (max_length={window} or less avoids it)"
        )
    if config.pooling not in POOLING_TYPES.values():
        raise ConfigError(f"llama.cpp has no pooling {config.pooling!r}; it has {', '.join(POOLING_TYPES.values())}")
    if runtime.head is not None:
        raise ConfigError("llama.cpp has no layers after the pooling for this architecture, and this encoder has")
    config.refuse_methods("an export as gguf-embedding")
    runtime.refuse_answers("an export as gguf-embedding")
    if config.pooling != "last" and not config.pool_prompt and any(prompt_settings(config)[0].values()):
        raise ConfigError("llama.cpp pools the prompt's tokens as well; load the encoder with pool_prompt=True")


def write_file(runtime: EncoderRuntime, path: Path, kind: FileType, *, embeds: bool = False) -> None:
    """Write the base model, or with ``embeds`` the encoder."""
    import gguf

    model, tokenizer = runtime.model, runtime.tokenizer
    layout = _kind_of(model, embeds=embeds)
    table = token_table(tokenizer, model.get_input_embeddings().weight.shape[0])
    writer = gguf.GGUFWriter(path, layout.name)
    writer.add_file_type(gguf.LlamaFileType[kind.file_type])
    _write_settings(writer, model, table)
    write_tokens(writer, tokenizer, model, table, closing=_closing(runtime) if embeds else None)
    if embeds:
        by_name = {name: number for number, name in POOLING_TYPES.items()}
        writer.add_pooling_type(gguf.PoolingType(by_name[runtime.config.pooling]))
        writer.add_causal_attention(runtime.plan.is_causal)
    tensors = _tensors(model, layout, merged_state(model, runtime.adapter if embeds else None))
    tied = "output.weight" not in tensors
    for name, tensor in tensors.items():
        stored = type_of(name, tensor.shape, kind, tied=tied, n_layers=model.config.num_hidden_layers)
        writer.add_tensor(name, packed(tensor, stored, name), raw_dtype=gguf.GGMLQuantizationType[stored])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_settings(writer: Any, model: PreTrainedModel, table: TokenTable) -> None:
    import gguf

    config = model.config
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    width = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_dimension_count(width)
    # Those of full attention, where layers with a window have others.
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(float(rope["rope_theta"]))
    if config.model_type == "gemma3_text":
        writer.add_sliding_window(config.sliding_window)
        if rope["rope_type"] == "linear":
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(rope["factor"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(len(table.tokens))


def write_tokens(
    writer: Any,
    tokenizer: PreTrainedTokenizerBase,
    model: PreTrainedModel,
    table: TokenTable,
    *,
    closing: int | None = None,
) -> None:
    """Write a tokenizer into a file; ``closing`` is a token to put after every text."""
    writer.add_tokenizer_model(table.model)
    writer.add_tokenizer_pre(table.pre_tokenizer)
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
    writer.add_add_eos_token(closing is not None or ids[-1] in ends)
    ends = ends if closing is None else list(dict.fromkeys([closing, *ends]))
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


def _closing(runtime: EncoderRuntime) -> int | None:
    """Return the token that is put after every text of an encoder, if any."""
    ids, tokenizer = runtime.tokenizer("a").input_ids, runtime.tokenizer
    if runtime.config.append_eos:
        end: int = tokenizer.eos_token_id
        return end
    return int(ids[-1]) if len(ids) > 1 and ids[-1] in tokenizer.all_special_ids else None


def _ends(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> list[int]:
    """Return the end tokens, the generation config's first."""
    for ends in (model.generation_config.eos_token_id, tokenizer.eos_token_id):
        if listed := [] if ends is None else list(ends) if isinstance(ends, (list, tuple)) else [ends]:
            return listed
    return []


def _tensors(model: PreTrainedModel, kind: Layout, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights by their names in GGUF."""
    import gguf

    config = model.config
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == kind.name)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    weights: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if config.tie_word_embeddings and name == "lm_head.weight":
            continue
        gguf_name = names.get_name(name, (".weight", ".bias"))
        if gguf_name is None:
            raise ConfigError(f"llama.cpp has no place for {name} of a {config.model_type} model")
        if kind.pairs and ".q_proj." in name:
            tensor = pairs_from_halves(tensor, config.num_attention_heads)
        elif kind.pairs and ".k_proj." in name:
            tensor = pairs_from_halves(tensor, config.num_key_value_heads)
        if kind.offset_norms and gguf_name.endswith("norm.weight"):
            tensor = tensor.float() + 1
        weights[gguf_name] = tensor
    factors = frequency_factors(model)
    if factors is not None:
        weights["rope_freqs.weight"] = factors
    return weights


def frequency_factors(model: PreTrainedModel) -> Tensor | None:
    """Return the divisor of each rotary frequency; None if the frequencies are not scaled."""
    rope = model.config.rope_parameters
    if "full_attention" in rope or rope.get("rope_type", "default") == "default":
        return None
    frequencies = model.base_model.rotary_emb.inv_freq.detach().float().cpu()
    steps = torch.arange(0, 2 * len(frequencies), 2).float() / (2 * len(frequencies))
    plain: Tensor = 1.0 / (float(rope["rope_theta"]) ** steps)
    return plain / frequencies


def _check_texts(runtime: EncoderRuntime, read: EncoderRuntime, path: Path, kind: FileType) -> str:
    """Compare the file with the original and with llama.cpp; return what the comparison found."""
    llama_cpp.check(read.model, read.tokenizer, path, quantized=kind.is_quantized)
    divergence, tokens = _divergence(runtime, read)
    if not divergence <= kind.divergence:
        raise ModelError(
            f"the file predicts other tokens than the model ({divergence:.2g} nats per token, and {kind.divergence:g} "
            f"are expected at most of {kind.name}); take a type with more bits"
        )
    return f"Kullback-Leibler divergence from the original {divergence:.2g} nats per token, over {tokens} tokens"


@torch.no_grad()
def _divergence(runtime: EncoderRuntime, read: EncoderRuntime) -> tuple[float, int]:
    """Return the mean divergence of the next token's probabilities, and the number of tokens that it is taken over."""
    total, tokens = 0.0, 0
    for text in TEXTS:
        try:
            ids = prompt_ids(runtime.model, runtime.tokenizer, text)
        except TextError:
            continue  # longer than this model's context
        if prompt_ids(read.model, read.tokenizer, text) != ids:
            raise ModelError(f"the file's tokenizer reads {text!r} as other tokens than the model's own")
        expected_TV, actual_TV = (
            llama_cpp.log_probabilities(part.model, ids) for part in (runtime.in_own_type(), read)
        )
        total += float((expected_TV.exp() * (expected_TV - actual_TV)).sum())
        tokens += len(ids)
    return total / max(tokens, 1), tokens


def _check_vectors(runtime: EncoderRuntime, read: EncoderRuntime, path: Path, kind: FileType) -> str:
    """Compare the file's vectors with the original's and with llama.cpp's; return what the comparison found."""
    stored = encoder_settings(read_file(path))
    if stored is None or stored.pooling != runtime.config.pooling:
        raise ModelError("the file does not say how its encoder pools")
    context = min(llama_cpp.CONTEXT, runtime.max_length or llama_cpp.CONTEXT)
    ours, theirs, originals = [], [], []
    for prompt in dict.fromkeys(("", *prompt_settings(runtime.config)[0].values())):
        # One token is left for the end token.
        texts = [text for text in TEXTS if len(runtime.tokenizer(prompt + text).input_ids) < context]
        originals.append(encode(runtime.in_own_type(), sample_tokens(runtime, texts, prompt), show=False))
        ours.append(encode(read, sample_tokens(read, texts, prompt), show=False))
        theirs.append(llama_cpp.embeddings(path, [prompt + text for text in texts], context))
    expected_ND, actual_ND = np.concatenate(ours), np.concatenate(theirs)
    near = _NEAR_QUANTIZED if kind.is_quantized else _NEAR
    if expected_ND.shape != actual_ND.shape or not 1 - smallest_cosine(expected_ND, actual_ND) <= near:
        raise ModelError("llama.cpp gives other vectors for the file than gerund; export it as sentence-transformers")
    cosine = smallest_cosine(np.concatenate(originals), actual_ND)
    if not 1 - cosine <= _FAR:
        raise ModelError(f"the file's vectors are far from the model's (cosine {cosine:.2g}); take more bits")
    return f"smallest cosine of llama.cpp's vectors to the original's {cosine:.4f}, over {len(actual_ND)} texts"


# Largest cosine distance of llama.cpp's vectors to gerund's from the same file, with weights that are quantized or not,
# and to the original's.
_NEAR, _NEAR_QUANTIZED, _FAR = 2e-3, 2e-2, 0.3


def _readme(runtime: EncoderRuntime, about: str, *, embeds: bool) -> str:
    model, config = runtime.model, runtime.config
    what = f"{model.config.model_type}, {model.config.num_hidden_layers} layers; {about}."
    pipeline = "feature-extraction" if embeds else "text-generation"
    metadata = front_matter({"pipeline_tag": pipeline, "tags": [GENERATED, "gguf"]}) + "\n"
    if not embeds:
        return metadata + (
            f"# A language model as GGUF, exported by gerund\n\n{what}\n\nIt generates. An encoder that gerund makes "
            "of the same weights, its attention plan and its adapter, is not in this file: llama.cpp has no such "
            f'plans.\n\n```sh\nllama-cli -m {MODEL_FILE} -p "Once upon a time"\n```\n\nBefore it was saved, llama.cpp '
            "continued a few texts with it, with the probabilities that gerund computes from the file.\n"
        )
    prompts = {name: prompt for name, prompt in prompt_settings(config)[0].items() if prompt}
    before = "".join(f"- {name}: `{json.dumps(prompt, ensure_ascii=False)}`\n" for name, prompt in prompts.items())
    notes = [f"Attention `{config.attention.name}`, {config.pooling} pooling; both are in the file."]
    notes += ["Normalize texts to NFKC first, as gerund does."] if config.normalizes_texts else []
    notes += [f"gerund truncates texts to {runtime.max_length} tokens."] if runtime.max_length else []
    parts = [
        f"# A text encoder as GGUF, exported by gerund\n\n{what}\n\n{' '.join(notes)}\n",
        f"```sh\n{_program(embeds=True)} -m {MODEL_FILE}\n```\n",
        f"Put these prompts before the texts, which the file does not contain:\n\n{before}" if before else "",
        f"Compare its vectors by {config.similarity}; llama.cpp's have length 1. Before the file was saved, llama.cpp "
        "embedded a few texts with it, and its vectors were compared with gerund's.\n",
    ]
    return metadata + "\n".join(part for part in parts if part)
