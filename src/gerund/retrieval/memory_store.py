"""A store of chunks in memory: SQLite's full text, and the product of all vectors with the query's.

For tests, for what is too small for a folder, and as the slow, obvious way that other stores are compared with.

Knows: SQLite, numpy. Does not know: models, files.
"""

import re
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Self

import numpy as np

from gerund.quantization import quantize
from gerund.retrieval.documents import BINARY, Chunk
from gerund.retrieval.filters import bad_filter
from gerund.retrieval.store import (
    About,
    DocumentState,
    Found,
    Words,
    cosines_with,
    nearest_bits,
    one_of_sources,
)
from gerund.text_analysis import Analyzer

_FIELDS = "source, start, stop, text, number, tokens, title, heading, file, digest"


def _is_like(pattern: str, text: str) -> bool:
    r"""Tell whether a text is like a pattern of LIKE: ``%``, ``_``, and a backslash before what is meant as it is."""
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
    # The first place where a part stands leaves the most room for the rest: no other one is ever tried, so that a
    # pattern of many parts takes no longer than its text is long, times the pattern.
    found = "".join(f"(?>.*?{part})" for part in middle if part)
    return re.compile(f"{first}{found}.*{last}" if len(parts) > 1 else first, re.DOTALL)


# What SQLite has not, or has for the letters of English alone, and LanceDB for all.
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
    """Is closed by being forgotten, as an index in memory is; since Python 3.13 an open one is warned of."""

    def __del__(self) -> None:
        self.close()


