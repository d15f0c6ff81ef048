"""The interface of a store of chunks, and what stores share: metadata, keyword queries, cosines.

``lance_store`` stores chunks in a folder, ``memory_store`` in memory. Your own store is a class with the methods of
``VectorStore``.
"""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any, Protocol, Self

import numpy as np

from gerund.errors import ConfigError, DataError
from gerund.quantization import nearest
from gerund.retrieval.documents import Chunk, Chunking
from gerund.retrieval.filters import quoted
from gerund.settings.encoder import RANKING
from gerund.settings.model_spec import ModelSpec

FORMAT = 1
POINTER_FOLDER = "gerund.lance"
"""The table that identifies a folder as an index: its one row names the table of chunks."""

Match = tuple[Chunk, float]
"""A chunk with its BM25 score or its cosine."""

_PHRASE = re.compile(r'["“]([^"“”]*)["”]')


@dataclass(frozen=True)
class IndexMetadata:
    """What an index stores about itself."""

    fingerprint: str
    """Of the encoder."""

    model: str
    """What the encoder was loaded from."""

    dimensions: int

    encoder: str
    """Plan and pooling, for messages."""

    chunking: Chunking

    spec: Mapping[str, Any] | None = None
    """Settings that load the model again; None for a model that was created in memory."""

    space: str = ""
    """Identifies the vectors' space; empty where it is that of this encoder alone."""

    late: str = ""
    """Hash of how token vectors were made; empty where there are none."""

    weight: float | None = None
    """What vectors count in hybrid searches; None for the encoder's weight."""

    def to_json(self) -> str:
        """Return it as JSON."""
        values = {"format": FORMAT, **asdict(self), "chunking": self.chunking.to_dict()}
        return json.dumps(values, ensure_ascii=False, sort_keys=True)

    @classmethod
    def from_json(cls, text: str | bytes, index: str) -> Self:
        """Return what ``to_json`` wrote; ``index`` is its name in messages."""
        try:
            values = json.loads(text)
            version = values.pop("format")
            if version != FORMAT:
                raise DataError(f"{index} has format {version!r}; this version of gerund reads format {FORMAT}")
            return cls(**{**values, "chunking": Chunking.from_dict(values["chunking"])})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{index}: its metadata cannot be read ({error})") from error

    def model_spec(self, index: str) -> ModelSpec:
        """Return the settings that load the model again; ``index`` is the index's name in messages."""
        if self.spec is None:
            raise ConfigError(f"{index} was made with a model in memory ({self.model}); open it with that model")
        # A default may be tuned after the index is created, and is then in the model's folder.
        settings = {name: value for name, value in self.spec.items() if not (name in RANKING and value == "auto")}
        return ModelSpec.model_validate(settings)

    def is_searched_by(self, fingerprint: str, space: str, dimensions: int) -> bool:
        """Whether an encoder's query vectors can be compared with the stored vectors.

        They can for the same encoder, and where both declare the same space: a student and its teacher, or two students
        of one teacher.
        """
        return self.fingerprint == fingerprint or (
            space in (self.fingerprint, self.space) and dimensions == self.dimensions
        )

    @property
    def key(self) -> str:
        """What must be equal for chunks to be in one table."""
        late = [self.late] if self.late else []
        return json.dumps([self.fingerprint, self.dimensions, self.chunking.to_dict(), *late], sort_keys=True)


@dataclass(frozen=True)
class DocumentState:
    """A document's hash, and the file that it came from."""

    digest: str
    file: str


@dataclass(frozen=True)
class KeywordQuery:
    """A query for BM25: the more of the words in ``text`` match the better; every phrase must occur as it is."""

    text: str
    phrases: tuple[str, ...] = ()

    @classmethod
    def of(cls, query: str) -> Self:
        """Split a query into words, and phrases in double quotes.

        >>> KeywordQuery.of('steam "public railway" england')
        KeywordQuery(text='steam england', phrases=('public railway',))
        """
        phrases = tuple(phrase for quote in _PHRASE.findall(query) if (phrase := " ".join(quote.split())))
        return cls(" ".join(_PHRASE.sub(" ", query).replace('"', " ").split()), phrases)


