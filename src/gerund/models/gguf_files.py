"""Read GGUF files: validate the file, then build a transformers config, tokenizer and weights from it.

GGUF is the format of llama.cpp, Ollama and LM Studio. The weights are unpacked from their blocks into plain tensors, so
that everything which works on a model folder works on a file. Metadata and blocks are parsed by transformers and the
``gguf`` package; this module knows how llama.cpp lays out the weights of each architecture, and corrects what
transformers reads differently from llama.cpp (pre-tokenizers, scaled positions, head sizes).

Shapes: D width, V vocabulary.
"""

import json
import mmap
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import isfinite, prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tokenizers import AddedToken, Regex, Tokenizer, pre_tokenizers
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from gerund.errors import ModelError
from gerund.models.catalog import MAGIC, is_gguf, parts_of
from gerund.models.library_calls import guarded
from gerund.settings.model_spec import EncoderSpec

_VERSIONS = (2, 3)
# struct formats of values by type, and the two types without a fixed size.
_FORMS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9
_MOST_DIMENSIONS = 4
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


class TensorInfo(NamedTuple):
    """The offset of a tensor in its file's data, and how it is stored."""

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Tensors:
    """The tensors of a file, or of a file that was split into several."""

    infos: Mapping[str, TensorInfo]
    files: Mapping[str, Path]
    starts: Mapping[Path, int]  # offset of the data of each file

    def read(self, name: str) -> np.ndarray:
        """Return a tensor, unpacked, as float32."""
        import gguf

        info, path = self.infos[name], self.files[name]
        data = np.memmap(path, mode="r", dtype=np.uint8)
        start = self.starts[path] + info.offset
        blocks = np.array(data[start : start + info.nbytes])
        kind = gguf.GGMLQuantizationType(info.ggml_type)
        if kind == gguf.GGMLQuantizationType.F32:
            return blocks.view(np.float32).reshape(info.shape)
        if kind == gguf.GGMLQuantizationType.F16:
            return blocks.view(np.float16).reshape(info.shape).astype(np.float32)
        rows = blocks.reshape(prod(info.shape[:-1]), -1)
        return gguf.quants.dequantize(rows, kind).reshape(info.shape)