class MemoryStore:
    """Chunks in memory."""

    def __init__(self, name: str = "the index in memory") -> None:
        self.name = name
        self._lock = threading.RLock()
        self._about: About | None = None
        self._db = sqlite3.connect(":memory:", check_same_thread=False, factory=_Database)
        for called, takes, function in _FILTER_FUNCTIONS:
            self._db.create_function(called, takes, function, deterministic=True)
        self._files: dict[str, str] = {}
        self._rows = np.zeros(0, dtype=np.int64)
        self._vectors_ND = np.zeros((0, 0), dtype=np.float32)

    def about(self) -> About | None:
        """Return what the index says about itself; None where there is none yet."""
        return self._about

    def create(self, about: About) -> None:
        """Make an empty index, unless it is there."""
        with self._lock:
            if self._about is None:
                self._about = about
                self._vectors_ND = self._kept(np.zeros((0, about.dimensions), dtype=np.float32))
                self._db.execute(
                    "CREATE TABLE chunks (source TEXT, start INT, stop INT, text TEXT, number INT, tokens INT, "
                    "title TEXT, heading TEXT, file TEXT, digest TEXT)"
                )
                # Terms are letters and digits, between which this tokenizer puts no border and changes nothing.
                self._db.execute("CREATE VIRTUAL TABLE words USING fts5(terms, tokenize='ascii')")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other threads from writing until the block ends."""
        with self._lock:
            yield

    def documents(self) -> dict[str, DocumentState]:
        """Return what is known about every document, by its source."""
        if self._about is None:
            return {}
        rows = self._fetch("SELECT source, digest, file FROM chunks WHERE number = 0")
        return {source: DocumentState(digest, file) for source, digest, file in rows}

    def files(self) -> dict[str, str]:
        """Return the hash of every file that was indexed to its end."""
        return dict(self._files)

    def replace(self, sources: Sequence[str], chunks: Sequence[Chunk], vectors_ND: np.ndarray) -> None:
        """Let documents have exactly these chunks, in one step."""
        if not sources:
            return
        with self._lock:
            old = [row for (row,) in self._fetch(f"SELECT rowid FROM chunks WHERE {one_of_sources(sources)}")]
            numbers = [(row,) for row in old]
            self._db.executemany("DELETE FROM chunks WHERE rowid = ?", numbers)
            self._db.executemany("DELETE FROM words WHERE rowid = ?", numbers)
            kept = ~np.isin(self._rows, old)
            new = []
            for one in chunks:
                values = [one.source, one.start, one.end, one.text, one.number, one.tokens]
                values += [one.title, one.heading, one.file, one.digest]
                marks = ", ".join("?" * len(values))
                row = self._db.execute(f"INSERT INTO chunks VALUES ({marks})", values).lastrowid
                terms = " ".join(self._analyzer.document(one.indexed_text))
                self._db.execute("INSERT INTO words (rowid, terms) VALUES (?, ?)", (row, terms))
                new.append(row)
            assert self._about is not None
            new_ND = self._kept(np.asarray(vectors_ND, dtype=np.float32).reshape(len(new), self._about.dimensions))
            self._rows = np.concatenate([self._rows[kept], np.array(new, dtype=np.int64)])
            self._vectors_ND = np.concatenate([self._vectors_ND[kept], new_ND])

    def note_files(self, digests: Mapping[str, str | None]) -> None:
        """Note that files were indexed to their end; None forgets one."""
        for file, digest in digests.items():
            if digest is None:
                self._files.pop(file, None)
            else:
                self._files[file] = digest

    def chunks_of(self, sources: Sequence[str]) -> list[Chunk]:
        """Return all chunks of documents."""
        if not sources:
            return []
        rows = self._fetch(f"SELECT {_FIELDS} FROM chunks WHERE {one_of_sources(sources)} ORDER BY source, start")
        return [Chunk(*row) for row in rows]

    def words(self, query: Words, limit: int, where: str | None = None) -> list[Found]:
        """Return the chunks that BM25 finds, best first; none for a query without a word."""
        return [one for one, _ in self._by_words(query, limit, where)]

    def _by_words(self, query: Words, limit: int, where: str | None) -> list[tuple[Found, int]]:
        """Return the chunks that BM25 finds, each with its row."""
        if self._about is None:
            return []
        wanted = _match(query, self._analyzer)
        if not wanted:
            return []
        fields = ", ".join(f"chunks.{name.strip()}" for name in _FIELDS.split(","))
        condition = "" if where is None else f"AND chunks.rowid IN (SELECT rowid FROM chunks WHERE ({where}))"
        # What FTS5 calls bm25 is its negative, so that the best comes first in the usual order.
        rows = self._fetch(
            f"SELECT {fields}, -bm25(words), chunks.rowid FROM words JOIN chunks ON chunks.rowid = words.rowid "
            f"WHERE words MATCH ? {condition} ORDER BY bm25(words), chunks.rowid LIMIT ?",
            (wanted, limit),
            where,
        )
        return [((Chunk(*own), float(score)), row) for *own, score, row in rows]

    def words_with_cosines(
        self, query: Words, vector_D: np.ndarray, limit: int, where: str | None = None
    ) -> tuple[list[Found], list[float]]:
        """Return what ``words`` does, and the cosine of each of these chunks' vectors with a vector of length 1."""
        with self._lock:
            found = self._by_words(query, limit, where)
            place_of = {int(row): place for place, row in enumerate(self._rows)} if found else {}
            vectors_ND = self._vectors_ND[[place_of[row] for _, row in found]]
        return [one for one, _ in found], cosines_with(vector_D, vectors_ND)

    def vectors(self, vector_D: np.ndarray, limit: int, where: str | None = None) -> list[Found]:
        """Return the chunks whose vectors are nearest to a vector of length 1, best first."""
        if not self.count():
            return []
        with self._lock:
            rows, vectors_ND = self._rows, self._vectors_ND
        if where is not None:
            kept = np.isin(
                rows, [row for (row,) in self._fetch(f"SELECT rowid FROM chunks WHERE ({where})", (), where)]
            )
            rows, vectors_ND = rows[kept], vectors_ND[kept]
        own_D = np.asarray(vector_D, dtype=np.float32)
        if self._is_binary:
            places, scores = nearest_bits(own_D, vectors_ND, limit)
        else:
            cosine_N = vectors_ND.astype(np.float32) @ own_D
            places = np.argsort(-cosine_N, kind="stable")[:limit].tolist()
            scores = cosine_N[places].tolist()
        found = []
        for place, score in zip(places, scores, strict=True):
            [row] = self._fetch(f"SELECT {_FIELDS} FROM chunks WHERE rowid = ?", (int(rows[place]),))
            found.append((Chunk(*row), score))
        return found

    def count(self) -> int:
        """Return how many chunks there are."""
        return len(self._rows)

    def is_tidy(self) -> bool:
        """Return True: there is nothing to put into shape."""
        return True

    def finish(self) -> bool:
        """Return False: there is nothing to put into shape."""
        return False

    def tidy(self) -> None:
        """Do nothing: there is nothing to put into shape."""

    def beside(self, about: About) -> Self:
        """Return an empty store that may take the place of this one."""
        other = type(self)(self.name)
        other.create(about)
        return other

    def drop_others(self) -> None:
        """Do nothing: nothing is left beside it."""

    def swap(self, other: Self) -> None:
        """Let what ``beside`` returned take this one's place."""
        with self._lock:
            self._about, self._db, self._files = other._about, other._db, other._files
            self._rows, self._vectors_ND = other._rows, other._vectors_ND

    @property
    def _analyzer(self) -> Analyzer:
        assert self._about is not None
        return Analyzer(self._about.chunking.language)

    @property
    def _is_binary(self) -> bool:
        return self._about is not None and self._about.chunking.precision == BINARY

    def _kept(self, vectors_ND: np.ndarray) -> np.ndarray:
        """Return vectors as they are kept: numbers, or bytes of eight bits each."""
        assert self._about is not None
        kept = quantize(vectors_ND, "ubinary") if self._is_binary else vectors_ND.astype(self._about.chunking.precision)
        return np.asarray(kept)

    def _fetch(self, sql: str, values: Sequence[object] = (), where: str | None = None) -> list[Any]:
        try:
            with self._lock:
                return self._db.execute(sql, values).fetchall()
        except (sqlite3.Error, sqlite3.Warning) as error:
            if where is None:
                raise
            raise bad_filter(where, str(error)) from error


def _match(query: Words, analyzer: Analyzer) -> str:
    """Return a query in the language of FTS5, every term quoted; empty for one without a word."""
    words = [f'"{term}"' for term in analyzer.query(query.text)]
    phrases = [" ".join(analyzer.phrase(one)) for one in query.phrases]
    must = [f'"{one}"' for one in phrases if one]
    if not must:
        return " OR ".join(words)
    # A word beside a phrase is a wish: OR with the phrases that are there in any case counts it where it is.
    wishes = [f"({' OR '.join([*words, must[0]])})"] if words else []
    return " AND ".join([*must, *wishes])
