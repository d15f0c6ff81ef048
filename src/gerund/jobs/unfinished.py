"""The rows of a shard that are done before the shard is, so that an interruption costs seconds and not the shard.

A shard is worked on in batches that depend on it alone. Rows go to the disk once a few seconds have passed since the
last ones went, and when the work is interrupted. Whoever begins the shard again is handed them, makes the same batches,
and leaves out those that are done: so a shard that was interrupted has the same bytes as one that was not. Rows are
known by a hash of the shard, so that those of another shard, or of other settings, are never taken for its own.

Knows: rows, seconds. Does not know: what the rows are, who makes them.
"""

import hashlib
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from gerund.errors import ResourceError
from gerund.jobs.row_store import KEY_BYTES, RowStore

FLUSH_SECONDS = 5.0
"""After so many seconds finished rows go to the disk: with the batch that is being worked on, what a kill costs."""


class Unfinished:
    """A shard on its way; used as a context, whose end, with an error or without, puts all finished rows on the disk.

    Args:
        folder: where the rows are kept, made with the first of them; None keeps none.
        shard: a hash of all that the rows depend on.
        advance: told how many more rows are done, those of an earlier attempt included.
        seconds: how long finished rows may wait for the disk.
    """

    def __init__(
        self,
        folder: Path | None,
        shard: str,
        *,
        advance: Callable[[int], None] | None = None,
        seconds: float = FLUSH_SECONDS,
    ) -> None:
        self.folder, self.shard, self.seconds = folder, shard, seconds
        self.rows = 0
        """Rows that are done, in this attempt or an earlier one; the last of them may still wait for the disk."""
        self.stored = 0
        """Those of them that are on the disk."""
        self.resumed = 0
        """Those of them that an earlier attempt had done."""
        self._advance = advance or (lambda _rows: None)
        self._store: RowStore | None = None
        self._waiting: dict[bytes, np.ndarray] = {}
        self._whole_waiting = 0
        self._flushed = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is None:
            self.flush()
        else:
            with suppress(ResourceError):  # what went wrong first is what is to be told
                self.flush()

    def encoding_pass(self, number: int = 0, of: int = 1) -> "EncodingPass":
        """Return the rows of one pass: where each row is made of several, they come one after the other."""
        return EncodingPass(self, number, last=number == of - 1)

    def store(self) -> RowStore | None:
        """Return what is kept; None where nothing is."""
        if self._store is None and self.folder is not None:
            self._store = RowStore(self.folder)
        return self._store

    def add(self, keys: Sequence[bytes], vectors_ND: np.ndarray, *, whole: bool) -> None:
        """Take rows in; ``whole`` says that nothing else is missing of them."""
        if whole:
            self.rows += len(keys)
            self._advance(len(keys))
        if self.folder is None:
            return
        self._waiting.update(zip(keys, vectors_ND, strict=True))
        self._whole_waiting += len(keys) if whole else 0
        if time.monotonic() - self._flushed >= self.seconds:
            self.flush()

    def count_resumed(self, rows: int) -> None:
        """Note how many rows an earlier attempt had done."""
        self.rows += rows
        self.resumed += rows
        self.stored += rows
        self._advance(rows)

    def flush(self) -> None:
        """Put the rows that wait on the disk.

        Raises:
            ResourceError: the disk is full.
        """
        store = self.store()
        # An interruption may come between their way to the disk and the end of their waiting.
        keys = [key for key in self._waiting if store is not None and key not in store]
        if store is not None and keys:
            store.add(keys, np.stack([self._waiting[key] for key in keys]))
        self.stored += self._whole_waiting
        self._whole_waiting = 0
        self._waiting.clear()
        self._flushed = time.monotonic()

    def forget(self) -> None:
        """Remove what is kept, once the shard itself is."""
        self._waiting.clear()
        self._whole_waiting = self.stored = 0
        self._store = None
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


class EncodingPass:
    """The rows of one pass over a shard."""

    def __init__(self, shard: Unfinished, number: int, *, last: bool) -> None:
        self._shard, self._number, self._last = shard, number, last

    def fill(self, vectors_ND: np.ndarray) -> frozenset[int]:
        """Put the rows that are done into their places; returns which they are."""
        store = self._shard.store()
        if not store or store.width != vectors_ND.shape[1]:
            return frozenset()
        keys = {row: self._key(row) for row in range(len(vectors_ND))}
        done = [row for row, key in keys.items() if key in store]
        if done:
            vectors_ND[done] = store.rows([keys[row] for row in done])
        if self._last:
            self._shard.count_resumed(len(done))
        return frozenset(done)

    def keep(self, rows: Sequence[int], vectors_ND: np.ndarray) -> None:
        """Keep rows that are done now."""
        self._shard.add([self._key(row) for row in rows], vectors_ND, whole=self._last)

    def _key(self, row: int) -> bytes:
        return _key(self._shard.shard, self._number, row)


def has_rows(folder: Path) -> bool:
    """Tell whether a folder of unfinished rows holds any."""
    with suppress(OSError):
        return (folder / "keys").stat().st_size >= KEY_BYTES
    return False


def rows_kept(folder: Path, shard: str, rows: int, passes: int = 1) -> int:
    """Return how many rows of a shard a folder holds; whoever adds to it meanwhile is not disturbed.

    Args:
        folder: where they are kept.
        shard: a hash of all that the rows depend on.
        rows: how many the shard has.
        passes: of how many passes each row is made.
    """
    with suppress(OSError):
        data = (folder / "keys").read_bytes()
        keys = {data[start : start + KEY_BYTES] for start in range(0, len(data), KEY_BYTES)}
        return sum(_key(shard, passes - 1, row) in keys for row in range(rows))
    return 0


def _key(shard: str, number: int, row: int) -> bytes:
    return hashlib.blake2b(f"{shard} {number} {row}".encode(), digest_size=KEY_BYTES).digest()
