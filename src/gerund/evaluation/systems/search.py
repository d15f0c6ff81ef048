"""Search as a system: BM25, hybrid search (an encoder fused with BM25), and an index as `gerund search` asks it."""

import hashlib
import shutil
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from gerund.errors import ConfigError, unknown_name
from gerund.evaluation.systems.base import Encoder, ScoresCandidates, System, cosine_scores
from gerund.evaluation.systems.language_model import LanguageModelSystem
from gerund.retrieval import hybrid_search
from gerund.retrieval.documents import PRECISIONS, Chunking, Document
from gerund.retrieval.embedding import largest_chunk
from gerund.retrieval.hybrid_search import MODES, Mode
from gerund.retrieval.index import Index, open_index
from gerund.retrieval.store import one_of_sources
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
        """Return the ``k`` best documents."""
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
        """Rank documents for MTEB's queries."""
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
        """Return the fusion with its weight worked out."""
        if self.method == RRF or self.weight is not None:
            return self
        return Fusion(self.method, hybrid_search.WEIGHT if own is None else own)


def fusion_named(name: str) -> Fusion | None:
    """Return what a name among the models means: ``hybrid``, ``hybrid:rrf``, ``hybrid:0.4``; None for another name.

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
        """Return the scorer by which the model ranks; None for vectors."""
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
    """Join the scores that a model and BM25 give the same candidates."""
    dense = {one: float(dense_M[one]) for one in _order(dense_M)[:DEPTH]}
    lexical = {one: float(lexical_M[one]) for one in _order(lexical_M)[:DEPTH] if lexical_M[one] > 0}
    joined = fused(dense, lexical, how)
    least = 0.0 if how.method == RRF else min([0.0, *joined.values()]) - 1
    joined_M = np.full(len(dense_M), least)
    for place, score in joined.items():
        joined_M[place] = score
    return joined_M


class HybridSearch:
    """A model and BM25 together as ``mteb.evaluate`` accepts it (``mteb.models.SearchProtocol``)."""

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
        """Rank documents for MTEB's queries."""
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


INDEX = "index"
RERANKED = 20
"""How many of the first hits are put into a new order."""

_WHOLE, _LATE, _RERANK = "whole", "late", "rerank"
_PARTS = (*MODES, _WHOLE, _LATE, _RERANK, *PRECISIONS[1:])


@dataclass(frozen=True)
class Way:
    """How an index is made and asked.

    Attributes:
        mode: as in ``Index.search``.
        is_whole: a document is one chunk, as far as the model reads.
        is_late: chunks are pooled from one pass over their document.
        is_reranked: the model puts the first hits into a new order, by the likelihood of the query.
        precision: how the numbers of vectors are stored.
    """

    mode: Mode = "hybrid"
    is_whole: bool = False
    is_late: bool = False
    is_reranked: bool = False
    precision: str = PRECISIONS[0]

    def __str__(self) -> str:
        flags = {_WHOLE: self.is_whole, _LATE: self.is_late, _RERANK: self.is_reranked}
        small = [] if self.precision == PRECISIONS[0] else [self.precision]
        return ",".join([self.mode, *(name for name, is_set in flags.items() if is_set), *small])


def way_named(name: str) -> Way | None:
    """Return what a name among the models means: ``index``, ``index:vectors``, ``index:words,whole``; None for others.

    >>> print(way_named("index"), way_named("index:vectors,late"), way_named("bm25"))
    hybrid vectors,late None
    """
    kind, colon, rest = name.partition(":")
    if kind != INDEX:
        return None
    parts = rest.split(",") if colon else []
    for part in parts:
        if part not in _PARTS:
            raise unknown_name(f"part behind {INDEX}:", part, list(_PARTS))
    mode = next((one for one in reversed(MODES) if one in parts), MODES[0])
    precision = next((one for one in PRECISIONS if one in parts), PRECISIONS[0])
    return Way(mode, _WHOLE in parts, _LATE in parts, _RERANK in parts, precision)


