"""Mine sentence pairs within documents, for a corpus of any size: sharded, resumable, byte-identical output.

Where one shard ends and the next begins depends on the documents alone, and a part depends on its shard and the
settings alone. So the output is the same to the byte for any number of processes and interruptions. In memory there
are a few shards of documents, never the corpus. Shards of lines or files are sent to other processes by their place;
a checksum detects a file that differs there.

At the end all pairs are sorted by a key, a hash of the seed and the pair's two texts. That shuffles them, and brings
equal pairs together, of which the earliest is kept. A corpus may be larger than the memory: its pairs are first
distributed over files by the beginning of their key, each small enough to sort in memory. (Databases that sort on the
disk need the memory for long texts that this saves.)
"""

import gc
import hashlib
import json
import re
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial, reduce
from io import BytesIO
from operator import add
from pathlib import Path
from typing import Any, BinaryIO
from zlib import crc32

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gerund.data.corpus import FORMATS as CORPUS_FORMATS
from gerund.data.corpus import BadDocument, Record, all_records, corpus_format, document_of, plain_lines
from gerund.data.files import as_utf8, batched_by_size, opened
from gerund.data.mining.candidates import (
    Mined,
    MiningConfig,
    Pair,
    Prepared,
    candidates_of,
    opening_of,
    pairs_of,
    prepare,
)
from gerund.data.mining.substrings import changes
from gerund.errors import ConfigError, DataError, FinishedError, InputError, OutputExistsError, ResourceError
from gerund.jobs.checkpoints import MAKING, PLACING, InputFiles, Manifest, WorkingFolder, resume_hint, working_folder
from gerund.jobs.engine import JobEngine, LocalEngine, map_by_place, runs_in_process
from gerund.jobs.files import (
    atomic_file,
    errors_file_of,
    make_folder,
    require_new_files,
    require_regular_file,
    write_json_lines,
)
from gerund.progress import counted, progress

# Documents of a shard at most, however small they are.
_MOST_DOCUMENTS = 20_000


@dataclass(frozen=True)
class Extent:
    """A byte range of a file with consecutive documents."""

    path: Path  # the file as it was named; messages and the output name it so
    place: Path  # its absolute path, for a process that works in another folder
    number: int  # line number of the first document, or 1
    unit: str  # as in ``Record``
    offset: int
    length: int

    def read(self) -> list[Record]:
        """Return the documents."""
        with opened(self.place) as file:
            file.seek(self.offset)
            content = file.read(self.length)
        if not self.unit:
            return [Record(self.path, self.number, "", content, self.offset)]
        return list(plain_lines(self.path, BytesIO(content), number=self.number, offset=self.offset))


@dataclass(frozen=True)
class Shard:
    """Some consecutive documents of a corpus."""

    index: int
    first: int  # number of its first document in the corpus
    size: int  # bytes of its documents
    records: list[Record]  # the documents; none in a process that got only their places, before ``loaded``
    extents: tuple[Extent, ...] = ()  # where they are; none if they are sent themselves
    checksum: int = 0  # of their bytes, if there are extents

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "records": [] if self.extents else self.records}

    def by_place(self) -> "Shard":
        """Return the same shard, sent to other processes without its documents if these are in plain files."""
        if self.extents or (extents := _extents(self.records)) is None:
            return self
        return replace(self, extents=extents, checksum=_checksum(self.records))

    def whole(self) -> "Shard":
        """Return the same shard, sent to other processes with its documents."""
        return replace(self, extents=(), checksum=0)

    def loaded(self) -> "Shard | None":
        """Return the shard with its documents; None if the files have others there, or aren't there."""
        if self.records or not self.extents:
            return self
        try:
            records = [record for extent in self.extents for record in extent.read()]
        except DataError:
            return None
        return replace(self, records=records) if _checksum(records) == self.checksum else None

    def digest(self) -> str:
        """Return a hash of the documents, and of the files that they come from."""
        digest = hashlib.blake2b(f"{self.first} {self.size}".encode(), digest_size=8)
        for record in self.records:
            content = record.content
            pieces = content if isinstance(content, tuple) else (content,)
            lengths = (len(piece) if isinstance(piece, bytes | str) else None for piece in pieces)
            head = [record.path.name, record.number, *lengths]
            digest.update(json.dumps(head).encode("utf-8", "surrogatepass"))
            for piece in pieces:
                digest.update(piece if isinstance(piece, bytes) else str(piece).encode("utf-8", "surrogatepass"))
        return digest.hexdigest()


