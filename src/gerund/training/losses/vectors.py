"""From the texts of a batch to their vectors, and from the vectors of all processes to a contrastive loss.

Knows: how the encoder reads a text, InfoNCE, processes. Does not know: where pairs come from, objectives.

Shapes: B texts of a part, N texts of a batch, K keys of all processes, T tokens, D numbers of a vector.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from gerund.errors import ConfigError
from gerund.inference.encode.runtime import hidden_states
from gerund.models.heads import ProjectionHead
from gerund.models.pooling import pool
from gerund.training.losses.by_length import Batch, passes_may_differ, read_by_length
from gerund.training.losses.contrastive import Similarity, accuracy, excluded_pairs, info_nce, overlapping
from gerund.training.losses.gathering import gather_numbers, gather_rows

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from gerund.inference.encode.runtime import EncoderRuntime

# What an attention module calls the dropout of its probabilities.
_DROPOUTS = ("attention_dropout", "attn_dropout", "dropout")


class VectorEncoder(nn.Module):
    """Reads texts as ``encode`` does, with gradients; holds the projection that is trained beside the model.

    Args:
        runtime: How a text becomes a vector.
        projection: Size of a linear head behind the pooled state; None for none.
        dropout: Dropout of the attention probabilities while texts are read; None leaves the model's own.

    Raises:
        ConfigError: A dropout is asked for, and the model has no place for it.
    """

    def __init__(
        self, runtime: "EncoderRuntime", *, projection: int | None = None, dropout: float | None = None
    ) -> None:
        super().__init__()
        # The plan and the pooling, not the runtime: it holds the model, which is no part of the losses.
        self.plan, self.pooling = runtime.plan if runtime.sends_plan else None, runtime.config.pooling
        self.dropout = dropout
        self.projection: nn.Module = nn.Identity()
        if projection:
            self.projection = nn.Linear(runtime.width, projection, bias=False)
        if dropout and not dropout_places(runtime.model):
            raise ConfigError(
                f"{type(runtime.model).__name__} has no attention dropout to set; set dropout: 0 and give "
                "model.lora.dropout"
            )

    def forward(self, model: "PreTrainedModel", part: Batch) -> Tensor:
        """Return the vectors ``(B, D)``, as ``encode`` makes them, not normalised."""

        def read(texts: Batch) -> Tensor:
            return self.vectors(self.states(model, texts), texts)

        texts = {name: part[name] for name in ("input_ids", "real", "pooled")}
        return read_by_length(read, texts) if passes_may_differ(model) else read(texts)

    def states(self, model: "PreTrainedModel", part: Batch) -> Tensor:
        """Return the last hidden states ``(B, T, D)``, all texts in one pass."""
        return hidden_states(model, part["input_ids"], part["real"], self.plan)

    def vectors(self, hidden_BTD: Tensor, part: Batch) -> Tensor:
        """Return the vectors ``(B, D)`` of texts whose last hidden states are known."""
        # Autocast would add the states up in bfloat16; ``encode`` pools in float32.
        with torch.autocast(hidden_BTD.device.type, enabled=False):
            pooled_BD = pool(hidden_BTD, part["pooled"], self.pooling)
            if isinstance(self.projection, ProjectionHead):
                return self.projection(pooled_BD, part["input_ids"], part["pooled"])
            vectors_BD: Tensor = self.projection(pooled_BD)
        return vectors_BD

    def during(self, model: "PreTrainedModel") -> "_AttentionDropout":
        """Set the attention dropout until the block ends."""
        return _AttentionDropout(model, self.dropout)


class _AttentionDropout:
    """Sets the dropout of a model's attention probabilities, and puts back what was there."""

    def __init__(self, model: "PreTrainedModel", rate: float | None) -> None:
        self.model, self.rate = model, rate
        self.before: list[tuple[nn.Module, str, float]] = []

    def __enter__(self) -> None:
        if self.rate is not None:
            for module, name in dropout_places(self.model):
                self.before.append((module, name, getattr(module, name)))
                setattr(module, name, self.rate)

    def __exit__(self, *_: object) -> None:
        for module, name, rate in self.before:
            setattr(module, name, rate)


