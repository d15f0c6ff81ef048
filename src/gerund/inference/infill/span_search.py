"""Generate a span between its left and right context: greedy, sampled or by beam search, over a KV cache.

The context is run once, in the order left side without its last token, right side, last token of the left side,
each token at its true position; the last row predicts the first token of the span. Tokens of the context never
attend to the span (MAGNET, section 3.1), so every further token costs one row, and gives the same as running the
full text again.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from gerund.attention.bound_plan import BoundPlan, CachedHybrid
from gerund.attention.layer_state import CACHE
from gerund.attention.masked import has_indexer
from gerund.attention.recurrent import keeps_states
from gerund.errors import ModelError, UnsupportedModelError
from gerund.inference.encode.runtime import EncoderRuntime, takes_positions
from gerund.inference.generate.kv_cache import preallocated_cache
from gerund.inference.generate.sampling import Draws, chosen_tokens, draws_for, filters_of, request_seeds
from gerund.inference.lm_head import TokenHead
from gerund.models.adapters import active_adapter
from gerund.settings.sampling import Sampling


@dataclass(frozen=True)
class Context:
    """The text on both sides of a blank."""

    left: Sequence[int]  # at least one token; positions 0, 1, 2, ...
    right: Sequence[int] = ()
    right_at: Sequence[int] = ()  # positions of ``right``, which fix the length of this blank, and of later ones

    def __len__(self) -> int:
        return len(self.left) + len(self.right)


class SpanPass:
    """Contexts in a KV cache, one per row, each with the span that is being generated.

    ``sees_right`` uses MAGNET's hybrid mask; False the causal model, which has no right context.
    """

    def __init__(self, runtime: EncoderRuntime, contexts: Sequence[Context], *, sees_right: bool) -> None:
        if keeps_states(runtime.model):
            raise UnsupportedModelError(
                f"this {runtime.model.config.model_type} model keeps states of what it has read, which no cached text "
                "can be taken out of, so it fills no gaps and branches off no prompt"
            )
        if has_indexer(runtime.model):
            raise UnsupportedModelError(
                f"infilling isn't possible with this {runtime.model.config.model_type} model: it chooses by an indexer "
                "which cached tokens it looks at, and those of a span stand in another order"
            )
        self._runtime = runtime
        self._head = TokenHead(runtime.model)
        self._takes_positions = takes_positions(runtime.model)
        if sees_right and not self._takes_positions:
            raise UnsupportedModelError(
                f"this {runtime.model.config.model_type} model takes no position_ids, so the right side of a gap "
                "cannot be put where it belongs; take the method left-only"
            )
        self.cache = preallocated_cache()  # of all tokens, as their order is not that of the text
        ids_BT, position_BT, real_BT = _rows(contexts, runtime.tokenizer.pad_token_id or 0)
        self._real_BT = None if bool(real_BT.all()) else real_BT.to(runtime.device)
        self._next_B = torch.tensor([len(context.left) for context in contexts])
        self._plan = CachedHybrid(runtime.n_layers, position_BT, self._real_BT) if sees_right else None
        self.logprobs_BV = self._run(ids_BT, position_BT)

    def advance(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        """Select rows, one perhaps several times, and append a token to each; ``logprobs_BV`` is then what follows."""
        if list(rows) != list(range(len(self._next_B))):
            index = torch.tensor(list(rows))
            self.cache.batch_select_indices(index)
            self._next_B = self._next_B[index]
            if self._real_BT is not None:
                self._real_BT = self._real_BT[index.to(self._real_BT.device)]
            if self._plan is not None:
                self._plan.select(index)
        if self._real_BT is not None:
            self._real_BT = torch.cat([self._real_BT, torch.ones_like(self._real_BT[:, :1])], dim=1)
        if self._plan is not None:
            self._plan.append(self._next_B)
        self.logprobs_BV = self._run(torch.tensor(list(tokens))[:, None], self._next_B[:, None])
        self._next_B = self._next_B + 1

    def _run(self, ids_BT: Tensor, position_BT: Tensor) -> Tensor:
        return self.run(ids_BT, position_BT, cache=self.cache, plan=self._plan, real_BT=self._real_BT)

    @torch.no_grad()
    def run(
        self,
        ids_BT: Tensor,
        position_BT: Tensor,
        *,
        cache: DynamicCache,
        plan: BoundPlan | None,
        real_BT: Tensor | None = None,
    ) -> Tensor:
        """Extend a cache; return the log-probabilities ``(B, V)`` of what follows each row, float32.

        ``plan`` None uses the causal mask; ``real_BT`` then tells cached and new tokens from padding.
        """
        runtime = self._runtime
        extra: dict[str, Any] = {}
        if self._takes_positions:
            extra["position_ids"] = position_BT.to(runtime.device)
        if plan is not None:
            extra["attention_plan"] = plan
        elif real_BT is not None:
            extra["attention_mask"] = real_BT.long()
        with active_adapter(runtime.adapter):
            output = runtime.model.base_model(ids_BT.to(runtime.device), use_cache=True, **{CACHE: cache}, **extra)
            logits_BV = self._head.logits(output.last_hidden_state[:, -1]).float()
        if plan is not None:
            plan.check_all_asked(runtime.model.config.model_type)
        if not bool(logits_BV.isfinite().all()):
            raise ModelError(
                f"this model's logits are not numbers in {runtime.model.dtype}; load it with another dtype"
            )
        return logits_BV.log_softmax(dim=-1)


def _rows(contexts: Sequence[Context], pad: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids, positions and a mask of real tokens, ``(B, T)`` each, padded on the left."""
    longest = max(len(context) for context in contexts)
    ids_BT = torch.full((len(contexts), longest), pad)
    position_BT = torch.zeros_like(ids_BT)
    real_BT = torch.zeros_like(ids_BT, dtype=torch.bool)
    for row, context in enumerate(contexts):
        last = len(context.left) - 1
        begin = longest - len(context)
        ids_BT[row, begin:] = torch.tensor([*context.left[:-1], *context.right, context.left[-1]])
        position_BT[row, begin:] = torch.tensor([*range(last), *context.right_at, last])
        real_BT[row, begin:] = True
    return ids_BT, position_BT, real_BT


