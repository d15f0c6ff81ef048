"""``gerund.open_index`` and ``Index``: add documents, search them and ask questions, with one model."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np

from gerund.checks import flag, one_of, place, some_texts, whole_number
from gerund.errors import ConfigError, DataError, FingerprintError, ModelError
from gerund.models.light_runtime import return_freed_memory
from gerund.models.sources import SENTENCE_TRANSFORMERS, with_absolute_paths
from gerund.retrieval import hybrid_search
from gerund.retrieval.document_reader import ReadLimits
from gerund.retrieval.documents import Chunk, Chunking, Document, check_document, chunk_id, is_source, rebuilt
from gerund.retrieval.filters import check_filter
from gerund.retrieval.hybrid_search import MODES, Mode, check_query, rankings, reranked, to_hits
from gerund.retrieval.indexing import Embed, IndexSummary, Writer, all_failed, difference, metadata_for, migrate_index
from gerund.retrieval.lance_store import LanceStore, is_remote
from gerund.retrieval.memory_store import MemoryStore
from gerund.retrieval.model_check import refuse_other_dimensions
from gerund.retrieval.question_answering import (
    EXTRACTIVE,
    GENERATE,
    Method,
    PendingAnswer,
    Question,
    QuestionAnswering,
    extractive_answer,
    is_relevant,
    no_answer,
    sources_of,
)
from gerund.retrieval.quotation import best_sentence
from gerund.retrieval.store import IndexMetadata, VectorStore, from_bytes
from gerund.settings.aliases import TopK, takes_aliases
from gerund.settings.model_spec import ModelSpec
from gerund.settings.ranking import MAXSIM, MOST_HITS, TRAINED_FUSION, RerankKeywords, SecondStage
from gerund.types import Answer, Hit, Hits, Ranking, Source

if TYPE_CHECKING:
    from gerund.inference.sentence_encoder import SentenceEncoder
    from gerund.language_model import LanguageModel
    from gerund.retrieval.answer_generation import AnswerGenerator
    from gerund.retrieval.embedding import Embedder
    from gerund.retrieval.query_head import ConversationReader, QueryHead
    from gerund.retrieval.questions import WeightChoice
    from gerund.scoring.late_interaction import TokenRarity


# Modules that need torch are imported where they are used: a keyword search needs no model and starts in a second.
MOST_TEXTS = 100_000
# Chunks in which tokens are counted.
_COUNTED = 1000
_MACHINE_SETTINGS = ("dtype", "device", "runtime", "weights")


class SearchKeywords(TopK, RerankKeywords, total=False):
    """Settings of a search by names that others use too."""


class Index(QuestionAnswering):
    """Documents that are split into chunks, embedded and stored, to be searched and asked.

    Created by ``gerund.open_index``. Several processes can search an index, and several can add to it.

    Attributes:
        store: stores the chunks.
        elsewhere: embeds chunks instead of this process, and with how many workers; see ``embedding.embedded_by``.
    """

    def __init__(
        self,
        store: VectorStore,
        lm: "LanguageModel | SentenceEncoder | ModelSpec | str | Path | None" = None,
        *,
        answer_with: "LanguageModel | ModelSpec | str | Path | None" = None,
        chunking: Chunking | None = None,
        root: Path | None = None,
    ) -> None:
        """Open a store; see ``open_index``. File names are relative to ``root`` if they are below it."""
        self.store = store
        self._given, self._answer_with = lm, answer_with
        self._encoder: LanguageModel | SentenceEncoder | None = None if _is_spec(lm) else _checked(lm)
        self._lm: LanguageModel | None = None
        self._root = root
        self._about: IndexMetadata | None = None
        self._chunking = chunking
        self._embedder: Embedder | None = None
        self._generator: AnswerGenerator | None = None
        self._head: QueryHead | None = None
        self._conversation: ConversationReader | None = None
        self._rarity: TokenRarity | None = None
        self.elsewhere: tuple[Embed, int] | None = None
        self._read_about()

    def __len__(self) -> int:
        """Return the number of chunks."""
        return self.store.count()

    @property
    def about(self) -> IndexMetadata | None:
        """The index's metadata; None where there is no index yet."""
        return self._read_about()

    @property
    def chunking(self) -> Chunking:
        """How documents are split and embedded."""
        return self._about.chunking if self._about is not None else self._chunking or Chunking()

    @property
    def lm(self) -> "LanguageModel":
        """The model that answers, expands and re-ranks: the encoder unless another is named; loaded on first use.

        Raises:
            ConfigError: the encoder is run by sentence-transformers, which generates nothing, and there is no other.
        """
        if self._lm is None:
            if self._answer_with is not None:
                self._lm = _loaded(self._answer_with)
            elif hasattr(self.encoder, "generate"):
                self._lm = self.encoder  # type: ignore[assignment]
            else:
                raise ConfigError(
                    f"{self.encoder.name} is an encoder and generates nothing; name a language model that answers, "
                    "expands and re-ranks (--answer-with, answer_with=), or quote (--extractive)"
                )
        return self._lm  # type: ignore[return-value]

    @property
    def encoder(self) -> "LanguageModel | SentenceEncoder":
        """The model of the vectors, loaded on first use.

        Raises:
            FingerprintError: it is no longer the model that the index was made with.
            ConfigError: the index was made with a model in memory, which cannot be loaded again.
        """
        if self._encoder is None:
            about = self._read_about()
            # A model that isn't loaded yet is refused by what its files say.
            if self._about is not None and isinstance(self._given, ModelSpec | str | Path):
                refuse_other_dimensions(self._about, self.store.name, self._given)
            encoder = self._load_encoder(about)
            if about is not None:
                self._require_encoder(encoder, about)
            self._encoder = encoder
        return self._encoder

    def _load_encoder(self, about: IndexMetadata | None) -> "LanguageModel | SentenceEncoder":
        """Load the model that was given, or else the index's."""
        if self._given is not None or about is None:
            return load_encoder(self._given)
        try:
            return load_encoder(about.model_spec(self.store.name))
        except ModelError as error:
            raise ModelError(
                f"the model of {self.store.name} cannot be loaded: {error}; name it where it is now (-m, lm=)"
            ) from error

    def sources(self) -> list[str]:
        """Return the names of all documents, sorted."""
        return sorted(self.store.documents())

    def document(self, source: str) -> Document | None:
        """Return a document as it was indexed; None where there is none of this name.

        White space between its chunks is returned as line ends; all offsets are those of the hits.
        """
        if not is_source(source):
            return None
        chunks = self.store.chunks_of([source])
        return rebuilt(chunks) if chunks else None

    def add(
        self,
        paths: str | Path | Sequence[str | Path],
        *,
        prune: bool = False,
        show_progress: bool | None = None,
        limits: ReadLimits | None = None,
    ) -> IndexSummary:
        """Index files and folders: unchanged files are skipped, changed ones replaced.

        A document's name is its file's path relative to the folder that contains the index; that of a row of a table is
        the file, ``#`` and its id (``id`` or ``_id``), or else its line, such as ``L2``.

        Args:
            paths: files, and folders of files.
            prune: also remove the documents of files in these paths that no longer exist.
            show_progress: None shows a bar on a terminal.
            limits: time and memory for reading a document; None for the default limits.

        Returns:
            A summary. Files that could not be read, or have no text, are in ``failed``; all others were indexed. For a
            file without text, the stored documents are removed.

        Raises:
            DataError: a path does not exist, or none of its files can be read.
            FingerprintError: the index was made with another encoder.
            ResourceError: memory or disk ran out; what was stored is kept.
        """
        listed = [place("what is indexed", path) for path in ([paths] if isinstance(paths, str | Path) else paths)]
        if self._read_about() is None:  # a mistyped path creates no index
            for path in listed:
                if not path.exists():
                    raise DataError(f"{path}: no such file or folder")
        writer = self._writer(limits)
        writer.add_files(listed, prune=flag("prune", prune), show_progress=show_progress)
        if error := all_failed(writer.summary):
            raise error
        return writer.tidied()

    def add_documents(self, documents: Iterable[Document]) -> IndexSummary:
        """Index documents that come from no file.

        Raises:
            FingerprintError: the index was made with another encoder.
            ConfigError: an element is not a ``Document``.
            TextError: its source, text, title or a heading is not a text that can be stored.
        """
        listed = list(documents)
        for document in listed:
            check_document(document)
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
        """Re-embed every document with this index's model, and atomically replace the old vectors.

        Texts come from the index, so documents whose files were deleted are kept. Searches during the migration use
        the old vectors. An interrupted migration resumes.

        Args:
            show_progress: None shows a bar on a terminal.
            chunking: the new chunking; None leaves it unchanged.

        Returns:
            The number of re-embedded documents; 0 where nothing has changed.

        Raises:
            DataError: there is no index yet.
            ConfigError: the index was made with a model in memory, and no model was given.
        """
        about = self.store.about()
        if about is None:
            raise DataError(f"{self.store.name}: there is no index yet, so nothing to migrate")
        encoder = self._encoder or self._load_encoder(about)
        count = migrate_index(self.store, encoder, chunking, show_progress)
        self._about, self._encoder = self.store.about(), encoder
        self._embedder = self._generator = self._head = self._conversation = self._rarity = None
        return count

    def choose_weight(self, questions: int = 30, *, seed: int = 0) -> "WeightChoice":
        """Choose what vectors count in hybrid searches, on questions that the model writes to the documents.

        The model writes a question to each of some chunks, and the weight wins that ranks their documents highest. It
        is stored with the index, until vectors are made anew (``migrate``).

        Args:
            questions: how many questions.
            seed: of the sample of chunks.

        Returns:
            The weight, with the questions and how every weight did.

        Raises:
            DataError: the index has fewer than two documents, or the model writes no question.
            ConfigError: the model does not generate, or ``questions`` is not a number from 1 to 10000.
        """
        from gerund.retrieval.questions import choose_weight

        if not 1 <= whole_number("questions", questions) <= MOST_HITS:
            raise ConfigError(f"questions={questions} is not a number from 1 to {MOST_HITS}")
        self._require_about()
        choice = choose_weight(self.store, self.lm, self._require_embedder().queries, questions, seed=seed)
        self.store.set_weight(choice.weight)
        self._about = self.store.about()
        return choice

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
        **more: Unpack[SearchKeywords],
    ) -> Hits:
        """Find the chunks that match a query best.

        Args:
            query: the query; text in double quotes must occur unchanged in the chunk, except in mode ``vectors``.
            k: maximum number of chunks.
            mode: ``words`` (BM25, which needs no model), ``vectors``, or ``hybrid``: the first 100 of each, fused.
            filter: a condition in SQL on ``source``, ``file``, ``title``, ``heading``, ``text``, ``start``, ``stop``
                and ``tokens``: comparisons, ``IN``, ``BETWEEN``, ``LIKE``, ``ILIKE``, ``IS NULL``, sums, ``lower``,
                ``upper``, ``length``, ``starts_with``, ``ends_with`` and ``contains``.
            weight: weight of the vectors in ``hybrid``, from 0 to 1; None for the index's (``choose_weight``), the
                encoder's (``lm.fusion_weight``).
            expand: number of query expansions that the model generates (``lm.expand``).
            more: ``rerank``, the number of the first hits that the model re-ranks, and ``rerank_by``,
                ``rerank_weight`` and ``rerank_deadline``; see ``SearchKeywords``. ``top_k`` is another name for ``k``.

        Returns:
            The hits, best first; ``rerank`` of the list has what re-ranking cost.

        Raises:
            TextError: the query is empty or not a string.
            ConfigError: an unknown mode, a filter that cannot be used, an impossible number.
            DataError: there is no index yet.
        """
        check_query(query)
        how = {"filter": filter, "weight": weight, "expand": expand, **more}
        [hits] = self.search_all([query], k, mode=mode, **how)  # type: ignore[arg-type]
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
        **more: Unpack[SearchKeywords],
    ) -> list[Hits]:
        """Find the chunks that match each of several queries best; the queries are encoded together.

        Settings and errors are those of ``search``.

        Returns:
            The hits of each query, best first.
        """
        one_of("mode", mode, MODES)
        second = SecondStage.of(more)
        for name, number, least in (("k", k, 1), ("expand", expand, 0)):
            if not least <= whole_number(name, number) <= MOST_HITS:
                raise ConfigError(f"{name}={number} is not a number from {least} to {MOST_HITS}")
        where = check_filter(filter)
        checked = some_texts("query", "queries", queries)
        self._read_about()
        weight = self._weight(mode, weight)
        self._require_about()
        if not checked:
            return []
        expanded = [[query, *(self.lm.expand(query, expand) if expand else [])] for query in checked]
        limit = max(k, second.rerank, hybrid_search.DEPTH)
        vectors_ND: Sequence[np.ndarray | None] = [None] * len(expanded)
        if mode != "words":
            encoded_ND = self._require_embedder().queries([text for texts in expanded for text in texts])
            vectors_ND = np.split(encoded_ND, np.cumsum([len(texts) for texts in expanded])[:-1])
        pairs = zip(expanded, vectors_ND, strict=True)
        hits = [Hits(to_hits(*rankings(self.store, *pair, mode, limit, where), mode, weight)) for pair in pairs]
        if second.rerank:
            rank = self._second_rank(second)
            hits = [reranked(query, of_query, rank, second) for query, of_query in zip(checked, hits, strict=True)]
        return [Hits(of_query[:k], of_query.rerank) for of_query in hits]

    def prepare(self, question: Question) -> Answer | PendingAnswer:
        """Return the answer to a checked question, or what a model generates it from."""
        reader = self._reader(question)
        hits = self._hits(question, None if reader is None else reader.vector(question))
        assert self._about is not None
        method, language = self._method(question), self._about.chunking.language
        if not any(is_relevant(text, hits, language) for text in {question.question, question.search_query}):
            return no_answer(question.question, method, hits.rerank)
        if method == GENERATE:
            return self._pending(question, hits, reader)
        if question.approximate_cache is not None:
            raise ConfigError(
                "a quoted answer reads nothing that could be kept: --approximate-cache is for answers that are written "
                "(--generate, or a model that chats)"
            )
        return extractive_answer(question.question, hits, self._best_sentence(question, hits))

    def _pending(self, question: Question, hits: Hits, reader: "ConversationReader | None") -> PendingAnswer:
        """Return an answer that the model is about to generate, from the hits or from their best sentence."""
        from gerund.retrieval.answer_generation import AnswerGenerator, SentenceAnswerGenerator

        lm, sources = self.lm, sources_of(hits)
        sentence: Source | None = None
        if question.reads_sentence(lm, has_reader=reader is not None):
            sentence = self._best_sentence(question, hits)
        elif question.approximate_cache is not None:
            lm = by_torch(lm)
        kind = AnswerGenerator if sentence is None else SentenceAnswerGenerator
        if self._generator is None or self._generator.lm is not lm or type(self._generator) is not kind:
            self._generator = kind(lm)
        generator = reader if reader is not None and sentence is None else self._generator
        pending = generator.prepare(question, sources if sentence is None else [sentence])

        def quote() -> Answer:
            best = self._best_sentence(question, hits) if sentence is None else sentence
            return extractive_answer(question.question, hits, best)

        fallback = quote if question.fallback else None
        return replace(pending, language=self.chunking.language, quote=fallback, rerank=hits.rerank)

    def _hits(self, question: Question, vector_D: np.ndarray | None) -> Hits:
        """Return the chunks that match a question best, by the vector of its conversation if there is one."""
        settings = {"filter": question.filter, "weight": question.weight, **question.second.keywords}
        if vector_D is None or question.second.rerank:
            return self.search(question.search_query, question.k, **settings)  # type: ignore[arg-type]
        where, limit = check_filter(question.filter), max(question.k, hybrid_search.DEPTH)
        matches = rankings(self.store, [question.search_query], vector_D[None], "hybrid", limit, where)
        return Hits(to_hits(*matches, "hybrid", self._weight("hybrid", question.weight))[: question.k])

    def _reader(self, question: Question) -> "ConversationReader | None":
        """Return what searches by the conversation's own states; None without a query head, or outside of a chat."""
        if not question.chat or self.query_head is None:
            return None
        from gerund.retrieval.query_head import ConversationReader

        if self._conversation is None or self._conversation.head is not self.query_head:
            self._conversation = ConversationReader(by_torch(self.lm), self.query_head)
        return self._conversation

    @property
    def query_head(self) -> "QueryHead | None":
        """The head that turns a conversation's states into query vectors; None where none was fitted.

        Raises:
            FingerprintError: it was fitted for another model.
            DataError: its file cannot be read.
        """
        path = self._head_path()
        if self._head is None and path is not None and path.is_file():
            from gerund.retrieval.query_head import QueryHead

            self._head = QueryHead.load(path, by_torch(self.lm), self.encoder.fingerprint())
        return self._head

    def fit_query_head(self, texts: int = 3000, *, seed: int = 0) -> "QueryHead":
        """Fit the head with which ``chat=True`` searches by the conversation's own states, and store it.

        It is fitted on sentences of the index, without labels, and stored in the index's folder.

        Args:
            texts: most sentences.
            seed: of their sample.

        Raises:
            DataError: there is no index yet, or it has too few sentences.
            ConfigError: the index is not in a local folder or in memory, or the model does not give its states.
        """
        from gerund.retrieval.query_head import fit_query_head

        if not 1 <= whole_number("texts", texts) <= MOST_TEXTS:
            raise ConfigError(f"texts={texts} is not a number from 1 to {MOST_TEXTS}")
        self._require_about()
        if is_remote(self.store.name):
            raise ConfigError("a query head is stored in the index's folder, which has to be on this machine")
        encode, encoder = self._require_embedder().queries, self.encoder.fingerprint()
        self._head = fit_query_head(
            self.store, by_torch(self.lm), encode, encoder, self.chunking.language, texts, seed=seed
        )
        if (path := self._head_path()) is not None:
            self._head.save(path)
        return self._head

    def _head_path(self) -> Path | None:
        """Return where the head is stored; None for an index in memory or on an object store."""
        is_local = isinstance(self.store, LanceStore) and not is_remote(self.store.name)
        return Path(self.store.name) / "query-head.safetensors" if is_local else None

    def _second_rank(self, second: SecondStage) -> hybrid_search.Rank:
        """Return what ranks the first hits: by the token vectors that are stored, or else the model that reads them."""
        by = second.rerank_by or self.lm.default_measure(is_second=True)
        if by == MAXSIM and self.chunking.multi:
            return self._rank_stored
        return lambda query, hits, **how: self.lm.rerank(query, [hit.text for hit in hits], by=by, **how)  # type: ignore[arg-type]

    def _rank_stored(self, query: str, hits: Sequence[Hit], **how: Any) -> Ranking:
        """Rank hits by late interaction with their stored token vectors.

        Raises:
            FingerprintError: they were made with another projection than the encoder has now.
        """
        from gerund.scoring.late_interaction import LateInteraction
        from gerund.scoring.relevance import rank

        assert self._about is not None
        lm: Any = self.encoder
        if lm.token_reader().fingerprint != self._about.late:
            raise FingerprintError(
                f"the token vectors of {self.store.name} were made otherwise than {lm.name} makes them now; migrate it "
                "(gerund index --migrate)"
            )
        ids = [chunk_id(hit.source, hit.start) for hit in hits]
        stored = self.store.token_vectors(ids)
        texts = [hit.text for hit in hits]
        known = {text: from_bytes(stored[key]) for text, key in zip(texts, ids, strict=True) if key in stored}
        late = partial(LateInteraction, lm, query, known, self._token_rarity())
        return rank(lm, query, texts, by=MAXSIM, scorer=None, late=late, **how)

    def _token_rarity(self) -> "TokenRarity":
        """Return how rare tokens are in chunks of some documents of the index, counted at the first search."""
        from gerund.scoring.late_interaction import TokenRarity

        if self._rarity is None:
            lm: Any = self.encoder
            sources = self.sources()
            chosen = random.Random(0).sample(sources, min(_COUNTED, len(sources)))
            reader = lm.token_reader()
            texts = [chunk.text for chunk in self.store.chunks_of(chosen)][:_COUNTED]
            self._rarity = TokenRarity(map(reader.ids, reader.tokens(texts, is_query=False, empty="zeros")))
        return self._rarity

    def _best_sentence(self, question: Question, hits: Sequence[Hit]) -> Source:
        embedder = self._require_embedder()
        assert self._about is not None

        def encode(texts: Sequence[str]) -> np.ndarray:
            return np.concatenate([embedder.queries(texts[:1]), embedder.sentences(texts[1:])])

        return best_sentence(question.question, hits, encode, self._about, self._weight("hybrid", question.weight))

    def _method(self, question: Question) -> Method:
        """Return the method: as requested; an encoder that generates nothing quotes."""
        if question.method is None and self._answer_with is None and not hasattr(self.encoder, "generate"):
            return EXTRACTIVE
        return question.method_for(self.lm) if question.method is None else question.method

    def _weight(self, mode: str, weight: float | None) -> float:
        if weight is not None:
            if mode != "hybrid":
                raise ConfigError(f"the weight is for mode=hybrid; leave it, or mode={mode}, out")
            return hybrid_search.check_weight(weight)
        if mode != "hybrid" or self._about is None:
            return TRAINED_FUSION  # nothing is fused
        return self.encoder.fusion_weight if self._about.weight is None else self._about.weight

    def _require_embedder(self) -> "Embedder":
        from gerund.retrieval.embedding import Embedder

        if self._embedder is None:
            self._embedder = Embedder(self.encoder, self.chunking)
        return self._embedder

    def _read_about(self) -> IndexMetadata | None:
        """Return the index's metadata, which another process may have created since the index was opened.

        Raises:
            FingerprintError: the index was made with another encoder than this one's.
            ConfigError: it has another chunking than this one's.
        """
        if self._about is None and (about := self.store.about()) is not None:
            if self._encoder is not None:
                self._require_encoder(self._encoder, about)
            if self._chunking is not None and self._chunking != about.chunking:
                raise self._other_chunking(about, self._chunking)
            self._about, self._embedder = about, None  # an embedder made before has another chunking
        return self._about

    def _require_about(self) -> IndexMetadata:
        if (about := self._read_about()) is None:
            raise DataError(f"{self.store.name}: there is no index yet; add documents first")
        return about

    def _other_chunking(self, about: IndexMetadata, chunking: Chunking) -> ConfigError:
        return ConfigError(
            f"{self.store.name} is cut into chunks of {about.chunking}, not {chunking}; leave these options out, or "
            "cut it anew with gerund index --migrate"
        )

    def _require_encoder(self, lm: "LanguageModel | SentenceEncoder", about: IndexMetadata) -> None:
        """Refuse a model whose vectors cannot be compared with the stored ones."""
        if about.is_searched_by(lm.fingerprint(), lm.space, lm.dimensions):
            return
        raise FingerprintError(
            f"{self.store.name} was made with {about.model} ({about.encoder}, {about.fingerprint})"
            f"{difference(about, lm)}; open it with that model, or migrate it (gerund index --migrate)"
        )

    def _require_own_encoder(self, lm: "LanguageModel | SentenceEncoder") -> None:
        """Refuse to embed documents with another encoder, even if its vectors are in the same space."""
        about = self._about
        if about is None or lm.fingerprint() == about.fingerprint:
            return
        raise FingerprintError(
            f"{lm.name} lies in the space of {self.store.name} and may search it; documents are embedded by the model "
            f"that it was made with, {about.model}: add them with that one, or migrate it (gerund index --migrate)"
        )

    def _writer(self, limits: ReadLimits | None = None) -> Writer:
        """Return a writer, which creates the index if needed; the model is loaded when the writer needs it."""
        embed, workers = self.elsewhere or (lambda chunks: self._require_embedder().embedded(chunks), 1)
        make = None
        if self._read_about() is None:
            about = metadata_for(self.encoder, self._require_embedder().chunking)

            def make() -> None:
                self.store.create(about)
                # Another process may have created it in the meantime.
                if (made := self.store.about()) is not None and made.chunking != about.chunking:
                    raise self._other_chunking(made, about.chunking)
                self._about = made
                self._require_own_encoder(self.encoder)

        elif not self._is_own_model():
            self._require_own_encoder(self.encoder)
        return Writer(self.store, self._cut, embed, self._root, workers, make=make, limits=limits)

    def _is_own_model(self) -> bool:
        """Whether the given model is, by name and settings, that of the index, so it is only loaded for embedding."""
        if self._given is None:
            return True
        if self._about is None or self._about.spec is None or not isinstance(self._given, ModelSpec | str | Path):
            return False
        given = with_absolute_paths(ModelSpec.of(self._given)).model_dump(exclude_unset=True, exclude_none=True)
        return all(
            self._about.spec.get(name) == value for name, value in given.items() if name not in _MACHINE_SETTINGS
        )

    def _cut(self, document: Document) -> list[Chunk]:
        from gerund.retrieval.documents import cut

        return cut(document, self.encoder.tokenizer, self.chunking)


