"""InfoNCE: a query has to be closer to its positive than to all other keys.

Knows: vectors, which key is whose positive, which pairs are no negatives. Does not know: texts, models, processes.
"""

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from gerund.errors import ConfigError, unknown_name

Similarity = Literal["cosine", "dot"]


def info_nce(
    queries_BD: Tensor,
    keys_KD: Tensor,
    positives_B: Tensor,
    *,
    temperature: float | Tensor,
    similarity: Similarity = "cosine",
    excluded_BK: Tensor | None = None,
) -> Tensor:
    """Return the sum over the queries of ``-log softmax(similarity / temperature)`` at the positive.

    InfoNCE (van den Oord et al., 2018; MAGNET, equation 3; GUR, equation 2): the softmax runs over all keys, the
    positive among them. Hard negatives are keys that are nobody's positive. SimCSE is cosine with a temperature of
    0.05, MAGNET and GUR 0.1; RankGen is the dot product with a temperature of 1.

    Args:
        queries_BD: one vector a query.
        keys_KD: the vectors of all keys, perhaps of other processes too.
        positives_B: the index of each query's positive among the keys.
        temperature: a positive number, or a tensor that is trained.
        similarity: ``cosine``, where a zero vector is similar to nothing, or ``dot``.
        excluded_BK: True where a key is no negative of a query; a positive stays in any case.

    Returns:
        A scalar, computed in float32 also under autocast (in float64 where the vectors are float64).

    Raises:
        ConfigError: the similarity is unknown or the temperature is not positive.

    >>> vectors = torch.eye(2)
    >>> round(info_nce(vectors, vectors, torch.tensor([0, 1]), temperature=1.0).item(), 4)
    0.6265
    """
    scores_BK = _scores(queries_BD, keys_KD, similarity) / _positive(temperature)
    return functional.cross_entropy(_without(scores_BK, positives_B, excluded_BK), positives_B, reduction="sum")


def symmetric_info_nce(
    left_BD: Tensor,
    right_BD: Tensor,
    *,
    temperature: float | Tensor,
    similarity: Similarity = "cosine",
    excluded_BB: Tensor | None = None,
) -> Tensor:
    """Return the sum over pairs of the mean of both directions' InfoNCE (GUR, section III-A; CLIP).

    Row i of both sides is a pair; each left looks for its right among all rights, and each right for its left. With
    rows gathered from other processes take half the sum of two ``info_nce`` instead, one a direction.

    Args:
        left_BD: one side of the pairs.
        right_BD: the other side.
        temperature: as in ``info_nce``.
        similarity: as in ``info_nce``.
        excluded_BB: True where left i and right j are no negatives of each other: whole is
            ``excluded_pairs(left, right, own) | excluded_pairs(right, left, own).T``.

    Returns:
        A scalar, as ``info_nce`` computes it.

    Raises:
        ConfigError: the similarity is unknown or the temperature is not positive.

    >>> vectors = torch.eye(2)
    >>> round(symmetric_info_nce(vectors, vectors, temperature=1.0).item(), 4)
    0.6265
    """
    if left_BD.shape != right_BD.shape:
        raise ValueError(f"pairs have two sides of one shape, not {tuple(left_BD.shape)} and {tuple(right_BD.shape)}")
    own_B = torch.arange(len(left_BD), device=left_BD.device)
    scores_BB = _without(_scores(left_BD, right_BD, similarity) / _positive(temperature), own_B, excluded_BB)
    forth = functional.cross_entropy(scores_BB, own_B, reduction="sum")
    back = functional.cross_entropy(scores_BB.T, own_B, reduction="sum")
    return (forth + back) / 2


