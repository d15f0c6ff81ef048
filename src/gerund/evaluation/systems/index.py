"""An index as ``gerund search`` asks it, among the systems: chunked or whole, by words, vectors or both, re-ranked.

Documents score as their best chunk. Everything is done as a user's search does it: the store is LanceDB, the weight and
the prompts are the encoder's own, and what stands below the first hundred of either side is not found.

Knows: indices, MTEB's search protocol. Does not know: tasks, files, metrics.
"""

import hashlib
import shutil
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from gerund.errors import unknown_name
from gerund.evaluation.systems.base import System
from gerund.evaluation.systems.language_model import LanguageModelSystem
from gerund.retrieval import hybrid_search
from gerund.retrieval.documents import PRECISIONS, Chunking, Document
from gerund.retrieval.embedding import largest_chunk
from gerund.retrieval.hybrid_search import MODES, Mode
from gerund.retrieval.index import Index, open_index
from gerund.retrieval.store import one_of_sources
from gerund.text_analysis import VERSION

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

    Raises:
        ConfigError: there is something else behind the colon.

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
        """Return an index of documents, made anew where there is none.

        Args:
            lm: the model.
            key: tells its encoder from others.
            chunking: how documents are cut.
            documents: what is indexed.
        """
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
    """A model's index, which ranks documents and does nothing else.

    Args:
        dense: the model under one encoder config.
        way: how the index is made and asked.
        cache: where indices are kept that several ways share.
    """

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
    """An index as ``mteb.evaluate`` accepts it (``mteb.models.SearchProtocol``).

    Args:
        system: the model and the way.
    """

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
        """Rank documents for MTEB's queries.

        Args:
            queries: rows with ``id`` and ``text``.
            top_k: how many documents a query gets at most.
            top_ranked: candidates by query; None ranks all documents.

        Returns:
            Scores by query and document: one over the document's place.
        """
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
