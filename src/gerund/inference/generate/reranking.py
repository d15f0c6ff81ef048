"""Generation guided by a scorer: sample several continuations, keep the best, continue them.

RankGen, section 2.3 and Figure 5. A prompt is read once and its continuations share its keys and values; a kept
continuation is extended from its own cached states, so the time grows with the new tokens alone.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from threading import Event
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from gerund.arrays import counts_of
from gerund.attention.interface import FUSED
from gerund.attention.ragged_batch import Branches, Trunk
from gerund.errors import ConfigError, GerundError, ModelError
from gerund.inference.encode.runtime import EncoderRuntime, takes_positions
from gerund.inference.generate.config import require_new_tokens
from gerund.inference.generate.detokenizing import continuation_text
from gerund.inference.generate.kv_cache import PreallocatedLayer, preallocated_cache
from gerund.inference.generate.prompts import Prompt, prompt_ids
from gerund.inference.generate.sampling import (
    Draws,
    chosen_tokens,
    draws_for,
    filters_of,
    penalised,
    request_seeds,
    sample_seed,
)
from gerund.inference.generate.sequence import Cancelled, Piece, room_after
from gerund.inference.infill.span_search import Context, SpanPass
from gerund.inference.likelihood import causal_runtime
from gerund.inference.text_ids import common_prefix_length, end_ids
from gerund.inference.tokens import context_length, rotary_limit, rotary_side
from gerund.settings.sampling import Rerank, Sampling
from gerund.types import Candidate, Ranked, Usage


class BranchPass:
    """Prompts in a shared KV cache, and continuations of them of equal length that grow token by token."""

    def __init__(self, runtime: EncoderRuntime, prompts: Sequence[Sequence[int]]) -> None:
        self._runtime = runtime
        self._prompts = SpanPass(runtime, [Context(ids) for ids in prompts], sees_right=False)
        self.logprobs_BV = self._prompts.logprobs_BV
        lengths = [len(ids) for ids in prompts]
        self._trunks = [
            [_without_padding(layer, row, length) for row, length in enumerate(lengths)]
            for layer in self._prompts.cache.layers
        ]
        self._next_B = torch.tensor(lengths)
        self._prompt_of_B = torch.arange(len(prompts))
        self._branches: DynamicCache = preallocated_cache()

    def advance(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        """Select rows, a row perhaps several times, and append one token to each; ``logprobs_BV`` is then what follows.

        Rows of one prompt stay together, in the order of the prompts.
        """
        if list(rows) != list(range(len(self._next_B))):
            index = torch.tensor(list(rows))
            if self._branches.get_seq_length():
                self._branches.batch_select_indices(index)
            self._next_B, self._prompt_of_B = self._next_B[index], self._prompt_of_B[index]
        counts = torch.bincount(self._prompt_of_B, minlength=len(self._trunks[0])).tolist()
        plan = Branches(self._trunks, counts)
        ids_B1 = torch.tensor(list(tokens))[:, None]
        self.logprobs_BV = self._prompts.run(ids_B1, self._next_B[:, None], cache=self._branches, plan=plan)
        self._next_B = self._next_B + 1


def can_branch(runtime: EncoderRuntime) -> bool:
    """Whether a model gives the same with a shared KV cache as with a copy per row; checked once per model."""
    model = runtime.model
    if model not in _known:
        _known[model] = _tried(runtime)
    return _known[model]


def _tried(runtime: EncoderRuntime) -> bool:
    model = runtime.model
    if model.config._attn_implementation != FUSED or not takes_positions(model):
        return False
    size = int(model.get_input_embeddings().weight.shape[0])
    prompts = [[(7 * place + 3) % size for place in range(count)] for count in (9, 6)]
    steps: tuple[Any, ...] = (([0, 0, 1], [1, 2, 3]), ([0, 2], [4, 5]))
    try:
        with torch.no_grad():
            passes = (
                BranchPass(runtime, prompts),
                SpanPass(runtime, [Context(ids) for ids in prompts], sees_right=False),
            )
            for rows, tokens in steps:
                for one in passes:
                    one.advance(rows, [token % size for token in tokens])
    except (GerundError, AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        return False
    own_BV, other_BV = (one.logprobs_BV for one in passes)
    # The mean over all tokens: a single one may be rounded badly. Measured on 20 architectures in bfloat16: rounding is
    # 0.6 to 2.4% of the spread (21% where it changes a token's experts), a prompt that is not seen 24% and more.
    difference = float((own_BV - other_BV).square().mean().sqrt() / other_BV.std(dim=-1).mean())
    return difference < (1e-3 if model.dtype == torch.float32 else 0.1)


def _without_padding(layer: Any, row: int, length: int) -> Trunk:
    """Return a row's keys and values ``(key heads, T, head_dim)`` without its left padding."""
    if not isinstance(layer, PreallocatedLayer):
        raise TypeError("the cache is of another kind")
    keys: Tensor = layer.keys[row, :, -length:]
    return keys, layer.values[row, :, -length:]


