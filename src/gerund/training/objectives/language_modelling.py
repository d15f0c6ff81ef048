"""Train language modelling: causal on packed blocks, and span corruption by an encoder-decoder.

``causal``: every token is predicted from the ones before it. ``span_corruption``: sentinels hide spans of a text, and
the decoder generates them (T5; GUR, section IV-A).

Shapes: B texts, T tokens of the encoder, L tokens of the decoder, D numbers of a state.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from gerund.data.masking import SpanLengths, sample_corrupted_spans
from gerund.errors import ConfigError
from gerund.inference.encode.runtime import hidden_states
from gerund.inference.infill.sentinels import sentinel_ids
from gerund.inference.tokens import Tokens
from gerund.training.corpus.texts import PackedBlocks, SpreadBlocks
from gerund.training.corpus.tokenizer import InputFormatter
from gerund.training.losses.vocabulary import NOTHING, causal_loss, decoder_loss
from gerund.training.objectives.base import (
    Batch,
    Batches,
    Context,
    Objective,
    TokenLosses,
    padded,
    row_generator,
    text_batch,
)
from gerund.training.objectives.settings import CausalConfig, GurConfig, SpanConfig


def prepare_causal(context: Context, config: CausalConfig) -> Objective:
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
    names = [item.name for item in recipe.data.sources if not config.sources or item.name in config.sources]
    batches = BlockBatches(blocks, long, **options)

    def report() -> dict[str, Any]:
        epochs = zip(names, batches.epochs(), strict=True)
        return {"epochs": {name: round(value, 3) for name, value in epochs}}

    return Objective(
        config.kind,
        batches,
        CausalLosses(compiled=recipe.compile),
        {config.kind: config},
        validation=validation,
        validated_by_source=True,
        report=report,
    )


@dataclass(eq=False)
class BlockBatches(Batches):
    """Packed blocks, ``rows`` per step; from step ``decay_from`` on other, longer ones with as many tokens per step.

    ``steps`` of the whole training say how often the sources are read.
    """

    texts = None

    blocks: PackedBlocks | SpreadBlocks
    long_blocks: PackedBlocks | None
    decay_from: int
    steps: int
    rows: int

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

    def __call__(self, model: PreTrainedModel, batch: Batch) -> dict[str, Tensor]:
        """Return the summed cross-entropy."""
        return {"causal": self._loss(model, batch["input_ids"])}


def prepare_spans(context: Context, config: SpanConfig) -> Objective:
    """Return batches of texts with hidden spans, and the decoder's loss."""
    corruption = Corruption.of(context, config)
    return context.text_objective(
        config.kind,
        config,
        lambda texts, seed: SpanBatches(texts, corruption, pad=context.model.pad, seed=seed),
        SpanLosses(),
        overhead=corruption.formatter.overhead,
    )


@dataclass(frozen=True)
class Corruption:
    """Hides ``rate`` of a text's tokens behind sentinels (token ids); a target ends with the token ``end``."""

    formatter: InputFormatter
    sentinels: Sequence[int]
    end: int
    rate: float
    lengths: SpanLengths

    @classmethod
    def of(cls, context: Context, config: SpanConfig | GurConfig) -> "Corruption":
        """Return how an objective with ``rate`` and ``spans`` corrupts its texts."""
        tokenizer = context.model.tokenizer
        sentinels = sentinel_ids(tokenizer)
        if len(sentinels) < 2 or tokenizer.eos_token_id is None:
            raise ConfigError(f"{config.kind}: the tokenizer lacks sentinels (<extra_id_0>, ...) or an end token")
        return cls(context.formatter(config), sentinels, tokenizer.eos_token_id, config.rate, config.spans)

    def __call__(self, text: Tokens, rng: np.random.Generator) -> tuple[Tokens, list[int]]:
        """Return the text with sentinels and what the decoder writes: each sentinel with its span, one more, the end.

        A text of one token stays whole, and its target is empty.
        """
        places = self.formatter.places(text)
        # A sentinel each, and one that closes the last span.
        spans = sample_corrupted_spans(len(places), rng, rate=self.rate, lengths=self.lengths)[
            : len(self.sentinels) - 1
        ]
        if not spans:
            return text, []
        ids, target, done = list(text.ids[: places.start]), [], places.start
        for sentinel, span in zip(self.sentinels, spans, strict=False):
            begin, stop = places.start + span.start, places.start + span.stop
            ids += [*text.ids[done:begin], sentinel]
            target += [sentinel, *text.ids[begin:stop]]
            done = stop
        ids += text.ids[done:]
        target += [self.sentinels[len(spans)], self.end]
        return replace(text, ids=ids, offsets=()), target


def with_targets(batch: Batch, targets: Sequence[Sequence[int]]) -> Batch:
    """Put what the decoder is to write into a batch, as ``labels`` ``(B, L)``."""
    return {**batch, "labels": padded([list(target) or [NOTHING] for target in targets], NOTHING)}


def written_tokens(batch: Batch) -> int:
    """Return how many tokens the decoder is to write."""
    return int((batch["labels"] != NOTHING).sum())


class SpanBatches(Batches):
    """Texts of the sources with spans hidden."""

    def __init__(self, texts: Any, corruption: Corruption, *, pad: int, seed: int) -> None:
        self.texts, self.corruption, self.pad, self.seed = texts, corruption, pad, seed

    def batch_of(self, numbers: range) -> Batch:
        """Return ``input_ids`` and ``real`` (B, T), and ``labels`` (B, L)."""
        made = [
            self.corruption(self.corruption.formatter.format(self.texts.row(number)), row_generator(self.seed, number))
            for number in numbers
        ]
        return with_targets(text_batch([text for text, _ in made], self.pad), [target for _, target in made])


class SpanLosses(TokenLosses):
    """The cross-entropy of what the decoder writes."""

    def counts(self, batch: Batch) -> dict[str, int]:
        """Return over how many tokens it is summed."""
        return {"span_corruption": written_tokens(batch)}

    def __call__(self, model: PreTrainedModel, batch: Batch) -> dict[str, Tensor]:
        """Return the loss, summed over the tokens of the targets."""
        hidden_BTD = hidden_states(model, batch["input_ids"], batch["real"], None)
        return {"span_corruption": decoder_loss(model, hidden_BTD, batch["real"], batch["labels"])}