def _checksum(records: Sequence[Record]) -> int:
    """Return a CRC of the bytes; four times as fast as reading them."""
    value = len(records)
    for record in records:
        if isinstance(record.content, bytes):
            value = crc32(record.content, value)
    return value


def _extents(records: Sequence[Record]) -> tuple[Extent, ...] | None:
    r"""Return where documents are, a run of lines at a time; None if one of them isn't in a plain file.

    >>> lines = [Record(Path("a.jsonl"), 1, "line", b"one\n", 0), Record(Path("a.jsonl"), 3, "line", b"three", 5)]
    >>> [(extent.number, extent.offset, extent.length) for extent in _extents(lines)]
    [(1, 0, 10)]
    """
    extents: list[Extent] = []
    for record in records:
        if record.offset is None or not isinstance(record.content, bytes):
            return None
        last = extents[-1] if extents else None
        if last is not None and last.path == record.path and record.unit:
            extents[-1] = replace(last, length=record.offset + len(record.content) - last.offset)
        else:
            place, length = record.path.absolute(), len(record.content)
            extents.append(Extent(record.path, place, record.number, record.unit, record.offset, length))
    return tuple(extents) or None


def shards_of(files: Sequence[Path], size: int, *, text_column: str, title_column: str) -> Iterator[Shard]:
    """Yield the shards of a corpus, each of about ``size`` bytes; files are read in order."""
    number = 0
    documents = all_records(files, text_column, title_column)
    for index, records in enumerate(batched_by_size(documents, _record_bytes, size, _MOST_DOCUMENTS)):
        yield Shard(index, number, sum(map(_record_bytes, records)), records)
        number += len(records)


def _record_bytes(record: Record) -> int:
    content = record.content
    if isinstance(content, bytes):
        return len(content)
    if isinstance(content, tuple):
        return sum(len(part.encode("utf-8", "replace")) for part in content if isinstance(part, str))
    return 0


# Characters that go through the search at a time: enough that what a call costs does not count, few enough for the
# processor's caches.
_BATCH_CHARACTERS = 2**18
_VISIBLE = re.compile(r"[^\s\x00-\x1f\x7f-\x9f]")
_FACTS = b"gerund"
ENDING = ".parquet"
# Readers of pairs know text_a and text_b; the keys order and tell apart, and are not written to the output.
COLUMNS = {
    "text_a": "string",
    "text_b": "string",
    "document": "int64",
    "file": "string",
    "line": "int64",
    "start_a": "int64",
    "end_a": "int64",
    "start_b": "int64",
    "end_b": "int64",
    "span": "string",
    "weight": "int64",
    "opening": "string",
}
KEYS = {"key_high": "uint64", "key_low": "uint64", "place": "int32"}


@dataclass(frozen=True)
class Work:
    """The work on every shard."""

    config: MiningConfig
    text_column: str
    title_column: str
    job: str  # a hash of everything that determines the parts
    folder: Path  # where parts are written

    def part(self, index: int) -> Path:
        """Return the path of a part."""
        return self.folder / f"part-{index:06d}{ENDING}"


@dataclass(frozen=True)
class Facts:
    """Counts of a part; see ``Mined``."""

    job: str
    shard: str = ""  # a hash of its documents
    documents: int = 0
    sentences: int = 0
    repeated: int = 0
    candidates: int = 0
    found: int = 0
    size: int = 0
    errors: tuple[BadDocument, ...] = ()

    def __add__(self, other: "Facts") -> "Facts":
        """Return the sums of both, the errors one after the other."""
        sums = {name: getattr(self, name) + getattr(other, name) for name in _SUMS}
        return replace(self, errors=self.errors + other.errors, **sums)


