"""Decoding state of one sequence: constraints, sampled tokens, stop conditions.

Sequences are independent, and a token depends on its sequence's logits and settings alone. So any sequences may share a
forward pass: those of one call or, in a server, those of different requests.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from gerund.errors import ConfigError, ModelError
from gerund.inference.generate.config import GenerationConfig
from gerund.inference.generate.constraints import CompiledConstraint, ConstraintState, TokenLimits, TokenLimitState
from gerund.inference.generate.detokenizing import TextTail, continuation_text, token_bytes
from gerund.inference.generate.sampling import chosen_tokens, filters_of, penalised
from gerund.settings.sampling import Sampling
from gerund.types import Generation, TokenLogprob, Usage


@dataclass(frozen=True)
class Piece:
    """A part of a text as it comes.

    Attributes:
        index: the number of the text, where several are written at a time.
        text: its new characters; perhaps none.
        logprobs: those of the tokens that came with them, where they were asked for.
        result: the whole, in the last piece of the text.
    """

    index: int
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    result: Generation | None = None


Emit = Callable[[Piece], None]


@dataclass(frozen=True)
class Vocabulary:
    """What rows of one model share.

    Attributes:
        tokenizer: the tokenizer.
        size: how many tokens the model chooses from.
        ends: the tokens that end a text.
    """

    tokenizer: PreTrainedTokenizerBase
    size: int
    ends: tuple[int, ...]


class RequestSettings:
    """A ``GenerationConfig``, read for one model: what all rows of a request have in common."""

    def __init__(self, vocabulary: Vocabulary, settings: GenerationConfig) -> None:
        self.vocabulary, self.settings = vocabulary, settings
        for name, tokens in (
            ("logit_bias", settings.sampling.logit_bias),
            ("stop_token_ids", settings.stop_token_ids),
            ("allowed_token_ids", settings.allowed_token_ids or ()),
        ):
            wrong = next((token for token in tokens if token >= vocabulary.size), None)
            if wrong is not None:
                raise ConfigError(f"{name} names the token {wrong}, and this model's are 0 to {vocabulary.size - 1}")
        control = _stop_tokens(vocabulary.tokenizer, settings.stop)
        self.stop = tuple(one for one in settings.stop if one not in control)
        # What each token that ends the text is called in the result.
        self.stop_tokens: dict[int, str | int] = {token: token for token in settings.stop_token_ids}
        self.stop_tokens |= {token: text for text, token in control.items()}
        closing = {*(() if settings.ignore_eos else vocabulary.ends), *control.values()}
        self.ends = closing | self.stop_tokens.keys()
        self.form: CompiledConstraint | None = None
        if settings.constraint is not None:
            # Other stop tokens are ordinary ones to the form: "}" may stand in it and still end the text.
            self.form = CompiledConstraint(settings.constraint, vocabulary.tokenizer, vocabulary.size, sorted(closing))
        self.limits = TokenLimits.of(settings, vocabulary.tokenizer, vocabulary.size, self.ends)
        # Rows whose tokens are filtered alike are filtered together.
        self.sampling = replace(settings.sampling, seed=None)
        self.filters = filters_of(settings.sampling)


class SequenceState:
    """One continuation of one prompt."""

    def __init__(
        self,
        writing: RequestSettings,
        prompt: Sequence[int],
        room: int,
        generator: torch.Generator,
        *,
        prompt_tokens: int | None = None,
        index: int = 0,
        emit: Emit | None = None,
    ) -> None:
        self.writing, self.generator, self.index = writing, generator, index
        self.is_done = False
        self._prompt, self._room, self._emit = list(prompt), room, emit
        self._prompt_tokens = len(prompt) if prompt_tokens is None else prompt_tokens
        self._tokens: list[int] = []
        self._own_logprobs: list[float] = []
        self._logprobs: list[TokenLogprob] = []
        self._given = 0
        self._finished = False
        self._stop_token: int | None = None
        self._follower: ConstraintState | None = None if writing.form is None else writing.form.follower()
        self._limited: TokenLimitState | None = None if writing.limits is None else writing.limits.follower()
        needs_text = emit is not None or bool(writing.stop)
        self._tail: TextTail | None = None
        if needs_text:
            includes = writing.settings.include_stop_str_in_output
            self._tail = TextTail(writing.vocabulary.tokenizer, self._prompt, writing.stop, includes_stop=includes)
        self._counts_V: Tensor | None = None
        self._seen_V: Tensor | None = None

    @property
    def adjusts(self) -> bool:
        """Whether ``adjusted`` changes anything."""
        limited = self._follower is not None or self._limited is not None
        return limited or self.writing.settings.sampling.has_penalties

    def adjusted(self, logits_V: Tensor) -> Tensor:
        """Return logits after bias and penalties, with minus infinity for what the form or a limit does not allow."""
        sampling, scores_V = self.writing.settings.sampling, logits_V
        if sampling.has_penalties:
            scores_V = penalised(sampling, logits_V, *self._counted(logits_V))
        allowed_V = None if self._follower is None else self._follower.allowed(len(scores_V))
        if self._limited is not None:
            allowed_V = self._limited.allowed(allowed_V)
        if allowed_V is not None:
            scores_V = scores_V.masked_fill(~allowed_V.to(scores_V.device), float("-inf"))
        return scores_V

    def _counted(self, like_V: Tensor) -> tuple[Tensor, Tensor]:
        """Return how often the text so far has each token, and which tokens text and prompt have."""
        if self._counts_V is None or self._seen_V is None:
            self._counts_V = torch.zeros_like(like_V)
            self._seen_V = torch.zeros_like(like_V, dtype=torch.bool)
            self._seen_V[self._prompt] = True
        return self._counts_V, self._seen_V

    def put(self, token: int, logprob: float, top: Sequence[tuple[int, float]]) -> None:
        """Take the token that was chosen, with the model's own log-probabilities of it and of the best ones."""
        writing = self.writing
        self._own_logprobs.append(logprob)
        is_end = token in writing.ends
        if is_end:
            self._finished, self._stop_token = True, token if token in writing.stop_tokens else None
            if self._stop_token is None or not writing.settings.include_stop_str_in_output:
                self._close()
                return
        self._tokens.append(token)
        if self._counts_V is not None and self._seen_V is not None:
            self._counts_V[token] += 1
            self._seen_V[token] = True
        if writing.settings.logprobs is not None:
            self._logprobs.append(self._described(token, logprob, top))
        may_stop = len(self._tokens) >= writing.settings.min_tokens
        piece = "" if self._tail is None else self._tail.put(token, may_stop=may_stop)
        if self._limited is not None:
            self._limited.put(token)
        if self._follower is not None and not is_end:
            self._follower.put(token)
        is_complete = self._follower is not None and self._follower.is_complete
        is_stopped = self._tail is not None and self._tail.stopped is not None
        self._finished = is_end or is_complete or is_stopped
        if self._finished or len(self._tokens) >= self._room:
            self._close(piece)
        elif self._emit is not None and piece:
            self._emit(Piece(self.index, piece, self._new_logprobs()))

    def _close(self, piece: str = "") -> None:
        self.is_done = True
        self._follower = self._limited = self._counts_V = self._seen_V = None
        if self._tail is not None:
            piece += self._tail.end()
            self._finished = self._finished or self._tail.stopped is not None
        if self._emit is not None:
            self._emit(Piece(self.index, piece, self._new_logprobs(), self.result()))

    def _new_logprobs(self) -> tuple[TokenLogprob, ...]:
        new = tuple(self._logprobs[self._given :])
        self._given = len(self._logprobs)
        return new

    def _described(self, token: int, logprob: float, top: Sequence[tuple[int, float]]) -> TokenLogprob:
        tokenizer = self.writing.vocabulary.tokenizer
        best = tuple(TokenLogprob(one, token_bytes(tokenizer, one), value) for one, value in top)
        return TokenLogprob(token, token_bytes(tokenizer, token), logprob, best)

    def result(self) -> Generation:
        """Return the continuation as it is."""
        stopped: str | int | None = None if self._tail is None else self._tail.stopped
        if self._tail is not None and stopped is not None:
            text = self._tail.text
        else:
            text = continuation_text(self.writing.vocabulary.tokenizer, self._prompt, self._tokens)
        if self._stop_token is not None:
            stopped = self.writing.stop_tokens[self._stop_token]
        scores = self._own_logprobs
        return Generation(
            text,
            list(self._tokens),
            sum(scores) / len(scores) if scores else 0.0,
            self._finished,
            stop=stopped,
            logprobs=None if self.writing.settings.logprobs is None else list(self._logprobs),
            usage=Usage(self._prompt_tokens, len(scores)),
        )


