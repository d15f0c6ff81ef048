"""InfoNCE over the vectors of a batch, and cached gradients for batches that do not fit the memory (GradCache)."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional

from gerund.training.losses.vocabulary import trained_leaves
from gerund.training.objectives.settings import Similarity
from gerund.training.processes import gather_numbers, gather_rows


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

    Computed in float32 also under autocast (in float64 for float64 vectors). ``excluded_BK`` is True where a key is no
    negative of a query; a positive stays in any case. Under cosine a zero vector is similar to nothing.

    >>> vectors = torch.eye(2)
    >>> round(info_nce(vectors, vectors, torch.tensor([0, 1]), temperature=1.0).item(), 4)
    0.6265
    """
    scores_BK = _scores(queries_BD, keys_KD, similarity) / temperature
    return functional.cross_entropy(_without(scores_BK, positives_B, excluded_BK), positives_B, reduction="sum")


def excluded_pairs(query_ids_B: Tensor, key_ids_K: Tensor, positives_B: Tensor) -> Tensor:
    """Return which keys are no negatives of which queries, because they are the same text.

    A key that has the id of the query's positive is a positive as well, and one that has the query's own id is the
    query itself. The positive is never excluded.

    Equal texts have equal ids, in queries and keys alike. Returns bool ``(B, K)``.

    >>> excluded_pairs(torch.tensor([1, 2]), torch.tensor([7, 8, 7, 2]), torch.tensor([0, 1])).int().tolist()
    [[0, 0, 1, 0], [0, 0, 0, 1]]
    """
    same_BK = key_ids_K == key_ids_K[positives_B][:, None]
    return (same_BK | (key_ids_K == query_ids_B[:, None])).scatter(1, positives_B[:, None], False)


def overlapping(query_places_B3: Tensor, key_places_K3: Tensor) -> Tensor:
    """Return which keys share a character with what a query has to find: they are right, wholly or in part.

    A place is a document, the first character there, and the one after the last; characters (-1, -1) overlap nothing.
    Returns bool ``(B, K)``.

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

    >>> accuracy(torch.eye(3), torch.eye(3), torch.tensor([0, 1, 0])).item()
    2
    """
    scores_BK = _without(_scores(queries_BD, keys_KD, similarity), positives_B, excluded_BK)
    own_B1 = scores_BK.gather(1, positives_B[:, None])
    return ((scores_BK >= own_B1).sum(dim=1) == 1).sum()


def _scores(queries_BD: Tensor, keys_KD: Tensor, similarity: str) -> Tensor:
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


def batch_info_nce(
    vectors_ND: Tensor,
    identities: Sequence[Tensor],
    *,
    places: Sequence[Tensor] | None = None,
    temperature: float,
    similarity: Similarity,
    in_batch: bool,
    gather: bool,
) -> tuple[Tensor, int]:
    """Return the mean InfoNCE of the queries (MAGNET, equation 3), and how many find their positive first.

    The vectors are those of the groups, one after the other: queries, positives, perhaps negatives. ``identities`` has
    for each group a number per text, equal for equal texts; ``places``, where known, a place per text as
    ``overlapping`` takes them: a key that overlaps what a query has to find is none of its negatives. Without
    ``in_batch`` only the third group is. With ``gather`` the texts of other processes are negatives too.
    """
    queries_BD, *keys = vectors_ND.split([len(group) for group in identities])
    keys_KD, first = gather_rows(torch.cat(keys), gather)
    key_ids_K = gather_numbers(torch.cat([*identities[1:]]), gather)
    positives_B = first + torch.arange(len(queries_BD), device=keys_KD.device)
    excluded_BK = excluded_pairs(identities[0], key_ids_K, positives_B)
    if places is not None:
        key_places_K3 = gather_numbers(torch.cat([*places[1:]]), gather)
        excluded_BK = excluded_BK | overlapping(places[0], key_places_K3)
    if not in_batch:
        positive_K = torch.cat([torch.full_like(group, at == 0) for at, group in enumerate(identities[1:])])
        excluded_BK = (excluded_BK | (gather_numbers(positive_K, gather) > 0)).scatter(1, positives_B[:, None], False)
    total = info_nce(
        queries_BD, keys_KD, positives_B, temperature=temperature, similarity=similarity, excluded_BK=excluded_BK
    )
    right = accuracy(queries_BD, keys_KD, positives_B, similarity=similarity, excluded_BK=excluded_BK)
    return total / len(queries_BD), int(right)


def symmetric_batch_info_nce(
    left_BD: Tensor,
    right_BD: Tensor,
    identities: tuple[Tensor, Tensor],
    *,
    temperature: float,
    similarity: Similarity,
    gather: bool,
) -> tuple[Tensor, int]:
    """Return the mean over both directions of InfoNCE (GUR, equation 2), and how many left texts find their right.

    Two pairs that have their left or their right text in common are no negatives of each other, in either direction:
    a title that is twice in a batch belongs to both of its sentences.
    """
    sides, pairs = (left_BD, right_BD), len(left_BD)
    total, right = left_BD.new_zeros(()), 0
    for place in (0, 1):
        own_BD, own_ids_B = sides[place], identities[place]
        keys_KD, first = gather_rows(sides[1 - place], gather)
        key_ids_K, partner_ids_K = gather_numbers(identities[1 - place], gather), gather_numbers(own_ids_B, gather)
        positives_B = first + torch.arange(pairs, device=keys_KD.device)
        excluded_BK = excluded_pairs(own_ids_B, key_ids_K, positives_B) | (partner_ids_K == own_ids_B[:, None])
        total = total + info_nce(
            own_BD, keys_KD, positives_B, temperature=temperature, similarity=similarity, excluded_BK=excluded_BK
        )
        if place == 0:
            right = int(accuracy(own_BD, keys_KD, positives_B, similarity=similarity, excluded_BK=excluded_BK))
    return total / (2 * pairs), right


