"""How well a model finds the documents that were put aside: by words, by vectors, and by both, as a search does.

Shapes: Q queries.

Knows: indexes, rankings, three measures. Does not know: training, reports, statistics.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from gerund.adaptation.queries import Query, Split
from gerund.progress import progress
from gerund.retrieval.documents import Chunking
from gerund.retrieval.fusion import DEPTH
from gerund.retrieval.opening import open_index
from gerund.retrieval.searching import MODES, Mode

if TYPE_CHECKING:
    from gerund.language_model import LanguageModel
    from gerund.types import Hit

MEASURES = ("nDCG@10", "recall@10", "MRR@10")
MAIN = MEASURES[0]

_CUT = 10
_DOCUMENTS_AT_ONCE = 64
_QUERIES_AT_ONCE = 64
# Documents by which it is found out how long measuring takes.
_SAMPLE = 48


@dataclass(frozen=True)
class Measured:
    """What a model finds.

    Attributes:
        values: for each way to search (``words``, ``vectors``, ``hybrid``) and measure one number a query, from 0 to 1.
        documents: how many documents were searched.
        chunks: how many chunks they were cut into.
        weight: what the vectors count in ``hybrid``.
    """

    values: Mapping[str, Mapping[str, tuple[float, ...]]]
    documents: int
    chunks: int
    weight: float

    def mean(self, mode: str, measure: str = MAIN) -> float:
        """Return the mean over all queries."""
        values = self.values[mode][measure]
        return sum(values) / len(values)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        values = {mode: {name: list(own) for name, own in found.items()} for mode, found in self.values.items()}
        return {"values": values, "documents": self.documents, "chunks": self.chunks, "weight": self.weight}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return what ``to_dict`` described."""
        found = {mode: {name: tuple(own) for name, own in by.items()} for mode, by in values["values"].items()}
        return cls(found, values["documents"], values["chunks"], values["weight"])


def chunking_for(lm: "LanguageModel", language: str) -> Chunking:
    """Return how documents are cut: as by default, and smaller for a model that reads less at a time."""
    usual = Chunking(language=language)
    return usual if lm.max_length is None else replace(usual, tokens=max(1, min(usual.tokens, lm.max_length // 2)))


def measure(
    lm: "LanguageModel", found: Split, language: str = "en", label: str = "measuring", *, show: bool | None = None
) -> Measured:
    """Index all documents as ``gerund index`` would, in memory, and search them for every query.

    A document's place is that of its best chunk among the first 100.

    Args:
        lm: the model.
        found: the documents, and the queries.
        language: what they are written in.
        label: what progress is called.
        show: whether to show progress; None only on a terminal.
    """
    from gerund.retrieval import fusion

    index = open_index(None, lm, chunking=chunking_for(lm, language))
    corpus, chunks = found.corpus, 0
    with progress(len(corpus) + len(found.queries), label, show=show) as advance:
        for first in range(0, len(corpus), _DOCUMENTS_AT_ONCE):
            own = corpus[first : first + _DOCUMENTS_AT_ONCE]
            chunks += index.add_documents(own).chunks
            advance(len(own))
        scores: dict[str, dict[str, list[float]]] = {mode: {name: [] for name in MEASURES} for mode in MODES}
        for first in range(0, len(found.queries), _QUERIES_AT_ONCE):
            queries = found.queries[first : first + _QUERIES_AT_ONCE]
            texts = [one.text for one in queries]
            for mode in MODES:
                _score(queries, index.search_all(texts, DEPTH, mode=mode), scores[mode])
            advance(len(queries))
    values = {mode: {name: tuple(own) for name, own in by.items()} for mode, by in scores.items()}
    weight = fusion.WEIGHT if lm.encoder.fusion is None else lm.encoder.fusion
    return Measured(values, len(corpus), chunks, weight)


def measuring_seconds(lm: "LanguageModel", found: Split, language: str = "en") -> float:
    """Return about how long ``measure`` will take, by indexing some of the documents."""
    step = max(1, len(found.corpus) // _SAMPLE)
    sample = found.corpus[::step][:_SAMPLE]
    index = open_index(None, lm, chunking=chunking_for(lm, language))
    begin = time.perf_counter()
    index.add_documents(sample)
    characters = [sum(len(one.text) for one in some) for some in (found.corpus, sample)]
    return (time.perf_counter() - begin) * characters[0] / max(1, characters[1])


def _score(queries: Sequence[Query], rankings: "Sequence[Sequence[Hit]]", scores: dict[str, list[float]]) -> None:
    for query, hits in zip(queries, rankings, strict=True):
        ranked = list(dict.fromkeys(hit.source for hit in hits))
        for name, value in zip(MEASURES, scores_of(ranked, query.sources), strict=True):
            scores[name].append(value)


def scores_of(ranked: Sequence[str], relevant: Sequence[str]) -> tuple[float, float, float]:
    """Return nDCG@10, recall@10 and MRR@10 of a ranking, all relevant documents counting the same.

    Args:
        ranked: documents, best first.
        relevant: those that were sought.

    >>> scores_of(["b", "a"], ["a"])
    (0.6309297535714575, 1.0, 0.5)
    >>> scores_of(["b"], ["a"])
    (0.0, 0.0, 0.0)
    """
    places = [place for place, one in enumerate(ranked[:_CUT], start=1) if one in relevant]
    best = sum(1 / math.log2(place + 1) for place in range(1, min(len(relevant), _CUT) + 1))
    gain = sum(1 / math.log2(place + 1) for place in places)
    return gain / best, len(places) / len(relevant), 1 / places[0] if places else 0.0


MODE_NAMES: Mapping[Mode, str] = {"words": "words (BM25)", "vectors": "vectors", "hybrid": "words and vectors"}
"""What the ways to search are called."""
