"""Contrastive fine-tuning on pairs and triples from files: queries, positives, hard negatives (UniMAE, Appendix D).

Knows: which texts make a pair. Does not know: the loss (``vectors``), how files are read (``corpus.pairs``).
"""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from gerund.training.objectives.base import Batches, Objective, ObjectiveConfig, Purpose, Section
from gerund.training.objectives.vectors import ContrastiveConfig, ContrastiveLosses, TextGroup

if TYPE_CHECKING:
    from gerund.training.corpus.formatting import InputFormatter
    from gerund.training.corpus.pairs import Example, Examples, SameTaskExamples
    from gerund.training.objectives.context import Context


INSTRUCTION = "{instruction}"
"""Where a query's own instruction stands in a prompt."""


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

    def read(self, context: "Context", instruction: str | None = None, task: str | None = None) -> "list[Example]":
        """Return the examples of all files, each with its task: what a column says, or its file."""
        from gerund.training.corpus.pairs import read_examples

        columns = {"query": self.query, "positive": self.positive, "negatives": self.negatives}
        return [
            replace(example, task=example.task or str(path))
            for path in context.files(self.files)
            for example in read_examples([path], **columns, instruction=instruction, task=task)
        ]


class TaskFiles(PairFiles):
    """Files of pairs or triples of one task or several."""

    instruction: str | None = None
    """Column or field of the query's own instruction, which stands in ``query_prompt``; left out, none."""
    task: str | None = None
    """Column or field that names an example's task, for ``same_task``; left out, each file is a task."""


class SupervisedConfig(ContrastiveConfig):
    """Contrastive fine-tuning on queries, positives and hard negatives from files (UniMAE, Appendix D)."""

    purpose: ClassVar[Purpose] = Purpose.EMBED_BY_PAIRS
    reads_pairs: ClassVar[bool] = True
    seed_offset: ClassVar[int | None] = 50

    kind: Literal["contrastive"]
    pairs: TaskFiles
    batch_size: int = Field(default=64, ge=1)
    temperature: float = Field(default=0.02, gt=0)
    """Similarities are divided by it."""
    hard_negatives: int = Field(default=0, ge=0)
    """How many of an example's own negatives take part; in-batch negatives always do."""
    query_prompt: str | None = None
    """Put before queries; left out, the encoder's prompt. With ``pairs.instruction`` it has a place for it, as in
    BGE-ICL's ``<instruct>{instruction}\\n<query>``; a query without an instruction has no prompt then."""
    document_prompt: str | None = None
    """Put before positives and negatives; left out, the encoder's prompt."""
    same_task: bool = False
    """Whether all examples of a batch are of one task, so that negatives are no easier than their task (UniMAE,
    Appendix D, by BGE-ICL's settings)."""

    @model_validator(mode="after")
    def _instructions_and_tasks(self) -> Self:
        placed = INSTRUCTION in (self.query_prompt or "")
        if placed != (self.pairs.instruction is not None):
            raise ValueError(
                f"query_prompt has the place {INSTRUCTION} where pairs.instruction names the column of instructions, "
                "and only there"
            )
        if self.pairs.task is not None and not self.same_task:
            raise ValueError("pairs.task names tasks for same_task: true")
        return self

    @property
    def reads_sources(self) -> bool:
        """Whether it reads the recipe's sources."""
        return False

    def prepare(self, context: "Context") -> Objective:
        """Return batches of examples and InfoNCE."""
        prompts = (self.query_prompt, self.document_prompt)
        examples = self._examples(context)
        batches = ExampleBatches.of(context, self, examples, prompts=prompts)
        if self.pairs.instruction is not None:
            batches.instructed = self._formatters(context, examples)
        losses = ContrastiveLosses(
            context.model.runtime,
            temperature=self.temperature,
            similarity=self.similarity,
            projection=self.projection,
        ).of(self, context)
        return Objective(self.kind, batches, losses, {self.kind: self})

    def _examples(self, context: "Context") -> "Examples | SameTaskExamples":
        from gerund.training.corpus.pairs import Examples, SameTaskExamples

        found = self.pairs.read(context, self.pairs.instruction, self.pairs.task)
        seed, negatives = context.seed(self), self.hard_negatives
        if self.same_task:
            return SameTaskExamples(found, seed=seed, batch_size=self.batch_size, hard_negatives=negatives)
        return Examples(found, seed=seed, hard_negatives=negatives)

    def _formatters(self, context: "Context", examples: "Examples | SameTaskExamples") -> "dict[str, InputFormatter]":
        """Return what formats the queries of each instruction.

        Raises:
            ConfigError: An instruction leaves no room for text.
        """
        prompt = self.query_prompt or ""
        # All of them now, so that what cannot be formatted is told before anything is trained.
        return {
            own: context.formatter(self, prompt.replace(INSTRUCTION, own) if own.strip() else "")
            for own in {example.instruction for example in examples.examples}
        }


class ExampleBatches(Batches):
    """Examples in a shuffled order.

    Args:
        examples: Query, positive and negatives by number.
        queries: Formats queries.
        documents: Formats positives and negatives.
        group: Makes a group of texts into tensors.
        length: Longest text in tokens.

    Attributes:
        instructed: What formats the queries of each instruction, in the place of ``queries``; empty where there are
            none.
    """

    def __init__(
        self,
        examples: "Examples | SameTaskExamples",
        queries: "InputFormatter",
        documents: "InputFormatter",
        group: TextGroup,
        *,
        length: int,
    ) -> None:
        self.texts, self.queries, self.documents = examples, queries, documents
        self.group, self.length = group, length
        self.instructed: dict[str, InputFormatter] = {}

    @classmethod
    def of(
        cls,
        context: "Context",
        config: ObjectiveConfig,
        examples: "Examples | SameTaskExamples",
        prompts: tuple[str | None, str | None] = (None, None),
    ) -> "ExampleBatches":
        """Return batches of examples, for the settings of an objective."""
        queries, documents = (context.formatter(config, prompt) for prompt in prompts)
        return cls(examples, queries, documents, TextGroup.of(context), length=config.length)

    def make(self, step: int, first: int, count: int) -> dict[str, Any]:
        """Return the groups ``query``, ``positive`` and, where examples have any, ``negative``."""
        del step
        rows = [self.texts.row(number) for number in range(first, first + count)]
        groups = {
            "query": [
                self.instructed.get(row.instruction, self.queries).format_text(row.query, self.length) for row in rows
            ],
            "positive": [self.documents.format_text(row.positive, self.length) for row in rows],
            "negative": [self.documents.format_text(text, self.length) for row in rows for text in row.negatives],
        }
        return {name: self.group(texts) for name, texts in groups.items() if texts}
