"""Search as a system: BM25, hybrid search (an encoder fused with BM25), and an index as `gerund search` asks it."""

import hashlib
import shutil
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
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
from gerund.scoring.names import MODEL
from gerund.settings.ranking import DEFAULT_WEIGHT, MAXSIM, TRAINED_FUSION, SecondStage
from gerund.text_analysis import VERSION, Analyzer
from gerund.types import RerankCost, Scorer

BM25 = "bm25"
HYBRID = "hybrid"
INDEX = "index"
RRF = "rrf"
DEPTH = 1000
"""Depth of each ranking that hybrid search fuses, in documents."""
RERANKED = 20
"""Number of an index's top hits that are re-ranked."""

_WHOLE, _LATE, _RERANK = "whole", "late", "rerank"
_PARTS = (*MODES, _WHOLE, _LATE, _RERANK, MAXSIM, *PRECISIONS[1:])
_K1 = 1.2
_B = 0.75
_ANALYZER = Analyzer("en")


def _meta(name: str, revision: str) -> Any:
    from mteb.models import ModelMeta

    return ModelMeta.create_empty(overwrites={"name": name, "revision": revision})


class BM25Index:
    """Rank documents by BM25: Lucene's variant with its defaults (k1 = 1.2, b = 0.75).

    Words are those of ``text_analysis``, as in an index: stems and stop words are English, and texts in other scripts
    are analyzed by their script.
    """

    def __init__(self, documents: Sequence[str]) -> None:
        import bm25s

        self.size = len(documents)
        words = [_ANALYZER.document(document) for document in documents]
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
        """Return (index, score) of the ``k`` best documents, best first; of equals the first document."""
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
    return {query: [ids[row] for row, score in index.top(text, k) if score > 0] for query, text in queries.items()}


class BM25Search:
    """BM25 as ``mteb.evaluate`` accepts it (``mteb.models.SearchProtocol``)."""

    def __init__(self) -> None:
        self._ids: list[str] = []
        self._documents: BM25Index | None = None

    @cached_property
    def mteb_model_meta(self) -> Any:
        """MTEB's description of the ranker."""
        return _meta(BM25, f"lucene-k1={_K1}-b={_B}")

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
        rows = {document: row for row, document in enumerate(self._ids)}
        for query, text in zip(queries["id"], queries["text"], strict=True):
            if top_ranked is None:
                results[query] = {self._ids[row]: score for row, score in self._documents.top(text, top_k)}
            else:
                scores = self._documents.scores(text)
                results[query] = {document: float(scores[rows[document]]) for document in top_ranked[query]}
        return results


class BM25System(System):
    """BM25, which ranks documents and scores candidates by their words."""

    def __init__(self, label: str = BM25) -> None:
        super().__init__(label)

    @property
    def name(self) -> str:
        """Its name."""
        return BM25

    fingerprint = name

    @property
    def cache_key(self) -> str:
        """Its name, and the version of the text analysis."""
        return f"{BM25}-words{VERSION}"

    def describe(self) -> dict[str, Any]:
        """Return its name."""
        return {"model": BM25}

    def search_model(self, prompts: Mapping[str, str], *, show: bool | None = None) -> BM25Search:
        """Return a new index; prompts don't apply."""
        del prompts, show
        return BM25Search()

    def find_scorer(self, name: str, *, seed: int) -> Scorer | None:
        """Return None: it always scores by words."""
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


@dataclass(frozen=True)
class Fusion:
    """How the rankings of an encoder and BM25 are fused: ``convex`` or ``rrf``.

    ``weight`` is that of the vectors in a convex sum; None for the encoder's.
    """

    method: str = "convex"
    weight: float | None = None


def parse_fusion(name: str) -> Fusion | None:
    """Parse the name of a system: ``hybrid``, ``hybrid:rrf``, ``hybrid:0.4``; None for any other name.

    >>> parse_fusion("hybrid:0.4"), parse_fusion("bm25")
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
        raise ConfigError(
            f"{name!r}: {HYBRID}: must be followed by {RRF} or the weight of the vectors, 0 to 1"
        ) from None


class _Derived(System):
    """A ranking that extends an encoder's; its hashes are the encoder's with a suffix that says how."""

    dense: Encoder
    suffix: str
    details: Mapping[str, Any]

    @property
    def name(self) -> str:
        """What the encoder was loaded from."""
        return self.dense.name

    @property
    def fingerprint(self) -> str:
        """The encoder's fingerprint and the suffix."""
        return f"{self.dense.fingerprint}{self.suffix}"

    @property
    def cache_key(self) -> str:
        """The encoder's key, the suffix, and the version of the text analysis."""
        return f"{self.dense.cache_key}{self.suffix}-words{VERSION}"

    def describe(self) -> dict[str, Any]:
        """Return the encoder's description and how it is extended."""
        # Without weights: it shares nothing with the model alone that depends only on them.
        known = {name: value for name, value in self.dense.describe().items() if name != "weights"}
        return {**known, "fingerprint": self.fingerprint, **self.details}


