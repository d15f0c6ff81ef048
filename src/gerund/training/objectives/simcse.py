"""SimCSE: the same text read twice under different dropout (Gao et al. 2021; LLM2Vec's second stage).

Knows: which texts make a pair. Does not know: the loss (``vectors``).
"""

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from gerund.training.objectives.base import DECODER_ONLY, Batches, Objective, Purpose, TextConfig
from gerund.training.objectives.vectors import ContrastiveConfig, ContrastiveLosses, TextGroup

if TYPE_CHECKING:
    from gerund.training.corpus.formatting import InputFormatter
    from gerund.training.corpus.texts import Texts
    from gerund.training.objectives.context import Context


class SimcseConfig(TextConfig, ContrastiveConfig):
    """Two passes over the same text under different dropout are a pair (SimCSE; LLM2Vec)."""

    models: ClassVar[tuple[str, ...]] = (DECODER_ONLY,)
    purpose: ClassVar[Purpose] = Purpose.EMBED_BY_TEXTS
    seed_offset: ClassVar[int | None] = 30

    kind: Literal["simcse"]
    length: int = Field(default=128, ge=2)
    unit: Literal["documents", "sentences"] = "sentences"
    batch_size: int = Field(default=64, ge=2)
    temperature: float = Field(default=0.05, gt=0)
    """Similarities are divided by it."""
    dropout: float = Field(default=0.3, ge=0, lt=1)
    """Dropout of the attention probabilities in these passes."""

    def prepare(self, context: "Context") -> Objective:
        """Return batches of texts with themselves, and InfoNCE under dropout."""
        group = TextGroup.of(context)
        losses = ContrastiveLosses(
            context.model.runtime,
            temperature=self.temperature,
            similarity=self.similarity,
            projection=self.projection,
            dropout=self.dropout,
        ).of(self, context)
        formatter = context.formatter(self)

        def batches(texts: Any, seed: int) -> Batches:
            del seed
            return SimcseBatches(texts, formatter, group)

        # Without dropout both views are the same, and a validation says nothing.
        return context.text_objective(self.kind, self, batches, losses, overhead=formatter.overhead, validate=False)


class SimcseBatches(Batches):
    """Every text twice.

    Args:
        texts: Token ids by number.
        formatter: Puts prompt and special tokens around them.
        group: Makes a group of texts into tensors.
    """

    def __init__(self, texts: "Texts", formatter: "InputFormatter", group: TextGroup) -> None:
        self.texts, self.formatter, self.group = texts, formatter, group

    def make(self, step: int, first: int, count: int) -> dict[str, Any]:
        """Return the groups ``query`` and ``positive`` with the same texts; dropout tells them apart."""
        del step
        texts = [self.formatter.format(self.texts.row(number)) for number in range(first, first + count)]
        batch = self.group(texts)
        return {"query": batch, "positive": dict(batch)}
