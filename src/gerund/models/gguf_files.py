"""Build a transformers config, tokenizer and weights from a GGUF file.

The weights are unpacked from their blocks into plain tensors, so that everything which works on a model folder works on
a file. This module knows how llama.cpp lays out the weights of each architecture, and corrects what transformers reads
differently from llama.cpp (pre-tokenizers, scaled positions, head sizes).

Shapes: D width, V vocabulary.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Regex, Tokenizer, pre_tokenizers
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from gerund.errors import ModelError
from gerund.gguf_file import GgufFile
from gerund.models.library_calls import guarded
from gerund.settings.model_spec import EncoderSpec

_HEAD_SIZES = ("attention.head_count", "attention.key_length", "rope.dimension_count")

# Tokens at which llama.cpp always ends a text, in addition to those that the file names.
_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>")

# Poolings by llama.cpp's numbers.
_POOLINGS = {1: "mean", 2: "first", 3: "last"}
_NO_POOLING, _RANK = 0, 4

_USER_DEFINED = 4  # type of a token
_SPACE = "\u2581"  # SentencePiece's space

# llama.cpp's pre-tokenizers that transformers doesn't know.
_GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_DIGITS_APART = ("smollm", "codeshell", "refact", "command-r", "starcoder")
_LIKE_GPT2 = ("gpt-2", "default", "phi-2", "jina-es", "jina-de", "gigachat", "olmo", "mpt")


# Architectures


def _llama(file: GgufFile) -> dict[str, Any]:
    if file.value("expert_count"):
        raise ModelError(f"cannot load {file.path}: a mixture of experts of architecture llama is not read from GGUF")
    head = file.number("attention.key_length", file.number("rope.dimension_count", 0)) or None
    biased = "blk.0.attn_q.bias" in file.tensors.infos
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "head_dim": head,
        "attention_bias": biased,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors.infos,
    }


def _qwen2(file: GgufFile) -> dict[str, Any]:
    del file
    return {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}


def _qwen3(file: GgufFile) -> dict[str, Any]:
    head = file.number("attention.key_length", 0) or 128
    return {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": head}


def _gemma3(file: GgufFile) -> dict[str, Any]:
    head, layers = file.number("attention.key_length"), file.number("block_count")
    pattern = 6
    theta = file.fraction("rope.freq_base", 1e6)
    full: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    factor = file.fraction("rope.scaling.factor")
    if file.value("rope.scaling.type") == "linear" and factor:
        full = {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    # Only the largest size, with 62 layers, scales queries by hidden size / heads.
    scalar = file.number("embedding_length") // file.number("attention.head_count") if layers == 62 else head
    return {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "head_dim": head,
        "query_pre_attn_scalar": scalar,
        "sliding_window": file.number("attention.sliding_window"),
        "layer_types": [
            "full_attention" if (layer + 1) % pattern == 0 else "sliding_attention" for layer in range(layers)
        ],
        "final_logit_softcapping": file.fraction("final_logit_softcapping"),
        "rope_parameters": {
            "full_attention": full,
            "sliding_attention": {"rope_type": "default", "rope_theta": file.fraction("rope.freq_base_swa", 1e4)},
        },
    }


@dataclass(frozen=True)
class Layout:
    """How llama.cpp lays out an architecture.

    Attributes:
        name: the architecture, as llama.cpp calls it. config: the fields of the config that only this architecture has.
        pairs: whether the rows of queries and keys are stored in pairs, as they are rotated; transformers rotates the
        two
            halves of a head.
        offset_norms: whether norms are stored with one added.
        scaled: whether positions may be scaled by factors in the file.
    """

    name: str
    config: Callable[[GgufFile], dict[str, Any]]
    pairs: bool = False
    offset_norms: bool = False
    scaled: bool = False


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("llama", _llama, pairs=True, scaled=True),
        Layout("qwen2", _qwen2),
        Layout("qwen3", _qwen3),
        Layout("gemma3", _gemma3, offset_norms=True, scaled=True),
    )
}
"""The supported architectures."""


def _layout_of(file: GgufFile) -> Layout:
    layout = LAYOUTS.get(file.architecture)
    if layout is None:
        known = ", ".join(LAYOUTS)
        raise ModelError(
            f"cannot load {file.path}: GGUF files of architecture {file.architecture!r} are not read; {known} are. "
            "Give the folder of the model in safetensors"
        )
    return layout


def read_config(file: GgufFile) -> PreTrainedConfig:
    """Return the config of the model in a file."""
    layout, vocabulary = _layout_of(file), file.vocabulary
    _refuse_absurd_sizes(file)
    shared = {
        "vocab_size": vocabulary,
        "hidden_size": file.number("embedding_length"),
        "intermediate_size": file.number("feed_forward_length"),
        "num_hidden_layers": file.number("block_count"),
        "num_attention_heads": file.number("attention.head_count"),
        "num_key_value_heads": file.number("attention.head_count_kv", file.number("attention.head_count")),
        "max_position_embeddings": file.number("context_length"),
        "rms_norm_eps": file.fraction("attention.layer_norm_rms_epsilon", 1e-6),
        "rope_parameters": {"rope_type": "default", "rope_theta": file.fraction("rope.freq_base", 10000.0)},
        "tie_word_embeddings": "output.weight" not in file.tensors.infos,
        "bos_token_id": file.token_id("bos"),
        "eos_token_id": file.token_id("eos"),
        "pad_token_id": file.token_id("padding"),
        "dtype": _stored_dtype(file),
    }
    settings = {**shared, **layout.config(file)}
    if layout.scaled and "full_attention" not in settings["rope_parameters"]:
        settings["rope_parameters"] = _scaled_positions(file, settings)
    elif file.value("rope.scaling.type") not in (None, "none") and not layout.scaled:
        raise ModelError(f"cannot load {file.path}: its positions are scaled, which is not read for this architecture")
    if any(isinstance(value, list) for value in (file.value("attention.head_count"), settings["intermediate_size"])):
        raise ModelError(f"cannot load {file.path}: its layers differ from each other, which is not read")
    return guarded(f"cannot load {file.path}", AutoConfig.for_model, **settings)


def _refuse_absurd_sizes(file: GgufFile) -> None:
    """Refuse sizes that contradict the file's tensors, before memory is allocated."""
    queries = file.tensors.infos.get("blk.0.attn_q.weight")
    rows = 0 if queries is None else queries.shape[0]
    for key, most in {"block_count": len(file.tensors.infos), **dict.fromkeys(_HEAD_SIZES, rows)}.items():
        if not 0 < (size := file.number(key, 1)) <= most:
            raise ModelError(
                f"cannot load {file.path}: its {file.architecture}.{key} is {size}, which its tensors do not fit"
            )


