"""Types of the weights in a GGUF file, and which tensor gets which type.

The mixtures are those of llama.cpp's ``llama-quantize`` without an importance matrix (``src/llama-quant.cpp``,
``llama_tensor_get_type``). Blocks of 32 weights are packed by the ``gguf`` package, and the K types, with blocks of
256, by llama.cpp's own code in the ``xllamacpp`` package.
"""

import ctypes
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gerund.errors import ConfigError
from gerund.settings.encoder import GgufType

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
