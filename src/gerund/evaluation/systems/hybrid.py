"""An encoder's ranking and BM25's joined into one, as ``gerund search`` joins them, or by places alone.

Knows: fusion's methods by name, MTEB's search protocol. Does not know: files, metrics, how either ranks, how they are
joined (``retrieval/fusion``).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from gerund.errors import ConfigError
from gerund.evaluation.systems.base import Encoder, ScoresCandidates, System, cosine_scores
from gerund.evaluation.systems.bm25 import BM25, BM25Search, BM25System
from gerund.retrieval import hybrid_search
from gerund.text_analysis import VERSION
from gerund.types import Scorer

HYBRID = "hybrid"

DEPTH = 1000
"""How many documents of each ranking count."""

RRF = "rrf"


@dataclass(frozen=True)
class Fusion:
    """How the two rankings are joined.

    Attributes:
        method: ``convex`` or ``rrf``.
        weight: what the vectors count in a convex sum; None for what the encoder was tuned to, else the usual.
    """

    method: str = "convex"
    weight: float | None = None

    def for_encoder(self, own: float | None) -> "Fusion":
        """Return the fusion with its weight worked out.

        Args:
            own: the encoder's weight; None where nobody has tuned it.
        """
        if self.method == RRF or self.weight is not None:
            return self
        return Fusion(self.method, hybrid_search.WEIGHT if own is None else own)


def fusion_named(name: str) -> Fusion | None:
    """Return what a name among the models means: ``hybrid``, ``hybrid:rrf``, ``hybrid:0.4``; None for another name.

    Raises:
        ConfigError: there is something else behind the colon.

    >>> fusion_named("hybrid:0.4"), fusion_named("bm25")
    (Fusion(method='convex', weight=0.4), None)
    """
    if name == HYBRID:
        return Fusion()
    kind, colon, rest = name.partition(":")
    if kind != HYBRID or not colon:
        return None
    if rest == RRF:
        return Fusion(RRF)
    try:
        return Fusion(weight=hybrid_search.check_weight(float(rest)))
    except ValueError:
        raise ConfigError(f"{name!r}: behind {HYBRID}: stands {RRF} or the weight of the vectors, 0 to 1") from None


class HybridSystem(System):
    """An encoder and BM25 together: a document scores by what it has in the two rankings.

    It takes part where documents or candidates are ranked, and nowhere else.

    Args:
        dense: the encoder; its vectors are the ones that are kept.
        how: how the rankings are joined; a weight that is left out is the encoder's own.
    """

    def __init__(self, dense: Encoder, how: Fusion = Fusion()) -> None:
        said = "" if how == Fusion() else " (RRF)" if how.method == RRF else f" ({how.weight:g} vectors)"
        super().__init__(f"{dense.label} + BM25{said}")
        self.dense = dense
        self.fusion = how.for_encoder(dense.fusion_weight)
        self._lexical = BM25System()

    @property
    def name(self) -> str:
        """What the encoder was loaded from."""
        return self.dense.name

    @property
    def fingerprint(self) -> str:
        """The encoder's fingerprint, and how BM25 takes part."""
        return f"{self.dense.fingerprint}{self._suffix}"

    @property
    def cache_key(self) -> str:
        """The encoder's key, and how BM25 takes part."""
        return f"{self.dense.cache_key}{self._suffix}-words{VERSION}"

    @property
    def _suffix(self) -> str:
        return "+bm25" if self.fusion.method == RRF else f"+bm25-cosines-{self.fusion.weight:g}"

    @property
    def scorer(self) -> Any:
        """The encoder's own scorer of continuations."""
        return self.dense.scorer

    def describe(self) -> dict[str, Any]:
        """Return what the encoder is, and how BM25 takes part."""
        # Without weights: it shares with the model alone nothing that depends only on them.
        own = {name: value for name, value in self.dense.describe().items() if name != "weights"}
        how = {"fusion": self.fusion.method} | ({} if self.fusion.weight is None else {"weight": self.fusion.weight})
        return {**own, "fingerprint": self.fingerprint, "with": BM25, **how}

    def search_model(self, prompts: Mapping[str, str], *, show: bool | None = None) -> "HybridSearch":
        """Return both rankings as one."""
        return HybridSearch(self.dense.search_model(prompts, show=show), self.fusion)

    def find_scorer(self, name: str, *, seed: int) -> Scorer | None:
        """Return the scorer by which the model ranks; None for vectors.

        Raises:
            ConfigError: there is no scorer of this name, or no language model for it.
            ModelError: the folder holds no scorer.
        """
        if isinstance(self.dense, ScoresCandidates):
            return self.dense.find_scorer(name, seed=seed)
        if name:
            raise ConfigError(f"{self.dense.label} compares vectors of whole texts and takes no scorer such as {name}")
        return None

    def candidate_scores(
        self, queries: Sequence[str], candidates: Sequence[str], *, scorer: Scorer | None, prompt: str | None
    ) -> np.ndarray:
        """Join the two scores of each candidate, ``(queries, candidates)`` float64."""
        if isinstance(self.dense, ScoresCandidates):
            dense_NM = self.dense.candidate_scores(queries, candidates, scorer=scorer, prompt=prompt)
        else:
            dense_NM = cosine_scores(self.dense, queries, candidates, prompt)
        lexical_NM = self._lexical.candidate_scores(queries, candidates)
        return np.array([fused_scores(*pair, self.fusion) for pair in zip(dense_NM, lexical_NM, strict=True)])


