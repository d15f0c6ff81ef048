"""Settings and projection of trained token vectors (late interaction), as files in a model's folder.

Shapes: D dimensions of a state, E of a token vector.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from gerund.checks import write_json
from gerund.errors import DataError
from gerund.models.heads import read_matrix
from gerund.models.sentence_transformers_folder import MODULE_WEIGHTS, is_ready_made, read_late_modules
from gerund.settings.encoder import FORMAT, read_settings
from gerund.settings.late import LATE_FILE, LateConfig

WEIGHTS_FILE = "late.safetensors"
_PROJECTION = "projection.weight"


@dataclass(frozen=True, eq=False)
class LateHead:
    """How token vectors are made of states: the settings, and a linear map without bias."""

    config: LateConfig
    projection_ED: np.ndarray  # float32

    @property
    def dimensions(self) -> int:
        """Dimensions of a token vector."""
        return int(self.projection_ED.shape[0])

    @property
    def fingerprint(self) -> str:
        """Hash of settings and values."""
        settings = json.dumps(self.config.to_dict(), sort_keys=True).encode()
        values = np.ascontiguousarray(self.projection_ED).tobytes()
        return hashlib.blake2b(settings + values, digest_size=8).hexdigest()

    def save(self, folder: Path) -> None:
        """Write the files into a model's folder."""
        save_file({_PROJECTION: torch.from_numpy(np.ascontiguousarray(self.projection_ED))}, folder / WEIGHTS_FILE)
        write_json(folder / LATE_FILE, {"format": FORMAT, "late": self.config.to_dict()})


def read_late(folder: Path | None, width: int) -> LateHead | None:
    """Return what a folder has of it; None without ``late.json``. ``width`` is that of the model's states.

    Raises:
        DataError: the weights cannot be read, or are for other states.
    """
    if folder is None:
        return None
    if not (folder / LATE_FILE).is_file():
        return _of_sentence_transformers(folder, width)
    config = LateConfig.from_dict(read_settings(folder / LATE_FILE, "late")["late"])
    weights = folder / WEIGHTS_FILE
    projection_ED = read_matrix(weights, _PROJECTION).numpy()
    if projection_ED.ndim != 2 or projection_ED.shape[1] != width:
        raise DataError(f"{weights} is for other states than this model's, of {width} numbers")
    return LateHead(config, projection_ED)


def _of_sentence_transformers(folder: Path, width: int) -> LateHead | None:
    """Return what a folder of sentence-transformers' ``MultiVectorEncoder`` or PyLate has of it; None for another.

    Linear maps that follow each other are one.
    """
    if not is_ready_made(folder) or (stored := read_late_modules(folder)) is None:
        return None
    projection_ED = np.eye(width, dtype=np.float32)
    for path in stored.layers:
        weights = folder / path / MODULE_WEIGHTS
        weight_ED = read_matrix(weights, "linear.weight").numpy()
        if weight_ED.ndim != 2 or weight_ED.shape[1] != len(projection_ED):
            raise DataError(f"{weights} is for vectors of {weight_ED.shape[-1]} numbers, not {len(projection_ED)}")
        projection_ED = weight_ED @ projection_ED
    return LateHead(stored.config, projection_ED)
