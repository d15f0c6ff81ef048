"""``Index``: one's own documents, ready to be searched and asked, with one model.

Knows: which part does what. Does not know: how any of it is done.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import numpy as np

from gerund.checks import check_unicode, flag, one_of, place, some_texts, whole_number
from gerund.errors import ConfigError, DataError, FingerprintError, ModelError
from gerund.models.sources import found_from_anywhere
from gerund.retrieval import hybrid_search
from gerund.retrieval.document_reader import ReadLimits
from gerund.retrieval.documents import Chunk, Chunking, Document
from gerund.retrieval.filters import check_filter
from gerund.retrieval.hybrid_search import MODES, RERANK_BY, Mode, check_query, joined, reranked, sides
from gerund.retrieval.indexing import Embed, IndexSummary, Writer, about_of, all_failed, difference, migrate_index
from gerund.retrieval.lance_store import LanceStore, is_remote
from gerund.retrieval.memory_store import MemoryStore
from gerund.retrieval.question_answering import (
    GENERATE,
    Asked,
    Asking,
    Written,
    extractive_answer,
    is_relevant,
    method_of,
    no_answer,
    sources_of,
)
from gerund.retrieval.store import IndexMetadata, VectorStore
from gerund.scoring.names import check_measure
from gerund.settings.aliases import TopK, takes_aliases
from gerund.settings.model_spec import ModelSpec
from gerund.types import Answer, Hit

if TYPE_CHECKING:
    from gerund.language_model import LanguageModel
    from gerund.retrieval.answer_generation import AnswerWriter
    from gerund.retrieval.embedding import Embedder


# What needs torch is imported where it is needed: a search for words takes no model and no second to start.
MOST_HITS = 10_000
_MACHINE = ("dtype", "device")


class Index(Asking):
    """Documents that are cut, embedded and stored, to be searched and asked.

    Made by ``gerund.open_index``. Several processes may search one index, and several may add to it.

    Attributes:
        store: where chunks are kept.
        elsewhere: what embeds chunks in the place of this process, and with how many workers; see ``workers``.
    """

    def __init__(
        self,
        store: VectorStore,
        lm: "LanguageModel | ModelSpec | str | Path | None" = None,
        *,
        chunking: Chunking | None = None,
        root: Path | None = None,
    ) -> None:
        """Open what a store holds; see ``open_index``.

        Args:
            store: the store.
            lm: the model.
            chunking: how documents are cut.
            root: what the names of files are relative to, where they lie below it; None leaves them whole.
        """
        self.store = store
        self._given = lm
        self._lm: LanguageModel | None = None if lm is None or isinstance(lm, ModelSpec | str | Path) else _checked(lm)
        self._root = root
        self._about = store.about()
        self._chunking = chunking
        self._embedder: Embedder | None = None
        self._writer_of_answers: AnswerWriter | None = None
        self.elsewhere: tuple[Embed, int] | None = None
        if self._about is not None:
            if self._lm is not None:
                self._demand_encoder(self._lm)
            if chunking is not None and chunking != self._about.chunking:
                raise ConfigError(
                    f"{store.name} is cut into chunks of {self._about.chunking}, not {chunking}; leave these "
                    "options out, or cut it anew with gerund index --migrate"
                )

    def __len__(self) -> int:
        """Return how many chunks there are."""
        return self.store.count()

    @property
    def about(self) -> IndexMetadata | None:
        """What the index says about itself; None where there is none yet."""
        return self._about

    @property
    def chunking(self) -> Chunking:
        """How documents are cut and embedded."""
        return self._about.chunking if self._about is not None else self._chunking or Chunking()

    @property
    def lm(self) -> "LanguageModel":
        """The model, loaded when it is first needed.

        Raises:
            FingerprintError: it is no longer the one that the index was made with.
            ConfigError: the index was made with a model that nothing can load again.
        """
        if self._lm is None:
            given = self._given
            if given is None and self._about is not None:
                given = self._about.model_spec(self.store.name)
            try:
                lm = _loaded(given)
            except ModelError as error:
                if self._given is not None:
                    raise
                raise ModelError(
                    f"the model of {self.store.name} cannot be loaded: {error}; name it where it is now (-m, lm=)"
                ) from error
            self._demand_encoder(lm)
            self._lm = lm
        return self._lm

    def sources(self) -> list[str]:
        """Return the names of all documents, sorted."""
        return sorted(self.store.documents())

    def add(
        self,
        paths: str | Path | Sequence[str | Path],
        *,
        prune: bool = False,
        show_progress: bool | None = None,
        limits: ReadLimits | None = None,
    ) -> IndexSummary:
        """Index files and folders: what is unchanged is passed over, what has changed is replaced.

        A document is called by its file's way from the folder that the index lies in; a row of a table by the file,
        ``#`` and its id (``id`` or ``_id``), or else its line.

        Args:
            paths: files, and folders of files.
            prune: also remove the documents of files in these paths that are no longer there.
            show_progress: None shows a bar on a terminal.
            limits: what reading a document may take; None for the usual limits.

        Returns:
            What was done. Files that could not be read, or have no text, are in ``failed``; all others were indexed. Of
            a file without text, what was stored before is removed.

        Raises:
            DataError: a path is not there, or no file in there can be read.
            FingerprintError: the index was made with another encoder.
            ResourceError: memory or disk ran out; what was stored is kept.
        """
        listed = [paths] if isinstance(paths, str | Path) else list(paths)
        wanted = [place("what is indexed", one) for one in listed]
        if self._about is None:  # what is not there makes no index
            for path in wanted:
                if not path.exists():
                    raise DataError(f"{path}: no such file or folder")
        writer = self._writer(limits)
        writer.add_files(wanted, prune=flag("prune", prune), show_progress=show_progress)
        if error := all_failed(writer.summary):
            raise error
        return writer.tidied()

    def add_documents(self, documents: Iterable[Document]) -> IndexSummary:
        """Index documents that come from no file.

        Raises:
            FingerprintError: the index was made with another encoder.
            ConfigError: something in there is no ``Document``.
        """
        listed = list(documents)
        for one in listed:
            if not isinstance(one, Document):
                raise ConfigError(f"a document is a Document, such as Document('name', 'text'), not {one!r}")
            check_unicode(f"the document {one.source!r}", one.text + one.title)
        writer = self._writer()
        writer.add_documents(listed)
        return writer.tidied()

    def remove(self, sources: str | Sequence[str]) -> IndexSummary:
        """Remove documents by their names.

        Raises:
            DataError: there is no such document.
        """
        writer = self._writer()
        writer.remove([sources] if isinstance(sources, str) else sources)
        return writer.tidied()

    def migrate(self, show_progress: bool | None = None, *, chunking: Chunking | None = None) -> int:
        """Embed every document anew with this index's model, beside the old vectors, and swap in one step.

        Texts come from the index, so files that are gone are kept. Who searches meanwhile finds what was there before.
        An interrupted migration goes on where it was.

        Args:
            show_progress: None shows a bar on a terminal.
            chunking: how documents are cut from now on; None leaves it.

        Returns:
            How many documents were embedded; 0 where nothing was to be done.

        Raises:
            DataError: there is no index yet.
        """
        lm = self._lm or _loaded(self._given)
        count = migrate_index(self.store, lm, chunking, show_progress)
        self._about, self._lm = self.store.about(), lm
        self._embedder = self._writer_of_answers = None
        return count

    @takes_aliases
    def search(
        self,
        query: str,
        k: int = 10,
        *,
        mode: Mode = "hybrid",
        filter: str | None = None,
        weight: float | None = None,
        expand: int = 0,
        rerank: int = 0,
        rerank_by: str | None = None,
        **aliases: Unpack[TopK],
    ) -> list[Hit]:
        """Find the chunks that fit a query best.

        Args:
            query: what is sought; what stands in double quotes must stand so in the chunk, but for ``vectors``.
            k: how many chunks at most.
            mode: ``words`` (BM25, which needs no model), ``vectors``, or ``hybrid``: the first 100 of each, joined.
            filter: a condition in SQL on ``source``, ``file``, ``title``, ``heading``, ``text``, ``start``, ``stop``
                and ``tokens``: comparisons, ``IN``, ``BETWEEN``, ``LIKE``, ``ILIKE``, ``IS NULL``, sums, ``lower``,
                ``upper``, ``length``, ``starts_with``, ``ends_with`` and ``contains``.
            weight: what the vectors count in ``hybrid``, from 0 to 1; None for what the encoder was tuned to
                (``gerund tune --fusion``), else 0.5.
            expand: how many other ways to ask, written by the model, join the query (``lm.expand``).
            rerank: how many of the first hits the model puts into a new order.
            rerank_by: the measure of ``lm.rerank``: ``likelihood`` of the query behind the chunk, which None is too;
                ``model``, the model's own scorer; or ``vectors``.
            aliases: ``top_k`` is another name for ``k``.

        Returns:
            The hits, best first.

        Raises:
            TextError: the query is empty or no text.
            ConfigError: an unknown mode, a filter that cannot be used, an impossible number.
            DataError: there is no index yet.
        """
        del aliases  # replaced by what they stand for
        check_query(query)
        more = {"expand": expand, "rerank": rerank, "rerank_by": rerank_by}
        [hits] = self.search_all([query], k, mode=mode, filter=filter, weight=weight, **more)  # type: ignore[arg-type]
        return hits

    @takes_aliases
    def search_all(
        self,
        queries: Sequence[str],
        k: int = 10,
        *,
        mode: Mode = "hybrid",
        filter: str | None = None,
        weight: float | None = None,
        expand: int = 0,
        rerank: int = 0,
        rerank_by: str | None = None,
        **aliases: Unpack[TopK],
    ) -> list[list[Hit]]:
        """Find the chunks that fit each of several queries best; they are encoded together.

        Settings and errors are those of ``search``.

        Returns:
            The hits of each query, best first.
        """
        del aliases  # replaced by what they stand for
        one_of("mode", mode, MODES)
        check_measure(rerank_by)
        for name, number, least in (("k", k, 1), ("expand", expand, 0), ("rerank", rerank, 0)):
            if not least <= whole_number(name, number) <= MOST_HITS:
                raise ConfigError(f"{name}={number} is not a number from {least} to {MOST_HITS}")
        where = check_filter(filter)
        checked = some_texts("query", "queries", queries)
        weight = self._weight(mode, weight)
        if self._about is None:
            raise DataError(f"{self.store.name}: there is no index yet; add documents first")
        asked = [[one, *(self.lm.expand(one, expand) if expand else [])] for one in checked]
        limit = max(k, rerank, hybrid_search.DEPTH)
        vectors_ND: Sequence[np.ndarray | None] = [None] * len(asked)
        if mode != "words":
            encoded = self._demand_embedder().queries([text for one in asked for text in one])
            vectors_ND = np.split(encoded, np.cumsum([len(one) for one in asked])[:-1])
        pairs = zip(asked, vectors_ND, strict=True)
        found = [joined(*sides(self.store, *pair, mode, limit, where), mode, weight) for pair in pairs]
        if rerank:
            by = rerank_by or RERANK_BY
            found = [reranked(one, hits, rerank, self.lm, by) for one, hits in zip(checked, found, strict=True)]
        return [hits[:k] for hits in found]

    def _prepared(self, asked: Asked) -> Answer | Written:
        settings = {"filter": asked.filter, "weight": asked.weight}
        more = {"rerank": asked.rerank, "rerank_by": asked.rerank_by}
        hits = self.search(asked.searched, asked.k, **settings, **more)  # type: ignore[arg-type]
        assert self._about is not None
        method, language = method_of(asked, self.lm), self._about.chunking.language
        if not any(is_relevant(one, hits, language) for one in dict.fromkeys((asked.question, asked.searched))):
            return no_answer(asked.question, method)
        if method == GENERATE:
            from gerund.retrieval.answer_generation import AnswerWriter

            if self._writer_of_answers is None:
                self._writer_of_answers = AnswerWriter(self.lm)
            return self._writer_of_answers.written(asked, sources_of(hits))
        if asked.approximate_cache is not None:
            raise ConfigError(
                "a quoted answer reads nothing that could be kept: --approximate-cache is for answers that are written "
                "(--generate, or a model that chats)"
            )
        embedder = self._demand_embedder()

        def encode(texts: Sequence[str]) -> np.ndarray:
            return np.concatenate([embedder.queries(texts[:1]), embedder.sentences(texts[1:])])

        return extractive_answer(asked.question, hits, encode, self._about, self._weight("hybrid", asked.weight))

    def _weight(self, mode: str, weight: float | None) -> float:
        if weight is not None:
            return hybrid_search.check_weight(weight)
        if mode != "hybrid" or self._about is None:
            return hybrid_search.WEIGHT
        return hybrid_search.WEIGHT if self.lm.encoder.fusion is None else self.lm.encoder.fusion

    def _demand_embedder(self) -> "Embedder":
        from gerund.retrieval.embedding import Embedder

        if self._embedder is None:
            self._embedder = Embedder(self.lm, self.chunking)
        return self._embedder

    def _demand_encoder(self, lm: "LanguageModel") -> None:
        about = self._about
        if about is None or about.is_searched_by(lm.fingerprint(), lm.space, lm.dimensions):
            return
        raise FingerprintError(
            f"{self.store.name} was made with {about.model} ({about.encoder}, {about.fingerprint})"
            f"{difference(about, lm)}; open it with that model, or migrate it (gerund index --migrate)"
        )

    def _demand_own_encoder(self, lm: "LanguageModel") -> None:
        """Refuse to write with another encoder, were its vectors in the same space: near is not the same."""
        about = self._about
        if about is None or lm.fingerprint() == about.fingerprint:
            return
        raise FingerprintError(
            f"{lm.name} lies in the space of {self.store.name} and may search it; documents are embedded by the model "
            f"that it was made with, {about.model}: add them with that one, or migrate it (gerund index --migrate)"
        )

    def _writer(self, limits: ReadLimits | None = None) -> Writer:
        """Return what writes into the index, which is made if need be; the model is loaded when it is needed."""
        if self._about is None:
            about = about_of(self.lm, self._demand_embedder().chunking)
        elif not self._is_its_own():
            self._demand_own_encoder(self.lm)
        embed, workers = self.elsewhere or (lambda chunks: self._demand_embedder().chunks(chunks), 1)

        def make() -> None:
            self.store.create(about)
            self._about = self.store.about()
            self._demand_own_encoder(self.lm)  # another process may have made it meanwhile

        make_index = make if self._about is None else None
        return Writer(self.store, self._cut, embed, self._root, workers, make=make_index, limits=limits)

    def _is_its_own(self) -> bool:
        """Whether the model that was named is, by its name and settings, the one that the index was made with.

        Then nothing has to be loaded as long as nothing is embedded.
        """
        if self._given is None:
            return True
        if self._about is None or self._about.spec is None or not isinstance(self._given, ModelSpec | str | Path):
            return False
        said = found_from_anywhere(ModelSpec.of(self._given)).model_dump(exclude_unset=True, exclude_none=True)
        return all(self._about.spec.get(name) == value for name, value in said.items() if name not in _MACHINE)

    def _cut(self, document: Document) -> list[Chunk]:
        from gerund.retrieval.chunking import cut

        return cut(document, self.lm.tokenizer, self.chunking)


def _checked(lm: "LanguageModel") -> "LanguageModel":
    if not callable(getattr(lm, "encode_spans", None)):
        raise ConfigError(f"lm is a model of gerund.load, a ModelSpec, or a name, not {lm!r}")
    return lm


def _loaded(given: "LanguageModel | ModelSpec | str | Path | None") -> "LanguageModel":
    from gerund.entry import load

    return load(given) if given is None or isinstance(given, ModelSpec | str | Path) else given


def open_index(
    where: "str | Path | VectorStore | None" = None,
    lm: "LanguageModel | ModelSpec | str | Path | None" = None,
    *,
    chunking: Chunking | None = None,
) -> "Index":
    """Open an index of documents; where there is none yet, the first ``add`` makes it.

    Args:
        where: a folder; the path of an object store, such as ``s3://bucket/my.index``; a store; or None for an index in
            memory.
        lm: the model, in memory or as ``gerund.load`` takes it; None loads the one that the index was made with when it
            is needed, for a new index the bundled one.
        chunking: how documents are cut and embedded; None leaves it as the index has it, and takes the defaults for a
            new one.

    Raises:
        FingerprintError: the index was made with another encoder.
        ConfigError: it was cut in another way, or ``where`` is no path.
        DataError: there is something else.
        MissingDependencyError: LanceDB is not installed.

    >>> index = gerund.open_index(None, gerund.load())
    >>> texts = {"bread": "Bread is made of flour.", "rail": "Trains need rails."}
    >>> _ = index.add_documents([gerund.Document(name, text) for name, text in texts.items()])
    >>> [hit] = index.search("flour for bread", k=1)
    >>> hit.source, hit.text
    ('bread', 'Bread is made of flour.')
    """
    if chunking is not None and not isinstance(chunking, Chunking):
        raise ConfigError(f"chunking is a Chunking, such as Chunking(tokens=128), not {chunking!r}")
    if not (where is None or isinstance(where, str | Path) or callable(getattr(where, "vectors", None))):
        raise ConfigError(f"the index is a folder, a store or None, not {where!r}")
    root = None
    if where is None:
        root = Path.cwd()
    elif isinstance(where, str | Path) and not is_remote(str(where)):
        root = place("the index", where).resolve().parent
    store = where if where is not None and not isinstance(where, str | Path) else store_at(where)
    return Index(store, lm, chunking=chunking, root=root)


def demand_index(where: str, *, opened: bool = True) -> None:
    """Refuse a place where there is no index.

    Args:
        where: a folder, or the path of an object store.
        opened: whether the index is opened too, for which LanceDB is imported; without, its folder is looked at.

    Raises:
        DataError: there is none, with the command that makes one.
    """
    if not is_remote(where) and not Path(where).exists():
        raise DataError(f"{where}: no such index; gerund index PATHS -o {where} makes one")
    store = LanceStore(where)
    if not store.is_there or (opened and store.about() is None):
        raise DataError(f"{where}: there is no index in it; gerund index PATHS -o {where} makes one")


def store_at(where: str | Path | None) -> VectorStore:
    """Return the store at a place: a folder, the path of an object store, or None for one in memory.

    Raises:
        ConfigError: it is no path.
        DataError: there is something else.
    """
    if where is None:
        return MemoryStore()
    return LanceStore(where if is_remote(str(where)) else place("the index", where))
