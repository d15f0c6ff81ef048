"""Store chunks in a folder, or on an object store, with LanceDB.

::

    my.index/
        gerund.lance/               one row: the name of the index's table of chunks
        chunks_0a1b.lance/          the chunks; the schema's metadata are the index's
        chunks_0a1b_files.lance/    hashes of completely indexed files
        lock                        while a process writes

Each change is one commit, so a killed process leaves the state before it or after it. During a migration a second pair
of tables exists next to the first until the one row names it.
"""

import hashlib
import importlib.util
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from gerund.errors import (
    DataError,
    GerundError,
    InputError,
    MissingDependencyError,
    ResourceError,
    StaleIndexError,
    one_line,
)
from gerund.jobs.files import acquire_lock, release_lock
from gerund.quantization import RESCORED, quantize, width_of
from gerund.retrieval.documents import BINARY, Chunk
from gerund.retrieval.filters import bad_filter, quoted
from gerund.retrieval.store import (
    POINTER_FOLDER,
    DocumentState,
    IndexMetadata,
    KeywordQuery,
    Match,
    cosines_with,
    nearest_bits,
    one_of_sources,
)
from gerund.text_analysis import Analyzer

if TYPE_CHECKING:
    import pyarrow as pa

METADATA = b"gerund"
_WEIGHT = b"gerund:weight"
_POINTER, _CURRENT = POINTER_FOLDER.removesuffix(".lance"), "chunks"

FIELDS = ("source", "start", "stop", "text", "number", "tokens", "title", "heading", "file", "digest")
"""The columns of a chunk, in the order of its attributes."""

TERMS = "terms"
"""The column of a chunk's terms, separated by spaces."""

MULTI = "multi"
"""The column of a chunk's token vectors, in an index that has them."""

# Up to this number of rows every vector is compared, which misses none; above, an index of exact vectors (IVF_FLAT) is
# faster. Not LanceDB's default (IVF_PQ): its recall@10 was 0.22 on vectors of a language model.
FLAT_ROWS = 100_000
_PROBES = 50
_LOCK_SECONDS = 600
# Readers of an old version have this time to finish.
_RETENTION = timedelta(hours=1)
# LanceDB's hosted service has another interface, which lacks some methods of tables that are used here.
_SERVICE = "db://"

_REASON_CHARACTERS = 200
# Of a file or a table, not of a column that a filter names.
_MISSING = re.compile(r"not found: \S*\.lance\b|table '\S*' was not found")

_log = logging.getLogger(__name__)


def is_remote(place: str) -> bool:
    """Whether a place is on an object store, not a folder."""
    return "://" in place


