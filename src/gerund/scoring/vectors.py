"""Scores by two vectors: the product of a prefix's and a continuation's (RankGen, section 2.2).

Knows: vectors, products. Does not know: what makes the vectors.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np

from gerund.checks import refuse_blank
from gerund.errors import TextError

# Prefixes that are remembered, so that a search encodes its prompts once.
_REMEMBERED = 1024

Encode = Callable[[Sequence[str]], np.ndarray]


class VectorScorer:
    """The dot product of two encoders' vectors, not normalised.

    Args:
        name: what results call it.
        prefixes: encodes prefixes, ``(n, D)``.
        continuations: encodes continuations, ``(n, D)``.

    >>> lengths = lambda texts: np.array([[len(text), 1.0] for text in texts])
    >>> VectorScorer("lengths", lengths, lengths).score(["ab"], [["c", "def"]])
    [[3.0, 7.0]]
    """

    def __init__(self, name: str, prefixes: Encode, continuations: Encode) -> None:
        self.name = name
        self._encode_prefixes = prefixes
        self._encode_continuations = continuations
        self._known: OrderedDict[str, np.ndarray] = OrderedDict()
        self._lock = threading.Lock()

    def score(self, prefixes: Sequence[str], continuations: Sequence[Sequence[str]]) -> list[list[float]]:
        """Return a score for each continuation of each prefix; higher is better.

        Raises:
            TextError: a prefix or a continuation is blank; of nothing there is no vector.
        """
        for index, prefix in enumerate(prefixes):
            if not prefix.strip():
                raise TextError.about(
                    *("prefix", index),
                    "is empty, and this scorer compares it with what follows; give a text, or take the scorer avg_cll, "
                    "which needs none",
                )
        refuse_blank(continuations)
        prefix_ND = self.prefix_vectors(prefixes)
        texts = list(dict.fromkeys(text for own in continuations for text in own))
        if not texts:
            return [[] for _ in continuations]
        place = {text: index for index, text in enumerate(texts)}
        text_ND = np.asarray(self._encode_continuations(texts), dtype=np.float64)
        return [
            (text_ND[[place[text] for text in own]] @ vector_D).tolist() if own else []
            for vector_D, own in zip(prefix_ND, continuations, strict=True)
        ]

    def prefix_vectors(self, prefixes: Sequence[str]) -> np.ndarray:
        """Return the vectors of prefixes, ``(n, D)`` float64; those that were encoded lately are not encoded anew."""
        known = self._known
        with self._lock:
            found = {prefix: known[prefix] for prefix in prefixes if prefix in known}
        missing = [prefix for prefix in dict.fromkeys(prefixes) if prefix not in found]
        if missing:
            vectors = np.asarray(self._encode_prefixes(missing), dtype=np.float64)
            found |= dict(zip(missing, vectors, strict=True))
        with self._lock:
            for prefix, vector in found.items():
                known[prefix] = vector
                known.move_to_end(prefix)
            while len(known) > _REMEMBERED:
                known.popitem(last=False)
        return np.array([found[prefix] for prefix in prefixes])

    def continuation_vectors(self, continuations: Sequence[str]) -> np.ndarray:
        """Return the vectors of continuations, ``(n, D)`` float64."""
        return np.asarray(self._encode_continuations(continuations), dtype=np.float64)
