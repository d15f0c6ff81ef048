"""Quantize vectors to int8, uint8 or bits, by sentence-transformers' conventions, and search among them.

``int8`` and ``uint8`` divide each dimension's range, from its smallest to its largest value over a sample, into 255
steps. ``binary`` and ``ubinary`` store whether a value is above 0, eight per byte, signed or unsigned. Queries stay
float32: they are compared by the dot product with the stored values, or, for bits, first by the Hamming distance and
then, among the nearest, by that product (rescoring).

Shapes: N vectors, Q queries, D dimensions, C bytes of packed bits.
"""

from typing import Literal, Unpack, get_args

import numpy as np

from gerund.checks import whole_number
from gerund.errors import ConfigError, unknown_name
from gerund.settings.aliases import TopK, takes_aliases

Precision = Literal["float32", "int8", "uint8", "binary", "ubinary"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)

_STEPS = 255
# Vectors that are looked at again, for each one that is wanted; what sentence-transformers takes.
RESCORED = 4


def check_precision(precision: object) -> Precision:
    """Return the name of a precision.

    Raises:
        ConfigError: there is none of this name.
    """
    for known in PRECISIONS:
        if precision == known:
            return known
    raise unknown_name("precision", precision, list(PRECISIONS))


def ranges_of(vectors_ND: np.ndarray) -> np.ndarray:
    """Return the smallest and the largest value of each number ``(2, D)``: what ``quantize`` divides into steps.

    >>> ranges_of(np.array([[0.0, 2.0], [1.0, -2.0]])).tolist()
    [[0.0, -2.0], [1.0, 2.0]]
    """
    return np.stack([vectors_ND.min(axis=0), vectors_ND.max(axis=0)]).astype(np.float32)