class LanceStore:
    """Chunks in a folder or on an object store (``s3://bucket/my.index``); the methods are those of ``VectorStore``."""

    def __init__(self, place: str | Path) -> None:
        self.name = str(place)
        if self.name.startswith(_SERVICE):
            raise InputError(
                f"{self.name} is LanceDB's own service, which gerund doesn't support; name a folder, or the path of an "
                "object store such as s3://bucket/my.index"
            )
        self._folder = None if is_remote(self.name) else Path(place)
        self._generation: str | None = None
        self._tables: dict[str, Any] = {}
        self._analyzers: dict[str, Analyzer] = {}
        self._lock, self._depth = threading.RLock(), 0
        if self._folder is not None:
            _require_index_folder(self._folder)
        self._db: Any = None

    def __reduce__(self) -> tuple[type[Self], tuple[str]]:
        """Let a copy, in this process or another, open the place again: lock and connection cannot be shared."""
        return type(self), (self.name,)

    @property
    def is_there(self) -> bool:
        """Whether the folder has an index; for an object store only opening it tells."""
        return self._folder is None or (self._folder / POINTER_FOLDER).is_dir()

    def about(self) -> IndexMetadata | None:
        if (generation := self._current()) is None:
            return None
        with self._errors():
            schema = self._table(generation).schema
        metadata, of_vectors = schema.metadata or {}, schema.field("vector").metadata or {}
        if METADATA not in metadata:
            raise DataError(f"{self.name}: its table of chunks has no metadata of gerund")
        about = IndexMetadata.from_json(metadata[METADATA], self.name)
        return replace(about, weight=float(of_vectors[_WEIGHT])) if _WEIGHT in of_vectors else about

    def create(self, about: IndexMetadata) -> None:
        """Create an empty index, unless there is one. A process that is killed before the end leaves none."""
        with self.locked(), self._errors():
            if self._current() is None:
                name = _table_name(about)
                self._create_tables(name, about)
                self._db.create_table(_POINTER, _text_rows({_CURRENT: [name]}), exist_ok=True)
                self._generation = name

    def set_weight(self, weight: float) -> None:
        # A table's metadata are fixed when it is made, those of a column are not.
        update = {"path": "vector", "metadata": {_WEIGHT.decode(): str(weight)}}
        with self.locked(), self._errors():
            self._table(self._require_current()).update_field_metadata(update)

    @contextmanager
    def locked(self, wait: float = _LOCK_SECONDS) -> Iterator[None]:
        """Keep other writers on this machine out until the block ends; on an object store those of this store only.

        There, merging rows instead of adding them would not help: two merges of new rows both succeed.
        """
        with self._lock:  # other threads may share this store; the depth is that of the thread in this block
            if self._folder is None or self._depth:
                yield
                return
            try:
                lock = acquire_lock(self._folder, self.name, wait=wait)
            except OSError as error:
                raise _io_error(self.name, str(error.strerror or error)) from error
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
                release_lock(lock)

    def documents(self) -> dict[str, DocumentState]:
        if (generation := self._current()) is None:
            return {}
        with self._errors():
            query = self._table(generation).search().where("number = 0").select(["source", "digest", "file"])
            rows = query.limit(None).to_arrow()
        columns = [rows.column(name).to_pylist() for name in ("source", "digest", "file")]
        return {source: DocumentState(digest, file) for source, digest, file in zip(*columns, strict=True)}

    def files(self) -> dict[str, str]:
        if (generation := self._current()) is None:
            return {}
        with self._errors():
            rows = self._table(_files(generation)).to_arrow()
        return dict(zip(rows.column("file").to_pylist(), rows.column("digest").to_pylist(), strict=True))

    def replace(
        self,
        sources: Sequence[str],
        chunks: Sequence[Chunk],
        vectors_ND: np.ndarray,
        tokens: Sequence[bytes] | None = None,
    ) -> None:
        if not sources:
            return
        with self.locked(), self._errors():
            table, condition = self._table(self._require_current()), one_of_sources(sources)
            exists = table.count_rows(condition)
            rows = None
            if chunks:
                rows = arrow_rows(chunks, vectors_ND, _precision(table.schema), self._analyzer(), tokens)
            if exists and chunks:
                merge = table.merge_insert("id").when_matched_update_all().when_not_matched_insert_all()
                merge.when_not_matched_by_source_delete(condition).execute(rows)
            elif chunks:
                table.add(rows)
            elif exists:
                table.delete(condition)

    def note_files(self, digests: Mapping[str, str | None]) -> None:
        with self.locked(), self._errors():
            table = self._table(_files(self._require_current()))
            done = {file: digest for file, digest in digests.items() if digest is not None}
            removed = [file for file, digest in digests.items() if digest is None]
            if done:
                rows = _text_rows({"file": list(done), "digest": list(done.values())})
                table.merge_insert("file").when_matched_update_all().when_not_matched_insert_all().execute(rows)
            if removed:
                table.delete(f"file IN ({', '.join(map(quoted, removed))})")

    def chunks_of(self, sources: Sequence[str]) -> list[Chunk]:
        if not sources:
            return []
        with self._errors():
            query = self._table(self._require_current()).search().where(one_of_sources(sources))
            rows = query.select(list(FIELDS)).limit(None).to_arrow()
        return sorted(_chunks(rows), key=lambda chunk: (chunk.source, chunk.start))

    def token_vectors(self, ids: Sequence[str]) -> dict[str, bytes]:
        if not ids:
            return {}
        with self._errors():
            query = self._table(self._require_current()).search().where(f"id IN ({', '.join(map(quoted, ids))})")
            rows = query.select(["id", MULTI]).limit(None).to_arrow()
        return dict(zip(rows.column("id").to_pylist(), rows.column(MULTI).to_pylist(), strict=True))

    def words(self, query: KeywordQuery, limit: int, where: str | None = None) -> list[Match]:
        rows = self._by_words(query, ["_score"], limit, where)
        return [] if rows is None else _matches(rows, "_score")

    def words_with_cosines(
        self, query: KeywordQuery, vector_D: np.ndarray, limit: int, where: str | None = None
    ) -> tuple[list[Match], list[float]]:
        rows = self._by_words(query, ["_score", "vector"], limit, where)
        return ([], []) if rows is None else (_matches(rows, "_score"), cosines_with(vector_D, _stored_vectors(rows)))

    def vectors(self, vector_D: np.ndarray, limit: int, where: str | None = None) -> list[Match]:
        with self._errors():
            precision = _precision(self._table(self._require_current()).schema)
        query_1D = np.asarray(vector_D, dtype=np.float32)[None]
        stored_1C = quantize(query_1D, "ubinary") if precision == BINARY else query_1D.astype(precision)

        def search(table: Any) -> Any:
            query = table.search(stored_1C[0], vector_column_name="vector").nprobes(_PROBES)
            return query.distance_type("hamming" if precision == BINARY else "cosine")

        if precision != BINARY:
            rows = self._search(search, ["_distance"], limit, where)
            return [(chunk, 1 - distance) for chunk, distance in _matches(rows, "_distance")]
        rows = self._search(search, ["_distance", "vector"], RESCORED * limit, where)
        places, scores = nearest_bits(query_1D[0], _stored_vectors(rows), limit)
        chunks = _chunks(rows)
        return [(chunks[place], score) for place, score in zip(places, scores, strict=True)]

    def count(self) -> int:
        if (generation := self._current()) is None:
            return 0
        with self._errors():
            return int(self._table(generation).count_rows())

    def is_tidy(self) -> bool:
        """Whether every row is in every index."""
        if (generation := self._current()) is None:
            return True
        with self._errors():
            table = self._table(generation)
            indices = table.list_indices()
            required = {TERMS, *(["vector"] if table.count_rows() >= FLAT_ROWS else [])}
            if not required <= {column for index in indices for column in index.columns}:
                return False
            statistics = [table.index_stats(index.name) for index in indices]
        return all(index is not None and not index.num_unindexed_rows for index in statistics)

    def finish(self) -> bool:
        """Run ``tidy`` if a killed writer did not; tells whether it ran.

        It does not run while another process writes, nor where nothing can be written; a search has the same results
        without it, only more slowly. On an object store, where no lock shows another writer, the next writer runs it.
        """
        if self._folder is None or self.is_tidy():
            return False
        with suppress(InputError, ResourceError), self.locked(wait=0):
            if not self.is_tidy():
                self.tidy()
                return True
        return False

    def tidy(self) -> None:
        """Merge small files, index new rows, and delete versions that are older than an hour."""
        generation = self._require_current()
        with self.locked(), self._errors():
            table = self._table(generation)
            if table.count_rows() >= FLAT_ROWS and not _has_index(table, "vector"):
                from lancedb.index import IvfFlat

                is_binary = _precision(table.schema) == BINARY
                table.create_index("vector", config=IvfFlat(distance_type="hamming" if is_binary else "cosine"))
            table.optimize(cleanup_older_than=_RETENTION)
            self._table(_files(generation)).optimize(cleanup_older_than=_RETENTION)

    def create_successor(self, about: IndexMetadata) -> Self:
        successor = type(self)(self.name)
        successor._generation = name = _table_name(about)
        with self.locked(), self._errors():
            successor._db = self._connected()
            successor._create_tables(name, about)
        successor._depth = 1  # its writer holds this store's lock where that is needed
        return successor

    def swap(self, other: Self) -> None:
        """Atomically replace this store by its successor, then drop the old tables."""
        new = str(other._generation)
        with self.locked(), self._errors():
            self._table(_POINTER).update(values={_CURRENT: new})
            self._generation = new
            self.drop_others()

    def drop_others(self) -> None:
        """Drop the tables of other encoders: of the one before, and of abandoned migrations."""
        current = self._require_current()
        with self.locked(), self._errors():
            for name in self._table_names() - {_POINTER, current, _files(current)}:
                self._tables.pop(name, None)
                self._db.drop_table(name)

    def _current(self) -> str | None:
        """Return the name of the table of chunks; None where there is no index yet."""
        if self._generation is not None:
            return self._generation
        if not self.is_there:
            return None
        with self._errors():
            if self._folder is None and _POINTER not in self._table_names():
                return None
            try:
                pointer = self._table(_POINTER)
            except ValueError as error:
                if "was not found" in str(error):
                    return None  # another process is about to commit it
                raise
            [name] = pointer.to_arrow().column(_CURRENT).to_pylist()
        self._generation = str(name)
        return self._generation

    def _require_current(self) -> str:
        if (generation := self._current()) is None:
            raise DataError(f"{self.name}: there is no index yet; gerund index makes one")
        return generation

    def _connected(self) -> Any:
        if self._db is None:
            # Otherwise there is a warning per query, about a column that is selected here anyway.
            os.environ.setdefault("LANCEDB_LOG", "error")
            lancedb = _import_lancedb(self.name)
            # Each read checks whether another process has written.
            self._db = lancedb.connect(self.name, read_consistency_interval=timedelta(0))
        return self._db

    def _table_names(self) -> set[str]:
        return set(self._connected().list_tables(limit=1000).tables)

    def _table(self, name: str) -> Any:
        if name not in self._tables:
            self._tables[name] = self._connected().open_table(name)
        return self._tables[name]

    def _create_tables(self, name: str, about: IndexMetadata) -> None:
        """Create the tables of a generation where they do not exist."""
        db = self._connected()

        import pyarrow as pa

        if name in self._table_names():  # of an interrupted creation or migration
            table = db.open_table(name)
            if not _has_index(table, TERMS):
                _log.warning("%s: the index of its words was not finished, and is finished now", self.name)
                table.create_index(TERMS, config=_terms_index())
        else:
            metadata = {METADATA: about.to_json().encode()}
            columns = _schema(about.dimensions, about.chunking.precision, multi=about.chunking.multi > 0)
            schema = columns.with_metadata(metadata)
            db.create_table(name, schema=schema, exist_ok=True).create_index(TERMS, config=_terms_index())
        db.create_table(_files(name), schema=pa.schema([("file", pa.string()), ("digest", pa.string())]), exist_ok=True)

    def _by_words(self, query: KeywordQuery, columns: list[str], limit: int, where: str | None) -> Any:
        """Return the rows that BM25 finds; None for a query without a word."""
        with self._errors():
            lance_query = _full_text_query(query, self._analyzer())
        if lance_query is None:
            return None
        return self._search(lambda table: table.search(lance_query, query_type="fts"), columns, limit, where)

    def _analyzer(self) -> Analyzer:
        generation = self._require_current()
        if generation not in self._analyzers:
            about = self.about()
            assert about is not None
            self._analyzers[generation] = Analyzer(about.chunking.language)
        return self._analyzers[generation]

    def _search(self, search: Callable[[Any], Any], columns: list[str], limit: int, where: str | None) -> Any:
        """Return the matching rows, with columns in addition to those of a chunk."""
        with self._errors(where):
            query = search(self._table(self._require_current())).select([*FIELDS, *columns])
            if where is not None:
                query = query.where(where, prefilter=True)
            return query.limit(limit).to_arrow()

    @contextmanager
    def _errors(self, where: str | None = None) -> Iterator[None]:
        """Translate LanceDB's errors; ``where`` is the filter of the query."""
        try:
            yield
        except GerundError:
            raise
        except (OSError, RuntimeError, ValueError) as error:
            raise _translated(error, self.name, where, self._was_migrated) from error

    def _was_migrated(self) -> bool:
        """Whether another process has replaced this store's tables."""
        if self._generation is None:
            return False
        try:
            [name] = self._connected().open_table(_POINTER).to_arrow().column(_CURRENT).to_pylist()
        except (OSError, RuntimeError, ValueError):
            return False
        return name != self._generation


