"""One shard of a table: from its rows to a part, a file that is whole or absent and depends on the shard alone.

This is what runs in the workers of a job, and in its own process where it has none.

Knows: rows, vectors, parts. Does not know: models, where one shard ends and the next begins, who works.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from gerund.data.embedding.files import IdType, Part, write_part
from gerund.data.embedding.survey import BadRows, Source
from gerund.data.table import Cursor
from gerund.data.tables import BadRow, Rows
from gerund.errors import InputError, ModelError, TextError
from gerund.jobs.engine import JobEngine, StatefulWork
from gerund.jobs.locks import give_back, take
from gerund.jobs.unfinished import Unfinished

_NOT_FINITE = "the vector has values that are not finite; try --dtype float32"


@dataclass(frozen=True)
class Encoded:
    """What the encoder gives back for one shard.

    Attributes:
        vectors: ``(n, d)`` float32.
        truncated: how many texts were cut.
        refused: texts that it does not take, and why; their vectors do not count.
    """

    vectors: np.ndarray
    truncated: int = 0
    refused: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Finished:
    """What comes of a shard.

    Attributes:
        rows: the rows that have a vector.
        vectors: theirs, ``(n, d)`` float32.
        truncated: how many of their texts were cut.
        bad: rows that are left out since they cannot be used.
        refused: how many of these the encoder does not take.
    """

    rows: Rows
    vectors: np.ndarray
    truncated: int
    bad: tuple[BadRow, ...] = ()
    refused: int = 0


# From the texts of a shard and its rows that are done to its vectors.
Encode = Callable[[list[str], Unfinished], Encoded]


@dataclass(frozen=True)
class Elsewhere:
    """Who encodes, where it is not this process.

    Attributes:
        engine: gives out the shards.
        make: makes what encodes in each worker; can be sent there.
        gpus: GPUs that a worker needs for itself.
        threads: cores that it needs.
        passes: of how many passes over a shard each vector is made.
    """

    engine: JobEngine
    make: Callable[[], Encode]
    gpus: float = 0.0
    threads: int = 1
    passes: int = 1


@dataclass(frozen=True)
class Shard:
    """Some consecutive rows of a table.

    Attributes:
        index: the shard's number, from 0.
        digest: a hash of its rows.
        rows: the rows; none in a worker that was told where they start, before it has read them.
        start: where they start, for a worker to read them itself; None sends them there.
    """

    index: int
    digest: str
    rows: Rows
    start: Cursor | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return what is sent to another process."""
        return {**self.__dict__, "rows": self.rows if self.start is None else None}

    def whole(self) -> "Shard":
        """Return the same shard, which is sent with its rows."""
        return replace(self, start=None)


@dataclass(frozen=True)
class ShardWork:
    """What is done with every shard.

    Attributes:
        job: a hash of all that determines the parts.
        folder: where parts are written.
        id_type: what all ids of the output are.
        keep_text: whether the texts are stored too.
        source: where rows come from, and what becomes of those that cannot be used.
    """

    job: str
    folder: Path
    id_type: IdType
    keep_text: bool
    source: Source

    def begun(
        self, shard: Shard, folder: Path | None = None, advance: Callable[[int], None] | None = None
    ) -> Unfinished:
        """Return the rows of a shard that are done; ``folder`` keeps them, without one nothing does."""
        return Unfinished(folder, self.rows_of(shard.digest), advance=advance)

    def rows_of(self, digest: str) -> str:
        """Return a hash of all that the rows of the shard with this digest depend on."""
        return f"{self.job} {digest}"

    def write(self, path: Path, shard: Shard, finished: Finished) -> dict[str, Any]:
        """Write a shard's part, whole or not at all; returns what it says of itself.

        Raises:
            ResourceError: the disk is full.
        """
        ids = finished.rows.ids if self.id_type == "int" else [str(id_) for id_ in finished.rows.ids]
        part = Part(ids, finished.rows.texts if self.keep_text else None, finished.vectors)
        facts = {"job": self.job, "shard": shard.digest, "rows": len(shard.rows), "truncated": finished.truncated}
        facts |= {"bad": [asdict(row) for row in finished.bad], "refused": finished.refused}
        write_part(path, part, self.id_type, facts)
        return facts

    def elsewhere(self, make: Elsewhere) -> StatefulWork[Shard, dict[str, Any] | None]:
        """Return this work for the workers of an engine."""
        return StatefulWork(partial(_opened, self, make.make), gpus=make.gpus, threads=make.threads)


def encoded_rows(encode: Encode, rows: Rows, kept: Unfinished, bad_rows: BadRows = "error") -> Finished:
    """Encode the rows of a shard, and look at the vectors.

    Args:
        encode: makes the vectors.
        rows: the rows.
        kept: those of them that are done.
        bad_rows: what becomes of rows that have no usable vector.

    Raises:
        TextError: a text is too long, where that is an error; with its line.
        ModelError: a vector is not finite, and ``bad_rows`` is ``error``.
    """
    try:
        with kept:
            encoded = encode(rows.texts, kept)
    except TextError as error:
        raise rows.named(error) from error
    finite = np.isfinite(encoded.vectors).all(axis=1)
    if not finite.all() and bad_rows == "error":
        kept.forget()
        raise ModelError(f"{rows.place(int(finite.argmin()))}: {_NOT_FINITE}")
    reasons = dict.fromkeys(np.flatnonzero(~finite).tolist(), _NOT_FINITE) | dict(encoded.refused)
    vectors = np.delete(encoded.vectors, list(reasons), axis=0) if reasons else encoded.vectors
    bad = tuple(rows.bad(index, reasons[index]) for index in sorted(reasons))
    return Finished(rows.without(reasons), vectors, encoded.truncated, bad, len(encoded.refused))


def _opened(work: ShardWork, make: Callable[[], Encode]) -> Callable[[Shard], dict[str, Any] | None]:
    encode = make()

    def make_part(shard: Shard) -> dict[str, Any] | None:
        """Make the part; None, and none, where this process does not find the rows."""
        if shard.start is not None:
            rows = work.source.read(shard.start, shard.digest)
            if rows is None:
                return None
            shard = replace(shard, rows=rows)
        with _held(work.folder / f"unfinished-{shard.index:06d}") as folder:
            kept = work.begun(shard, folder)
            finished = encoded_rows(encode, shard.rows, kept, work.source.bad_rows)
            facts = work.write(work.folder / f"part-{shard.index:06d}.arrow", shard, finished)
            kept.forget()
        return facts

    return make_part


@contextmanager
def _held(folder: Path) -> Iterator[Path | None]:
    """Yield a folder for rows, or None where it cannot be had alone.

    A worker that was taken for lost may live on, at the shard that another one has begun again: two that append to the
    same rows would mix them.
    """
    try:
        lock = take(folder, folder)
    except (InputError, OSError):
        yield None
        return
    try:
        # A file system without locks says nothing of who else is there.
        yield folder if lock.is_locked else None
    finally:
        give_back(lock)
