"""A linear projection head over numpy, as it stands next to an adapter; imports no torch."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from gerund.errors import DataError
from gerund.models.head_settings import HEAD_FILE, WEIGHTS_FILE, HeadConfig, head_fingerprint
from gerund.packed.safetensors_file import SafetensorsFile
from gerund.settings.encoder import read_settings

_WEIGHT = "outer.weight"


@dataclass(frozen=True, eq=False)
class LightHead:
    """A linear map ``weight_ED`` of pooled states, float32."""

    settings: HeadConfig
    weight_ED: np.ndarray

    def __call__(self, states_BD: np.ndarray, *_: np.ndarray) -> np.ndarray:
        """Return vectors ``(B, E)`` of pooled states ``(B, D)``; it has no use for the tokens."""
        vectors_BE: np.ndarray = states_BD @ self.weight_ED.T
        return vectors_BE

    @property
    def fingerprint(self) -> str:
        """Hash of shape and weights."""
        return head_fingerprint(self.settings, {_WEIGHT: self.weight_ED})

    def without_space(self) -> "LightHead":
        """Return the same head without its shared space, for other encoder settings."""
        return replace(self, settings=replace(self.settings, space=None))


def read_light_head(folder: Path) -> "LightHead | None":
    """Read the head of a model's folder; None when there is none.

    Raises:
        DataError: the head is another one than a linear map, or damaged.
    """
    path = folder / HEAD_FILE
    if not path.is_file():
        return None
    settings = HeadConfig.from_dict(read_settings(path, "head")["head"])
    weights = SafetensorsFile(folder / WEIGHTS_FILE)
    if settings.variant != "linear" or settings.vocabulary is not None or list(weights) != [_WEIGHT]:
        raise DataError(f"{path}: a head of this kind is computed by torch alone")
    weight_ED = np.ascontiguousarray(weights[_WEIGHT], np.float32)
    if weight_ED.shape != (settings.dimensions, settings.width) or not np.isfinite(weight_ED).all():
        raise DataError(f"{folder / WEIGHTS_FILE} does not hold a head as {HEAD_FILE} describes it")
    return LightHead(settings, weight_ED)
