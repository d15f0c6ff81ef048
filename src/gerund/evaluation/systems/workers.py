"""Whole texts of an evaluation encoded by the workers of an engine, one system after the other.

Knows: engines, language models among the systems. Does not know: tasks, scores.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from gerund.evaluation.systems.base import System
from gerund.evaluation.systems.language_model import LanguageModelSystem
from gerund.jobs.checkpoints import ShardCheckpoint
from gerund.jobs.engine import JobEngine, StatefulWork, WorkerPool
from gerund.worker_model import WorkerModel

if TYPE_CHECKING:
    from gerund.language_model import LanguageModel

# Texts that a worker encodes at a time; batches are made of texts of one shard.
_SHARD = 512
# The number of the pass under which they keep shards; no encoder has so many of its own.
_OF_WORKERS = 1_000_000
# A shard: its number, its texts and what is put before them.
TextShard = tuple[int, tuple[str, ...], str | None]


@contextmanager
def encoded_by(engine: JobEngine, systems: Sequence[System], *, threads: int | None = None) -> Iterator[None]:
    """Let the workers of an engine encode whole texts for the language models among systems until the block ends.

    Args:
        engine: has the workers, which hold one system's model at a time.
        systems: of an evaluation.
        threads: cores that each worker computes on; None for one.
    """
    models = [one for one in systems if isinstance(one, LanguageModelSystem)]
    with _Pools(engine, threads) as pools:
        for one in models:
            one.elsewhere = partial(pools.encode, one.lm)
            if one.cache is not None:
                one.cache.shards = max(one.cache.shards, engine.workers)
        try:
            yield
        finally:
            for one in models:
                one.elsewhere = None


class _Pools(ExitStack):
    """The workers of one system, until another one asks."""

    def __init__(self, engine: JobEngine, threads: int | None) -> None:
        super().__init__()
        self.engine, self.threads = engine, threads
        self.lm: LanguageModel | None = None
        self.pool: WorkerPool[TextShard, np.ndarray] | None = None

    def encode(
        self, lm: "LanguageModel", texts: Sequence[str], prompt: str | None, kept: ShardCheckpoint | None = None
    ) -> np.ndarray:
        """Return vectors as they were pooled, ``(n, D)`` float32, keeping finished shards where it is said."""
        if lm is not self.lm or self.pool is None:
            self.close()
            model = WorkerModel.of(lm, threads=self.threads)
            work = StatefulWork(partial(_opened, model), gpus=model.gpus, threads=model.threads)
            self.pool, self.lm = self.enter_context(self.engine.pool(work)), lm
        vectors_ND = np.zeros((len(texts), lm.dimensions), dtype=np.float32)
        # Batches of a shard are others than those of all texts: what was kept without workers is not taken.
        finished = None if kept is None else kept.encoding_pass(_OF_WORKERS, _OF_WORKERS + 1)
        done = frozenset() if finished is None else finished.restore(vectors_ND)
        stretches = [range(start, min(start + _SHARD, len(texts))) for start in range(0, len(texts), _SHARD)]
        shards = ((own.start, tuple(texts[own.start : own.stop]), prompt) for own in stretches if not done >= {*own})
        for (start, own_texts, _), found_ND in self.pool.map(shards):
            rows = range(start, start + len(own_texts))
            vectors_ND[rows.start : rows.stop] = found_ND
            if finished is not None:
                finished.save(rows, found_ND)
        return vectors_ND


def _opened(model: WorkerModel) -> Callable[[TextShard], np.ndarray]:
    return partial(_encode, model.load())


def _encode(lm: "LanguageModel", shard: TextShard) -> np.ndarray:
    _, texts, prompt = shard
    vectors: np.ndarray = lm.encode(list(texts), prompt=prompt, normalize=False, empty="zeros", show_progress=False)
    return vectors
