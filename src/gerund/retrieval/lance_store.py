"""A store of chunks in a folder, by LanceDB: the same code on the path of an object store.

::

    my.index/
        gerund.lance/               one row: which chunks are the index's
        chunks_0a1b.lance/          the chunks; their schema's metadata say what made them
        chunks_0a1b_files.lance/    hashes of files that were indexed to their end
        lock                        while somebody writes

Each change is one commit, so whoever is killed leaves the state before it or behind it. An index that is migrated has a
second pair of tables beside the first until the one row names them.

Knows: LanceDB, its traps. Does not know: models, files that are indexed.
"""

import hashlib
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

import numpy as np

from gerund.errors import DataError, GerundError, InputError, MissingDependencyError, ResourceError
from gerund.jobs.locks import give_back, take
from gerund.quantization import RESCORED, quantize
from gerund.retrieval.documents import BINARY, Chunk
from gerund.retrieval.filters import quoted
from gerund.retrieval.lance_errors import demand_place, refused, told
from gerund.retrieval.lance_reanalysis import analysed_again
from gerund.retrieval.lance_rows import (
    FIELDS,
    TERMS,
    arrow_rows,
    chunks_in,
    full_text,
    precision_in,
    schema_of,
    stored_in,
    text_rows,
    word_index,
)
from gerund.retrieval.store import (
    POINTER_FOLDER,
    About,
    DocumentState,
    Found,
    Words,
    cosines_with,
    nearest_bits,
    one_of_sources,
)
from gerund.text_analysis import Analyzer

METADATA = b"gerund"
_POINTER, _CURRENT = POINTER_FOLDER.removesuffix(".lance"), "chunks"

# Up to here every vector is compared, which misses none; above, an index of exact vectors (IVF_FLAT) is quicker. Never
# what LanceDB makes when it is not asked (IVF_PQ): its recall@10 was 0.22 on vectors of a language model.
FLAT_ROWS = 100_000
_PROBES = 50
_SECONDS_TO_WAIT = 600
# Readers of what was there before have so long to end.
_KEPT = timedelta(hours=1)
# LanceDB's own service has another interface, which lacks some of what is asked of a table here.
_SERVICE = "db://"


def is_remote(place: str) -> bool:
    """Whether a place is that of an object store, and no folder."""
    return "://" in place


