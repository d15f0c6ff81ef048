"""Embeds a table of any size into a file, part by part, so that an interrupted job goes on where it was.

First the whole table is read once: what is wrong with it shows before hours of work, and its rows are counted and
hashed, shard by shard. Then shard after shard is encoded and kept as a finished part in ``OUT.parts``; while one is
encoded the next is read, the last is written, and every few seconds the rows of finished batches are kept. At the end
the parts are joined. Shards depend on the table alone, and each is compared with its hash; batches depend on the shard
alone, whichever of them are done already. So a resumed job gives the very bytes that an uninterrupted one gives, or an
error.

Knows: tables, parts, resuming. Does not know: models: whoever calls brings a function from texts to vectors.
"""

import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from gerund.checks import open_input
from gerund.data.embedding.config import EmbeddingConfig, EmbeddingSummary
from gerund.data.embedding.files import (
    FORMAT,
    join_npy,
    join_parquet,
    output_files,
    read_facts,
)
from gerund.data.embedding.shards import Elsewhere, Encode, Finished, Shard, ShardWork, encoded_rows
from gerund.data.embedding.survey import Source, Survey, digest_of, survey_of
from gerund.data.files import COMPRESSED
from gerund.data.table import Table
from gerund.data.tables import BadRow, Rows
from gerund.errors import DataError, FingerprintError, InputError
from gerund.jobs.engine import mapped_by_place
from gerund.jobs.files import errors_file_of, refuse_existing, refuse_special, whole_file, write_json_lines
from gerund.jobs.manifest import FINGERPRINT, Manifest
from gerund.jobs.unfinished import Unfinished, rows_kept
from gerund.jobs.working_folder import MAKING, PLACING, WorkingFolder, kept_work_told, working_folder
from gerund.progress import progress

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
        refuse_special(file)
    with working_folder(output) as folder:
        if not config.force and not folder.placing():
            refuse_existing(*files, *([errors_file] if config.bad_rows == "skip" else []))
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
    _begun: dict[int, Unfinished] = field(default_factory=dict)
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
        with kept_work_told(self.how_to_go_on):
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
            self.folder.demand_known()
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
                kept = partial(rows_kept, place, rows, len(shard.rows), elsewhere.passes)
                self._resumed += kept()
                self._given[shard.index] = kept
                yield shard

        engine = elsewhere.engine
        with (
            progress(self.survey.rows, "embedding", show=show_progress) as advance,
            engine.pool(work.elsewhere(elsewhere), folder=work.folder) as pool,
        ):
            for shard, facts in mapped_by_place(pool, giving()):
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
            self._begun[shard.index].forget()

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
            refuse_existing(*self.files, *errors_file)
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
    with whole_file(spool) as file:
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
