"""What an index needs of a store of chunks: vectors, full text, and documents that are replaced in one step.

``lance_store`` keeps one in a folder, ``memory_store`` in memory. Another one is a class with these methods.

Knows: chunks, what an index says about itself, how a query is divided into words and phrases. Does not know: models,
files, how anything is stored.
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
from gerund.settings.model_spec import ModelSpec

FORMAT = 1
POINTER_FOLDER = "gerund.lance"
"""By which an index in a folder is known: the table of one row, which names the chunks."""

Found = tuple[Chunk, float]
"""A chunk, and BM25's score or the cosine."""


@dataclass(frozen=True)
class About:
    """What an index says about itself.

    Attributes:
        fingerprint: of the encoder.
        model: what the encoder was loaded from.
        dimensions: numbers in a vector.
        encoder: its plan and pooling, for messages.
        chunking: how documents are cut and embedded.
        spec: what loads the model again; None for one that was made in memory.
        space: what tells the vectors' space from others; empty where it is that of the encoder alone.
    """

    fingerprint: str
    model: str
    dimensions: int
    encoder: str
    chunking: Chunking
    spec: Mapping[str, Any] | None = None
    space: str = ""

    def to_json(self) -> str:
        """Return it as JSON."""
        own = {"format": FORMAT, **asdict(self), "chunking": self.chunking.to_dict()}
        return json.dumps(own, ensure_ascii=False, sort_keys=True)

    @classmethod
    def from_json(cls, text: str | bytes, where: str) -> Self:
        """Return what ``to_json`` wrote.

        Args:
            text: it.
            where: what messages call the index.

        Raises:
            DataError: it is something else, or of a newer version.
        """
        try:
            values = json.loads(text)
            version = values.pop("format")
            if version != FORMAT:
                raise DataError(f"{where} has format {version!r}; this version of gerund reads format {FORMAT}")
            return cls(**{**values, "chunking": Chunking.from_dict(values["chunking"])})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{where}: what it says about itself cannot be read ({error})") from error

    def model_spec(self, where: str) -> ModelSpec:
        """Return what loads the model again.

        Args:
            where: what messages call the index.

        Raises:
            ConfigError: it was made in memory, so nothing says where it comes from.
        """
        if self.spec is None:
            raise ConfigError(f"{where} was made with a model in memory ({self.model}); open it with that model")
        # What is usual may be tuned after the index is made, and is then what the model's folder says.
        settings = {name: value for name, value in self.spec.items() if (name, value) != ("fusion", "auto")}
        return ModelSpec.model_validate(settings)

    def is_searched_by(self, fingerprint: str, space: str, dimensions: int) -> bool:
        """Tell whether an encoder's vectors of queries can be compared with those in here.

        They can where it is the very encoder, and where both declare the same space: a student and its teacher, or
        two students of one.

        Args:
            fingerprint: of the encoder.
            space: of its vectors, ``lm.space``.
            dimensions: numbers of a vector.
        """
        return self.fingerprint == fingerprint or (
            space in (self.fingerprint, self.space) and dimensions == self.dimensions
        )

    @property
    def key(self) -> str:
        """What must be equal for chunks to lie in one table."""
        return json.dumps([self.fingerprint, self.dimensions, self.chunking.to_dict()], sort_keys=True)


@dataclass(frozen=True)
class DocumentState:
    """What a store knows about a document: its hash, and the file that it came from."""

    digest: str
    file: str


@dataclass(frozen=True)
class Words:
    """The words of a query.

    Attributes:
        text: words of which as many as possible are wanted.
        phrases: words that must stand one behind the other, as they are here.
    """

    text: str
    phrases: tuple[str, ...] = ()

    @classmethod
    def of(cls, query: str) -> Self:
        """Divide a query; what stands in double quotes is a phrase.

        >>> Words.of('steam "public railway" england')
        Words(text='steam england', phrases=('public railway',))
        """
        phrases = tuple(found for one in _PHRASE.findall(query) if (found := " ".join(one.split())))
        return cls(" ".join(_PHRASE.sub(" ", query).replace('"', " ").split()), phrases)


_PHRASE = re.compile(r'["“]([^"“”]*)["”]')


