"""Retrieval tasks: ranking a collection, re-ranking candidates, and finding passages by their title."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import ClassVar

from gerund.data.corpus import Document, read_documents
from gerund.data.passages import split_sentences
from gerund.errors import ConfigError, DataError
from gerund.evaluation.data_files import (
    CORPORA_FOLDER,
    Collection,
    collection_files,
    read_candidates,
    read_collection,
    read_titled,
    test_files,
)
from gerund.evaluation.mteb import LocalTask, run_search, score_of
from gerund.evaluation.systems.base import Ranks
from gerund.evaluation.systems.search import bm25_candidates
from gerund.evaluation.task import EvaluationConfig, FileTask, FolderTask, Score, Side, Task


@dataclass(frozen=True, kw_only=True)
class CollectionTask(FolderTask):
    """A task on a collection of documents. A prompt goes before queries, never before documents.

    ``config.limit`` takes the first queries that have judgements; all documents stay.

    Attributes:
        files: those of the collection, in one folder (``qrels`` and ``candidates`` below it).
    """

    side: ClassVar[Side] = "representation"
    requires: ClassVar[type] = Ranks
    data_folder: ClassVar[str] = "retrieval"
    splits_of: ClassVar[Callable[[Path], dict[str, Path]]] = collection_files
    needed_splits: ClassVar[tuple[str, ...]] = ("corpus", "queries", "test")

    def collection(self, config: EvaluationConfig) -> Collection:
        """Return the documents, and the queries that are scored."""
        return read_collection(self.splits, config.split).first(config.limit)

    def texts(self, config: EvaluationConfig) -> list[str]:
        """Return the queries, and the documents too unless only queries have the prompt."""
        return texts_of(self.collection(config), self.prompt(config))


@dataclass(frozen=True, kw_only=True)
class Retrieval(CollectionTask):
    """nDCG@10 of ranking all documents by cosine, as MTEB and BEIR compute it (with trec_eval's measures).

    The files are ``retrieval/NAME/{corpus,queries}.jsonl`` and ``qrels/test.tsv``. A query without judgements
    is not scored; one whose judgements name no relevant document counts as 0. A query that is itself a document, with
    the same id and the same text, is left out of its own ranking unless it is judged relevant.
    """

    kind: ClassVar[str] = "retrieval"

    def run(self, system: Ranks, config: EvaluationConfig) -> Score:
        """Measure."""
        collection = self.collection(config)
        return retrieved(self.name, collection, system, config, self.prompt(config), notes_on(collection))


def retrieved(
    name: str,
    collection: Collection,
    system: Ranks,
    config: EvaluationConfig,
    prompt: str | None,
    notes: Sequence[str] = (),
) -> Score:
    """Rank all documents of a collection for each of its queries."""
    local = search_task(name, "Retrieval", "ndcg_at_10", collection)
    scores = run_search(local, collection.judgements, system, config, prompt, itself=collection.itself)
    others = ("recall_at_10", "recall_at_100", "mrr_at_10", "map_at_1000")
    return score_of(scores, local.main, others, size=len(collection.queries), notes=notes)


def texts_of(collection: Collection, prompt: str | None) -> list[str]:
    """Return the queries, and the documents too unless only queries have the prompt."""
    documents = list(collection.documents.values()) if prompt is None else []
    return [*collection.queries.values(), *documents]


def search_task(name: str, type_: str, main: str, collection: Collection) -> LocalTask:
    """Return a collection as one of MTEB's tasks of retrieval or re-ranking."""
    corpus = {
        "id": list(collection.titles),
        "title": list(collection.titles.values()),
        "text": list(collection.bodies.values()),
    }
    queries = {"id": list(collection.queries), "text": list(collection.queries.values())}
    return LocalTask(name, "AbsTaskRetrieval", type_, main, {"corpus": corpus, "queries": queries})


def notes_on(collection: Collection) -> tuple[str, ...]:
    """Return the notes of a score on a collection."""
    notes = []
    if collection.unjudged:
        notes.append(f"queries without judgements, which are not scored: {collection.unjudged}")
    if collection.hopeless:
        notes.append(f"queries without a relevant document, which count as 0: {collection.hopeless}")
    if collection.itself:
        notes.append(f"queries that are documents too, left out of their own rankings: {len(collection.itself)}")
    return tuple(notes)


@dataclass(frozen=True, kw_only=True)
class Reranking(CollectionTask):
    """Mean average precision of ranking each query's candidates by cosine, as MTEB computes it.

    The candidates are those of ``retrieval/NAME/candidates/test.tsv`` or, without that file, what BM25 finds
    first. Relevant documents that are not candidates count as missed, so that the scores of
    retrieval and re-ranking can be compared. A query that is itself a document is not its own
    candidate unless it is judged relevant.
    """

    kind: ClassVar[str] = "reranking"

    candidates: int = field(default=100, metadata={"help": "Documents that BM25 offers a query, without a file."})

    def __post_init__(self) -> None:
        if self.candidates < 1:
            raise ConfigError(f"{self.kind}: candidates is 1 or more")

    def run(self, system: Ranks, config: EvaluationConfig) -> Score:
        """Measure."""
        collection = self.collection(config)
        offered, origin = self._candidates(collection, config)
        local = search_task(self.name, "Reranking", "map_at_1000", collection)
        scores = run_search(local, collection.judgements, system, config, self.prompt(config), offered)
        mean = sum(map(len, offered.values())) / max(1, len(offered))
        notes = [f"{origin}, {mean:.1f} a query on average", *notes_on(collection)]
        if none := sum(not documents for documents in offered.values()):
            notes.append(f"queries without candidates, which count as 0: {none}")
        others = ("mrr_at_1000", "ndcg_at_10")
        return score_of(scores, local.main, others, size=len(collection.queries), notes=notes)

    def _candidates(self, collection: Collection, config: EvaluationConfig) -> tuple[dict[str, list[str]], str]:
        path = self.splits.get(f"{config.split} candidates")
        if path is not None:
            candidates = _without_itself(read_candidates(path, collection), collection)
            return candidates, f"candidates from {path.parent.name}/{path.name}"
        # One more than are kept, where the query may be among them.
        count = self.candidates + bool(collection.itself)
        candidates = bm25_candidates(collection.documents, collection.queries, count)
        kept = {query: ranked[: self.candidates] for query, ranked in _without_itself(candidates, collection).items()}
        return kept, f"candidates are BM25's first {self.candidates}"


def _without_itself(candidates: Mapping[str, list[str]], collection: Collection) -> dict[str, list[str]]:
    """Return candidates without those that are the query itself."""
    itself = collection.itself
    return {
        query: [document for document in offered if document != query or query not in itself]
        for query, offered in candidates.items()
    }


@dataclass(frozen=True, kw_only=True)
class TitleRetrieval(FileTask):
    """nDCG@10, recall@100 and MRR@10 of finding a document's passages by its title, among those of all documents.

    The queries are the titles of a corpus ``lm/NAME.test.*``; where it has none at all, each document's first sentence,
    which is then no passage. Documents of one title count as one, and of several, those without a title are searched in
    and not asked for. A passage is as many whole sentences as ``words`` allows. The title is not put before it; where
    it begins with its title by itself, as the first one of an encyclopedia's article mostly does, it stays so, and a
    note says how often. A document has often more passages than 10, so that nDCG@10 asks for any of them.

    ``config.limit`` counts queries, the first of the file; all passages stay.
    """

    kind: ClassVar[str] = "title-retrieval"
    data_folder: ClassVar[str] = CORPORA_FOLDER
    side: ClassVar[Side] = "representation"
    requires: ClassVar[type] = Ranks

    words: int = field(default=64, metadata={"help": "Words of a passage at most; a longer sentence stands alone."})

    @classmethod
    def find(cls, folder: Path) -> list[Task]:
        """Return a task for every corpus with a test file of several documents."""
        corpora = test_files(folder / cls.data_folder)
        return cls.of({name: paths for name, paths in corpora.items() if _has_several(paths[0])})

    def __post_init__(self) -> None:
        if self.words < 1:
            raise ConfigError(f"words={self.words} leaves nothing of a passage")

    def run(self, system: Ranks, config: EvaluationConfig) -> Score:
        """Measure."""
        path = self.scored_file(config)
        whole, untitled = _collection(path, self.words, path.stat().st_mtime_ns)
        collection = whole.first(config.limit)
        notes = [f"{len(collection.titles)} passages of {len(whole.queries)} documents"]
        if untitled:
            notes.append("the file has no titles: searched by first sentences")
        elif begun := _begun(collection):
            notes.append(f"titles that begin a passage of their document: {begun} of {len(collection.queries)}")
        return retrieved(self.name, collection, system, config, self.prompt(config), notes)

    def texts(self, config: EvaluationConfig) -> list[str]:
        """Return the queries, and the passages too unless only queries have the prompt."""
        path = self.scored_file(config)
        whole, _ = _collection(path, self.words, path.stat().st_mtime_ns)
        return texts_of(whole.first(config.limit), self.prompt(config))


def passages_of(text: str, words: int, *, skip: int = 0) -> Iterator[str]:
    """Yield passages of whole sentences with at most ``words`` words, without the first ``skip`` sentences.

    >>> list(passages_of("A cat sat. It saw a dog. The dog saw nothing at all.", 8))
    ['A cat sat. It saw a dog.', 'The dog saw nothing at all.']
    """
    start, end, held = 0, 0, 0
    for sentence in split_sentences(text)[skip:]:
        if held and held + sentence.words > words:
            yield text[start:end]
            held = 0
        if not held:
            start = sentence.start
        end, held = sentence.end, held + sentence.words
    if held:
        yield text[start:end]


def _has_several(path: Path) -> bool:
    """Tell whether a file holds more than one document, so that a book alone is not asked for its title."""
    if ".txt" in path.suffixes:
        return False
    try:
        return len(list(islice(read_documents([path]), 2))) > 1
    except DataError:
        return True  # what is malformed is reported when it is measured


@lru_cache(maxsize=2)
def _collection(path: Path, words: int, changed: int) -> tuple[Collection, bool]:
    """Return all queries and passages, and whether the file has no titles; read once for all systems."""
    del changed
    documents = list(read_titled(path))
    untitled = not any(document.title for document in documents)
    passages: dict[str, str] = {}
    queries: dict[str, str] = {}
    judgements: dict[str, dict[str, int]] = {}
    by_title: dict[str, str] = {}
    for number, document in enumerate(documents):
        title = _first_sentence(document) if untitled else document.title
        own_passages = {
            f"{number}-{place}": text
            for place, text in enumerate(passages_of(document.text, words, skip=int(untitled)))
        }
        passages |= own_passages
        if title and own_passages:
            query = by_title.setdefault(title, f"{number}")
            queries[query] = title
            judgements.setdefault(query, {}).update(dict.fromkeys(own_passages, 1))
    if len(queries) < 2:
        raise DataError(f"{path}: one document or none has a title and a passage; two are needed to tell apart")
    return Collection(dict.fromkeys(passages, ""), passages, queries, judgements), untitled


def _first_sentence(document: Document) -> str:
    first = next(iter(split_sentences(document.text)), None)
    return "" if first is None else document.text[first.start : first.end]


def _begun(collection: Collection) -> int:
    """Count the titles that a passage of their document begins with."""
    return sum(
        any(
            collection.bodies[passage].casefold().startswith(title.casefold())
            for passage in collection.judgements[query]
        )
        for query, title in collection.queries.items()
    )
