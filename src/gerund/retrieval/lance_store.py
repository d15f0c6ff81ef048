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
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
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
    About,
    DocumentState,
    Found,
    Words,
    cosines_with,
    nearest_bits,
    one_of_sources,
)
from gerund.text_analysis import Analyzer

if TYPE_CHECKING:
    import pyarrow as pa


FIELDS = ("source", "start", "stop", "text", "number", "tokens", "title", "heading", "file", "digest")
"""The columns of a chunk, in the order of its attributes."""

TERMS = "terms"
"""The column of a chunk's terms, one space between two. Where terms come to be others than they are, it is called
otherwise, so that the words of what is stored are analysed again."""

# The terms are what ``text_analysis`` makes of a text: LanceDB changes nothing about them.
_AS_THEY_ARE = {
    "base_tokenizer": "whitespace",
    "max_token_length": None,
    "lower_case": False,
    "stem": False,
    "remove_stop_words": False,
    "ascii_folding": False,
    "with_position": True,
}


def word_index() -> Any:
    """Return LanceDB's settings of the index of terms."""
    from lancedb.index import FTS

    return FTS(**_AS_THEY_ARE)


def terms_of(chunk: Chunk, analyzer: Analyzer) -> str:
    """Return the terms of a chunk, as the table has them."""
    return " ".join(analyzer.document(chunk.indexed_text))


def full_text(query: Words, analyzer: Analyzer) -> Any:
    """Return a query of words as LanceDB takes it; None for one without a word.

    Not as a text, in which some characters would have a meaning.
    """
    from lancedb.query import BooleanQuery, MatchQuery, Occur, PhraseQuery

    words = " ".join(analyzer.query(query.text))
    phrases = [PhraseQuery(terms, TERMS) for one in query.phrases if (terms := " ".join(analyzer.phrase(one)))]
    if not phrases:
        return MatchQuery(words, TERMS) if words else None
    must = [(Occur.MUST, one) for one in phrases]
    return BooleanQuery([*must, (Occur.SHOULD, MatchQuery(words, TERMS))] if words else must)


def vector_type(dimensions: int, precision: str) -> "pa.DataType":
    """Return the type of a vector's column: numbers, or bytes of eight bits each."""
    import pyarrow as pa

    if precision == BINARY:
        return pa.list_(pa.uint8(), width_of(dimensions, precision))
    return pa.list_(pa.float16() if precision == "float16" else pa.float32(), dimensions)


def precision_in(schema: "pa.Schema") -> str:
    """Return how a table's vectors are stored."""
    return {"uint8": BINARY, "halffloat": "float16"}.get(str(schema.field("vector").type.value_type), "float32")


def stored_in(rows: "pa.Table") -> np.ndarray:
    """Return the vectors of rows as they are stored: numbers ``(n, dimensions)``, or bits ``(n, bytes)``."""
    column = rows.column("vector").combine_chunks()
    found: np.ndarray = column.flatten().to_numpy(zero_copy_only=False).reshape(len(rows), column.type.list_size)
    return found


def schema_of(dimensions: int, precision: str) -> "pa.Schema":
    """Return the columns of a table of chunks."""
    import pyarrow as pa

    text, number = pa.string(), pa.int64()
    named = {"id": text, "source": text, "start": number, "stop": number, "text": text, "number": number}
    named |= {"tokens": number, "title": text, "heading": text, "file": text, "digest": text, TERMS: text}
    return pa.schema([*named.items(), ("vector", vector_type(dimensions, precision))])


def text_rows(columns: Mapping[str, Sequence[str]]) -> "pa.Table":
    """Return a table of texts."""
    import pyarrow as pa

    return pa.table({name: pa.array(values, pa.string()) for name, values in columns.items()})


def arrow_rows(chunks: Sequence[Chunk], vectors_ND: np.ndarray, precision: str, analyzer: Analyzer) -> "pa.Table":
    """Return chunks with their vectors, in the precision that the index has, as rows."""
    import pyarrow as pa

    schema = schema_of(vectors_ND.shape[1], precision)
    columns: dict[str, list[Any]] = {
        name: [getattr(one, "end" if name == "stop" else name) for one in chunks] for name in ("id", *FIELDS)
    }
    columns[TERMS] = [terms_of(one, analyzer) for one in chunks]
    kept = quantize(vectors_ND, "ubinary") if precision == BINARY else vectors_ND.astype(precision)
    flat = pa.array(np.ascontiguousarray(kept).ravel())
    arrays = [
        pa.FixedSizeListArray.from_arrays(flat, kept.shape[1]) if one.name == "vector"
        else pa.array(columns[one.name], one.type)
        for one in schema
    ]  # fmt: skip
    return pa.Table.from_arrays(arrays, schema=schema)


def chunks_in(rows: "pa.Table") -> list[Chunk]:
    """Return the chunks in rows."""
    return [Chunk(*values) for values in zip(*(rows.column(name).to_pylist() for name in FIELDS), strict=True)]


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
                lock = acquire_lock(self._folder, self.name, wait=wait)
            except OSError as error:
                raise refused(self.name, str(error.strerror or error)) from error
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
                release_lock(lock)

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


# The column that was indexed before there were terms: what is searched of a chunk, as its author wrote it.
_BEFORE = "words"
_ROWS_AT_ONCE = 10_000
_log = logging.getLogger(__name__)


