"""Log-probabilities of tokens under the untouched causal model: no plan is sent, no adapter takes part.

Knows: models, token ids, pairs of texts. Does not know: what the numbers are for.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from gerund.attention.layouts import decoder_layers
from gerund.errors import ModelError, TextError
from gerund.inference.encode.runtime import EncoderRuntime, in_batches
from gerund.inference.likelihood.lm_head import Read, TokenHead
from gerund.inference.tokens import InputFormat, Tokens, tokenize
from gerund.models.adapters import active_adapter
from gerund.models.architectures import demand_decoder_only
from gerund.settings.encoder import EncoderConfig
from gerund.settings.plan import AttentionPlan
from gerund.types import Rendered

# Token ids, and the place of the first one that is scored.
Scored = tuple[Sequence[int], int]
# Runs a batch: last hidden states ``(B, T, D)``, and where each text begins ``(B,)``.
States = Callable[[Sequence[Tokens]], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class PairLogprobs:
    """Log-probabilities of a text that was split in two.

    Attributes:
        prefix: of the tokens of the prefix, float32; none unless they were asked for. Without a beginning token
            the first one has nothing to be predicted from and is left out.
        continuation: of the tokens of the continuation, float32, each after all that precedes it.
        lost: how many tokens at the end of the continuation lay beyond the model's context and were not scored.
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
    """Return log p(token | all earlier tokens) for the tokens of each sequence from a given place on.

    Args:
        model: a causal language model.
        tokenizer: its tokenizer; only its padding side and limit are read here.
        sequences: token ids, and the place (1 or later) of the first one that is scored. The last token is only
            predicted, so a sequence may be one token longer than the model's context.
        read: what is read off the head in the place of log-probabilities.
        states: runs a batch; None reads every text by itself.
        batch_tokens: tokens a batch, padding included; None chooses by device.
        show: whether to show progress; None only on a terminal.

    Returns:
        One float32 array of natural logarithms a sequence, in their order.

    Raises:
        TextError: a sequence is longer than that, or scored from place 0, which nothing precedes.
        ModelError: the model's head cannot be run on its own.
        ResourceError: a single sequence does not fit the memory.
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

    Prefix and continuation are tokenised as the one text that they form (so the caller puts the space between
    them) and split at the character where the continuation begins; a token that holds characters of both
    belongs to the continuation. lm-evaluation-harness instead counts the tokens of the prefix alone and takes
    as many away; the two agree wherever the prefix's tokens do not change by what follows.

    What is too long for the model's context loses tokens at the left end of its prefix, after the special
    tokens that begin a text, and only then at the end of its continuation.

    Args:
        model: a causal language model.
        tokenizer: its tokenizer, a fast one.
        pairs: prefix and continuation. After an empty prefix the continuation starts from the beginning token;
            a tokenizer without one leaves the first token unscored.
        with_prefix: score the tokens of the prefixes too.
        states: as in ``sequence_logprobs``.
        batch_tokens: as in ``sequence_logprobs``.
        show: as in ``sequence_logprobs``.

    Returns:
        One result a pair, in their order.

    Raises:
        TextError: a continuation has no character but white space, or a text is not valid Unicode.
        ModelError: the tokenizer is not a fast one, or the model's head cannot be run on its own.
    """
    splits = _split_pairs(model, tokenizer, pairs)
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
    """Return how sure the model is at every token of continuations after their prefixes.

    The divergence of the even distribution over the vocabulary from the model's prediction, in nats: 0 where all
    tokens are as likely as each other. What the token is plays no part.

    Args:
        model: a causal language model.
        tokenizer: its tokenizer, a fast one.
        pairs: as in ``continuation_logprobs``.
        states: as in ``sequence_logprobs``.
        batch_tokens: as in ``sequence_logprobs``.
        show: as in ``sequence_logprobs``.

    Returns:
        One float32 array a pair, in their order.

    Raises:
        TextError: as in ``continuation_logprobs``.
        ModelError: as in ``continuation_logprobs``.
    """
    sequences = [(item.ids, item.split) for item in _split_pairs(model, tokenizer, pairs)]
    return sequence_logprobs(
        model, tokenizer, sequences, read=TokenHead.certainty, states=states, batch_tokens=batch_tokens, show=show
    )


