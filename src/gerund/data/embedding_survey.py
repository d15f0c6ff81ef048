"""What a table holds that is going to be embedded: a first reading, and its rows shard by shard.

Where one shard ends and the next begins depends on the table alone.

Knows: tables, digests. Does not know: vectors, files of parts.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from gerund.data.embedding_files import IdType
from gerund.data.table_readers import Table
from gerund.data.tables import Rows, read_rows
from gerund.errors import DataError, TextError

EmptyTexts = Literal["error", "zeros", "skip"]
EMPTY = ("error", "zeros", "skip")
_PIECE = 2**16


@dataclass(frozen=True)
class Survey:
    """What a first reading of the whole table found."""

    rows: int = 0
    """Rows that get a vector."""
    empty: int = 0
    """Rows without a text."""
    id_type: IdType = "int"
    """Whether all ids are whole numbers."""
    digest: str = ""
    """A hash of every id and text."""
    shards: tuple[str, ...] = ()
    """A hash of each shard's."""


def shards_of(table: Table, *, max_rows: int, empty: EmptyTexts) -> Iterator[Rows]:
    """Yield the shards of a table, without the rows that are left out."""
    for rows in read_rows(table, max_rows=max_rows):
        kept = rows.without_empty() if empty == "skip" else rows
        if len(kept):
            yield kept


def survey_of(table: Table, *, max_rows: int, empty: EmptyTexts) -> Survey:
    """Read a table to its end.

    Raises:
        DataError: a malformed row, or none at all; with file and line.
        TextError: a row has no text and ``empty`` is ``error``.
    """
    # Together they do not depend on where one shard ends and the next begins.
    ids, lengths, texts = (hashlib.blake2b(digest_size=16) for _ in range(3))
    shards: list[str] = []
    count = without = 0
    whole_numbers = True
    for rows in read_rows(table, max_rows=max_rows):
        if empty == "error" and (index := rows.first_empty()) is not None:
            raise TextError(
                f"{rows.place(index)}: the text is empty; give --empty zeros for a vector of zeros, "
                "or --empty skip to leave such rows out"
            )
        kept = rows.without_empty()
        without += len(rows) - len(kept)
        # Of all rows: whether ids are stored as numbers is decided by those that are left out too.
        whole_numbers = whole_numbers and all(type(id_) is int and -(2**63) <= id_ < 2**63 for id_ in rows.ids)
        ids.update(json.dumps(rows.ids)[1:-1].encode() + b", ")
        lengths.update(json.dumps([len(text) for text in rows.texts])[1:-1].encode() + b", ")
        for text in rows.texts:
            _add(texts, text)
        rows = kept if empty == "skip" else rows
        if len(rows):
            count += len(rows)
            shards.append(digest_of(rows))
    if count == 0:
        raise DataError(f"{table.name} has no rows" + (" with a text" if without else ""))
    digest = hashlib.blake2b(ids.digest() + lengths.digest() + texts.digest(), digest_size=16).hexdigest()
    return Survey(count, without, "int" if whole_numbers else "text", digest, tuple(shards))


def digest_of(rows: Rows) -> str:
    """Return a hash of a shard's ids and texts; with the lengths, no two shards give the same bytes."""
    digest = hashlib.blake2b(json.dumps([rows.ids, [len(text) for text in rows.texts]]).encode(), digest_size=8)
    for text in rows.texts:
        _add(digest, text)
    return digest.hexdigest()


def _add(digest: "hashlib.blake2b", text: str) -> None:
    # A text may have many megabytes: piece by piece, it is not copied as a whole.
    for start in range(0, len(text), _PIECE):
        digest.update(text[start : start + _PIECE].encode())