def width_of(dimensions: int, precision: str) -> int:
    """Return how many values a vector is stored in: numbers, or bytes of eight bits each.

    >>> width_of(100, "int8"), width_of(100, "binary")
    (100, 13)

    Raises:
        ConfigError: an unknown precision.
    """
    return -(-dimensions // 8) if check_precision(precision) in ("binary", "ubinary") else dimensions


def quantize(vectors_ND: np.ndarray, precision: Precision, ranges_2D: np.ndarray | None = None) -> np.ndarray:
    """Return vectors in fewer bits.

    Args:
        vectors_ND: float32.
        precision: one of ``PRECISIONS``.
        ranges_2D: for int8 and uint8, the range of each number; None takes that of these very vectors, which makes
            them comparable with none but each other. What lies outside is moved to the edge.

    Returns:
        ``(N, D)`` int8 or uint8, or ``(N, C)`` bytes of eight numbers each, the last one filled up with zeros.

    Raises:
        ConfigError: an unknown precision, ranges of another size, or NaN or infinity in int8 or uint8.

    >>> quantize(np.array([[0.2, -0.1, 0.3, 0.0, 0.5, -1.0, -1.0, 0.1]]), "ubinary").tolist()
    [[169]]
    >>> quantize(np.array([[0.0], [0.6], [1.0]]), "int8").tolist()
    [[-128], [25], [127]]
    """
    check_precision(precision)
    if precision == "float32":
        return np.asarray(vectors_ND, dtype=np.float32)
    if precision in ("binary", "ubinary"):
        bits_NC = np.packbits(np.asarray(vectors_ND) > 0, axis=-1)
        return (bits_NC.astype(np.int16) - 128).astype(np.int8) if precision == "binary" else bits_NC
    if ranges_2D is None and not len(vectors_ND):
        return np.zeros(np.shape(vectors_ND), precision)
    if not np.isfinite(vectors_ND).all():
        raise ConfigError(f"vectors in {precision} are made of finite numbers; these have NaN or infinity")
    low_D, size_D = _steps(vectors_ND, ranges_2D)
    steps_ND = np.clip(np.rint((vectors_ND - low_D) / size_D), 0, _STEPS)
    return steps_ND.astype(np.uint8) if precision == "uint8" else (steps_ND - 128).astype(np.int8)


def restore(kept: np.ndarray, precision: Precision, dimensions: int, ranges_2D: np.ndarray | None = None) -> np.ndarray:
    """Return what is left of vectors in float32 ``(N, D)``: of bits, 1 and -1.

    Args:
        kept: what ``quantize`` returned.
        precision: in which it was quantised.
        dimensions: numbers of a vector.
        ranges_2D: those that it was given, or that ``ranges_of`` says of the vectors.

    Raises:
        ConfigError: int8 or uint8 without ranges.
    """
    check_precision(precision)
    if precision == "float32":
        return np.asarray(kept, dtype=np.float32)
    if precision in ("binary", "ubinary"):
        bits = np.unpackbits(as_bytes(kept), axis=-1, count=dimensions)
        return bits.astype(np.float32) * 2 - 1
    if ranges_2D is None:
        raise ConfigError(f"what {precision} vectors were is known with the ranges that they were quantised by")
    low_D, size_D = _steps(np.zeros((1, dimensions)), ranges_2D)
    steps = kept.astype(np.float32) + (128 if precision == "int8" else 0)
    vectors: np.ndarray = (low_D + steps * size_D).astype(np.float32)
    return vectors


@takes_aliases
def nearest(
    queries_QD: np.ndarray,
    kept: np.ndarray,
    precision: Precision,
    k: int,
    *,
    ranges_2D: np.ndarray | None = None,
    rescored: int = RESCORED,
    **aliases: Unpack[TopK],
) -> tuple[np.ndarray, np.ndarray]:
    """Return the vectors that are nearest to each query, the best first.

    Args:
        queries_QD: float32.
        kept: the vectors, as ``quantize`` returned them.
        precision: in which they were quantised.
        k: how many at most.
        ranges_2D: of int8 and uint8.
        rescored: for bits: so many times ``k`` are found by counting bits and put into a new order by the product
            with the query; 0 leaves the order of the bits.
        aliases: ``top_k`` is another name for ``k``.

    Returns:
        The rows of ``kept`` ``(Q, k)`` and how near they are ``(Q, k)``; with bits alone, minus the bits that differ.

    Raises:
        ConfigError: an unknown precision, vectors of another size or type than it makes, int8 without ranges, a ``k``
            below 1, or a negative ``rescored``.
    """
    del aliases  # replaced by what they stand for
    for name, number, least in (("k", k, 1), ("rescored", rescored, 0)):
        if whole_number(name, number) < least:
            raise ConfigError(f"{name} is a whole number of at least {least}, not {number}")
    count = min(int(k), len(kept))
    dimensions = queries_QD.shape[1]
    width = width_of(dimensions, precision)
    if kept.shape[1:] != (width,):
        raise ConfigError(
            f"to queries of {dimensions} numbers belong {precision} vectors of {width}, not {kept.shape[1:]}"
        )
    if precision != "float32" and not np.issubdtype(kept.dtype, np.integer):
        raise ConfigError(f"vectors in {precision} are whole numbers, as quantize makes them, not {kept.dtype}")
    if precision not in ("binary", "ubinary"):
        scores_QN = queries_QD @ restore(kept, precision, dimensions, ranges_2D).T
        return _best(scores_QN, count)
    if not len(queries_QD):
        return np.zeros((0, count), np.int64), np.zeros((0, count), np.float32)
    asked_QC = quantize(queries_QD, "ubinary")
    apart_QN = np.stack([np.bitwise_count(as_bytes(kept) ^ own_C).sum(axis=1) for own_C in asked_QC])
    if not rescored:
        return _best(-apart_QN.astype(np.float32), count)
    rows_QR, _ = _best(-apart_QN.astype(np.float32), min(count * rescored, len(kept)))
    best = [
        query_D @ restore(kept[rows_R], precision, dimensions).T
        for query_D, rows_R in zip(queries_QD, rows_QR, strict=True)
    ]
    places_QK, scores_QK = _best(np.stack(best), count)
    return np.take_along_axis(rows_QR, places_QK, axis=1), scores_QK


def as_bytes(kept: np.ndarray) -> np.ndarray:
    """Return packed bits as unsigned bytes, however they were kept."""
    return (kept.astype(np.int16) + 128).astype(np.uint8) if kept.dtype == np.int8 else kept


def _best(scores_QN: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    rows_QK = np.argsort(-scores_QN, axis=1, kind="stable")[:, :count]
    return rows_QK, np.take_along_axis(scores_QN, rows_QK, axis=1)


def _steps(vectors_ND: np.ndarray, ranges_2D: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Return where each number's first step lies, and how wide its steps are."""
    if ranges_2D is None:
        ranges_2D = ranges_of(np.asarray(vectors_ND))
    ranges_2D = np.asarray(ranges_2D, dtype=np.float32)
    if ranges_2D.shape != (2, vectors_ND.shape[-1]):
        raise ConfigError(
            f"ranges are the smallest and the largest value of each of {vectors_ND.shape[-1]} numbers, (2, "
            f"{vectors_ND.shape[-1]}), not {ranges_2D.shape}"
        )
    # A number that is always the same has no steps; any width but 0 keeps it at the first.
    return ranges_2D[0], np.maximum((ranges_2D[1] - ranges_2D[0]) / _STEPS, 1e-12)