class IndexCache:
    """The index that was made last of each encoder and kind of chunk, so that several ways to ask share it."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, str], tuple[str, Index]] = {}

    def index(self, lm: Any, key: str, chunking: Chunking, documents: Sequence[Document]) -> Index:
        """Return an index of documents, made anew where there is none."""
        whole = hashlib.blake2b(digest_size=16)
        for one in documents:
            whole.update(f"{one.source}\0{one.digest}\0".encode())
        place, known = (key, str(chunking)), whole.hexdigest()
        if place not in self._made or self._made[place][0] != known:
            folder = tempfile.mkdtemp(prefix="gerund-")
            index = open_index(Path(folder) / "my.index", lm, chunking=chunking)
            weakref.finalize(index, shutil.rmtree, folder, ignore_errors=True)
            index.add_documents(documents)
            self._made[place] = known, index
        return self._made[place][1]


class IndexSystem(System):
    """A model's index, which ranks documents and does nothing else."""

    def __init__(self, dense: LanguageModelSystem, way: Way, cache: IndexCache | None = None) -> None:
        super().__init__(f"{dense.label}, index ({way})")
        self.dense, self.way = dense, way
        self.cache = cache or IndexCache()

    @property
    def name(self) -> str:
        """What the model was loaded from."""
        return self.dense.name

    @property
    def weight(self) -> float:
        """What the vectors count."""
        return hybrid_search.WEIGHT if self.dense.fusion_weight is None else self.dense.fusion_weight

    @property
    def fingerprint(self) -> str:
        """The encoder's fingerprint, and how the index is made and asked."""
        return f"{self.dense.fingerprint}{self._suffix}"

    @property
    def cache_key(self) -> str:
        """The encoder's key, and how the index is made and asked."""
        return f"{self.dense.cache_key}{self._suffix}-words{VERSION}"

    @property
    def _suffix(self) -> str:
        weight = f"-{self.weight:g}" if self.way.mode == MODES[0] else ""
        return f"+index-{str(self.way).replace(',', '-')}{weight}"

    def describe(self) -> dict[str, Any]:
        """Return what the model is, and how the index is made and asked."""
        own = {name: value for name, value in self.dense.describe().items() if name != "weights"}
        return {**own, "fingerprint": self.fingerprint, "index": str(self.way), "weight": self.weight}

    @property
    def chunking(self) -> Chunking:
        """How documents are cut."""
        if not self.way.is_whole:
            return Chunking(late=self.way.is_late, precision=self.way.precision)
        most = largest_chunk(self.dense.lm)
        tokens = 10**6 if most is None else most
        return Chunking(tokens, late=self.way.is_late, context=True, precision=self.way.precision)

    def search_model(self, prompts: Mapping[str, str], *, show: bool | None = None) -> "IndexSearch":
        """Return the index as MTEB searches; prompts are the encoder's own, as in ``gerund search``."""
        del prompts, show
        return IndexSearch(self)


class IndexSearch:
    """An index as ``mteb.evaluate`` accepts it (``mteb.models.SearchProtocol``)."""

    def __init__(self, system: IndexSystem) -> None:
        self._system = system
        self._index: Index | None = None

    @cached_property
    def mteb_model_meta(self) -> Any:
        """MTEB's description of the ranker."""
        from mteb.models import ModelMeta

        known = {"name": f"{self._system.name}+index", "revision": self._system.cache_key}
        return ModelMeta.create_empty(overwrites=known)

    def index(self, corpus: Any, **_settings: Any) -> None:
        """Index MTEB's documents."""
        rows = zip(corpus["id"], corpus["text"], corpus["title"], strict=True)
        documents = [Document(id_, text, title or "") for id_, text, title in rows]
        own = self._system
        self._index = own.cache.index(own.dense.lm, own.dense.cache_key, own.chunking, documents)

    def search(
        self, queries: Any, *, top_k: int, top_ranked: Mapping[str, list[str]] | None = None, **_settings: Any
    ) -> dict[str, dict[str, float]]:
        """Rank documents for MTEB's queries."""
        assert self._index is not None, "MTEB indexes before it searches"
        way, found = self._system.way, {}
        settings: dict[str, Any] = {"mode": way.mode, "weight": self._system.weight}
        settings["rerank"] = RERANKED if way.is_reranked else 0
        for query, text in zip(queries["id"], queries["text"], strict=True):
            offered = None if top_ranked is None else top_ranked[query]
            if offered is not None and not offered:
                found[query] = dict[str, float]()
                continue
            where = None if offered is None else one_of_sources(offered)
            hits = self._index.search(text, hybrid_search.DEPTH, filter=where, **settings)
            # Candidates that are not found come last, as they were offered.
            order = dict.fromkeys([*(hit.source for hit in hits), *(offered or ())])
            found[query] = {source: 1 / place for place, source in enumerate(list(order)[:top_k], start=1)}
        return found