_SUMS = ("documents", "sentences", "repeated", "candidates", "found", "size")


def make_part(work: Work, shard: Shard) -> Facts | None:
    """Mine a shard into a part; returns its facts, or None if this process doesn't find the documents."""
    loaded = shard.loaded()
    if loaded is None:
        return None
    with _without_garbage_collection():
        errors: list[BadDocument] = []
        counts: Counter[str] = Counter(size=loaded.size)
        columns: dict[str, list[Any]] = {name: [] for name in (*COLUMNS, *KEYS)}
        documents = _prepared(loaded, work, errors)
        for batch in batched_by_size(documents, lambda item: len(item[1].text), _BATCH_CHARACTERS):
            mined = pairs_of([prepared for _, prepared in batch], work.config)
            for (record, prepared), pairs in zip(batch, mined, strict=True):
                counts["documents"] += 1
                counts["sentences"] += prepared.total
                counts["repeated"] += prepared.repeated
                counts["candidates"] += candidates_of(prepared, work.config)
                counts["found"] += len(pairs)
                _add(columns, record, prepared, pairs, work.config)
        facts = Facts(work.job, loaded.digest(), errors=tuple(errors), **counts)
        write_part(work.part(loaded.index), columns, facts)
    return facts


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Pause the search for reference cycles: a shard makes many small objects and no cycles among them."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def read_facts(path: Path) -> Facts | None:
    """Return the facts of a part; None if it isn't complete."""
    try:
        facts = json.loads((pq.read_schema(path).metadata or {})[_FACTS])
        return Facts(**{**facts, "errors": tuple(BadDocument(**error) for error in facts["errors"])})
    except (OSError, KeyError, ValueError, TypeError, pa.ArrowException):
        return None


def _prepared(shard: Shard, work: Work, errors: list[BadDocument]) -> Iterator[tuple[Record, Prepared]]:
    """Yield the documents cut into sentences; those that can't be used are added to ``errors``."""
    for number, record in enumerate(shard.records, start=shard.first):
        try:
            document = document_of(record, text_column=work.text_column, title_column=work.title_column)
            if not _VISIBLE.search(document.text):
                what = "has nothing but control characters" if document.text.strip() else "is empty"
                raise DataError(f"{record.place}: the text {what}")
        except DataError as error:
            errors.append(BadDocument.of(record, error))
        else:
            yield record, prepare(document, number, work.config)


def _add(
    columns: dict[str, list[Any]], record: Record, document: Prepared, pairs: Sequence[Pair], config: MiningConfig
) -> None:
    name = as_utf8(record.path.name)
    opening = opening_of(document, config) if pairs else None
    for place, (a, b, span, weight) in enumerate(pairs):
        high, low = _pair_key(a.form, b.form, config.seed)
        row = (a.text, b.text, document.number, name, record.number, a.start, a.end, b.start, b.end)
        for column, value in zip(columns.values(), (*row, span, weight, opening, high, low, place), strict=True):
            column.append(value)
        opening = None  # once per document


def _pair_key(a: str, b: str, seed: int) -> tuple[int, int]:
    """Return a hash that identifies an unordered pair of texts and sorts pairs into a random order.

    >>> _pair_key("one", "two", 0) == _pair_key("two", "one", 0) != _pair_key("one", "two", 1)
    True
    """
    a, b = sorted((a, b))
    digest = hashlib.blake2b(f"{seed} {len(a)} {a}{b}".encode("utf-8", "surrogatepass"), digest_size=16).digest()
    return int.from_bytes(digest[:8], "big"), int.from_bytes(digest[8:], "big")


def schema(names: dict[str, str]) -> Any:
    """Return a pyarrow schema."""
    return pa.schema([(name, pa.type_for_alias(kind)) for name, kind in names.items()])


