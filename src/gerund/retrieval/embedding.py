"""Embed chunks and queries: each chunk on its own, or from one pass over its document (late chunking)."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from gerund.errors import ConfigError
from gerund.inference.text_ids import encode_texts
from gerund.jobs.engine import JobEngine, StatefulWork, WorkerPool
from gerund.progress import counted_as, progress
from gerund.retrieval.documents import Chunk, Chunking
from gerund.retrieval.indexing import Embed, Embedded
from gerund.retrieval.store import to_bytes
from gerund.settings.encoder import EncoderConfig
from gerund.settings.templates import templates_around
from gerund.text_analysis import joined_lines
from gerund.types import TextModel
from gerund.worker_model import WorkerModel

if TYPE_CHECKING:
    from gerund.inference.sentence_encoder import SentenceEncoder
    from gerund.retrieval.index import Index

QUERY, DOCUMENT = "query", "document"
"""Names of the prompts that an encoder may have for the two."""

# Special tokens, and tokens of the whitespace between chunks and of a space before a text.
_SPARE = 8


class Embedder:
    """Embeds queries and chunks with a model; raises ``ConfigError`` where the model does not support the chunking."""

    def __init__(self, lm: "TextModel | SentenceEncoder", chunking: Chunking) -> None:
        self.lm = lm
        self.chunking = chunking
        self._prompts = {job: job if job in lm.encoder.prompts else None for job in (QUERY, DOCUMENT)}
        self._room = _room(lm, self._prompts[DOCUMENT])
        if self._room is not None and chunking.tokens > self._room:
            raise ConfigError(
                f"chunks of {chunking.tokens} tokens do not fit {lm.name}, which has room for {self._room}; "
                "choose smaller ones"
            )
        if chunking.late and not hasattr(lm, "encode_spans"):
            raise ConfigError(f"{lm.name} gives one vector for a whole text; embed chunks early (leave out late)")
        if chunking.multi and not hasattr(lm, "token_reader"):
            raise ConfigError(f"{lm.name} gives one vector for a whole text, and none for each token (leave out multi)")
        if chunking.late and len(lm.encoder.templates) > 1:
            raise ConfigError(
                f"the template {lm.encoder.template!r} reads a text {len(lm.encoder.templates)} times, so no chunk can "
                "be pooled from one pass; embed chunks early"
            )

    def queries(self, texts: Sequence[str]) -> np.ndarray:
        """Return a vector of length 1 for each query, ``(n, D)`` float32; zeros for one without a character."""
        return self._encode(texts, QUERY)

    def sentences(self, texts: Sequence[str]) -> np.ndarray:
        """Return a vector of length 1 for each sentence of a document, ``(n, D)`` float32."""
        return self._encode(texts, DOCUMENT)

    def chunks(self, documents: Sequence[Sequence[Chunk]]) -> np.ndarray:
        """Return a vector of length 1 per chunk, document after document, ``(n, D)`` float32.

        ``documents`` has all chunks of each document, in order.
        """
        if not self.chunking.late:
            return self._encode([self._text(chunk) for chunks in documents for chunk in chunks], DOCUMENT)
        windows = [window for chunks in documents for window in self._windows(chunks)]
        if not windows:
            return np.zeros((0, self.lm.dimensions), dtype=np.float32)
        texts, spans = [window.text for window in windows], [window.spans for window in windows]
        name = self._prompts[DOCUMENT]
        lm = cast("TextModel", self.lm)  # as ``__init__`` has checked
        vectors = lm.encode_spans(texts, spans, None, True, show_progress=False, prompt_name=name)
        return np.concatenate(
            [vectors_SD[window.repeated :] for window, vectors_SD in zip(windows, vectors, strict=True)]
        )

    def embedded(self, documents: Sequence[Sequence[Chunk]]) -> Embedded:
        """Return the vectors of chunks, and their token vectors where the index has some."""
        if not self.chunking.multi:
            return Embedded(self.chunks(documents))
        from gerund.inference.encode.multi import rounded  # which imports torch

        # The model reads every chunk twice, and both passes take about as long.
        with counted_as(0.5):
            vectors_ND = self.chunks(documents)
        lm = cast("TextModel", self.lm)
        reader = lm.token_reader()
        texts = [joined_lines(self._text(chunk)) for chunks in documents for chunk in chunks]
        tokens = reader.tokens(texts, is_query=False, empty="zeros")
        with counted_as(0.5):
            vectors = reader.vectors(tokens, pool_factor=self.chunking.multi)
        return Embedded(vectors_ND, [to_bytes(rounded(own_TE, "int8")) for own_TE in vectors])

    def _encode(self, texts: Sequence[str], job: str) -> np.ndarray:
        if not texts:
            return np.zeros((0, self.lm.dimensions), dtype=np.float32)
        vectors_ND: np.ndarray = self.lm.encode(
            [joined_lines(text) for text in texts],
            None,
            True,
            show_progress=False,
            empty="zeros",
            prompt_name=self._prompts[job],
        )
        return vectors_ND

    def _text(self, chunk: Chunk) -> str:
        """Return a chunk's text, with its context where that is a setting and fits."""
        if not (self.chunking.context and chunk.context):
            return chunk.text
        fits = self._room is None or self._length(f"{chunk.context}\n") + chunk.tokens <= self._room
        return f"{chunk.context}\n{chunk.text}" if fits else chunk.text

    def _length(self, text: str) -> int:
        [encoded] = encode_texts(self.lm.tokenizer, [text], specials=False)
        return len(encoded.ids)

    def _windows(self, chunks: Sequence[Chunk]) -> Iterator["Window"]:
        """Divide a document that is too long for one pass; each window begins with the last chunk of the one before.

        That chunk's vector is from the earlier window, which has read all text before it.
        """
        first, done = 0, 0
        while done < len(chunks):
            room = self._room
            head = f"{chunks[first].context}\n" if self.chunking.context and chunks[first].context else ""
            if room is not None and head:
                length = self._length(head)
                head, room = (head, room - length) if 2 * length <= room else ("", room)
            end, tokens = first, 0
            while end < len(chunks) and (end <= done or room is None or tokens + chunks[end].tokens <= room):
                tokens += chunks[end].tokens
                end += 1
            if room is not None and tokens > room and first < done:
                first = done  # two large chunks do not fit together
                continue
            yield Window.of(chunks[first:end], head, done - first)
            first, done = max(end - 1, 0), end


