"""Embed a table of any size into a file, part by part; an interrupted job resumes where it stopped.

First the table is read once: errors show before hours of work, and its rows are counted and hashed per shard. Then
shard after shard is encoded and saved as a finished part in ``OUT.parts``. While one shard is encoded the next is read,
the last is written, and every few seconds the rows of finished batches are checkpointed. At the end the parts are
joined. Shards depend on the table alone and are compared with their hashes; batches depend on the shard alone. So a
resumed job gives exactly the bytes of an uninterrupted one, or an error.

The caller brings the function that turns texts into vectors; nothing here knows models.
"""

import hashlib
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import numpy as np

from gerund.checks import one_of, open_input
from gerund.data.embedding.files import (
    FORMAT,
    IdType,
    Part,
    join_npy,
    join_parquet,
    output_files,
    read_facts,
    write_part,
)
from gerund.data.files import COMPRESSED
from gerund.data.tables import BadRow, Cursor, Rows, Table, read_rows
from gerund.errors import ConfigError, DataError, FingerprintError, InputError, ModelError, TextError
from gerund.jobs.checkpoints import (
    FINGERPRINT,
    MAKING,
    PLACING,
    Manifest,
    ShardCheckpoint,
    WorkingFolder,
    resume_hint,
    saved_rows,
    working_folder,
)
from gerund.jobs.engine import JobEngine, StatefulWork, map_by_place
from gerund.jobs.files import (
    acquire_lock,
    atomic_file,
    errors_file_of,
    release_lock,
    require_new_files,
    require_regular_file,
    write_json_lines,
)
from gerund.progress import progress

EmptyTexts = Literal["error", "zeros", "skip"]
BadRows = Literal["error", "skip"]
Overflow = Literal["truncate", "error"]
Item = TypeVar("Item")

_PIECE = 2**16
_BAD_SHOWN = 5
_NOT_FINITE = "the vector has values that are not finite; try --dtype float32"


@dataclass(frozen=True)
class EmbeddingConfig:
    """How a table is embedded into a file."""

    empty: EmptyTexts = "error"  # for a row without a text: an error, a vector of zeros, or no output row
    bad_rows: BadRows = "error"
    """For a row that can't be used: an error, or it is left out and listed in ``OUT.errors.jsonl``. A bad row is
    malformed, has no text where that is an error, is refused by the encoder, or gets a vector that is not finite."""
    overflow: Overflow = "truncate"  # what the encoder does with a text that is too long
    keep_text: bool = False  # store the texts too
    shard_rows: int = 4096  # rows per part; the texts of a batch are from one part
    force: bool = False  # replace an existing output, and start from scratch if unfinished work doesn't match

    def __post_init__(self) -> None:
        for name, value, kind in (
            ("way with empty texts", self.empty, EmptyTexts),
            ("way with bad rows", self.bad_rows, BadRows),
            ("--overflow", self.overflow, Overflow),
        ):
            one_of(name, value, get_args(kind))
        if self.shard_rows < 1:
            raise ConfigError(f"shard_rows must be at least 1, got {self.shard_rows}")

    def files_of(self, output: Path) -> list[Path]:
        """Return all files that may come with an output, the main one last."""
        errors_files = [errors_file_of(output)] if self.force or self.bad_rows == "skip" else []
        return [*errors_files, *output_files(output)]


@dataclass(frozen=True)
class EmbeddingSummary:
    """The result of a job."""

    files: list[Path]
    rows: int  # rows of the output
    resumed_rows: int
    truncated: int
    empty: int
    bad: int  # bad rows that were left out
    first_bad: tuple[BadRow, ...]
    errors_file: Path | None  # the list of all bad rows, if any
    dimensions: int
    seconds: float  # for reading, encoding and writing in this process, without the first reading and loading the model

    @property
    def rows_per_second(self) -> float:
        """Rows per second of this process."""
        return (self.rows - self.resumed_rows) / max(self.seconds, 1e-9)


@dataclass(frozen=True)
class Survey:
    """What the first reading of the table found."""

    rows: int  # rows that get a vector
    empty: int  # rows without a text that are not bad rows
    id_type: IdType  # ``int`` if all ids are integers
    digest: str  # a hash of all ids and texts
    shards: tuple[str, ...]  # a hash of each shard
    bad: tuple[BadRow, ...]