Fail = Callable[[SequenceState, Exception], None]


def advance(rows: Sequence[SequenceState], logits_BV: Tensor, fail: Fail | None = None) -> list[int]:
    """Choose the next token of each row and put it there."""
    logits_BV = logits_BV.float()
    plain_BV = torch.log_softmax(logits_BV, dim=-1)
    failed: set[int] = set()

    def no_longer(place: int, error: Exception) -> None:
        if fail is None:
            raise error
        failed.add(place)
        fail(rows[place], error)

    # One logit that is no number, or infinite, makes all log-probabilities of its row no numbers.
    for place in plain_BV[:, 0].isnan().nonzero()[:, 0].tolist():
        no_longer(place, ModelError("the model's logits are not numbers in its type; load it with another dtype"))
        logits_BV = logits_BV.clone()
        logits_BV[place] = plain_BV[place] = 0.0
    tokens = _chosen(rows, _adjusted(rows, logits_BV, no_longer))
    places = torch.tensor(tokens, device=plain_BV.device)[:, None]
    logprobs = plain_BV.gather(1, places)[:, 0].tolist()
    for place, (row, token, logprob) in enumerate(zip(rows, tokens, logprobs, strict=True)):
        if place in failed:
            continue
        count = row.writing.settings.logprobs
        try:
            row.put(token, logprob, _best(plain_BV[place], count) if count else ())
        except Exception as error:
            no_longer(place, error)
    return tokens


