"""Find hard negatives: the passages of a document that a scorer ranks highest after a prefix.

RankGen, appendix C.1.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Protocol, TypeVar

import numpy as np

from gerund.scoring.dual_encoder import VectorScorer
from gerund.types import Scorer

# Passages that are scored per batch.
CHUNK = 256
# Bytes of cached vectors.
ROOM = 2**28


class HasText(Protocol):
    """Anything with a text, without the space that would begin it after a prefix."""

    @property
    def text(self) -> str:
        """The text."""


AnyText = TypeVar("AnyText", bound=HasText)


class Hardest:
    """Finds the passages that a scorer ranks highest, ``chunk`` per batch, without holding them all.

    Prefixes of one document need the same passages again and again, so ``room`` bytes of the latest float32 vectors are
    cached.
    """

    def __init__(self, scorer: Scorer, *, chunk: int = CHUNK, room: int = ROOM) -> None:
        self.scorer, self.chunk, self.room = scorer, chunk, room
        self._cache: OrderedDict[str, np.ndarray] = OrderedDict()

    def of(self, prefix: str, passages: Iterable[AnyText], count: int) -> list[AnyText]:
        """Return the ``count`` passages with the highest scores after a prefix, best first; ties keep their order."""
        rest = iter(passages)
        scores_of = self._scorer_after(prefix)
        best: list[tuple[float, int, AnyText]] = []
        seen = 0
        while chunk := list(islice(rest, self.chunk)):
            scores = scores_of([f" {passage.text}" for passage in chunk])
            ranked = [
                (score, -number, text) for number, (score, text) in enumerate(zip(scores, chunk, strict=True), seen)
            ]
            best = heapq.nlargest(count, [*best, *ranked], key=lambda entry: entry[:2])
            seen += len(chunk)
        return [passage for _, _, passage in best]

    def _scorer_after(self, prefix: str) -> Callable[[Sequence[str]], list[float]]:
        """Return what scores continuations of a prefix, which is encoded once."""
        scorer = self.scorer
        if not isinstance(scorer, VectorScorer):
            return lambda texts: scorer.score([prefix], [texts])[0]
        prefix_D = scorer.prefix_vectors([prefix])[0]
        return lambda texts: (self._vectors(scorer, texts) @ prefix_D).tolist()

    def _vectors(self, scorer: VectorScorer, texts: Sequence[str]) -> np.ndarray:
        cache = self._cache
        missing = [text for text in dict.fromkeys(texts) if text not in cache]
        if missing:
            cache.update(zip(missing, scorer.continuation_vectors(missing).astype(np.float32), strict=True))
        for text in texts:
            cache.move_to_end(text)
        vectors_ND = np.stack([cache[text] for text in texts])
        while len(cache) * vectors_ND[0].nbytes > self.room:
            cache.popitem(last=False)
        return vectors_ND