@dataclass(frozen=True)
class Source:
    """The table (by its absolute path) and how it is read, for this process and for workers."""

    table: Table
    max_rows: int
    empty: EmptyTexts = "error"
    bad_rows: BadRows = "error"

    def shards(self, start: Cursor | None = None) -> Iterator[Rows]:
        """Yield the shards without left-out rows, from the first or from the shard at ``start``."""
        bad = None if self.bad_rows == "error" else lambda _: None  # those that the survey has listed
        for rows in read_rows(self.table, max_rows=self.max_rows, bad=bad, start=start):
            left = rows if self.empty == "zeros" else rows.without(rows.empty())
            if len(left):
                yield left

    def read(self, start: Cursor, digest: str) -> Rows | None:
        """Return the rows of the shard at ``start``; None if the file has others there, or isn't there."""
        try:
            rows = next(self.shards(start), None)
        except DataError:
            return None
        return rows if rows is not None and digest_of(rows) == digest else None


def _fail(row: BadRow) -> None:
    raise DataError(f"{row}; give --bad-rows skip to leave such rows out and list them")


def survey_of(source: Source) -> Survey:
    """Read a table to its end; raises for the first bad row or empty text where these are errors."""
    # Together these do not depend on where a shard ends.
    ids, lengths, texts = (hashlib.blake2b(digest_size=16) for _ in range(3))
    shards: list[str] = []
    count = without = 0
    all_integers = True
    bad: list[BadRow] = []
    on_bad = bad.append if source.bad_rows == "skip" else _fail
    for rows in read_rows(source.table, max_rows=source.max_rows, bad=on_bad):
        blank = rows.empty()
        if blank and source.empty == "error":
            if source.bad_rows == "error":
                raise TextError(
                    f"{rows.place(blank[0])}: the text is empty; give --empty zeros for a vector of zeros, "
                    "or --empty skip to leave such rows out"
                )
            bad += [rows.bad(index, "the text is empty") for index in blank]
        else:
            without += len(blank)
        # Of all rows, also those that are left out.
        all_integers = all_integers and all(type(id_) is int and -(2**63) <= id_ < 2**63 for id_ in rows.ids)
        ids.update(json.dumps(rows.ids)[1:-1].encode() + b", ")
        lengths.update(json.dumps([len(text) for text in rows.texts])[1:-1].encode() + b", ")
        for text in rows.texts:
            _add(texts, text)
        rows = rows if source.empty == "zeros" else rows.without(blank)
        if len(rows):
            count += len(rows)
            shards.append(digest_of(rows))
    if count == 0 and bad:
        raise DataError(f"no row can be used; the first one is {bad[0]}")
    if count == 0:
        raise DataError(f"{source.table.name} has no rows" + (" with a text" if without else ""))
    digest = hashlib.blake2b(ids.digest() + lengths.digest() + texts.digest(), digest_size=16).hexdigest()
    return Survey(count, without, "int" if all_integers else "text", digest, tuple(shards), tuple(bad))


def digest_of(rows: Rows) -> str:
    """Return a hash of a shard's ids and texts; with the lengths, no two shards give the same bytes."""
    digest = hashlib.blake2b(json.dumps([rows.ids, [len(text) for text in rows.texts]]).encode(), digest_size=8)
    for text in rows.texts:
        _add(digest, text)
    return digest.hexdigest()


def _add(digest: "hashlib.blake2b", text: str) -> None:
    # In pieces, since a text may have many megabytes.
    for start in range(0, len(text), _PIECE):
        digest.update(text[start : start + _PIECE].encode())


@dataclass(frozen=True)
class Encoded:
    """The encoder's result for one shard."""

    vectors: np.ndarray  # ``(n, d)`` float32
    truncated: int = 0  # how many texts were truncated
    refused: Mapping[int, str] = field(default_factory=dict)
    """Texts that the encoder refuses, and why; their vectors don't count."""


@dataclass(frozen=True)
class EncodedRows:
    """The rows of a shard that have a usable vector, and those that don't."""

    rows: Rows
    vectors: np.ndarray  # ``(n, d)`` float32
    truncated: int
    bad: tuple[BadRow, ...] = ()
    refused: int = 0  # how many of the bad rows the encoder refuses


