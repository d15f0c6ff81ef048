"""Works through a shard of documents and keeps their pairs as a part, a file that is whole or absent.

This is what runs in the processes of a job. What it makes depends on the shard and the configuration alone.

Knows: records, pairs, the columns of a part. Does not know: processes, which parts there are.
"""

import gc
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from gerund.data.corpus import BadDocument, Document, Record, document_of
from gerund.data.files import as_utf8
from gerund.data.mining.candidates import Pair, Prepared, candidates_of, opening_of, pairs_of, prepare
from gerund.data.mining.config import MiningConfig
from gerund.data.mining.shards import Shard
from gerund.errors import DataError
from gerund.jobs.files import whole_file

# Characters that go through the search at a time: enough that what a call costs does not count, few enough for the
# processor's caches.
_PASS = 2**18
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
    """What is done with every shard."""

    config: MiningConfig
    text_column: str
    title_column: str
    job: str
    """A hash of all that determines the parts."""
    folder: Path
    """Where parts are written."""

    def part(self, index: int) -> Path:
        """Return the place of a part."""
        return self.folder / f"part-{index:06d}{ENDING}"


@dataclass(frozen=True)
class Facts:
    """What a part says of itself; see ``Mined``."""

    job: str
    shard: str = ""
    """A hash of the documents that it was made from."""
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
    """Mine the documents of a shard, and write their pairs and what there is to say about it.

    Returns:
        What the part says of itself; None, and no part, where this process does not find the documents by their places.

    Raises:
        ResourceError: the disk is full.
    """
    loaded = shard.loaded()
    if loaded is None:
        return None
    with _uncollected():
        return _made(work, loaded)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Do without the search for reference cycles: a shard makes many small objects and no cycles among them."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _made(work: Work, shard: Shard) -> Facts:
    errors: list[BadDocument] = []
    counts: Counter[str] = Counter(size=shard.size)
    columns: dict[str, list[Any]] = {name: [] for name in (*COLUMNS, *KEYS)}
    for batch in _batches(_prepared(shard, work, errors)):
        found = pairs_of([prepared for _, prepared in batch], work.config)
        for (record, prepared), pairs in zip(batch, found, strict=True):
            counts["documents"] += 1
            counts["sentences"] += prepared.total
            counts["repeated"] += prepared.repeated
            counts["candidates"] += candidates_of(prepared, work.config)
            counts["found"] += len(pairs)
            _add(columns, record, prepared, pairs, work.config)
    facts = Facts(work.job, shard.digest(), errors=tuple(errors), **counts)
    _write(work.part(shard.index), columns, facts)
    return facts


def read_facts(path: Path) -> Facts | None:
    """Return what a part says of itself; None where there is no whole part."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        told = json.loads((pq.read_schema(path).metadata or {})[_FACTS])
        return Facts(**{**told, "errors": tuple(BadDocument(**error) for error in told["errors"])})
    except (OSError, KeyError, ValueError, TypeError, pa.ArrowException):
        return None


def _prepared(shard: Shard, work: Work, errors: list[BadDocument]) -> Iterator[tuple[Record, Prepared]]:
    """Yield the documents cut into sentences; those that cannot be used become errors."""
    for number, record in enumerate(shard.records, start=shard.first):
        try:
            document = document_of(record, text_column=work.text_column, title_column=work.title_column)
            _check(document, record)
        except DataError as error:
            errors.append(BadDocument.of(record, error))
        else:
            yield record, prepare(document, number, work.config)


def _check(document: Document, record: Record) -> None:
    if not _VISIBLE.search(document.text):
        what = "has nothing but control characters" if document.text.strip() else "is empty"
        raise DataError(f"{record.place}: the text {what}")


def _batches(prepared: Iterator[tuple[Record, Prepared]]) -> Iterator[list[tuple[Record, Prepared]]]:
    batch: list[tuple[Record, Prepared]] = []
    size = 0
    for record, one in prepared:
        batch.append((record, one))
        size += len(one.text)
        if size >= _PASS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _add(
    columns: dict[str, list[Any]], record: Record, document: Prepared, pairs: Sequence[Pair], config: MiningConfig
) -> None:
    name = as_utf8(record.path.name)
    opening = opening_of(document, config) if pairs else None
    for place, (a, b, span, weight) in enumerate(pairs):
        high, low = pair_key(a.form, b.form, config.seed)
        row = (a.text, b.text, document.number, name, record.number, a.start, a.end, b.start, b.end)
        for column, value in zip(columns.values(), (*row, span, weight, opening, high, low, place), strict=True):
            column.append(value)
        opening = None  # once a document


def pair_key(a: str, b: str, seed: int) -> tuple[int, int]:
    """Return what tells an unordered pair of texts from others and puts the pairs of a corpus into a random order.

    >>> pair_key("one", "two", 0) == pair_key("two", "one", 0) != pair_key("one", "two", 1)
    True
    """
    a, b = sorted((a, b))
    digest = hashlib.blake2b(f"{seed} {len(a)} {a}{b}".encode("utf-8", "surrogatepass"), digest_size=16).digest()
    return int.from_bytes(digest[:8], "big"), int.from_bytes(digest[8:], "big")


def schema(names: dict[str, str]) -> Any:
    """Return some columns as pyarrow wants them."""
    import pyarrow as pa

    return pa.schema([(name, pa.type_for_alias(kind)) for name, kind in names.items()])


def _write(path: Path, columns: dict[str, list[Any]], facts: Facts) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    told = json.dumps(asdict(facts), ensure_ascii=True)
    table = pa.table(columns, schema=schema({**COLUMNS, **KEYS}).with_metadata({_FACTS: told}))
    with whole_file(path, apart=True) as file:
        # Parts are read once and thrown away: quick rather than small.
        pq.write_table(table, file, compression="lz4")