def _adjusted(rows: Sequence[SequenceState], logits_BV: Tensor, no_longer: Callable[[int, Exception], None]) -> Tensor:
    """Return logits after what each row does to its own."""
    if not any(row.adjusts for row in rows):
        return logits_BV
    scores = list(logits_BV)
    for place, row in enumerate(rows):
        try:
            if row.adjusts:
                scores[place] = row.adjusted(scores[place])
        except Exception as error:
            no_longer(place, error)
    return torch.stack(scores)


def _chosen(rows: Sequence[SequenceState], scores_BV: Tensor) -> list[int]:
    """Return a token for each row."""
    groups: dict[Sampling, list[int]] = {}
    for place, row in enumerate(rows):
        groups.setdefault(row.writing.sampling, []).append(place)
    chosen = [0] * len(rows)
    for sampling, places in groups.items():
        own_BV = scores_BV if len(groups) == 1 else scores_BV[places]
        for filter_ in rows[places[0]].writing.filters:
            own_BV = filter_(None, own_BV)
        generators = None if sampling.is_greedy else [rows[place].generator for place in places]
        for place, token in zip(places, chosen_tokens(own_BV, generators).tolist(), strict=True):
            chosen[place] = token
    return chosen


def _best(logprobs_V: Tensor, count: int) -> list[tuple[int, float]]:
    """Return the most probable tokens with their log-probabilities."""
    if not count:
        return []
    best = logprobs_V.topk(min(count, len(logprobs_V)))
    return list(zip(best.indices.tolist(), best.values.tolist(), strict=True))


def _stop_tokens(tokenizer: PreTrainedTokenizerBase, stop: Sequence[str]) -> dict[str, int]:
    """Return the stop strings that spell a control token, which no text has in it."""
    special = {added.content: token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    return {text: special[text] for text in stop if text in special}