_known: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()


# Replaces the random numbers of a finished continuation, which take 5 kB.
SPENT = Draws()


@dataclass(frozen=True)
class Hypothesis:
    """A continuation so far, with its text and score once it was scored."""

    tokens: tuple[int, ...]  # without an end token
    logprob: float  # the sum under the base model, that of the end token included
    ended: bool  # by the model
    full: bool  # no room for more tokens
    draws: Draws
    text: str = ""
    score: float = 0.0

    @property
    def can_continue(self) -> bool:
        """Whether it can be continued."""
        return not (self.ended or self.full)

    def as_candidate(self) -> Candidate:
        """Return it as a result."""
        scored = len(self.tokens) + self.ended
        mean = self.logprob / scored if scored else 0.0
        return Candidate(self.text, list(self.tokens), mean, self.ended, self.score)


@dataclass
class SearchedPrompt:
    """A prompt and the search for its continuation."""

    number: int
    seed: int
    ids: list[int]
    room: int
    beams: list[Hypothesis]
    history: list[list[Candidate]]
    n_tokens: int = 0  # of all continuations

    def result(self) -> Ranked:
        """Return the best continuation, with all that competed."""
        kept = [beam.as_candidate() for beam in self.beams]
        best = kept[0]
        return Ranked(
            *(best.text, best.token_ids, best.score, best.finished, best.rank_score, kept, self.history),
            usage=Usage(len(self.ids), self.n_tokens),
        )


def nothing(seed: int) -> Hypothesis:
    """Return the empty continuation of a prompt, with the random numbers of plain generation."""
    return Hypothesis((), 0.0, False, False, Draws(sample_seed(seed, 0)))


# Sequences per pass; the continuations of one prompt always stay together.
_ROWS_AT_ONCE = 64

# From so many continuations on, one shared KV cache of their prompt is faster than one per continuation.
_WORTH_SHARING = 4

# Continuations per pass where they are ranked only when they are finished; the default samples are far fewer.
# Only the tokens of a finished one are stored, so any number of them fits.
_PART = 256

# Scores the continuations of some of the prompts: their numbers, and the texts so far of each, equal and blank ones
# included.
Judge = Callable[[Sequence[int], Sequence[Sequence[str]]], Sequence[Sequence[float]]]


# What is continued in a round: index of its prompt, the hypothesis, its row of the cache, and the key of its random
# numbers: round, rank of the beam, number of the sample.
_Start = tuple[int, Hypothesis, int, tuple[int, int, int]]


def search(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    judge: Judge,
    rerank: Rerank,
    *,
    max_new_tokens: int,
    sampling: Sampling,
    cancelled: Event | None = None,
) -> list[Ranked]:
    """Continue each prompt by what ``judge`` scores best; return one result per prompt.

    The first round samples ``samples * beams`` continuations of the prompt, every later round ``samples`` of each beam;
    an ended continuation keeps competing. Equal ones count once. The first sample of a continuation uses its random
    numbers, so that one beam of one sample is plain sampling. Continuations that are ranked only when they are finished
    are generated in parts of bounded size; others all together. A result
    depends on its prompt and seed alone; its usage counts the tokens of all that competed.
    """
    results: dict[int, Ranked] = {}
    for run in _searches(model, tokenizer, prompts, judge, rerank, max_new_tokens, sampling, cancelled):
        for _ in run.rounds():
            pass
        results |= {prompt.number: prompt.result() for prompt in run.prompts}
    return [results[number] for number in range(len(prompts))]


def stream_search(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: Prompt,
    judge: Judge,
    rerank: Rerank,
    *,
    max_new_tokens: int,
    sampling: Sampling,
    cancelled: Event | None = None,
) -> Iterator[Piece]:
    """Continue one prompt as ``search`` does, yielding the text that all beams agree on; the result comes last."""
    [run] = _searches(model, tokenizer, [prompt], judge, rerank, max_new_tokens, sampling, cancelled)
    [state] = run.prompts
    emitted = ""
    for _ in run.rounds():
        # A replacement character at the end is a letter whose other bytes are still to come.
        settled = _common_prefix([beam.text for beam in state.beams]).rstrip("\ufffd")
        if len(settled) > len(emitted):
            yield Piece(0, settled[len(emitted) :])
            emitted = settled
    yield Piece(0, state.beams[0].text[len(emitted) :], result=state.result())