class HybridSystem(_Derived):
    """An encoder fused with BM25; it ranks documents and scores candidates, and supports nothing else."""

    def __init__(self, dense: Encoder, how: Fusion = Fusion()) -> None:
        method = "" if how == Fusion() else " (RRF)" if how.method == RRF else f" ({how.weight:g} vectors)"
        super().__init__(f"{dense.label} + BM25{method}")
        self.dense = dense
        is_resolved = how.method == RRF or how.weight is not None
        self.fusion = how if is_resolved else Fusion(how.method, dense.fusion_weight)
        self.suffix = "+bm25" if self.fusion.method == RRF else f"+bm25-cosines-{self.fusion.weight:g}"
        weight = {} if self.fusion.weight is None else {"weight": self.fusion.weight}
        self.details = {"with": BM25, "fusion": self.fusion.method, **weight}

    @property
    def scorer(self) -> Any:
        """The encoder's own scorer of continuations."""
        return self.dense.scorer

    def search_model(self, prompts: Mapping[str, str], *, show: bool | None = None) -> "HybridSearch":
        """Return the fused search."""
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
        """Fuse the two scores of each candidate, ``(queries, candidates)`` float64."""
        if isinstance(self.dense, ScoresCandidates):
            dense_NM = self.dense.candidate_scores(queries, candidates, scorer=scorer, prompt=prompt)
        else:
            dense_NM = cosine_scores(self.dense, queries, candidates, prompt)
        lexical_NM = BM25System().candidate_scores(queries, candidates)
        return np.array([fused_scores(*pair, self.fusion) for pair in zip(dense_NM, lexical_NM, strict=True)])


def fused(dense: Mapping[Any, float], lexical: Mapping[Any, float], how: Fusion) -> dict[Any, float]:
    """Fuse the scores of a model and BM25, both best first, into the score of every document of either, best first.

    A convex sum is of the first 100 of each, as in a search. What is below them on both sides follows with scores below
    0, in the order of its ranks: no search shows it, but a deep measure of recall counts it.

    >>> fused({"a": 0.9, "b": 0.5}, {"b": 2.0}, Fusion(weight=0.5))
    {'b': 0.75, 'a': 0.45}
    """
    if how.method == RRF:
        return hybrid_search.rrf([list(dense), list(lexical)])
    keywords, first = (dict(list(side.items())[: hybrid_search.DEPTH]) for side in (lexical, dense))
    vectors = first | {document: dense[document] for document in keywords if document in dense}
    ranking = hybrid_search.convex(keywords, vectors, TRAINED_FUSION if how.weight is None else how.weight)
    # By their best rank, so that the weight decides nothing here.
    below = [document for document in hybrid_search.rrf([list(lexical), list(dense)]) if document not in ranking]
    return ranking | {document: -float(rank) for rank, document in enumerate(below, start=1)}


def fused_scores(dense_M: np.ndarray, lexical_M: np.ndarray, how: Fusion) -> np.ndarray:
    """Fuse the scores of the same candidates, ``(candidates,)`` float64.

    A candidate without a word of the query (0) is not in BM25's ranking. One that is not among the first 1000 of
    either gets the lowest score.
    """
    dense_order, lexical_order = (
        np.argsort(-scores_M, kind="stable")[:DEPTH].tolist() for scores_M in (dense_M, lexical_M)
    )
    dense = {row: float(dense_M[row]) for row in dense_order}
    lexical = {row: float(lexical_M[row]) for row in lexical_order if lexical_M[row] > 0}
    scores = fused(dense, lexical, how)
    lowest = 0.0 if how.method == RRF else min([0.0, *scores.values()]) - 1
    return np.array([scores.get(row, lowest) for row in range(len(dense_M))], dtype=np.float64)


