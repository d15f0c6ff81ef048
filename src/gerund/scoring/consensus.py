"""Rank sampled texts by how much they agree: the modal text is the one nearest to all others.

ModeX (arXiv 2601.02535) extends the majority vote to texts that are never equal. It compares samples by shared n-grams
and keeps splitting them by spectral clustering; here the model that generates them also embeds them, and nothing is
split: clusters of eight texts lost against the plain mean where both were measured.
"""

from collections.abc import Sequence

import numpy as np

from gerund.scoring.names import CONSENSUS
from gerund.types import TextModel


class ConsensusScorer:
    """The mean cosine similarity of each continuation to the others of its prefix, by the model's own vectors.

    A text that is given twice counts twice, so that a majority wins. The prefix is not read: all continuations share
    it. A text without others scores 0.

    >>> import gerund
    >>> [scores] = ConsensusScorer(gerund.load()).score(["It is"], [[" raining.", " raining again.", " a violin."]])
    >>> min(scores) == scores[2]
    True
    """

    name = CONSENSUS
    counts_repeats = True

    def __init__(self, lm: TextModel) -> None:
        self._lm = lm

    def score(self, prefixes: Sequence[str], continuations: Sequence[Sequence[str]]) -> list[list[float]]:  # noqa: ARG002
        """Return a score from -1 to 1 for each continuation of each prefix; higher is nearer to the others."""
        texts = list(dict.fromkeys(text for group in continuations for text in group))
        if not texts:
            return [[] for _ in continuations]
        vectors_ND = self._lm.encode(texts, show_progress=False).astype(np.float64)
        vectors_ND /= np.maximum(np.linalg.norm(vectors_ND, axis=1, keepdims=True), 1e-12)
        place = {text: index for index, text in enumerate(texts)}
        return [_agreement(vectors_ND[[place[text] for text in group]]) for group in continuations]


def _agreement(vectors_ND: np.ndarray) -> list[float]:
    """Return the mean cosine of each unit vector to the others."""
    count = len(vectors_ND)
    if count < 2:
        return [0.0] * count
    own_N = np.square(vectors_ND).sum(axis=1)
    mean_N: np.ndarray = (vectors_ND @ vectors_ND.sum(axis=0) - own_N) / (count - 1)
    return mean_N.tolist()
