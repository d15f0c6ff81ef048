"""Two rankings of one query joined into one: that of words (BM25) and that of vectors (cosines).

The usual way is a convex sum (Bruch, Gai and Ingber, "An Analysis of Fusion Functions for Hybrid Retrieval", 2023):
BM25's scores are divided by the best of them, cosines stay as they are, and the vectors count ``weight``, the words the
rest. Cosines are not stretched to fill 0 to 1 for each query, as is often done: where an encoder finds all documents
about equally near, it has little to say, and must not outvote the words. Reciprocal rank fusion, which knows places
alone, counts both sides the same.

Knows: scores, places. Does not know: what is ranked, or how.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Literal, TypeVar, get_args

from gerund.checks import demand_number, one_of
from gerund.errors import ConfigError

FusionMethod = Literal["convex", "rrf"]
METHODS: tuple[FusionMethod, ...] = get_args(FusionMethod)

DEPTH = 100
"""How many of each ranking are joined."""

WEIGHT = 0.5
"""What the vectors of an encoder count that nobody has tuned."""

# Cormack, Clarke and Buettcher 2009, who found it near the best for all of their collections.
RRF_K = 60

Document = TypeVar("Document", bound=Hashable)


def check_weight(weight: float) -> float:
    """Return a weight of the vectors.

    Raises:
        ConfigError: it is no number from 0 to 1.
    """
    demand_number("the weight", weight)
    if not 0 <= weight <= 1:
        raise ConfigError(f"the weight {weight} is not a number from 0 (words alone) to 1 (vectors alone)")
    return float(weight)


def fuse(
    words: Mapping[Document, float],
    vectors: Mapping[Document, float],
    *,
    method: str = "convex",
    weight: float = WEIGHT,
) -> dict[Document, float]:
    """Join the scores that words and vectors give documents.

    Args:
        words: BM25's scores of what the words found, each above 0, best first.
        vectors: cosines of what the vectors found, best first; best of what the words found too.
        method: ``convex`` or ``rrf``.
        weight: what the vectors count in a convex sum, from 0 to 1.

    Returns:
        The score of every document of either, best first; of equals the one that was met first.

    Raises:
        ConfigError: there is no such method, or no such weight.
    """
    one_of("fusion", method, METHODS)
    return convex(words, vectors, check_weight(weight)) if method == "convex" else rrf([list(words), list(vectors)])


def convex(
    words: Mapping[Document, float], vectors: Mapping[Document, float], weight: float = WEIGHT
) -> dict[Document, float]:
    """Join scores by a convex sum of cosines and of BM25's part of the best; what a side lacks has 0 from it.

    >>> convex({"a": 8.0, "b": 2.0}, {"b": 0.75, "c": 0.5, "a": 0.25}, 0.5)
    {'a': 0.625, 'b': 0.5, 'c': 0.25}
    """
    best = max(words.values(), default=0.0) or 1.0
    scores = {
        document: (1 - weight) * words.get(document, 0.0) / best + weight * vectors.get(document, 0.0)
        for document in (*words, *(one for one in vectors if one not in words))
    }
    return _best_first(scores)


def rrf(rankings: Sequence[Sequence[Document]], k: int = RRF_K) -> dict[Document, float]:
    """Join rankings by reciprocal rank fusion (Cormack et al. 2009): the sum of 1 / (60 + place).

    Args:
        rankings: documents, best first. One that a ranking lacks has nothing from it.
        k: what is added to each place.

    Returns:
        The score of every document of any ranking, best first; of equals the one that was met first, reading the
        rankings one after the other.

    >>> rrf([["a", "b"], ["b", "c"]]) == {"b": 1 / 62 + 1 / 61, "a": 1 / 61, "c": 1 / 62}
    True
    """
    scores: dict[Document, float] = {}
    for ranking in rankings:
        for place, document in enumerate(ranking, start=1):
            scores[document] = scores.get(document, 0.0) + 1 / (k + place)
    return _best_first(scores)


def _best_first(scores: Mapping[Document, float]) -> dict[Document, float]:
    return dict(sorted(scores.items(), key=lambda item: -item[1]))
