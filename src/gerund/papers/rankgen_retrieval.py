"""Retrieval by a scorer of continuations (RankGen): within a book, and of quotations (RELiC)."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from gerund.data.passages import Passage, sample_passages, split_sentences, wrong_for
from gerund.errors import ConfigError, DataError
from gerund.evaluation.data_files import CORPORA_FOLDER, read_texts, split_files, test_files
from gerund.evaluation.systems.base import ScoresCandidates
from gerund.evaluation.systems.search import BM25System
from gerund.evaluation.task import EvaluationConfig, Score, Side
from gerund.papers.rankgen_suffixes import ScoredTask, rank_of, recalls
from gerund.progress import progress


@dataclass(frozen=True, kw_only=True)
class BookRetrieval(ScoredTask):
    """Recall at 1, 3, 5, 10 and 50 of the true continuation among those of the same document.

    A document is cut into passages, prefix and continuation, that may overlap, as RankGen's data are made. The
    continuations of all of them are the candidates, but for those that overlap a prefix or its true continuation: these
    stand in the prefix already, or are right in part. Candidates are scored by the model's own scorer or the one that
    is given; without either by the cosine of the encoder's vectors, so that any embedding model can be compared; BM25
    is there too. ``config.limit`` counts prefixes.
    """

    kind: ClassVar[str] = "book-retrieval"
    data_folder: ClassVar[str] = CORPORA_FOLDER
    layout = test_files
    side: ClassVar[Side] = "representation"
    requires: ClassVar[type] = ScoresCandidates

    samples: int = field(default=200, metadata={"help": "Prefixes at most, spread over the documents."})
    candidates: int = field(default=500, metadata={"help": "Continuations of a document at most."})
    prefix_words: int = field(default=256, metadata={"help": "Words of a prefix at most."})
    continuation_words: int = field(default=128, metadata={"help": "Words of a continuation at most."})

    def __post_init__(self) -> None:
        if min(self.prefix_words, self.continuation_words) < 10:
            raise ConfigError("book-retrieval needs prefixes and continuations of at least 10 words")
        if self.samples < 1 or self.candidates < 2:
            raise ConfigError("book-retrieval needs at least one prefix and two candidates")

    def run(self, system: ScoresCandidates, config: EvaluationConfig) -> Score:
        """Rank the candidates of every prefix."""
        path = self.scored_file(config)
        documents = list(self._documents(path, np.random.default_rng(config.seed)))
        if not documents:
            raise DataError(f"{path}: no document has two prefixes of {self.prefix_words} words with a continuation")
        scorer = system.find_scorer(self.scorer, seed=config.seed)
        count = min(self.samples, config.limit or self.samples)
        ranks: list[int] = []
        sizes: list[int] = []
        with progress(len(documents), self.name, show=config.show_progress) as advance:
            for number, passages in enumerate(documents):
                # As many of every document as of the others, one more of the first ones.
                asked = (
                    (passage, offered) for passage in passages if len(offered := candidates_of(passage, passages)) > 1
                )
                part = list(islice(asked, len(range(number, count, len(documents)))))
                if part:
                    texts = list(dict.fromkeys(passage.continuation for passage in passages))
                    prefixes = [passage.prefix for passage, _ in part]
                    scores = system.candidate_scores(prefixes, texts, scorer=scorer, prompt=self.prompt(config))
                    for (_, candidates), row in zip(part, scores, strict=True):
                        ranks.append(rank_of(row[[texts.index(text) for text in candidates]], 0))
                        sizes.append(len(candidates))
                advance(1)
        notes = [f"{np.mean(sizes):.0f} candidates a prefix, on the mean"]
        if scorer is None and not isinstance(system, BM25System):
            notes.append("no scorer: ranked by the cosine of the encoder's vectors")
        return Score("recall_at_1", recalls(ranks), size=len(ranks), notes=tuple(notes))

    def _documents(self, path: Path, rng: np.random.Generator) -> Iterator[list[Passage]]:
        """Yield each document's passages in a random order."""
        for text in read_texts(path):
            passages = sample_passages(
                text,
                split_sentences(text),
                rng,
                count=self.candidates,
                prefix_words=self.prefix_words,
                continuation_words=(10, self.continuation_words),
            )
            if any(any(wrong_for(passage, passages)) for passage in passages):
                yield [passages[place] for place in rng.permutation(len(passages)).tolist()]


def candidates_of(passage: Passage, passages: Sequence[Passage]) -> list[str]:
    """Return the true continuation of a passage and, behind it, all different wrong ones of its document."""
    wrong = wrong_for(passage, passages)
    others = [other.continuation for other, is_wrong in zip(passages, wrong, strict=True) if is_wrong]
    return list(dict.fromkeys([passage.continuation, *others]))


_BOTH = "both"
_SIDES = ("before", _BOTH)


@dataclass(frozen=True)
class Quotations:
    """The claims about one book whose quotations have the same number of sentences."""

    book: str  # its title
    before: tuple[str, ...]  # for each claim the sentences before the quotation
    after: tuple[str, ...]  # for each claim the sentences behind it
    candidates: tuple[str, ...]  # stretches of the book
    right: tuple[int, ...]  # for each claim which of the candidates it quotes