class VectorStore(Protocol):
    """Chunks with their vectors.

    A filter, ``where``, is SQL as ``filters.check_filter`` returns it; one that cannot be used raises ``ConfigError``.
    Query vectors have length 1. ``name`` is the store's name in messages.
    """

    name: str

    def about(self) -> IndexMetadata | None:
        """Return the index's metadata; None where there is no index yet."""

    def create(self, about: IndexMetadata) -> None:
        """Create an empty index, unless there is one."""

    def set_weight(self, weight: float) -> None:
        """Change the metadata's weight."""

    def locked(self) -> AbstractContextManager[None]:
        """Keep other writers out until the block ends, as far as the store can."""

    def documents(self) -> dict[str, DocumentState]:
        """Return the state of every document by its source."""

    def files(self) -> dict[str, str]:
        """Return the hash of every completely indexed file."""

    def replace(
        self,
        sources: Sequence[str],
        chunks: Sequence[Chunk],
        vectors_ND: np.ndarray,
        tokens: Sequence[bytes] | None = None,
    ) -> None:
        """Atomically replace all chunks of documents: a reader sees either the old chunks or the new ones.

        A document without a chunk is removed. ``vectors_ND`` has a vector of length 1 per chunk, and ``tokens``, in an
        index with token vectors (``Chunking.multi``), what ``token_vectors`` returns of it.
        """

    def token_vectors(self, ids: Sequence[str]) -> dict[str, bytes]:
        """Return the stored token vectors of chunks, by the chunk's id; needed for ``Chunking.multi`` only."""

    def note_files(self, digests: Mapping[str, str | None]) -> None:
        """Mark files as completely indexed; None removes the mark."""

    def chunks_of(self, sources: Sequence[str]) -> list[Chunk]:
        """Return all chunks of documents."""

    def words(self, query: KeywordQuery, limit: int, where: str | None = None) -> list[Match]:
        """Return the chunks that BM25 finds, best first; none for a query without a word."""

    def words_with_cosines(
        self, query: KeywordQuery, vector_D: np.ndarray, limit: int, where: str | None = None
    ) -> tuple[list[Match], list[float]]:
        """Return the chunks of ``words``, and the cosine of each chunk's vector and the query vector."""

    def vectors(self, vector_D: np.ndarray, limit: int, where: str | None = None) -> list[Match]:
        """Return the chunks whose vectors are nearest to the query vector, best first."""

    def count(self) -> int:
        """Return the number of chunks."""

    def tidy(self) -> None:
        """Optimize the store for reading."""

    def is_tidy(self) -> bool:
        """Whether ``tidy`` completed since the last change."""

    def finish(self) -> bool:
        """Run ``tidy`` after a writer that was killed before it, unless another writes; tells whether it ran."""

    def create_successor(self, about: IndexMetadata) -> Self:
        """Return a store that can replace this one: empty, or as an interrupted migration left it."""

    def swap(self, other: Self) -> None:
        """Atomically replace this store by its successor."""

    def drop_others(self) -> None:
        """Drop unused successors, and what an interrupted ``swap`` left."""


def to_bytes(vectors_TE: np.ndarray) -> bytes:
    """Return token vectors ``(T, E)`` int8 as they are stored: the number of dimensions, then all numbers.

    >>> from_bytes(to_bytes(np.array([[1, -2], [3, 4]], dtype=np.int8))).tolist()
    [[1, -2], [3, 4]]
    """
    return np.array([vectors_TE.shape[1]], dtype="<u4").tobytes() + np.ascontiguousarray(vectors_TE).tobytes()


def from_bytes(stored: bytes) -> np.ndarray:
    """Return what ``to_bytes`` stored."""
    [dimensions] = np.frombuffer(stored[:4], dtype="<u4")
    return np.frombuffer(stored[4:], dtype=np.int8).reshape(-1, dimensions)


def nearest_bits(query_D: np.ndarray, bits_NC: np.ndarray, limit: int) -> tuple[list[int], list[float]]:
    """Return the rows of the binary vectors that are nearest to a query, best first, and their cosines.

    Four times as many candidates by Hamming distance are rescored with the query's float values.
    """
    if not len(bits_NC):
        return [], []
    rows_1K, products_1K = nearest(query_D[None], bits_NC, "ubinary", limit)
    # A vector of ones and minus ones has the square root of its dimensions as its length.
    return rows_1K[0].tolist(), (products_1K[0] / np.sqrt(len(query_D))).tolist()


def cosines_with(query_D: np.ndarray, stored_NC: np.ndarray) -> list[float]:
    """Return the cosines of a query vector of length 1 and stored vectors, which are floats or bits."""
    query_D = np.asarray(query_D, dtype=np.float32)
    if stored_NC.dtype != np.uint8:
        cosines_N = stored_NC.astype(np.float32) @ query_D
    else:
        signs_ND = np.unpackbits(stored_NC, axis=1, count=len(query_D)).astype(np.float32) * 2 - 1
        cosines_N = signs_ND @ query_D / np.sqrt(len(query_D))
    return [float(cosine) for cosine in cosines_N]


def one_of_sources(sources: Sequence[str]) -> str:
    """Return the SQL condition that a row belongs to one of these documents."""
    return f"source IN ({', '.join(map(quoted, sources))})"
