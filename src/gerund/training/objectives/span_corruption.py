"""Train span corruption: sentinels hide spans of a text, and the decoder generates them (T5; GUR, section IV-A).

Shapes: B texts, T tokens of the encoder, L tokens of the decoder, D numbers of a state.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from gerund.data.masking import SpanLengths, sample_corrupted_spans
from gerund.errors import ConfigError
from gerund.inference.encode.runtime import hidden_states
from gerund.inference.infill.sentinels import sentinel_ids
from gerund.inference.tokens import Tokens
from gerund.training.corpus.formatting import InputFormatter
from gerund.training.losses.vocabulary import NOTHING, decoder_loss
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
from gerund.training.objectives.settings import GurConfig, SpanConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def prepare(context: Context, config: SpanConfig) -> Objective:
    """Return batches of texts with hidden spans, and the decoder's loss."""
    corruption = Corruption.of(context, config)

    def batches(texts: Any, seed: int) -> Batches:
        return SpanBatches(texts, corruption, pad=context.model.pad, seed=seed)

    return context.text_objective(config.kind, config, batches, SpanLosses(), overhead=corruption.formatter.overhead)


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

    def make(self, step: int, first: int, count: int) -> Batch:
        """Return ``input_ids`` and ``real`` (B, T), and ``labels`` (B, L)."""
        del step
        made = [
            self.corruption(self.corruption.formatter.format(self.texts.row(number)), row_generator(self.seed, number))
            for number in range(first, first + count)
        ]
        return with_targets(text_batch([text for text, _ in made], self.pad), [target for _, target in made])


class SpanLosses(TokenLosses):
    """The cross-entropy of what the decoder writes."""

    def counts(self, batch: Batch) -> dict[str, int]:
        """Return over how many tokens it is summed."""
        return {"span_corruption": written_tokens(batch)}

    def __call__(self, model: "PreTrainedModel", batch: Batch) -> dict[str, Tensor]:
        """Return the loss, summed over the tokens of the targets."""
        hidden_BTD = hidden_states(model, batch["input_ids"], batch["real"], None)
        return {"span_corruption": decoder_loss(model, hidden_BTD, batch["real"], batch["labels"])}