def require_sampling(rerank: Rerank, sampling: Sampling) -> None:
    """Raise ``ConfigError`` where sampling can't give different continuations, or needs logits."""
    if sampling.is_greedy and rerank.width > 1:
        raise ConfigError(
            "Greedy continuations of one prompt are all the same, so there is nothing to rank. "
            "Set a temperature above 0, such as 1."
        )
    if sampling.repetition_penalty != 1:
        raise ConfigError(
            "`repetition_penalty` can't be combined with `rerank`, which uses probabilities instead of logits. Use "
            "`frequency_penalty` or `presence_penalty`."
        )


def _searches(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    judge: Judge,
    rerank: Rerank,
    max_new_tokens: int,
    sampling: Sampling,
    cancelled: Event | None,
) -> Iterator["_Search"]:
    """Validate all prompts, then yield searches of a few prompts each."""
    max_new_tokens = require_new_tokens(max_new_tokens)
    require_sampling(rerank, sampling)
    ids = [prompt_ids(model, tokenizer, prompt, index=index) for index, prompt in enumerate(prompts)]
    seeds = request_seeds(sampling, len(ids))
    limit = context_length(model.config, tokenizer)
    turning = rotary_limit(model.config)
    sides = [rotary_side(len(searches), room_after(len(searches), max_new_tokens, limit), turning) for searches in ids]
    for group in _groups([len(searches) for searches in ids], sides, rerank.width):
        searches = [
            SearchedPrompt(
                *(number, seeds[number], ids[number], room_after(len(ids[number]), max_new_tokens, limit)),
                beams=[nothing(seeds[number])],
                history=[],
            )
            for number in group
        ]
        yield _Search(model, tokenizer, searches, judge, rerank, sampling, cancelled or Event())


