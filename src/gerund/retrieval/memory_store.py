"""Store chunks in memory, with BM25 by SQLite and exact vector search by dot products.

For small collections, for ranking the sentences of an answer, and as the reference in tests of other stores. It works
without the ``index`` extra, and its BM25 scores are those of SQLite, so LanceDB in memory could not replace it.
"""

import re
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, replace
from functools import lru_cache
from typing import Any, Self

import numpy as np

from gerund.quantization import quantize
from gerund.retrieval.documents import BINARY, Chunk
from gerund.retrieval.filters import bad_filter
from gerund.retrieval.store import (
    DocumentState,
    IndexMetadata,
    KeywordQuery,
    Match,
    cosines_with,
    nearest_bits,
    one_of_sources,
)
from gerund.text_analysis import Analyzer

_FIELDS = "source, start, stop, text, number, tokens, title, heading, file, digest"


def _is_like(pattern: str, text: str) -> bool:
    r"""Whether a text matches a pattern of LIKE: ``%``, ``_``, and a backslash before a literal character."""
    return _like_pattern(pattern).fullmatch(text) is not None


@lru_cache(maxsize=64)
def _like_pattern(pattern: str) -> re.Pattern[str]:
    parts = [""]
    for sign in re.findall(r"\\?.", pattern, re.DOTALL):
        if sign == "%":
            parts.append("")
        else:
            parts[-1] += "." if sign == "_" else re.escape(sign[-1])
    first, *middle, last = parts if len(parts) > 1 else [*parts, ""]
    # The first place where a part matches leaves the most room for the rest, so no other is tried (atomic groups):
    # the time stays proportional to text times pattern.
    groups = "".join(f"(?>.*?{part})" for part in middle if part)
    return re.compile(f"{first}{groups}.*{last}" if len(parts) > 1 else first, re.DOTALL)


# Functions that SQLite lacks, or has for ASCII letters only.
_FILTER_FUNCTIONS: tuple[tuple[str, int, Callable[..., Any]], ...] = (
    ("like", 2, _is_like),
    ("lower", 1, str.lower),
    ("upper", 1, str.upper),
    ("length", 1, len),
    ("starts_with", 2, str.startswith),
    ("ends_with", 2, str.endswith),
    ("contains", 2, str.__contains__),
)


class _Database(sqlite3.Connection):
    """Closes itself when it is garbage-collected; since Python 3.13 an open connection would give a warning."""

    def __del__(self) -> None:
        self.close()


