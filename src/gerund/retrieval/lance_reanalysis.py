"""Words of an index that an earlier version of gerund wrote, analysed again in its folder.

Each step is one commit. Whoever is killed on the way leaves a table without an index of terms, which the next reader
or writer finishes.

Knows: LanceDB's tables. Does not know: where they lie, what a query is.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from gerund.retrieval.lance_rows import FIELDS, TERMS, chunks_in, terms_of, text_rows, word_index
from gerund.text_analysis import Analyzer

# The column that was indexed before there were terms: what is searched of a chunk, as its author wrote it.
_BEFORE = "words"
_ROWS_AT_ONCE = 10_000
_log = logging.getLogger(__name__)


def analysed_again(table: Any, analyzer: Analyzer, name: str) -> None:
    """Give every chunk its terms, and the table an index of them; vectors stay as they are.

    Args:
        table: the table of chunks; whoever calls holds the lock, where there is one.
        analyzer: what its words are.
        name: the index's, for messages.
    """
    import pyarrow as pa

    if _BEFORE in table.schema.names or TERMS not in table.schema.names:
        _log.warning("%s was written by another version of gerund: its words are indexed again", name)
    else:
        _log.warning("%s: the index of its words was not finished, and is finished now", name)
    if TERMS not in table.schema.names:
        with _shared(lambda: TERMS in table.schema.names):
            table.add_columns(pa.schema([(TERMS, pa.string())]))
    while len(rows := _without_terms(table)):
        ids = rows.column("id").to_pylist()
        terms = [terms_of(one, analyzer) for one in chunks_in(rows)]
        with _shared(partial(_have_terms, table, ids)):
            updates = text_rows({"id": ids, TERMS: terms})
            table.merge_insert("id").when_matched_update_all().execute(updates)
    if _BEFORE in table.schema.names:
        with _shared(lambda: _BEFORE not in table.schema.names):
            table.drop_columns([_BEFORE])
    with _shared(lambda: any(TERMS in index.columns for index in table.list_indices())):
        table.create_index(TERMS, config=word_index())


@contextmanager
def _shared(is_done: Callable[[], bool]) -> Iterator[None]:
    """Let a step fail that another process makes at the same time: on an object store no lock keeps it out."""
    try:
        yield
    except (OSError, RuntimeError, ValueError):
        if not is_done():
            raise


def _have_terms(table: Any, ids: list[str]) -> bool:
    """Whether rows that were the next without terms have them."""
    return bool(_without_terms(table).column("id").to_pylist() != ids)


def _without_terms(table: Any) -> Any:
    """Return the next rows whose words have not been analysed."""
    return table.search().where(f"{TERMS} IS NULL").select(["id", *FIELDS]).limit(_ROWS_AT_ONCE).to_arrow()