def cosent(cosines_B: Tensor, scores_B: Tensor, *, temperature: float) -> Tensor:
    """Return how much the cosines of pairs of texts are out of the order of their scores.

    The logarithm of one plus the sum, over every two pairs of which one has a higher score, of the exponential of the
    other's cosine less its own, divided by the temperature (CoSENT, Su 2022; as sentence-transformers' loss of that
    name with ``scale=1 / temperature``). Scores that are equal ask for nothing.

    >>> order = torch.tensor([2.0, 1.0])
    >>> round(cosent(torch.tensor([0.5, 0.5]), order, temperature=0.05).item(), 4)
    0.6931
    >>> round(cosent(torch.tensor([0.9, 0.5]), order, temperature=0.05).item(), 4)
    0.0003
    """
    cosines_B = cosines_B.float() / temperature
    differences_BB = cosines_B[None, :] - cosines_B[:, None]
    wrong_N = differences_BB[scores_B[:, None] > scores_B[None, :]]
    return torch.cat([wrong_N.new_zeros(1), wrong_N]).logsumexp(0)


@torch.no_grad()
def ordered(cosines_B: Tensor, scores_B: Tensor) -> Tensor:
    """Return which share of any two pairs with different scores have cosines in the order of the scores.

    >>> ordered(torch.tensor([0.1, 0.5, 0.4]), torch.tensor([1.0, 2.0, 3.0])).item()  # 2 of 3
    0.6666666865348816
    """
    higher_BB = scores_B[:, None] > scores_B[None, :]
    return (cosines_B[:, None] > cosines_B[None, :])[higher_BB].float().mean().nan_to_num(0.0)


def cached_loss(
    embed: Callable[[Any], Tensor],
    chunks: Sequence[Any],
    compare: Callable[[Tensor], Tensor],
    *,
    backward: Callable[[Tensor, bool], None] | None = None,
) -> Tensor:
    """Compute a loss over all vectors of a batch and its gradients, in the memory of one chunk.

    GradCache (Gao et al., 2021, "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup", section 3):
    every chunk is embedded without a graph; the loss on the vectors gives each its gradient; then each chunk is
    embedded anew, under the random numbers of the first time, and takes its vectors' gradients back. Value and
    gradients are those of the loss on all chunks at once, dropout included.

    What ``compare`` itself is trained in (a projection, a temperature) gets its gradient with the last chunk, through
    ``backward`` too: so scaling applies to it, and under DDP every parameter is touched by the one synchronised pass.

    ``embed`` returns the vectors ``(b, D)`` of a chunk; ``compare`` a scalar loss of the vectors ``(N, D)`` of all
    chunks, and may gather rows of other processes. ``backward`` is called for each chunk with a scalar whose gradients
    are the chunk's part of the loss's, and whether it is the last chunk. The result has no graph.

    >>> weight = torch.tensor([[2.0]], requires_grad=True)
    >>> rows = [torch.tensor([[1.0]]), torch.tensor([[3.0]])]
    >>> cached_loss(lambda chunk: chunk @ weight, rows, lambda vectors: vectors.square().sum()).item()
    40.0
    >>> weight.grad.item()
    40.0
    """
    push = backward or (lambda scalar, _is_last_chunk: scalar.backward())
    if not torch.is_grad_enabled():
        return compare(torch.cat([embed(chunk) for chunk in chunks]))
    if len(chunks) == 1:
        loss = compare(embed(chunks[0]))
        push(loss, True)
        return loss.detach()
    begins: list[_RandomState] = []
    vectors: list[Tensor] = []
    with torch.no_grad():
        for chunk in chunks:
            begins.append(_RandomState.now())
            vectors.append(embed(chunk))
    # Older torch (2.8 among them) remembers the weights that autocast cast just now, cut off from their gradients.
    torch.clear_autocast_cache()
    all_ND = torch.cat(vectors).requires_grad_()
    loss = compare(all_ND)
    after = _RandomState.now()
    leaves = [leaf for leaf in trained_leaves(loss) if leaf is not all_ND]
    gradient_ND, *leaf_gradients = torch.autograd.grad(loss, [all_ND, *leaves], materialize_grads=True)
    parts = gradient_ND.split([len(rows) for rows in vectors])
    del vectors, all_ND
    for index, (chunk, begin, part_BD) in enumerate(zip(chunks, begins, parts, strict=True)):
        last = index == len(chunks) - 1
        begin.restore()
        scalar = (embed(chunk) * part_BD).sum()
        if last:
            scalar = scalar + sum((leaf * part).sum() for leaf, part in zip(leaves, leaf_gradients, strict=True))
            after.restore()
        push(scalar, last)
        del scalar  # its graph, before the next one is built
    return loss.detach()


@dataclass(frozen=True)
class _RandomState:
    """Where the random numbers stand, on the CPU and on every CUDA device."""

    cpu: Tensor
    cuda: list[Tensor]

    @classmethod
    def now(cls) -> Self:
        return cls(torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [])

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(self.cuda)