def fused(dense: Mapping[Any, float], lexical: Mapping[Any, float], how: Fusion) -> dict[Any, float]:
    """Join the scores that a model and BM25 give documents, best first on either side.

    A convex sum is that of the first 100 of each, as a search makes it. What stands below them on both sides comes
    behind them, with scores below 0, in the order of its places: no search shows it, and a deep measure of recall
    counts it.

    Returns:
        The score of every document of either, best first.

    >>> fused({"a": 0.9, "b": 0.5}, {"b": 2.0}, Fusion(weight=0.5))
    {'b': 0.75, 'a': 0.45}
    """
    if how.method == RRF:
        return hybrid_search.rrf([list(dense), list(lexical)])
    words, first = (dict(list(side.items())[: hybrid_search.DEPTH]) for side in (lexical, dense))
    vectors = first | {one: dense[one] for one in words if one in dense}
    joined = hybrid_search.convex(words, vectors, hybrid_search.WEIGHT if how.weight is None else how.weight)
    # By their best place, so that it is fusion's method that decides nothing here.
    below = [one for one in hybrid_search.rrf([list(lexical), list(dense)]) if one not in joined]
    return joined | {document: -float(place) for place, document in enumerate(below, start=1)}


def fused_scores(dense_M: np.ndarray, lexical_M: np.ndarray, how: Fusion) -> np.ndarray:
    """Join the scores that a model and BM25 give the same candidates.

    Args:
        dense_M: the model's ``(candidates,)``.
        lexical_M: BM25's; candidates that share no word with the query (0) are not in its ranking.
        how: how they are joined.

    Returns:
        ``(candidates,)`` float64; the least for a candidate that is not among the first 1000 of either.
    """
    dense = {one: float(dense_M[one]) for one in _order(dense_M)[:DEPTH]}
    lexical = {one: float(lexical_M[one]) for one in _order(lexical_M)[:DEPTH] if lexical_M[one] > 0}
    joined = fused(dense, lexical, how)
    least = 0.0 if how.method == RRF else min([0.0, *joined.values()]) - 1
    joined_M = np.full(len(dense_M), least)
    for place, score in joined.items():
        joined_M[place] = score
    return joined_M


class HybridSearch:
    """A model and BM25 together as ``mteb.evaluate`` accepts it (``mteb.models.SearchProtocol``).

    Args:
        encoder: the model, as MTEB's own search takes it.
        how: how the rankings are joined.
    """

    def __init__(self, encoder: Any, how: Fusion) -> None:
        from mteb.models.search_wrappers import SearchEncoderWrapper

        self._how = how
        self._dense = SearchEncoderWrapper(encoder)
        self._lexical = BM25Search()
        self._places: dict[str, int] = {}

    @cached_property
    def mteb_model_meta(self) -> Any:
        """MTEB's description of the ranker."""
        from mteb.models import ModelMeta

        dense = self._dense.mteb_model_meta
        how = f"rrf-k={hybrid_search.RRF_K}" if self._how.method == RRF else f"convex-{self._how.weight:g}"
        known = {"name": f"{dense.name}+bm25", "revision": f"{dense.revision}-{how}"}
        return ModelMeta.create_empty(overwrites=known)

    def index(self, corpus: Any, **settings: Any) -> None:
        """Hand MTEB's documents to both."""
        self._places = {document: place for place, document in enumerate(corpus["id"])}
        self._dense.index(corpus, **settings)
        self._lexical.index(corpus, **settings)

    def search(
        self, queries: Any, *, top_k: int, top_ranked: Mapping[str, list[str]] | None = None, **settings: Any
    ) -> dict[str, dict[str, float]]:
        """Rank documents for MTEB's queries.

        Args:
            queries: rows with ``id`` and ``text``.
            top_k: how many documents a query gets at most.
            top_ranked: candidates by query; None ranks all documents.
            settings: what else MTEB's search wants to know.

        Returns:
            Scores by query and document.
        """
        depth = max(top_k, DEPTH)
        dense = self._dense.search(queries, top_k=depth, top_ranked=top_ranked, **settings)
        lexical = self._lexical.search(queries, top_k=depth, top_ranked=top_ranked)
        results = {}
        for query, scores in dense.items():
            # Without a word of the query a document is not in BM25's ranking.
            found = {document: score for document, score in lexical[query].items() if score > 0}
            joined = fused(self._ranked(scores, depth), self._ranked(found, depth), self._how)
            results[query] = dict(list(joined.items())[:top_k])
        return results

    def _ranked(self, scores: Mapping[str, float], depth: int) -> dict[str, float]:
        """Return the best, best first; of equals the one that stands first in the collection, as BM25 does."""
        order = sorted(scores, key=lambda document: (-scores[document], self._places[document]))
        return {document: scores[document] for document in order[:depth]}


def _order(scores_M: np.ndarray) -> list[int]:
    order: list[int] = np.argsort(-scores_M, kind="stable").tolist()
    return order
