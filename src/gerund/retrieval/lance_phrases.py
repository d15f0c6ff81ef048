"""Phrases for LanceDB, whose index leaves stop words out: it knows that one stood in a place, not which.

A phrase with a stop word is looked for as the index knows it, then in the text of what was found. One of stop words
alone is nothing to the index: it is a condition on the text.

Knows: LanceDB's queries, what a phrase means. Does not know: where tables lie.
"""

import unicodedata
from collections.abc import Callable, Sized
from typing import Any

from gerund.retrieval.filters import quoted
from gerund.retrieval.lance_rows import chunks_in, full_text
from gerund.retrieval.memory_store import stand_in
from gerund.retrieval.store import Words

Search = Callable[[Any, int, str | None], Any]
"""Returns the rows of a query of full text (None: all rows), so many at most, that a filter leaves."""


def found_by_words(
    query: Words, search: Search, tokens: Callable[[str], Sized], language: str, limit: int, where: str | None
) -> Any:
    """Return the rows that BM25 finds for a query with phrases; None for a query without a word.

    Args:
        query: it.
        search: finds rows.
        tokens: the words of a text that are in the index.
        language: of the documents.
        limit: how many rows at most.
        where: a filter.
    """
    indexed, partly, conditions = list[str](), list[str](), list[str]()
    for phrase in query.phrases:
        words, known = _words_in(phrase), len(tokens(phrase))
        if known:
            indexed.append(phrase)
        if 0 < known < len(words):
            partly.append(" ".join(words))
        elif words and not known:
            conditions.append(f"regexp_like(words, {quoted(_pattern(words))})")
    if conditions:
        where = " AND ".join([*([] if where is None else [f"({where})"]), *conditions])
    wanted = full_text(Words(query.text, tuple(indexed)))
    rows = None if wanted is None else _ranked(lambda count: search(wanted, count, where), partly, language, limit)
    return _with_others(rows, search(None, limit, where), limit) if conditions and not indexed else rows


def _ranked(search: Callable[[int], Any], partly: list[str], language: str, limit: int) -> Any:
    """Return the first rows in whose texts phrases stand, of which the index knows some words."""
    import pyarrow as pa

    count = limit
    while True:
        rows = search(count)
        if not partly:
            return rows
        there = stand_in([one.indexed_text for one in chunks_in(rows)], partly, language)
        kept = rows.filter(pa.array(there, pa.bool_()))
        if len(kept) >= limit or len(rows) < count:
            return kept.slice(0, limit)
        count *= 4


def _with_others(rows: Any, others: Any, limit: int) -> Any:
    """Return rows that BM25 found, and behind them others, whose phrases it has no score for."""
    import pyarrow as pa

    others = others.append_column("_score", pa.array([0.0] * len(others), pa.float32()))
    if rows is None:
        return others
    known = {one.id for one in chunks_in(rows)}
    new = pa.array([one.id not in known for one in chunks_in(others)], pa.bool_())
    return pa.concat_tables([rows, others.filter(new).select(rows.column_names)]).slice(0, limit)


def _words_in(phrase: str) -> list[str]:
    # Marks, such as the vowel signs of Indian scripts, belong to the letters before them.
    return "".join(one if unicodedata.category(one)[0] in "LNM" else " " for one in phrase).split()


def _pattern(words: list[str]) -> str:
    return r"(?i)(^|[\W_])" + r"[\W_]+".join(words) + r"([\W_]|$)"
