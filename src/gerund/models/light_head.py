"""``HeadConfig``, the layers and sizes of a projection head, and a linear head in numpy; imports no torch.

The head may have vectors of words. Shapes: B texts, T tokens, D dimensions of a state, E of a vector, V tokens of the
vocabulary, W words, N words in the texts, C codes of a word, P numbers of a part.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from gerund.checks import demand_fields, flag, one_of
from gerund.errors import ConfigError, DataError, ModelError
from gerund.packed.safetensors_file import SafetensorsFile
from gerund.settings.encoder import read_settings

HEAD_FILE = "head.json"
WEIGHTS_FILE = "head.safetensors"
MODULES = "modules"
VARIANTS = ("paper", "released", "linear", MODULES)
ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "Sigmoid", "SiLU")
"""Activation functions of dense layers, by the names of torch's classes."""
# What a token is to the words of a text.
NO_WORD, INSIDE_A_WORD, STARTS_A_WORD = 0, 1, 2
LONGEST_WORD = 64
N_CENTERS = 256
_BASE = 0x9E3779B97F4A7C15  # odd, so that no place of a word is lost
# More dimensions than any vector has.
_WIDEST = 1 << 24
_MOST_ROWS = 1 << 28


@dataclass(frozen=True)
class VectorModule:
    """One module of sentence-transformers after the pooling."""

    kind: str  # ``Dense``, ``Normalize`` or ``LayerNorm``
    width: int  # dimensions of the input
    dimensions: int  # dimensions of the output
    bias: bool = True
    activation: str = "Tanh"  # of a dense layer, from ``ACTIVATIONS``
    residual: bool = False  # whether a dense layer adds its input to its output

    def __post_init__(self) -> None:
        one_of("module of a head", self.kind, ("Dense", "Normalize", "LayerNorm"))
        one_of("activation of a dense layer", self.activation, ACTIVATIONS)
        for name in ("width", "dimensions"):
            value = getattr(self, name)
            if type(value) is not int or not 0 < value <= _WIDEST:
                raise ConfigError(f"a module's {name} is a whole number from 1 to {_WIDEST}, not {value!r}")
        if self.kind != "Dense" and self.width != self.dimensions:
            raise ConfigError(f"a {self.kind} module does not make {self.dimensions} numbers of {self.width}")
        for name in ("bias", "residual"):
            flag(f"a module's {name}", getattr(self, name))


