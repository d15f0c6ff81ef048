"""SSCL: a text and an altered text with the same meaning are a pair (MAGNET, section 3.2.2).

The paper alters texts with a paraphrasing model; a file of such pairs may be given. Without one, words are left
out, swapped and cropped, which needs no second model.

Knows: which texts make a pair. Does not know: the loss (``vectors``).
"""

from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from gerund.data.augmentation import augment
from gerund.training.objectives.base import Batches, Objective, TextConfig
from gerund.training.objectives.batches import row_generator
from gerund.training.objectives.contrastive import ExampleBatches, PairFiles
from gerund.training.objectives.vectors import ContrastiveConfig, ContrastiveLosses, TextGroup

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from gerund.inference.tokens import Tokens
    from gerund.training.corpus.formatting import InputFormatter
    from gerund.training.corpus.texts import Texts
    from gerund.training.objectives.context import Context


class SsclConfig(TextConfig, ContrastiveConfig):
    """Self-supervised contrastive learning with an altered text as positive (MAGNET, section 3.2.2)."""

    seed_offset: ClassVar[int | None] = 40

    kind: Literal["sscl"]
    length: int = Field(default=128, ge=2)
    unit: Literal["documents", "sentences"] = "sentences"
    batch_size: int = Field(default=64, ge=2)
    temperature: float = Field(default=0.1, gt=0)
    """Similarities are divided by it (equation 3)."""
    pairs: PairFiles | None = None
    """Texts with paraphrases, as in the paper; left out, positives are made from the sources."""
    deletion: float = Field(default=0.1, ge=0, lt=1)
    """Fraction of the words that a made positive lacks."""
    swap: float = Field(default=0.1, ge=0, le=1)
    """Fraction of its words that change places with a neighbour."""
    crop: float = Field(default=1.0, gt=0, le=1)
    """A made positive keeps a contiguous stretch of at least this fraction of the words."""

    @property
    def reads_sources(self) -> bool:
        """Whether it reads the recipe's sources."""
        return self.pairs is None

    def prepare(self, context: "Context") -> Objective:
        """Return batches of texts with paraphrases or altered copies, and InfoNCE."""
        group = TextGroup.of(context)
        losses = ContrastiveLosses(
            context.model.runtime,
            temperature=self.temperature,
            similarity=self.similarity,
            projection=self.projection,
        )
        if self.pairs is not None:
            return Objective(self.kind, ExampleBatches.read(context, self, self.pairs), losses, {self.kind: self})
        formatter = context.formatter(self)

        def batches(texts: Any, seed: int) -> Batches:
            return AlteredBatches(texts, formatter, group, tokenizer=context.model.tokenizer, config=self, seed=seed)

        return context.text_objective(self.kind, self, batches, losses, overhead=formatter.overhead)


class AlteredBatches(Batches):
    """Every text with an altered copy of it.

    Args:
        texts: Token ids by number.
        formatter: Puts prompt and special tokens around them.
        group: Makes a group of texts into tensors.
        tokenizer: Turns ids into words and back.
        config: How much is altered, and the longest text.
        seed: Determines what is altered.
    """

    def __init__(
        self,
        texts: "Texts",
        formatter: "InputFormatter",
        group: TextGroup,
        *,
        tokenizer: "PreTrainedTokenizerBase",
        config: SsclConfig,
        seed: int,
    ) -> None:
        self.texts, self.formatter, self.group = texts, formatter, group
        self.tokenizer, self.config, self.seed = tokenizer, config, seed

    def make(self, step: int, first: int, count: int) -> dict[str, Any]:
        """Return the groups ``query`` and ``positive``."""
        del step
        queries, positives = [], []
        for number in range(first, first + count):
            ids = self.texts.row(number)
            queries.append(self.formatter.format(ids))
            positives.append(self._altered(ids, number) or queries[-1])
        return {"query": self.group(queries), "positive": self.group(positives)}

    def _altered(self, ids: np.ndarray, number: int) -> "Tokens | None":
        """Return another version of a text; None for one of blank lines alone, which has no words to alter."""
        config = self.config
        text = self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        if not text.strip():
            return None
        rng = row_generator(self.seed, number)
        altered = augment(text, rng, deletion=config.deletion, swap=config.swap, crop=config.crop)
        return self.formatter.format_text(altered, config.length)
