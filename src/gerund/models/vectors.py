"""Operations on pooled vectors: normalize, compare, whiten, truncate.

Whitening: Su et al., 2021, "Whitening Sentence Representations for Better Semantics and Faster Retrieval", Algorithm
1. All-but-the-top: Mu and Viswanath, 2018, "All-but-the-Top: Simple and Effective Postprocessing for Word
Representations": the mean and the top directions are removed. (Algorithm 1, as printed, subtracts from the centered
vector the components of the uncentered one, which leaves the mean's part with the sign flipped.) Standardization:
Timkey and van Schijndel, 2021, "All Bark and No Bite: Rogue Dimensions in Transformer Language Models Obscure
Representational Quality", section 5: each dimension gets mean 0 and variance 1. All of these are a mean that is
subtracted and a matrix. Truncation keeps the first dimensions, which a training with nested losses makes the most
informative: Kusupati et al., 2022, "Matryoshka Representation Learning". Transforms are saved as
``transform.safetensors``.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from gerund.errors import ConfigError, DataError
from gerund.settings.templates import NO_TRANSFORM, STANDARDIZATION, TRUNCATE, WHITENING, transform_parts

WEIGHTS_FILE = "transform.safetensors"
# Relative variance below which a direction counts as constant.
_NOTHING = 1e-10


@dataclass(frozen=True, eq=False)
class Transform:
    """A transform."""

    name: str  # such as ``whitening-128``
    mean_D: np.ndarray  # the sample's mean; zeros for a truncation
    matrix_DE: np.ndarray  # what vectors without the mean are multiplied by

    def __call__(self, vectors_ND: np.ndarray) -> np.ndarray:
        """Return the vectors ``(N, E)`` float32."""
        moved_NE: np.ndarray = (vectors_ND - self.mean_D) @ self.matrix_DE
        return moved_NE.astype(np.float32)

    @property
    def dimensions(self) -> int:
        """Dimensions of a vector."""
        return int(self.matrix_DE.shape[1])

    @property
    def fingerprint(self) -> str:
        """Hash of name and values."""
        digest = hashlib.blake2b(self.name.encode(), digest_size=16)
        digest.update(np.ascontiguousarray(self.mean_D).tobytes() + np.ascontiguousarray(self.matrix_DE).tobytes())
        return digest.hexdigest()

    def save(self, folder: Path) -> None:
        """Write the values into a model's folder; its ``gerund.json`` has the name."""
        arrays = {"mean": self.mean_D, "matrix": np.ascontiguousarray(self.matrix_DE)}
        save_file(arrays, folder / WEIGHTS_FILE)


def fit(name: str, vectors_ND: np.ndarray) -> Transform:
    """Fit a transform on a sample of vectors, not normalized.

    ``name`` is ``standardization``, ``whitening`` or ``all-but-the-top``; the last two take a number after ``-``: the
    dimensions to keep, those of the largest variance (default: all), or the directions to remove (default: a hundredth
    of the dimensions, at least 1).
    """
    kind, number = transform_parts(name)
    if kind == TRUNCATE:
        raise ConfigError(f"{name} keeps numbers as they are and is fitted to nothing; leave the sample out")
    sample_ND = vectors_ND.astype(np.float64)
    width, count = sample_ND.shape[1], len(np.unique(sample_ND, axis=0))
    if number is not None and number > width - (kind != WHITENING):
        raise ConfigError(f"{name}: a vector has {width} numbers")
    kept = number or (width if kind == WHITENING else max(1, round(width / 100)))
    if count <= kept:
        raise ConfigError(f"{name} needs more than {kept} different texts to be fitted on, and the sample has {count}")
    mean_D = sample_ND.mean(axis=0)
    centred_ND = sample_ND - mean_D
    if kind == STANDARDIZATION:
        variance_D = centred_ND.var(axis=0)
        # A constant dimension stays one: nothing is known of its scale.
        scale_D = np.where(variance_D > _NOTHING * variance_D.max(), np.sqrt(variance_D), np.inf)
        return Transform(name, mean_D.astype(np.float32), np.diag(1 / scale_D).astype(np.float32))
    if kind == WHITENING:
        columns_DD, variance_D, _ = np.linalg.svd(centred_ND.T @ centred_ND / (len(sample_ND) - 1))
        if variance_D[kept - 1] <= _NOTHING * variance_D[0]:
            most = int((variance_D > _NOTHING * variance_D[0]).sum())
            raise ConfigError(f"the sample's vectors vary in {most} dimensions only; take {WHITENING}-{most} or less")
        matrix_DE = columns_DD[:, :kept] / np.sqrt(variance_D[:kept])
    else:
        _, _, rows_KD = np.linalg.svd(centred_ND, full_matrices=False)
        top_KD = rows_KD[:kept]
        matrix_DE = np.eye(width) - top_KD.T @ top_KD
    return Transform(name, mean_D.astype(np.float32), matrix_DE.astype(np.float32))


