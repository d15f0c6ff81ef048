"""Two rankings of one query joined into one: that of words (BM25) and that of vectors (cosines).

The usual way is a convex sum: each ranking's scores are scaled to 0 to 1, and the vectors count ``weight``, the words
the rest (Bruch, Gai and Ingber, "An Analysis of Fusion Functions for Hybrid Retrieval", 2023). The weight belongs to
the encoder: a weak one must not outvote the words. Reciprocal rank fusion, which knows places alone, counts both sides
the same.

Knows: scores, places. Does not know: what is ranked, or how.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Literal, TypeVar, get_args

from gerund.checks import one_of
from gerund.config import demand_number
from gerund.errors import ConfigError

FusionMethod = Literal["convex", "rrf"]
METHODS: tuple[FusionMethod, ...] = get_args(FusionMethod)

DEPTH = 100
"""How many of each ranking are joined."""

WEIGHT = 0.3
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
        vectors: cosines of what the vectors found, best first.
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
    """Join scores by a convex sum, each side scaled to 0 to 1; what a side lacks has 0 from it.

    >>> convex({"a": 8.0, "b": 2.0}, {"b": 0.75, "c": 0.5, "a": 0.25}, 0.5)
    {'b': 0.625, 'a': 0.5, 'c': 0.25}
    """
    scaled_words, scaled_vectors = scaled(words, least=0.0), scaled(vectors)
    scores = {
        document: (1 - weight) * scaled_words.get(document, 0.0) + weight * scaled_vectors.get(document, 0.0)
        for document in (*words, *(one for one in vectors if one not in words))
    }
    return _best_first(scores)


def scaled(scores: Mapping[Document, float], least: float | None = None) -> dict[Document, float]:
    """Return scores scaled so that the best has 1 and the least has 0; of equal ones all have 1.

    Args:
        scores: by document.
        least: what gets 0; None for the least of them. BM25 gives 0 to what shares no word with the query.

    >>> scaled({"a": 3.0, "b": 2.0, "c": 1.0}), scaled({"a": 4.0, "b": 1.0}, least=0.0), scaled({"a": 0.2})
    ({'a': 1.0, 'b': 0.5, 'c': 0.0}, {'a': 1.0, 'b': 0.25}, {'a': 1.0})
    """
    if not scores:
        return {}
    low, high = min(scores.values()) if least is None else least, max(scores.values())
    span = high - low
    return {document: (score - low) / span if span > 0 else 1.0 for document, score in scores.items()}


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
