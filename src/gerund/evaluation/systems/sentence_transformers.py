"""Sentence-transformers models as systems, to compare language models with."""

import copy
import hashlib
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gerund.errors import MissingDependencyError, ModelError
from gerund.evaluation.systems.base import Encoder
from gerund.models.library_calls import quiet
from gerund.models.sources import Source, looks_local
from gerund.models.weights import refuse_fetched_code
from gerund.progress import progress

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

    from gerund.evaluation.systems.base import EmbeddingCache
    from gerund.jobs.checkpoints import ShardCheckpoint

PREFIX = "st:"
"""Before a folder or a hub id: load it with sentence-transformers."""
# Texts that are encoded between two saves: whole batches of the library's default of 32.
_SLICE = 256


class SentenceTransformersSystem(Encoder):
    """A model as sentence-transformers runs it: a vector for a whole text, and nothing else."""

    def __init__(
        self,
        name: str,
        *,
        device: str = "auto",
        max_length: int | None = None,
    ) -> None:
        super().__init__(Path(name).name)
        self._source = name
        self._model = _load(name, device)
        if max_length is not None:
            self._model.max_seq_length = max_length

    def called(self, label: str, cache: "EmbeddingCache") -> "SentenceTransformersSystem":
        """Return the same model with another label and a cache."""
        other = copy.copy(self)
        other.label, other.cache = label, cache
        return other

    @property
    def name(self) -> str:
        """What it was loaded from."""
        return self._source

    @property
    def fusion_weight(self) -> float:
        """More than half of the sum, since these models are trained on pairs of queries and documents."""
        return 0.7

    @property
    def dimensions(self) -> int:
        """Dimensions of a vector."""
        return int(self._model.get_embedding_dimension() or 0)

    @property
    def max_length(self) -> int | None:
        """Longest text in tokens; None where there is no limit."""
        return self._model.max_seq_length

    @cached_property
    def fingerprint(self) -> str:
        """A hash of all weights and of how they are used: 16 hexadecimal digits."""
        digest = hashlib.blake2b(f"{self._model} {self.max_length}".encode(), digest_size=8)
        for name, values in self._model.state_dict().items():
            digest.update(f"{name} {values.dtype} {tuple(values.shape)}".encode())
            digest.update(values.detach().float().cpu().numpy().tobytes())
        return digest.hexdigest()

    @property
    def cache_key(self) -> str:
        """The weights, how they are used, and the type that holds them."""
        return f"{self.fingerprint}-{str(self._model.dtype).removeprefix('torch.')}"

    def describe(self) -> dict[str, Any]:
        """Return the model, its limits and its hash."""
        return {
            "model": self._source,
            "max_length": self.max_length,
            "dimensions": self.dimensions,
            "fingerprint": self.fingerprint,
        }

    def compute(
        self, texts: list[str], prompt: str | None, show: bool | None, checkpoint: "ShardCheckpoint | None" = None
    ) -> np.ndarray:
        """Compute vectors ``(n, D)`` float32 as they were pooled; finished slices are saved in the checkpoint."""
        vectors = np.zeros((len(texts), self.dimensions), dtype=np.float32)
        saved = None if checkpoint is None else checkpoint.encoding_pass()
        done = frozenset() if saved is None else saved.restore(vectors)
        # Longest first, as sentence-transformers itself goes through its batches.
        order = sorted(range(len(texts)), key=lambda row: -len(texts[row]))
        with progress(len(texts), "encoding", show=show) as advance:
            for start in range(0, len(order), _SLICE):
                rows = order[start : start + _SLICE]
                if not done.issuperset(rows):
                    batch = [texts[row] for row in rows]
                    encoded = self._model.encode(batch, prompt=prompt, show_progress_bar=False, convert_to_numpy=True)
                    vectors[rows] = np.asarray(encoded, dtype=np.float32)
                    if saved is not None:
                        saved.save(rows, vectors[rows])
                advance(len(rows))
        return vectors

    @property
    def stored_prompts(self) -> Mapping[str, str]:
        """The model's own prompts by name."""
        prompts: dict[str, str] = self._model.prompts
        return prompts

    def prompt_text(self, prompt: str | None) -> str:
        """Return what is put before a text."""
        default: str = self._model.prompts.get(self._model.default_prompt_name or "", "")
        return default if prompt is None else prompt


def _load(name: str, device: str) -> "SentenceTransformer":
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise MissingDependencyError(f"{PREFIX}{name} needs sentence-transformers: pip install 'gerund[st]'") from error
    path = Path(name).expanduser()
    if (looks_local(name) or path.exists()) and not (name and path.is_dir()):
        raise ModelError(f"there is no folder {name!r}")
    refuse_fetched_code(Source(name, path if path.is_dir() else None))
    try:
        with quiet():
            return SentenceTransformer(
                str(path) if path.is_dir() else name,
                device=None if device == "auto" else device,
                model_kwargs={"use_safetensors": True},
            )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        reason = str(error).strip().split("\n", 1)[0]
        raise ModelError(f"sentence-transformers cannot open {name}: {reason}") from error