# From the texts of a shard and the rows that are done already to its vectors.
Encode = Callable[[list[str], ShardCheckpoint], Encoded]


@dataclass(frozen=True)
class EncodingWorkers:
    """Other processes that encode."""

    engine: JobEngine
    make: Callable[[], Encode]  # makes the encode function in each worker; is sent there
    gpus: float = 0.0  # GPUs per worker
    threads: int = 1  # cores per worker
    passes: int = 1  # passes over a shard per vector


@dataclass(frozen=True)
class Shard:
    """Some consecutive rows of a table."""

    index: int
    digest: str
    rows: Rows  # the rows; in a worker none before it has read them, if there is a ``start``
    start: Cursor | None = None  # where they start, so that a worker can read them itself; None sends them

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "rows": self.rows if self.start is None else None}

    def whole(self) -> "Shard":
        """Return the same shard, sent with its rows."""
        return replace(self, start=None)


@dataclass(frozen=True)
class ShardWork:
    """What is done with every shard: it becomes a part, which is complete or absent and depends on the shard alone."""

    job: str  # a hash of everything that determines the parts
    folder: Path
    id_type: IdType
    keep_text: bool
    source: Source

    def checkpoint(
        self, shard: Shard, folder: Path | None, advance: Callable[[int], None] | None = None
    ) -> ShardCheckpoint:
        """Return the finished rows of a shard, stored in ``folder``."""
        return ShardCheckpoint(folder, self.rows_key(shard), advance=advance)

    def rows_key(self, shard: Shard) -> str:
        """Return a key of everything that the rows of a shard depend on."""
        return f"{self.job} {shard.digest}"

    def write(self, path: Path, shard: Shard, encoded: EncodedRows) -> dict[str, Any]:
        """Write a shard's part atomically; returns its facts."""
        ids = encoded.rows.ids if self.id_type == "int" else [str(id_) for id_ in encoded.rows.ids]
        part = Part(ids, encoded.rows.texts if self.keep_text else None, encoded.vectors)
        facts = {"job": self.job, "shard": shard.digest, "rows": len(shard.rows), "truncated": encoded.truncated}
        facts |= {"bad": [asdict(row) for row in encoded.bad], "refused": encoded.refused}
        write_part(path, part, self.id_type, facts)
        return facts


def _encode_rows(encode: Encode, rows: Rows, checkpoint: ShardCheckpoint, bad_rows: BadRows) -> EncodedRows:
    """Encode the rows of a shard, and separate those without a usable vector, or raise."""
    try:
        with checkpoint:
            encoded = encode(rows.texts, checkpoint)
    except TextError as error:
        raise rows.named(error) from error
    finite = np.isfinite(encoded.vectors).all(axis=1)
    if not finite.all() and bad_rows == "error":
        checkpoint.discard()
        raise ModelError(f"{rows.place(int(finite.argmin()))}: {_NOT_FINITE}")
    reasons = dict.fromkeys(np.flatnonzero(~finite).tolist(), _NOT_FINITE) | dict(encoded.refused)
    vectors = np.delete(encoded.vectors, list(reasons), axis=0) if reasons else encoded.vectors
    bad = tuple(rows.bad(index, reasons[index]) for index in sorted(reasons))
    return EncodedRows(rows.without(reasons), vectors, encoded.truncated, bad, len(encoded.refused))


def _prepared(work: ShardWork, make: Callable[[], Encode]) -> Callable[[Shard], dict[str, Any] | None]:
    encode = make()

    def make_part(shard: Shard) -> dict[str, Any] | None:
        """Make the part; returns its facts, or None if this process doesn't find the rows."""
        if shard.start is not None:
            rows = work.source.read(shard.start, shard.digest)
            if rows is None:
                return None
            shard = replace(shard, rows=rows)
        with _locked(work.folder / f"unfinished-{shard.index:06d}") as folder:
            checkpoint = work.checkpoint(shard, folder)
            encoded = _encode_rows(encode, shard.rows, checkpoint, work.source.bad_rows)
            facts = work.write(work.folder / f"part-{shard.index:06d}.arrow", shard, encoded)
            checkpoint.discard()
        return facts

    return make_part