def _stored_dtype(file: GgufFile) -> str:
    """Return the dtype of the weights; quantized blocks become bfloat16."""
    kinds = set(file.types)
    return "float32" if kinds == {"F32"} else "float16" if kinds <= {"F16", "F32"} else "bfloat16"


def _scaled_positions(file: GgufFile, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary settings: plain, linear, or Llama 3's, whose factors are a tensor of the file."""
    plain = settings["rope_parameters"]
    kind, factor = file.value("rope.scaling.type"), file.fraction("rope.scaling.factor")
    if kind == "linear" and factor:
        return {**plain, "rope_type": "linear", "factor": factor}
    if kind not in (None, "none", "linear"):
        raise ModelError(f"cannot load {file.path}: positions that are scaled by {kind!r} are not read")
    if "rope_freqs.weight" not in file.tensors.infos:
        return dict(plain)
    factors = file.tensors.read("rope_freqs.weight")
    if np.allclose(factors, factors[0]):
        return {**plain, "rope_type": "linear", "factor": float(factors[0])}
    for guess in _llama3_guesses(float(factors.max())):
        if np.allclose(_llama3_factors(plain["rope_theta"], len(factors), guess), factors, rtol=1e-3):
            return {**plain, "rope_type": "llama3", **guess}
    raise ModelError(f"cannot load {file.path}: the factors of its positions (rope_freqs.weight) are not Llama 3's")


def _llama3_guesses(factor: float) -> Iterator[dict[str, float]]:
    """Yield the settings of the released Llama 3.x models; the file has only the resulting factors."""
    for original in (8192, 4096, 16384, 2048, 16):
        for high in (4.0, 2.0):
            yield {
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }


def _llama3_factors(theta: float, count: int, settings: Mapping[str, float]) -> np.ndarray:
    """Return Llama 3's divisor of each rotary frequency (transformers, ``_compute_llama3_parameters``)."""
    frequencies = 1.0 / theta ** (np.arange(count, dtype=np.float64) / count)
    waves = 2 * np.pi / frequencies
    original, low, high = (
        settings[name] for name in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    smooth = (original / waves - low) / (high - low)
    between = 1.0 / ((1 - smooth) / settings["factor"] + smooth)
    return np.where(waves > original / low, settings["factor"], np.where(waves < original / high, 1.0, between))


def read_weights(file: GgufFile, model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Unpack a file's weights into a model on torch's meta device."""
    import gguf

    layout, config = _layout_of(file), model.config
    architecture = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == file.architecture)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    state: dict[str, Tensor] = {}
    for name, parameter in model.state_dict().items():
        if config.tie_word_embeddings and name == "lm_head.weight":
            continue
        stored = names.get_name(name, (".weight", ".bias"))
        if stored is None or stored not in file.tensors.infos:
            raise ModelError(f"cannot load {file.path}: {stored or name} is missing from its weights")
        tensor = torch.from_numpy(_unpacked(file, stored))
        if tensor.shape != parameter.shape:
            shapes = f"{tuple(tensor.shape)} and not {tuple(parameter.shape)}"
            raise ModelError(f"cannot load {file.path}: {stored} is of shape {shapes}")
        if layout.pairs and re.search(r"\.attn_[qk]\.", stored):
            heads = config.num_attention_heads if ".attn_q." in stored else config.num_key_value_heads
            tensor = halves_from_pairs(tensor, heads)
        if layout.offset_norms and stored.endswith("norm.weight"):
            tensor = tensor - 1
        state[name] = tensor.to(dtype)
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()


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


# Tokenizer


def read_tokenizer(file: GgufFile) -> PreTrainedTokenizerBase:
    """Return a file's tokenizer, which produces the same tokens as llama.cpp."""
    return guarded(f"cannot load the tokenizer of {file.path}", _tokenizer, file)


def _tokenizer(file: GgufFile) -> PreTrainedTokenizerBase:
    from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

    if (count := file.metadata.get("tokenizer.ggml.tokens")) is None:
        raise ModelError(f"cannot load {file.path}: it has no tokenizer")
    if type(count) is not int or count > file.vocabulary:
        raise ModelError(
            f"cannot load {file.path}: its tokenizer has other tokens than the {file.vocabulary} of its embeddings"
        )
    architecture, parts, settings = get_gguf_tokenizer(str(file.path))
    backend, _ = convert_gguf_tokenizer(architecture, parts)
    backend = _without_strange_tokens(backend, len(parts["tokens"]))
    _cut_as_llama_cpp(file, backend, parts)
    _keep_runs_of_spaces(backend, parts)
    if settings["pad_token"] is None:
        settings["pad_token"] = settings["eos_token"]
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=file.number("context_length"),
        clean_up_tokenization_spaces=False,
        **settings,
    )


def _without_strange_tokens(backend: Tokenizer, size: int) -> Tokenizer:
    """Remove tokens beyond the vocabulary, which transformers' tokenizer classes add."""
    state = json.loads(backend.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["id"] < size]
    return Tokenizer.from_str(json.dumps(state))


def _keep_runs_of_spaces(backend: Any, parts: Mapping[str, Any]) -> None:
    """Match runs of spaces that are tokens, the longest first, as SentencePiece does.

    Gemma's files list them as user-defined tokens spelled with plain spaces, under which transformers does not find
    them in its vocabulary.
    """
    kinds = parts.get("token_type") or ()
    runs = [
        _SPACE * len(token)
        for token, kind in zip(parts["tokens"], kinds, strict=False)
        if kind == _USER_DEFINED and len(token) > 1 and not token.strip(" ")
    ]
    vocabulary = backend.get_vocab(with_added_tokens=False)
    backend.add_tokens([AddedToken(run, normalized=True, special=False) for run in runs if run in vocabulary])


def _cut_as_llama_cpp(file: GgufFile, backend: Any, parts: Mapping[str, Any]) -> None:
    """Set the file's pre-tokenizer, where transformers doesn't know it and would use GPT-2's."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    name = parts.get("pre_tokenizer_type")
    if parts.get("tokenizer_type") != "gpt2" or name in GGUF_PRE_TOKENIZER_SPLITS or name in _LIKE_GPT2:
        return
    if name not in _DIGITS_APART:
        raise ModelError(
            f"cannot load {file.path}: how texts are cut into tokens there ({name!r}) is not known; "
            "give the folder of the model in safetensors"
        )
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}"), behavior="isolated"),
            pre_tokenizers.Split(Regex(_GPT2_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def encoder_settings(file: GgufFile) -> EncoderSpec | None:
    """Return the encoder settings of an embedding model; None for other files."""
    pooling = file.value("pooling_type")
    causal = file.value("attention.causal", True)
    if pooling in (None, _NO_POOLING):
        return None if causal else EncoderSpec(attention="bidir", pooling="mean", append_eos=False)
    if type(pooling) is not int or pooling not in _POOLINGS:
        what = "it is a reranker" if pooling == _RANK else f"it pools in a way that is not known ({pooling!r})"
        raise ModelError(f"cannot load {file.path}: {what}")
    # The tokenizer adds an end token where the file asks for one.
    return EncoderSpec(attention="causal" if causal else "bidir", pooling=_POOLINGS[pooling], append_eos=False)


def ends_of(file: GgufFile, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that end a text: those in the file, and those at which llama.cpp always ends."""
    named = [file.token_id(name) for name in ("eos", "eot")]
    known = tokenizer.get_vocab()
    return list(dict.fromkeys(number for number in (*named, *map(known.get, _ENDS)) if number is not None))
