"""A linear projection head in numpy, with optional vectors of words; imports no torch.

Shapes: B texts, T tokens, D dimensions of a state, E of a vector, V tokens of the vocabulary, W words, N words in the
texts, C codes of a word, K centers, P numbers of a part.
"""

from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np

from gerund.errors import ConfigError, DataError, ModelError
from gerund.models.head_settings import (
    HEAD_FILE,
    LONGEST_WORD,
    N_CENTERS,
    NO_WORD,
    STARTS_A_WORD,
    WEIGHTS_FILE,
    HeadConfig,
    hash_powers,
    head_fingerprint,
)
from gerund.packed.safetensors_file import SafetensorsFile
from gerund.settings.encoder import read_settings

_WEIGHT = "outer.weight"
_WORDS = "words."


@dataclass(frozen=True, eq=False)
class LightWords:
    """The vectors of words of :class:`gerund.models.heads.WordVectors`, as codes of a product quantizer."""

    pieces_V: np.ndarray
    lengths_V: np.ndarray
    kinds_V: np.ndarray
    keys_W: np.ndarray
    scales_W: np.ndarray
    codes_WC: np.ndarray
    centers_CKP: np.ndarray

    def __call__(self, ids_BT: np.ndarray, pooled_BT: np.ndarray) -> np.ndarray:
        """Return the sum of the vectors of each text's words over the number of its tokens, ``(B, E)``."""
        text_N, keys_N = self._words(ids_BT, pooled_BT.astype(bool))
        row_N = np.searchsorted(self.keys_W, keys_N).clip(max=len(self.keys_W) - 1)
        known_N = self.keys_W[row_N] == keys_N
        text_N, row_N = text_N[known_N], row_N[known_N]
        parts_NCP = self.centers_CKP[np.arange(self.codes_WC.shape[1]), self.codes_WC[row_N]]
        sum_BE = np.zeros((len(ids_BT), parts_NCP.shape[1] * parts_NCP.shape[2]), np.float32)
        np.add.at(sum_BE, text_N, parts_NCP.reshape(len(row_N), sum_BE.shape[1]) * self.scales_W[row_N, None])
        return sum_BE / pooled_BT.sum(1, keepdims=True).clip(min=1).astype(np.float32)

    def _words(self, ids_BT: np.ndarray, pooled_BT: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the text ``(N,)`` and the key ``(N,)`` of each word."""
        kinds_BT = self.kinds_V[ids_BT]
        inside_BT = pooled_BT & (kinds_BT != NO_WORD)
        edge_B1 = np.zeros_like(inside_BT[:, :1])
        begins_BT = inside_BT & ((kinds_BT == STARTS_A_WORD) | ~np.hstack([edge_B1, inside_BT[:, :-1]]))
        ends_BT = inside_BT & ~np.hstack([(inside_BT & ~begins_BT)[:, 1:], edge_B1])
        start_BT = np.maximum.accumulate(np.arange(ids_BT.shape[1]) * begins_BT, axis=1)
        length_BT = self.lengths_V[ids_BT].astype(np.int64) * inside_BT
        before_BT = length_BT.cumsum(1) - length_BT
        offset_BT = (before_BT - np.take_along_axis(before_BT, start_BT, 1)).clip(0, LONGEST_WORD - 1)
        # 64-bit integers wrap around: a hash modulo 2^64.
        parts_BT = self.pieces_V[ids_BT] * hash_powers()[offset_BT] * inside_BT
        sums_BT = parts_BT.cumsum(1)
        keys_BT = sums_BT - np.take_along_axis(sums_BT - parts_BT, start_BT, 1)
        return ends_BT.nonzero()[0], keys_BT[ends_BT]


@dataclass(frozen=True, eq=False)
class LightHead:
    """A linear map ``weight_ED`` of pooled states, float32, and vectors of words."""

    settings: HeadConfig
    weight_ED: np.ndarray
    words: LightWords | None = None

    def __call__(
        self, states_BD: np.ndarray, ids_BT: np.ndarray | None = None, pooled_BT: np.ndarray | None = None
    ) -> np.ndarray:
        """Return vectors ``(B, E)`` of pooled states ``(B, D)``; words need the ids and the mask of pooled tokens."""
        vectors_BE: np.ndarray = states_BD @ self.weight_ED.T
        if self.words is None:
            return vectors_BE
        if ids_BT is None or pooled_BT is None:
            raise ConfigError("this model's head adds vectors of words, and no tokens were passed")
        return vectors_BE + self.words(ids_BT, pooled_BT)

    @property
    def fingerprint(self) -> str:
        """Hash of shape and weights."""
        weights = {_WEIGHT: self.weight_ED}
        if self.words is not None:
            weights |= {_WORDS + name: value for name, value in vars(self.words).items()}
        return head_fingerprint(self.settings, weights)

    def without_space(self) -> "LightHead":
        """Return the same head without its shared space, for other encoder settings."""
        return replace(self, settings=replace(self.settings, space=None))


def read_light_head(folder: Path) -> "LightHead | None":
    """Read the head of a model's folder; None when there is none.

    Raises:
        DataError: the head is neither a linear map nor one with coded vectors of words, or it is damaged.
    """
    path = folder / HEAD_FILE
    if not path.is_file():
        return None
    settings = HeadConfig.from_dict(read_settings(path, "head")["head"])
    weights = SafetensorsFile(folder / WEIGHTS_FILE)
    coded = settings.word_bytes is not None and not settings.has_token_vectors
    if settings.variant != "linear" or not (coded or settings.vocabulary is None):
        raise DataError(f"{path}: a head of this kind is computed by torch alone")
    names = {_WORDS + field.name for field in fields(LightWords)} if coded else set()
    damaged = DataError(f"{folder / WEIGHTS_FILE} does not hold a head as {HEAD_FILE} describes it")
    if set(weights) != {_WEIGHT} | names:
        raise damaged
    weight_ED = np.ascontiguousarray(weights[_WEIGHT], np.float32)
    if weight_ED.shape != (settings.dimensions, settings.width) or not np.isfinite(weight_ED).all():
        raise damaged
    return LightHead(settings, weight_ED, _words_of(settings, weights, damaged) if coded else None)


def _words_of(settings: HeadConfig, weights: SafetensorsFile, damaged: DataError) -> LightWords:
    """Check and return a head's vectors of words."""
    n_codes = settings.word_bytes or 1
    shapes = {
        "pieces_V": (settings.vocabulary,),
        "lengths_V": (settings.vocabulary,),
        "kinds_V": (settings.vocabulary,),
        "keys_W": (settings.words,),
        "scales_W": (settings.words,),
        "codes_WC": (settings.words, n_codes),
        "centers_CKP": (n_codes, N_CENTERS, settings.dimensions // n_codes),
    }
    floats = ("scales_W", "centers_CKP")
    try:
        words = {
            name: np.ascontiguousarray(
                weights[_WORDS + name] if name in floats else weights.whole_numbers(_WORDS + name)
            )
            for name in shapes
        }
    except ModelError as error:
        raise damaged from error
    fits = all(words[name].shape == shape for name, shape in shapes.items())
    fits = fits and words["codes_WC"].dtype == words["kinds_V"].dtype == np.uint8
    if not fits or not all(np.isfinite(words[name]).all() for name in floats):
        raise damaged
    return LightWords(**words)
