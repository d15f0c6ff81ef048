"""Retrieval of quotations: which passage of a book does a literary claim quote?

RELiC (Thai et al. 2022); RankGen, section 4.4 (Table 8).

RELiC's layout of claims about books:

::

    {"Book": {"sentences": ["...", ...],
              "quotes": {"id": [["sentence before", ...], 17, 2, ["sentence after", ...]], ...},
              "candidates": {"2_sentence": [0, 1, 2, ...], ...}}}

A quote is two sentences of the book from the 17th on, counted from 0; ``candidates`` says where stretches of as many
sentences begin, and may be left out: then they begin everywhere.

Knows: this file, claims, candidates. Does not know: how candidates are scored.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from gerund.errors import ConfigError, DataError
from gerund.evaluation.scored_task import ScoredTask, rank_of, recalls
from gerund.evaluation.systems.base import ScoresCandidates
from gerund.evaluation.task import EvaluationConfig, Score, Side, Task
from gerund.progress import progress

FOLDER = "quotations"

_BOTH = "both"
_SIDES = ("before", _BOTH)


@dataclass(frozen=True)
class Quotations:
    """The claims about one book whose quotations have the same number of sentences.

    Attributes:
        book: its title.
        before: for each claim the sentences before the quotation.
        after: for each claim the sentences behind it.
        candidates: stretches of the book.
        right: for each claim which of the candidates it quotes.
    """

    book: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    candidates: tuple[str, ...]
    right: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class QuotationRetrieval(ScoredTask):
    """Recall at 1, 3, 5, 10 and 50 of the quotation among all stretches of the book with as many sentences.

    The files are ``quotations/NAME.test.json`` in RELiC's layout. The query is what the claim says before the
    quotation. Scored as ``book-retrieval`` is. ``config.limit`` counts claims.
    """

    kind: ClassVar[str] = "quotation-retrieval"
    data_folder: ClassVar[str] = FOLDER
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
        """Rank the candidates of every claim.

        Raises:
            DataError: the file is malformed, or has no claim with a text before its quotation.
            ConfigError: there is no such scorer.
        """
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
            return [f"{one} {other}".strip() for one, other in zip(group.before, group.after, strict=True)]
        return [one.strip() for one in group.before]


def find(folder: Path) -> list[Task]:
    """Return a task for every file in ``quotations/``."""
    return [
        QuotationRetrieval(name=f"quotation-retrieval/{name}", files=files)
        for name, files in quotation_files(folder).items()
    ]


def quotation_files(folder: Path) -> dict[str, tuple[Path, ...]]:
    """Return by name the files ``quotations/NAME.test.json``, with ``.valid.json`` behind it where there is one."""
    found: dict[str, tuple[Path, ...]] = {}
    for path in sorted((folder / FOLDER).glob("*.test.json")):
        name = path.name.removesuffix(".test.json")
        valid = path.with_name(f"{name}.valid.json")
        found[name] = (path, valid) if valid.is_file() else (path,)
    return found


def read_quotations(path: Path) -> Iterator[Quotations]:
    """Yield the claims of a file, book by book and number of sentences by number.

    Raises:
        DataError: the file is missing or malformed; the message names the place.
    """
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
    if not isinstance(starts, list) or not all(type(one) is int and 0 <= one <= length - count for one in starts):
        raise DataError(f"{where}: 'candidates' has no list of places '{count}_sentence'")
    return list(dict.fromkeys(starts))


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)