@dataclass(frozen=True, kw_only=True)
class QuotationRetrieval(ScoredTask):
    """Recall at 1, 3, 5, 10 and 50 of the quotation among all stretches of the book with as many sentences.

    The files are ``quotations/NAME.test.json`` in RELiC's layout. The query is what the claim says before the
    quotation. Scored as ``book-retrieval`` is. ``config.limit`` counts claims.
    """

    kind: ClassVar[str] = "quotation-retrieval"
    data_folder: ClassVar[str] = "quotations"
    layout = split_files
    side: ClassVar[Side] = "representation"
    requires: ClassVar[type] = ScoresCandidates

    context: str = field(
        default="before",
        metadata={"help": "The query: the sentences before the quotation, or both, those behind it too."},
    )

    def __post_init__(self) -> None:
        if self.context not in _SIDES:
            raise ConfigError(f"quotation-retrieval.context is {' or '.join(_SIDES)}, not {self.context!r}")

    def run(self, system: ScoresCandidates, config: EvaluationConfig) -> Score:
        """Rank the candidates of every claim."""
        path = self.scored_file(config)
        scorer = system.find_scorer(self.scorer, seed=config.seed)
        ranks: list[int] = []
        sizes: list[int] = []
        silent = 0
        with progress(None, self.name, show=config.show_progress) as advance:
            for group in read_quotations(path):
                asked = [
                    (query, right) for query, right in zip(self._queries(group), group.right, strict=True) if query
                ]
                silent += len(group.right) - len(asked)
                if config.limit is not None:
                    asked = asked[: config.limit - len(ranks)]
                if asked:
                    queries = [query for query, _ in asked]
                    scores = system.candidate_scores(
                        queries, group.candidates, scorer=scorer, prompt=self.prompt(config)
                    )
                    ranks += [rank_of(row, right) for row, (_, right) in zip(scores, asked, strict=True)]
                    sizes += [len(group.candidates)] * len(asked)
                advance(len(asked))
        if not ranks:
            raise DataError(f"{path}: no claim has a text before its quotation")
        notes = [f"{np.mean(sizes):.0f} candidates a claim, on the mean"]
        if silent:
            notes.append(f"claims without a text to search with, which are left out: {silent}")
        return Score("recall_at_1", recalls(ranks), size=len(ranks), notes=tuple(notes))

    def _queries(self, group: Quotations) -> list[str]:
        if self.context == _BOTH:
            return [f"{before} {after}".strip() for before, after in zip(group.before, group.after, strict=True)]
        return [before.strip() for before in group.before]


def read_quotations(path: Path) -> Iterator[Quotations]:
    """Yield the claims of a file, book by book and number of sentences by number."""
    try:
        books = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: not readable JSON ({error})") from error
    if not isinstance(books, dict) or not books:
        raise DataError(f"{path}: expected an object with a book for each key")
    for title, book in books.items():
        where = f"{path}, book {title!r}"
        if not isinstance(book, dict):
            raise DataError(f"{where}: expected an object with 'sentences' and 'quotes'")
        yield from _of_book(title, book, where)


def _of_book(title: str, book: Mapping[str, Any], where: str) -> Iterator[Quotations]:
    sentences = book.get("sentences")
    if not _are_texts(sentences) or not sentences:
        raise DataError(f"{where}: 'sentences' is not a list of texts")
    quotes = book.get("quotes")
    if not isinstance(quotes, dict):
        raise DataError(f"{where}: 'quotes' is not an object")
    by_length: dict[int, list[tuple[str, str, int]]] = {}
    for key, quote in quotes.items():
        left, start, count, right = _quote(quote, len(sentences), f"{where}, quote {key!r}")
        by_length.setdefault(count, []).append((left, right, start))
    for count, claims in sorted(by_length.items()):
        starts = [
            start
            for start in _starts(book.get("candidates"), count, len(sentences), where)
            if "".join(sentences[start : start + count]).strip()
        ]
        places = {start: place for place, start in enumerate(starts)}
        missing = [start for _, _, start in claims if start not in places]
        if missing:
            raise DataError(f"{where}: the quotation at sentence {missing[0]} is not among the candidates, or blank")
        yield Quotations(
            title,
            tuple(before for before, _, _ in claims),
            tuple(after for _, after, _ in claims),
            tuple(" ".join(sentences[start : start + count]) for start in starts),
            tuple(places[start] for _, _, start in claims),
        )


def _quote(quote: Any, length: int, where: str) -> tuple[str, int, int, str]:
    if not isinstance(quote, list) or len(quote) != 4 or not _are_texts(quote[0]) or not _are_texts(quote[3]):
        raise DataError(f"{where}: expected [sentences before, place, number of sentences, sentences after]")
    before, start, count, after = quote
    if type(start) is not int or type(count) is not int or count < 1 or not 0 <= start <= length - count:
        raise DataError(f"{where}: {count!r} sentences from {start!r} on are not in a book of {length}")
    return " ".join(before), start, count, " ".join(after)


def _starts(candidates: Any, count: int, length: int, where: str) -> list[int]:
    if candidates is None:
        return list(range(length - count + 1))
    starts = candidates.get(f"{count}_sentence") if isinstance(candidates, dict) else None
    if not isinstance(starts, list) or not all(type(start) is int and 0 <= start <= length - count for start in starts):
        raise DataError(f"{where}: 'candidates' has no list of places '{count}_sentence'")
    return list(dict.fromkeys(starts))


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)
