"""What a table holds that is going to be embedded: a first reading, and its rows shard by shard.

Where one shard ends and the next begins depends on the table alone.

Knows: tables, digests. Does not know: vectors, files of parts.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from gerund.data.embedding.files import IdType
from gerund.data.table import Cursor, Table
from gerund.data.tables import BadRow, Rows, read_rows
from gerund.errors import DataError, TextError

EmptyTexts = Literal["error", "zeros", "skip"]
EMPTY = ("error", "zeros", "skip")
BadRows = Literal["error", "skip"]
BAD_ROWS = ("error", "skip")
Overflow = Literal["truncate", "error"]
OVERFLOW = ("truncate", "error")
_PIECE = 2**16


@dataclass(frozen=True)
class Survey:
    """What a first reading of the whole table found."""

    rows: int = 0
    """Rows that get a vector."""
    empty: int = 0
    """Rows without a text, but for those that are bad rows."""
    id_type: IdType = "int"
    """Whether all ids are whole numbers."""
    digest: str = ""
    """A hash of every id and text."""
    shards: tuple[str, ...] = ()
    """A hash of each shard's."""
    bad: tuple[BadRow, ...] = ()
    """Rows that are left out since they cannot be used."""


def _refuse(row: BadRow) -> None:
    raise DataError(f"{row}; give --bad-rows skip to leave such rows out and list them")


def _pass_over(_row: BadRow) -> None:
    """Leave out a row that the survey has noted."""


@dataclass(frozen=True)
class Source:
    """Where rows come from, for this process and for workers.

    Attributes:
        table: the table, by its whole path.
        max_rows: rows of a shard at most.
        empty: what becomes of rows without a text.
        bad_rows: what becomes of rows that cannot be used, those without a text among them where these are an error.
    """

    table: Table
    max_rows: int
    empty: EmptyTexts = "error"
    bad_rows: BadRows = "error"

    def shards(self, start: Cursor | None = None) -> Iterator[Rows]:
        """Yield the shards without the rows that are left out, from the first or that which starts there."""
        bad = _pass_over if self.bad_rows == "skip" else None
        for rows in read_rows(self.table, max_rows=self.max_rows, bad=bad, start=start):
            kept = rows if self.empty == "zeros" else rows.without(rows.empty())
            if len(kept):
                yield kept

    def read(self, start: Cursor, digest: str) -> Rows | None:
        """Return the rows of the shard that starts there; None where other ones, or none, are found."""
        try:
            rows = next(self.shards(start), None)
        except DataError:
            return None
        return rows if rows is not None and digest_of(rows) == digest else None


def survey_of(source: Source) -> Survey:
    """Read a table to its end.

    Raises:
        DataError: a malformed row and ``bad_rows`` is ``error``, or none at all; with file and line.
        TextError: a row has no text and both ``empty`` and ``bad_rows`` are ``error``.
    """
    empty, bad_rows = source.empty, source.bad_rows
    # Together they do not depend on where one shard ends and the next begins.
    ids, lengths, texts = (hashlib.blake2b(digest_size=16) for _ in range(3))
    shards: list[str] = []
    count = without = 0
    whole_numbers = True
    bad: list[BadRow] = []
    for rows in read_rows(source.table, max_rows=source.max_rows, bad=bad.append if bad_rows == "skip" else _refuse):
        blank = rows.empty()
        if blank and empty == "error":
            if bad_rows == "error":
                raise TextError(
                    f"{rows.place(blank[0])}: the text is empty; give --empty zeros for a vector of zeros, "
                    "or --empty skip to leave such rows out"
                )
            bad += [rows.bad(index, "the text is empty") for index in blank]
        else:
            without += len(blank)
        # Of all rows: whether ids are stored as numbers is decided by those that are left out too.
        whole_numbers = whole_numbers and all(type(id_) is int and -(2**63) <= id_ < 2**63 for id_ in rows.ids)
        ids.update(json.dumps(rows.ids)[1:-1].encode() + b", ")
        lengths.update(json.dumps([len(text) for text in rows.texts])[1:-1].encode() + b", ")
        for text in rows.texts:
            _add(texts, text)
        rows = rows if empty == "zeros" else rows.without(blank)
        if len(rows):
            count += len(rows)
            shards.append(digest_of(rows))
    if count == 0 and bad:
        raise DataError(f"no row can be used; the first one is {bad[0]}")
    if count == 0:
        raise DataError(f"{source.table.name} has no rows" + (" with a text" if without else ""))
    digest = hashlib.blake2b(ids.digest() + lengths.digest() + texts.digest(), digest_size=16).hexdigest()
    return Survey(count, without, "int" if whole_numbers else "text", digest, tuple(shards), tuple(bad))


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