class LanceStore:
    """Chunks in a folder, or on an object store.

    Args:
        place: a folder, or what LanceDB takes in its place, such as ``s3://bucket/my.index``.

    Raises:
        MissingDependencyError: LanceDB is not installed.
        DataError: there is something else.
        InputError: it is LanceDB's own service (``db://``).
    """

    def __init__(self, place: str | Path) -> None:
        self.name = str(place)
        if self.name.startswith(_SERVICE):
            raise InputError(
                f"{self.name} is LanceDB's own service, which no index can be in; name a folder, or the path of an "
                "object store such as s3://bucket/my.index"
            )
        self._folder = None if is_remote(self.name) else Path(place)
        self._generation: str | None = None
        self._tables: dict[str, Any] = {}
        self._analyzers: dict[str, Analyzer] = {}
        self._with_terms: set[str] = set()
        self._lock, self._depth = threading.RLock(), 0
        if self._folder is not None:
            demand_place(self._folder, POINTER_FOLDER)
        self._db: Any = None

    def __reduce__(self) -> tuple[type[Self], tuple[str]]:
        """Let a copy, in this process or another, open the place anew: neither lock nor connection can be handed on."""
        return type(self), (self.name,)

    @property
    def is_there(self) -> bool:
        """Whether there is an index in the folder; of an object store that is known only when it is opened."""
        return self._folder is None or (self._folder / POINTER_FOLDER).is_dir()

    def about(self) -> About | None:
        """Return what the index says about itself; None where there is none yet."""
        generation = self._current()
        if generation is None:
            return None
        with self._told():
            metadata = self._table(generation).schema.metadata or {}
        if METADATA not in metadata:
            raise DataError(f"{self.name}: its chunks do not say what made them")
        return About.from_json(metadata[METADATA], self.name)

    def create(self, about: About) -> None:
        """Make an empty index, unless it is there. Whoever is killed on the way leaves none."""
        with self.locked(), self._told():
            if self._current() is None:
                name = _name_of(about)
                self._make(name, about)
                self._db.create_table(_POINTER, text_rows({_CURRENT: [name]}), exist_ok=True)
                self._generation = name

    @contextmanager
    def locked(self, wait: float = _SECONDS_TO_WAIT) -> Iterator[None]:
        """Keep other writers on this machine out until the block ends; on an object store those of this store alone.

        There, merging rows in the place of adding them would not help: two merges of new rows both go in.
        """
        with self._lock:  # other threads may share this store; the depth is that of the one that is in here
            if self._folder is None or self._depth:
                yield
                return
            try:
                lock = take(self._folder, self.name, wait=wait)
            except OSError as error:
                raise refused(self.name, str(error.strerror or error)) from error
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
                give_back(lock)

    def documents(self) -> dict[str, DocumentState]:
        """Return what is known about every document, by its source."""
        if (generation := self._current()) is None:
            return {}
        with self._told():
            query = self._table(generation).search().where("number = 0").select(["source", "digest", "file"])
            found = query.limit(None).to_arrow()
        columns = [found.column(name).to_pylist() for name in ("source", "digest", "file")]
        return {source: DocumentState(digest, file) for source, digest, file in zip(*columns, strict=True)}

    def files(self) -> dict[str, str]:
        """Return the hash of every file that was indexed to its end."""
        if (generation := self._current()) is None:
            return {}
        with self._told():
            found = self._table(_files(generation)).to_arrow()
        return dict(zip(found.column("file").to_pylist(), found.column("digest").to_pylist(), strict=True))

    def replace(self, sources: Sequence[str], chunks: Sequence[Chunk], vectors_ND: np.ndarray) -> None:
        """Let documents have exactly these chunks, in one commit."""
        if not sources:
            return
        with self.locked(), self._told():
            table, condition = self._table_with_terms(), one_of_sources(sources)
            known = table.count_rows(condition)
            rows = arrow_rows(chunks, vectors_ND, precision_in(table.schema), self._analyzer()) if chunks else None
            if known and chunks:
                merge = table.merge_insert("id").when_matched_update_all().when_not_matched_insert_all()
                merge.when_not_matched_by_source_delete(condition).execute(rows)
            elif chunks:
                table.add(rows)
            elif known:
                table.delete(condition)

    def note_files(self, digests: Mapping[str, str | None]) -> None:
        """Note that files were indexed to their end; None forgets one."""
        with self.locked(), self._told():
            table = self._table(_files(self._demand_current()))
            noted = {file: digest for file, digest in digests.items() if digest is not None}
            gone = [file for file, digest in digests.items() if digest is None]
            if noted:
                rows = text_rows({"file": list(noted), "digest": list(noted.values())})
                table.merge_insert("file").when_matched_update_all().when_not_matched_insert_all().execute(rows)
            if gone:
                table.delete(f"file IN ({', '.join(map(quoted, gone))})")

    def chunks_of(self, sources: Sequence[str]) -> list[Chunk]:
        """Return all chunks of documents."""
        if not sources:
            return []
        with self._told():
            query = self._table(self._demand_current()).search().where(one_of_sources(sources))
            found = query.select(list(FIELDS)).limit(None).to_arrow()
        return sorted(chunks_in(found), key=lambda one: (one.source, one.start))

    def words(self, query: Words, limit: int, where: str | None = None) -> list[Found]:
        """Return the chunks that BM25 finds, best first; none for a query without a word."""
        found = self._by_words(query, ["_score"], limit, where)
        return [] if found is None else _scored(found, "_score")

    def words_with_cosines(
        self, query: Words, vector_D: np.ndarray, limit: int, where: str | None = None
    ) -> tuple[list[Found], list[float]]:
        """Return what ``words`` does, and the cosine of each of these chunks' vectors with a vector of length 1."""
        found = self._by_words(query, ["_score", "vector"], limit, where)
        return ([], []) if found is None else (_scored(found, "_score"), cosines_with(vector_D, stored_in(found)))

    def vectors(self, vector_D: np.ndarray, limit: int, where: str | None = None) -> list[Found]:
        """Return the chunks whose vectors are nearest to a vector of length 1, best first."""
        with self._told():
            precision = precision_in(self._table(self._demand_current()).schema)
        own_1D = np.asarray(vector_D, dtype=np.float32)[None]
        asked = quantize(own_1D, "ubinary") if precision == BINARY else own_1D.astype(precision)

        def search(table: Any) -> Any:
            query = table.search(asked[0], vector_column_name="vector").nprobes(_PROBES)
            return query.distance_type("hamming" if precision == BINARY else "cosine")

        if precision != BINARY:
            found = self._search(search, ["_distance"], limit, where)
            return [(one, 1 - distance) for one, distance in _scored(found, "_distance")]
        found = self._search(search, ["_distance", "vector"], RESCORED * limit, where)
        places, scores = nearest_bits(own_1D[0], stored_in(found), limit)
        chunks = chunks_in(found)
        return [(chunks[place], score) for place, score in zip(places, scores, strict=True)]

    def count(self) -> int:
        """Return how many chunks there are."""
        generation = self._current()
        if generation is None:
            return 0
        with self._told():
            return int(self._table(generation).count_rows())

    def is_tidy(self) -> bool:
        """Whether ``tidy`` was run to its end since the last change, so that every row is in every index."""
        generation = self._current()
        if generation is None:
            return True
        with self._told():
            table = self._table(generation)
            indices = table.list_indices()
            wanted = {TERMS, *(["vector"] if table.count_rows() >= FLAT_ROWS else [])}
            if not wanted <= {column for one in indices for column in one.columns}:
                return False
            statistics = [table.index_stats(one.name) for one in indices]
        return all(one is not None and not one.num_unindexed_rows for one in statistics)

    def finish(self) -> bool:
        """Tidy up after a writer that was ended before it did; tells whether it was done.

        It is not while another process writes, nor where nothing can be written; a search finds the same without it,
        only more slowly. On an object store, where no lock shows another writer, it is left to the next one.
        """
        if self._folder is None or self.is_tidy():
            return False
        with suppress(InputError, ResourceError), self.locked(wait=0):
            if not self.is_tidy():
                # The words of an index that an earlier version wrote are analysed again, which is logged there.
                was_interrupted = TERMS in self._table(self._demand_current()).schema.names
                self.tidy()
                return was_interrupted
        return False

    def tidy(self) -> None:
        """Merge small files, take new rows into the indices, and forget versions that are older than an hour."""
        generation = self._demand_current()
        with self.locked(), self._told():
            table = self._table(generation)
            if not _has_terms(table):
                analysed_again(table, self._analyzer(), self.name)
            if table.count_rows() >= FLAT_ROWS and not any("vector" in one.columns for one in table.list_indices()):
                from lancedb.index import IvfFlat

                bits = precision_in(table.schema) == BINARY
                table.create_index("vector", config=IvfFlat(distance_type="hamming" if bits else "cosine"))
            for one in (table, self._table(_files(generation))):
                one.optimize(cleanup_older_than=_KEPT)

    def beside(self, about: About) -> Self:
        """Return an empty store beside this one, or what an earlier call left, that may take its place."""
        other = type(self)(self.name)
        other._generation = name = _name_of(about)
        with self.locked(), self._told():
            other._db = self._connected()
            other._make(name, about)
        other._depth = 1  # whoever fills it holds this store's lock where it matters
        return other

    def swap(self, other: Self) -> None:
        """Let what ``beside`` returned take this one's place, in one commit; then the old tables go."""
        new = str(other._generation)
        with self.locked(), self._told():
            self._table(_POINTER).update(values={_CURRENT: new})
            self._generation = new
            self.drop_others()

    def drop_others(self) -> None:
        """Drop the tables of other encoders: of one before, and of migrations that were given up."""
        own = self._demand_current()
        with self.locked(), self._told():
            for name in {*self._connected().list_tables(limit=1000).tables} - {_POINTER, own, _files(own)}:
                self._tables.pop(name, None)
                self._db.drop_table(name)

    def _current(self) -> str | None:
        """Return the name of the table of chunks; None where there is no index yet."""
        if self._generation is not None:
            return self._generation
        if not self.is_there:
            return None
        with self._told():
            if self._folder is None and _POINTER not in self._connected().list_tables(limit=1000).tables:
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

    def _demand_current(self) -> str:
        generation = self._current()
        if generation is None:
            raise DataError(f"{self.name}: there is no index yet; gerund index makes one")
        return generation

    def _connected(self) -> Any:
        if self._db is None:
            # One warning a query, about a column that is selected here anyway.
            os.environ.setdefault("LANCEDB_LOG", "error")
            lancedb = _imported(self.name)
            # Each read looks whether another process has written.
            self._db = lancedb.connect(self.name, read_consistency_interval=timedelta(0))
        return self._db

    def _table(self, name: str) -> Any:
        if name not in self._tables:
            self._tables[name] = self._connected().open_table(name)
        return self._tables[name]

    def _make(self, name: str, about: About) -> None:
        """Make the tables of a generation where they are not there."""
        db = self._connected()

        import pyarrow as pa

        schema = schema_of(about.dimensions, about.chunking.precision).with_metadata(
            {METADATA: about.to_json().encode()}
        )
        if name in db.list_tables(limit=1000).tables:  # left by somebody who was interrupted, perhaps long ago
            table = db.open_table(name)
            if not _has_terms(table):
                analysed_again(table, Analyzer(about.chunking.language), self.name)
        else:
            db.create_table(name, schema=schema, exist_ok=True).create_index(TERMS, config=word_index())
        db.create_table(_files(name), schema=pa.schema([("file", pa.string()), ("digest", pa.string())]), exist_ok=True)

    def _by_words(self, query: Words, more: list[str], limit: int, where: str | None) -> Any:
        """Return the rows that BM25 finds; None for a query without a word."""
        with self._told():
            self._table_with_terms()
            wanted = full_text(query, self._analyzer())
        if wanted is None:
            return None
        return self._search(lambda table: table.search(wanted, query_type="fts"), more, limit, where)

    def _analyzer(self) -> Analyzer:
        """Return what the words of this index are."""
        generation = self._demand_current()
        if generation not in self._analyzers:
            about = self.about()
            assert about is not None
            self._analyzers[generation] = Analyzer(about.chunking.language)
        return self._analyzers[generation]

    def _table_with_terms(self) -> Any:
        """Return the table of chunks, with an index of their terms.

        What another version of gerund wrote has none: its words are analysed again, once.
        """
        generation = self._demand_current()
        table = self._table(generation)
        if generation not in self._with_terms:
            if not _has_terms(table):
                self._analyse_again(table, self._analyzer())
            self._with_terms.add(generation)
        return table

    def _analyse_again(self, table: Any, analyzer: Analyzer) -> None:
        try:
            with self.locked(), self._told():
                if not _has_terms(table):  # no other process has done it meanwhile
                    analysed_again(table, analyzer, self.name)
        except InputError as error:  # the system refuses; a full disk is told as what it is
            raise InputError(
                f"the words of {self.name} have to be indexed again, for which its folder must be writable ({error}); "
                "search it once where it is, or search by vectors alone"
            ) from error

    def _search(self, search: Callable[[Any], Any], more: list[str], limit: int, where: str | None) -> Any:
        """Return the rows that are found, with further columns than those of a chunk."""
        with self._told(where):
            query = search(self._table(self._demand_current())).select([*FIELDS, *more])
            if where is not None:
                query = query.where(where, prefilter=True)
            return query.limit(limit).to_arrow()

    @contextmanager
    def _told(self, where: str | None = None) -> Iterator[None]:
        """Turn what LanceDB raises into one sentence."""
        try:
            yield
        except GerundError:
            raise
        except (OSError, RuntimeError, ValueError) as error:
            raise told(error, self.name, where, self._was_migrated) from error

    def _was_migrated(self) -> bool:
        if self._generation is None:
            return False
        try:
            [name] = self._connected().open_table(_POINTER).to_arrow().column(_CURRENT).to_pylist()
        except (OSError, RuntimeError, ValueError):
            return False
        return name != self._generation


def _has_terms(table: Any) -> bool:
    return any(TERMS in one.columns for one in table.list_indices())


def _imported(name: str) -> Any:
    """Return LanceDB, imported without the client of its service of names, which takes longer than all the rest.

    Its package imports every call of that service when one of its types is imported. A package of the same name that
    has the same modules, and imports none by itself, stands in its place meanwhile.
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
            # Who imports it from now on imports it whole.
            sys.modules.pop(client, None)
    return lancedb


def _scored(rows: Any, score: str) -> list[Found]:
    return list(zip(chunks_in(rows), rows.column(score).to_pylist(), strict=True))


def _name_of(about: About) -> str:
    return f"chunks_{hashlib.blake2b(about.key.encode(), digest_size=6).hexdigest()}"


def _files(generation: str) -> str:
    return f"{generation}_files"
