"""Span corruption: sentinels stand for spans of the text, and the decoder writes what they hide (T5; GUR, IV-A).

Knows: how a text and its target are made, the decoder's loss. Does not know: contrastive losses, files.

Shapes: B texts, T tokens of the encoder, L tokens of the decoder, D numbers of a state.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from gerund.data.span_lengths import SpanLengths, sample_corrupted_spans
from gerund.inference.encode.runtime import hidden_states
from gerund.inference.tokens import Tokens
from gerund.training.losses.vocabulary import token_loss
from gerund.training.objectives.base import Batch, Batches, TokenLosses, padded, row_generator, text_batch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from gerund.training.corpus.framing import Framing

NOTHING = -100
"""Stands in the place of padding among the targets."""


@dataclass(frozen=True)
class Corruption:
    """How a text is corrupted.

    Attributes:
        framing: says where a framed text's own tokens stand.
        sentinels: the sentinels' token ids, first to last.
        end: the token that ends what the decoder writes.
        rate: share of the tokens that are hidden.
        lengths: how long spans are.
    """

    framing: "Framing"
    sentinels: Sequence[int]
    end: int
    rate: float
    lengths: SpanLengths

    def __call__(self, framed: Tokens, rng: np.random.Generator) -> tuple[Tokens, list[int]]:
        """Return the text with sentinels and what the decoder writes: each sentinel with its span, one more, the end.

        A text of one token stays whole, and its target is empty.
        """
        places = self.framing.places(framed)
        # A sentinel each, and one that closes the last span.
        spans = sample_corrupted_spans(len(places), rng, rate=self.rate, lengths=self.lengths)[
            : len(self.sentinels) - 1
        ]
        if not spans:
            return framed, []
        ids, target, done = list(framed.ids[: places.start]), [], places.start
        for sentinel, span in zip(self.sentinels, spans, strict=False):
            begin, stop = places.start + span.start, places.start + span.stop
            ids += [*framed.ids[done:begin], sentinel]
            target += [sentinel, *framed.ids[begin:stop]]
            done = stop
        ids += framed.ids[done:]
        target += [self.sentinels[len(spans)], self.end]
        return Tokens(ids, framed.text_from, framed.specials_before), target


def with_targets(batch: Batch, targets: Sequence[Sequence[int]]) -> Batch:
    """Put what the decoder is to write into a batch, as ``labels`` ``(B, L)``."""
    return {**batch, "labels": padded([list(target) or [NOTHING] for target in targets], NOTHING)}


class SpanBatches(Batches):
    """Texts of the sources with spans hidden.

    Args:
        texts: Token ids by number.
        corruption: Hides spans.
        pad: The padding token.
        seed: Decides the spans.
    """

    def __init__(self, texts: Any, corruption: Corruption, *, pad: int, seed: int) -> None:
        self.texts, self.corruption, self.pad, self.seed = texts, corruption, pad, seed

    def make(self, step: int, first: int, count: int) -> Batch:
        """Return ``input_ids`` and ``real`` (B, T), and ``labels`` (B, L)."""
        del step
        made = [
            self.corruption(self.corruption.framing.frame(self.texts.row(number)), row_generator(self.seed, number))
            for number in range(first, first + count)
        ]
        return with_targets(text_batch([text for text, _ in made], self.pad), [target for _, target in made])


class SpanLosses(TokenLosses):
    """The cross-entropy of what the decoder writes."""

    def counts(self, batch: Batch) -> dict[str, int]:
        """Return over how many tokens it is summed."""
        return {"span_corruption": int((batch["labels"] != NOTHING).sum())}

    def forward(self, model: "PreTrainedModel", batch: Batch) -> dict[str, Tensor]:
        """Return the loss, summed over the tokens of the targets."""
        hidden_BTD = hidden_states(model, batch["input_ids"], batch["real"], None)
        return {"span_corruption": decoder_loss(model, hidden_BTD, batch["real"], batch["labels"])}


def decoder_loss(model: "PreTrainedModel", hidden_BTD: Tensor, real_BT: Tensor, labels_BL: Tensor) -> Tensor:
    """Return the summed cross-entropy of what the decoder writes for texts that the encoder has read.

    Args:
        model: An encoder-decoder model.
        hidden_BTD: The encoder's states.
        real_BT: True for tokens, False for padding.
        labels_BL: What is written, ``NOTHING`` where a row is shorter.
    """
    counted_BL = labels_BL != NOTHING
    start: int = model.config.decoder_start_token_id
    ids_BL = torch.cat([torch.full_like(labels_BL[:, :1], start), labels_BL[:, :-1].clamp(min=0)], dim=1)
    # Behind its end a row is read as padding, and nothing before looks there.
    states_BLD = model.decoder(
        input_ids=ids_BL,
        encoder_hidden_states=hidden_BTD,
        encoder_attention_mask=real_BT.long(),
        use_cache=False,
    ).last_hidden_state
    head = model.get_output_embeddings()
    scale = model.config.d_model**-0.5 if getattr(model.config, "scale_decoder_outputs", False) else 1.0
    return token_loss(
        partial(_logits, head, scale), states_BLD[counted_BL], labels_BL[counted_BL], parameters=list(head.parameters())
    )


def _logits(head: Callable[[Tensor], Tensor], scale: float, states_ND: Tensor) -> Tensor:
    return head(states_ND * scale)
