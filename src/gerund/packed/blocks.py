"""Repack quantized GGUF tensors into the form of ONNX Runtime's ``MatMulNBits``, without loss.

A block of GGUF is ``scale * code + offset`` for 16 or 32 values. ``MatMulNBits`` computes with
``scale * (code - 2 ** (bits - 1))``, with 4 or 8 bits a code. What remains is one number a block, ``offset``, to be
multiplied with the sum of the block's activations. So codes are moved, and never rounded.

Shapes: N rows (outputs), K columns (inputs), G blocks of a row.
"""

from collections.abc import Callable
from dataclasses import dataclass

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type


@dataclass(frozen=True)
class Blocks:
    """A quantized matrix.

    Attributes:
        bits: 4 or 8.
        size: values per block.
        codes_NGb: the codes, uint8; two of 4 bits in a byte, the first in the low half.
        scales_NG: the scale of each block, float32.
        offsets_NG: what to add per block, float32; None for zeros.
    """

    bits: int
    size: int
    codes_NGb: np.ndarray
    scales_NG: np.ndarray
    offsets_NG: np.ndarray | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.codes_NGb.shape[0], self.scales_NG.shape[1] * self.size

    @property
    def form(self) -> tuple[int, int, bool]:
        """Return what two matrices must share to become one: bits, block size, whether there are offsets."""
        return self.bits, self.size, self.offsets_NG is not None

    def rows(self, order: np.ndarray | slice) -> "Blocks":
        """Return a matrix with these rows."""
        offsets = None if self.offsets_NG is None else self.offsets_NG[order]
        return Blocks(self.bits, self.size, self.codes_NGb[order], self.scales_NG[order], offsets)

    def unpack(self) -> np.ndarray:
        """Return the values (N, K), float32."""
        codes = self.codes_NGb
        if self.bits == 4:
            codes = np.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:2], -1)
        values = self.scales_NG[..., None] * (codes.astype(np.float32) - 2 ** (self.bits - 1))
        if self.offsets_NG is not None:
            values += self.offsets_NG[..., None]
        return values.reshape(self.shape)


def stacked(parts: list[Blocks]) -> Blocks:
    """Return matrices of the same form as one, under each other."""
    first = parts[0]
    offsets = None
    if first.offsets_NG is not None:
        offsets = np.concatenate([part.offsets_NG for part in parts if part.offsets_NG is not None])
    codes, scales = (np.concatenate([getattr(part, name) for part in parts]) for name in ("codes_NGb", "scales_NG"))
    return Blocks(first.bits, first.size, codes, scales, offsets)


def repack(stored: np.ndarray, kind: int) -> Blocks | np.ndarray:
    """Return a tensor's rows as blocks, or as float32 (N, K) where its type has no such form.

    Args:
        stored: the rows' bytes, (N, bytes of a row), uint8.
        kind: their type, by ggml's number.
    """
    kind = Type(kind)
    if kind == Type.F32:
        return np.ascontiguousarray(stored).view(np.float32)
    unpack = _UNPACK.get(kind)
    if unpack is None:
        return gguf.quants.dequantize(stored, kind)
    size, n_bytes = gguf.GGML_QUANT_SIZES[kind]
    n_rows = stored.shape[0]
    bits, scales, codes, offsets = unpack(np.ascontiguousarray(stored).reshape(-1, n_bytes))
    per_block = size // scales.shape[-1]
    codes = codes.reshape(n_rows, -1, per_block)
    if bits == 4:
        codes = codes[..., 0::2] | (codes[..., 1::2] << 4)
    offsets = None if offsets is None else offsets.reshape(n_rows, -1)
    return Blocks(bits, per_block, np.ascontiguousarray(codes), scales.reshape(n_rows, -1), offsets)


# Each returns bits, scales (M, blocks), codes (M, values) and offsets, of M blocks of the file. Codes of fewer bits
# keep their values around the middle of the range of 4 or 8 bits.
_Unpacked = tuple[int, np.ndarray, np.ndarray, np.ndarray | None]


def _half(blocks: np.ndarray, start: int) -> np.ndarray:
    return np.ascontiguousarray(blocks[:, start : start + 2]).view(np.float16).astype(np.float32)


def _nibbles(stored: np.ndarray, run: int = 16) -> np.ndarray:
    """Return the low halves of each run of bytes, followed by the high halves."""
    stored = stored.reshape(len(stored), -1, 1, run)
    return np.concatenate([stored & 15, stored >> 4], 2).reshape(len(stored), -1)


def _high_bits(blocks: np.ndarray) -> np.ndarray:
    return np.unpackbits(np.ascontiguousarray(blocks), axis=1, bitorder="little")


def _q4_0(blocks: np.ndarray) -> _Unpacked:
    return 4, _half(blocks, 0), _nibbles(blocks[:, 2:]), None


def _q4_1(blocks: np.ndarray) -> _Unpacked:
    scale = _half(blocks, 0)
    return 4, scale, _nibbles(blocks[:, 4:]), _half(blocks, 2) + 8 * scale


def _q5_0(blocks: np.ndarray) -> _Unpacked:
    return 8, _half(blocks, 0), (_nibbles(blocks[:, 6:]) | (_high_bits(blocks[:, 2:6]) << 4)) + np.uint8(112), None


def _q5_1(blocks: np.ndarray) -> _Unpacked:
    scale = _half(blocks, 0)
    codes = (_nibbles(blocks[:, 8:]) | (_high_bits(blocks[:, 4:8]) << 4)) + np.uint8(112)
    return 8, scale, codes, _half(blocks, 2) + 16 * scale


def _q8_0(blocks: np.ndarray) -> _Unpacked:
    return 8, _half(blocks, 0), blocks[:, 2:] ^ np.uint8(128), None


def _scales_and_offsets(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    scales, offsets = gguf.quants.Q4_K.get_scale_min(blocks[:, 4:16])
    return _half(blocks, 0) * scales.astype(np.float32), -_half(blocks, 2) * offsets.astype(np.float32)


def _q4_k(blocks: np.ndarray) -> _Unpacked:
    scales, offsets = _scales_and_offsets(blocks)
    return 4, scales, _nibbles(blocks[:, 16:], 32), offsets + 8 * scales


def _q5_k(blocks: np.ndarray) -> _Unpacked:
    scales, offsets = _scales_and_offsets(blocks)
    high = (blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    codes = _nibbles(blocks[:, 48:], 32) | (high.reshape(len(blocks), -1) << 4)
    return 8, scales, codes + np.uint8(112), offsets + 16 * scales


def _q6_k(blocks: np.ndarray) -> _Unpacked:
    scales = _half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None]) & 3
    codes = _nibbles(blocks[:, :128], 64) | (high.reshape(len(blocks), -1) << 4)
    return 8, scales, codes + np.uint8(96), None


_UNPACK: dict[Type, Callable[[np.ndarray], _Unpacked]] = {
    Type.Q4_0: _q4_0,
    Type.Q4_1: _q4_1,
    Type.Q5_0: _q5_0,
    Type.Q5_1: _q5_1,
    Type.Q8_0: _q8_0,
    Type.Q4_K: _q4_k,
    Type.Q5_K: _q5_k,
    Type.Q6_K: _q6_k,
}