def _import_lancedb(name: str) -> Any:
    """Return LanceDB, imported without the client of its namespace service, which takes longer than all the rest.

    LanceDB imports a type of that client, whose package then imports every call of the service. During the import, a
    package of the same name that has the same modules, and imports none by itself, replaces it.
    """
    client = "lance_namespace_urllib3_client"
    spec = None if client in sys.modules else importlib.util.find_spec(client)
    if spec is not None:
        sys.modules[client] = importlib.util.module_from_spec(spec)
    try:
        import lancedb
    except ImportError as error:
        raise MissingDependencyError(f"{name} needs LanceDB: pip install 'gerund[index]'") from error
    finally:
        if spec is not None:
            # Later imports get the complete package.
            sys.modules.pop(client, None)
    return lancedb


def _table_name(about: IndexMetadata) -> str:
    return f"chunks_{hashlib.blake2b(about.key.encode(), digest_size=6).hexdigest()}"


def _files(generation: str) -> str:
    return f"{generation}_files"


# Rows


def _vector_type(dimensions: int, precision: str) -> "pa.DataType":
    """Return the type of a vector's column: floats, or bytes of eight bits each."""
    import pyarrow as pa

    if precision == BINARY:
        return pa.list_(pa.uint8(), width_of(dimensions, precision))
    return pa.list_(pa.float16() if precision == "float16" else pa.float32(), dimensions)