def dropout_places(model: "PreTrainedModel") -> list[tuple[nn.Module, str]]:
    """Return where the dropout of the attention probabilities is kept: the modules and the name of the number."""
    places: list[tuple[nn.Module, str]] = []
    for module in model.modules():
        # Every attention module of transformers knows which layer it is; decoder layers may know it, too.
        if not hasattr(module, "layer_idx") or "Attention" not in type(module).__name__:
            continue
        values = [(name, getattr(module, name)) for name in _DROPOUTS if hasattr(module, name)]
        if values:
            name, value = values[0]
            places.append((value, "p") if isinstance(value, nn.Dropout) else (module, name))
    return places


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

    Args:
        vectors_ND: The vectors of the groups, one after the other: queries, positives, perhaps negatives.
        identities: For each group a number a text, equal for equal texts.
        places: For each group a place a text ``(n, 3)``, as ``overlapping`` takes them: a key that overlaps what a
            query has to find is none of its negatives. None where places are not known.
        temperature: Similarities are divided by it.
        similarity: ``cosine`` or ``dot``.
        in_batch: Whether the positives of other queries are negatives; without them only the third group is.
        gather: Whether the texts of other processes are negatives too.
    """
    queries_BD, *keys = vectors_ND.split([len(group) for group in identities])
    keys_KD, key_ids_K = torch.cat(keys), torch.cat([*identities[1:]])
    first = 0
    if gather:
        keys_KD, first = gather_rows(keys_KD)
        key_ids_K = gather_numbers(key_ids_K)
    positives_B = first + torch.arange(len(queries_BD), device=keys_KD.device)
    excluded_BK = excluded_pairs(identities[0], key_ids_K, positives_B)
    if places is not None:
        key_places_K3 = torch.cat([*places[1:]])
        excluded_BK = excluded_BK | overlapping(places[0], gather_numbers(key_places_K3) if gather else key_places_K3)
    if not in_batch:
        positive_K = torch.cat([torch.full_like(group, at == 0) for at, group in enumerate(identities[1:])])
        if gather:
            positive_K = gather_numbers(positive_K)
        excluded_BK = (excluded_BK | (positive_K > 0)).scatter(1, positives_B[:, None], False)
    total = info_nce(
        queries_BD, keys_KD, positives_B, temperature=temperature, similarity=similarity, excluded_BK=excluded_BK
    )
    right = accuracy(queries_BD, keys_KD, positives_B, similarity=similarity, excluded_BK=excluded_BK)
    return total / len(queries_BD), int(right)


def both_ways_info_nce(
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

    Args:
        left_BD: One side of the pairs.
        right_BD: The other side.
        identities: For each side a number a text, equal for equal texts.
        temperature: Similarities are divided by it.
        similarity: ``cosine`` or ``dot``.
        gather: Whether the texts of other processes are negatives too.
    """
    sides, pairs = (left_BD, right_BD), len(left_BD)
    total, right = left_BD.new_zeros(()), 0
    for place in (0, 1):
        own_BD, own_ids_B = sides[place], identities[place]
        keys_KD, key_ids_K, partner_ids_K, first = sides[1 - place], identities[1 - place], own_ids_B, 0
        if gather:
            keys_KD, first = gather_rows(keys_KD)
            key_ids_K, partner_ids_K = gather_numbers(key_ids_K), gather_numbers(partner_ids_K)
        positives_B = first + torch.arange(pairs, device=keys_KD.device)
        excluded_BK = excluded_pairs(own_ids_B, key_ids_K, positives_B) | (partner_ids_K == own_ids_B[:, None])
        total = total + info_nce(
            own_BD, keys_KD, positives_B, temperature=temperature, similarity=similarity, excluded_BK=excluded_BK
        )
        if place == 0:
            right = int(accuracy(own_BD, keys_KD, positives_B, similarity=similarity, excluded_BK=excluded_BK))
    return total / (2 * pairs), right
