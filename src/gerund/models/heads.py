"""Projection heads: what makes a pooled state into a shorter vector that is trained for comparison.

A folder with a head has ``head.json`` and ``head.safetensors`` beside the model's own files.

Knows: the layers of a head, its files. Does not know: how texts become states.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from gerund.config import FORMAT, read_settings
from gerund.errors import ConfigError, DataError, unknown_name

HEAD_FILE = "head.json"
WEIGHTS_FILE = "head.safetensors"
VARIANTS = ("paper", "released")
_EPSILON = 1e-6


@dataclass(frozen=True)
class HeadSettings:
    """The shape of a head.

    Attributes:
        width: numbers of a state.
        dimensions: numbers of a vector; GUR has 128 (Table I).
        variant: ``paper``: "a non-linear projection head" as SimCLR's, to which GUR's section III-C refers: two linear
            maps with a ReLU between. ``released``: GUR's code: a gated GELU, a linear map, an RMS norm, no biases.
    """

    width: int
    dimensions: int = 128
    variant: str = "paper"

    def __post_init__(self) -> None:
        if self.variant not in VARIANTS:
            raise unknown_name("variant of a head", self.variant, list(VARIANTS))
        for name in ("width", "dimensions"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ConfigError(f"a head's {name} is a whole number above 0, not {value!r}")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "HeadSettings":
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
    """A projection head (GUR, section III-C).

    Args:
        settings: its shape.

    >>> head = ProjectionHead(HeadSettings(width=32, dimensions=8))
    >>> head(torch.zeros(3, 32)).shape
    torch.Size([3, 8])
    """

    def __init__(self, settings: HeadSettings) -> None:
        super().__init__()
        self.settings = settings
        width, dimensions = settings.width, settings.dimensions
        released = settings.variant == "released"
        self.inner = nn.Linear(width, width, bias=not released)
        self.gate = nn.Linear(width, width, bias=False) if released else None
        self.outer = nn.Linear(width, dimensions, bias=not released)
        self.scale = nn.Parameter(torch.ones(dimensions)) if released else None

    def forward(self, states_BD: Tensor) -> Tensor:
        """Return vectors ``(B, dimensions)`` of pooled states ``(B, width)``."""
        if self.gate is None or self.scale is None:
            vectors_BE: Tensor = self.outer(torch.relu(self.inner(states_BD)))
            return vectors_BE
        gated_BD = nn.functional.gelu(self.inner(states_BD), approximate="tanh") * self.gate(states_BD)
        plain_BE = self.outer(gated_BD)
        size_B1 = plain_BE.float().pow(2).mean(-1, keepdim=True).add(_EPSILON).rsqrt()
        return self.scale * plain_BE * size_B1

    @property
    def fingerprint(self) -> str:
        """Hash of shape and weights."""
        digest = hashlib.blake2b(json.dumps(asdict(self.settings), sort_keys=True).encode(), digest_size=16)
        for name, tensor in sorted(self.state_dict().items()):
            digest.update(name.encode())
            digest.update(tensor.detach().float().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()

    def save(self, folder: Path) -> None:
        """Write the head's files into a model's folder."""
        state = {name: tensor.detach().cpu().contiguous() for name, tensor in self.state_dict().items()}
        save_file(state, folder / WEIGHTS_FILE)
        data = {"format": FORMAT, "head": asdict(self.settings)}
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
    settings = HeadSettings.from_dict(read_settings(path, "head")["head"])
    weights = folder / WEIGHTS_FILE
    try:
        stored = load_file(weights)
    except Exception as error:  # safetensors has an exception outside the built-in ones
        raise DataError(f"{weights} cannot be read: {' '.join(str(error).split())}") from error
    _refuse_others(settings, stored, weights)
    head = ProjectionHead(settings)
    head.load_state_dict(stored)
    return head.float().eval()


def _refuse_others(settings: HeadSettings, stored: Mapping[str, Tensor], weights: Path) -> None:
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
