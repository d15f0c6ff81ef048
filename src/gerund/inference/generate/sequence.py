"""Decoding state of one sequence: constraints, sampled tokens, stop conditions.

Sequences are independent, and a token depends on its sequence's logits and settings alone. So any sequences may share a
forward pass: those of one call or, in a server, those of different requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from gerund.arrays import Array, as_float32, as_like, copy_of, largest, library_of, log_softmax, masked
from gerund.errors import ConfigError, ModelError
from gerund.inference.generate.config import GenerationConfig
from gerund.inference.generate.constraints import CompiledConstraint, ConstraintState, TokenLimits, TokenLimitState
from gerund.inference.generate.detokenizing import TextTail, continuation_text, token_bytes
from gerund.inference.generate.sampling import Draws, chosen_tokens, filters_of, penalised
from gerund.settings.sampling import Sampling
from gerund.types import Generation, TokenLogprob, Usage

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Piece:
    """New text of one sequence, as it is streamed."""

    index: int
    """Number of the sequence, where a call generates several."""

    text: str
    """New characters; may be empty."""

    logprobs: tuple[TokenLogprob, ...] = ()
    """Those of the tokens that came with them, where they were requested."""

    result: Generation | None = None
    """The complete result, in the last piece of a sequence."""


Emit = Callable[[Piece], None]


class CancelFlag(Protocol):
    """Tells after each token whether to stop, as a ``threading.Event`` does."""

    def is_set(self) -> bool:
        """Return whether to stop."""


class Cancelled(Exception):  # noqa: N818 - nothing went wrong
    """The caller no longer waits for the text."""


@dataclass(frozen=True)
class Vocabulary:
    """What all sequences of a model share: its tokenizer, its vocabulary size and its end tokens."""

    tokenizer: PreTrainedTokenizerBase
    size: int
    ends: tuple[int, ...]


class RequestSettings:
    """A ``GenerationConfig`` resolved for one model; shared by all sequences of a request."""

    def __init__(self, vocabulary: Vocabulary, settings: GenerationConfig) -> None:
        self.vocabulary, self.settings = vocabulary, settings
        for name, tokens in (
            ("logit_bias", settings.sampling.logit_bias),
            ("stop_token_ids", settings.stop_token_ids),
            ("allowed_token_ids", settings.allowed_token_ids or ()),
        ):
            wrong = next((token for token in tokens if token >= vocabulary.size), None)
            if wrong is not None:
                raise ConfigError(
                    f"`{name}` has the token {wrong}; this model's tokens are 0 to {vocabulary.size - 1}."
                )
        added = vocabulary.tokenizer.added_tokens_decoder.items()
        # Stop strings that spell a control token, which never occurs in a text.
        special = {token.content: index for index, token in added if token.special}
        control = {text: special[text] for text in settings.stop if text in special}
        self.stop = tuple(text for text in settings.stop if text not in control)
        # What each token that ends the text is called in the result.
        self.stop_tokens: dict[int, str | int] = {token: token for token in settings.stop_token_ids}
        self.stop_tokens |= {token: text for text, token in control.items()}
        closing = {*(() if settings.ignore_eos else vocabulary.ends), *control.values()}
        self.ends = closing | self.stop_tokens.keys()
        self.constraint: CompiledConstraint | None = None
        if settings.constraint is not None:
            # Other stop tokens are ordinary ones to the constraint: "}" may be part of it and still end the text.
            self.constraint = CompiledConstraint(
                settings.constraint, vocabulary.tokenizer, vocabulary.size, sorted(closing)
            )
        self.spelled: dict[int, str] = {}
        if settings.spelled_tokens:
            self.spelled = {token: one.content for token, one in added if one.content in settings.spelled_tokens}
        self.limits = TokenLimits.of(settings, vocabulary.tokenizer, vocabulary.size, self.ends)
        # Sequences with equal sampling settings are filtered together.
        self.sampling = replace(settings.sampling, seed=None)
        self.filters = filters_of(settings.sampling)


class SequenceState:
    """One continuation of one prompt while it is generated.

    ``ids`` is the prompt, which a model with an encoder does not decode; ``room`` is the most tokens that may follow.
    """

    def __init__(
        self,
        request: RequestSettings,
        ids: list[int],
        room: int,
        draws: Draws,
        *,
        decodes_prompt: bool = True,
        index: int = 0,
        emit: Emit | None = None,
    ) -> None:
        self.request, self.draws, self.index = request, draws, index
        self.ids, self.room, self.is_done = ids, room, False
        self.cached_tokens = 0  # of the prompt, which an earlier prompt left in the cache
        self.first_token_at: int | None = None  # by time.perf_counter_ns()
        self._prompt, self._emit = ids if decodes_prompt else [], emit
        self._tokens: list[int] = []
        self._token_logprobs: list[float] = []
        self._logprobs: list[TokenLogprob] = []
        self._emitted_logprobs = 0
        self._finished = False
        self._stop_token: int | None = None
        self._constraint: ConstraintState | None = None if request.constraint is None else request.constraint.start()
        self._limits: TokenLimitState | None = None if request.limits is None else TokenLimitState(request.limits)
        self._tail: TextTail | None = None
        if emit is not None or request.stop:
            includes = request.settings.include_stop_str_in_output
            self._tail = TextTail(
                *(request.vocabulary.tokenizer, self._prompt, request.stop),
                includes_stop=includes,
                spelled=request.spelled,
            )
        self._counts_V: Array | None = None
        self._seen_V: Array | None = None

    @property
    def adjusts_logits(self) -> bool:
        """Whether ``adjusted_logits`` changes anything."""
        limited = self._constraint is not None or self._limits is not None
        return limited or self.request.settings.sampling.has_penalties

    def adjusted_logits(self, logits_V: Array) -> Array:
        """Apply bias and penalties, and mask the tokens that a constraint or limit forbids."""
        sampling, scores_V = self.request.settings.sampling, logits_V
        if sampling.has_penalties:
            if self._counts_V is None or self._seen_V is None:
                library = library_of(logits_V)
                self._counts_V = library.zeros_like(logits_V)
                self._seen_V = library.zeros_like(logits_V, dtype=library.bool)
                self._seen_V[self._prompt] = True
            scores_V = penalised(sampling, logits_V, self._counts_V, self._seen_V)
        allowed_V = None if self._constraint is None else self._constraint.allowed(len(scores_V))
        if self._limits is not None:
            allowed_V = self._limits.allowed(allowed_V)
        if allowed_V is not None:
            scores_V = masked(scores_V, as_like(~allowed_V, scores_V))
        return scores_V

    def put(self, token: int, logprob: float, top: Sequence[tuple[int, float]]) -> None:
        """Append the chosen token, with the base model's log-probabilities of it and of the most likely tokens."""
        request = self.request
        if self.first_token_at is None:
            self.first_token_at = time.perf_counter_ns()
        self._token_logprobs.append(logprob)
        is_end = token in request.ends
        if is_end:
            self._finished, self._stop_token = True, token if token in request.stop_tokens else None
            if self._stop_token is None or not request.settings.include_stop_str_in_output:
                self._close()
                return
        self._tokens.append(token)
        if self._counts_V is not None and self._seen_V is not None:
            self._counts_V[token] += 1
            self._seen_V[token] = True
        if request.settings.logprobs is not None:
            self._logprobs.append(self._token_logprob(token, logprob, top))
        may_stop = len(self._tokens) >= request.settings.min_tokens
        piece = "" if self._tail is None else self._tail.put(token, may_stop=may_stop)
        if self._limits is not None:
            self._limits.put(token)
        if self._constraint is not None and not is_end:
            self._constraint.put(token)
        is_complete = self._constraint is not None and self._constraint.is_complete
        is_stopped = self._tail is not None and self._tail.stopped is not None
        self._finished = is_end or is_complete or is_stopped
        if self._finished or len(self._tokens) >= self.room:
            self._close(piece)
        elif self._emit is not None and piece:
            self._emit(Piece(self.index, piece, self._new_logprobs()))

    def _close(self, piece: str = "") -> None:
        self.is_done = True
        self._constraint = self._limits = self._counts_V = self._seen_V = None
        if self._tail is not None:
            piece += self._tail.end()
            self._finished = self._finished or self._tail.stopped is not None
        if self._emit is not None:
            self._emit(Piece(self.index, piece, self._new_logprobs(), self.result()))

    def _new_logprobs(self) -> tuple[TokenLogprob, ...]:
        new = tuple(self._logprobs[self._emitted_logprobs :])
        self._emitted_logprobs = len(self._logprobs)
        return new

    def _token_logprob(self, token: int, logprob: float, top: Sequence[tuple[int, float]]) -> TokenLogprob:
        tokenizer = self.request.vocabulary.tokenizer
        best = tuple(TokenLogprob(other, token_bytes(tokenizer, other), value) for other, value in top)
        return TokenLogprob(token, token_bytes(tokenizer, token), logprob, best)

    def result(self) -> Generation:
        """Return the continuation so far."""
        stopped: str | int | None = None if self._tail is None else self._tail.stopped
        if self._tail is not None and stopped is not None:
            text = self._tail.text
        else:
            request = self.request
            text = continuation_text(request.vocabulary.tokenizer, self._prompt, self._tokens, request.spelled)
        if self._stop_token is not None:
            stopped = self.request.stop_tokens[self._stop_token]
        scores = self._token_logprobs
        return Generation(
            text,
            list(self._tokens),
            sum(scores) / len(scores) if scores else 0.0,
            self._finished,
            stop=stopped,
            logprobs=None if self.request.settings.logprobs is None else list(self._logprobs),
            usage=Usage(len(self.ids), len(scores), self.cached_tokens),
        )


