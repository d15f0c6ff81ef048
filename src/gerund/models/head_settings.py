"""``HeadConfig``: the layers and sizes of a projection head, stored as ``head.json``; imports no torch."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache
from typing import Any

import numpy as np

from gerund.checks import demand_fields, flag, one_of
from gerund.errors import ConfigError

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