@dataclass(frozen=True)
class Window:
    """A part of a document that is encoded in one pass."""

    text: str
    spans: list[tuple[int, int]]  # where its chunks are in the text
    repeated: int  # how many of the first chunks have a vector already, and are only context

    @classmethod
    def of(cls, chunks: Sequence[Chunk], head: str, repeated: int) -> "Window":
        """Join consecutive chunks as in their document, after a head."""
        text, spans = head, list[tuple[int, int]]()
        for previous, chunk in zip([None, *chunks], chunks, strict=False):
            # Only white space separates two chunks; its exact length does not matter.
            gap = 0 if previous is None else chunk.start - previous.end
            text += "\n\n" if gap > 1 else " " * gap
            # Words that are divided at line ends are the page's layout, for any encoder.
            joined = joined_lines(chunk.text)
            spans.append((len(text), len(text) + len(joined)))
            text += joined
        return cls(text, spans, repeated)


def largest_chunk(lm: TextModel) -> int | None:
    """Return the maximum tokens of a chunk; None for no limit."""
    return _room(lm, DOCUMENT if DOCUMENT in lm.encoder.prompts else None)


def _room(lm: Any, prompt: str | None) -> int | None:
    """Return the maximum tokens of a chunk with a prompt; None for no limit."""
    if lm.max_length is None:
        return None
    config: EncoderConfig = lm.encoder
    templates, before = templates_around(
        config.prompt_text(prompt_name=prompt), config.templates, config.attention.name
    )
    texts = [f"{before}{template.before}a{template.between or ''}{template.after}" for template in templates]
    longest = max(len(encoded.ids) for encoded in encode_texts(lm.tokenizer, texts))
    room = int(lm.max_length) - longest - _SPARE
    if config.attention.repeats_text:
        room //= 2
    return max(room, 1)


# Chunks per shard; where a shard ends depends only on the documents.
_SHARD = 256


@dataclass(frozen=True)
class ChunkShard:
    """All chunks of some documents; ``index`` numbers the shards of a call."""

    index: int
    documents: list[Sequence[Chunk]]


@contextmanager
def embedded_by(engine: JobEngine, index: "Index", *, threads: int | None = None) -> Iterator[None]:
    """Let the workers of an engine embed what is added to an index until the block ends.

    They start with the first new document; without one, no model is loaded. Each worker uses ``threads`` cores, None
    for one.

    >>> from gerund.jobs.engine import LocalEngine
    >>> index = gerund.open_index(None, gerund.load())
    >>> with embedded_by(LocalEngine(1), index):
    ...     index.add_documents([gerund.Document("bread", "Bread is made of flour.")]).chunks
    1
    """
    with ExitStack() as stack:
        pool: list[Embed] = []

        def embed(documents: Sequence[Sequence[Chunk]]) -> np.ndarray | Embedded:
            if not pool:
                model = WorkerModel.of(index.encoder, threads=threads)
                pool.append(stack.enter_context(embedding_pool(engine, model, index.chunking)))
            return pool[0](documents)

        index.elsewhere = (embed, engine.workers)
        try:
            yield
        finally:
            index.elsewhere = None


@contextmanager
def embedding_pool(engine: JobEngine, model: WorkerModel, chunking: Chunking) -> Iterator[Embed]:
    """Yield a function that embeds the chunks of documents as ``Embedder.chunks`` does, by the workers of an engine."""
    work = StatefulWork(partial(_opened, model, chunking), gpus=model.gpus, threads=model.threads)
    with engine.pool(work) as pool:
        yield partial(_embedded, pool)


def shards_of(documents: Sequence[Sequence[Chunk]]) -> Iterator[ChunkShard]:
    """Yield documents in shards of at least ``_SHARD`` chunks."""
    index, shard = 0, list[Sequence[Chunk]]()
    for chunks in documents:
        shard.append(chunks)
        if sum(map(len, shard)) >= _SHARD:
            yield ChunkShard(index, shard)
            index, shard = index + 1, []
    if shard:
        yield ChunkShard(index, shard)


def _embedded(pool: WorkerPool[ChunkShard, Embedded], documents: Sequence[Sequence[Chunk]]) -> Embedded:
    by_index: dict[int, Embedded] = {}
    with progress(len(documents), "embedding", show=False) as advance:
        for shard, result in pool.map(shards_of(documents)):
            by_index[shard.index] = result
            advance(len(shard.documents))
    return Embedded.joined([by_index[index] for index in sorted(by_index)])


def _opened(model: WorkerModel, chunking: Chunking) -> Callable[[ChunkShard], Embedded]:
    embedder = Embedder(model.load(), chunking)
    return lambda shard: embedder.embedded(shard.documents)