class _Search:
    """The search for the continuations of a few prompts."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        prompts: list[SearchedPrompt],
        judge: Judge,
        rerank: Rerank,
        sampling: Sampling,
        cancelled: Event,
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.cancelled = cancelled
        self.prompts, self.judge, self.rerank = prompts, judge, rerank
        self.sampling = sampling
        self.filters = filters_of(sampling)
        self.ends = set(end_ids(model, tokenizer))
        self.cache = self._read()

    def _read(self) -> BranchPass | SpanPass:
        """Return the prompts in a cache."""
        runtime, ids = causal_runtime(self.model, self.tokenizer), [prompt.ids for prompt in self.prompts]
        if self.rerank.width >= _WORTH_SHARING and can_branch(runtime):
            return BranchPass(runtime, ids)
        return SpanPass(runtime, [Context(prompt) for prompt in ids], sees_right=False)

    def rounds(self) -> Iterator[None]:
        """Generate until all beams are finished, pausing after each round."""
        # The cache row of each unfinished beam, by prompt.
        rows = [[place] for place in range(len(self.prompts))]
        turn = 0
        while any(rows):
            written, new_rows = self._round(turn, rows)
            self._score(written)
            rows = self._keep(written, new_rows)
            turn += 1
            yield

    def _round(self, turn: int, rows: list[list[int]]) -> tuple[list[list[Hypothesis]], list[list[int | None]]]:
        """Generate one round; return each prompt's new hypotheses and the rows of those that may continue."""
        started: list[_Start] = []
        for place, prompt in enumerate(self.prompts):
            going = [beam for beam in prompt.beams if beam.can_continue]
            count = self.rerank.samples if turn else self.rerank.width
            for rank, (beam, row) in enumerate(zip(going, rows[place], strict=True)):
                for sample in range(count):
                    started.append((place, beam, row, (turn, rank, sample)))
        written: list[list[Hypothesis]] = [[] for _ in self.prompts]
        last_row: list[list[int | None]] = [[] for _ in self.prompts]
        # What continues after a round needs its cache, so such a round can't be divided.
        size = _PART if self.rerank.every is None else max(1, len(started))
        for begin in range(0, len(started), size):
            if begin:
                self.cache = self._read()
            self._write_part(started[begin : begin + size], written, last_row)
        return written, last_row

    def _write_part(
        self, part: "list[_Start]", written: list[list[Hypothesis]], last_row: list[list[int | None]]
    ) -> None:
        """Generate some hypotheses of a round from the current cache."""
        growing: list[tuple[int, int]] = []  # prompt, and number among its hypotheses
        parents: list[int] = []
        for place, beam, row, key in part:
            growing.append((place, len(written[place])))
            parents.append(row)
            # The first sample has the random numbers of the beam itself.
            draws = draws_for(self.prompts[place].seed, 0, *key) if key[-1] else beam.draws.copy()
            written[place].append(replace(beam, draws=draws))
            last_row[place].append(None)
        for step in range(self.rerank.every or max(prompt.room for prompt in self.prompts)):
            if step:
                tokens = [written[place][index].tokens[-1] for place, index in growing]
                self.cache.advance(parents, tokens)
                parents = list(range(len(growing)))
            self._write(growing, parents, written)
            going_on = [
                (one, row)
                for one, row in zip(growing, parents, strict=True)
                if written[one[0]][one[1]].can_continue
            ]  # fmt: skip
            growing, parents = [one for one, _ in going_on], [row for _, row in going_on]
            if not growing:
                break
        for (place, index), row in zip(growing, parents, strict=True):
            last_row[place][index] = row

    def _write(self, growing: list[tuple[int, int]], rows: list[int], written: list[list[Hypothesis]]) -> None:
        """Append one token to each hypothesis."""
        if self.cancelled.is_set():
            raise Cancelled
        logprobs_PV = self.cache.logprobs_BV[rows]
        scores_PV = logprobs_PV
        if self.sampling.has_penalties:
            texts = [written[place][index].tokens for place, index in growing]
            pairs = zip(logprobs_PV, texts, strict=True)
            scores_PV = torch.stack([penalised(self.sampling, one_V, counts_of(text, one_V)) for one_V, text in pairs])
        for filter_ in self.filters:
            scores_PV = filter_(scores_PV)
        draws = None
        if not self.sampling.is_greedy:
            draws = [written[place][index].draws for place, index in growing]
        token_P = chosen_tokens(scores_PV, draws)
        own_P = logprobs_PV.gather(1, token_P[:, None])[:, 0]
        for (place, index), token, added in zip(growing, token_P.tolist(), own_P.tolist(), strict=True):
            before = written[place][index]
            self.prompts[place].n_tokens += 1
            ended = token in self.ends
            tokens = before.tokens if ended else (*before.tokens, token)
            full = not ended and len(tokens) >= self.prompts[place].room
            own_draws, logprob = SPENT if ended or full else before.draws, before.logprob + added
            written[place][index] = Hypothesis(tokens, logprob, ended, full, own_draws)

    def _score(self, written: list[list[Hypothesis]]) -> None:
        """Give the new hypotheses their texts and scores, in place."""
        texts = [
            [continuation_text(self.tokenizer, prompt.ids, list(one.tokens)) for one in hypotheses]
            for prompt, hypotheses in zip(self.prompts, written, strict=True)
        ]
        places = [place for place, listed in enumerate(texts) if listed]
        scores = self.judge([self.prompts[place].number for place in places], [texts[place] for place in places])
        for place, given_scores in zip(places, scores, strict=True):
            for index, (text, score) in enumerate(zip(texts[place], given_scores, strict=True)):
                if math.isnan(score):
                    raise ModelError("the scorer gave a score that is not a number")
                written[place][index] = replace(written[place][index], text=text, score=float(score))

    def _keep(self, written: list[list[Hypothesis]], rows: list[list[int | None]]) -> list[list[int]]:
        """Choose the beams of each prompt and select the unfinished ones in the cache; return their rows."""
        kept_rows: list[int] = []
        last: list[int] = []
        going_rows: list[list[int]] = []
        for prompt, new, new_rows in zip(self.prompts, written, rows, strict=True):
            if not new:  # all its beams are finished
                going_rows.append([])
                continue
            ended = [(beam, None) for beam in prompt.beams if not beam.can_continue]
            unique: dict[tuple[tuple[int, ...], bool], tuple[Hypothesis, int | None]] = {}
            for one, row in [*ended, *zip(new, new_rows, strict=True)]:
                unique.setdefault((one.tokens, one.ended), (one, row))
            ranked = sorted(unique.values(), key=lambda pair: -pair[0].score)
            prompt.history.append([one.as_candidate() for one, _ in ranked])
            best = ranked[: self.rerank.beams]
            prompt.beams = [one for one, _ in best]
            going = [(one, row) for one, row in best if row is not None]
            going_rows.append(list(range(len(kept_rows), len(kept_rows) + len(going))))
            kept_rows += [row for _, row in going]
            last += [one.tokens[-1] for one, _ in going]
        if kept_rows:
            self.cache.advance(kept_rows, last)
        return going_rows


def _common_prefix(texts: Sequence[str]) -> str:
    """Return the longest common prefix of all texts.

    >>> _common_prefix(["He left.", "He lied.", "He l"])
    'He l'
    """
    first, last = min(texts), max(texts)  # all others are between these two
    return first[: common_prefix_length(first, last)]


def _groups(lengths: Sequence[int], sides: Sequence[int], width: int) -> Iterator[list[int]]:
    """Yield the numbers of prompts that are continued together, those of like length and on one side of a limit."""
    order = sorted(range(len(lengths)), key=lambda number: lengths[number])
    size = max(1, _ROWS_AT_ONCE // width)
    for _, alike in groupby(order, key=lambda number: sides[number]):
        group = list(alike)
        yield from (group[start : start + size] for start in range(0, len(group), size))
