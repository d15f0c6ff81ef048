"""Train language modelling on packed blocks: every token is predicted from the ones before it."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from gerund.errors import ConfigError
from gerund.training.corpus.texts import PackedBlocks, SpreadBlocks
from gerund.training.losses.vocabulary import causal_loss
from gerund.training.objectives.base import Batch, Batches, Context, Objective, TokenLosses
from gerund.training.objectives.settings import CausalConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def prepare(context: Context, config: CausalConfig) -> Objective:
    """Return packed blocks and their cross-entropy; it is validated on each source by itself."""
    recipe, source = context.recipe, context.source
    decay = (recipe.schedule.decay_steps or 0) if config.decay_length else 0
    seed = context.seed(config)
    blocks = source.blocks(config.sources, config.length, seed)
    # With another seed, or the long blocks would begin where the first short ones began.
    long = source.blocks(config.sources, config.decay_length or 0, seed + 1) if decay else None
    options = {"decay_from": recipe.steps - decay, "steps": recipe.steps, "rows": config.batch_size}
    validation: dict[str, tuple[Batches, int]] = {
        name: (BlockBatches(spread, None, **options), context.validation_batches(config, len(spread)))
        for name, spread in source.validation_blocks(config.sources, config.length, config.batch_size).items()
    }
    return CausalObjective(
        config.kind,
        BlockBatches(blocks, long, **options),
        CausalLosses(compiled=recipe.compile),
        {config.kind: config},
        validation=validation,
        validated_by_source=True,
        names=[item.name for item in recipe.data.sources if not config.sources or item.name in config.sources],
    )


@dataclass
class CausalObjective(Objective):
    """Language modelling that is ready to be trained."""

    names: list[str] = field(default_factory=list)  # the sources that are read

    def report(self) -> dict[str, Any]:
        """Return how often each source is read."""
        epochs = zip(self.names, cast("BlockBatches", self.batches).epochs(), strict=True)
        return {"epochs": {name: round(value, 3) for name, value in epochs}}


class BlockBatches(Batches):
    """Packed blocks, ``rows`` per step; from step ``decay_from`` on other, longer ones with as many tokens per step.

    ``steps`` of the whole training say how often the sources are read.
    """

    def __init__(
        self,
        blocks: PackedBlocks | SpreadBlocks,
        long_blocks: PackedBlocks | None,
        *,
        decay_from: int,
        steps: int,
        rows: int,
    ) -> None:
        self.blocks, self.long_blocks, self.decay_from = blocks, long_blocks, decay_from
        self.steps, self.rows = steps, rows

    def make(self, step: int, first: int, count: int) -> dict[str, Any]:
        """Return ``input_ids (count, length)``; in the decay as many tokens in rows of another length."""
        if self.long_blocks is None or step < self.decay_from:
            return {"input_ids": self.blocks.rows(first, count)}
        start, end = (self._long_row(self.long_blocks, row) for row in (first, first + count))
        if start == end:
            raise ConfigError(
                f"causal: {self.rows // count} processes cannot share the blocks of decay_length "
                f"{self.long_blocks.length} that a step has; give it a larger batch_size or a smaller decay_length"
            )
        return {"input_ids": self.long_blocks.rows(start, end - start)}

    def _long_row(self, long_blocks: PackedBlocks, row: int) -> int:
        """Return the long block in the place of ``row``: as many tokens after the beginning of the decay."""
        return (row - self.decay_from * self.rows) * self.blocks.length // long_blocks.length

    def epochs(self) -> list[float]:
        """Return how often each source is read in the whole training; for training texts only."""
        blocks = cast("PackedBlocks", self.blocks)
        if self.long_blocks is None:
            return blocks.epochs(self.steps * self.rows)
        before = blocks.epochs(self.decay_from * self.rows)
        after = self.long_blocks.epochs(self._long_row(self.long_blocks, self.steps * self.rows))
        return [short + long for short, long in zip(before, after, strict=True)]


class CausalLosses(TokenLosses):
    """The cross-entropy of every token but the first of each block."""

    def __init__(self, *, compiled: bool = False) -> None:
        # Static shapes: there are two or three of them (validation, long blocks), each worth its own kernels.
        self._loss = torch.compile(causal_loss, dynamic=False) if compiled else causal_loss

    def counts(self, batch: Batch) -> dict[str, int]:
        """Return how many tokens are predicted."""
        rows, length = batch["input_ids"].shape
        return {"causal": rows * (length - 1)}

    def __call__(self, model: "PreTrainedModel", batch: Batch) -> dict[str, Tensor]:
        """Return the summed cross-entropy."""
        return {"causal": self._loss(model, batch["input_ids"])}