def write_part(path: Path, columns: dict[str, list[Any]], facts: Facts) -> None:
    """Write pairs and facts as a part, atomically."""
    metadata = {_FACTS: json.dumps(asdict(facts))}
    table = pa.table(columns, schema=schema({**COLUMNS, **KEYS}).with_metadata(metadata))
    with atomic_file(path, apart=True) as file:
        # Parts are read once and deleted: fast rather than small.
        pq.write_table(table, file, compression="lz4")


OUTPUT_FORMATS = (".parquet", ".jsonl")
# Bytes of pairs that are sorted at a time, and at most so many files of them, as systems limit the open ones.
_BUCKET = 64 * 2**20
_MOST_BUCKETS_BITS = 8
# Rows of a group of the output.
_ROWS = 2**13


def gather(parts: Sequence[Path], target: Path, spill: Path) -> int:
    """Write the pairs of all parts into one file (see ``OUTPUT_FORMATS``), each once; returns how many.

    ``spill`` is a folder for intermediate files; it is made, and removed again.
    """
    write = _write_parquet if target.name.endswith(".parquet") else _write_jsonl
    make_folder(spill)
    try:
        buckets = _distribute(parts, spill)
        with atomic_file(target) as file:
            return write(file, (piece for bucket in buckets for piece in _sorted(bucket)))
    except (pa.ArrowException, OSError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise ResourceError(f"the pairs could not be sorted: {reason}") from error
    finally:
        shutil.rmtree(spill, ignore_errors=True)


def _distribute(parts: Sequence[Path], spill: Path) -> list[Path]:
    """Distribute the pairs over files by key; every key of a file is smaller than those of the next."""
    bits = min((sum(map(_table_bytes, parts)) // _BUCKET).bit_length(), _MOST_BUCKETS_BITS)
    buckets = [spill / f"bucket-{number:03}.arrow" for number in range(1 << bits)]
    with ExitStack() as stack:
        writers: dict[int, Any] = {}
        for part in parts:
            # Without the facts, which belong to this part only.
            table = pq.read_table(part).replace_schema_metadata(None)
            if not len(table):
                continue
            high = table.column("key_high").to_numpy()
            bucket = (high >> np.uint64(64 - bits)).astype(np.int64) if bits else np.zeros(len(high), np.int64)
            order = np.argsort(bucket, kind="stable")
            numbers, starts = np.unique(bucket[order], return_index=True)
            table = table.take(order)
            for number, start, end in zip(numbers.tolist(), starts, [*starts[1:], len(bucket)], strict=True):
                if number not in writers:
                    file = stack.enter_context(pa.OSFile(str(buckets[number]), "wb"))
                    writers[number] = stack.enter_context(pa.ipc.new_stream(file, table.schema))
                writers[number].write_table(table.slice(start, end - start))
    return [buckets[number] for number in sorted(writers)]


def _table_bytes(part: Path) -> int:
    """Return the size of a part's pairs in memory, in bytes."""
    facts = pq.read_metadata(part)
    return sum(facts.row_group(number).total_byte_size for number in range(facts.num_row_groups))


def _sorted(bucket: Path) -> Iterator[Any]:
    """Yield the pairs of a file sorted by key, of equal pairs the earliest, as tables of some rows."""
    with pa.OSFile(str(bucket), "rb") as file, pa.ipc.open_stream(file) as stream:
        table = stream.read_all()
    bucket.unlink()
    low, high, document, place = (
        table.column(name).to_numpy() for name in ("key_low", "key_high", "document", "place")
    )
    order = np.lexsort((place, document, low, high))
    order = order[changes(high[order]) | changes(low[order])]
    table = table.select(list(COLUMNS))
    for start in range(0, len(order), _ROWS):
        yield table.take(order[start : start + _ROWS])


def _write_parquet(file: BinaryIO, tables: Iterator[Any]) -> int:
    count = 0
    with pq.ParquetWriter(file, schema(COLUMNS), compression="zstd") as writer:
        for table in tables:
            writer.write_table(table)
            count += table.num_rows
    return count


def _write_jsonl(file: BinaryIO, tables: Iterator[Any]) -> int:
    count = 0
    for table in tables:
        for row in table.to_pylist():
            file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
        count += table.num_rows
    return count


_ERRORS_SHOWN = 5


def mine(
    files: Sequence[Path],
    output: Path,
    config: MiningConfig | None = None,
    *,
    text_column: str = "text",
    title_column: str = "title",
    workers: int | None = None,
    engine: JobEngine | None = None,
    resume: bool = False,
    force: bool = False,
    show: bool | None = None,
) -> Mined:
    """Write the pairs of a corpus to a file, each once and shuffled.

    Processes are spawned, not forked: a script that calls this with more than one needs the usual
    ``if __name__ == "__main__":``.

    Args:
        files: the documents, in the formats of ``gerund.data.corpus``.
        output: a .parquet or .jsonl file; its columns are ``gerund.data.mining.job.COLUMNS``.
        config: what to mine.
        text_column: the column or field with the text.
        title_column: the column or field with the title; it may be absent.
        workers: processes; None for one per core. The output does not depend on it.
        engine: where else to work, instead of ``workers``; the output does not depend on it either.
        resume: continue an interrupted run with the same configuration and files.
        force: replace an existing output, and discard unfinished work that doesn't match.
        show: whether to show progress; None only on a terminal.

    Returns:
        Counts, and the first documents that could not be used; all of them are listed in ``OUT.errors.jsonl``.

    Raises:
        DataError: there is no usable document, or no pair; or a file has changed while it was read.
        ConfigError: for the configuration, or the name of the output.
        FinishedError: with ``resume``, if the output is finished already.
        OutputExistsError: there is an output already, or an interrupted run's work.
        InputError: unfinished work has another configuration or other files; another process writes the same output;
            the output is a symbolic link.
        ResourceError: memory or disk ran out; finished parts are kept.
        KeyboardInterrupt: with a note that says what is kept.
    """
    config = config or MiningConfig()
    engine = engine or LocalEngine(workers)
    errors_file = _check_places(files, output)
    with working_folder(output, ENDING) as folder:
        # A run that was killed between its last steps has put its output in place already.
        placed = resume and folder.placing()
        if resume and not force and not placed and output.is_file() and not folder.begun():
            raise FinishedError(f"{output} is finished already, and nothing is left to resume; --force makes it again")
        if not force and not placed:
            require_new_files(output, errors_file)
        inputs = InputFiles(files)
        columns = {"text_column": text_column, "title_column": title_column}
        manifest = Manifest("mine", {**asdict(config), **columns}, inputs.digest, "the files of the corpus")
        work = Work(config, text_column, title_column, manifest.key, folder.path.absolute())
        job = _Job(inputs, output, errors_file, folder, engine, work, manifest, show)
        return job.run(resume=resume, force=force, placed=placed)


@dataclass
class _Job:
    """A corpus on its way into an output, which is locked."""

    inputs: InputFiles
    output: Path
    errors_file: Path
    folder: WorkingFolder
    engine: JobEngine
    work: Work
    manifest: Manifest
    show: bool | None
    parts: dict[int, Facts] = field(default_factory=dict)

    def run(self, *, resume: bool, force: bool, placed: bool) -> Mined:
        """Make the missing parts, and put the output in its place."""
        begin = time.perf_counter()
        self._adopt(resume=resume, force=force)
        earlier = dict(self.parts)
        with resume_hint(self._how_to_go_on):
            self._make_parts()
            facts = self._total()
            pairs = self._place(facts, replace_it=force or placed)
        self.folder.remove()
        seconds = time.perf_counter() - begin
        # Parts are made again where their documents are no longer the same.
        resumed = [index for index, part in self.parts.items() if earlier.get(index) is part]
        new_bytes = sum(part.size for index, part in self.parts.items() if index not in resumed)
        return Mined(
            output=self.output,
            **{name: getattr(facts, name) for name in ("documents", "sentences", "repeated", "candidates", "found")},
            duplicates=facts.found - pairs,
            pairs=pairs,
            errors=len(facts.errors),
            first_errors=facts.errors[:_ERRORS_SHOWN],
            errors_file=self.errors_file if facts.errors else None,
            megabytes=round(facts.size / 1e6, 3),
            seconds=round(seconds, 3),
            resumed_parts=len(resumed),
            megabytes_per_second=round(new_bytes / 1e6 / seconds, 3),
        )

    def _how_to_go_on(self) -> str:
        if not self.folder.begun():
            return ""
        return f"finished parts are kept in {self.folder.path}: give --resume to go on from there"

    def _adopt(self, *, resume: bool, force: bool) -> None:
        """Take over the finished parts of an earlier run."""
        if not force:
            self.folder.require_known_version()
        earlier = self.folder.manifest()
        if earlier is not None and self.folder.begun():
            changed = self.manifest.difference(earlier)
            if resume and not changed:
                for index, path in self.folder.parts().items():
                    facts = read_facts(path)
                    if facts is not None and facts.job == self.work.job:
                        self.parts[index] = facts
                return
            if not force:
                if changed:
                    what = f"unfinished work that does not match: {changed}; go on as before"
                else:
                    what = "unfinished work; give --resume to continue it"
                raise (InputError if changed else OutputExistsError)(
                    f"{self.folder.path} has {what}, or --force to start from scratch"
                )
        self.folder.clear()
        self.folder.write_manifest(self.manifest, MAKING)

    def _make_parts(self) -> None:
        """Work through every shard that has no part yet."""
        adopted, self.parts = self.parts, {}
        spread = not runs_in_process(self.engine)
        with progress(None, "mining", show=self.show) as advance:

            def missing() -> Iterator[Shard]:
                columns = {"text_column": self.work.text_column, "title_column": self.work.title_column}
                for shard in shards_of(self.inputs.files, self.work.config.part_size, **columns):
                    facts = adopted.get(shard.index)
                    if facts is None or facts.shard != shard.digest():
                        yield shard.by_place() if spread else shard
                    else:
                        self.parts[shard.index] = facts
                        advance(len(shard.records))

            with self.engine.pool(partial(make_part, self.work), folder=self.folder.path) as pool:
                for shard, facts in map_by_place(pool, missing()):
                    self.parts[shard.index] = facts
                    advance(len(shard.records))
        if self.inputs.changed():
            self.folder.clear()
            raise DataError("the files of the corpus have changed while they were read; run the same command again")

    def _total(self) -> Facts:
        """Return the sum of all parts; raises ``DataError`` if there is no pair."""
        facts = reduce(add, (self.parts[index] for index in sorted(self.parts)), Facts(self.work.job))
        if facts.found:
            return facts
        self.folder.clear()
        bad = ""
        if facts.errors:
            bad = f"; {counted(len(facts.errors), 'document')} could not be used, the first: {facts.errors[0]}"
        if not facts.documents:
            raise DataError(f"there is no document to mine{bad}")
        raise DataError(f"no two sentences of {counted(facts.documents, 'document')} are a pair by these settings{bad}")

    def _place(self, facts: Facts, *, replace_it: bool) -> int:
        """Gather the parts and put the output in its place."""
        parts = [self.folder.part(index) for index in sorted(self.parts)]
        with progress(None, "sorting", show=self.show):
            pairs = gather(parts, self.folder.joined(self.output.name), self.folder.spill())
        if not replace_it:
            require_new_files(self.output, self.errors_file)
        self.folder.write_manifest(self.manifest, PLACING)
        if facts.errors:
            write_json_lines(self.errors_file, map(asdict, facts.errors))
        else:
            self.errors_file.unlink(missing_ok=True)
        self.folder.put([self.output])
        return pairs


def _check_places(files: Sequence[Path], output: Path) -> Path:
    """Check what can be checked before anything is read; returns the errors file."""
    ending = output.suffix
    if ending not in OUTPUT_FORMATS:
        raise ConfigError(f"{output}: pairs are written to a file that ends in {' or '.join(OUTPUT_FORMATS)}")
    if output.is_dir():
        raise InputError(f"{output} is a folder; choose another output")
    errors_file = errors_file_of(output)
    require_regular_file(output)
    require_regular_file(errors_file)
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