def _precision(schema: "pa.Schema") -> str:
    return {"uint8": BINARY, "halffloat": "float16"}.get(str(schema.field("vector").type.value_type), "float32")


def _stored_vectors(rows: "pa.Table") -> np.ndarray:
    """Return the vectors of rows as they are stored: floats ``(n, dimensions)``, or bits ``(n, bytes)``."""
    column = rows.column("vector").combine_chunks()
    stored_NC: np.ndarray = column.flatten().to_numpy(zero_copy_only=False).reshape(len(rows), column.type.list_size)
    return stored_NC


def _schema(dimensions: int, precision: str, *, multi: bool = False) -> "pa.Schema":
    import pyarrow as pa

    text, number = pa.string(), pa.int64()
    columns = {"id": text, "source": text, "start": number, "stop": number, "text": text, "number": number}
    columns |= {"tokens": number, "title": text, "heading": text, "file": text, "digest": text, TERMS: text}
    columns |= {MULTI: pa.large_binary()} if multi else {}
    return pa.schema([*columns.items(), ("vector", _vector_type(dimensions, precision))])


def _text_rows(columns: Mapping[str, Sequence[str]]) -> "pa.Table":
    import pyarrow as pa

    return pa.table({name: pa.array(values, pa.string()) for name, values in columns.items()})


