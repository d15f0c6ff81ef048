"""Read and write embedding files (Parquet or NumPy) with their encoder's metadata, and the parts they are joined from.

A Parquet file has the columns ``id``, perhaps ``text``, and ``embedding``, and one JSON object under the
schema metadata key ``gerund``. A NumPy array ``x.npy`` has two companions: ``x.ids.jsonl``, whose line i
belongs to row i, and ``x.meta.json`` with the same JSON object.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gerund.data.files import batched_by_size
from gerund.errors import ConfigError, DataError, FingerprintError
from gerund.jobs.files import atomic_file, write_atomic
from gerund.quantization import Precision, check_precision, quantize, ranges_of

METADATA_KEY = "gerund"
FORMAT = 1
IdType = Literal["int", "text"]
# Row groups of this size are read quickly and fit any memory.
_GROUP_BYTES = 2**26
_PART_KEY = "gerund.part"


@dataclass(frozen=True)
class Part:
    """Some consecutive rows with their vectors."""

    ids: Sequence[int | str]  # all integers or all strings
    texts: Sequence[str] | None  # None where they are not stored
    vectors: np.ndarray  # ``(n, d)`` float32


@dataclass(frozen=True)
class Embeddings:
    """A file of embeddings in memory.

    Attributes:
        ids: ``n`` ids.
        vectors: ``(n, d)`` float32, or quantized by ``gerund.quantization`` as ``info`` specifies (``precision``,
            ``ranges``); of an npy file memory-mapped.
        info: metadata of the encoder: ``fingerprint``, ``model``, ``attention`` and more.
    """

    ids: list[int | str]
    vectors: np.ndarray
    info: dict[str, Any]


def output_files(output: Path) -> list[Path]:
    """Return the files of an output, the main one last.

    >>> [path.name for path in output_files(Path("notes.npy"))]
    ['notes.meta.json', 'notes.ids.jsonl', 'notes.npy']
    """
    if output.suffix.lower() == ".parquet":
        return [output]
    if output.suffix.lower() == ".npy":
        return [output.with_suffix(".meta.json"), output.with_suffix(".ids.jsonl"), output]
    raise ConfigError(f"the output {output} must end in .parquet or .npy")


def read_embeddings(path: str | Path, *, fingerprint: str | None = None) -> Embeddings:
    """Read a file that ``gerund embed`` wrote.

    Args:
        path: a .parquet or .npy file.
        fingerprint: the encoder's whose vectors it will be compared with; None for no check.

    Raises:
        DataError: the file is not there, or not one that ``gerund embed`` wrote.
        FingerprintError: another encoder made it.
    """
    path = Path(path)
    for part in output_files(path):
        if not part.is_file():
            raise DataError(f"{part}: no such file")
    try:
        embeddings = _read_parquet(path) if path.suffix.lower() == ".parquet" else _read_npy(path)
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{path}: not a file that 'gerund embed' wrote ({' '.join(str(error).split())})") from error
    made_by = embeddings.info.get("fingerprint")
    if fingerprint is not None and made_by != fingerprint:
        raise FingerprintError(
            f"{path} was made by another encoder ({embeddings.info.get('model')}, fingerprint {made_by}, "
            f"not {fingerprint}): its vectors cannot be compared; embed it again"
        )
    return embeddings


def read_vectors(path: Path, fingerprint: str) -> np.ndarray:
    """Read the vectors ``(n, d)`` of a file that ``gerund embed`` wrote with this encoder, or of any .npy file.

    Raises:
        DataError: it cannot be read, or holds something else.
        FingerprintError: another encoder made it.
    """
    if path.suffix.lower() != ".npy" or path.with_suffix(".meta.json").is_file():
        return read_embeddings(path, fingerprint=fingerprint).vectors
    try:
        vectors = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path}: not a readable .npy file ({' '.join(str(error).split())})") from error
    if vectors.ndim not in (1, 2):
        raise DataError(f"{path}: holds no vectors, but an array of {vectors.ndim} dimensions")
    return np.atleast_2d(vectors)


def write_part(path: Path, part: Part, id_type: IdType, facts: dict[str, Any]) -> None:
    """Write one part atomically, with facts for ``read_facts``; ``id_type`` is that of all parts."""
    n, d = part.vectors.shape
    schema = _schema(id_type, part.texts is not None, d).with_metadata({_PART_KEY: json.dumps(facts)})
    flat = pa.array(np.ascontiguousarray(part.vectors, dtype=np.float32).reshape(-1))
    columns = [pa.array(part.ids, type=schema.field("id").type)]
    if part.texts is not None:
        columns.append(pa.array(part.texts, type=pa.string()))
    columns.append(pa.FixedSizeListArray.from_arrays(flat, type=schema.field("embedding").type))
    batch = pa.RecordBatch.from_arrays(columns, schema=schema)
    assert batch.num_rows == n
    with atomic_file(path, apart=True) as file, pa.ipc.new_file(file, schema) as writer:
        writer.write_batch(batch)


def read_facts(path: Path) -> dict[str, Any] | None:
    """Return the facts of a part; None if it is unreadable."""
    try:
        with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as reader:
            facts = json.loads(reader.schema.metadata[_PART_KEY.encode()])
            return facts if reader.num_record_batches == 1 and isinstance(facts, dict) else None
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError):
        return None


def join_parquet(parts: Sequence[Path], target: Path, info: dict[str, Any]) -> None:
    """Join parts into one Parquet file, with one row group in memory at a time."""
    precision, ranges = _precision_of(parts, info)
    schema = _converted(_opened_schema(parts[0]).empty_table(), precision, ranges).schema
    schema = schema.with_metadata({METADATA_KEY: json.dumps(info, ensure_ascii=False)})
    small = [name for name in schema.names if name != "embedding"]
    with atomic_file(target) as file:
        # Vectors neither repeat nor compress: to try would only cost time.
        compression = dict.fromkeys(small, "zstd") | {"embedding.list.element": "none"}
        with pq.ParquetWriter(
            file, schema, compression=compression, use_dictionary=False, write_statistics=["id"]
        ) as writer:
            for tables in _grouped(parts):
                converted = _converted(pa.concat_tables(tables), precision, ranges)
                writer.write_table(converted.replace_schema_metadata(schema.metadata))


def join_npy(parts: Sequence[Path], targets: Sequence[Path], info: dict[str, Any], rows: int) -> None:
    """Join parts into the three files of an npy output, with few parts in memory at a time."""
    metadata, names, vectors = targets
    precision, ranges = _precision_of(parts, info)
    write_atomic(metadata, json.dumps(info, indent=2, ensure_ascii=False) + "\n")
    with atomic_file(vectors) as file, atomic_file(names) as lines:
        wide = _opened_schema(parts[0]).field("embedding").type.list_size
        sample = quantize(np.zeros((1, wide), np.float32), precision, ranges)
        descr = np.lib.format.dtype_to_descr(sample.dtype.newbyteorder("<"))
        shape = (rows, sample.shape[1])
        np.lib.format.write_array_header_1_0(file, {"descr": descr, "fortran_order": False, "shape": shape})
        for tables in _grouped(parts):
            for table in tables:
                quantized = quantize(_vectors(table), precision, ranges)
                file.write(np.ascontiguousarray(quantized, dtype=sample.dtype.newbyteorder("<")).data)
                others = table.drop_columns(["embedding"]).to_pylist()
                lines.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in others).encode())


def _precision_of(parts: Sequence[Path], info: dict[str, Any]) -> tuple[Precision, np.ndarray | None]:
    """Return the precision of the output and, for int8 and uint8, the ranges of all parts, also added to ``info``."""
    precision = check_precision(info.get("precision", "float32"))
    if precision not in ("int8", "uint8"):
        return precision, None
    bounds = [ranges_of(_vectors(table)) for tables in _grouped(parts) for table in tables if len(table)]
    ranges = np.stack([np.min([low for low, _ in bounds], axis=0), np.max([high for _, high in bounds], axis=0)])
    info["ranges"] = ranges.tolist()
    return precision, ranges


def _converted(table: Any, precision: Precision, ranges: np.ndarray | None) -> Any:
    if precision == "float32":
        return table
    quantized = quantize(_vectors(table), precision, ranges)
    wide = quantized.shape[1]
    kind = pa.int8() if quantized.dtype == np.int8 else pa.uint8()
    flat = pa.array(np.ascontiguousarray(quantized).reshape(-1), type=kind)
    column = pa.FixedSizeListArray.from_arrays(flat, type=pa.list_(pa.field("element", kind, nullable=False), wide))
    place = table.schema.get_field_index("embedding")
    return table.set_column(place, pa.field("embedding", column.type, nullable=False), column)


def _schema(id_type: IdType, with_text: bool, d: int) -> Any:
    # Without nulls Parquet writes and reads the vectors twice as fast.
    vector = pa.list_(pa.field("element", pa.float32(), nullable=False), d)
    fields = [pa.field("id", pa.int64() if id_type == "int" else pa.string(), nullable=False)]
    if with_text:
        fields.append(pa.field("text", pa.string(), nullable=False))
    return pa.schema([*fields, pa.field("embedding", vector, nullable=False)])


def _opened_schema(path: Path) -> Any:
    with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as reader:
        return reader.schema


def _grouped(parts: Sequence[Path]) -> Iterator[list[Any]]:
    return batched_by_size(map(_table_of, parts), lambda table: table.nbytes, _GROUP_BYTES)


def _table_of(part: Path) -> Any:
    with pa.OSFile(str(part)) as source, pa.ipc.open_file(source) as reader:
        return reader.read_all()


def _vectors(table: Any) -> np.ndarray:
    """Return the vectors of a table ``(n, d)``."""
    d = table.schema.field("embedding").type.list_size
    chunks = [chunk.flatten().to_numpy(zero_copy_only=True) for chunk in table.column("embedding").chunks]
    flat = chunks[0] if len(chunks) == 1 else np.concatenate([np.zeros(0, np.float32), *chunks])
    return flat.reshape(-1, d)  # of an empty table a matrix without rows


def _read_parquet(path: Path) -> Embeddings:
    try:
        table = pq.read_table(path, columns=["id", "embedding"])
    except pa.ArrowException as error:
        raise ValueError(str(error)) from error
    info = json.loads((table.schema.metadata or {})[METADATA_KEY.encode()])
    return Embeddings(table.column("id").to_pylist(), _vectors(table), info)


def _read_npy(path: Path) -> Embeddings:
    metadata, names, _ = output_files(path)
    info = json.loads(metadata.read_text(encoding="utf-8"))
    with names.open(encoding="utf-8") as lines:
        ids = [json.loads(line)["id"] for line in lines]
    vectors = np.load(path, mmap_mode="r", allow_pickle=False)
    if len(ids) != len(vectors):
        raise ValueError(f"{len(ids)} ids for {len(vectors)} vectors")
    return Embeddings(ids, vectors, info)
