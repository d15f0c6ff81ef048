"""Repacked blocks have the values of the file's blocks."""

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from gerund.packed.blocks import Blocks, repack, stacked

KINDS = [Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0, Type.Q4_K, Type.Q5_K, Type.Q6_K]


def stored_rows(kind: Type, n_rows: int = 5, seed: int = 0) -> np.ndarray:
    """Return random bytes whose half-precision scales are finite."""
    size, n_bytes = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (n_rows, 512 // size, n_bytes), dtype=np.uint8)
    halves = {Type.Q6_K: (208,), Type.Q4_0: (0,), Type.Q5_0: (0,), Type.Q8_0: (0,)}.get(kind, (0, 2))
    for start in halves:
        blocks[..., start : start + 2] = (
            generator.normal(size=(n_rows, 512 // size, 1)).astype(np.float16).view(np.uint8)
        )
    return blocks.reshape(n_rows, -1)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_repacked_blocks_have_the_values_of_the_file(kind: Type):
    stored = stored_rows(kind)
    expected = gguf.quants.dequantize(stored, kind)
    packed = repack(stored, kind)
    assert isinstance(packed, Blocks)
    assert packed.shape == expected.shape
    np.testing.assert_allclose(packed.unpack(), expected, rtol=1e-5, atol=np.abs(expected).max() * 1e-6)


def test_rows_are_reordered_and_matrices_stacked():
    first, second = (repack(stored_rows(Type.Q4_1, seed=seed), Type.Q4_1) for seed in (1, 2))
    both = stacked([first, second]).rows(np.arange(9, -1, -1))
    np.testing.assert_array_equal(both.unpack()[::-1], np.concatenate([first.unpack(), second.unpack()]))


def test_other_types_are_unpacked():
    values = np.random.default_rng(0).normal(size=(3, 64)).astype(np.float32)
    np.testing.assert_array_equal(repack(values.view(np.uint8), Type.F32), values)
    half = repack(values.astype(np.float16).view(np.uint8), Type.F16)
    np.testing.assert_allclose(half, values, rtol=1e-3)
