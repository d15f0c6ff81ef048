"""Log-probabilities of tokens, continuations and spans.

Everything is scored by the base model with its causal mask, without an adapter; only ``span_logprobs`` can use MAGNET's
hybrid mask, which sees both sides of a span.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from gerund.attention.bound_plan import BoundPlan
from gerund.attention.interface import attach
from gerund.attention.layouts import decoder_layers
from gerund.attention.probe import verify_once
from gerund.checks import one_of
from gerund.errors import ModelError, TextError
from gerund.inference.encode.batches import in_batches
from gerund.inference.encode.runtime import EncoderRuntime
from gerund.inference.generate.detokenizing import vocabulary_bytes
from gerund.inference.lm_head import Read, TokenHead
from gerund.inference.tokens import InputFormat, Tokens, split_pairs, tokenize
from gerund.models.adapters import active_adapter
from gerund.models.architectures import demand_decoder_only
from gerund.settings.encoder import EncoderConfig
from gerund.settings.plan import AttentionPlan, ResolvedPlan
from gerund.types import TokenLogprob

# Token ids, and the position of the first one that is scored.
Scored = tuple[Sequence[int], int]
# Runs a batch: last hidden states ``(B, T, D)``, and the position at which each text begins ``(B,)``.
States = Callable[[Sequence[Tokens]], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class PairLogprobs:
    """Log-probabilities of a text that was split in two, float32.

    ``prefix`` is empty unless requested; without a BOS token it lacks the first token, which nothing predicts. ``lost``
    counts the tokens at the end of the continuation that did not fit the model's context and were not scored.
    """

    prefix: np.ndarray
    continuation: np.ndarray
    lost: int = 0


def sequence_logprobs(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sequences: Sequence[Scored],
    *,
    read: Read | None = None,
    states: States | None = None,
    batch_tokens: int | None = None,
    show: bool | None = None,
) -> list[np.ndarray]:
    """Return log p(token | all earlier tokens) of each sequence from a given position (1 or later) on, float32.

    The last token is only predicted, so a sequence may be one token longer than the model's context. ``read`` reads
    something else from the head instead. ``states`` runs a batch; None reads every text on its own.
    """
    runtime = causal_runtime(model, tokenizer)
    inputs = [_input(ids, first, index, runtime.max_length) for index, (ids, first) in enumerate(sequences)]

    def wanted(row: int) -> tuple[Sequence[int], Sequence[int]]:
        ids, first = sequences[row]
        return range(first, len(ids)), ids[first:]

    run = states or runtime.states
    return token_logprobs(runtime, inputs, wanted, run, read=read, batch_tokens=batch_tokens, show=show)


def continuation_logprobs(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    pairs: Sequence[tuple[str, str]],
    *,
    with_prefix: bool = False,
    states: States | None = None,
    batch_tokens: int | None = None,
    show: bool | None = None,
) -> list[PairLogprobs]:
    """Return the log-probabilities of continuations after their prefixes.

    Prefix and continuation are tokenized as one text (so the caller puts the space between them) and split at the
    character where the continuation begins; a token with characters of both belongs to the continuation.
    lm-evaluation-harness instead counts the tokens of the prefix alone; the two agree wherever the prefix's tokens do
    not depend on what follows. After an empty prefix the continuation starts from the BOS token.

    What is too long for the model's context loses tokens at the left end of its prefix, after the special tokens that
    begin a text, and only then at the end of its continuation.
    """
    splits = split_pairs(tokenizer, pairs, causal_runtime(model, tokenizer).max_length)
    sequences = [(item.ids, item.text_from if with_prefix else item.split) for item in splits]
    scores = sequence_logprobs(model, tokenizer, sequences, states=states, batch_tokens=batch_tokens, show=show)
    results = []
    for item, (_, first), logprobs in zip(splits, sequences, scores, strict=True):
        before = item.split - first
        results.append(PairLogprobs(logprobs[:before], logprobs[before:], item.lost))
    return results


def continuation_certainty(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    pairs: Sequence[tuple[str, str]],
    *,
    states: States | None = None,
    batch_tokens: int | None = None,
    show: bool | None = None,
) -> list[np.ndarray]:
    """Return how certain the model is at every token of continuations after their prefixes, float32.

    The divergence of the uniform distribution over the vocabulary from the model's prediction, in nats: 0 where all
    tokens are equally likely. The token itself does not matter.
    """
    splits = split_pairs(tokenizer, pairs, causal_runtime(model, tokenizer).max_length)
    sequences = [(item.ids, item.split) for item in splits]
    return sequence_logprobs(
        model, tokenizer, sequences, read=TokenHead.certainty, states=states, batch_tokens=batch_tokens, show=show
    )


def causal_runtime(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> EncoderRuntime:
    """Return the runtime of the base model with its causal mask."""
    demand_decoder_only(model, "say how probable a text is")
    plan = AttentionPlan("causal").resolve(len(decoder_layers(model)))
    return EncoderRuntime(model, tokenizer, EncoderConfig(), plan, sends_plan=False)


def token_logprobs(
    runtime: EncoderRuntime,
    texts: Sequence[Tokens | None],
    wanted: Callable[[int], tuple[Sequence[int], Sequence[int]]],
    states: States,
    *,
    read: Read | None = None,
    batch_tokens: int | None = None,
    show: bool | None = None,
) -> list[np.ndarray]:
    """Return the log-probabilities of tokens, float32, each read from the state before it.

    ``wanted`` returns for the index of a text the positions (1 or later) that are scored, and their tokens.
    """
    head = TokenHead(runtime.model)
    read = read or TokenHead.logprobs
    results = [np.zeros(0, dtype=np.float32) for _ in texts]

    def keep(rows: list[int], batch: list[Tokens], hidden_BTD: Tensor, begin: Tensor) -> None:
        del batch
        scored = [wanted(row) for row in rows]
        row_N = [index for index, (places, _) in enumerate(scored) for _ in places]
        place_N = [first + at - 1 for first, (places, _) in zip(begin.tolist(), scored, strict=True) for at in places]
        token_N = [token for _, tokens in scored for token in tokens]
        with active_adapter(runtime.adapter):  # an adapter may change the head too
            logprobs = read(head, hidden_BTD[row_N, place_N], torch.tensor(token_N, device=hidden_BTD.device))
        if not np.isfinite(logprobs).all():
            raise ModelError(
                f"this model's log-probabilities are not numbers in {runtime.model.dtype}; load it with another dtype"
            )
        cuts = np.cumsum([len(places) for places, _ in scored])[:-1]
        for row, values in zip(rows, np.split(logprobs, cuts), strict=True):
            results[row] = values

    in_batches(runtime, texts, states, keep, batch_tokens=batch_tokens, show=show, label="scoring")
    return results


def _input(ids: Sequence[int], first: int, index: int, limit: int | None) -> Tokens | None:
    """Return a sequence without its last token, which is only predicted."""
    if first < 1:
        raise TextError(f"sequence {index} is scored from its first token, which nothing precedes")
    if limit is not None and len(ids) - 1 > limit:
        raise TextError(f"sequence {index} has {len(ids)} tokens and the model's context ends at {limit}")
    return Tokens(list(ids[:-1]), 0, 0) if len(ids) > first else None


SpanMode = Literal["infill", "causal"]


@dataclass(frozen=True)
class SpannedText:
    """A text and the spans of it to score: (first character, end) of each, in order, with text between them.

    >>> SpannedText.between("He was at the", " gym", ". He ran.").spans
    ((13, 17),)
    """

    text: str
    spans: tuple[tuple[int, int], ...]

    @classmethod
    def between(cls, left: str, span: str, right: str) -> "SpannedText":
        """Return one span with its left and right context, spaces included."""
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
    """Return the log-probabilities of the tokens of each span, float32.

    ``infill`` uses MAGNET's hybrid mask (section 3.1), with the adapter: tokens of the context see all of the context,
    tokens of a span see the context and their own span so far, never another span. ``causal`` uses the base model.

    A token with any character of a span belongs to the span, so that nothing of the span is left in its context. The
    output at each token's predecessor predicts it, also the first of a span.
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
        [values[labels == number] for number in range(1, len(text.spans) + 1)]
        for values, labels, text in zip(logprobs, map(_labels, spanned), texts, strict=True)
    ]