def analysed_again(table: Any, analyzer: Analyzer, name: str) -> None:
    """Give every chunk its terms, and the table an index of them; vectors stay as they are.

    Args:
        table: the table of chunks; whoever calls holds the lock, where there is one.
        analyzer: what its words are.
        name: the index's, for messages.
    """
    import pyarrow as pa

    if _BEFORE in table.schema.names or TERMS not in table.schema.names:
        _log.warning("%s was written by another version of gerund: its words are indexed again", name)
    else:
        _log.warning("%s: the index of its words was not finished, and is finished now", name)
    if TERMS not in table.schema.names:
        with _shared(lambda: TERMS in table.schema.names):
            table.add_columns(pa.schema([(TERMS, pa.string())]))
    while len(rows := _without_terms(table)):
        ids = rows.column("id").to_pylist()
        terms = [terms_of(one, analyzer) for one in chunks_in(rows)]
        with _shared(partial(_have_terms, table, ids)):
            updates = text_rows({"id": ids, TERMS: terms})
            table.merge_insert("id").when_matched_update_all().execute(updates)
    if _BEFORE in table.schema.names:
        with _shared(lambda: _BEFORE not in table.schema.names):
            table.drop_columns([_BEFORE])
    with _shared(lambda: any(TERMS in index.columns for index in table.list_indices())):
        table.create_index(TERMS, config=word_index())


@contextmanager
def _shared(is_done: Callable[[], bool]) -> Iterator[None]:
    """Let a step fail that another process makes at the same time: on an object store no lock keeps it out."""
    try:
        yield
    except (OSError, RuntimeError, ValueError):
        if not is_done():
            raise


def _have_terms(table: Any, ids: list[str]) -> bool:
    """Whether rows that were the next without terms have them."""
    return bool(_without_terms(table).column("id").to_pylist() != ids)


def _without_terms(table: Any) -> Any:
    """Return the next rows whose words have not been analysed."""
    return table.search().where(f"{TERMS} IS NULL").select(["id", *FIELDS]).limit(_ROWS_AT_ONCE).to_arrow()


_CHARACTERS_OF_A_REASON = 200
# Of a file or a table, not of a column that a filter names.
_MISSING = re.compile(r"not found: \S*\.lance\b|table '\S*' was not found")


def demand_place(folder: Path, sign: str) -> None:
    """Refuse what is there and is no index.

    Args:
        folder: where an index is or will be.
        sign: the name in it by which one is known.

    Raises:
        DataError: it is a file, or holds something else.
        InputError: it may not be read.
    """
    try:
        if folder.exists() and not folder.is_dir():
            raise DataError(f"{folder} is a file; an index is a folder")
        names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    except PermissionError as error:
        raise refused(str(folder), "permission denied") from error
    # Of one whose making was interrupted there are tables and perhaps the lock.
    strangers = sorted(name for name in names if not name.endswith(".lance") and name != "lock")
    if strangers and sign not in names:
        raise DataError(
            f"{folder} is no index: it holds {strangers[0]}; an index is a folder of its own, which "
            f"gerund index PATHS -o my.index makes"
        )


def told(error: Exception, name: str, where: str | None, migrated: Callable[[], bool]) -> GerundError:
    """Return what LanceDB raised as an error of the library.

    Args:
        error: it.
        name: the index's, for the sentence.
        where: the filter of the query that failed.
        migrated: whether another process has put other tables in the place of these.
    """
    reason = _reason(error)
    lower = str(error).lower()
    if any(sign in lower for sign in ("no space left", "disk quota", "permission denied", "read-only file")):
        return refused(name, reason)
    is_missing = _MISSING.search(lower.replace((where or "").lower(), "")) is not None
    if where is not None and not is_missing and "not found" not in lower.split("lance")[0]:
        return bad_filter(where, reason)
    if migrated():
        return StaleIndexError(f"{name} was migrated by another process meanwhile; open it again")
    if is_missing:
        return _missing(name, reason)
    if "panicked" in lower:
        return DataError(f"{name} is damaged; restore it from a copy, or make the index again ({reason})")
    return ResourceError(f"{name}: {reason}")


def _missing(name: str, reason: str) -> DataError:
    if "://" not in name and not Path(name, POINTER_FOLDER).is_dir():
        return DataError(
            f"the index {name} is no longer there: its folder was removed or renamed; put it back, or make it again "
            f"with gerund index PATHS -o {name}"
        )
    return DataError(f"a part of the index {name} is missing; put it back, or make the index again ({reason})")


def refused(name: str, reason: str) -> GerundError:
    """Return the error for a folder that the system does not let be read or written.

    Args:
        name: the index's.
        reason: what the system says.
    """
    full = any(sign in reason.lower() for sign in ("no space left", "quota"))
    if full:
        return ResourceError(f"{name} cannot be written: {reason}; what was stored before is kept")
    return InputError(f"{name} cannot be read or written: {reason}")


def _reason(error: Exception) -> str:
    """Return what an error of LanceDB says to people: without its types, and the places in its code."""
    text = str(error).split(", /")[0].split("\n")[0]
    for start in ("lance error:", "External error:", "LanceError(IO):", "Invalid user input:", "Execution error:"):
        text = text.replace(start, "")
    return one_line(text.strip(" :,."), _CHARACTERS_OF_A_REASON) or type(error).__name__