@contextmanager
def _locked(folder: Path) -> Iterator[Path | None]:
    """Yield a folder for rows, or None if another process has it.

    A worker that was considered lost may live on, at the shard that another worker has begun again: two that append to
    the same rows would mix them.
    """
    try:
        lock = acquire_lock(folder, folder)
    except (InputError, OSError):
        yield None
        return
    try:
        # On a file system without locks, other processes can't be detected.
        yield folder if lock.is_locked else None
    finally:
        release_lock(lock)


@contextmanager
def embedding_job(table: Table, output: Path, config: EmbeddingConfig) -> Iterator["EmbeddingJob"]:
    """Check everything that can be checked without a model, lock the output, and yield the job."""
    files = output_files(output)
    errors_file = errors_file_of(output)
    for file in (*files, errors_file):
        if table.path is not None and file.exists() and file.samefile(table.path):
            raise InputError(f"{file} is the input itself; choose another output")
        if file.is_dir():
            raise InputError(f"{file} is a folder; choose another output")
        if table.path is not None and table.path.is_dir() and file.resolve().is_relative_to(table.path.resolve()):
            raise InputError(f"{file} would lie in the folder that is read; choose a place outside of {table.path}")
        require_regular_file(file)
    with working_folder(output) as folder:
        if not config.force and not folder.placing():
            require_new_files(*files, *([errors_file] if config.bad_rows == "skip" else []))
        table = _spooled(table, folder)
        table = replace(table, path=table.path and table.path.absolute())
        source = Source(table, config.shard_rows, config.empty, config.bad_rows)
        with progress(None, "reading"):
            survey = survey_of(source)
        yield EmbeddingJob(source, files, errors_file, config, survey, folder)


def _spooled(table: Table, folder: WorkingFolder) -> Table:
    """Copy an input that can be read only once into the working folder."""
    if table.path is not None and (table.path.is_file() or table.path.is_dir()):
        return table
    packed = table.path.suffix if table.path is not None and table.path.suffix in COMPRESSED else ""
    spool = folder.spool(f".{table.format}{packed}")
    with atomic_file(spool) as file:
        if table.path is None:
            shutil.copyfileobj(sys.stdin.buffer, file, 2**20)
        else:
            with open_input(table.path) as pipe:
                shutil.copyfileobj(pipe, file, 2**20)
    return replace(table, path=spool)