def room_after(tokens: int, max_new_tokens: int, limit: int | None) -> int:
    """Return how many tokens may follow a prompt, given the context length."""
    return max_new_tokens if limit is None else min(max_new_tokens, limit - tokens)


Fail = Callable[[SequenceState, Exception], None]


def advance(sequences: Sequence[SequenceState], logits_BV: Array, fail: Fail | None = None) -> list[int]:
    """Choose and append the next token of each sequence that is not done; return the tokens.

    ``fail`` is called with a sequence that cannot continue, and why: its constraint allows no token, or its ``emit``
    raised an exception. The others continue, and its token means nothing. None raises the first exception.
    """
    logits_BV = as_float32(logits_BV)
    logprobs_BV = log_softmax(logits_BV)
    failed: set[int] = set()

    def report(index: int, error: Exception) -> None:
        if fail is None:
            raise error
        failed.add(index)
        fail(sequences[index], error)

    # One NaN or infinite logit makes all log-probabilities of its sequence NaN.
    for index in np.flatnonzero(library_of(logprobs_BV).isnan(logprobs_BV[:, 0]).tolist()).tolist():
        report(index, ModelError("This model's logits are NaN or infinite in its dtype. Load it with another `dtype`."))
        logits_BV = copy_of(logits_BV)
        logits_BV[index] = logprobs_BV[index] = 0.0
    tokens = _chosen(sequences, _adjusted(sequences, logits_BV, report))
    logprobs = logprobs_BV[list(range(len(tokens))), tokens].tolist()
    for index, (sequence, token, logprob) in enumerate(zip(sequences, tokens, logprobs, strict=True)):
        if index in failed:
            continue
        count = sequence.request.settings.logprobs
        try:
            sequence.put(token, logprob, _most_likely(logprobs_BV[index], count) if count else ())
        except Exception as error:
            report(index, error)
    return tokens


