"""Queries out of a user's own documents, and which documents are put aside for them.

A document's query is its title, else its first sentence; what the query is made of is taken out of the document. Which
documents are put aside depends on a hash of their text alone, so that it stays the same when others come or go.

Knows: documents, titles, sentences, files of questions. Does not know: pairs, models.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from gerund.adaptation.config import LEAST_DOCUMENTS, LEAST_QUERIES, MOST_QUERIES, MOST_SEARCHED, AdaptConfig
from gerund.adaptation.questions import read_questions
from gerund.data.passages import sentence_bounds
from gerund.errors import DataError
from gerund.normalization import normalized
from gerund.retrieval.documents import Document
from gerund.retrieval.parsed_text import Section

TITLE, FIRST_SENTENCE, QUESTION = "title", "first sentence", "question"

# A title that more documents share says nothing about any of them.
_MOST_OF_A_TITLE = 3
_FEWEST_WORDS, _MOST_WORDS = 3, 60
# What is left of a document, in characters, for there to be something to find.
_LEAST_LEFT = 40
_BEGINNING = 4000
_MARKS = re.compile(r"^[\s#*_=>-]+")


@dataclass(frozen=True)
class Query:
    """A query and what answers it.

    Attributes:
        text: the query.
        sources: the names of the documents that answer it.
        kind: what it was made of: ``title``, ``first sentence`` or ``question``.
    """

    text: str
    sources: tuple[str, ...]
    kind: str


@dataclass(frozen=True)
class Split:
    """Documents to train on, and queries to measure on.

    Attributes:
        training: the documents that may be trained on.
        held_out: the documents that were put aside, without what their queries are made of.
        queries: the queries.
    """

    training: tuple[Document, ...]
    held_out: tuple[Document, ...]
    queries: tuple[Query, ...]

    @cached_property
    def corpus(self) -> tuple[Document, ...]:
        """What is searched: all documents, of more than 5,000 a part; without titles, since they are what is asked.

        What answers a query is always among them; others are sampled by a hash of their text.
        """
        answers = {source for one in self.queries for source in one.sources}
        others = [one for one in self.training if one.source not in answers]
        room = max(MOST_SEARCHED - len(self.held_out) - (len(self.training) - len(others)), 0)
        left_out = {one.source for one in sorted(others, key=lambda one: order_of(one, 0))[room:]}
        kept = (one for one in (*self.training, *self.held_out) if one.source not in left_out)
        return tuple(replace(one, title="") for one in kept)

    @property
    def digest(self) -> str:
        """Hash of the queries, which says whether a later run measures on the same ones."""
        whole = hashlib.blake2b(digest_size=16)
        for one in self.queries:
            whole.update("\0".join((one.text, *one.sources, "")).encode(errors="replace"))
        return whole.hexdigest()

    @cached_property
    def kinds(self) -> dict[str, int]:
        """How many queries there are of each kind."""
        return dict(Counter(one.kind for one in self.queries))

    @property
    def summary(self) -> str:
        """Say what is measured on."""
        parts = [f"{count} {kind}{'s' if count > 1 else ''}" for kind, count in self.kinds.items()]
        told = f"{len(self.held_out):,} documents put aside; queries: {' and '.join(parts)}"
        return f"{told}, {self.verbatim} of them word for word in their document" if self.verbatim else told

    @cached_property
    def verbatim(self) -> int:
        """How many queries stand word for word in what answers them, which words find by themselves."""
        texts = {one.source: f" {_plain(one.text)} " for one in (*self.training, *self.held_out)}
        return sum(any(f" {_plain(one.text)} " in texts[name] for name in one.sources) for one in self.queries)


def made_query(document: Document, common: frozenset[str], options: AdaptConfig) -> tuple[Query, Document] | None:
    r"""Return a document's query and the document without it; None where there is nothing to ask or nothing left.

    Args:
        document: the document.
        common: titles that too many documents share.
        options: what is asked by, and the language.

    >>> document = Document("a", "Bread\n\n" + 9 * "It is made of flour. ", "Bread")
    >>> query, rest = made_query(document, frozenset(), AdaptConfig())
    >>> query.text, rest.text.strip()[:20]
    ('Bread', 'It is made of flour.')
    """
    text, title = document.text, " ".join(document.title.split())
    if options.ask == "titles" and title and title not in common and re.search(r"\w{2}", title):
        line = re.match(r"\s*[^\n]*", text)
        begins = line is not None and _plain(line[0]) == _plain(title)
        rest = without_beginning(document, line.end() if begins and line is not None else 0)
        return _query(document, title, TITLE, rest)
    bounds = sentence_bounds(text[:_BEGINNING], options.language)
    if not bounds:
        return None
    start, end = bounds[0]
    sentence = _MARKS.sub("", " ".join(text[start:end].split()))
    if not _FEWEST_WORDS <= _words(sentence) <= _MOST_WORDS:
        return None
    return _query(document, sentence, FIRST_SENTENCE, without_beginning(document, end))


def _query(document: Document, text: str, kind: str, rest: Document) -> tuple[Query, Document] | None:
    if len(rest.text.strip()) < _LEAST_LEFT:
        return None
    # In a search, what stands in double quotes must stand so in a chunk.
    return Query(" ".join(text.replace('"', " ").split()), (document.source,), kind), rest


def _words(sentence: str) -> int:
    """Return how many words a sentence has; where none are set apart, as in Chinese, of two letters each."""
    return len(sentence.split()) if " " in sentence else len(sentence) // 2


def _plain(text: str) -> str:
    return re.sub(r"\W+", " ", normalized(text)).strip().casefold()


def without_beginning(document: Document, count: int) -> Document:
    """Return a document without its first characters; its sections stay where they are in the text."""
    if not count:
        return document
    moved = [Section(max(one.start - count, 0), one.path) for one in document.sections]
    # Of several that begin in what was taken away, the last one holds what follows.
    kept = {one.start: one for one in moved}
    return replace(document, text=document.text[count:], sections=tuple(kept.values()))


def common_titles(documents: Sequence[Document]) -> frozenset[str]:
    """Return the titles that more than three documents have."""
    counted = Counter(" ".join(one.title.split()) for one in documents)
    return frozenset(title for title, count in counted.items() if count > _MOST_OF_A_TITLE)


def order_of(document: Document, seed: int) -> bytes:
    """Return a hash of a document's text, by which documents are sampled."""
    return hashlib.blake2b(f"{seed}\0{document.text}".encode(errors="replace"), digest_size=8).digest()


