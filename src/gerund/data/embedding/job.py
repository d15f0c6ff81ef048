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
from typing import Any, Literal, TypeVar

import numpy as np

from gerund.checks import open_input
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
from gerund.errors import ConfigError, DataError, FingerprintError, InputError, ModelError, TextError, unknown_name
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


@dataclass(frozen=True)
class EmbeddingConfig:
    """How a table becomes a file."""

    empty: EmptyTexts = "error"
    """What becomes of a row whose text is empty: an error, a vector of zeros, or nothing."""

    bad_rows: BadRows = "error"
    """What becomes of a row that cannot be used: an error, or it is left out and listed in ``OUT.errors.jsonl``. It is
    malformed, has no text where that is an error, is refused by the encoder, or gets a vector that is not finite."""

    overflow: Overflow = "truncate"
    """What the encoder does with a text that is too long: it cuts it, or refuses it."""

    keep_text: bool = False
    """Whether the texts are stored too."""

    shard_rows: int = 4096
    """Rows a part; batches are made of texts of one part."""

    force: bool = False
    """Replace an output that is there, and begin anew where unfinished work does not fit."""

    def __post_init__(self) -> None:
        if self.empty not in EMPTY:
            raise unknown_name("way with empty texts", self.empty, EMPTY)
        if self.bad_rows not in BAD_ROWS:
            raise unknown_name("way with bad rows", self.bad_rows, BAD_ROWS)
        if self.overflow not in OVERFLOW:
            raise unknown_name("--overflow", self.overflow, OVERFLOW)
        if self.shard_rows < 1:
            raise ConfigError(f"shard_rows={self.shard_rows} leaves no row for a part")

    def files_of(self, output: Path) -> list[Path]:
        """Return all files that may come with an output, the one that stands for all of them last.

        Raises:
            ConfigError: the output's ending is neither .parquet nor .npy.
        """
        listed = [errors_file_of(output)] if self.force or self.bad_rows == "skip" else []
        return [*listed, *output_files(output)]


@dataclass(frozen=True)
class EmbeddingSummary:
    """How a job went."""

    files: list[Path]
    rows: int
    """Rows of the output."""
    resumed_rows: int
    truncated: int
    empty: int
    bad: int
    """Rows that were left out since they cannot be used."""
    first_bad: tuple[BadRow, ...]
    """The first few of them."""
    errors_file: Path | None
    """Where all of them are listed; None where there is none."""
    dimensions: int
    seconds: float
    """Reading, encoding and writing in this process; the first reading and loading the model do not count."""

    @property
    def rows_per_second(self) -> float:
        """Rows of this process a second."""
        return (self.rows - self.resumed_rows) / max(self.seconds, 1e-9)


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
Encode = Callable[[list[str], ShardCheckpoint], Encoded]


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
    ) -> ShardCheckpoint:
        """Return the rows of a shard that are done; ``folder`` keeps them, without one nothing does."""
        return ShardCheckpoint(folder, self.rows_of(shard.digest), advance=advance)

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


def encoded_rows(encode: Encode, rows: Rows, kept: ShardCheckpoint, bad_rows: BadRows = "error") -> Finished:
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
        kept.discard()
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
            kept.discard()
        return facts

    return make_part


@contextmanager
def _held(folder: Path) -> Iterator[Path | None]:
    """Yield a folder for rows, or None where it cannot be had alone.

    A worker that was taken for lost may live on, at the shard that another one has begun again: two that append to the
    same rows would mix them.
    """
    try:
        lock = acquire_lock(folder, folder)
    except (InputError, OSError):
        yield None
        return
    try:
        # A file system without locks says nothing of who else is there.
        yield folder if lock.is_locked else None
    finally:
        release_lock(lock)


Item = TypeVar("Item")
_BAD_SHOWN = 5


@contextmanager
def embedding_job(table: Table, output: Path, config: EmbeddingConfig) -> Iterator["EmbeddingJob"]:
    """Check everything that can be checked without a model, and hold the output's lock meanwhile.

    Args:
        table: what to embed.
        output: a .parquet or .npy file.
        config: how.

    Raises:
        DataError: a malformed row, or none at all; with file and line.
        TextError: a row has no text and ``config.empty`` is ``error``.
        OutputExistsError: there is an output already.
        InputError: another process is writing it, or it is a symbolic link or the input itself.
        ResourceError: the disk is full.
    """
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
        whole = replace(table, path=table.path and table.path.absolute())
        source = Source(whole, config.shard_rows, config.empty, config.bad_rows)
        with progress(None, "reading"):
            survey = survey_of(source)
        yield EmbeddingJob(source, files, errors_file, config, survey, folder)


