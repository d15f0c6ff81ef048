"""Mines a corpus of any size: in several processes, part by part, so that an interrupted run goes on where it was.

Where one part ends and the next begins depends on the documents alone, so the output is the same to the byte, however
many processes work on it and however often they were interrupted. In memory there are a few lots of documents, never
the corpus.

Knows: files, processes, parts, resuming. Does not know: how pairs are found.
"""

import hashlib
import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

from gerund.data.corpus import FORMATS as CORPUS_FORMATS
from gerund.data.corpus import Record, corpus_format, read_records
from gerund.data.files import flush_names, make_folder, whole_file
from gerund.data.mining.gathering import FORMATS, gather
from gerund.data.mining.parts import Facts, Lot, Work, make_part, read_facts
from gerund.data.mining.settings import BadDocument, Mined, MiningSettings
from gerund.data.working_folder import MINING, PLACING, WorkingFolder, working_folder
from gerund.errors import ConfigError, DataError, InputError, OutputExistsError, ResourceError
from gerund.progress import progress

# Documents of a lot at most, however small they are.
_MOST_DOCUMENTS = 20_000
_ERRORS_SHOWN = 5


def mine(
    files: Sequence[Path],
    output: Path,
    settings: MiningSettings | None = None,
    *,
    text_column: str = "text",
    title_column: str = "title",
    workers: int | None = None,
    resume: bool = False,
    force: bool = False,
    show: bool | None = None,
) -> Mined:
    """Write the pairs of a corpus to a file, each once and shuffled.

    Processes are started anew, not forked: a script that calls this with more than one needs the usual
    ``if __name__ == "__main__":``.

    Args:
        files: the documents, in the formats of ``gerund.data.corpus``.
        output: a .parquet or .jsonl file; see ``gerund.data.mining.parts.COLUMNS`` for what is in it.
        settings: what is mined.
        text_column: column or field that holds the text.
        title_column: the one that holds the title; it may be absent.
        workers: processes; None for one a core. The output does not depend on it.
        resume: go on with what an interrupted run has left, made by the same settings from the same files.
        force: replace the output if there is one, and throw away what does not fit.
        show: whether to show progress; None only on a terminal.

    Returns:
        What came of it. Documents that could not be used are in there, and all of them in ``OUT.errors.jsonl``.

    Raises:
        DataError: there is no document, or none that can be used, or no pair in any of them.
        ConfigError: settings, or the name of the output.
        OutputExistsError: there is an output already, or what an interrupted run has left.
        InputError: what is left is of other settings or files; another process writes the same output.
        ResourceError: memory or disk ran out; finished parts are kept.
    """
    settings = settings or MiningSettings()
    if workers is not None and workers < 1:
        raise ConfigError(f"workers={workers} leaves nobody to work")
    errors_file = _check_places(files, output)
    with working_folder(output, ".parquet") as folder:
        # A run that was killed between its last steps has put its output in place already.
        placed = resume and (folder.manifest() or {}).get("stage") == PLACING
        if not force and not placed:
            _refuse_existing(output, errors_file)
        job = _Job(files, output, errors_file, settings, folder, workers or cores(), show)
        work = Work(settings, text_column, title_column, "")
        return job.run(work, resume=resume, force=force, placed=placed)


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Job:
    """One corpus on its way into one output, with the lock held."""

    def __init__(
        self,
        files: Sequence[Path],
        output: Path,
        errors_file: Path,
        settings: MiningSettings,
        folder: WorkingFolder,
        workers: int,
        show: bool | None,
    ) -> None:
        self.files, self.output, self.errors_file, self.settings = files, output, errors_file, settings
        self.folder, self.workers, self.show = folder, workers, show
        self.parts: dict[int, Facts] = {}

    def run(self, work: Work, *, resume: bool, force: bool, placed: bool) -> Mined:
        """Make what is not there yet, and put the output in its place."""
        begin = time.perf_counter()
        manifest = self._manifest(work)
        work = replace(work, job=_digest_of(manifest))
        self._adopt(manifest, work.job, resume=resume, force=force)
        resumed = set(self.parts)
        try:
            self._make_parts(work)
            facts = self._total(work.job)
            pairs = self._place(manifest, facts, replace_it=force or placed)
        except (KeyboardInterrupt, ResourceError) as error:
            if not self.folder.begun():
                raise
            told = f"finished parts are kept in {self.folder.path}: give --resume to go on from there"
            if isinstance(error, ResourceError):
                raise ResourceError(f"{error}; {told}") from error
            error.add_note(told)
            raise
        self.folder.remove()
        seconds = time.perf_counter() - begin
        mine = sum(part.size for index, part in self.parts.items() if index not in resumed)
        return Mined(
            output=self.output,
            documents=facts.documents,
            sentences=facts.sentences,
            repeated=facts.repeated,
            candidates=facts.candidates,
            found=facts.found,
            duplicates=facts.found - pairs,
            pairs=pairs,
            errors=len(facts.errors),
            first_errors=facts.errors[:_ERRORS_SHOWN],
            errors_file=self.errors_file if facts.errors else None,
            megabytes=round(facts.size / 1e6, 3),
            seconds=round(seconds, 3),
            resumed_parts=len(resumed),
            megabytes_per_second=round(mine / 1e6 / seconds, 3),
        )

    def _manifest(self, work: Work) -> dict[str, Any]:
        columns = {"text_column": work.text_column, "title_column": work.title_column}
        files = [[path.name, _digest_of_file(path)] for path in self.files]
        manifest = {"settings": {**asdict(self.settings), **columns}, "files": files}
        plain: dict[str, Any] = json.loads(json.dumps(manifest))
        return plain

    def _adopt(self, manifest: dict[str, Any], job: str, *, resume: bool, force: bool) -> None:
        """Take over the finished parts of an earlier run."""
        earlier = self.folder.manifest()
        if earlier is not None and self.folder.begun():
            changed = _changed(earlier, manifest)
            if resume and not changed:
                found = ((index, read_facts(self.folder.part(index))) for index in _indices(self.folder))
                self.parts = {index: facts for index, facts in found if facts is not None and facts.job == job}
                return
            if not force:
                what = f"does not fit: {changed}" if changed else "is unfinished"
                way = "go on as before" if changed else "give --resume to go on with it"
                raise (InputError if changed else OutputExistsError)(
                    f"what {self.folder.path} holds {what}; {way}, or --force to begin anew"
                )
        self.folder.clear()
        self.folder.write_manifest({**manifest, "stage": MINING})

    def _make_parts(self, work: Work) -> None:
        """Work through every lot that has no part yet, in as many processes as are wanted and needed."""
        lots = _lots(self.files, work)
        with progress(None, "mining", show=self.show) as advance, ExitStack() as stack:
            first = list(_some(lots, 2))
            if self.workers == 1 or len(first) < 2:
                for lot in _chained(first, lots):
                    if lot.index not in self.parts:
                        self.parts[lot.index] = make_part(lot, work, self.folder.part(lot.index))
                    advance(len(lot.records))
                return
            pool = ProcessPoolExecutor(self.workers, multiprocessing.get_context("spawn"), initializer=_begin_worker)
            stack.callback(pool.shutdown, cancel_futures=True)
            running: dict[Future[Facts], Lot] = {}
            for lot in _chained(first, lots):
                if lot.index in self.parts:
                    advance(len(lot.records))
                    continue
                # Reading is quicker than mining: without a limit the corpus would wait in memory.
                if len(running) > self.workers:
                    self._collect(running, advance, FIRST_COMPLETED)
                running[pool.submit(make_part, lot, work, self.folder.part(lot.index))] = lot
            while running:
                self._collect(running, advance, FIRST_COMPLETED)

    def _collect(self, running: dict[Future[Facts], Lot], advance: Any, when: str) -> None:
        done, _ = wait(running, return_when=when)
        for future in done:
            lot = running.pop(future)
            try:
                self.parts[lot.index] = future.result()
            except BrokenProcessPool as error:
                raise ResourceError("a process was ended from outside, perhaps because memory ran out") from error
            advance(len(lot.records))

    def _total(self, job: str) -> Facts:
        """Return the sum of all parts, after checking that there is something to write."""
        facts = reduce(add, (self.parts[index] for index in sorted(self.parts)), Facts(job))
        if facts.found:
            return facts
        self.folder.clear()
        bad = f"; {_how_many(len(facts.errors), 'document')} could not be used, the first: " if facts.errors else ""
        first = facts.errors[0] if facts.errors else None
        told = f"{bad}{first.file}{f', line {first.line}' if first.line else ''}: {first.reason}" if first else ""
        if not facts.documents:
            raise DataError(f"there is no document to mine{told}")
        raise DataError(
            f"no two sentences of {_how_many(facts.documents, 'document')} are a pair by these settings{told}"
        )

    def _place(self, manifest: dict[str, Any], facts: Facts, *, replace_it: bool) -> int:
        """Gather the parts and put the output in its place."""
        joined = self.folder.joined(self.output.name)
        parts = [self.folder.part(index) for index in sorted(self.parts)]
        with progress(None, "sorting", show=self.show):
            pairs = gather(parts, joined, self.folder.spill())
        if not replace_it:
            _refuse_existing(self.output, self.errors_file)
        self.folder.write_manifest({**manifest, "stage": PLACING})
        if facts.errors:
            _write_errors(self.errors_file, facts.errors)
        else:
            self.errors_file.unlink(missing_ok=True)
        try:
            joined.replace(self.output)
        except OSError as error:
            raise ResourceError(f"{self.output} was not written: {error.strerror or error}") from error
        flush_names(self.output.parent)
        return pairs