def _is_spec(lm: object) -> bool:
    """Whether a model is yet to be loaded."""
    return lm is None or isinstance(lm, ModelSpec | str | Path)


def _checked(lm: Any) -> Any:
    if not (callable(getattr(lm, "encode", None)) and callable(getattr(lm, "fingerprint", None))):
        raise ConfigError(f"`lm` must be a model of gerund.load, a ModelSpec or a name, got {lm!r}")
    return lm


def _loaded(lm: Any) -> "LanguageModel":
    from gerund.light_entry import load

    return load(lm) if _is_spec(lm) else lm


def by_torch(lm: Any) -> Any:
    """Return a model as torch computes it, with its sessions and layers."""
    return getattr(lm, "full", lm)


def load_encoder(encoder: Any) -> "LanguageModel | SentenceEncoder":
    """Load an encoder as ``open_index`` takes it."""
    name = encoder.model if isinstance(encoder, ModelSpec) else encoder
    if not (isinstance(name, str) and name.startswith(SENTENCE_TRANSFORMERS)):
        return _loaded(encoder)
    from gerund.inference.sentence_encoder import SentenceEncoder

    return_freed_memory(returns=False)  # which torch computes
    spec = ModelSpec.of(encoder)
    if others := spec.model_fields_set - {"model", *_MACHINE_SETTINGS} | ({"weights"} if spec.weights else set()):
        option = sorted(others)[0].replace("_", "-")
        raise ConfigError(f"{name} is run by sentence-transformers, which has no setting {option!r}")
    return SentenceEncoder(spec.model.removeprefix(SENTENCE_TRANSFORMERS), device=spec.device)


