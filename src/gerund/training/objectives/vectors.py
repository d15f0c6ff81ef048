"""What all contrastive objectives share: settings, groups of texts, and InfoNCE over the vectors of a batch.

A batch has the groups ``query``, ``positive`` and, with hard negatives, ``negative``. A query's negatives are
the positives of all other queries and all hard negatives, those of other processes included; a text that is the
same as its positive or as the query itself is none, and neither is one that overlaps its positive, where places are
known.

Knows: settings, groups. Does not know: where pairs come from.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from gerund.errors import ConfigError
from gerund.training.objectives.base import DECODER_ONLY, ENCODER_DECODER, Batch, ObjectiveConfig, PairLosses
from gerund.training.objectives.batches import text_batch

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel

    from gerund.inference.encode.runtime import EncoderRuntime
    from gerund.inference.tokens import Tokens
    from gerund.training.losses.vectors import VectorEncoder
    from gerund.training.objectives.context import Context

Similarity = Literal["cosine", "dot"]


class VectorConfig(ObjectiveConfig):
    """What every objective has that trains the vectors of texts."""

    models: ClassVar[tuple[str, ...]] = (DECODER_ONLY, ENCODER_DECODER)
    trains_vectors: ClassVar[bool] = True


class ContrastiveConfig(VectorConfig):
    """What every contrastive objective on texts as the encoder reads them has."""

    similarity: Similarity = "cosine"
    """``cosine``, or ``dot`` for the raw product."""
    projection: int | None = Field(default=None, ge=1)
    """Size of a linear head between the embedding and the loss, used in training only; left out, none."""
    matryoshka: list[Annotated[int, Field(ge=1)]] = Field(default_factory=list)
    """Numbers of dimensions beside all of them: the loss is the mean over vectors that are cut to so many first
    numbers, so that shortened vectors are trained too (Kusupati et al. 2022)."""

    @model_validator(mode="after")
    def _nested_or_projected(self) -> Self:
        if self.matryoshka and self.projection is not None:
            raise ValueError("matryoshka trains the vectors that are kept, and projection is a head that is not")
        return self


class TextGroup:
    """Makes formatted texts into the tensors of one group.

    Args:
        runtime: How texts are read as an encoder: which tokens are pooled.
        pad: The padding token.
    """

    def __init__(self, runtime: "EncoderRuntime", pad: int) -> None:
        self.runtime, self.pad = runtime, pad

    @classmethod
    def of(cls, context: "Context") -> "TextGroup":
        """Return the groups of a model that is trained."""
        return cls(context.model.runtime, context.model.pad)

    def __call__(self, texts: "Sequence[Tokens]") -> Batch:
        """Return ``input_ids``, ``real`` and ``pooled`` (B, T), and ``identity`` (B,), equal for equal texts."""
        import torch

        batch = text_batch(texts, self.pad)
        place_T = torch.arange(batch["real"].shape[1])
        first_B = torch.tensor([self.runtime.pool_from(text) for text in texts])
        batch["pooled"] = batch["real"] & (place_T >= first_B[:, None])
        batch["identity"] = self.identities([self._own_text(text) for text in texts])
        return batch

    @staticmethod
    def identities(texts: Sequence[str]) -> "Tensor":
        """Return a number for each text ``(B,)``, the same for the same text."""
        import torch

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

    heads: "VectorEncoder"
    matryoshka: Sequence[int] = ()

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
        from gerund.training.losses.vectors import VectorEncoder

        self.heads = VectorEncoder(runtime, projection=projection, dropout=dropout)
        self.temperature, self.similarity, self.in_batch = temperature, similarity, in_batch

    def of(self, config: ContrastiveConfig, context: "Context") -> Self:
        """Return these losses with the nested sizes of a config, on the head that an objective before it has made.

        Raises:
            ConfigError: A nested size is beyond the vectors'.
        """
        from torch import nn

        if context.model.head is not None and isinstance(self.heads.projection, nn.Identity):
            self.heads.projection = context.model.head
        head = context.model.head
        width = context.model.runtime.state_width if head is None else head.settings.dimensions
        if max(config.matryoshka, default=0) > width:
            raise ConfigError(f"{config.kind}: matryoshka {max(config.matryoshka)}, and vectors have {width} numbers")
        self.matryoshka = config.matryoshka
        return self

    @property
    def projection(self) -> "nn.Module":
        """What makes a pooled state into a vector; the identity where nothing does."""
        return self.heads.projection

    def __call__(self, model: "PreTrainedModel", part: Batch) -> "Tensor":
        """Return the vectors ``(B, D)``, as ``encode`` makes them, not normalised."""
        vectors_BD: Tensor = self.heads(model, part)
        return vectors_BD

    def compare(self, vectors_ND: "Tensor", batch: Mapping[str, Batch], *, gather: bool) -> "tuple[Tensor, int]":
        """Return the mean InfoNCE of the queries (MAGNET, equation 3), and how many are right."""
        from gerund.training.losses.vectors import batch_info_nce

        def cut(vectors_NE: "Tensor") -> "tuple[Tensor, int]":
            return batch_info_nce(
                vectors_NE,
                [group["identity"] for group in batch.values()],
                places=[group["place"] for group in batch.values()] if "place" in batch["query"] else None,
                temperature=self.temperature,
                similarity=self.similarity,
                in_batch=self.in_batch,
                gather=gather,
            )

        return self.nested(cut, vectors_ND)

    def nested(self, compare: "Callable[[Tensor], tuple[Tensor, int]]", vectors_ND: "Tensor") -> "tuple[Tensor, int]":
        """Return the mean loss over all nested sizes, and what whole vectors get right."""
        from gerund.training.losses.distillation import prefixes

        found = [compare(vectors_ND[:, :size]) for size in prefixes(vectors_ND.shape[1], self.matryoshka)]
        loss = sum((one for one, _ in found[1:]), start=found[0][0]) / len(found)
        return loss, found[0][1]

    def during(self, model: "PreTrainedModel") -> AbstractContextManager[None]:
        """Set the attention dropout until the block ends."""
        return self.heads.during(model)
