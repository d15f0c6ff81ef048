"""Chunks and queries as vectors: each chunk by itself, or pooled from one pass over its document (late chunking).

Knows: prompts, windows over long documents. Does not know: files, stores.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from gerund.errors import ConfigError
from gerund.inference.text_ids import encode_texts
from gerund.jobs.engine import JobEngine, StatefulWork, WorkerPool
from gerund.normalization import joined_lines
from gerund.retrieval.documents import Chunk, Chunking
from gerund.retrieval.indexing import Embed
from gerund.settings.encoder import EncoderConfig
from gerund.settings.templates import templates_around
from gerund.types import TextModel
from gerund.worker_model import WorkerModel

if TYPE_CHECKING:
    from gerund.retrieval.index import Index

QUERY, DOCUMENT = "query", "document"
"""The names of prompts that an encoder may have for the two."""

# Special tokens, and what whitespace between chunks and a space in front of a text add to the sum of their tokens.
_SPARE = 8


class Embedder:
    """A model that embeds chunks in one way.

    Args:
        lm: the model.
        chunking: how documents are cut and embedded.

    Raises:
        ConfigError: a chunk does not fit the model's longest text, or the model cannot embed stretches of a text.
    """

    def __init__(self, lm: TextModel, chunking: Chunking) -> None:
        self.lm = lm
        self.chunking = chunking
        self._prompts = {job: job if job in lm.encoder.prompts else None for job in (QUERY, DOCUMENT)}
        self._room = _room(lm, self._prompts[DOCUMENT])
        if self._room is not None and chunking.tokens > self._room:
            raise ConfigError(
                f"chunks of {chunking.tokens} tokens do not fit {lm.name}, which has room for {self._room}; "
                "choose smaller ones"
            )
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
        """Return a vector of length 1 for each chunk, document after document, ``(n, D)`` float32.

        Args:
            documents: all chunks of each document, in their order.
        """
        if not self.chunking.late:
            return self._encode([self._text(one) for own in documents for one in own], DOCUMENT)
        windows = [window for own in documents for window in self._windows(own)]
        texts, spans = [one.text for one in windows], [one.spans for one in windows]
        name = self._prompts[DOCUMENT]
        found = self.lm.encode_spans(texts, spans, None, True, show_progress=False, prompt_name=name) if texts else []
        kept = [vectors_SD[one.repeated :] for one, vectors_SD in zip(windows, found, strict=True)]
        return np.concatenate(kept) if kept else np.zeros((0, self.lm.dimensions), dtype=np.float32)

    def _encode(self, texts: Sequence[str], job: str) -> np.ndarray:
        if not texts:
            return np.zeros((0, self.lm.dimensions), dtype=np.float32)
        vectors: np.ndarray = self.lm.encode(
            [joined_lines(one) for one in texts],
            None,
            True,
            show_progress=False,
            empty="zeros",
            prompt_name=self._prompts[job],
        )
        return vectors

    def _text(self, chunk: Chunk) -> str:
        """Return a chunk as it is read by itself."""
        if not (self.chunking.context and chunk.context):
            return chunk.text
        [found] = encode_texts(self.lm.tokenizer, [f"{chunk.context}\n"], specials=False)
        fits = self._room is None or len(found.ids) + chunk.tokens <= self._room
        return f"{chunk.context}\n{chunk.text}" if fits else chunk.text

    def _windows(self, chunks: Sequence[Chunk]) -> Iterator["Window"]:
        """Divide a document that is too long for one pass; each window begins with the last chunk of the one before.

        That chunk's vector is the first window's, which has read all that precedes it.
        """
        first, done = 0, 0
        while done < len(chunks):
            room = self._room
            head = f"{chunks[first].context}\n" if self.chunking.context and chunks[first].context else ""
            if room is not None and head:
                [found] = encode_texts(self.lm.tokenizer, [head], specials=False)
                head, room = (head, room - len(found.ids)) if 2 * len(found.ids) <= room else ("", room)
            end, tokens = first, 0
            while end < len(chunks) and (end <= done or room is None or tokens + chunks[end].tokens <= room):
                tokens += chunks[end].tokens
                end += 1
            if room is not None and tokens > room and first < done:
                first = done  # two large chunks do not fit together
                continue
            yield Window.of(chunks[first:end], head, done - first)
            first, done = max(end - 1, 0), end


class Window:
    """A stretch of a document that is read in one pass.

    Attributes:
        text: what is read.
        spans: where its chunks lie in it.
        repeated: how many of the first ones only stand there for the others.
    """

    def __init__(self, text: str, spans: list[tuple[int, int]], repeated: int) -> None:
        self.text, self.spans, self.repeated = text, spans, repeated

    @classmethod
    def of(cls, chunks: Sequence[Chunk], head: str, repeated: int) -> "Window":
        """Put chunks one behind the other as they stand in their document.

        Args:
            chunks: chunks that follow each other.
            head: what stands in front of them.
            repeated: how many of the first ones have a vector already.
        """
        text, spans = head, list[tuple[int, int]]()
        for before, one in zip([None, *chunks], chunks, strict=False):
            # Only white space stands between two chunks; how much of it is of no account.
            gap = 0 if before is None else one.start - before.end
            text += "\n\n" if gap > 1 else " " * gap
            # Whatever the encoder does to a text: that words are divided there is the page's doing.
            own = joined_lines(one.text)
            spans.append((len(text), len(text) + len(own)))
            text += own
        return cls(text, spans, repeated)


def largest_chunk(lm: TextModel) -> int | None:
    """Return how many tokens a chunk may have at most; None where there is no limit."""
    return _room(lm, DOCUMENT if DOCUMENT in lm.encoder.prompts else None)


def _room(lm: Any, prompt: str | None) -> int | None:
    """Return how many tokens a chunk may have; None where there is no limit."""
    if lm.max_length is None:
        return None
    config: EncoderConfig = lm.encoder
    templates, before = templates_around(
        config.prompt_text(prompt_name=prompt), config.templates, config.attention.name
    )
    texts = [f"{before}{one.before}a{one.between or ''}{one.after}" for one in templates]
    longest = max(len(own.ids) for own in encode_texts(lm.tokenizer, texts))
    room = int(lm.max_length) - longest - _SPARE
    if lm.runtime.plan.repeats_text:
        room //= 2
    return max(room, 1)


# Chunks that a worker embeds at a time; where a shard ends depends on the documents alone.
_SHARD = 256


@dataclass(frozen=True)
class ChunkShard:
    """Some documents in chunks.

    Attributes:
        index: the shard's number among those that are embedded at once.
        documents: all chunks of each document.
    """

    index: int
    documents: list[Sequence[Chunk]]


@contextmanager
def embedded_by(engine: JobEngine, index: "Index", *, threads: int | None = None) -> Iterator[None]:
    """Let the workers of an engine embed what is added to an index until the block ends.

    They begin with the first document that is new; where nothing is, no model is loaded anywhere.

    Args:
        engine: has the workers.
        index: where they add.
        threads: cores that each computes on; None for one.

    >>> from gerund.jobs.engine import LocalEngine
    >>> index = gerund.open_index(None, gerund.load())
    >>> with embedded_by(LocalEngine(1), index):
    ...     index.add_documents([gerund.Document("bread", "Bread is made of flour.")]).chunks
    1
    """
    with ExitStack() as stack:
        pool: list[Embed] = []

        def embed(documents: Sequence[Sequence[Chunk]]) -> np.ndarray:
            if not pool:
                model = WorkerModel.of(index.lm, threads=threads)
                pool.append(stack.enter_context(embedding_pool(engine, model, index.chunking)))
            return pool[0](documents)

        index.elsewhere = (embed, engine.workers)
        try:
            yield
        finally:
            index.elsewhere = None


@contextmanager
def embedding_pool(engine: JobEngine, model: WorkerModel, chunking: Chunking) -> Iterator[Embed]:
    """Yield what embeds the chunks of documents as ``Embedder.chunks`` does, by the workers of an engine.

    Args:
        engine: has the workers.
        model: loads the model in each.
        chunking: how documents are cut and embedded.
    """
    work = StatefulWork(partial(_opened, model, chunking), gpus=model.gpus, threads=model.threads)
    with engine.pool(work) as pool:
        yield partial(_embedded, pool)


def shards_of(documents: Sequence[Sequence[Chunk]]) -> Iterator[ChunkShard]:
    """Yield documents in shards of some chunks."""
    index, own = 0, list[Sequence[Chunk]]()
    for chunks in documents:
        own.append(chunks)
        if sum(map(len, own)) >= _SHARD:
            yield ChunkShard(index, own)
            index, own = index + 1, []
    if own:
        yield ChunkShard(index, own)


def _embedded(pool: WorkerPool[ChunkShard, np.ndarray], documents: Sequence[Sequence[Chunk]]) -> np.ndarray:
    found = {shard.index: vectors_ND for shard, vectors_ND in pool.map(shards_of(documents))}
    return np.concatenate([found[index] for index in sorted(found)])


def _opened(model: WorkerModel, chunking: Chunking) -> Callable[[ChunkShard], np.ndarray]:
    return partial(_embed, Embedder(model.load(), chunking))


def _embed(embedder: Embedder, shard: ChunkShard) -> np.ndarray:
    return embedder.chunks(shard.documents)
