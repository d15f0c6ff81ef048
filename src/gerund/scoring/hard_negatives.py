"""Wrong continuations that a scorer takes for right ones (RankGen, appendix C.1).

Knows: a scorer, texts with places. Does not know: documents.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Protocol, TypeVar

import numpy as np

from gerund.scoring.dual_encoder import VectorScorer
from gerund.types import Scorer

# Stretches that are scored at a time.
CHUNK = 256
# Bytes of the vectors that are kept.
ROOM = 2**28


class HasText(Protocol):
    """Anything that has a text, without the space that would begin it behind a prefix."""

    @property
    def text(self) -> str:
        """The text."""


AnyText = TypeVar("AnyText", bound=HasText)


class Hardest:
    """Finds the stretches of a document that a scorer likes best, without holding them all.

    Stretches are scored some at a time, and only the best so far are kept. Passages of one document ask for the same
    stretches again and again, so the vectors of the latest are kept, in float32.

    Args:
        scorer: likes texts.
        chunk: how many stretches are scored at a time.
        room: bytes of vectors that are kept.
    """

    def __init__(self, scorer: Scorer, *, chunk: int = CHUNK, room: int = ROOM) -> None:
        self.scorer, self.chunk, self.room = scorer, chunk, room
        self._known: OrderedDict[str, np.ndarray] = OrderedDict()

    def of(self, prefix: str, stretches: Iterable[AnyText], count: int) -> list[AnyText]:
        """Return the ``count`` stretches that the scorer likes best behind a prefix, best first, the first of equals.

        Args:
            prefix: the prefix.
            stretches: all that may be taken, each once.
            count: how many at most.
        """
        rest = iter(stretches)
        scores_of = self._behind(prefix)
        best: list[tuple[float, int, AnyText]] = []
        seen = 0
        while chunk := list(islice(rest, self.chunk)):
            scores = scores_of([f" {one.text}" for one in chunk])
            ranked = [(score, -seen - place, one) for place, (score, one) in enumerate(zip(scores, chunk, strict=True))]
            best = heapq.nlargest(count, [*best, *ranked], key=lambda one: one[:2])
            seen += len(chunk)
        return [one for _, _, one in best]

    def _behind(self, prefix: str) -> Callable[[Sequence[str]], list[float]]:
        """Return what scores continuations of a prefix, which is encoded once."""
        scorer = self.scorer
        if not isinstance(scorer, VectorScorer):
            return lambda texts: scorer.score([prefix], [texts])[0]
        prefix_D = scorer.prefix_vectors([prefix])[0]
        return lambda texts: (self._vectors(scorer, texts) @ prefix_D).tolist()

    def _vectors(self, scorer: VectorScorer, texts: Sequence[str]) -> np.ndarray:
        known = self._known
        missing = [text for text in dict.fromkeys(texts) if text not in known]
        if missing:
            made_ND = scorer.continuation_vectors(missing).astype(np.float32)
            known.update(zip(missing, made_ND, strict=True))
        for text in texts:
            known.move_to_end(text)
        found_ND = np.stack([known[text] for text in texts])
        while len(known) * found_ND[0].nbytes > self.room:
            known.popitem(last=False)
        return found_ND