def _check_places(files: Sequence[Path], output: Path) -> Path:
    """Return where errors are listed, after checking all that can be checked before anything is read."""
    ending = output.suffix
    if ending not in FORMATS:
        raise ConfigError(f"{output}: pairs are written to a file that ends in {' or '.join(FORMATS)}")
    if output.is_dir():
        raise InputError(f"{output} is a folder; choose another output")
    errors_file = output.with_name(f"{output.name.removesuffix(ending)}.errors.jsonl")
    if not files:
        raise DataError(f"there is no file to mine; endings are {', '.join(CORPUS_FORMATS)}")
    for path in files:
        corpus_format(path)
        if not path.is_file():
            raise DataError(f"{path}: no such file")
        for target in (output, errors_file):
            if target.exists() and target.samefile(path):
                raise InputError(f"{target} is a file of the corpus; choose another output")
    make_folder(output.absolute().parent)
    return errors_file


def _refuse_existing(*targets: Path) -> None:
    for target in targets:
        if target.exists():
            raise OutputExistsError(f"{target} exists already; choose another name or give --force to replace it")


def _lots(files: Sequence[Path], work: Work) -> Iterator[Lot]:
    """Cut a corpus into lots; where depends on the documents alone."""
    index = number = size = 0
    records: list[Record] = []
    for record in _records(files, work):
        records.append(record)
        size += _size(record)
        if size >= work.settings.part_size or len(records) == _MOST_DOCUMENTS:
            yield Lot(index, number, size, records)
            index, number, size, records = index + 1, number + len(records), 0, []
    if records:
        yield Lot(index, number, size, records)


