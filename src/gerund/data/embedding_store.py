"""Embeds a table of any size into a file, part by part, so that an interrupted job goes on where it was.

First the whole table is read once: what is wrong with it shows before hours of work, and its rows are
counted and hashed. Then lot after lot is encoded and kept as a finished part in ``OUT.parts``; while one lot
is encoded the next is read and the last is written. At the end the parts are joined. Lots depend on the table
alone, so a resumed job gives the very bytes that an uninterrupted one gives.

Knows: tables, parts, resuming. Does not know: models: whoever calls brings a function from texts to vectors.
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
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from gerund.data.embedding_files import (
    FORMAT,
    IdType,
    Part,
    join_npy,
    join_parquet,
    output_files,
    read_facts,
    write_part,
)
from gerund.data.files import COMPRESSED, flush_names, whole_file
from gerund.data.tables import Rows, Table, read_rows
from gerund.data.working_folder import EMBEDDING, PLACING, WorkingFolder, difference, what_counts, working_folder
from gerund.errors import (
    ConfigError,
    DataError,
    InputError,
    ModelError,
    OutputExistsError,
    ResourceError,
    TextError,
    unknown_name,
)
from gerund.progress import progress

Item = TypeVar("Item")
EMPTY = ("error", "zeros", "skip")


@dataclass(frozen=True)
class StoreOptions:
    """How a table becomes a file."""

    empty: Literal["error", "zeros", "skip"] = "error"
    """What becomes of a row whose text is empty: an error, a vector of zeros, or nothing."""

    keep_text: bool = False
    """Whether the texts are stored too."""

    shard_rows: int = 4096
    """Rows a part; what an interruption costs at most."""

    force: bool = False
    """Replace an output that is there, and begin anew where unfinished work does not fit."""

    def __post_init__(self) -> None:
        if self.empty not in EMPTY:
            raise unknown_name("way with empty texts", self.empty, EMPTY)
        if self.shard_rows < 1:
            raise ConfigError(f"shard_rows={self.shard_rows} leaves no row for a part")


@dataclass(frozen=True)
class Encoded:
    """What the encoder gives back for one lot: ``(n, d)`` float32, and how many texts were cut."""

    vectors: np.ndarray
    truncated: int = 0


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


@dataclass(frozen=True)
class StoreSummary:
    """How a job went."""

    files: list[Path]
    rows: int
    resumed_rows: int
    truncated: int
    empty: int
    dimensions: int
    seconds: float
    """Reading, encoding and writing in this process; the first reading and loading the model do not count."""

    @property
    def rows_per_second(self) -> float:
        """Rows of this process a second."""
        return (self.rows - self.resumed_rows) / max(self.seconds, 1e-9)


@contextmanager
def embedding_job(table: Table, output: Path, options: StoreOptions) -> Iterator["EmbeddingJob"]:
    """Check everything that can be checked without a model, and hold the output's lock meanwhile.

    Args:
        table: what to embed.
        output: a .parquet or .npy file.
        options: how.

    Raises:
        DataError: a malformed row, or none at all; with file and line.
        TextError: a row has no text and ``options.empty`` is ``error``.
        OutputExistsError: there is an output already.
        InputError: another process is writing it, or it is the input itself.
        ResourceError: the disk is full.
    """
    files = output_files(output)
    for file in files:
        if table.path is not None and file.exists() and file.samefile(table.path):
            raise InputError(f"{file} is the input itself; choose another output")
        if file.is_dir():
            raise InputError(f"{file} is a folder; choose another output")
    with working_folder(output) as folder:
        stage = (folder.manifest() or {}).get("stage")
        if not options.force and stage != PLACING:
            _refuse_existing(files)
        table = _spooled(table, folder)
        with progress(None, "reading"):
            survey = _survey(table, options)
        yield EmbeddingJob(table, files, options, survey, folder)


@dataclass
class EmbeddingJob:
    """One table on its way into one output, with the lock held."""

    table: Table
    files: list[Path]
    options: StoreOptions
    survey: Survey
    folder: WorkingFolder
    _pieces: list[dict[str, Any]] = field(default_factory=list)

    @property
    def rows_done(self) -> int:
        """Rows that are in finished parts."""
        return sum(piece["rows"] for piece in self._pieces)

    def run(
        self,
        encode: Callable[[list[str]], Encoded],
        encoder: Mapping[str, Any],
        *,
        computing: Mapping[str, Any] | None = None,
        show_progress: bool | None = None,
    ) -> StoreSummary:
        """Encode what is not done yet, and put the output in its place.

        Args:
            encode: turns a lot of texts into vectors; equal lots must give equal vectors.
            encoder: what the output says about the encoder; ``fingerprint`` and ``model`` are in there.
            computing: what else the vectors depend on, such as the batch size: kept only while unfinished.
            show_progress: None shows a bar on a terminal.

        Raises:
            FingerprintError: unfinished work is of another encoder.
            InputError: unfinished work is of other settings or another input.
            ResourceError: memory or disk ran out; finished parts are kept.
            TextError: a text is too long, where that is an error; with its line.
            ModelError: a vector is not finite.
        """
        begin = time.perf_counter()
        manifest = self._manifest(encoder, computing or {})
        job = hashlib.blake2b(json.dumps(what_counts(manifest), sort_keys=True).encode(), digest_size=8).hexdigest()
        placed = self._adopt(manifest, job)
        resumed = self.rows_done
        try:
            if not placed:
                self._encode_rest(encode, job, show_progress)
                self._place({"format": FORMAT, **encoder, "rows": self.survey.rows}, manifest)
        except ResourceError as error:
            if not self.rows_done:
                raise
            raise ResourceError(f"{error}; {self.how_to_go_on()}") from error
        truncated = (self.folder.manifest() or {}).get("truncated", 0)
        self.folder.remove()
        return StoreSummary(
            files=self.files,
            rows=self.survey.rows,
            resumed_rows=self.survey.rows if placed else resumed,
            truncated=truncated,
            empty=self.survey.empty,
            dimensions=int(encoder["dimensions"]),
            seconds=time.perf_counter() - begin,
        )

    def how_to_go_on(self) -> str:
        """Return what to tell who interrupted the job."""
        return (
            f"{self.rows_done} of {self.survey.rows} rows are kept in {self.folder.path}: "
            "run the same command again to go on from there"
        )

    def _manifest(self, encoder: Mapping[str, Any], computing: Mapping[str, Any]) -> dict[str, Any]:
        options = asdict(self.options)
        options.pop("force")
        settings = {**encoder, **computing, **options, "output": self.files[-1].suffix.lower()}
        settings["column"] = self.table.column
        settings["id_column"] = self.table.id_column
        found: dict[str, Any] = {"settings": settings, "input": asdict(self.survey), "name": self.table.name}
        return found

    def _adopt(self, manifest: dict[str, Any], job: str) -> bool:
        """Take over the finished parts of an earlier run; tells whether the output is even in its place."""
        earlier = self.folder.manifest()
        if (earlier is not None and self.folder.parts()) or (earlier or {}).get("stage") == PLACING:
            assert earlier is not None
            differs = difference(earlier, manifest)
            if differs is None:
                return self._take_over(earlier, job)
            if not self.options.force:
                raise differs[0](
                    f"{self.folder.path} holds unfinished work that does not fit: {differs[1]}; "
                    "go on as before, or give --force to begin anew"
                )
        self.folder.clear()
        self.folder.write_manifest({**manifest, "stage": EMBEDDING})
        return False

    def _take_over(self, earlier: dict[str, Any], job: str) -> bool:
        for path in self.folder.parts():
            facts = read_facts(path)
            if facts is None or facts.get("job") != job:
                break
            self._pieces.append(facts)
        # While the output is put in its place every part is there; they go only when that is done.
        gone = earlier.get("stage") == PLACING and len(self._pieces) < earlier["parts"]
        return gone and all(file.exists() for file in self.files)

    def _encode_rest(self, encode: Callable[[list[str]], Encoded], job: str, show_progress: bool | None) -> None:
        done = len(self._pieces)
        if self.rows_done == self.survey.rows:
            return
        writing: Future[None] | None = None
        with (
            progress(self.survey.rows, "embedding", show=show_progress) as advance,
            ThreadPoolExecutor(1) as reader,
            ThreadPoolExecutor(1) as writer,
        ):
            for index, rows in enumerate(_ahead(_lots(self.table, self.options), reader)):
                if index >= done:
                    encoded = _encoded(encode, rows)
                    if writing is not None:
                        writing.result()
                    writing = writer.submit(self._write, index, rows, encoded, job)
                advance(len(rows))
            if writing is not None:
                writing.result()

    def _write(self, index: int, rows: Rows, encoded: Encoded, job: str) -> None:
        ids = rows.ids if self.survey.id_type == "int" else [str(id_) for id_ in rows.ids]
        part = Part(ids, rows.texts if self.options.keep_text else None, encoded.vectors)
        facts = {"job": job, "rows": len(rows), "truncated": encoded.truncated}
        write_part(self.folder.part(index), part, self.survey.id_type, facts)
        self._pieces.append(facts)

    def _place(self, info: dict[str, Any], manifest: dict[str, Any]) -> None:
        """Join the parts and put the output in its place."""
        parts = self.folder.parts()[: len(self._pieces)]
        rows = self.rows_done
        if rows != self.survey.rows:
            raise DataError(f"{self.table.name} has changed while it was read; give --force to begin anew")
        joined = [self.folder.joined(file.name) for file in self.files]
        if len(joined) == 1:
            join_parquet(parts, joined[0], info)
        else:
            join_npy(parts, joined, info, rows)
        if not self.options.force and (self.folder.manifest() or {}).get("stage") != PLACING:
            _refuse_existing(self.files)
        truncated = sum(piece["truncated"] for piece in self._pieces)
        self.folder.write_manifest({**manifest, "stage": PLACING, "parts": len(parts), "truncated": truncated})
        for source, target in zip(joined, self.files, strict=True):
            try:
                source.replace(target)
            except OSError as error:
                raise ResourceError(f"{target} was not written: {error.strerror or error}") from error
        flush_names(self.files[-1].parent)


def _refuse_existing(files: list[Path]) -> None:
    for file in files:
        if file.exists():
            raise OutputExistsError(f"{file} exists already; choose another name or give --force to replace it")


def _spooled(table: Table, folder: WorkingFolder) -> Table:
    """Copy an input that can be read only once into the working folder."""
    if table.path is not None and table.path.is_file():
        return table
    packed = table.path.suffix if table.path is not None and table.path.suffix in COMPRESSED else ""
    spool = folder.spool(f".{table.format}{packed}")
    with whole_file(spool) as file:
        if table.path is None:
            shutil.copyfileobj(sys.stdin.buffer, file, 2**20)
        else:
            with table.path.open("rb") as pipe:
                shutil.copyfileobj(pipe, file, 2**20)
    return replace(table, path=spool)


def _survey(table: Table, options: StoreOptions) -> Survey:
    digest = hashlib.blake2b(digest_size=16)
    count = empty = 0
    whole_numbers = True
    for rows in read_rows(table, max_rows=4096):
        if options.empty == "error" and (index := rows.first_empty()) is not None:
            raise TextError(
                f"{rows.place(index)}: the text is empty; give --empty zeros for a vector of zeros, "
                "or --empty skip to leave such rows out"
            )
        kept = rows.without_empty()
        empty += len(rows) - len(kept)
        count += len(kept) if options.empty == "skip" else len(rows)
        whole_numbers = whole_numbers and all(type(id_) is int and -(2**63) <= id_ < 2**63 for id_ in rows.ids)
        # With the lengths, no two tables give the same bytes.
        digest.update(json.dumps([rows.ids, [len(text) for text in rows.texts]]).encode())
        digest.update("".join(rows.texts).encode())
    if count == 0:
        raise DataError(f"{table.name} has no rows" + (" with a text" if empty else ""))
    return Survey(count, empty, "int" if whole_numbers else "text", digest.hexdigest())


def _lots(table: Table, options: StoreOptions) -> Iterator[Rows]:
    for rows in read_rows(table, max_rows=options.shard_rows):
        kept = rows.without_empty() if options.empty == "skip" else rows
        if len(kept):
            yield kept


def _ahead(items: Iterator[Item], pool: ThreadPoolExecutor) -> Iterator[Item]:
    """Yield ``items``, each fetched while the one before is in use."""
    coming = pool.submit(next, items, None)
    while (item := coming.result()) is not None:
        coming = pool.submit(next, items, None)
        yield item


def _encoded(encode: Callable[[list[str]], Encoded], rows: Rows) -> Encoded:
    try:
        encoded = encode(rows.texts)
    except TextError as error:
        raise rows.named(error) from error
    finite = np.isfinite(encoded.vectors).all(axis=1)
    if not finite.all():
        raise ModelError(
            f"{rows.place(int(finite.argmin()))}: the vector has values that are not finite; try --dtype float32"
        )
    return encoded