def excluded_pairs(query_ids_B: Tensor, key_ids_K: Tensor, positives_B: Tensor) -> Tensor:
    """Return which keys are no negatives of which queries, because they are the same text.

    A key that has the id of the query's positive is a positive as well, and one that has the query's own id is the
    query itself. The positive is never excluded.

    Args:
        query_ids_B: an id a query; equal texts have equal ids, in queries and keys alike.
        key_ids_K: an id a key.
        positives_B: the index of each query's positive among the keys.

    Returns:
        Bool ``(B, K)``.

    >>> excluded_pairs(torch.tensor([1, 2]), torch.tensor([7, 8, 7, 2]), torch.tensor([0, 1])).int().tolist()
    [[0, 0, 1, 0], [0, 0, 0, 1]]
    """
    same_BK = key_ids_K == key_ids_K[positives_B][:, None]
    return (same_BK | (key_ids_K == query_ids_B[:, None])).scatter(1, positives_B[:, None], False)


def overlapping(query_places_B3: Tensor, key_places_K3: Tensor) -> Tensor:
    """Return which keys share a character with what a query has to find: they are right, wholly or in part.

    Args:
        query_places_B3: for each query a document, the first character there, and the one after the last.
        key_places_K3: the same for each key; one that is in no document has (-1, -1) for characters.

    Returns:
        Bool ``(B, K)``.

    >>> overlapping(torch.tensor([[7, 10, 20]]), torch.tensor([[7, 19, 30], [7, 20, 30], [8, 10, 20]])).tolist()
    [[True, False, False]]
    """
    (document_B, start_B, end_B), (document_K, start_K, end_K) = query_places_B3.T, key_places_K3.T
    same_BK = document_B[:, None] == document_K
    return same_BK & (start_K < end_B[:, None]) & (start_B[:, None] < end_K)


@torch.no_grad()
def accuracy(
    queries_BD: Tensor,
    keys_KD: Tensor,
    positives_B: Tensor,
    *,
    similarity: Similarity = "cosine",
    excluded_BK: Tensor | None = None,
) -> Tensor:
    """Return how many queries are more similar to their positive than to any other key.

    A count and not a fraction, because fractions of unequal batches do not add up. A tie is no success: vectors that
    have all become the same score 0.

    Args:
        queries_BD: as in ``info_nce``.
        keys_KD: as in ``info_nce``.
        positives_B: as in ``info_nce``.
        similarity: as in ``info_nce``.
        excluded_BK: as in ``info_nce``.

    Returns:
        An int64 scalar.

    Raises:
        ConfigError: the similarity is unknown.

    >>> accuracy(torch.eye(3), torch.eye(3), torch.tensor([0, 1, 0])).item()
    2
    """
    scores_BK = _without(_scores(queries_BD, keys_KD, similarity), positives_B, excluded_BK)
    own_B1 = scores_BK.gather(1, positives_B[:, None])
    return ((scores_BK >= own_B1).sum(dim=1) == 1).sum()


def _scores(queries_BD: Tensor, keys_KD: Tensor, similarity: str) -> Tensor:
    if similarity not in ("cosine", "dot"):
        raise unknown_name("similarity", similarity, ["cosine", "dot"])
    dtype = torch.promote_types(torch.promote_types(queries_BD.dtype, keys_KD.dtype), torch.float32)
    queries_BD, keys_KD = queries_BD.to(dtype), keys_KD.to(dtype)
    if similarity == "cosine":
        queries_BD, keys_KD = _unit(queries_BD), _unit(keys_KD)
    # Autocast would multiply in bfloat16, whose steps are as large as the differences that a low temperature is for.
    with torch.autocast(queries_BD.device.type, enabled=False):
        return queries_BD @ keys_KD.T


def _unit(rows_ND: Tensor) -> Tensor:
    """Scale to length 1; a zero vector stays one, with a gradient of ordinary size."""
    norm_N1 = torch.linalg.vector_norm(rows_ND, dim=-1, keepdim=True)
    return rows_ND / torch.where(norm_N1 > 0, norm_N1, 1.0)


def _without(scores_BK: Tensor, positives_B: Tensor, excluded_BK: Tensor | None) -> Tensor:
    if excluded_BK is None:
        return scores_BK
    return scores_BK.masked_fill(excluded_BK.scatter(1, positives_B[:, None], False), -math.inf)


def _positive(temperature: float | Tensor) -> float | Tensor:
    if not isinstance(temperature, Tensor) and not 0 < temperature < math.inf:
        raise ConfigError(f"the temperature is a positive number, not {temperature}")
    return temperature
