"""Small vectors: what sentence-transformers makes of the same ones, and what is found with them."""

import numpy as np
import pytest

from gerund.errors import ConfigError
from gerund.models.vectors import unit
from gerund.quantization import PRECISIONS, nearest, quantize, ranges_of, restore

VECTORS = unit(np.random.default_rng(0).normal(size=(200, 37))).astype(np.float32)
QUERIES = unit(VECTORS[:20] + 0.1 * np.random.default_rng(1).normal(size=(20, 37))).astype(np.float32)


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
def test_as_sentence_transformers(precision):
    modules = pytest.importorskip("sentence_transformers.util.quantization")
    theirs = modules.quantize_embeddings(VECTORS[:, :32], precision, ranges=ranges_of(VECTORS[:, :32]))
    ours = quantize(VECTORS[:, :32], precision, ranges_of(VECTORS[:, :32]))
    assert ours.dtype == theirs.dtype
    assert ours.shape == theirs.shape
    # They cut where we round.
    assert np.abs(ours.astype(int) - theirs.astype(int)).max() <= (1 if "int8" in precision else 0)


@pytest.mark.parametrize("precision", ["int8", "uint8"])
def test_eight_bits_are_as_near_as_half_a_step(precision):
    ranges = ranges_of(VECTORS)
    back = restore(quantize(VECTORS, precision, ranges), precision, 37, ranges)
    assert (np.abs(back - VECTORS) <= (ranges[1] - ranges[0]) / 255 / 2 + 1e-6).all()
    outside = quantize(VECTORS * 5, precision, ranges)
    assert {int(outside.min()), int(outside.max())} == ({-128, 127} if precision == "int8" else {0, 255})


@pytest.mark.parametrize("precision", ["binary", "ubinary"])
def test_bits_are_signs(precision):
    back = restore(quantize(VECTORS, precision), precision, 37)
    np.testing.assert_array_equal(back, np.where(VECTORS > 0, 1.0, -1.0))
    assert quantize(VECTORS, precision).shape == (200, 5)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_who_is_near_is_found(precision):
    ranges = ranges_of(VECTORS)
    rows, scores = nearest(QUERIES, quantize(VECTORS, precision, ranges), precision, 5, ranges_2D=ranges)
    assert (rows[:, 0] == np.arange(20)).mean() > 0.9
    assert (np.diff(scores, axis=1) <= 0).all()


def test_bits_are_counted_and_rescored():
    kept = quantize(VECTORS, "binary")
    signs = restore(kept, "binary", 37)
    rows, scores = nearest(QUERIES, kept, "binary", 7, rescored=0)
    differ = (np.where(QUERIES > 0, 1, -1)[:, None] != signs).sum(axis=2)
    np.testing.assert_array_equal(-scores, np.sort(differ, axis=1)[:, :7])
    np.testing.assert_array_equal(rows, np.argsort(differ, axis=1, kind="stable")[:, :7])
    # All of them looked at again: the product alone decides.
    rows, scores = nearest(QUERIES, kept, "binary", 7, rescored=100)
    products = QUERIES @ signs.T
    np.testing.assert_allclose(scores, -np.sort(-products, axis=1)[:, :7], rtol=1e-5)


def test_a_number_that_is_always_the_same():
    same = np.ones((3, 2), dtype=np.float32)
    ranges = ranges_of(same)
    np.testing.assert_allclose(restore(quantize(same, "int8"), "int8", 2, ranges), same)


def test_mistakes_are_told(bundled):
    with pytest.raises(ConfigError, match="unknown precision 'int4'"):
        quantize(VECTORS, "int4")
    with pytest.raises(ConfigError, match=r"\(2, 37\), not \(2, 3\)"):
        quantize(VECTORS, "int8", np.zeros((2, 3)))
    with pytest.raises(ConfigError, match="have NaN or infinity"):
        quantize(np.array([[1.0, np.nan]]), "int8")
    with pytest.raises(ConfigError, match="ranges"):
        restore(quantize(VECTORS, "int8"), "int8", 37)
    with pytest.raises(ConfigError, match="unknown precision"):
        bundled.encode("a cat", precision="int4")


def test_vectors_that_are_not_of_the_queries_precision_or_size_are_told():
    queries, kept = np.zeros((1, 16), np.float32), np.zeros((3, 16), np.float32)
    with pytest.raises(ConfigError, match=r"binary vectors of 2, not \(16,\)"):
        nearest(queries, kept, "binary", 2)
    with pytest.raises(ConfigError, match="whole numbers, as quantize makes them, not float32"):
        nearest(queries, kept, "int8", 2, ranges_2D=ranges_of(queries))
    with pytest.raises(ConfigError, match=r"vectors of 16, not \(8,\)"):
        nearest(queries, kept[:, :8], "float32", 2)


def test_encode_in_fewer_bits(bundled):
    texts = ["a cat", "a dog", "the sea"]
    plain = bundled.encode(texts)
    ranges = ranges_of(plain)
    small = bundled.encode(texts, precision="int8", ranges=ranges)
    np.testing.assert_array_equal(small, quantize(plain, "int8", ranges))
    np.testing.assert_array_equal(bundled.encode("a cat", precision="binary"), quantize(plain[:1], "binary")[0])
    assert bundled.encode(texts, precision="ubinary", output="torch").shape == (3, bundled.dimensions // 8)


def test_numbers_that_are_too_small_and_lists_without_vectors() -> None:
    bits = quantize(VECTORS, "binary")
    for settings in ({"k": 0}, {"k": -1}, {"k": 2, "rescored": -2}):
        with pytest.raises(ConfigError, match="is a whole number of at least"):
            nearest(VECTORS[:1], bits, "binary", **settings)
    assert [part.shape for part in nearest(VECTORS[:0], bits, "binary", 2)] == [(0, 2), (0, 2)]
    assert quantize(VECTORS[:0], "int8").dtype == np.int8
