"""An encoder's ranking and BM25's joined into one, by the places that documents have in each.

Knows: reciprocal rank fusion, MTEB's search protocol. Does not know: files, metrics, how either ranks.
"""

from collections.abc import Hashable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from gerund.errors import ConfigError
from gerund.evaluation.systems.base import Encoder, ScoresCandidates, System, cosine_scores
from gerund.evaluation.systems.bm25 import BM25, BM25Search, BM25System
from gerund.types import Scorer

HYBRID = "hybrid"

DEPTH = 1000
"""How many documents of each ranking count."""

# Cormack, Clarke and Buettcher 2009, who found it near the best for all of their collections.
_K = 60

_Document = TypeVar("_Document", bound=Hashable)


class HybridSystem(System):
    """An encoder and BM25 together: a document scores by the places that it has in the two rankings.

    It takes part where documents or candidates are ranked, and nowhere else.

    Args:
        dense: the encoder; its vectors are the ones that are kept.
    """

    def __init__(self, dense: Encoder) -> None:
        super().__init__(f"{dense.label} + BM25")
        self.dense = dense
        self._lexical = BM25System()

    @property
    def name(self) -> str:
        """What the encoder was loaded from."""
        return self.dense.name

    @property
    def fingerprint(self) -> str:
        """The encoder's fingerprint, and that BM25 takes part."""
        return f"{self.dense.fingerprint}+bm25"

    @property
    def cache_key(self) -> str:
        """The encoder's key, and that BM25 takes part."""
        return f"{self.dense.cache_key}+bm25"

    @property
    def scorer(self) -> Any:
        """The encoder's own scorer of continuations."""
        return self.dense.scorer

    def describe(self) -> dict[str, Any]:
        """Return what the encoder is, and that BM25 takes part."""
        # Without weights: it shares with the model alone nothing that depends only on them.
        own = {name: value for name, value in self.dense.describe().items() if name != "weights"}
        return {**own, "fingerprint": self.fingerprint, "with": BM25}

    def search_model(self, prompts: Mapping[str, str], *, show: bool | None = None) -> "HybridSearch":
        """Return both rankings as one."""
        return HybridSearch(self.dense.search_model(prompts, show=show))

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
        return np.array([fused_scores(*pair) for pair in zip(dense_NM, lexical_NM, strict=True)])


def fused(rankings: Sequence[Sequence[_Document]]) -> dict[_Document, float]:
    """Join rankings by reciprocal rank fusion (Cormack et al. 2009): the sum of 1 / (60 + place).

    Args:
        rankings: documents, best first. One that a ranking lacks has nothing from it.

    Returns:
        The score of every document of any ranking, best first; of equals the one that was met first, reading the
        rankings one after the other.

    >>> fused([["a", "b"], ["b", "c"]]) == {"b": 1 / 62 + 1 / 61, "a": 1 / 61, "c": 1 / 62}
    True
    """
    scores: dict[_Document, float] = {}
    for ranking in rankings:
        for place, document in enumerate(ranking, start=1):
            scores[document] = scores.get(document, 0.0) + 1 / (_K + place)
    return dict(sorted(scores.items(), key=lambda item: -item[1]))


def fused_scores(dense_M: np.ndarray, lexical_M: np.ndarray) -> np.ndarray:
    """Join the scores that a model and BM25 give the same candidates.

    Args:
        dense_M: the model's ``(candidates,)``.
        lexical_M: BM25's; candidates that share no word with the query (0) are not in its ranking.

    Returns:
        ``(candidates,)`` float64; 0 for a candidate that is not among the first 1000 of either.
    """
    ranked = [order[:DEPTH] for order in (_order(dense_M), [one for one in _order(lexical_M) if lexical_M[one] > 0])]
    joined_M = np.zeros(len(dense_M))
    for place, score in fused(ranked).items():
        joined_M[place] = score
    return joined_M


class HybridSearch:
    """A model and BM25 together as ``mteb.evaluate`` accepts it (``mteb.models.SearchProtocol``).

    Args:
        encoder: the model, as MTEB's own search takes it.
    """

    def __init__(self, encoder: Any) -> None:
        from mteb.models.search_wrappers import SearchEncoderWrapper

        self._dense = SearchEncoderWrapper(encoder)
        self._lexical = BM25Search()
        self._places: dict[str, int] = {}

    @cached_property
    def mteb_model_meta(self) -> Any:
        """MTEB's description of the ranker."""
        from mteb.models import ModelMeta

        dense = self._dense.mteb_model_meta
        known = {"name": f"{dense.name}+bm25", "revision": f"{dense.revision}-rrf-k={_K}"}
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
            joined = fused([self._ranked(own)[:depth] for own in (scores, found)])
            results[query] = dict(list(joined.items())[:top_k])
        return results

    def _ranked(self, scores: Mapping[str, float]) -> list[str]:
        """Return documents, best first; of equals the one that stands first in the collection, as BM25 does."""
        return sorted(scores, key=lambda document: (-scores[document], self._places[document]))


def _order(scores_M: np.ndarray) -> list[int]:
    order: list[int] = np.argsort(-scores_M, kind="stable").tolist()
    return order
