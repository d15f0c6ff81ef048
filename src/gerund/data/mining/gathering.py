"""From the parts of a job to one file of pairs: each pair once, in an order that is random and always the same.

All pairs are sorted by a key that is a hash of the seed and the pair's two texts. That shuffles them, and it brings
equal pairs together, of which the earliest is kept. DuckDB sorts, with a limit to its memory and the disk for the
rest, so a corpus may be larger than the memory.

Knows: the columns of parts, DuckDB. Does not know: texts, methods, resuming.
"""

import json
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from gerund.data.files import make_folder, whole_file
from gerund.data.mining.parts import COLUMNS, KEYS, schema
from gerund.errors import ConfigError, MissingDependencyError, ResourceError

FORMATS = (".parquet", ".jsonl")
_ROWS = 2**14
# DuckDB holds whole groups of rows in memory while it writes them; texts may be long.
_GROUP = 2**11
_MEMORY = re.compile(r"(\d+(?:\.\d+)?) ?([MG])B")


def load_duckdb() -> Any:
    """Return the library that sorts.

    Raises:
        MissingDependencyError: it is not installed.
    """
    try:
        import duckdb
    except ImportError:
        raise MissingDependencyError("mining needs DuckDB: pip install 'gerund[mine]'") from None
    return duckdb


def checked_memory(memory: str) -> str:
    """Return a limit of memory.

    Raises:
        ConfigError: it is none, or too small to sort in.
    """
    found = _MEMORY.fullmatch(memory)
    if found is None or float(found[1]) * {"M": 1, "G": 1000}[found[2]] < 100:
        raise ConfigError(f"memory={memory!r} is no size of at least 100MB, such as 500MB or 4GB")
    return memory


def gather(parts: Sequence[Path], target: Path, spill: Path, *, memory: str, threads: int) -> int:
    """Write the pairs of all parts into one file.

    Args:
        parts: the parts; they are in the order of the corpus.
        target: a file whose ending is one of ``FORMATS``.
        spill: a folder for what does not fit the memory; it is made, and removed again.
        memory: what DuckDB takes of it at most, such as ``2GB``.
        threads: in how many threads it sorts.

    Returns:
        How many pairs there are.

    Raises:
        ResourceError: the disk or the memory is full.
    """
    duckdb = load_duckdb()
    import pyarrow as pa

    make_folder(spill)
    try:
        ordered = spill / "ordered.parquet"
        _sort(duckdb, parts, ordered, spill, memory, threads)
        with whole_file(target) as file:
            write = _write_parquet if target.name.endswith(".parquet") else _write_jsonl
            return write(file, _unique(ordered))
    except (duckdb.Error, pa.ArrowException, OSError) as error:
        told = " ".join(str(error).split())[:300]
        raise ResourceError(f"the pairs could not be sorted: {told}") from error
    finally:
        shutil.rmtree(spill, ignore_errors=True)


def _sort(duckdb: Any, parts: Sequence[Path], ordered: Path, spill: Path, memory: str, threads: int) -> None:
    config = {
        "memory_limit": memory,
        "temp_directory": str(spill),
        "threads": threads,
        # Nothing may be looked for on the network.
        "autoinstall_known_extensions": False,
        "autoload_known_extensions": False,
    }
    with duckdb.connect(config=config) as connection:
        files = connection.read_parquet([str(part) for part in parts])
        # A document's number and a pair's place in it make the order complete.
        rows = files.order("key_high, key_low, document, place")
        rows.write_parquet(str(ordered), compression="lz4", row_group_size=_GROUP)


def _unique(ordered: Path) -> Iterator[Any]:
    """Yield the sorted rows without those whose key the row before has."""
    import pyarrow.parquet as pq

    before: tuple[int, int] | None = None
    with pq.ParquetFile(ordered) as file:
        for batch in file.iter_batches(batch_size=_ROWS):
            high, low = (batch.column(name).to_numpy() for name in list(KEYS)[:2])
            new = np.ones(len(high), dtype=bool)
            new[1:] = (high[1:] != high[:-1]) | (low[1:] != low[:-1])
            new[:1] = before != (int(high[0]), int(low[0]))
            before = int(high[-1]), int(low[-1])
            yield batch.filter(new).select(list(COLUMNS))


def _write_parquet(file: BinaryIO, batches: Iterator[Any]) -> int:
    import pyarrow as pa
    import pyarrow.parquet as pq

    count = 0
    target = schema(COLUMNS)
    with pq.ParquetWriter(file, target, compression="zstd") as writer:
        for batch in batches:
            # DuckDB reads one kind of text and may write another.
            writer.write_table(pa.Table.from_batches([batch]).cast(target))
            count += batch.num_rows
    return count


def _write_jsonl(file: BinaryIO, batches: Iterator[Any]) -> int:
    count = 0
    for batch in batches:
        for row in batch.to_pylist():
            file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
        count += batch.num_rows
    return count