@dataclass(frozen=True)
class GgufFile:
    """A validated GGUF file: its metadata and tensors."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Tensors = field(repr=False)

    @property
    def architecture(self) -> str:
        """The architecture, by llama.cpp's name."""
        return str(self.metadata["general.architecture"])

    @property
    def types(self) -> tuple[str, ...]:
        """The types of the stored tensors, the most frequent first."""
        import gguf

        kinds = [gguf.GGMLQuantizationType(info.ggml_type).name for info in self.tensors.infos.values()]
        return tuple(sorted(set(kinds), key=lambda kind: -kinds.count(kind)))

    @property
    def n_parameters(self) -> int:
        """Number of parameters."""
        return sum(prod(info.shape) for info in self.tensors.infos.values())

    def value(self, key: str, default: Any = None) -> Any:
        """Return the metadata under ``ARCHITECTURE.key``."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def number(self, key: str, default: int | None = None) -> int:
        """Return an integer, which the file must have if there is no default."""
        value = self.value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ModelError(f"cannot load {self.path}: its {self.architecture}.{key} is {value!r}, not a number")
        return value

    def fraction(self, key: str, default: float | None = None) -> float | None:
        """Return a float, if the file has it."""
        value = self.value(key, default)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
            raise ModelError(f"cannot load {self.path}: its {self.architecture}.{key} is {value!r}, not a number")
        return float(value)

    def token_id(self, name: str) -> int | None:
        """Return the id of a special token, such as ``eos``, if the file has it."""
        value = self.metadata.get(f"tokenizer.ggml.{name}_token_id")
        if value is None:
            return None
        if type(value) is not int or not 0 <= value < _vocabulary(self):
            raise ModelError(
                f"cannot load {self.path}: its {name}_token_id is {value!r}, and its tokens are 0 to "
                f"{_vocabulary(self) - 1}"
            )
        return value


def read_file(path: Path) -> GgufFile:
    """Read and validate the metadata and the table of tensors."""
    parts = parts_of(path)
    try:
        stamps = tuple((part, part.stat().st_mtime_ns, part.stat().st_size) for part in parts)
    except OSError as error:
        raise ModelError(f"cannot load {path}: {error.strerror or error}") from error
    return _read_parts(parts[0], stamps)


@lru_cache(maxsize=4)  # loading a model reads the file three times: for settings, config and weights
def _read_parts(path: Path, stamps: tuple[tuple[Path, int, int], ...]) -> GgufFile:
    infos: dict[str, TensorInfo] = {}
    files: dict[str, Path] = {}
    starts: dict[Path, int] = {}
    metadata: dict[str, Any] = {}
    for part, _, _ in stamps:
        values, tensors, start = _header(part)
        metadata = metadata or values
        starts[part] = start
        _check_layout(part, tensors, start)
        for info in tensors:
            if info.name in infos:
                raise ModelError(f"cannot load {part}: it holds {info.name} twice")
            infos[info.name], files[info.name] = info, part
    # In a split model only the first file has metadata.
    if not isinstance(metadata.get("general.architecture"), str):
        raise ModelError(f"cannot load {path}: it does not say its architecture")
    return GgufFile(path, metadata, Tensors(infos, files, starts))


def _header(path: Path) -> tuple[dict[str, Any], list[TensorInfo], int]:
    """Return metadata (only the length of arrays of texts), the table of tensors, and the offset of their data.

    The ``gguf`` package makes an object of each token's text, which takes seconds; transformers' own reader refuses
    several types that it can unpack.
    """
    if not is_gguf(path):
        raise ModelError(f"cannot load {path}: it is no GGUF file")
    with path.open("rb") as file:
        reader = _Reader(memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)))
    try:
        version, n_tensors, n_values = reader.numbers("<IQQ")
        if version not in _VERSIONS:
            raise ModelError(f"cannot load {path}: it is of version {version} of GGUF; 2 and 3 are read")
        metadata = {reader.text(): reader.value(reader.number("<I")) for _ in range(n_values)}
        tensors = [_tensor(reader, path) for _ in range(n_tensors)]
    except (struct.error, OverflowError, MemoryError, UnicodeDecodeError) as error:
        raise ModelError(f"cannot load {path}: the file is cut off or damaged") from error
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 0 < alignment <= 1 << 16:
        raise ModelError(f"cannot load {path}: its general.alignment is {alignment!r}")
    return metadata, tensors, -(-reader.place // alignment) * alignment


class _Reader:
    """Reads values in order; reading beyond the end of the file raises ``struct.error``."""

    def __init__(self, data: memoryview) -> None:
        self.data, self.place = data, len(MAGIC)

    def numbers(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from(form, self.data, self.place)
        self.place += struct.calcsize(form)
        return values

    def number(self, form: str) -> Any:
        return self.numbers(form)[0]

    def text(self) -> str:
        return bytes(self._span()).decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind in _FORMS:
            return self.number(f"<{_FORMS[kind]}")
        if kind == _TEXT:
            return self.text()
        if kind != _ARRAY:
            raise struct.error(f"a value of type {kind}")
        kind, count = self.numbers("<IQ")
        if kind in _FORMS:
            return list(self.numbers(f"<{count}{_FORMS[kind]}"))
        if kind != _TEXT:
            raise struct.error(f"an array of type {kind}")
        for _ in range(count):  # each takes at least eight bytes, so the end of the file stops an absurd count
            self._span()
        return count

    def _span(self) -> memoryview:
        length = self.number("<Q")
        if length > len(self.data) - self.place:
            raise struct.error("a text beyond the end")
        self.place += length
        return self.data[self.place - length : self.place]


def _tensor(reader: _Reader, path: Path) -> TensorInfo:
    import gguf

    name, n_dimensions = reader.text(), reader.number("<I")
    if not 0 < n_dimensions <= _MOST_DIMENSIONS:
        raise ModelError(f"cannot load {path}: {name} has {n_dimensions} dimensions")
    # GGUF lists the contiguous dimension first, torch last.
    shape = tuple(reversed(reader.numbers(f"<{n_dimensions}Q")))
    number, offset = reader.numbers("<IQ")
    sizes = {kind.value: size for kind, size in gguf.GGML_QUANT_SIZES.items()}
    if number not in sizes:
        raise ModelError(f"cannot load {path}: {name} is of type {number}, which is not known")
    if min(shape) < 1 or shape[-1] % sizes[number][0]:
        raise ModelError(f"cannot load {path}: {name} has the shape {shape}")
    return TensorInfo(name, shape, number, offset, prod(shape) // sizes[number][0] * sizes[number][1])


def _check_layout(path: Path, tensors: list[TensorInfo], start: int) -> None:
    """Refuse tensors that overlap or exceed the file."""
    size, end = path.stat().st_size, 0
    for info in sorted(tensors, key=lambda info: info.offset):
        if info.offset < end:
            raise ModelError(f"cannot load {path}: {info.name} overlaps another tensor")
        end = info.offset + info.nbytes
        if start + end > size:
            raise ModelError(f"cannot load {path}: the file is cut off; {info.name} lies beyond its end")


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
    layout, vocabulary = _layout_of(file), _vocabulary(file)
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


def _vocabulary(file: GgufFile) -> int:
    info = file.tensors.infos.get("token_embd.weight")
    if info is None:
        raise ModelError(f"cannot load {file.path}: it has no token embeddings (token_embd.weight)")
    return int(info.shape[0])


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
    if type(count) is not int or count > _vocabulary(file):
        raise ModelError(
            f"cannot load {file.path}: its tokenizer has other tokens than the {_vocabulary(file)} of its embeddings"
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