def arrow_rows(
    chunks: Sequence[Chunk],
    vectors_ND: np.ndarray,
    precision: str,
    analyzer: Analyzer,
    tokens: Sequence[bytes] | None = None,
) -> "pa.Table":
    """Return chunks with their vectors, in the index's precision, and perhaps their token vectors, as rows."""
    import pyarrow as pa

    schema = _schema(vectors_ND.shape[1], precision, multi=tokens is not None)
    columns: dict[str, list[Any]] = {
        name: [getattr(chunk, "end" if name == "stop" else name) for chunk in chunks] for name in ("id", *FIELDS)
    }
    columns[MULTI] = list(tokens or ())
    columns[TERMS] = [" ".join(analyzer.document(chunk.indexed_text)) for chunk in chunks]
    stored_NC = quantize(vectors_ND, "ubinary") if precision == BINARY else vectors_ND.astype(precision)
    flat = pa.array(np.ascontiguousarray(stored_NC).ravel())
    arrays = [
        pa.FixedSizeListArray.from_arrays(flat, stored_NC.shape[1]) if field.name == "vector"
        else pa.array(columns[field.name], field.type)
        for field in schema
    ]  # fmt: skip
    return pa.Table.from_arrays(arrays, schema=schema)


def _chunks(rows: "pa.Table") -> list[Chunk]:
    return [Chunk(*values) for values in zip(*(rows.column(name).to_pylist() for name in FIELDS), strict=True)]


