"""Log-probabilities of spans inside a text, read from the left only or seeing both sides.

Knows: models, texts with spans, MAGNET's ``hybrid`` mask. Does not know: how spans are chosen.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from gerund.attention.bound_plan import BoundPlan
from gerund.attention.interface import attach
from gerund.attention.probe import verify_once
from gerund.checks import one_of
from gerund.errors import TextError
from gerund.inference.encode.runtime import EncoderRuntime
from gerund.inference.likelihood.tokens import causal_runtime, sequence_logprobs, token_logprobs
from gerund.inference.tokens import InputFormat, Tokens, tokenize
from gerund.settings.plan import AttentionPlan, ResolvedPlan

SpanMode = Literal["infill", "causal"]


@dataclass(frozen=True)
class SpannedText:
    """A text and the spans of it that are measured.

    Attributes:
        text: the whole text.
        spans: (first character, character after the last) of each, in order, with text between them.

    >>> SpannedText.between("He was at the", " gym", ". He ran.").spans
    ((13, 17),)
    """

    text: str
    spans: tuple[tuple[int, int], ...]

    @classmethod
    def between(cls, left: str, span: str, right: str) -> "SpannedText":
        """Return one span with what stands on either side of it, spaces included."""
        return cls(left + span + right, ((len(left), len(left) + len(span)),))


def span_logprobs(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[SpannedText],
    mode: SpanMode,
    *,
    batch_tokens: int | None = None,
    show: bool | None = None,
    adapter: str | None = None,
) -> list[list[np.ndarray]]:
    """Return the log-probability of each token of each span.

    A text is tokenised whole. A token that holds any character of a span belongs to the span, so that nothing
    of the span is left in its context. The output at each token's predecessor predicts it, also the first one of
    a span, whose predecessor is the last token on its left.

    Args:
        model: a causal language model.
        tokenizer: its tokenizer, a fast one.
        texts: texts with one or more spans.
        mode: ``infill``, under MAGNET's hybrid mask (section 3.1): tokens of the context see all of the context,
            tokens of a span see the context and their own span so far, never another span. ``causal``: the
            untouched model, which sees whatever stands on the left, earlier spans included.
        batch_tokens: tokens a batch, padding included; None chooses by device.
        show: whether to show progress; None only on a terminal.
        adapter: the name of the one that is active while both sides are seen, as MAGNET trains it for that; the
            mode ``causal`` is always that of the untouched model.

    Returns:
        For each text one float32 array of natural logarithms a span.

    Raises:
        TextError: a span is empty, outside its text, out of order, touches another one, or has nothing before it
            to be predicted from; or a text is longer than the model's context.
        UnsupportedModelError: the hybrid mask does not reach every layer of the model.
        ModelError: the tokenizer is not a fast one, or the model's head cannot be run on its own.
    """
    one_of("mode of span log-probabilities", mode, ["infill", "causal"])
    for index, text in enumerate(texts):
        _check_spans(text, index)
    runtime = causal_runtime(model, tokenizer)
    tokens = tokenize(tokenizer, [text.text for text in texts], InputFormat(), offsets=True)
    spanned = [
        _spanned(item, text.spans, index, runtime.max_length)
        for index, (item, text) in enumerate(zip(tokens, texts, strict=True))
        if item is not None
    ]
    if mode == "infill":
        logprobs = _infill(replace(runtime, adapter=adapter), spanned, batch_tokens, show)
    else:
        logprobs = _causal(runtime, spanned, batch_tokens, show)
    return [
        [own[labels == number] for number in range(1, len(text.spans) + 1)]
        for own, labels, text in zip(logprobs, map(_labels, spanned), texts, strict=True)
    ]


def verified_hybrid(runtime: EncoderRuntime) -> ResolvedPlan:
    """Return the hybrid plan for a model, after verifying once that it reaches every layer.

    Raises:
        UnsupportedModelError: it does not.
    """
    plan = AttentionPlan("hybrid").resolve(runtime.n_layers)
    attach(runtime.model)
    verify_once(runtime.model, plan)
    return plan


@dataclass(frozen=True)
class _Spanned(Tokens):
    """A text as the model reads it; ``span`` is 0 for a token of the context and s for one of span s."""

    span: tuple[int, ...] = ()


def _infill(
    runtime: EncoderRuntime, texts: list[_Spanned], batch_tokens: int | None, show: bool | None
) -> list[np.ndarray]:
    plan = verified_hybrid(runtime)

    def states(batch: Sequence[Tokens]) -> tuple[Tensor, Tensor]:
        one = runtime.batch(batch)
        span_BT = torch.zeros_like(one.inputs["input_ids"])
        for row, (text, begin) in enumerate(zip(batch, one.begin.tolist(), strict=True)):
            assert isinstance(text, _Spanned)
            span_BT[row, begin : begin + len(text)] = torch.tensor(text.span)
        return runtime.run(one, BoundPlan(plan, one.real_BT, span_BT)), one.begin

    def wanted(row: int) -> tuple[Sequence[int], Sequence[int]]:
        places = [place for place, span in enumerate(texts[row].span) if span]
        return places, [texts[row].ids[place] for place in places]

    return token_logprobs(runtime, texts, wanted, states, batch_tokens=batch_tokens, show=show)


def _causal(
    runtime: EncoderRuntime, texts: list[_Spanned], batch_tokens: int | None, show: bool | None
) -> list[np.ndarray]:
    sequences = []
    for text in texts:
        places = [place for place, span in enumerate(text.span) if span]
        # What stands on the right of the last span would be read for nothing.
        sequences.append((text.ids[: places[-1] + 1], places[0]))
    whole = sequence_logprobs(runtime.model, runtime.tokenizer, sequences, batch_tokens=batch_tokens, show=show)
    return [
        logprobs[np.array(text.span[first : len(ids)]) > 0]
        for text, (ids, first), logprobs in zip(texts, sequences, whole, strict=True)
    ]


def _labels(text: _Spanned) -> np.ndarray:
    """Return the span of each token that belongs to one."""
    return np.array([span for span in text.span if span])


def _check_spans(text: SpannedText, index: int) -> None:
    if not text.spans:
        raise TextError(f"text {index} has no span")
    end = 0
    for start, stop in text.spans:
        if not end <= start < stop <= len(text.text) or not text.text[start:stop].strip():
            raise TextError(
                f"text {index}: the span of characters {start} to {stop} is empty, outside the text of "
                f"{len(text.text)} characters, or begins before an earlier one ends"
            )
        end = stop


def _spanned(tokens: Tokens, spans: tuple[tuple[int, int], ...], index: int, limit: int | None) -> _Spanned:
    """Say which tokens belong to which span."""
    if limit is not None and len(tokens) > limit:
        raise TextError(f"text {index} has {len(tokens)} tokens and the model's context ends at {limit}; shorten it")
    before = tokens.specials_before
    labels = [0] * len(tokens)
    for number, (start, stop) in enumerate(spans, start=1):
        for place, (first, last) in enumerate(tokens.offsets, start=before):
            if first < stop and last > start:
                if labels[place] or labels[max(0, place - 1)] not in (0, number):
                    raise TextError(f"text {index}: spans {number - 1} and {number} touch; make them one")
                labels[place] = number
    if labels[0]:
        raise TextError(
            f"text {index} begins with a span, and this tokenizer puts no beginning token in front of it to predict "
            "its first token from; give some text on its left"
        )
    return _Spanned(tokens.ids, tokens.text_from, before, tokens.offsets, span=tuple(labels))
