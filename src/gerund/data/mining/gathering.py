"""From the parts of a job to one file of pairs: each pair once, in an order that is random and always the same.

All pairs are sorted by a key that is a hash of the seed and the pair's two texts. That shuffles them, and it brings
equal pairs together, of which the earliest is kept. A corpus may be larger than the memory: its pairs are first
distributed over files by the beginning of their key, as many files as it takes for one of them to fit easily; one
after the other is then sorted. (Databases that sort on the disk were tried: they need the memory for long texts that
they save here.)

Knows: the columns of parts, the disk. Does not know: texts, methods, resuming.
"""

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from gerund.data.mining.parts import COLUMNS, schema
from gerund.errors import ResourceError
from gerund.jobs.files import make_folder, whole_file

FORMATS = (".parquet", ".jsonl")
# Bytes of pairs that are sorted at a time, and at most so many files of them, as systems limit the open ones.
_BUCKET = 64 * 2**20
_MOST_BUCKETS_BITS = 8
# Rows of a group of the output.
_ROWS = 2**13


def gather(parts: Sequence[Path], target: Path, spill: Path) -> int:
    """Write the pairs of all parts into one file.

    Args:
        parts: the parts.
        target: a file whose ending is one of ``FORMATS``.
        spill: a folder for pairs on their way; it is made, and removed again.

    Returns:
        How many pairs there are.

    Raises:
        ResourceError: the disk is full.
    """
    import pyarrow as pa

    write = _write_parquet if target.name.endswith(".parquet") else _write_jsonl
    make_folder(spill)
    try:
        buckets = _distribute(parts, spill)
        with whole_file(target) as file:
            return write(file, (piece for bucket in buckets for piece in _sorted(bucket)))
    except (pa.ArrowException, OSError) as error:
        told = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise ResourceError(f"the pairs could not be sorted: {told}") from error
    finally:
        shutil.rmtree(spill, ignore_errors=True)


def _distribute(parts: Sequence[Path], spill: Path) -> list[Path]:
    """Distribute the pairs over files; every key of a file is smaller than those of the next."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    bits = min((sum(map(_size, parts)) // _BUCKET).bit_length(), _MOST_BUCKETS_BITS)
    buckets = [spill / f"bucket-{number:03}.arrow" for number in range(1 << bits)]
    with ExitStack() as stack:
        writers: dict[int, Any] = {}
        for part in parts:
            # Without the facts, which only fit this part.
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


def _size(part: Path) -> int:
    """Return how many bytes a part's pairs have in memory."""
    import pyarrow.parquet as pq

    facts = pq.read_metadata(part)
    return sum(facts.row_group(number).total_byte_size for number in range(facts.num_row_groups))


def _sorted(bucket: Path) -> Iterator[Any]:
    """Yield the pairs of a file by their keys, and of equal ones the earliest, as tables of some rows."""
    import pyarrow as pa

    with pa.OSFile(str(bucket), "rb") as file, pa.ipc.open_stream(file) as stream:
        table = stream.read_all()
    bucket.unlink()
    low, high, document, place = (
        table.column(name).to_numpy() for name in ("key_low", "key_high", "document", "place")
    )
    order = np.lexsort((place, document, low, high))
    new = np.ones(len(order), dtype=bool)
    new[1:] = (high[order][1:] != high[order][:-1]) | (low[order][1:] != low[order][:-1])
    order = order[new]
    table = table.select(list(COLUMNS))
    for start in range(0, len(order), _ROWS):
        yield table.take(order[start : start + _ROWS])


def _write_parquet(file: BinaryIO, tables: Iterator[Any]) -> int:
    import pyarrow.parquet as pq

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
