"""Projection heads: what makes a pooled state into a vector that is trained for comparison.

A folder with a head has ``head.json`` and ``head.safetensors`` beside the model's own files.

Knows: the layers of a head, its files. Does not know: how texts become states.

Shapes: B texts, T tokens, D numbers of a state, E numbers of a vector.
"""

import hashlib
import json
from collections.abc import Mapping
from copy import copy
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from gerund.config import FORMAT, read_settings
from gerund.errors import ConfigError, DataError, unknown_name
from gerund.models.pooling import pool
from gerund.models.word_vectors import WordVectors

HEAD_FILE = "head.json"
WEIGHTS_FILE = "head.safetensors"
VARIANTS = ("paper", "released", "linear")
_EPSILON = 1e-6


@dataclass(frozen=True)
class HeadConfig:
    """The shape of a head.

    Attributes:
        width: numbers of a state.
        dimensions: numbers of a vector; GUR has 128 (Table I).
        variant: ``paper``: "a non-linear projection head" as SimCLR's, to which GUR's section III-C refers: two linear
            maps with a ReLU between. ``released``: GUR's code: a gated GELU, a linear map, an RMS norm, no biases.
            ``linear``: one linear map without a bias, into a teacher's space.
        vocabulary: of a ``linear`` head, how many tokens have a vector of their own: the mean over a text's pooled
            tokens is added to its projected state. None for no such vectors.
        words: of a head with ``vocabulary``, how many words have a vector of their own, which is added too
            (:mod:`gerund.models.word_vectors`). None for no such vectors.
        space: what tells the space that it leads into from others: a teacher's fingerprint. None for a space of its
            own.
    """

    width: int
    dimensions: int = 128
    variant: str = "paper"
    vocabulary: int | None = None
    space: str | None = None
    words: int | None = None

    def __post_init__(self) -> None:
        if self.variant not in VARIANTS:
            raise unknown_name("variant of a head", self.variant, list(VARIANTS))
        for name in ("width", "dimensions"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ConfigError(f"a head's {name} is a whole number above 0, not {value!r}")
        for name in ("vocabulary", "words"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(f"a head's {name} is a whole number above 0, not {value!r}")
        if self.words is not None and self.vocabulary is None:
            raise ConfigError("a head with vectors of words has a vocabulary of tokens too")
        if self.vocabulary is not None and self.variant != "linear":
            raise ConfigError(f"a head of the variant {self.variant!r} has no vectors of tokens; linear has")
        if self.space is not None and not (isinstance(self.space, str) and self.space):
            raise ConfigError(f"a head's space is the fingerprint of an encoder, not {self.space!r}")

    def to_dict(self) -> dict[str, Any]:
        """Return what stands in ``head.json``: what is left out there was not known to earlier versions."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "HeadConfig":
        """Read settings back.

        Raises:
            ConfigError: an unknown or missing field, or a value that is not valid.
        """
        valid = [item.name for item in fields(cls)]
        for key in data:
            if key not in valid:
                raise unknown_name(f"field in {HEAD_FILE}", key, valid)
        if "width" not in data:
            raise ConfigError(f"{HEAD_FILE} does not say the width of a state")
        return cls(**data)


class ProjectionHead(nn.Module):
    """A projection head (GUR, section III-C), or a linear map into a teacher's space.

    Args:
        settings: its shape.

    >>> head = ProjectionHead(HeadConfig(width=32, dimensions=8))
    >>> head(torch.zeros(3, 32)).shape
    torch.Size([3, 8])
    """

    def __init__(self, settings: HeadConfig) -> None:
        super().__init__()
        self.settings = settings
        width, dimensions = settings.width, settings.dimensions
        released, linear = settings.variant == "released", settings.variant == "linear"
        self.inner = None if linear else nn.Linear(width, width, bias=not released)
        self.gate = nn.Linear(width, width, bias=False) if released else None
        self.outer = nn.Linear(width, dimensions, bias=not (released or linear))
        self.scale = nn.Parameter(torch.ones(dimensions)) if released else None
        self.tokens: nn.Embedding | None = None
        if settings.vocabulary is not None:
            self.tokens = nn.Embedding(settings.vocabulary, dimensions)
            nn.init.zeros_(self.tokens.weight)
        self.words: WordVectors | None = None
        if settings.words is not None and settings.vocabulary is not None:
            self.words = WordVectors(settings.vocabulary, settings.words, dimensions)

    def forward(self, states_BD: Tensor, ids_BT: Tensor | None = None, pooled_BT: Tensor | None = None) -> Tensor:
        """Return vectors ``(B, E)`` of pooled states ``(B, D)``.

        Args:
            states_BD: the pooled states.
            ids_BT: the texts' tokens; a head without vectors of tokens does not look at them.
            pooled_BT: True for the tokens that were pooled.

        Raises:
            ConfigError: a head with vectors of tokens is given none, or one that it has no vector for.
        """
        if self.inner is None:
            vectors_BE: Tensor = self.outer(states_BD)
            return vectors_BE if self.tokens is None else vectors_BE + self._of_tokens(ids_BT, pooled_BT)
        if self.gate is None or self.scale is None:
            projected_BE: Tensor = self.outer(torch.relu(self.inner(states_BD)))
            return projected_BE
        gated_BD = nn.functional.gelu(self.inner(states_BD), approximate="tanh") * self.gate(states_BD)
        plain_BE = self.outer(gated_BD)
        size_B1 = plain_BE.float().pow(2).mean(-1, keepdim=True).add(_EPSILON).rsqrt()
        return self.scale * plain_BE * size_B1

    def _of_tokens(self, ids_BT: Tensor | None, pooled_BT: Tensor | None) -> Tensor:
        """Return the mean ``(B, E)`` of the vectors of the tokens that were pooled, and of the words that they make."""
        if ids_BT is None or pooled_BT is None:
            raise ConfigError("this model's head adds vectors of tokens, and is asked without any tokens")
        assert self.tokens is not None
        vectors_BE = pool(self.tokens(ids_BT), pooled_BT, "mean")
        return vectors_BE if self.words is None else vectors_BE + self.words(ids_BT, pooled_BT)

    def without_space(self) -> "ProjectionHead":
        """Return the same head, with the same weights, that declares no space: of an encoder that is read otherwise."""
        if self.settings.space is None:
            return self
        other = copy(self)
        other.settings = replace(self.settings, space=None)
        return other

    @property
    def fingerprint(self) -> str:
        """Hash of shape and weights."""
        digest = hashlib.blake2b(json.dumps(self.settings.to_dict(), sort_keys=True).encode(), digest_size=16)
        for name, tensor in sorted(self.state_dict().items()):
            digest.update(name.encode())
            exact = tensor.detach().float() if tensor.is_floating_point() else tensor
            digest.update(exact.cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()

    def save(self, folder: Path) -> None:
        """Write the head's files into a model's folder; numbers that were rounded to bfloat16 take two bytes each."""
        state = {name: _in_few_bytes(tensor.detach().cpu()) for name, tensor in self.state_dict().items()}
        save_file(state, folder / WEIGHTS_FILE)
        data = {"format": FORMAT, "head": self.settings.to_dict()}
        (folder / HEAD_FILE).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def read_head(folder: Path) -> ProjectionHead | None:
    """Read the head of a model's folder, in evaluation mode and float32; None when there is none.

    Raises:
        DataError: the files are broken.
        ConfigError: they were written by a newer version, or hold unknown fields.
    """
    path = folder / HEAD_FILE
    if not path.is_file():
        return None
    settings = HeadConfig.from_dict(read_settings(path, "head")["head"])
    weights = folder / WEIGHTS_FILE
    try:
        stored = load_file(weights)
    except Exception as error:  # safetensors has an exception outside the built-in ones
        raise DataError(f"{weights} cannot be read: {' '.join(str(error).split())}") from error
    _refuse_others(settings, stored, weights)
    head = ProjectionHead(settings)
    head.load_state_dict(stored)
    return head.float().eval()


def _in_few_bytes(tensor: Tensor) -> Tensor:
    """Return the tensor in bfloat16 where that is exact, as after ``read_head`` of such a file; else as it is."""
    tensor = tensor.contiguous()
    if tensor.dtype == torch.float32:
        rounded = tensor.bfloat16()
        if torch.equal(rounded.float(), tensor):
            return rounded
    return tensor


def _refuse_others(settings: HeadConfig, stored: Mapping[str, Tensor], weights: Path) -> None:
    """Refuse weights that are not those of a head of this shape, before memory is taken for it."""
    with torch.device("meta"):
        wanted = ProjectionHead(settings).state_dict()
    if wanted.keys() != stored.keys():
        odd = sorted(wanted.keys() ^ stored.keys())[0]
        raise DataError(f"{weights} does not hold a head as {HEAD_FILE} describes it: {odd} is in one of them only")
    for key, tensor in wanted.items():
        if stored[key].shape != tensor.shape:
            asked, had = ("x".join(map(str, shape)) for shape in (tensor.shape, stored[key].shape))
            raise DataError(f"{weights} does not fit {HEAD_FILE}, which makes {key} {asked}: it has {had}")
        if not torch.isfinite(stored[key]).all():
            raise DataError(f"{weights}: {key} holds numbers that are not finite (NaN or infinity)")