class MemoryStore:
    """Chunks in memory; the methods are those of ``store.VectorStore``."""

    def __init__(self, name: str = "the index in memory") -> None:
        self.name = name
        self._lock = threading.RLock()
        self._about: IndexMetadata | None = None
        self._db = sqlite3.connect(":memory:", check_same_thread=False, factory=_Database)
        for function_name, n_arguments, function in _FILTER_FUNCTIONS:
            self._db.create_function(function_name, n_arguments, function, deterministic=True)
        self._files: dict[str, str] = {}
        self._rows = np.zeros(0, dtype=np.int64)
        self._vectors_ND = np.zeros((0, 0), dtype=np.float32)
        self._tokens: dict[str, dict[str, bytes]] = {}  # by source and id

    def about(self) -> IndexMetadata | None:
        return self._about

    def create(self, about: IndexMetadata) -> None:
        with self._lock:
            if self._about is None:
                self._about = about
                self._vectors_ND = self._stored(np.zeros((0, about.dimensions), dtype=np.float32))
                self._db.execute(
                    "CREATE TABLE chunks (source TEXT, start INT, stop INT, text TEXT, number INT, tokens INT, "
                    "title TEXT, heading TEXT, file TEXT, digest TEXT)"
                )
                # Terms are letters and digits, which this tokenizer neither splits nor changes.
                self._db.execute("CREATE VIRTUAL TABLE words USING fts5(terms, tokenize='ascii')")

    def set_weight(self, weight: float) -> None:
        assert self._about is not None
        self._about = replace(self._about, weight=weight)

    @contextmanager
    def locked(self) -> Iterator[None]:
        with self._lock:
            yield

    def documents(self) -> dict[str, DocumentState]:
        if self._about is None:
            return {}
        rows = self._fetch("SELECT source, digest, file FROM chunks WHERE number = 0")
        return {source: DocumentState(digest, file) for source, digest, file in rows}

    def files(self) -> dict[str, str]:
        return dict(self._files)

    def replace(
        self,
        sources: Sequence[str],
        chunks: Sequence[Chunk],
        vectors_ND: np.ndarray,
        tokens: Sequence[bytes] | None = None,
    ) -> None:
        if not sources:
            return
        with self._lock:
            assert self._about is not None
            # All that can fail is computed first, and SQLite undoes what an interruption leaves half done.
            terms = [" ".join(self._analyzer.document(chunk.indexed_text)) for chunk in chunks]
            new_ND = np.asarray(vectors_ND, dtype=np.float32).reshape(len(chunks), self._about.dimensions)
            new_ND = self._stored(new_ND)
            kept = {source: stored for source, stored in self._tokens.items() if source not in set(sources)}
            for chunk, stored in zip(chunks, tokens or (), strict=tokens is not None):
                kept.setdefault(chunk.source, {})[chunk.id] = stored
            with self._db:
                remains, new = self._replace_rows(sources, chunks, terms)
            self._rows, self._vectors_ND, self._tokens = (
                np.concatenate([self._rows[remains], np.array(new, dtype=np.int64)]),
                np.concatenate([self._vectors_ND[remains], new_ND]),
                kept,
            )

    def _replace_rows(
        self, sources: Sequence[str], chunks: Sequence[Chunk], terms: Sequence[str]
    ) -> tuple[np.ndarray, list[int]]:
        """Replace the rows of documents; return which of ``_rows`` remain, and the new rows."""
        old = self._fetch(f"SELECT rowid FROM chunks WHERE {one_of_sources(sources)}")
        self._db.executemany("DELETE FROM chunks WHERE rowid = ?", old)
        self._db.executemany("DELETE FROM words WHERE rowid = ?", old)
        new = []
        for chunk, of_chunk in zip(chunks, terms, strict=True):
            values = astuple(chunk)  # in the order of the columns
            marks = ", ".join("?" * len(values))
            row = self._db.execute(f"INSERT INTO chunks VALUES ({marks})", values).lastrowid
            self._db.execute("INSERT INTO words (rowid, terms) VALUES (?, ?)", (row, of_chunk))
            assert row is not None
            new.append(row)
        return ~np.isin(self._rows, [row for (row,) in old]), new

    def token_vectors(self, ids: Sequence[str]) -> dict[str, bytes]:
        wanted = set(ids)
        return {
            key: stored for of_source in self._tokens.values() for key, stored in of_source.items() if key in wanted
        }

    def note_files(self, digests: Mapping[str, str | None]) -> None:
        files = {**self._files, **digests}
        self._files = {file: digest for file, digest in files.items() if digest is not None}

    def chunks_of(self, sources: Sequence[str]) -> list[Chunk]:
        if not sources:
            return []
        rows = self._fetch(f"SELECT {_FIELDS} FROM chunks WHERE {one_of_sources(sources)} ORDER BY source, start")
        return [Chunk(*row) for row in rows]

    def words(self, query: KeywordQuery, limit: int, where: str | None = None) -> list[Match]:
        return [match for match, _ in self._by_words(query, limit, where)]

    def _by_words(self, query: KeywordQuery, limit: int, where: str | None) -> list[tuple[Match, int]]:
        """Return the chunks that BM25 finds, each with its row."""
        if self._about is None or not (expression := _fts_expression(query, self._analyzer)):
            return []
        fields = ", ".join(f"chunks.{name.strip()}" for name in _FIELDS.split(","))
        condition = "" if where is None else f"AND chunks.rowid IN (SELECT rowid FROM chunks WHERE ({where}))"
        # FTS5's bm25 is negative, so that the best comes first in ascending order.
        rows = self._fetch(
            f"SELECT {fields}, -bm25(words), chunks.rowid FROM words JOIN chunks ON chunks.rowid = words.rowid "
            f"WHERE words MATCH ? {condition} ORDER BY bm25(words), chunks.rowid LIMIT ?",
            (expression, limit),
            where,
        )
        return [((Chunk(*values), float(score)), row) for *values, score, row in rows]

    def words_with_cosines(
        self, query: KeywordQuery, vector_D: np.ndarray, limit: int, where: str | None = None
    ) -> tuple[list[Match], list[float]]:
        with self._lock:
            matches = self._by_words(query, limit, where)
            place = {int(row): place for place, row in enumerate(self._rows)} if matches else {}
            vectors_ND = self._vectors_ND[[place[row] for _, row in matches]]
        return [match for match, _ in matches], cosines_with(vector_D, vectors_ND)

    def vectors(self, vector_D: np.ndarray, limit: int, where: str | None = None) -> list[Match]:
        with self._lock:  # until the chunks are read, so that none of them is replaced in between
            return self._nearest(np.asarray(vector_D, dtype=np.float32), limit, where) if self.count() else []

    def _nearest(self, query_D: np.ndarray, limit: int, where: str | None) -> list[Match]:
        rows, vectors_ND = self._rows, self._vectors_ND
        if where is not None:
            filtered = [row for (row,) in self._fetch(f"SELECT rowid FROM chunks WHERE ({where})", (), where)]
            is_filtered = np.isin(rows, filtered)
            rows, vectors_ND = rows[is_filtered], vectors_ND[is_filtered]
        if self._is_binary:
            places, scores = nearest_bits(query_D, vectors_ND, limit)
        else:
            cosine_N = vectors_ND.astype(np.float32) @ query_D
            places = np.argsort(-cosine_N, kind="stable")[:limit].tolist()
            scores = cosine_N[places].tolist()
        nearest = rows[places].tolist()
        listed = ", ".join(map(str, nearest))
        by_row = {
            row: Chunk(*values)
            for row, *values in self._fetch(f"SELECT rowid, {_FIELDS} FROM chunks WHERE rowid IN ({listed})")
        }
        return [(by_row[row], score) for row, score in zip(nearest, scores, strict=True)]

    def count(self) -> int:
        return len(self._rows)

    def is_tidy(self) -> bool:
        return True

    def finish(self) -> bool:
        return False

    def tidy(self) -> None:
        """Do nothing: memory needs no optimization."""

    def create_successor(self, about: IndexMetadata) -> Self:
        other = type(self)(self.name)
        other.create(about)
        return other

    def drop_others(self) -> None:
        """Do nothing: a successor that is not used is garbage-collected."""

    def swap(self, other: Self) -> None:
        with self._lock:
            self._about, self._db, self._files = other._about, other._db, other._files
            self._rows, self._vectors_ND, self._tokens = other._rows, other._vectors_ND, other._tokens

    @property
    def _analyzer(self) -> Analyzer:
        assert self._about is not None
        return Analyzer(self._about.chunking.language)

    @property
    def _is_binary(self) -> bool:
        return self._about is not None and self._about.chunking.precision == BINARY

    def _stored(self, vectors_ND: np.ndarray) -> np.ndarray:
        """Return vectors as they are stored: floats, or bytes of eight bits each."""
        assert self._about is not None
        precision = self._about.chunking.precision
        return np.asarray(quantize(vectors_ND, "ubinary") if self._is_binary else vectors_ND.astype(precision))

    def _fetch(self, sql: str, values: Sequence[object] = (), where: str | None = None) -> list[Any]:
        try:
            with self._lock:
                return self._db.execute(sql, values).fetchall()
        except (sqlite3.Error, sqlite3.Warning) as error:
            if where is None:
                raise
            raise bad_filter(where, str(error)) from error


def _fts_expression(query: KeywordQuery, analyzer: Analyzer) -> str:
    """Return a query in the language of FTS5, every term quoted; empty for a query without a word."""
    words = [f'"{term}"' for term in analyzer.query(query.text)]
    phrases = [f'"{terms}"' for phrase in query.phrases if (terms := " ".join(analyzer.phrase(phrase)))]
    if not phrases:
        return " OR ".join(words)
    # Next to a phrase, words are optional: OR with a phrase, which is there anyway, counts a word where it occurs.
    optional = [f"({' OR '.join([*words, phrases[0]])})"] if words else []
    return " AND ".join([*phrases, *optional])