class HybridSearch:
    """A model fused with BM25 as ``mteb.evaluate`` accepts it (``mteb.models.SearchProtocol``)."""

    def __init__(self, encoder: Any, how: Fusion) -> None:
        from mteb.models.search_wrappers import SearchEncoderWrapper

        self._how = how
        self._dense = SearchEncoderWrapper(encoder)
        self._lexical = BM25Search()
        self._rows: dict[str, int] = {}

    @cached_property
    def mteb_model_meta(self) -> Any:
        """MTEB's description of the ranker."""
        dense = self._dense.mteb_model_meta
        how = f"rrf-k={hybrid_search.RRF_K}" if self._how.method == RRF else f"convex-{self._how.weight:g}"
        return _meta(f"{dense.name}+bm25", f"{dense.revision}-{how}")

    def index(self, corpus: Any, **settings: Any) -> None:
        """Index MTEB's documents in both."""
        self._rows = {document: row for row, document in enumerate(corpus["id"])}
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
            shared = {document: score for document, score in lexical[query].items() if score > 0}
            ranking = fused(self._ranked(scores, depth), self._ranked(shared, depth), self._how)
            results[query] = dict(list(ranking.items())[:top_k])
        return results

    def _ranked(self, scores: Mapping[str, float], depth: int) -> dict[str, float]:
        """Return the best, best first; of equals the first in the collection, as BM25 does."""
        order = sorted(scores, key=lambda document: (-scores[document], self._rows[document]))
        return {document: scores[document] for document in order[:depth]}


@dataclass(frozen=True)
class IndexOptions:
    """How an index is built and searched."""

    mode: Mode = "hybrid"  # as in ``Index.search``
    is_whole: bool = False  # a document is one chunk, truncated to the model's context
    is_late: bool = False  # chunks are pooled from one pass over their document
    is_reranked: bool = False  # the model re-ranks the first hits by its measure, fused with their scores
    precision: str = PRECISIONS[0]  # how vectors are stored
    is_multi: bool = False  # the first hits are re-ranked by stored token vectors, fused with their scores

    def __str__(self) -> str:
        flags = {_WHOLE: self.is_whole, _LATE: self.is_late, _RERANK: self.is_reranked, MAXSIM: self.is_multi}
        precision = [] if self.precision == PRECISIONS[0] else [self.precision]
        return ",".join([self.mode, *(name for name, is_set in flags.items() if is_set), *precision])


def parse_index(name: str) -> IndexOptions | None:
    """Parse the name of a system: ``index``, ``index:vectors``, ``index:words,whole``; None for any other name.

    >>> print(parse_index("index"), parse_index("index:vectors,late"), parse_index("bm25"))
    hybrid vectors,late None
    """
    kind, colon, rest = name.partition(":")
    if kind != INDEX:
        return None
    parts = rest.split(",") if colon else []
    for part in parts:
        if part not in _PARTS:
            raise unknown_name(f"part after {INDEX}:", part, list(_PARTS))
    mode, precision = _only("mode", parts, MODES), _only("precision", parts, PRECISIONS)
    return IndexOptions(mode, _WHOLE in parts, _LATE in parts, _RERANK in parts, precision, MAXSIM in parts)


def _only(kind: str, parts: Sequence[str], names: Sequence[str]) -> Any:
    """Return the name that is among the parts, the first name where there is none; two are refused."""
    known = [name for name in names if name in parts]
    if len(known) > 1:
        raise ConfigError(f"{INDEX}: takes one {kind}, not {' and '.join(known)}")
    return known[0] if known else names[0]


class IndexCache:
    """The last index of each encoder and chunking, shared by systems that only search it differently."""

    def __init__(self) -> None:
        self._indices: dict[tuple[str, str], tuple[str, Index]] = {}

    def index(self, lm: Any, key: str, chunking: Chunking, documents: Sequence[Document]) -> Index:
        """Return an index of documents, built where there is none; ``key`` identifies the encoder."""
        digest = hashlib.blake2b(digest_size=16)
        for document in documents:
            digest.update(f"{document.source}\0{document.digest}\0".encode())
        kind, content = (key, str(chunking)), digest.hexdigest()
        if kind not in self._indices or self._indices[kind][0] != content:
            folder = tempfile.mkdtemp(prefix="gerund-")
            index = open_index(Path(folder) / "my.index", lm, chunking=chunking)
            weakref.finalize(index, shutil.rmtree, folder, ignore_errors=True)
            index.add_documents(documents)
            self._indices[kind] = content, index
        return self._indices[kind][1]


