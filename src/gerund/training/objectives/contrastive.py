"""Contrastive fine-tuning on pairs and triples from files: queries, positives, hard negatives (UniMAE, Appendix D).

Knows: which texts make a pair. Does not know: the loss (``vectors``), how files are read (``corpus.pairs``).
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from gerund.training.objectives.base import Batches, Objective, ObjectiveConfig, Section
from gerund.training.objectives.vectors import ContrastiveConfig, ContrastiveLosses, TextGroup

if TYPE_CHECKING:
    from gerund.training.corpus.formatting import InputFormatter
    from gerund.training.corpus.pairs import Examples
    from gerund.training.objectives.context import Context


class PairFiles(Section):
    """Files of pairs or triples: jsonl, csv, tsv or parquet."""

    files: list[Path] = Field(min_length=1)
    """Files, relative to ``data.folder``."""
    query: str = "query"
    """Column or field of the query."""
    positive: str = "positive"
    """Column or field of its positive; of a list the first is taken."""
    negatives: str = "negatives"
    """Column or field of its negatives, a text or a list."""


class SupervisedConfig(ContrastiveConfig):
    """Contrastive fine-tuning on queries, positives and hard negatives from files (UniMAE, Appendix D)."""

    seed_offset: ClassVar[int | None] = 50

    kind: Literal["contrastive"]
    pairs: PairFiles
    batch_size: int = Field(default=64, ge=1)
    temperature: float = Field(default=0.02, gt=0)
    """Similarities are divided by it."""
    hard_negatives: int = Field(default=0, ge=0)
    """How many of an example's own negatives take part; in-batch negatives always do."""
    query_prompt: str | None = None
    """Put before queries; left out, the encoder's prompt."""
    document_prompt: str | None = None
    """Put before positives and negatives; left out, the encoder's prompt."""

    @property
    def reads_sources(self) -> bool:
        """Whether it reads the recipe's sources."""
        return False

    def prepare(self, context: "Context") -> Objective:
        """Return batches of examples and InfoNCE."""
        prompts = (self.query_prompt, self.document_prompt)
        batches = ExampleBatches.read(context, self, self.pairs, hard_negatives=self.hard_negatives, prompts=prompts)
        losses = ContrastiveLosses(
            context.model.runtime,
            temperature=self.temperature,
            similarity=self.similarity,
            projection=self.projection,
        )
        return Objective(self.kind, batches, losses, {self.kind: self})


class ExampleBatches(Batches):
    """Examples in a shuffled order.

    Args:
        examples: Query, positive and negatives by number.
        queries: Formats queries.
        documents: Formats positives and negatives.
        group: Makes a group of texts into tensors.
        length: Longest text in tokens.
    """

    def __init__(
        self,
        examples: "Examples",
        queries: "InputFormatter",
        documents: "InputFormatter",
        group: TextGroup,
        *,
        length: int,
    ) -> None:
        self.texts, self.queries, self.documents = examples, queries, documents
        self.group, self.length = group, length

    @classmethod
    def read(
        cls,
        context: "Context",
        config: ObjectiveConfig,
        pairs: PairFiles,
        *,
        hard_negatives: int = 0,
        prompts: tuple[str | None, str | None] = (None, None),
    ) -> "ExampleBatches":
        """Return batches of the examples in files, for the settings of an objective."""
        from gerund.training.corpus.pairs import Examples, read_examples

        found = read_examples(
            context.files(pairs.files), query=pairs.query, positive=pairs.positive, negatives=pairs.negatives
        )
        examples = Examples(found, seed=context.seed(config), hard_negatives=hard_negatives)
        queries, documents = (context.formatter(config, prompt) for prompt in prompts)
        return cls(examples, queries, documents, TextGroup.of(context), length=config.length)

    def make(self, step: int, first: int, count: int) -> dict[str, Any]:
        """Return the groups ``query``, ``positive`` and, where examples have any, ``negative``."""
        del step
        rows = [self.texts.row(number) for number in range(first, first + count)]
        groups = {
            "query": [self.queries.format_text(row.query, self.length) for row in rows],
            "positive": [self.documents.format_text(row.positive, self.length) for row in rows],
            "negative": [self.documents.format_text(text, self.length) for row in rows for text in row.negatives],
        }
        return {name: self.group(texts) for name, texts in groups.items() if texts}