@dataclass(frozen=True)
class HeadConfig:
    """The shape of a head."""

    width: int  # dimensions of a state
    dimensions: int = 128  # dimensions of a vector; GUR has 128 (Table I)
    # ``paper``: "a non-linear projection head" as SimCLR's, to which GUR's section III-C refers: two linear maps with a
    # ReLU between. ``released``: GUR's code: a gated GELU, a linear map, an RMS norm, no biases. ``linear``: one linear
    # map without a bias, into a teacher's space. ``modules``: those of a ready-made encoder of sentence-transformers..
    variant: str = "paper"
    # Number of tokens that a ``linear`` head with vectors of tokens or words knows. They are added to a projected
    # state: of tokens the mean, of words the sum over the number of tokens. None for a head with neither.
    vocabulary: int | None = None
    # Identifies the shared space of the vectors: a teacher's fingerprint. None for a space of its own.
    space: str | None = None
    # Number of word vectors of a head with ``vocabulary``, which are added too. None for no word vectors.
    words: int | None = None
    # False for a head with word vectors and no token vectors; ``vocabulary`` then says how tokens make up words.
    token_vectors: bool | None = None
    # Bytes of a word's vector, as codes of a product quantizer; None for 8 bits a number.
    word_bytes: int | None = None
    modules: tuple[VectorModule, ...] | None = None  # the modules of the variant ``modules``, in order

    def __post_init__(self) -> None:
        one_of("variant of a head", self.variant, VARIANTS)
        for name in ("width", "dimensions"):
            value = getattr(self, name)
            if type(value) is not int or not 0 < value <= _WIDEST:
                raise ConfigError(f"a head's {name} is a whole number from 1 to {_WIDEST}, not {value!r}")
        for name in ("vocabulary", "words", "word_bytes"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or not 0 < value <= _MOST_ROWS):
                raise ConfigError(f"a head's {name} is a whole number from 1 to {_MOST_ROWS}, not {value!r}")
        if self.vocabulary is not None and self.variant != "linear":
            raise ConfigError(f"a head of the variant {self.variant!r} has no vectors of tokens; linear has")
        if self.space is not None and not (isinstance(self.space, str) and self.space):
            raise ConfigError(f"a head's space is the fingerprint of an encoder, not {self.space!r}")
        self._check_words()
        self._check_modules()

    def _check_words(self) -> None:
        if self.token_vectors not in (None, False):
            raise ConfigError(f"a head's token_vectors is false or left out, not {self.token_vectors!r}")
        if self.words is not None and self.vocabulary is None:
            raise ConfigError("a head with vectors of words has a vocabulary of tokens too")
        if self.words is None and (self.word_bytes is not None or self.token_vectors is False):
            raise ConfigError("word_bytes and token_vectors=False are for a head with vectors of words")
        if self.word_bytes is not None and self.dimensions % self.word_bytes:
            raise ConfigError(f"word_bytes has to divide a head's {self.dimensions} dimensions, not {self.word_bytes}")

    def _check_modules(self) -> None:
        if (self.modules is not None) != (self.variant == MODULES):
            raise ConfigError(f"modules belong to heads of the variant {MODULES!r}, which have some")
        width = self.width
        for number, module in enumerate(self.modules or ()):
            if module.width != width:
                raise ConfigError(f"module {number} of a head takes {module.width} numbers and is given {width}")
            width = module.dimensions
        if self.modules is not None and width != self.dimensions:
            raise ConfigError(f"the modules of a head give {width} numbers, not {self.dimensions}")

    @property
    def has_token_vectors(self) -> bool:
        """Whether it adds a vector for each token."""
        return self.vocabulary is not None and self.token_vectors is not False

    @classmethod
    def of_modules(cls, modules: Sequence[VectorModule]) -> "HeadConfig":
        """Return the shape of a head of sentence-transformers' modules."""
        return cls(modules[0].width, modules[-1].dimensions, MODULES, modules=tuple(modules))

    def to_dict(self) -> dict[str, Any]:
        """Return the content of ``head.json``; settings that are None are omitted, for earlier versions."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "HeadConfig":
        """Read settings back."""
        demand_fields(cls, data, f"in {HEAD_FILE}")
        if "width" not in data:
            raise ConfigError(f"{HEAD_FILE} does not say the width of a state")
        if (listed := data.get("modules")) is None:
            return cls(**data)
        known = {item.name for item in fields(VectorModule)}
        if not isinstance(listed, list) or any(not isinstance(item, dict) or item.keys() - known for item in listed):
            raise ConfigError(f"modules in {HEAD_FILE} are objects with {', '.join(sorted(known))}")
        try:
            return cls(**{**data, "modules": tuple(VectorModule(**item) for item in listed)})
        except TypeError as error:
            raise ConfigError(f"a module in {HEAD_FILE} lacks kind, width or dimensions") from error


def head_fingerprint(settings: HeadConfig, weights: Mapping[str, np.ndarray]) -> str:
    """Return the hash of a head's shape and weights, these in float32."""
    digest = hashlib.blake2b(json.dumps(settings.to_dict(), sort_keys=True).encode(), digest_size=16)
    for name, values in sorted(weights.items()):
        digest.update(name.encode())
        digest.update(values.tobytes())
    return digest.hexdigest()


def word_hash(letters: str) -> int:
    """Return the key of a word: a hash of its characters modulo 2^64, as a signed number."""
    value = sum((ord(letter) + 1) * pow(_BASE, place, 1 << 64) for place, letter in enumerate(letters)) % (1 << 64)
    return value - (1 << 64) if value >= 1 << 63 else value


@cache
def hash_powers() -> np.ndarray:
    """Return the hash's powers by position in a word ``(L,)``."""
    return np.array([pow(_BASE, place, 1 << 64) for place in range(LONGEST_WORD)], np.uint64).view(np.int64)


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
