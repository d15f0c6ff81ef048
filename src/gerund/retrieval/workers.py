"""Chunks embedded by the workers of an engine, as this process would embed them.

Knows: engines, how documents become shards. Does not know: stores, files.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np

from gerund.jobs.engine import JobEngine, StatefulWork, WorkerPool
from gerund.retrieval.documents import Chunk, Chunking
from gerund.retrieval.embedding import Embedder
from gerund.retrieval.index import Index
from gerund.retrieval.indexing import Embed
from gerund.worker_model import WorkerModel

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
def embedded_by(engine: JobEngine, index: Index, *, threads: int | None = None) -> Iterator[None]:
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