def _adjusted(sequences: Sequence[SequenceState], logits_BV: Array, report: Callable[[int, Exception], None]) -> Array:
    if not any(sequence.adjusts_logits for sequence in sequences):
        return logits_BV
    scores = list(logits_BV)
    for index, sequence in enumerate(sequences):
        try:
            if sequence.adjusts_logits:
                scores[index] = sequence.adjusted_logits(scores[index])
        except Exception as error:
            report(index, error)
    return library_of(logits_BV).stack(scores)


def _chosen(sequences: Sequence[SequenceState], scores_BV: Array) -> list[int]:
    groups: dict[Sampling, list[int]] = {}
    for index, sequence in enumerate(sequences):
        groups.setdefault(sequence.request.sampling, []).append(index)
    chosen = [0] * len(sequences)
    for sampling, indices in groups.items():
        group_BV = scores_BV if len(groups) == 1 else scores_BV[indices]
        for filter_ in sequences[indices[0]].request.filters:
            group_BV = filter_(group_BV)
        draws = None if sampling.is_greedy else [sequences[index].draws for index in indices]
        for index, token in zip(indices, chosen_tokens(group_BV, draws).tolist(), strict=True):
            chosen[index] = token
    return chosen


def _most_likely(logprobs_V: Array, count: int) -> list[tuple[int, float]]:
    [values], [places] = largest(logprobs_V[None], count)
    return list(zip(places.tolist(), values.tolist(), strict=True))