def open_index(
    where: "str | Path | VectorStore | None" = None,
    lm: "LanguageModel | SentenceEncoder | ModelSpec | str | Path | None" = None,
    *,
    answer_with: "LanguageModel | ModelSpec | str | Path | None" = None,
    chunking: Chunking | None = None,
) -> "Index":
    """Open an index of documents; the first ``add`` creates it.

    Args:
        where: a folder; the path of an object store, such as ``s3://bucket/my.index``; a store; or None for an index in
            memory.
        lm: the model, in memory or as ``gerund.load`` takes it; None loads the index's model when it is needed, and
            the bundled model for a new index. ``st:`` before a folder or hub id is an encoder that
            sentence-transformers runs.
        answer_with: another language model to answer, expand queries and re-rank with; None for ``lm``.
        chunking: how documents are split and embedded; None for the index's chunking, and the defaults for a new index.

    Raises:
        FingerprintError: the index was made with another encoder.
        ConfigError: it has another chunking, or ``where`` is not a path.
        DataError: the folder is not an index.
        MissingDependencyError: LanceDB is not installed.

    >>> index = gerund.open_index(None, gerund.load())
    >>> texts = {"bread": "Bread is made of flour.", "rail": "Trains need rails."}
    >>> _ = index.add_documents([gerund.Document(name, text) for name, text in texts.items()])
    >>> [hit] = index.search("flour for bread", k=1)
    >>> hit.source, hit.text
    ('bread', 'Bread is made of flour.')
    """
    if chunking is not None and not isinstance(chunking, Chunking):
        raise ConfigError(f"`chunking` must be a Chunking, such as Chunking(tokens=128), got {chunking!r}")
    if not (where is None or isinstance(where, str | Path) or callable(getattr(where, "vectors", None))):
        raise ConfigError(f"`where` must be a folder, a store or None, got {where!r}")
    root = None
    if where is None:
        root = Path.cwd()
    elif isinstance(where, str | Path) and not is_remote(str(where)):
        root = place("the index", where).resolve().parent
    store = where if where is not None and not isinstance(where, str | Path) else store_at(where)
    return Index(store, lm, answer_with=answer_with, chunking=chunking, root=root)


def demand_index(where: str, *, opened: bool = True) -> IndexMetadata | None:
    """Return what an index says of itself, and refuse a place without one.

    With ``opened`` False only its folder is checked, without importing LanceDB, and None returned.
    """
    if not is_remote(where) and not Path(where).exists():
        raise DataError(f"{where}: no such index; gerund index PATHS -o {where} makes one")
    store = LanceStore(where)
    about = store.about() if opened and store.is_there else None
    if not store.is_there or (opened and about is None):
        raise DataError(f"{where}: there is no index in it; gerund index PATHS -o {where} makes one")
    return about


def store_at(where: str | Path | None) -> VectorStore:
    """Return the store at a place: a folder, the path of an object store, or None for a store in memory."""
    if where is None:
        return MemoryStore()
    return LanceStore(where if is_remote(str(where)) else place("the index", where))