def causal_runtime(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> EncoderRuntime:
    """Return what runs batches through the untouched model.

    Raises:
        UnsupportedModelError: an encoder of its own reads the text, so that nothing is a continuation of it.
    """
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
    """Return the log-probabilities of the tokens that are asked for, each read off the state before it.

    Args:
        runtime: the model, and how large a batch may be.
        texts: what the model reads; None is passed over.
        wanted: for the index of a text the places (1 or later) that are scored, and the tokens that stand there.
        states: runs a batch.
        read: what is read off the head in the place of log-probabilities.
        batch_tokens: as in ``sequence_logprobs``.
        show: as in ``sequence_logprobs``.

    Returns:
        One float32 array a text, empty where the text is None.

    Raises:
        ModelError: the model's head cannot be run on its own, or what it gives is not finite.
        ResourceError: a single text does not fit the memory.
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
        for row, own in zip(rows, np.split(logprobs, cuts), strict=True):
            results[row] = own

    in_batches(runtime, texts, states, keep, batch_tokens=batch_tokens, show=show, label="scoring")
    return results


@dataclass(frozen=True)
class _Split:
    """Token ids, where the text begins (1 or later), and where its continuation begins."""

    ids: list[int]
    text_from: int
    split: int
    lost: int


def _input(ids: Sequence[int], first: int, index: int, limit: int | None) -> Tokens | None:
    """Return what the model reads of a sequence: all but the last token, which is only predicted."""
    if first < 1:
        raise TextError(f"sequence {index} is scored from its first token, which nothing precedes")
    if limit is not None and len(ids) - 1 > limit:
        raise TextError(f"sequence {index} has {len(ids)} tokens and the model's context ends at {limit}")
    return Tokens(list(ids[:-1]), 0, 0) if len(ids) > first else None


def _split_pairs(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, pairs: Sequence[tuple[str, str]]
) -> list[_Split]:
    for index, (_, continuation) in enumerate(pairs):
        if not continuation.strip():
            raise TextError(f"continuation {index} is empty")
    limit = causal_runtime(model, tokenizer).max_length
    texts = tokenize(tokenizer, [_joined(*pair) for pair in pairs], InputFormat(), offsets=True)
    return [
        _split(tokenizer, tokens, len(prefix), limit)
        for (prefix, _), tokens in zip(pairs, texts, strict=True)
        if tokens is not None
    ]


def _joined(prefix: str, continuation: str) -> str:
    """Return both as one text; behind a rendered prefix the control tokens of the continuation are text."""
    if not isinstance(prefix, Rendered):
        return prefix + continuation
    end = len(prefix) + len(continuation)
    literal = [*prefix.literal, (len(prefix), end)]
    return Rendered(prefix + continuation, literal=literal, with_specials=prefix.with_specials)


def _split(tokenizer: PreTrainedTokenizerBase, tokens: Tokens, boundary: int, limit: int | None) -> _Split:
    """Split a text at a character, and cut it to the model's context."""
    before = tokens.specials_before
    ids = tokens.ids[: before + len(tokens.offsets)]  # some tokenizers close every text
    place = next(i for i, (start, end) in enumerate(tokens.offsets) if start >= boundary or end > boundary)
    split = before + place
    if not boundary and not before and tokenizer.bos_token_id is not None:
        ids, before, split = [tokenizer.bos_token_id, *ids], 1, 1
    excess = 0 if limit is None else max(0, len(ids) - 1 - limit)
    # Something has to precede the continuation.
    dropped = min(excess, max(0, split - max(1, before)))
    ids = ids[:before] + ids[before + dropped :]
    split -= dropped
    lost = excess - dropped
    ids = ids[: len(ids) - lost]
    return _Split(ids, max(1, before), max(1, split), lost)
