"""Plain language modelling: every token of a packed block is predicted from the ones before it.

Knows: packed blocks. Does not know: how blocks are made, what else is trained.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, cast

from pydantic import Field, model_validator

from gerund.errors import ConfigError
from gerund.training.objectives.base import Batch, Batches, Objective, ObjectiveConfig, Purpose, TokenLosses

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from gerund.training.corpus.texts import PackedBlocks, SpreadBlocks
    from gerund.training.objectives.context import Context
    from gerund.training.recipe import Recipe


class CausalConfig(ObjectiveConfig):
    """Plain language modelling on packed blocks: documents follow each other without padding."""

    purpose: ClassVar[Purpose] = Purpose.WRITE
    kind: Literal["causal"]
    sources: list[str] = Field(default_factory=list)
    """Names of the ``data.sources`` that it reads; left out, all."""
    decay_length: int | None = Field(default=None, ge=2)
    """Tokens in a block during the decay of the schedule ``wsd``; left out, ``length``. As many tokens a step
    as before, in fewer blocks. Long blocks only at the end keep most steps cheap, and the model still learns to
    use its whole context."""

    @model_validator(mode="after")
    def _divides(self) -> Self:
        if self.decay_length is not None and (self.batch_size * self.length) % self.decay_length:
            raise ValueError(f"decay_length {self.decay_length} does not divide the {self.batch_size * self.length} "
                             "tokens of a batch")  # fmt: skip
        return self

    @property
    def longest_text(self) -> int:
        """The longest block, in tokens."""
        return max(self.length, self.decay_length or 0)

    def seed(self, recipe_seed: int) -> int:
        """Return the recipe's own seed."""
        return recipe_seed

    def check(self, recipe: "Recipe") -> None:
        """Refuse blocks of a decay that the schedule does not have."""
        super().check(recipe)
        if self.decay_length and recipe.schedule.name != "wsd":
            raise ValueError("decay_length of the objective causal belongs to the schedule wsd")

    def check_processes(self, processes: int) -> None:
        """Refuse more processes than can share the blocks of a step."""
        super().check_processes(processes)
        long = self.decay_length
        if long is not None and (self.batch_size * self.length) % (long * processes):
            blocks = self.batch_size * self.length // long
            raise ConfigError(f"{self.kind}: {processes} processes cannot share {blocks} blocks of the decay")

    def prepare(self, context: "Context") -> Objective:
        """Return packed blocks and their cross-entropy; it is validated on each source by itself."""
        recipe, source = context.recipe, context.source
        decay = (recipe.schedule.decay_steps or 0) if self.decay_length else 0
        seed = context.seed(self)
        blocks = source.blocks(self.sources, self.length, seed)
        # A seed of its own, or the long blocks would begin where the first short ones began.
        long = source.blocks(self.sources, self.decay_length or 0, seed + 1) if decay else None
        options = {"decay_from": recipe.steps - decay, "steps": recipe.steps, "rows": self.batch_size}
        validation: dict[str, tuple[Batches, int]] = {
            name: (BlockBatches(own, None, **options), context.validation_batches(self, len(own)))
            for name, own in source.validation_blocks(self.sources, self.length, self.batch_size).items()
        }
        return CausalObjective(
            self.kind,
            BlockBatches(blocks, long, **options),
            CausalLosses(compiled=recipe.compile),
            {self.kind: self},
            validation=validation,
            validated_by_source=True,
            names=[own.name for own in recipe.data.sources if not self.sources or own.name in self.sources],
        )


@dataclass
class CausalObjective(Objective):
    """Language modelling that is ready to be trained."""

    names: list[str] = field(default_factory=list)
    """The sources that are read."""

    def report(self) -> dict[str, Any]:
        """Return how often each source is read."""
        epochs = zip(self.names, cast("BlockBatches", self.batches).epochs(), strict=True)
        return {"epochs": {name: round(value, 3) for name, value in epochs}}


class BlockBatches(Batches):
    """Packed blocks; from ``decay_from`` on other, longer ones with as many tokens a step.

    Args:
        blocks: Blocks of the usual length.
        long_blocks: Blocks of the decay; None where they are the usual ones.
        decay_from: The first step of the decay.
        steps: Steps of the whole training, which says how often the sources are read.
        rows: Blocks a step.
    """

    def __init__(
        self,
        blocks: "PackedBlocks | SpreadBlocks",
        long_blocks: "PackedBlocks | None",
        *,
        decay_from: int,
        steps: int,
        rows: int,
    ) -> None:
        self.blocks, self.long_blocks, self.decay_from = blocks, long_blocks, decay_from
        self.steps, self.rows = steps, rows

    def make(self, step: int, first: int, count: int) -> dict[str, Any]:
        """Return ``input_ids (count, length)``; in the decay as many tokens in rows of another length.

        Raises:
            ConfigError: This part of the step's tokens is shorter than a block of the decay.
        """
        if self.long_blocks is None or step < self.decay_from:
            return {"input_ids": self.blocks.rows(first, count)}
        start, end = (self._long_row(self.long_blocks, row) for row in (first, first + count))
        if start == end:
            raise ConfigError(
                f"causal: {self.rows // count} processes cannot share the blocks of decay_length "
                f"{self.long_blocks.length} that a step has; give it a larger batch_size or a smaller decay_length"
            )
        return {"input_ids": self.long_blocks.rows(start, end - start)}

    def _long_row(self, long_blocks: "PackedBlocks", row: int) -> int:
        """Return which long block stands where ``row`` would: as many tokens behind the beginning of the decay."""
        return (row - self.decay_from * self.rows) * self.blocks.length // long_blocks.length

    def epochs(self) -> list[float]:
        """Return how often each source is read in the whole training; for training texts only."""
        blocks = cast("PackedBlocks", self.blocks)
        if self.long_blocks is None:
            return blocks.epochs(self.steps * self.rows)
        before = blocks.epochs(self.decay_from * self.rows)
        after = self.long_blocks.epochs(self._long_row(self.long_blocks, self.steps * self.rows))
        return [one + other for one, other in zip(before, after, strict=True)]


class CausalLosses(TokenLosses):
    """The cross-entropy of every token but the first of each block."""

    def __init__(self, *, compiled: bool = False) -> None:
        import torch

        from gerund.training.losses.vocabulary import causal_loss

        # Static shapes: there are two or three of them (validation, long blocks), each worth its own kernels.
        self._loss = torch.compile(causal_loss, dynamic=False) if compiled else causal_loss

    def counts(self, batch: Batch) -> dict[str, int]:
        """Return how many tokens are predicted."""
        rows, length = batch["input_ids"].shape
        return {"causal": rows * (length - 1)}

    def __call__(self, model: "PreTrainedModel", batch: Batch) -> "dict[str, Tensor]":
        """Return the summed cross-entropy."""
        return {"causal": self._loss(model, batch["input_ids"])}
