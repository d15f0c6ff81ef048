"""Read documents and queries with a packed network, and cache keys and values of documents; imports no torch.

Documents are read one after the other: products are no faster with more rows than the tokens of one.

Shapes: N tokens, V vocabulary, D width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock

import numpy as np

from gerund.arrays import log_softmax
from gerund.attention.preemption import pause
from gerund.errors import ModelError
from gerund.packed.network import KeyValues, PackedNetwork
from gerund.scoring.kept_documents import Kept, shared_beginning

# Tokens of a query that have room behind a document at first.
_ROOM = 32


@dataclass(frozen=True)
class _Read:
    """A text that was read: its keys and values, with room behind them, and its last state ``(D,)``."""

    cache: KeyValues
    last_D: np.ndarray

    @property
    def n_bytes(self) -> int:
        return sum(array.nbytes for array in (*self.cache.keys, *self.cache.values))


class PackedDocumentReader:
    """Reads texts of the form (before, query), and keeps the keys and values of what stands before queries."""

    def __init__(self, network: PackedNetwork, kept: Kept[_Read], lock: Lock) -> None:
        self._network, self._kept, self._lock = network, kept, lock
        ropes = (rope for rope in network.shape.ropes if rope.long_divisors is not None)
        self._limit = min((rope.long_from for rope in ropes), default=None)

    def logprobs(self, sequences: Sequence[tuple[Sequence[int], int]]) -> list[np.ndarray]:
        """Return the log-probabilities of the tokens of each sequence from a position on, float32."""
        head: _Read | None = None
        beginning = shared_beginning([tuple(ids[:first]) for ids, first in sequences])
        logprobs = []
        for ids, first in sequences:
            if self._limit is not None and len(ids) > self._limit:  # all its positions are turned otherwise
                logprobs.append(self._scores(self._states(ids[:-1])[first - 1 :], ids[first:]))
                continue
            before = tuple(ids[:first])
            # Queries are written behind what is kept.
            with self._lock:
                read = self._kept.find([before]).get(before)
                if read is None:
                    if beginning and head is None:
                        head = self._fresh(beginning, None, 0)
                    read = self._fresh(before, head, len(beginning))
                    self._kept.add({before: read})
                logprobs.append(self._behind(read, first, ids[first:]))
        return logprobs

    def _fresh(self, text: Sequence[int], head: _Read | None, past: int) -> _Read:
        """Read a text behind the ``past`` tokens of its beginning."""
        cache = KeyValues(self._network.shape, 1, len(text) + _ROOM)
        if head is not None:
            for kind in ("keys", "values"):
                for target, source in zip(getattr(cache, kind), getattr(head.cache, kind), strict=True):
                    target[:, :, :past] = source[:, :, :past]
        return _Read(cache, self._states(text[past:], cache, past)[-1].copy())

    def _behind(self, read: _Read, past: int, query: Sequence[int]) -> np.ndarray:
        cache = read.cache
        if past + len(query) > cache.capacity:
            cache = cache.grown(past + len(query))
        states = [read.last_D[None]]
        if len(query) > 1:
            states.append(self._states(query[:-1], cache, past))
        return self._scores(np.concatenate(states), query)

    def _states(self, ids: Sequence[int], cache: KeyValues | None = None, past: int = 0) -> np.ndarray:
        """Return the last states ``(N, D)`` of tokens that follow ``past`` others."""
        pause()
        states_1ND = self._network.run(np.array([ids]), cache=cache, write_B=np.array([past])).states
        assert states_1ND is not None
        states_ND: np.ndarray = states_1ND[0]
        return states_ND

    def _scores(self, states_ND: np.ndarray, tokens: Sequence[int]) -> np.ndarray:
        """Return the log-probability ``(N,)`` of each token after the state that predicts it."""
        logprobs_NV = log_softmax(self._network.head(states_ND))
        logprobs_N: np.ndarray = logprobs_NV[np.arange(len(tokens)), np.array(tokens)]
        if not np.isfinite(logprobs_N).all():
            raise ModelError("this model's log-probabilities are not numbers; load it with runtime='torch'")
        return logprobs_N
