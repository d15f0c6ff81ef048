"""BM25, the lexical baseline: ranks documents by the words they share with a query.

Knows: bm25s, MTEB's search protocol. Does not know: tasks, files, metrics.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from gerund.evaluation.systems.base import System
from gerund.text_analysis import VERSION, Analyzer
from gerund.types import Scorer

BM25 = "bm25"

_K1 = 1.2
_B = 0.75
_ANALYZER = Analyzer("en")


class BM25Index:
    """Documents, ready to be ranked.

    Lucene's variant with its defaults (k1 = 1.2, b = 0.75). Words are those of ``text_analysis``, as in an index: stems
    and stop words are English, and texts in other scripts are read by their script.

    Args:
        documents: their texts; a text without a word is found by no query.
    """

    def __init__(self, documents: Sequence[str]) -> None:
        import bm25s

        self.size = len(documents)
        words = [_ANALYZER.document(one) for one in documents]
        self._index: Any = None
        # bm25s cannot index nothing.
        if any(words):
            self._index = bm25s.BM25(method="lucene", k1=_K1, b=_B)
            self._index.index(words, show_progress=False)

    def scores(self, query: str) -> np.ndarray:
        """Return the score of every document: ``(documents,)`` float32, 0 where no word is shared."""
        words = _ANALYZER.query(query)
        if not words or self._index is None:
            return np.zeros(self.size, dtype=np.float32)
        scores: np.ndarray = self._index.get_scores(words)
        return scores

    def top(self, query: str, k: int) -> list[tuple[int, float]]:
        """Return the ``k`` best documents.

        Returns:
            (index, score) pairs, best first; of equals the one that stands first among the documents, so that
            those without a word of the query come last.
        """
        scores = self.scores(query)
        return [(int(index), float(scores[index])) for index in np.argsort(-scores, kind="stable")[:k]]


def bm25_candidates(documents: Mapping[str, str], queries: Mapping[str, str], k: int = 100) -> dict[str, list[str]]:
    """Return the ids of the best ``k`` documents for each query, best first.

    A query gets fewer where fewer documents share a word with it.

    >>> bm25_candidates({"a": "cats sleep", "b": "a sleeping cat", "c": "stones"}, {"q": "sleeping"})
    {'q': ['a', 'b']}
    """
    ids = list(documents)
    index = BM25Index(list(documents.values()))
    return {query: [ids[one] for one, score in index.top(text, k) if score > 0] for query, text in queries.items()}


class BM25Search:
    """BM25 as ``mteb.evaluate`` accepts it (``mteb.models.SearchProtocol``)."""

    def __init__(self) -> None:
        self._ids: list[str] = []
        self._documents: BM25Index | None = None

    @cached_property
    def mteb_model_meta(self) -> Any:
        """MTEB's description of the ranker."""
        from mteb.models import ModelMeta

        return ModelMeta.create_empty(overwrites={"name": BM25, "revision": f"lucene-k1={_K1}-b={_B}"})

    def index(self, corpus: Any, **_kwargs: Any) -> None:
        """Index MTEB's documents, title and text together."""
        self._ids = list(corpus["id"])
        pairs = zip(corpus["title"], corpus["text"], strict=True)
        self._documents = BM25Index([f"{title} {text}" for title, text in pairs])

    def search(
        self, queries: Any, *, top_k: int, top_ranked: Mapping[str, list[str]] | None = None, **_kwargs: Any
    ) -> dict[str, dict[str, float]]:
        """Rank documents for MTEB's queries.

        Args:
            queries: rows with ``id`` and ``text``.
            top_k: how many documents a query gets at most.
            top_ranked: candidates by query; None ranks all documents.

        Returns:
            Scores by query and document.
        """
        assert self._documents is not None, "MTEB indexes before it searches"
        results = {}
        places = {document: place for place, document in enumerate(self._ids)}
        for query, text in zip(queries["id"], queries["text"], strict=True):
            if top_ranked is None:
                results[query] = {self._ids[one]: score for one, score in self._documents.top(text, top_k)}
            else:
                scores = self._documents.scores(text)
                results[query] = {one: float(scores[places[one]]) for one in top_ranked[query]}
        return results


class BM25System(System):
    """BM25, which ranks documents and scores candidates by their words."""

    def __init__(self, label: str = BM25) -> None:
        super().__init__(label)

    @property
    def name(self) -> str:
        """Its name."""
        return BM25

    @property
    def fingerprint(self) -> str:
        """Its name: there is nothing else that scores depend on."""
        return BM25

    @property
    def cache_key(self) -> str:
        """Its name, and which words it compares."""
        return f"{BM25}-words{VERSION}"

    def describe(self) -> dict[str, Any]:
        """Return its name."""
        return {"model": BM25}

    def search_model(self, prompts: Mapping[str, str], *, show: bool | None = None) -> BM25Search:
        """Return a fresh index; it reads no prompts."""
        del prompts, show
        return BM25Search()

    def find_scorer(self, name: str, *, seed: int) -> Scorer | None:
        """Return None: it scores by words whatever scorer a task names."""
        del name, seed
        return None

    def candidate_scores(
        self,
        queries: Sequence[str],
        candidates: Sequence[str],
        *,
        scorer: Scorer | None = None,
        prompt: str | None = None,
    ) -> np.ndarray:
        """Return BM25's scores ``(queries, candidates)`` float64."""
        del scorer, prompt
        index = BM25Index(candidates)
        return np.array([index.scores(query) for query in queries], dtype=np.float64)