class VectorStore(Protocol):
    """Chunks with their vectors.

    A filter, ``where``, is SQL as ``filters.check_filter`` returns it.

    Attributes:
        name: what messages call it.
    """

    name: str

    def about(self) -> About | None:
        """Return what the index says about itself; None where there is none yet."""

    def create(self, about: About) -> None:
        """Make an empty index, unless it is there."""

    def locked(self) -> AbstractContextManager[None]:
        """Keep other writers out until the block ends, as far as the store can."""

    def documents(self) -> dict[str, DocumentState]:
        """Return what is known about every document, by its source."""

    def files(self) -> dict[str, str]:
        """Return the hash of every file that was indexed to its end."""

    def replace(self, sources: Sequence[str], chunks: Sequence[Chunk], vectors_ND: np.ndarray) -> None:
        """Let documents have exactly these chunks, in one step: a reader sees the old ones or the new ones.

        Args:
            sources: the documents; one without a chunk here is removed.
            chunks: all of their chunks.
            vectors_ND: a vector of length 1 for each chunk.
        """

    def note_files(self, digests: Mapping[str, str | None]) -> None:
        """Note that files were indexed to their end; None forgets one."""

    def chunks_of(self, sources: Sequence[str]) -> list[Chunk]:
        """Return all chunks of documents."""

    def words(self, query: Words, limit: int, where: str | None = None) -> list[Found]:
        """Return the chunks that BM25 finds, best first; none for a query without a word.

        Raises:
            ConfigError: the filter cannot be used.
        """

    def words_with_cosines(
        self, query: Words, vector_D: np.ndarray, limit: int, where: str | None = None
    ) -> tuple[list[Found], list[float]]:
        """Return what ``words`` does, and the cosine of each of these chunks' vectors with a vector of length 1.

        Raises:
            ConfigError: the filter cannot be used.
        """

    def vectors(self, vector_D: np.ndarray, limit: int, where: str | None = None) -> list[Found]:
        """Return the chunks whose vectors are nearest to a vector of length 1, best first.

        Raises:
            ConfigError: the filter cannot be used.
        """

    def count(self) -> int:
        """Return how many chunks there are."""

    def tidy(self) -> None:
        """Put what was written into the shape that is quickest to read."""

    def is_tidy(self) -> bool:
        """Whether ``tidy`` was run to its end since the last change."""

    def finish(self) -> bool:
        """Tidy up after a writer that was ended before it did, if nobody is writing; tells whether it was done."""

    def beside(self, about: About) -> Self:
        """Return an empty store, or what an earlier call left, that may take the place of this one."""

    def swap(self, other: Self) -> None:
        """Let what ``beside`` returned take this one's place, in one step."""

    def drop_others(self) -> None:
        """Drop what ``beside`` returned and took no place, and what ``swap`` left when it was killed."""


def nearest_bits(query_D: np.ndarray, bits_NC: np.ndarray, limit: int) -> tuple[list[int], list[float]]:
    """Return which vectors that are stored as bits are nearest to a query, best first, and the cosines with them.

    The nearest by the bits that differ, four times as many as are wanted, are put into order by the query's numbers.
    """
    if not len(bits_NC):
        return [], []
    places_1K, products_1K = nearest(query_D[None], bits_NC, "ubinary", limit)
    # A vector of ones and minus ones is as long as the root of how many they are.
    return places_1K[0].tolist(), (products_1K[0] / np.sqrt(len(query_D))).tolist()


def cosines_with(query_D: np.ndarray, stored_NC: np.ndarray) -> list[float]:
    """Return the cosines of a query's vector, of length 1, with vectors as they are stored: numbers, or bits."""
    query_D = np.asarray(query_D, dtype=np.float32)
    if stored_NC.dtype != np.uint8:
        cosines_N = stored_NC.astype(np.float32) @ query_D
    else:
        signs_ND = np.unpackbits(stored_NC, axis=1, count=len(query_D)).astype(np.float32) * 2 - 1
        cosines_N = signs_ND @ query_D / np.sqrt(len(query_D))
    return [float(one) for one in cosines_N]


def one_of_sources(sources: Sequence[str]) -> str:
    """Return the condition that a row is of one of these documents."""
    return f"source IN ({', '.join(map(quoted, sources))})"
