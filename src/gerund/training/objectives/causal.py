"""Plain language modelling: every token of a packed block is predicted from the ones before it.

Knows: packed blocks. Does not know: how blocks are made, what else is trained.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from gerund.errors import ConfigError
from gerund.training.corpus.packing import PackedBlocks, SpreadBlocks
from gerund.training.objectives.base import Batch, Batches, TokenLosses

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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

    def _long_row(self, long_blocks: PackedBlocks, row: int) -> int:
        """Return which long block stands where ``row`` would: as many tokens behind the beginning of the decay."""
        return (row - self.decay_from * self.rows) * self.blocks.length // long_blocks.length

    def epochs(self) -> list[float]:
        """Return how often each source is read in the whole training; for training texts only."""
        assert not isinstance(self.blocks, SpreadBlocks)
        if self.long_blocks is None:
            return self.blocks.epochs(self.steps * self.rows)
        before = self.blocks.epochs(self.decay_from * self.rows)
        after = self.long_blocks.epochs(self._long_row(self.long_blocks, self.steps * self.rows))
        return [one + other for one, other in zip(before, after, strict=True)]


class CausalLosses(TokenLosses):
    """The cross-entropy of every token but the first of each block."""

    def __init__(self, *, compiled: bool = False) -> None:
        super().__init__()
        # Static shapes: there are two or three of them (validation, long blocks), each worth its own kernels.
        self._loss = torch.compile(causal_loss, dynamic=False) if compiled else causal_loss

    def counts(self, batch: Batch) -> dict[str, int]:
        """Return how many tokens are predicted."""
        rows, length = batch["input_ids"].shape
        return {"causal": rows * (length - 1)}

    def forward(self, model: "PreTrainedModel", batch: Batch) -> dict[str, Tensor]:
        """Return the summed cross-entropy."""
        return {"causal": self._loss(model, batch["input_ids"])}


def causal_loss(model: "PreTrainedModel", input_ids_BT: Tensor) -> Tensor:
    """Return the summed cross-entropy of tokens 1..T-1 of every row, a scalar in fp32."""
    logits_BTV = model(input_ids=input_ids_BT, use_cache=False).logits
    # Cut after the head: the product keeps its round shape, and the compiler fuses the cut into the loss.
    predictions_NV = logits_BTV[:, :-1].flatten(0, 1).float()
    return functional.cross_entropy(predictions_NV, input_ids_BT[:, 1:].flatten(), reduction="sum")