def split(documents: Sequence[Document], options: AdaptConfig, roots: Sequence[str] = ()) -> Split:
    """Put documents aside and make queries of them, or take the questions of a file.

    Args:
        documents: all of them.
        options: the fraction, the file of questions, the seed.
        roots: folders that the sources of questions may be relative to.

    Raises:
        DataError: there are too few documents, or too few questions, or a question's source is unknown.
    """
    if options.questions is not None:
        return _split_by_questions(documents, options, roots)
    needed = LEAST_QUERIES + LEAST_DOCUMENTS
    if len(documents) < needed:
        raise DataError(
            f"{_count(len(documents))} are too few to adapt to: {LEAST_QUERIES} are put aside to measure on and "
            f"{LEAST_DOCUMENTS} more are needed to train on; give {needed} or more"
        )
    common = common_titles(documents)
    wanted = min(max(round(options.held_out * len(documents)), LEAST_QUERIES), MOST_QUERIES)
    chosen: dict[str, tuple[Query, Document]] = {}
    for one in sorted(documents, key=lambda one: order_of(one, options.seed)):
        made = made_query(one, common, options)
        if made is not None:
            chosen[one.source] = made
        if len(chosen) == wanted:
            break
    if len(chosen) < LEAST_QUERIES:
        raise DataError(
            f"only {len(chosen)} of {len(documents):,} documents have a title or a first sentence to ask for them by, "
            f"and some text beside it; {LEAST_QUERIES} are needed, or a file of --questions"
        )
    by_title: dict[str, list[str]] = {}
    for one in documents:
        by_title.setdefault(" ".join(one.title.split()), []).append(one.source)
    queries: dict[str, Query] = {}
    for source, (query, rest) in chosen.items():
        alike = by_title[" ".join(rest.title.split())] if query.kind == TITLE else [source]
        # Two documents of one title are one query, which either answers.
        queries.setdefault(query.text, replace(query, sources=tuple(alike)))
    training = tuple(one for one in documents if one.source not in chosen)
    return _checked(Split(training, tuple(rest for _, rest in chosen.values()), tuple(queries.values())))


def _split_by_questions(documents: Sequence[Document], options: AdaptConfig, roots: Sequence[str]) -> Split:
    assert options.questions is not None
    asked = read_questions(Path(options.questions), [one.source for one in documents], roots)
    if len(asked) < LEAST_QUERIES:
        raise DataError(
            f"{options.questions}: {len(asked)} different questions are too few to measure on; {LEAST_QUERIES} or more "
            "are needed"
        )

    def place(item: tuple[str, tuple[str, ...]]) -> bytes:
        return hashlib.blake2b(f"{options.seed}\0{item[0]}".encode(errors="replace"), digest_size=8).digest()

    chosen = dict(sorted(asked.items(), key=place)[:MOST_QUERIES])
    aside = {source for sources in chosen.values() for source in sources}
    queries = [Query(" ".join(text.replace('"', " ").split()), sources, QUESTION) for text, sources in chosen.items()]
    training = tuple(one for one in documents if one.source not in aside)
    return _checked(Split(training, tuple(one for one in documents if one.source in aside), tuple(queries)))


def _checked(found: Split) -> Split:
    if len(found.training) < LEAST_DOCUMENTS:
        raise DataError(
            f"{_count(len(found.training))} are left to train on when those of the queries are put aside; "
            f"{LEAST_DOCUMENTS} are needed: give more documents, or fewer questions"
        )
    return found


def _count(number: int) -> str:
    return f"{number:,} document{'' if number == 1 else 's'}"
