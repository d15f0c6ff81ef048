"""Read documents and queries with a packed network, and cache keys and values of documents; imports no torch.

Documents are read one after the other: products are no faster with more rows than the tokens of one. What is cached
takes 8 bits a number, as in llama.cpp's cache of the type q8_0, a quarter of the memory.

Shapes: L layers (keys, then values: 2L), K heads of keys, N tokens, H width of a head, V vocabulary, D width.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gerund.arrays import log_softmax
from gerund.attention.preemption import pause
from gerund.errors import ModelError
from gerund.packed.network import KeyValues, PackedNetwork
from gerund.scoring.kept_documents import Kept, shared_beginning

# Numbers that share a scale, at most.
_BLOCK = 32


@dataclass(frozen=True)
class EightBitCache:
    """The keys and values of a text in 8 bits, and its last state ``(D,)``.

    Attributes:
        codes: the numbers, between -127 and 127, ``(2L, K, N, blocks, block)`` int8.
        scales: what a code of 1 is worth, ``(2L, K, N, blocks, 1)`` float32.
        last_D: the last state, float32.
    """

    codes: np.ndarray
    scales: np.ndarray
    last_D: np.ndarray

    @classmethod
    def of(cls, cache: KeyValues, tokens: int, last_D: np.ndarray) -> "EightBitCache":
        """Return the first text's first tokens of a cache."""
        arrays = [array[0, :, :tokens] for array in (*cache.keys, *cache.values)]
        heads, _, width = arrays[0].shape
        block = math.gcd(width, _BLOCK)
        codes = np.empty((len(arrays), heads, tokens, width // block, block), np.int8)
        scales = np.empty((*codes.shape[:-1], 1), np.float32)
        for array_KNH, own_codes, own_scales in zip(arrays, codes, scales, strict=True):  # all at once take much memory
            blocks = array_KNH.reshape(own_codes.shape)
            largest = np.abs(blocks).max(-1, keepdims=True)
            own_scales[:] = np.maximum(largest, np.finfo(np.float32).tiny * 127) / np.float32(127)
            own_codes[:] = np.rint(blocks / own_scales)
        return cls(codes, scales, last_D)

    def restore(self, cache: KeyValues) -> None:
        """Write the numbers to the first places of a cache."""
        tokens = self.codes.shape[2]
        for array, codes, scales in zip((*cache.keys, *cache.values), self.codes, self.scales, strict=True):
            target = array[0, :, :tokens]
            target[:] = (codes * scales).reshape(target.shape)

    @property
    def n_bytes(self) -> int:
        """Its memory."""
        return self.codes.nbytes + self.scales.nbytes + self.last_D.nbytes


class PackedDocumentReader:
    """Reads texts of the form (before, query), and keeps the keys and values of what stands before queries."""

    def __init__(self, network: PackedNetwork, kept: Kept[EightBitCache]) -> None:
        self._network, self._kept = network, kept
        ropes = (rope for rope in network.shape.ropes if rope.long_divisors is not None)
        self._limit = min((rope.long_from for rope in ropes), default=None)

    def logprobs(self, sequences: Sequence[tuple[Sequence[int], int]]) -> list[np.ndarray]:
        """Return the log-probabilities of the tokens of each sequence from a position on, float32."""
        if not sequences:
            return []
        beginning = _Beginning(shared_beginning([tuple(ids[:first]) for ids, first in sequences]))
        cache = KeyValues(self._network.shape, 1, max(len(ids) for ids, _ in sequences))
        logprobs = []
        for ids, first in sequences:
            if self._limit is not None and len(ids) > self._limit:  # all its positions are turned otherwise
                logprobs.append(self._scores(self._states(ids[:-1])[first - 1 :], ids[first:]))
                continue
            before = tuple(ids[:first])
            read = self._kept.find([before]).get(before)
            if read is None:
                read = self._read(before, beginning, cache)
                self._kept.add({before: read})
            read.restore(cache)  # in 8 bits the first time too: a document's score is always the same
            states = [read.last_D[None]]
            if len(ids) > first + 1:
                states.append(self._states(ids[first:-1], cache, first))
            logprobs.append(self._scores(np.concatenate(states), ids[first:]))
        return logprobs

    def _read(self, text: Sequence[int], beginning: "_Beginning", cache: KeyValues) -> EightBitCache:
        """Read a text behind its beginning, which is read once."""
        past = len(beginning.ids)
        if past:
            if beginning.arrays is None:
                self._states(beginning.ids, cache)
                beginning.arrays = [array[:, :, :past].copy() for array in (*cache.keys, *cache.values)]
            for target, source in zip((*cache.keys, *cache.values), beginning.arrays, strict=True):
                target[:, :, :past] = source
        return EightBitCache.of(cache, len(text), self._states(text[past:], cache, past)[-1].copy())

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


@dataclass
class _Beginning:
    """The tokens with which all texts begin, and their keys and values once they were read."""

    ids: tuple[int, ...]
    arrays: list[np.ndarray] | None = None