@dataclass
class EmbeddingJob:
    """A table on its way into an output, which is locked."""

    source: Source
    files: list[Path]
    errors_file: Path
    config: EmbeddingConfig
    survey: Survey
    folder: WorkingFolder
    _parts: dict[int, dict[str, Any]] = field(default_factory=dict)
    _checkpoints: dict[int, ShardCheckpoint] = field(default_factory=dict)
    # Functions that count the stored rows of shards at workers.
    _at_workers: dict[int, Callable[[], int]] = field(default_factory=dict)
    _resumed: int = 0

    @property
    def rows_done(self) -> int:
        """Rows that are on the disk, in finished parts or checkpoints."""
        here = sum(rows.stored for index, rows in self._checkpoints.items() if index not in self._parts)
        there = sum(count() for index, count in self._at_workers.items() if index not in self._parts)
        return here + there + sum(facts["rows"] for facts in self._parts.values())

    def run(
        self,
        encode: Encode,
        encoder: Mapping[str, Any],
        *,
        computing: Mapping[str, Any] | None = None,
        workers: EncodingWorkers | None = None,
        show_progress: bool | None = None,
    ) -> EmbeddingSummary:
        """Encode what is not done yet, and put the output in its place.

        Args:
            encode: turns a shard's texts into vectors; equal texts must give equal vectors. It may save finished rows
                in the checkpoint that it gets.
            encoder: what the output records about the encoder, with ``fingerprint``, ``model`` and ``dimensions``.
            computing: what else the vectors depend on, such as the batch size; recorded only while unfinished.
            workers: encode instead of ``encode``.
            show_progress: None shows a bar on a terminal.

        Raises:
            FingerprintError: unfinished work is of another encoder.
            InputError: unfinished work is of other settings or another input.
            DataError: the input has changed since the job began.
        """
        begin = time.perf_counter()
        manifest = self._manifest(encoder, computing or {})
        placed = self._adopt(manifest)
        self._resumed = self.rows_done
        with resume_hint(self.how_to_go_on):
            if not placed:
                folder, id_type, keep_text = self.folder.path.absolute(), self.survey.id_type, self.config.keep_text
                work = ShardWork(manifest.key, folder, id_type, keep_text, self.source)
                if workers is None:
                    self._encode_here(encode, work, show_progress)
                else:
                    self._encode_in_workers(workers, work, show_progress)
                self._place({"format": FORMAT, **encoder}, manifest)
        written = self.folder.manifest()
        facts = {"truncated": 0, "bad": 0, "rows": self.survey.rows, **(written.facts if written is not None else {})}
        self.folder.remove()
        return EmbeddingSummary(
            files=self.files,
            rows=facts["rows"],
            resumed_rows=facts["rows"] if placed else self._resumed,
            truncated=facts["truncated"],
            empty=self.survey.empty,
            bad=facts["bad"],
            first_bad=tuple(self._bad_rows()[:_BAD_SHOWN]),
            errors_file=self.errors_file if facts["bad"] else None,
            dimensions=int(encoder["dimensions"]),
            seconds=time.perf_counter() - begin,
        )

    def how_to_go_on(self) -> str:
        """Return a message for an interruption; "" where nothing is saved."""
        if not self.rows_done:
            return ""
        return (
            f"{self.rows_done} of {self.survey.rows} rows are kept in {self.folder.path}: "
            "run the same command again to go on from there"
        )

    def _manifest(self, encoder: Mapping[str, Any], computing: Mapping[str, Any]) -> Manifest:
        config = asdict(self.config)
        # Which rows may be left out doesn't change the vectors of the others.
        del config["force"], config["bad_rows"], config["overflow"]
        settings = {**encoder, **computing, **config, "output": self.files[-1].suffix.lower()}
        settings |= {"column": self.source.table.column, "id_column": self.source.table.id_column}
        names = {"model": str(settings.pop("model", ""))}
        return Manifest("embed", settings, self.survey.digest, f"the rows of {self.source.table.name}", names)

    def _adopt(self, manifest: Manifest) -> bool:
        """Take over the finished parts of an earlier run; returns whether even its output is in place."""
        if not self.config.force:
            self.folder.require_known_version()
        earlier = self.folder.manifest()
        if earlier is not None and (self.folder.begun() or earlier.stage == PLACING):
            difference = manifest.difference(earlier)
            if not difference:
                return self._take_over(earlier, manifest.key)
            if not self.config.force:
                error = FingerprintError if FINGERPRINT in manifest.changed(earlier) else InputError
                raise error(
                    f"{self.folder.path} has unfinished work that does not match: {difference}; "
                    "go on as before, or give --force to start from scratch"
                )
        self.folder.clear()
        self.folder.write_manifest(manifest, MAKING)
        return False

    def _take_over(self, earlier: Manifest, key: str) -> bool:
        shards = dict(enumerate(self.survey.shards))
        for index, path in self.folder.parts().items():
            facts = read_facts(path)
            if facts is None or facts.get("job") != key or facts.get("shard") != shards.get(index):
                continue
            # Made when rows might still be left out, or truncated, or when long texts were left out.
            refused = self.config.bad_rows == "error" and facts["bad"]
            was_strict = self.config.overflow != "error" and facts.get("refused")
            if not (refused or was_strict or (self.config.overflow == "error" and facts["truncated"])):
                self._parts[index] = facts
        # Parts are removed only after the output is in its place.
        removed = earlier.stage == PLACING and len(self._parts) < len(shards)
        return removed and all(file.exists() for file in self.files)

    def _encode_in_workers(self, workers: EncodingWorkers, work: ShardWork, show_progress: bool | None) -> None:
        def missing() -> Iterator[Shard]:
            for shard in self._missing(advance):
                folder, key = self.folder.unfinished(shard.index), work.rows_key(shard)
                count = partial(saved_rows, folder, key, len(shard.rows), workers.passes)
                self._resumed += count()
                self._at_workers[shard.index] = count
                yield shard

        make = partial(_prepared, work, workers.make)
        at_workers = StatefulWork[Shard, dict[str, Any] | None](make, gpus=workers.gpus, threads=workers.threads)
        with (
            progress(self.survey.rows, "embedding", show=show_progress) as advance,
            workers.engine.pool(at_workers, folder=work.folder) as pool,
        ):
            for shard, facts in map_by_place(pool, missing()):
                self._parts[shard.index] = facts
                del self._at_workers[shard.index]
                advance(len(shard.rows))

    def _encode_here(self, encode: Encode, work: ShardWork, show_progress: bool | None) -> None:
        writing: Future[None] | None = None
        with (
            progress(self.survey.rows, "embedding", show=show_progress) as advance,
            ThreadPoolExecutor(1) as reader,
            ThreadPoolExecutor(1) as writer,
        ):
            for shard in _ahead(self._missing(advance), reader):
                checkpoint = work.checkpoint(shard, self.folder.unfinished(shard.index), advance)
                self._checkpoints[shard.index] = checkpoint
                try:
                    encoded = _encode_rows(encode, shard.rows, checkpoint, self.config.bad_rows)
                finally:
                    self._resumed += checkpoint.resumed
                advance(len(shard.rows) - checkpoint.rows)
                if writing is not None:
                    writing.result()
                writing = writer.submit(self._write, shard, encoded, work)
            if writing is not None:
                writing.result()

    def _missing(self, advance: Callable[[int], None]) -> Iterator[Shard]:
        if len(self._parts) == len(self.survey.shards):
            return
        for index, rows in enumerate(self.source.shards()):
            if index in self._parts:
                advance(len(rows))
            else:
                self._require_unchanged(index, rows)
                yield Shard(index, self.survey.shards[index], rows, rows.start)

    def _require_unchanged(self, index: int, rows: Rows | None) -> None:
        """Raise ``DataError`` for a shard that is no longer what the survey found."""
        if rows is None or self.survey.shards[index : index + 1] != (digest_of(rows),):
            raise DataError(
                f"{self.source.table.name} has changed since this command began to read it; run the command again when "
                "it no longer changes, with --force to start from scratch"
            )

    def _write(self, shard: Shard, encoded: EncodedRows, work: ShardWork) -> None:
        self._parts[shard.index] = work.write(self.folder.part(shard.index), shard, encoded)
        self._checkpoints[shard.index].discard()

    def _place(self, info: dict[str, Any], manifest: Manifest) -> None:
        """Join the parts and put the output in its place."""
        for index in range(len(self.survey.shards)):
            if index not in self._parts:
                self._require_unchanged(index, None)
        parts = [self.folder.part(index) for index in sorted(self._parts)]
        bad = self._bad_rows()
        rows = self.survey.rows + len(self.survey.bad) - len(bad)
        info["rows"] = rows
        if not rows:
            self.folder.clear()
            self._parts.clear()
            self._checkpoints.clear()
            raise DataError(f"no row can be used; the first one is {bad[0]}")
        joined = [self.folder.joined(file.name) for file in self.files]
        if len(joined) == 1:
            join_parquet(parts, joined[0], info)
        else:
            join_npy(parts, joined, info, rows)
        errors_files = [self.errors_file] if self.config.bad_rows == "skip" or self.config.force else []
        if not self.config.force and not self.folder.placing():
            require_new_files(*self.files, *errors_files)
        truncated = sum(facts["truncated"] for facts in self._parts.values())
        facts = {"truncated": truncated, "bad": len(bad), "rows": rows}
        self.folder.write_manifest(replace(manifest, facts=facts), PLACING)
        for path in errors_files:
            if bad:
                write_json_lines(path, map(asdict, bad))
            else:
                path.unlink(missing_ok=True)
        self.folder.put(self.files)

    def _bad_rows(self) -> list[BadRow]:
        """Return the bad rows: first those that can't be read, then those without a usable vector."""
        later = (BadRow(**row) for index in sorted(self._parts) for row in self._parts[index]["bad"])
        return [*self.survey.bad, *later]


def _ahead(items: Iterator[Item], pool: ThreadPoolExecutor) -> Iterator[Item]:
    """Yield ``items``, each read while the one before is in use."""
    coming = pool.submit(next, items, None)
    while (item := coming.result()) is not None:
        coming = pool.submit(next, items, None)
        yield item
