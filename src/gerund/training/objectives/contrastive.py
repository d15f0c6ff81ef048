"""What all contrastive objectives share: groups of texts, their vectors, InfoNCE over the batch.

A batch has the groups ``query``, ``positive`` and, with hard negatives, ``negative``. A query's negatives are
the positives of all other queries and all hard negatives, those of other processes included; a text that is the
same as its positive or as the query itself is none.

Knows: how the encoder reads a text, InfoNCE. Does not know: where pairs come from.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from gerund.errors import ConfigError
from gerund.inference.encode.runtime import hidden_states
from gerund.models.pooling import pool
from gerund.training.losses.contrastive import Similarity, accuracy, excluded_pairs, info_nce
from gerund.training.losses.gathering import gather_numbers, gather_rows
from gerund.training.objectives.base import Batch, PairLosses, text_batch
from gerund.training.objectives.by_length import passes_may_differ, read_by_length

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from gerund.inference.encode.runtime import EncoderRuntime
    from gerund.inference.tokens import Tokens

# What an attention module calls the dropout of its probabilities.
_DROPOUTS = ("attention_dropout", "attn_dropout", "dropout")


class Group:
    """Makes framed texts into the tensors of one group.

    Args:
        runtime: How texts are read as an encoder: which tokens are pooled.
        pad: The padding token.
    """

    def __init__(self, runtime: "EncoderRuntime", pad: int) -> None:
        self.runtime, self.pad = runtime, pad

    def __call__(self, texts: Sequence["Tokens"]) -> Batch:
        """Return ``input_ids``, ``real`` and ``pooled`` (B, T), and ``identity`` (B,), equal for equal texts."""
        batch = text_batch(texts, self.pad)
        place_T = torch.arange(batch["real"].shape[1])
        first_B = torch.tensor([self.runtime.pool_from(text) for text in texts])
        batch["pooled"] = batch["real"] & (place_T >= first_B[:, None])
        batch["identity"] = self.identities([self._own_text(text) for text in texts])
        return batch

    @staticmethod
    def identities(texts: Sequence[str]) -> Tensor:
        """Return a number for each text ``(B,)``, the same for the same text."""
        digests = [hashlib.blake2b(text.strip().encode(errors="replace"), digest_size=8).digest() for text in texts]
        return torch.tensor([int.from_bytes(digest, "little", signed=True) for digest in digests])

    def _own_text(self, text: "Tokens") -> str:
        """Return a text without its prompt, so that a query and a document may be the same text.

        Characters and not tokens: behind a prompt the first word has other ones, with the space before it.
        """
        own: str = self.runtime.tokenizer.decode(
            text.ids[text.text_from :], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return own


class ContrastiveLosses(PairLosses):
    """InfoNCE over the vectors of a batch.

    Args:
        runtime: How a text becomes a vector.
        temperature: Similarities are divided by it.
        similarity: ``cosine`` or ``dot``.
        projection: Size of a linear head behind the pooled state; None for none.
        in_batch: Whether the positives of other queries are negatives; without them only the group ``negative`` is.
        dropout: Dropout of the attention probabilities; None leaves the model's own.
    """

    def __init__(
        self,
        runtime: "EncoderRuntime",
        *,
        temperature: float,
        similarity: Similarity,
        projection: int | None = None,
        in_batch: bool = True,
        dropout: float | None = None,
    ) -> None:
        super().__init__()
        # The plan and the pooling, not the reader: it holds the model, which is no part of the losses.
        self.plan, self.pooling = runtime.plan if runtime.sends_plan else None, runtime.config.pooling
        self.temperature, self.similarity, self.dropout = temperature, similarity, dropout
        self.in_batch = in_batch
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
            return self.vectors(hidden_states(model, texts["input_ids"], texts["real"], self.plan), texts)

        texts = {name: part[name] for name in ("input_ids", "real", "pooled")}
        return read_by_length(read, texts) if passes_may_differ(model) else read(texts)

    def vectors(self, hidden_BTD: Tensor, part: Batch) -> Tensor:
        """Return the vectors ``(B, D)`` of texts whose last hidden states are known."""
        # Autocast would add the states up in bfloat16; ``encode`` pools in float32.
        with torch.autocast(hidden_BTD.device.type, enabled=False):
            vectors_BD: Tensor = self.projection(pool(hidden_BTD, part["pooled"], self.pooling))
        return vectors_BD

    def compare(self, vectors_ND: Tensor, batch: Mapping[str, Batch], *, gather: bool) -> tuple[Tensor, int]:
        """Return the mean InfoNCE of the queries (MAGNET, equation 3), and how many are right."""
        groups = list(batch.values())
        queries_BD, *keys = vectors_ND.split([len(group["identity"]) for group in groups])
        keys_KD, key_ids_K = torch.cat(keys), torch.cat([group["identity"] for group in groups[1:]])
        first = 0
        if gather:
            keys_KD, first = gather_rows(keys_KD)
            key_ids_K = gather_numbers(key_ids_K)
        positives_B = first + torch.arange(len(queries_BD), device=keys_KD.device)
        excluded_BK = excluded_pairs(groups[0]["identity"], key_ids_K, positives_B)
        if not self.in_batch:
            positive_K = torch.cat([torch.full_like(group["identity"], at == 0) for at, group in enumerate(groups[1:])])
            if gather:
                positive_K = gather_numbers(positive_K)
            excluded_BK = (excluded_BK | (positive_K > 0)).scatter(1, positives_B[:, None], False)
        total = info_nce(
            queries_BD,
            keys_KD,
            positives_B,
            temperature=self.temperature,
            similarity=self.similarity,
            excluded_BK=excluded_BK,
        )
        right = accuracy(queries_BD, keys_KD, positives_B, similarity=self.similarity, excluded_BK=excluded_BK)
        return total / len(queries_BD), int(right)

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
