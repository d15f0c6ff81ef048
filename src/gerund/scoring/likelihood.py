"""Score continuations by a causal model's likelihoods: PMI, log-probabilities, self-certainty.

RankGen, appendix C.6 and Table 15. A measure takes ``Evidence``, which computes once what several measures need, and
returns one array of scores per prefix; higher is better.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from gerund.inference.encode.incremental import IncrementalEncoder, can_encode_incrementally
from gerund.inference.likelihood import PairLogprobs, causal_runtime, continuation_certainty, continuation_logprobs
from gerund.progress import progress
from gerund.scoring.word_overlap import WORD_MEASURES, OverlapScorer
from gerund.types import TextModel

# From this number of candidates per prefix on, the prefix is read once for all of them.
_WORTH_SHARING = 4

# States of texts that a search extends, by (prefix, the text that is read before the candidates).
States = dict[tuple[str, str], IncrementalEncoder]


class Evidence:
    """Log-probabilities of candidate continuations, each kind computed on first use.

    Args:
        lm: the model.
        prefixes: one text each.
        candidates: continuations of each prefix.
        seed: of the random measure.
        show: whether to show progress; None only on a terminal.
        joint: separates prefix and candidate.
        states: states of texts that a search extends, which is updated; None for texts that are scored once.
    """

    def __init__(
        self,
        lm: TextModel,
        prefixes: Sequence[str],
        candidates: Sequence[Sequence[str]],
        *,
        seed: int = 0,
        show: bool | None = None,
        joint: str = " ",
        states: States | None = None,
    ) -> None:
        self.prefixes, self.candidates, self.seed = prefixes, candidates, seed
        self._lm, self._show, self._joint, self._states = lm, show, joint, states

    @cached_property
    def conditional(self) -> list[list[PairLogprobs]]:
        """Every candidate after its prefix, the prefix's tokens included."""
        return self._read(partial(continuation_logprobs, with_prefix=True), self.prefixes)

    @cached_property
    def unconditional(self) -> list[list[PairLogprobs]]:
        """Every candidate after nothing."""
        return self._read(continuation_logprobs, [""] * len(self.prefixes))

    @cached_property
    def certainty(self) -> list[list[np.ndarray]]:
        """Self-certainty of the prediction of each token of every candidate after its prefix."""
        return self._read(continuation_certainty, self.prefixes)

    def _read(self, read: Callable[..., list[Any]], before: Sequence[str]) -> list[list[Any]]:
        """Return what ``read`` gives for every candidate after the text before it.

        A prefix with several candidates is read once for all of them, on models where this gives the same result.
        """
        model, tokenizer = self._lm.model, self._lm.tokenizer
        pairs = [
            [(text, self._joint + candidate) for candidate in candidates]
            for text, candidates in zip(before, self.candidates, strict=True)
        ]
        many = max(map(len, pairs), default=0) >= _WORTH_SHARING and any(before)
        if not (many or self._states is not None) or not _can_share(model, tokenizer):
            values = iter(read(model, tokenizer, [pair for group in pairs for pair in group], show=self._show))
            return [[next(values) for _ in group] for group in pairs]
        runtime = causal_runtime(model, tokenizer)
        results = []
        with progress(len(pairs), "scoring", show=self._show) as advance:
            for prefix, text, group in zip(self.prefixes, before, pairs, strict=True):
                incremental = IncrementalEncoder(runtime)
                if self._states is not None:
                    incremental = self._states.setdefault((prefix, text), incremental)
                # A character is at most one token, or nearly.
                room = incremental.room(max((len(a) + len(b) for a, b in group), default=0))
                settings = {"states": incremental.states, "batch_tokens": room, "show": False}
                results.append(read(model, tokenizer, group, **settings) if group else [])
                advance(1)
        return results


Measure = Callable[[Evidence], list[np.ndarray]]


def conditional_likelihood(evidence: Evidence) -> list[np.ndarray]:
    """Return log P(continuation | prefix)."""
    return [_array(_sum(pair.continuation) for pair in pairs) for pairs in evidence.conditional]


def average_conditional_likelihood(evidence: Evidence) -> list[np.ndarray]:
    """Return log P(continuation | prefix) / tokens of the continuation."""
    return [_array(_mean(pair.continuation) for pair in pairs) for pairs in evidence.conditional]


def average_unconditional_likelihood(evidence: Evidence) -> list[np.ndarray]:
    """Return log P(prefix + continuation) / tokens of both."""
    return [
        _array(_mean(np.concatenate([pair.prefix, pair.continuation])) for pair in pairs)
        for pairs in evidence.conditional
    ]


