"""Scores of continuations by what a causal model's likelihoods tell.

RankGen, appendix C.6 and Table 15. A measure takes ``Evidence``, in which whatever several measures need is computed
once, and gives one array of scores a prefix, higher is better.

Knows: log-probabilities, words. Does not know: data sets, which candidate is right.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from gerund.inference.encode.incremental import IncrementalEncoder, can_encode_incrementally
from gerund.inference.likelihood import (
    PairLogprobs,
    causal_runtime,
    continuation_certainty,
    continuation_logprobs,
)
from gerund.progress import progress
from gerund.scoring.word_overlap import WORD_MEASURES, OverlapScorer
from gerund.text_encoder import TextEncoder

# From so many candidates of a prefix on it is read by itself.
_WORTH_SHARING = 4

# What was read of texts that are extended: by the prefix that they belong to and the text that they are read behind.
Known = dict[tuple[str, str], IncrementalEncoder]


class Evidence:
    """Prefixes with candidates, and what a model says of them.

    Args:
        lm: the model.
        prefixes: one text each.
        candidates: continuations of each prefix.
        seed: of the random measure.
        show: whether to show progress; None only on a terminal.
        joint: what stands between prefix and candidate.
        known: what was read of texts that were extended since, by prefix; kept and added to. None for texts that are
            scored once.
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
        known: Known | None = None,
    ) -> None:
        self.prefixes = prefixes
        self.candidates = candidates
        self.seed = seed
        self._lm = lm
        self._show = show
        self._joint = joint
        self._known = known

    @cached_property
    def conditional(self) -> list[list[PairLogprobs]]:
        """Every candidate after its prefix, the prefix's own tokens included."""
        return self._read(partial(continuation_logprobs, with_prefix=True), self.prefixes)

    @cached_property
    def unconditional(self) -> list[list[PairLogprobs]]:
        """Every candidate after nothing."""
        return self._read(continuation_logprobs, [""] * len(self.prefixes))

    @cached_property
    def certainty(self) -> list[list[np.ndarray]]:
        """For every token of a candidate after its prefix, how far the prediction of it is from none at all."""
        return self._read(continuation_certainty, self.prefixes)

    def _read(self, read: Callable[..., list[Any]], before: Sequence[str]) -> list[list[Any]]:
        """Return what ``read`` gives for every candidate behind the text before it.

        Where a prefix has several candidates it is read once for all of them, on models where that was found to give
        the same.
        """
        model, tokenizer = self._lm.model, self._lm.tokenizer
        pairs = [
            [(text, self._joint + candidate) for candidate in own]
            for text, own in zip(before, self.candidates, strict=True)
        ]
        many = max(map(len, pairs), default=0) >= _WORTH_SHARING and any(before)
        if not (many or self._known is not None) or not _can_share(model, tokenizer):
            rest = iter(read(model, tokenizer, [pair for own in pairs for pair in own], show=self._show))
            return [[next(rest) for _ in own] for own in pairs]
        runtime = causal_runtime(model, tokenizer)
        found = []
        with progress(len(pairs), "scoring", show=self._show) as advance:
            for prefix, text, own in zip(self.prefixes, before, pairs, strict=True):
                incremental = IncrementalEncoder(runtime)
                if self._known is not None:
                    incremental = self._known.setdefault((prefix, text), incremental)
                # A character is a token at most, or nearly.
                states, room = incremental.states, incremental.room(max((len(a) + len(b) for a, b in own), default=0))
                found.append(read(model, tokenizer, own, states=states, batch_tokens=room, show=False) if own else [])
                advance(1)
        return found


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


def shared_words(name: str, evidence: Evidence) -> list[np.ndarray]:
    """Return a measure of ``WORD_MEASURES`` for each candidate."""
    scores = OverlapScorer(name).score(evidence.prefixes, evidence.candidates)
    return [_array(own) for own in scores]


def chance(evidence: Evidence) -> list[np.ndarray]:
    """Return random numbers; that of a candidate depends on the seed, its prefix and itself alone."""
    return [
        _array(_random_number(evidence.seed, prefix, candidate) for candidate in own)
        for prefix, own in zip(evidence.prefixes, evidence.candidates, strict=True)
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
    """A measure as a scorer of continuations as they stand, the space that begins them included.

    Args:
        lm: the model whose likelihoods are read; its encoder plays no part.
        measure: a name of ``MEASURES``.
        seed: of the random measure.

    >>> import gerund
    >>> scorer = LikelihoodScorer(gerund.load(), "overlap")
    >>> scorer.score(["The old man saw the sea."], [[" The sea saw him.", " No rain."]])
    [[0.5, 0.0]]
    """

    def __init__(self, lm: TextEncoder, measure: str, *, seed: int = 0) -> None:
        self.name = measure
        self._lm = lm
        self._seed = seed
        self._known: Known | None = None

    @property
    def reads_model(self) -> bool:
        """Whether the model reads the texts; shared words and chance need none."""
        return self.name not in (*WORD_MEASURES, "random")

    def incremental(self) -> "LikelihoodScorer":
        """Return this scorer for a search, which extends its continuations: only what is new of them is read."""
        own = LikelihoodScorer(self._lm, self.name, seed=self._seed)
        own._known = {}
        return own

    def score(self, prefixes: Sequence[str], continuations: Sequence[Sequence[str]]) -> list[list[float]]:
        """Return a score for each continuation of each prefix; higher is better."""
        if self._known is not None:
            # A search goes through its prompts a few at a time, and comes back to none.
            self._known = {key: texts for key, texts in self._known.items() if key[0] in prefixes}
        evidence = Evidence(self._lm, prefixes, continuations, seed=self._seed, show=False, joint="", known=self._known)
        return [own.tolist() for own in MEASURES[self.name](evidence)]


def _random_number(seed: int, prefix: str, candidate: str) -> float:
    content = f"{seed} {len(prefix)} {prefix}{candidate}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big") / 2**64


def _information(given: np.ndarray, alone: np.ndarray) -> float:
    return _sum(given[max(0, len(given) - len(alone)) :]) - _sum(alone)


def _mean(logprobs: np.ndarray) -> float:
    # An empty prefix and no beginning token may leave a single token, which nothing precedes.
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
