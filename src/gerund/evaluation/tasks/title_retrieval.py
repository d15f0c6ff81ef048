"""Retrieval of a document's passages by its title (GUR, section V-A, Figures 6 and 7).

GUR makes its pairs of a title and a sentence of the same document; here the same pairs are a test that any corpus with
titles holds.

Knows: documents, titles, passages. Does not know: how they are ranked.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import ClassVar

from gerund.data.corpus import Document, read_documents
from gerund.data.passages import split_sentences
from gerund.errors import ConfigError, DataError
from gerund.evaluation.sets.beir import Collection
from gerund.evaluation.sets.corpora import read_titled, test_files
from gerund.evaluation.systems.base import Ranks
from gerund.evaluation.task import EvaluationConfig, FileTask, Score, Side, Task
from gerund.evaluation.tasks.retrieval import retrieved, texts_of


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
    side: ClassVar[Side] = "representation"
    requires: ClassVar[type] = Ranks

    words: int = field(default=64, metadata={"help": "Words of a passage at most; a longer sentence stands alone."})

    def __post_init__(self) -> None:
        if self.words < 1:
            raise ConfigError(f"words={self.words} leaves nothing of a passage")

    def run(self, system: Ranks, config: EvaluationConfig) -> Score:
        """Measure.

        Raises:
            DataError: the file is malformed, or there are no two documents to tell apart.
        """
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
    """Yield a document cut into as many whole sentences as have at most so many words together.

    Args:
        text: the document.
        words: words of a passage at most; a longer sentence stands alone.
        skip: how many sentences are left out at the beginning.

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


def find(folder: Path) -> list[Task]:
    """Return a task for every corpus with a test file of several documents."""
    return [
        TitleRetrieval(name=f"title-retrieval/{name}", files=files)
        for name, files in test_files(folder).items()
        if _has_several(files[0])
    ]


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
    """Return all queries and passages, and whether the file has no titles; read once for all systems.

    Raises:
        DataError: the file is malformed, or there are no two documents to tell apart.
    """
    del changed
    documents = list(read_titled(path))
    untitled = not any(document.title for document in documents)
    passages: dict[str, str] = {}
    queries: dict[str, str] = {}
    judgements: dict[str, dict[str, int]] = {}
    by_title: dict[str, str] = {}
    for number, document in enumerate(documents):
        title = _first_sentence(document) if untitled else document.title
        own = {
            f"{number}-{place}": text
            for place, text in enumerate(passages_of(document.text, words, skip=int(untitled)))
        }
        passages |= own
        if title and own:
            query = by_title.setdefault(title, f"{number}")
            queries[query] = title
            judgements.setdefault(query, {}).update(dict.fromkeys(own, 1))
    if len(queries) < 2:
        raise DataError(f"{path}: one document or none has a title and a passage; two are needed to tell apart")
    return Collection(dict.fromkeys(passages, ""), passages, queries, judgements), untitled


def _first_sentence(document: Document) -> str:
    first = next(iter(split_sentences(document.text)), None)
    return "" if first is None else document.text[first.start : first.end]


def _begun(collection: Collection) -> int:
    """Count the titles that a passage of their document begins with."""
    return sum(
        any(collection.bodies[one].casefold().startswith(title.casefold()) for one in collection.judgements[query])
        for query, title in collection.queries.items()
    )