def _records(files: Sequence[Path], work: Work) -> Iterator[Record]:
    for path in files:
        number = 0
        try:
            for record in read_records(path, text_column=work.text_column, title_column=work.title_column):
                number = record.number
                yield record
        except DataError as error:
            # An archive that is cut off, a table without the column: an error among others, and on with the next file.
            yield Record(path, number + 1, "", error)


def _size(record: Record) -> int:
    content = record.content
    if isinstance(content, bytes):
        return len(content)
    if isinstance(content, tuple):
        return sum(len(part.encode("utf-8", "replace")) for part in content if isinstance(part, str))
    return 0


def _some(lots: Iterator[Lot], count: int) -> Iterator[Lot]:
    for _, lot in zip(range(count), lots, strict=False):
        yield lot


def _chained(first: list[Lot], rest: Iterator[Lot]) -> Iterator[Lot]:
    while first:
        yield first.pop(0)
    yield from rest


def _indices(folder: WorkingFolder) -> list[int]:
    return sorted(int(path.name[len("part-") : -len(folder.ending)]) for path in folder.path.glob("part-*.parquet"))


def _begin_worker() -> None:
    """Leave interruptions to the parent, and do not outlive it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _write_errors(path: Path, errors: Sequence[BadDocument]) -> None:
    with whole_file(path) as file:
        for error in errors:
            file.write(json.dumps(asdict(error), ensure_ascii=False).encode("utf-8", "replace") + b"\n")


def _changed(earlier: dict[str, Any], now: dict[str, Any]) -> str:
    """Return in words what differs between two manifests; "" when they fit."""
    old, new = earlier.get("settings", {}), now["settings"]
    told = [f"{name} was {old.get(name)!r} and is {new[name]!r}" for name in new if old.get(name) != new[name]]
    if earlier.get("files") != now["files"]:
        told.append("the files of the corpus have changed")
    return ", ".join(told)


def _digest_of(manifest: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(manifest, sort_keys=True).encode(), digest_size=8).hexdigest()


def _digest_of_file(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error


def _how_many(count: int, what: str) -> str:
    """Say a number of things.

    >>> _how_many(1, "document"), _how_many(2000, "document")
    ('1 document', '2,000 documents')
    """
    return f"{count:,} {what}{'' if count == 1 else 's'}"