# Cached tokens of all rows of a pass. A single row may have more.
_TOKENS_AT_ONCE = 8192


@dataclass(frozen=True)
class Path:
    """A span that is being generated."""

    length: int  # tokens that it will have
    sample: int = 0  # its number among the spans of that length
    tokens: tuple[int, ...] = ()
    logprob: float = 0.0  # the sum over its tokens, without filters
    end: float | None = None  # of the token by which the model ended it; None where its length ended it

    @property
    def mean(self) -> float:
        """The mean log-probability of its tokens, and of its end where the model ended it."""
        return (self.logprob + (self.end or 0.0)) / max(1, len(self.tokens) + (self.end is not None))

    def grown(self, token: int, logprob: float) -> "Path":
        """Return the span with one token more."""
        return replace(self, tokens=(*self.tokens, token), logprob=self.logprob + logprob)


# Extends paths of equal length by a token: returns every new path with the index of the one that it extends.
Choose = Callable[[Sequence[Path], Tensor], list[tuple[int, Path]]]


def sampled(sampling: Sampling, banned: Sequence[int], place: int, *, not_first: Sequence[int] = ()) -> Choose:
    """Return a greedy or sampling ``Choose``.

    The samples of a path depend on the seed, the number of its blank (``place``), its length and its number alone. No
    span contains ``banned`` tokens or begins with ``not_first``.
    """
    filters = filters_of(sampling)
    [seed] = request_seeds(sampling, 1)
    draws: dict[tuple[int, int], Draws] = {}

    def choose(paths: Sequence[Path], logprobs_PV: Tensor) -> list[tuple[int, Path]]:
        scores_PV = _without(logprobs_PV, banned, () if paths[0].tokens else not_first)
        for filter_ in filters:
            scores_PV = filter_(scores_PV)
        of_path = None
        if not sampling.is_greedy:
            keys = [(path.length, path.sample) for path in paths]
            for key in keys:
                if key not in draws:
                    draws[key] = draws_for(seed, place, *key)
            of_path = [draws[key] for key in keys]
        token_P = chosen_tokens(scores_PV, of_path)
        own_P = logprobs_PV.gather(1, token_P[:, None])[:, 0]
        grown = zip(paths, token_P.tolist(), own_P.tolist(), strict=True)
        return [(index, path.grown(token, value)) for index, (path, token, value) in enumerate(grown)]

    return choose


def beamed(beams: int, banned: Sequence[int], *, not_first: Sequence[int] = ()) -> Choose:
    """Return a beam search over the spans of each length; spans of other lengths do not compete."""

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
                    logprob = float(logprobs_PV[row, token])
                    chosen.append((row, replace(paths[row].grown(token, logprob), sample=number)))
        return chosen

    return choose


def ended(choose: Choose, ends: Sequence[int]) -> Choose:
    """Return a ``Choose`` that ends a span early where ``choose`` takes an end token."""

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
    """Generate spans to their lengths; return them, shorter ones first.

    ``context`` returns the context of a blank of some length after the tokens that are on the left already. After every
    ``chunk`` tokens, these become context. A path may grow into ``rows_each`` rows.
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
    """Extend paths of equal length by up to ``chunk`` tokens."""
    # Samples of one length share one context, which is read once.
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
    """Yield paths in groups of bounded size; those of one length stay together, as beams must."""
    group: list[Path] = []
    used = 0
    for length in sorted({path.length for path in paths}):
        same_length = [path for path in paths if path.length == length]
        need = sum(cost(path) for path in same_length)
        if group and used + need > _TOKENS_AT_ONCE:
            yield group
            group, used = [], 0
        group += same_length
        used += need
    if group:
        yield group
