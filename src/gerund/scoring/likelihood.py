"""Scores of continuations by what a causal model's likelihoods tell.

RankGen, appendix C.6 and Table 15. A measure takes ``Evidence``, in which whatever several measures need is computed
once, and gives one array of scores a prefix, higher is better.

Knows: log-probabilities, words. Does not know: data sets, which candidate is right.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property

import numpy as np

from gerund.inference.likelihood import PairLogprobs, continuation_certainty, continuation_logprobs
from gerund.scoring.words import overlap, words_of
from gerund.text_encoder import TextEncoder


class Evidence:
    """Prefixes with candidates, and what a model says of them.

    Args:
        lm: the model.
        prefixes: one text each.
        candidates: continuations of each prefix.
        seed: of measures that draw.
        show: whether to show progress; None only on a terminal.
        joint: what stands between prefix and candidate.
    """

    def __init__(
        self,
        lm: TextEncoder,
        prefixes: Sequence[str],
        candidates: Sequence[Sequence[str]],
        *,
        seed: int = 0,
        show: bool | None = None,
        joint: str = " ",
    ) -> None:
        self.prefixes = prefixes
        self.candidates = candidates
        self.seed = seed
        self._lm = lm
        self._show = show
        self._joint = joint

    @cached_property
    def conditional(self) -> list[list[PairLogprobs]]:
        """Every candidate after its prefix, the prefix's own tokens included."""
        pairs = self._pairs()
        return self._grouped(
            continuation_logprobs(self._lm.model, self._lm.tokenizer, pairs, with_prefix=True, show=self._show)
        )

    @cached_property
    def unconditional(self) -> list[list[PairLogprobs]]:
        """Every candidate after nothing."""
        pairs = [("", self._joint + candidate) for own in self.candidates for candidate in own]
        return self._grouped(continuation_logprobs(self._lm.model, self._lm.tokenizer, pairs, show=self._show))

    @cached_property
    def certainty(self) -> list[list[np.ndarray]]:
        """For every token of a candidate after its prefix, how far the prediction of it is from none at all."""
        found = continuation_certainty(self._lm.model, self._lm.tokenizer, self._pairs(), show=self._show)
        rest = iter(found)
        return [[next(rest) for _ in own] for own in self.candidates]

    def _pairs(self) -> list[tuple[str, str]]:
        return [
            (prefix, self._joint + candidate)
            for prefix, own in zip(self.prefixes, self.candidates, strict=True)
            for candidate in own
        ]

    def _grouped(self, found: list[PairLogprobs]) -> list[list[PairLogprobs]]:
        rest = iter(found)
        return [[next(rest) for _ in own] for own in self.candidates]


Measure = Callable[[Evidence], list[np.ndarray]]


def conditional_likelihood(evidence: Evidence) -> list[np.ndarray]:
    """Return log P(continuation | prefix)."""
    return [_array(_sum(one.continuation) for one in own) for own in evidence.conditional]


def average_conditional_likelihood(evidence: Evidence) -> list[np.ndarray]:
    """Return log P(continuation | prefix) / tokens of the continuation."""
    return [_array(_mean(one.continuation) for one in own) for own in evidence.conditional]


def average_unconditional_likelihood(evidence: Evidence) -> list[np.ndarray]:
    """Return log P(prefix + continuation) / tokens of both."""
    return [
        _array(_mean(np.concatenate([one.prefix, one.continuation])) for one in own) for own in evidence.conditional
    ]


def pointwise_mutual_information(evidence: Evidence) -> list[np.ndarray]:
    """Return log P(continuation | prefix) - log P(continuation).

    Without a beginning token nothing precedes the first token of a continuation that stands alone, so it counts in
    neither.
    """
    return [
        _array(_information(given.continuation, alone.continuation) for given, alone in zip(*own, strict=True))
        for own in zip(evidence.conditional, evidence.unconditional, strict=True)
    ]


def self_certainty(evidence: Evidence) -> list[np.ndarray]:
    """Return the mean divergence of the even distribution from the predictions (Kang et al. 2025, equation 8).

    -1/(n V) times the sum of log(V p(token)) over all V tokens of the vocabulary and the n places of the
    continuation: how sure the model is, whatever stands there.
    """
    return [_array(_mean(one) for one in own) for own in evidence.certainty]


def unigram_overlap(evidence: Evidence) -> list[np.ndarray]:
    """Return the share of the continuation's words that occur in the prefix."""
    return [
        _array(overlap(words_of(candidate), words_of(prefix)) for candidate in own)
        for prefix, own in zip(evidence.prefixes, evidence.candidates, strict=True)
    ]


def chance(evidence: Evidence) -> list[np.ndarray]:
    """Return random numbers."""
    draw = np.random.default_rng(evidence.seed)
    return [draw.random(len(own)) for own in evidence.candidates]


MEASURES: Mapping[str, Measure] = {
    "avg_cll": average_conditional_likelihood,
    "cll": conditional_likelihood,
    "avg_ull": average_unconditional_likelihood,
    "pmi": pointwise_mutual_information,
    "self_certainty": self_certainty,
    "overlap": unigram_overlap,
    "random": chance,
}


class LikelihoodScorer:
    """A measure as a scorer of continuations as they stand, the space that begins them included.

    Args:
        lm: the model whose likelihoods are read; its encoder plays no part.
        measure: a name of ``MEASURES``.
        seed: of the measure that draws.

    >>> import gerund
    >>> scorer = LikelihoodScorer(gerund.load(), "overlap")
    >>> scorer.score(["The old man saw the sea."], [[" The sea saw him.", " No rain."]])
    [[0.5, 0.0]]
    """

    def __init__(self, lm: TextEncoder, measure: str, *, seed: int = 0) -> None:
        self.name = measure
        self._lm = lm
        self._seed = seed

    def score(self, prefixes: Sequence[str], continuations: Sequence[Sequence[str]]) -> list[list[float]]:
        """Return a score for each continuation of each prefix; higher is better."""
        evidence = Evidence(self._lm, prefixes, continuations, seed=self._seed, show=False, joint="")
        return [own.tolist() for own in MEASURES[self.name](evidence)]


def _information(given: np.ndarray, alone: np.ndarray) -> float:
    return _sum(given[max(0, len(given) - len(alone)) :]) - _sum(alone)


def _mean(logprobs: np.ndarray) -> float:
    # An empty prefix and no beginning token may leave a single token, which nothing precedes.
    return _sum(logprobs) / max(1, len(logprobs))


def _sum(logprobs: np.ndarray) -> float:
    return float(logprobs.sum(dtype=np.float64))


def _array(values: Iterable[float]) -> np.ndarray:
    return np.array(list(values), dtype=np.float64)
