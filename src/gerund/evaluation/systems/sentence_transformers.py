"""Sentence-transformers models as systems, to compare language models with."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gerund.evaluation.systems.base import Encoder
from gerund.inference.sentence_encoder import SentenceEncoder
from gerund.progress import progress

if TYPE_CHECKING:
    from gerund.evaluation.systems.base import EmbeddingCache
    from gerund.jobs.checkpoints import ShardCheckpoint

# Texts that are encoded between two saves: whole batches of the library's default of 32.
_SLICE = 256


class SentenceTransformersSystem(Encoder):
    """A model as sentence-transformers runs it: a vector for a whole text, and nothing else."""

    def __init__(self, name: str, *, device: str = "auto", max_length: int | None = None) -> None:
        super().__init__(Path(name).name)
        self._encoder = SentenceEncoder(name, device=device, max_length=max_length)

    def called(self, label: str, cache: "EmbeddingCache") -> "SentenceTransformersSystem":
        """Return the same model with another label and a cache."""
        other = copy.copy(self)
        other.label, other.cache = label, cache
        return other

    @property
    def name(self) -> str:
        """What it was loaded from."""
        return self._encoder.source

    @property
    def fusion_weight(self) -> float:
        """The weight of its vectors in hybrid search."""
        return self._encoder.fusion_weight

    @property
    def dimensions(self) -> int:
        """Dimensions of a vector."""
        return self._encoder.dimensions

    @property
    def max_length(self) -> int | None:
        """Longest text in tokens; None where there is no limit."""
        return self._encoder.max_length

    @property
    def fingerprint(self) -> str:
        """A hash of all weights and of how they are used: 16 hexadecimal digits."""
        return self._encoder.fingerprint()

    @property
    def cache_key(self) -> str:
        """The weights, how they are used, and the type that holds them."""
        return f"{self.fingerprint}-{str(self._encoder.model.dtype).removeprefix('torch.')}"

    def describe(self) -> dict[str, Any]:
        """Return the model, its limits and its hash."""
        return {
            "model": self.name,
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
                    vectors[rows] = self._encoder.pooled(batch, prompt)
                    if saved is not None:
                        saved.save(rows, vectors[rows])
                advance(len(rows))
        return vectors

    @property
    def stored_prompts(self) -> Mapping[str, str]:
        """The model's own prompts by name."""
        return self._encoder.encoder.prompts

    def prompt_text(self, prompt: str | None) -> str:
        """Return what is put before a text."""
        return self._encoder.encoder.prompt if prompt is None else prompt
