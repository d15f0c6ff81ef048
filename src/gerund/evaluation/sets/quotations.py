"""Literary claims with the quotations that support them, in the layout of RELiC (Thai et al. 2022).

::

    {"Book": {"sentences": ["...", ...],
              "quotes": {"id": [["sentence before", ...], 17, 2, ["sentence after", ...]], ...},
              "candidates": {"2_sentence": [0, 1, 2, ...], ...}}}

A quote is two sentences of the book from the 17th on, counted from 0; ``candidates`` says where stretches of as many
sentences begin, and may be left out: then they begin everywhere.

Knows: this file. Does not know: how a quotation is found.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gerund.errors import DataError

FOLDER = "quotations"


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
