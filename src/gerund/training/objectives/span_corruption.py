"""Span corruption: sentinels stand for spans of the text, and the decoder writes what they hide (T5; GUR, IV-A).

Knows: how a text and its target are made. Does not know: the decoder's loss (``losses.vocabulary``), files.

Shapes: B texts, T tokens of the encoder, L tokens of the decoder, D numbers of a state.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from gerund.data.masking import SpanLengths, sample_corrupted_spans
from gerund.errors import ConfigError
from gerund.training.objectives.base import ENCODER_DECODER, Batch, Batches, Objective, Purpose, TextConfig, TokenLosses
from gerund.training.objectives.batches import padded, row_generator, text_batch

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from gerund.inference.tokens import Tokens
    from gerund.settings.encoder import EncoderConfig
    from gerund.training.corpus.formatting import InputFormatter
    from gerund.training.objectives.context import Context


class SpanConfig(TextConfig):
    """A decoder writes the spans of a text that the encoder does not see (T5). For encoder-decoder models."""

    models: ClassVar[tuple[str, ...]] = (ENCODER_DECODER,)
    purpose: ClassVar[Purpose] = Purpose.WRITE
    seed_offset: ClassVar[int | None] = 70

    kind: Literal["span_corruption"]
    length: int = Field(default=128, ge=8)
    rate: float = Field(default=0.15, gt=0, lt=1)
    """Fraction of the tokens that are hidden."""
    spans: Literal["hump", "geometric", "t5"] = "hump"
    """How long spans are: ``hump`` (GUR, equation 3), ``geometric`` (SpanBERT's) or ``t5``."""

    def check_model(self, model: str, encoder: "EncoderConfig") -> None:
        """Refuse a model without a decoder beside its encoder."""
        demand_decoder(self.kind, model)
        super().check_model(model, encoder)

    def prepare(self, context: "Context") -> Objective:
        """Return batches of texts with hidden spans, and the decoder's loss."""
        corruption = Corruption.of(context, self)

        def batches(texts: Any, seed: int) -> Batches:
            return SpanBatches(texts, corruption, pad=context.model.pad, seed=seed)

        return context.text_objective(self.kind, self, batches, SpanLosses(), overhead=corruption.formatter.overhead)


def demand_decoder(what: str, model: str) -> None:
    """Refuse a model without a decoder beside its encoder.

    Raises:
        ConfigError: With what to train it for instead.
    """
    if model != ENCODER_DECODER:
        raise ConfigError(
            f"{what} needs a decoder beside an encoder, such as a T5; add causal or unimae for a decoder-only model"
        )


@dataclass(frozen=True)
class Corruption:
    """How a text is corrupted.

    Attributes:
        formatter: says where a formatted text's own tokens stand.
        sentinels: the sentinels' token ids, first to last.
        end: the token that ends what the decoder writes.
        rate: fraction of the tokens that are hidden.
        lengths: how long spans are.
    """

    formatter: "InputFormatter"
    sentinels: Sequence[int]
    end: int
    rate: float
    lengths: SpanLengths

    @classmethod
    def of(cls, context: "Context", config: Any) -> "Corruption":
        """Return how an objective with ``rate`` and ``spans`` corrupts its texts.

        Raises:
            ConfigError: The tokenizer lacks sentinels or an end token.
        """
        from gerund.inference.infill.sentinels import sentinel_ids

        tokenizer = context.model.tokenizer
        sentinels = sentinel_ids(tokenizer)
        if len(sentinels) < 2 or tokenizer.eos_token_id is None:
            raise ConfigError(f"{config.kind}: the tokenizer lacks sentinels (<extra_id_0>, ...) or an end token")
        return cls(context.formatter(config), sentinels, tokenizer.eos_token_id, config.rate, config.spans)

    def __call__(self, text: "Tokens", rng: np.random.Generator) -> "tuple[Tokens, list[int]]":
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
    from gerund.training.losses.vocabulary import NOTHING

    return {**batch, "labels": padded([list(target) or [NOTHING] for target in targets], NOTHING)}


def written_tokens(batch: Batch) -> int:
    """Return how many tokens the decoder is to write."""
    from gerund.training.losses.vocabulary import NOTHING

    return int((batch["labels"] != NOTHING).sum())


class SpanBatches(Batches):
    """Texts of the sources with spans hidden.

    Args:
        texts: Token ids by number.
        corruption: Hides spans.
        pad: The padding token.
        seed: Determines the spans.
    """

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

    def __call__(self, model: "PreTrainedModel", batch: Batch) -> "dict[str, Tensor]":
        """Return the loss, summed over the tokens of the targets."""
        from gerund.inference.encode.runtime import hidden_states
        from gerund.training.losses.vocabulary import decoder_loss

        hidden_BTD = hidden_states(model, batch["input_ids"], batch["real"], None)
        return {"span_corruption": decoder_loss(model, hidden_BTD, batch["real"], batch["labels"])}
