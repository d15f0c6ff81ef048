"""Log-probabilities of spans inside texts, read with or without what follows them.

``infill`` reads under MAGNET's hybrid mask (section 3.1): context sees all context, a span token sees all context and
its own span so far. ``causal`` reads from the left, as the model was trained. In both the token at place i is
predicted by the output at place i - 1, the first of a span by the last of its left context.

Knows: models, texts with spans. Does not know: how spans are chosen, how gaps are filled.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from gerund.attention.interface import BoundPlan
from gerund.attention.plan import AttentionPlan
from gerund.attention.probe import prove
from gerund.attention.streams import decoder_layers
from gerund.errors import TextError, unknown_name
from gerund.inference.likelihood import plain_reader, token_logprobs
from gerund.inference.tokens import Reading, Tokens, tokenize

How = Literal["infill", "causal"]
READINGS = ("infill", "causal")


@dataclass(frozen=True)
class SpannedText:
    """A text, and the characters of the spans in it.

    Attributes:
        text: the whole text.
        spans: (start, end) of each span, from left to right, not touching each other's characters.
    """

    text: str
    spans: tuple[tuple[int, int], ...]


def span_logprobs(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[SpannedText],
    *,
    reading: How = "infill",
    batch_tokens: int | None = None,
    show: bool | None = None,
) -> list[list[np.ndarray]]:
    """Return log p(token | what the reading shows) for every token of every span.

    A text is tokenised as a whole. A token that holds a character of a span belongs to that span, to the
    first of two: usually the space before a word belongs to the token of the word.

    Args:
        model: a causal language model to which gerund's attention is attached.
        tokenizer: its tokenizer, a fast one.
        texts: texts with their spans.
        reading: ``infill`` or ``causal``.
        batch_tokens: tokens a batch, padding included; None chooses by device.
        show: whether to show progress; None only on a terminal.

    Returns:
        For each text one float32 array of natural logarithms a span.

    Raises:
        TextError: a text is too long for the model, a span has no token, or begins a text that nothing precedes.
        ConfigError: an unknown reading.
        UnsupportedModelError: the hybrid mask does not reach every layer.
    """
    if reading not in READINGS:
        raise unknown_name("reading", reading, READINGS)
    plan = AttentionPlan("hybrid").resolve(len(decoder_layers(model)))
    if reading == "infill":
        prove(model, plan)
    reader = plain_reader(model, tokenizer)
    tokens = tokenize(tokenizer, [item.text for item in texts], Reading(), offsets=True)
    whole = [_closed(read, reader.max_length, index) for index, read in enumerate(tokens)]
    places = [_places(read, item, index) for index, (read, item) in enumerate(zip(whole, texts, strict=True))]
    spans = {id(read): own for read, own in zip(whole, places, strict=True)}

    def states(batch: Sequence[Tokens]) -> tuple[Tensor, Tensor]:
        inputs = reader.batch(batch)
        if reading == "causal":
            return reader.run(inputs, None), inputs.begin
        span_BT = torch.zeros(inputs.inputs["input_ids"].shape, dtype=torch.long, device=reader.device)
        for row, (read, start) in enumerate(zip(batch, inputs.begin.tolist(), strict=True)):
            for number, own in enumerate(spans[id(read)], start=1):
                span_BT[row, [start + place for place in own]] = number
        return reader.run(inputs, BoundPlan(plan, inputs.real_BT, span_BT)), inputs.begin

    def wanted(row: int) -> tuple[Sequence[int], Sequence[int]]:
        flat = [place for own in places[row] for place in own]
        return flat, [whole[row].ids[place] for place in flat]

    logprobs = token_logprobs(reader, whole, wanted, states, batch_tokens=batch_tokens, show=show)
    return [
        np.split(scores, np.cumsum([len(own) for own in spans_])[:-1])
        for scores, spans_ in zip(logprobs, places, strict=True)
    ]


def _closed(tokens: Tokens | None, limit: int | None, index: int) -> Tokens:
    if tokens is None:
        raise TextError(f"text {index} is empty")
    if limit is not None and len(tokens) > limit:
        raise TextError(f"text {index} has {len(tokens)} tokens and the model's context ends at {limit}")
    return tokens


def _places(tokens: Tokens, item: SpannedText, index: int) -> list[list[int]]:
    """Return the places of each span's tokens."""
    found: list[list[int]] = []
    taken = tokens.specials_before
    for start, end in item.spans:
        own = [
            tokens.specials_before + at
            for at, (first, last) in enumerate(tokens.offsets)
            if first < end and last > start and tokens.specials_before + at >= taken
        ]
        if not own:
            raise TextError(f"text {index}: the span {item.text[start:end]!r} has no token of its own")
        if own[0] == 0:
            raise TextError(
                f"text {index}: a span begins the text, and this tokenizer puts no token before it that could "
                "predict it; give some text to its left"
            )
        found.append(own)
        taken = own[-1] + 1
    return found
