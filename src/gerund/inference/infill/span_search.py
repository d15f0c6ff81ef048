"""Ways to write a span of a given length: the most probable token each time, sampling, or beams.

Knows: log-probabilities, ``Sampling``, chunks. Does not know: texts, tokenizers, which of the spans is best.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gerund.inference.encode.runtime import EncoderRuntime
from gerund.inference.generate.sampling import chosen_tokens, filters_of, generator_for, request_seeds
from gerund.inference.infill.span_pass import Context, SpanPass
from gerund.settings.sampling import Sampling

# Cached tokens of all rows that are written at once. A row alone is always written.
_TOKENS_AT_ONCE = 8192


@dataclass(frozen=True)
class Path:
    """A span that is being written.

    Attributes:
        length: how many tokens it will have.
        sample: which of the spans of that length it is.
        tokens: its tokens so far.
        logprob: the sum of their log-probabilities under the model as it is, without filters.
        end: the log-probability of the token by which the model ended it; None where its length ended it.
    """

    length: int
    sample: int = 0
    tokens: tuple[int, ...] = ()
    logprob: float = 0.0
    end: float | None = None

    @property
    def mean(self) -> float:
        """The mean log-probability of its tokens, and of its end where the model ended it."""
        return (self.logprob + (self.end or 0.0)) / max(1, len(self.tokens) + (self.end is not None))

    def grown(self, token: int, logprob: float) -> "Path":
        """Return the span with one token more."""
        return replace(self, tokens=(*self.tokens, token), logprob=self.logprob + logprob)


# What follows each path: for every path that goes on, which of the given ones it grew from, and itself. The given ones
# have as many tokens as each other.
Choose = Callable[[Sequence[Path], Tensor], list[tuple[int, Path]]]


def sampled(sampling: Sampling, banned: Sequence[int], place: int, *, not_first: Sequence[int] = ()) -> Choose:
    """Return what takes one token a path: the most probable one, or a sample.

    The samples of a path depend on the seed, ``place``, its length and its number, and on nothing that is written
    beside it.

    Args:
        sampling: how tokens are chosen.
        banned: tokens that never occur in a span.
        place: which gap of the text it is.
        not_first: tokens that no span begins with.
    """
    filters = filters_of(sampling)
    [seed] = request_seeds(sampling, 1)
    generators: dict[tuple[int, int], torch.Generator] = {}

    def choose(paths: Sequence[Path], logprobs_PV: Tensor) -> list[tuple[int, Path]]:
        scores_PV = _without(logprobs_PV, banned, () if paths[0].tokens else not_first)
        for filter_ in filters:
            scores_PV = filter_(None, scores_PV)
        of_path = None
        if not sampling.is_greedy:
            keys = [(path.length, path.sample) for path in paths]
            for key in keys:
                if key not in generators:
                    generators[key] = generator_for(seed, place, *key)
            of_path = [generators[key] for key in keys]
        token_P = chosen_tokens(scores_PV, of_path)
        own_P = logprobs_PV.gather(1, token_P[:, None])[:, 0]
        grown = zip(paths, token_P.tolist(), own_P.tolist(), strict=True)
        return [(index, path.grown(token, own)) for index, (path, token, own) in enumerate(grown)]

    return choose


def beamed(beams: int, banned: Sequence[int], *, not_first: Sequence[int] = ()) -> Choose:
    """Return what keeps the ``beams`` most probable spans of each length after every token.

    Spans of one length are compared with each other only, so no correction for length is needed.
    """

    def choose(paths: Sequence[Path], logprobs_PV: Tensor) -> list[tuple[int, Path]]:
        scores_PV = _without(logprobs_PV, banned, () if paths[0].tokens else not_first)
        so_far_P = torch.tensor([path.logprob for path in paths], device=scores_PV.device)
        total_PV = so_far_P[:, None] + scores_PV
        chosen = []
        for length in dict.fromkeys(path.length for path in paths):
            rows = [index for index, path in enumerate(paths) if path.length == length]
            total_N = total_PV[rows].flatten()
            best = total_N.topk(min(beams, len(total_N)))
            for number, (total, place) in enumerate(zip(best.values.tolist(), best.indices.tolist(), strict=True)):
                if total > float("-inf"):
                    row, token = rows[place // total_PV.shape[1]], place % total_PV.shape[1]
                    own = float(logprobs_PV[row, token])
                    chosen.append((row, replace(paths[row].grown(token, own), sample=number)))
        return chosen

    return choose


def ended(choose: Choose, ends: Sequence[int]) -> Choose:
    """Return ``choose`` with spans that end before their length, where it takes one of the tokens that end a text."""

    def choose_or_end(paths: Sequence[Path], logprobs_PV: Tensor) -> list[tuple[int, Path]]:
        chosen = []
        for parent, path in choose(paths, logprobs_PV):
            before = paths[parent]
            if path.tokens[-1] in ends:
                path = replace(before, length=len(before.tokens), end=path.logprob - before.logprob)
            chosen.append((parent, path))
        return chosen

    return choose_or_end


def write(
    runtime: EncoderRuntime,
    context: Callable[[int, tuple[int, ...]], Context],
    paths: Sequence[Path],
    choose: Choose,
    *,
    sees_right: bool,
    chunk: int,
    rows_each: int = 1,
) -> list[Path]:
    """Write spans until each has its length.

    Args:
        runtime: the model.
        context: what stands around a gap of a given length, after the tokens of it that are on the left already.
        paths: the spans, empty.
        choose: how tokens are chosen.
        sees_right: as in ``SpanPass``.
        chunk: how many tokens are written before they become context for what follows them.
        rows_each: how many rows one of ``paths`` may grow into.

    Returns:
        The finished spans, shorter ones first.
    """
    finished: list[Path] = []
    for group in _groups(paths, lambda path: rows_each * (len(context(path.length, ())) + path.length)):
        growing = group
        while growing:
            grown = _write_chunk(runtime, context, growing, choose, sees_right=sees_right, chunk=chunk)
            finished += [path for path in grown if len(path.tokens) == path.length]
            growing = [path for path in grown if len(path.tokens) < path.length]
    return sorted(finished, key=lambda path: (path.length, path.sample))


def _write_chunk(
    runtime: EncoderRuntime,
    context: Callable[[int, tuple[int, ...]], Context],
    paths: Sequence[Path],
    choose: Choose,
    *,
    sees_right: bool,
    chunk: int,
) -> list[Path]:
    """Return the paths with up to ``chunk`` tokens more. All have as many tokens as each other."""
    # Samples of one length begin with one context, which is read once.
    starts = list(dict.fromkeys((path.length, path.tokens) for path in paths))
    row_of = {start: row for row, start in enumerate(starts)}
    span_pass = SpanPass(runtime, [context(*start) for start in starts], sees_right=sees_right)
    rows = [row_of[path.length, path.tokens] for path in paths]
    goal = len(paths[0].tokens) + chunk
    done: list[Path] = []
    growing = list(paths)
    while True:
        chosen = choose(growing, span_pass.logprobs_BV[rows])
        done += [path for _, path in chosen if len(path.tokens) == min(goal, path.length)]
        chosen = [(parent, path) for parent, path in chosen if len(path.tokens) < min(goal, path.length)]
        if not chosen:
            return done
        span_pass.advance([rows[parent] for parent, _ in chosen], [path.tokens[-1] for _, path in chosen])
        growing = [path for _, path in chosen]
        rows = list(range(len(growing)))


def _without(logprobs_PV: Tensor, *banned: Sequence[int]) -> Tensor:
    scores_PV = logprobs_PV.clone()
    for tokens in banned:
        scores_PV[:, [token for token in tokens if token < scores_PV.shape[1]]] = float("-inf")
    return scores_PV


def _groups(paths: Sequence[Path], cost: Callable[[Path], int]) -> Iterator[list[Path]]:
    """Yield paths in groups that fit the memory; those of one length stay together, as beams must."""
    group: list[Path] = []
    used = 0
    for length in sorted({path.length for path in paths}):
        own = [path for path in paths if path.length == length]
        need = sum(cost(path) for path in own)
        if group and used + need > _TOKENS_AT_ONCE:
            yield group
            group, used = [], 0
        group += own
        used += need
    if group:
        yield group