def pointwise_mutual_information(evidence: Evidence) -> list[np.ndarray]:
    """Return log P(continuation | prefix) - log P(continuation).

    Without a BOS token nothing precedes the first token of a continuation alone, so that token counts in neither.
    """
    return [
        _array(_information(given.continuation, alone.continuation) for given, alone in zip(*pairs, strict=True))
        for pairs in zip(evidence.conditional, evidence.unconditional, strict=True)
    ]


def self_certainty(evidence: Evidence) -> list[np.ndarray]:
    """Return the mean divergence of the uniform distribution from the predictions (Kang et al. 2025, equation 8).

    -1/(n V) times the sum of log(V p(token)) over all V tokens of the vocabulary and the n tokens of the continuation.
    """
    return [_array(_mean(certainty) for certainty in candidates) for candidates in evidence.certainty]


def shared_words(name: str, evidence: Evidence) -> list[np.ndarray]:
    """Return a measure of ``WORD_MEASURES`` for each candidate."""
    return [_array(scores) for scores in OverlapScorer(name).score(evidence.prefixes, evidence.candidates)]


def chance(evidence: Evidence) -> list[np.ndarray]:
    """Return random numbers; a candidate's depends only on the seed, its prefix and itself."""
    return [
        _array(_random_number(evidence.seed, prefix, candidate) for candidate in candidates)
        for prefix, candidates in zip(evidence.prefixes, evidence.candidates, strict=True)
    ]


MEASURES: Mapping[str, Measure] = {
    "avg_cll": average_conditional_likelihood,
    "cll": conditional_likelihood,
    "avg_ull": average_unconditional_likelihood,
    "pmi": pointwise_mutual_information,
    "self_certainty": self_certainty,
    **{name: partial(shared_words, name) for name in WORD_MEASURES},
    "random": chance,
}


class LikelihoodScorer:
    """A measure of ``MEASURES`` as a scorer of continuations, which bring the space that begins them.

    The likelihoods are those of ``lm``; its encoder has no effect.

    >>> import gerund
    >>> scorer = LikelihoodScorer(gerund.load(), "overlap")
    >>> scorer.score(["The old man saw the sea."], [[" The sea saw him.", " No rain."]])
    [[0.5, 0.0]]
    """

    def __init__(self, lm: TextModel, measure: str, *, seed: int = 0) -> None:
        self.name, self._lm, self._seed = measure, lm, seed
        self._states: States | None = None

    @property
    def reads_model(self) -> bool:
        """Whether the model reads the texts; shared words and chance need no model."""
        return self.name not in (*WORD_MEASURES, "random")

    def incremental(self) -> "LikelihoodScorer":
        """Return this scorer for a search that extends its continuations: only new tokens are read."""
        other = LikelihoodScorer(self._lm, self.name, seed=self._seed)
        other._states = {}
        return other

    def score(self, prefixes: Sequence[str], continuations: Sequence[Sequence[str]]) -> list[list[float]]:
        """Return a score for each continuation of each prefix; higher is better."""
        if self._states is not None:
            # A search takes a few prompts at a time and never returns to one.
            self._states = {key: states for key, states in self._states.items() if key[0] in prefixes}
        settings = {"seed": self._seed, "show": False, "joint": "", "states": self._states}
        evidence = Evidence(self._lm, prefixes, continuations, **settings)  # type: ignore[arg-type]
        return [scores.tolist() for scores in MEASURES[self.name](evidence)]


def _random_number(seed: int, prefix: str, candidate: str) -> float:
    content = f"{seed} {len(prefix)} {prefix}{candidate}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big") / 2**64


def _information(given: np.ndarray, alone: np.ndarray) -> float:
    return _sum(given[max(0, len(given) - len(alone)) :]) - _sum(alone)


def _mean(logprobs: np.ndarray) -> float:
    # An empty prefix and no BOS token may leave a single token, which nothing precedes.
    return _sum(logprobs) / max(1, len(logprobs))


def _sum(logprobs: np.ndarray) -> float:
    return float(logprobs.sum(dtype=np.float64))


def _array(values: Iterable[float]) -> np.ndarray:
    return np.array(list(values), dtype=np.float64)


def _can_share(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> bool:
    if model not in _incremental:
        _incremental[model] = can_encode_incrementally(causal_runtime(model, tokenizer))
    return _incremental[model]


_incremental: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()