def verified_hybrid(runtime: EncoderRuntime) -> ResolvedPlan:
    """Return the hybrid plan for a model, after verifying once that it takes effect in every layer."""
    plan = AttentionPlan("hybrid").resolve(runtime.n_layers)
    attach(runtime.model)
    verify_once(runtime.model, plan)
    return plan


@dataclass(frozen=True)
class _Spanned(Tokens):
    """A tokenized text; ``span`` is 0 for a token of the context and s for one of span s."""

    span: tuple[int, ...] = ()


def _infill(
    runtime: EncoderRuntime, texts: list[_Spanned], batch_tokens: int | None, show: bool | None
) -> list[np.ndarray]:
    plan = verified_hybrid(runtime)

    def states(batch: Sequence[Tokens]) -> tuple[Tensor, Tensor]:
        inputs = runtime.batch(batch)
        span_BT = torch.zeros_like(inputs.inputs["input_ids"])
        for row, (text, begin) in enumerate(zip(batch, inputs.begin.tolist(), strict=True)):
            assert isinstance(text, _Spanned)
            span_BT[row, begin : begin + len(text)] = torch.tensor(text.span)
        return runtime.run(inputs, BoundPlan(plan, inputs.real_BT, span_BT)), inputs.begin

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
        # The text after the last span does not matter.
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
    """Label the tokens of each span."""
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


NAN = float("nan")


def prompt_logprobs(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Sequence[int]], *, top: int = 0
) -> list[list[TokenLogprob]]:
    """Return the log-probability of each token of each prompt, with the ``top`` most likely tokens at its position.

    That of the first token is NaN: nothing precedes it.
    """

    def read(head: TokenHead, states_ND: Tensor, tokens_N: Tensor) -> np.ndarray:
        return head.alternatives(states_ND, tokens_N, top)

    scored = [(list(ids), 1) for ids in prompts]
    logprobs = sequence_logprobs(model, tokenizer, scored, read=read, show=False)
    spelled = vocabulary_bytes(tokenizer, int(model.get_input_embeddings().weight.shape[0]))

    def described(token: int, logprob: float, best: Sequence[TokenLogprob] = ()) -> TokenLogprob:
        return TokenLogprob(token, spelled[token], logprob, tuple(best))

    result = []
    for ids, rows in zip(prompts, logprobs, strict=True):
        tokens = [described(ids[0], NAN)]
        for token, row in zip(ids[1:], rows.tolist(), strict=True):
            best = [described(int(token), value) for token, value in zip(row[1 : 1 + top], row[1 + top :], strict=True)]
            tokens.append(described(token, row[0], best))
        result.append(tokens)
    return result