def _matches(rows: "pa.Table", score: str) -> list[Match]:
    return list(zip(_chunks(rows), rows.column(score).to_pylist(), strict=True))


# Keyword search


def _terms_index() -> Any:
    """Return LanceDB's settings of the index of terms: the terms are those of ``text_analysis``, unchanged."""
    from lancedb.index import FTS

    return FTS(
        base_tokenizer="whitespace",
        max_token_length=None,
        lower_case=False,
        stem=False,
        remove_stop_words=False,
        ascii_folding=False,
        with_position=True,
    )


def _full_text_query(query: KeywordQuery, analyzer: Analyzer) -> Any:
    """Return LanceDB's query, not a string, in which some characters would have a meaning; None without a word."""
    from lancedb.query import BooleanQuery, MatchQuery, Occur, PhraseQuery

    words = " ".join(analyzer.query(query.text))
    phrases = [PhraseQuery(terms, TERMS) for phrase in query.phrases if (terms := " ".join(analyzer.phrase(phrase)))]
    if not phrases:
        return MatchQuery(words, TERMS) if words else None
    must = [(Occur.MUST, phrase) for phrase in phrases]
    return BooleanQuery([*must, (Occur.SHOULD, MatchQuery(words, TERMS))] if words else must)


def _has_index(table: Any, column: str) -> bool:
    return any(column in index.columns for index in table.list_indices())


# Errors


def _require_index_folder(folder: Path) -> None:
    """Refuse a file, and a folder with other contents than an index."""
    try:
        if folder.exists() and not folder.is_dir():
            raise DataError(f"{folder} is a file; an index is a folder")
        names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    except PermissionError as error:
        raise _io_error(str(folder), "permission denied") from error
    # An interrupted creation leaves tables and perhaps the lock.
    others = sorted(name for name in names if not name.endswith(".lance") and name != "lock")
    if others and POINTER_FOLDER not in names:
        raise DataError(
            f"{folder} is not an index: it contains {others[0]}; an index is a folder of its own, which "
            f"gerund index PATHS -o my.index makes"
        )


def _translated(error: Exception, name: str, where: str | None, was_migrated: Callable[[], bool]) -> GerundError:
    """Return LanceDB's error as an error of gerund; ``where`` is the filter of the query."""
    reason = _reason(error)
    lower = str(error).lower()
    if any(sign in lower for sign in ("no space left", "disk quota", "permission denied", "read-only file")):
        return _io_error(name, reason)
    is_missing = _MISSING.search(lower.replace((where or "").lower(), "")) is not None
    if where is not None and not is_missing and "not found" not in lower.split("lance")[0]:
        return bad_filter(where, reason)
    if was_migrated():
        return StaleIndexError(f"{name} was migrated by another process meanwhile; open it again")
    if is_missing and not is_remote(name) and not Path(name, POINTER_FOLDER).is_dir():
        return DataError(
            f"the index {name} is no longer there: its folder was removed or renamed; restore it, or create it again "
            f"with gerund index PATHS -o {name}"
        )
    if is_missing or "panicked" in lower:
        state = "is incomplete" if is_missing else "is damaged"
        return DataError(f"the index {name} {state}; restore it from a copy, or create it again ({reason})")
    return ResourceError(f"{name}: {reason}")


def _io_error(name: str, reason: str) -> GerundError:
    """Return the error for a folder that the system does not let gerund read or write."""
    if any(sign in reason.lower() for sign in ("no space left", "quota")):
        return ResourceError(f"{name} cannot be written: {reason}; what was stored before is kept")
    return InputError(f"{name} cannot be read or written: {reason}")


def _reason(error: Exception) -> str:
    """Return the readable part of LanceDB's error, without its types and places in its code."""
    text = str(error).split(", /")[0].split("\n")[0]
    for start in ("lance error:", "External error:", "LanceError(IO):", "Invalid user input:", "Execution error:"):
        text = text.replace(start, "")
    return one_line(text.strip(" :,."), _REASON_CHARACTERS) or type(error).__name__