@dataclass
class EmbeddingJob:
    """One table on its way into one output, with the lock held."""

    source: Source
    files: list[Path]
    errors_file: Path
    config: EmbeddingConfig
    survey: Survey
    folder: WorkingFolder
    _parts: dict[int, dict[str, Any]] = field(default_factory=dict)
    _begun: dict[int, ShardCheckpoint] = field(default_factory=dict)
    # What says how many rows are kept of a shard that was given to a worker.
    _given: dict[int, Callable[[], int]] = field(default_factory=dict)
    _resumed: int = 0

    @property
    def rows_done(self) -> int:
        """Rows that are on the disk: in finished parts, and of those that are not."""
        begun = sum(rows.stored for index, rows in self._begun.items() if index not in self._parts)
        given = sum(kept() for index, kept in self._given.items() if index not in self._parts)
        return begun + given + sum(facts["rows"] for facts in self._parts.values())

    def run(
        self,
        encode: Encode,
        encoder: Mapping[str, Any],
        *,
        computing: Mapping[str, Any] | None = None,
        elsewhere: Elsewhere | None = None,
        show_progress: bool | None = None,
    ) -> EmbeddingSummary:
        """Encode what is not done yet, and put the output in its place.

        Args:
            encode: turns a shard's texts into vectors; equal texts must give equal vectors. It may keep finished rows
                in what it is given with them.
            encoder: what the output says about the encoder; ``fingerprint`` and ``model`` are in there.
            computing: what else the vectors depend on, such as the batch size: kept only while unfinished.
            elsewhere: who encodes in the place of ``encode``.
            show_progress: None shows a bar on a terminal.

        Raises:
            FingerprintError: unfinished work is of another encoder.
            InputError: unfinished work is of other settings or another input.
            DataError: the input has changed since the job began; parts of it as it was are kept.
            ResourceError: memory or disk ran out; finished parts are kept.
            TextError: a text is too long, where that is an error; with its line.
            ModelError: a vector is not finite.
            KeyboardInterrupt: with a note that says what is kept.
        """
        begin = time.perf_counter()
        manifest = self._manifest(encoder, computing or {})
        placed = self._adopt(manifest)
        self._resumed = self.rows_done
        with resume_hint(self.how_to_go_on):
            if not placed:
                folder, id_type, keep_text = self.folder.path.absolute(), self.survey.id_type, self.config.keep_text
                work = ShardWork(manifest.key, folder, id_type, keep_text, self.source)
                if elsewhere is None:
                    self._encode_rest(encode, work, show_progress)
                else:
                    self._encode_elsewhere(elsewhere, work, show_progress)
                self._place({"format": FORMAT, **encoder}, manifest)
        finished = self.folder.manifest()
        told = {"truncated": 0, "bad": 0, "rows": self.survey.rows, **(finished.facts if finished is not None else {})}
        self.folder.remove()
        return EmbeddingSummary(
            files=self.files,
            rows=told["rows"],
            resumed_rows=told["rows"] if placed else self._resumed,
            truncated=told["truncated"],
            empty=self.survey.empty,
            bad=told["bad"],
            first_bad=tuple(self._bad_rows()[:_BAD_SHOWN]),
            errors_file=self.errors_file if told["bad"] else None,
            dimensions=int(encoder["dimensions"]),
            seconds=time.perf_counter() - begin,
        )

    def how_to_go_on(self) -> str:
        """Return what to tell whoever interrupted the job; "" where nothing is kept."""
        if not self.rows_done:
            return ""
        return (
            f"{self.rows_done} of {self.survey.rows} rows are kept in {self.folder.path}: "
            "run the same command again to go on from there"
        )

    def _manifest(self, encoder: Mapping[str, Any], computing: Mapping[str, Any]) -> Manifest:
        config = asdict(self.config)
        # What may be left out or refused changes nothing about the vectors of the other rows.
        del config["force"], config["bad_rows"], config["overflow"]
        settings = {**encoder, **computing, **config, "output": self.files[-1].suffix.lower()}
        settings |= {"column": self.source.table.column, "id_column": self.source.table.id_column}
        names = {"model": str(settings.pop("model", ""))}
        return Manifest("embed", settings, self.survey.digest, f"the rows of {self.source.table.name}", names)

    def _adopt(self, manifest: Manifest) -> bool:
        """Take over the finished parts of an earlier run; tells whether the output is even in its place."""
        if not self.config.force:
            self.folder.require_known_version()
        earlier = self.folder.manifest()
        if earlier is not None and (self.folder.begun() or earlier.stage == PLACING):
            differs = manifest.difference(earlier)
            if not differs:
                return self._take_over(earlier, manifest.key)
            if not self.config.force:
                error = FingerprintError if FINGERPRINT in manifest.changed(earlier) else InputError
                raise error(
                    f"{self.folder.path} holds unfinished work that does not fit: {differs}; "
                    "go on as before, or give --force to begin anew"
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
            # Made when rows might still be left out, or cut, or when long texts were left out.
            refused = self.config.bad_rows == "error" and facts["bad"]
            was_strict = self.config.overflow != "error" and facts.get("refused")
            if not (refused or was_strict or (self.config.overflow == "error" and facts["truncated"])):
                self._parts[index] = facts
        # While the output is put in its place every part is there; they go only when that is done.
        gone = earlier.stage == PLACING and len(self._parts) < len(shards)
        return gone and all(file.exists() for file in self.files)

    def _encode_elsewhere(self, elsewhere: Elsewhere, work: ShardWork, show_progress: bool | None) -> None:
        def giving() -> Iterator[Shard]:
            for shard in self._missing(advance):
                place, rows = self.folder.unfinished(shard.index), work.rows_of(shard.digest)
                kept = partial(saved_rows, place, rows, len(shard.rows), elsewhere.passes)
                self._resumed += kept()
                self._given[shard.index] = kept
                yield shard

        engine = elsewhere.engine
        with (
            progress(self.survey.rows, "embedding", show=show_progress) as advance,
            engine.pool(work.elsewhere(elsewhere), folder=work.folder) as pool,
        ):
            for shard, facts in map_by_place(pool, giving()):
                self._parts[shard.index] = facts
                del self._given[shard.index]
                advance(len(shard.rows))

    def _encode_rest(self, encode: Encode, work: ShardWork, show_progress: bool | None) -> None:
        writing: Future[None] | None = None
        with (
            progress(self.survey.rows, "embedding", show=show_progress) as advance,
            ThreadPoolExecutor(1) as reader,
            ThreadPoolExecutor(1) as writer,
        ):
            for shard in _ahead(self._missing(advance), reader):
                finished = self._finished(encode, shard, work, advance)
                if writing is not None:
                    writing.result()
                writing = writer.submit(self._write, shard, finished, work)
            if writing is not None:
                writing.result()

    def _missing(self, advance: Callable[[int], None]) -> Iterator[Shard]:
        """Yield the shards that have no part yet."""
        if len(self._parts) == len(self.survey.shards):
            return
        for index, rows in enumerate(self.source.shards()):
            if index in self._parts:
                advance(len(rows))
            else:
                self._demand_unchanged(index, rows)
                yield Shard(index, self.survey.shards[index], rows, rows.start)

    def _finished(self, encode: Encode, shard: Shard, work: ShardWork, advance: Callable[[int], None]) -> Finished:
        kept = work.begun(shard, self.folder.unfinished(shard.index), advance)
        self._begun[shard.index] = kept
        try:
            finished = encoded_rows(encode, shard.rows, kept, self.config.bad_rows)
        finally:
            self._resumed += kept.resumed
        advance(len(shard.rows) - kept.rows)
        return finished

    def _demand_unchanged(self, index: int, rows: Rows | None) -> None:
        """Refuse a shard that is no longer what the survey found."""
        if rows is None or self.survey.shards[index : index + 1] != (digest_of(rows),):
            raise DataError(
                f"{self.source.table.name} has changed since this command began to read it; run the command again when "
                "it no longer changes, with --force to begin anew"
            )

    def _write(self, shard: Shard, finished: Finished, work: ShardWork) -> None:
        self._parts[shard.index] = work.write(self.folder.part(shard.index), shard, finished)
        if shard.index in self._begun:
            self._begun[shard.index].discard()

    def _place(self, info: dict[str, Any], manifest: Manifest) -> None:
        """Join the parts and put the output in its place."""
        for index in range(len(self.survey.shards)):
            if index not in self._parts:
                self._demand_unchanged(index, None)
        parts = [self.folder.part(index) for index in sorted(self._parts)]
        bad = self._bad_rows()
        rows = self.survey.rows + len(self.survey.bad) - len(bad)
        info["rows"] = rows
        if not rows:
            self.folder.clear()
            self._parts.clear()
            self._begun.clear()
            raise DataError(f"no row can be used; the first one is {bad[0]}")
        joined = [self.folder.joined(file.name) for file in self.files]
        if len(joined) == 1:
            join_parquet(parts, joined[0], info)
        else:
            join_npy(parts, joined, info, rows)
        errors_file = [self.errors_file] if self.config.bad_rows == "skip" or self.config.force else []
        if not self.config.force and not self.folder.placing():
            require_new_files(*self.files, *errors_file)
        truncated = sum(facts["truncated"] for facts in self._parts.values())
        told = {"truncated": truncated, "bad": len(bad), "rows": rows}
        self.folder.write_manifest(replace(manifest, facts=told), PLACING)
        for path in errors_file:
            if bad:
                write_json_lines(path, map(asdict, bad))
            else:
                path.unlink(missing_ok=True)
        self.folder.put(self.files)

    def _bad_rows(self) -> list[BadRow]:
        """Return the rows that are left out: first those that cannot be read, then those without a usable vector."""
        later = (BadRow(**row) for index in sorted(self._parts) for row in self._parts[index]["bad"])
        return [*self.survey.bad, *later]


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


def _ahead(items: Iterator[Item], pool: ThreadPoolExecutor) -> Iterator[Item]:
    """Yield ``items``, each fetched while the one before is in use."""
    coming = pool.submit(next, items, None)
    while (item := coming.result()) is not None:
        coming = pool.submit(next, items, None)
        yield item