class IndexSystem(_Derived):
    """The index of a model under one encoder config, which ranks documents and supports nothing else."""

    dense: LanguageModelSystem

    def __init__(self, dense: LanguageModelSystem, options: IndexOptions, cache: IndexCache | None = None) -> None:
        super().__init__(f"{dense.label}, index ({options})")
        self.dense, self.options = dense, options
        self.cache = cache or IndexCache()
        self.weight = dense.fusion_weight
        weight = f"-{self.weight:g}" if options.mode == MODES[0] else ""
        self.suffix = f"+index-{str(options).replace(',', '-')}{weight}"
        self.details = {"index": str(options), "weight": self.weight}
        self.second = SecondStage()
        if options.is_reranked or options.is_multi:
            lm = dense.lm
            share = DEFAULT_WEIGHT if lm.encoder.rerank_weight is None else lm.encoder.rerank_weight
            by = MAXSIM if options.is_multi else lm.default_measure(is_second=True)
            self.second = SecondStage(RERANKED, by, share)
            stage = {"rerank_by": by, "rerank_weight": share}
            ranker = [lm.reranker.fingerprint] if by == MODEL and lm.reranker is not None else []
            self.suffix += "".join(f"-{value}" for value in (*stage.values(), *ranker))
            self.details |= stage

    @property
    def chunking(self) -> Chunking:
        """How documents are chunked."""
        more: dict[str, Any] = {"late": self.options.is_late, "precision": self.options.precision}
        more["multi"] = int(self.options.is_multi)
        if not self.options.is_whole:
            return Chunking(**more)
        most = largest_chunk(self.dense.lm)
        tokens = 10**6 if most is None else most
        return Chunking(tokens, context=True, **more)

    def search_model(self, prompts: Mapping[str, str], *, show: bool | None = None) -> "IndexSearch":
        """Return the index as MTEB searches; prompts are the encoder's own, as in ``gerund search``."""
        del prompts, show
        return IndexSearch(self)


class IndexSearch:
    """An index as ``mteb.evaluate`` accepts it (``mteb.models.SearchProtocol``).

    It searches as a user does: the store is LanceDB, weight and prompts are the encoder's own, and what is below the
    first hundred of either side isn't found. A document scores as its best chunk: 1 / its rank.
    """

    def __init__(self, system: IndexSystem) -> None:
        self._system = system
        self._index: Index | None = None
        self._costs: list[RerankCost] = []

    @property
    def notes(self) -> tuple[str, ...]:
        """What the second stage cost, where there is one."""
        if not self._costs:
            return ()
        seconds, read = (fmean(getattr(cost, name) for cost in self._costs) for name in ("seconds", "read"))
        return (f"second stage: {read:.1f} hits a query re-ranked by {self._costs[0].by} in {seconds:.2f} s",)

    @cached_property
    def mteb_model_meta(self) -> Any:
        """MTEB's description of the ranker."""
        return _meta(f"{self._system.name}+index", self._system.cache_key)

    def index(self, corpus: Any, **_settings: Any) -> None:
        """Index MTEB's documents."""
        rows = zip(corpus["id"], corpus["text"], corpus["title"], strict=True)
        documents = [Document(id_, text, title or "") for id_, text, title in rows]
        dense = self._system.dense
        self._index = self._system.cache.index(dense.lm, dense.cache_key, self._system.chunking, documents)

    def search(
        self, queries: Any, *, top_k: int, top_ranked: Mapping[str, list[str]] | None = None, **_settings: Any
    ) -> dict[str, dict[str, float]]:
        """Rank documents for MTEB's queries."""
        assert self._index is not None, "MTEB indexes before it searches"
        options, ranking = self._system.options, {}
        weight = self._system.weight if options.mode == MODES[0] else None
        settings: dict[str, Any] = {"mode": options.mode, "weight": weight}
        settings |= self._system.second.keywords
        for query, text in zip(queries["id"], queries["text"], strict=True):
            offered = None if top_ranked is None else top_ranked[query]
            if offered is not None and not offered:
                ranking[query] = dict[str, float]()
                continue
            where = None if offered is None else one_of_sources(offered)
            hits = self._index.search(text, hybrid_search.DEPTH, filter=where, **settings)
            self._costs += [] if hits.rerank is None else [hits.rerank]
            # Candidates that are not found come last, as they were offered.
            order = dict.fromkeys([*(hit.source for hit in hits), *(offered or ())])
            ranking[query] = {source: 1 / rank for rank, source in enumerate(list(order)[:top_k], start=1)}
        return ranking