def truncation(name: str, width: int) -> Transform | None:
    """Return the transform that keeps the first dimensions; None for the name of another transform.

    >>> truncation("truncate-2", 3)(np.array([[1.0, 2.0, 3.0]])).tolist()
    [[1.0, 2.0]]
    """
    if name == NO_TRANSFORM or transform_parts(name)[0] != TRUNCATE:
        return None
    number = transform_parts(name)[1] or 0
    if number > width:
        raise ConfigError(f"{name}: a vector has {width} numbers")
    return Transform(name, np.zeros(width, np.float32), np.eye(width, number, dtype=np.float32))


def read_transform(folder: Path, name: str) -> Transform | None:
    """Read the transform of a model's folder; None when there is none."""
    path = folder / WEIGHTS_FILE
    if not path.is_file():
        return None
    try:
        stored = load_file(path)
        mean_D, matrix_DE = stored["mean"], stored["matrix"]
    except Exception as error:  # safetensors has an exception outside the built-in ones
        raise DataError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    if mean_D.ndim != 1 or matrix_DE.ndim != 2 or len(matrix_DE) != len(mean_D):
        raise DataError(f"{path} does not hold a mean and a matrix that fit each other")
    if not (np.isfinite(mean_D).all() and np.isfinite(matrix_DE).all()):
        raise DataError(f"{path} holds numbers that are not finite (NaN or infinity)")
    return Transform(name, mean_D.astype(np.float32), matrix_DE.astype(np.float32))


def compared(a_ND: np.ndarray, b_MD: np.ndarray, similarity: str) -> np.ndarray:
    """Return the similarity ``(N, M)`` of each vector of ``a_ND`` with each of ``b_MD``, as sentence-transformers does.

    >>> ones, others = np.array([[3.0, 4.0]]), np.array([[3.0, 0.0]])
    >>> [float(compared(ones, others, name)[0, 0]) for name in ("cosine", "dot", "euclidean", "manhattan")]
    [0.6, 9.0, -4.0, -4.0]
    """
    found_NM: np.ndarray
    if similarity in ("cosine", "dot"):
        found_NM = unit(a_ND) @ unit(b_MD).T if similarity == "cosine" else a_ND @ b_MD.T
        return found_NM
    order = 2 if similarity == "euclidean" else 1
    # Row by row: the differences of all pairs would take too much memory.
    found_NM = np.empty((len(a_ND), len(b_MD)), np.result_type(a_ND, b_MD))
    for row, a_D in enumerate(a_ND):
        found_NM[row] = -np.linalg.norm(b_MD - a_D, ord=order, axis=-1)
    return found_NM


def compared_in_pairs(a_ND: np.ndarray, b_ND: np.ndarray, similarity: str) -> np.ndarray:
    """Return the similarity ``(N,)`` of each vector of ``a_ND`` with that in the same row of ``b_ND``.

    See ``compared``.

    >>> ones, others = np.array([[3.0, 4.0]]), np.array([[3.0, 0.0]])
    >>> [float(compared_in_pairs(ones, others, name)[0]) for name in ("cosine", "dot", "euclidean", "manhattan")]
    [0.6, 9.0, -4.0, -4.0]
    """
    found_N: np.ndarray
    if similarity in ("cosine", "dot"):
        left_ND, right_ND = (unit(a_ND), unit(b_ND)) if similarity == "cosine" else (a_ND, b_ND)
        found_N = (left_ND * right_ND).sum(axis=-1)
        return found_N
    found_N = -np.linalg.norm(a_ND - b_ND, ord=2 if similarity == "euclidean" else 1, axis=-1)
    return found_N


def unit(vectors: np.ndarray) -> np.ndarray:
    """Return vectors ``(..., D)`` scaled to length 1; a zero vector stays one.

    >>> unit(np.array([[3.0, 4.0], [0.0, 0.0]])).tolist()
    [[0.6, 0.8], [0.0, 0.0]]
    """
    scaled: np.ndarray = vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)
    return scaled
