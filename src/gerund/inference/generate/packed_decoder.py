"""Continuous batching over a packed network: a finished sequence makes room for the next prompt.

What a row computes does not depend on the others, nor on the size of the cache: MatMulNBits rounds and multiplies each
row by itself, and slots that a token does not see add nothing. But some processors (with AVX2 and nothing newer) have
another kernel for a single row of weights in 4 bits, which rounds otherwise.

Shapes: B rows, V vocabulary.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gerund.inference.generate.sequence import CancelFlag, Cancelled, SequenceState, advance
from gerund.packed.network import KeyValues, PackedNetwork

# Tokens of a part of a prompt: products are no faster with more, and memory grows.
_TOKENS_AT_ONCE = 512
# Slots of a cache come in multiples of this, and there are so many more at most than are filled.
_SLOTS, _SLOTS_MORE = 64, 256


def write(
    network: PackedNetwork,
    sequences: Sequence[SequenceState],
    rows: int,
    stop: CancelFlag,
    pause: Callable[[], None] = lambda: None,
) -> None:
    """Generate sequences to their ends, so many at a time; who is done makes room for the next.

    ``pause`` is called between two runs of the network.

    Raises:
        Cancelled: ``stop`` was set.
    """
    waiting = deque(sequences)
    # Beyond some length all positions of such a run are turned otherwise, so each text has runs of its own.
    if any(rope.long_divisors for rope in network.shape.ropes):
        rows = 1
    table = _Rows(network, min(rows, len(sequences)))
    read: list[int] | None = None
    while waiting or table.sequences:
        while waiting and len(table.sequences) < table.count:
            sequence = waiting.popleft()
            if sequence.ids is not read:  # sequences of one prompt share it
                table.read(sequence.ids, stop, pause)
                read = sequence.ids
            table.begin(sequence)
            if stop.is_set():
                raise Cancelled
        pause()
        table.step()
        if stop.is_set():
            raise Cancelled


class _Rows:
    """The sequences that are being written, each in a row of one cache; those that are done have left."""

    def __init__(self, network: PackedNetwork, count: int) -> None:
        self.network, self.count = network, count
        self.sequences: list[SequenceState] = []
        self._last: list[int] = []  # the token of each that the network has not read yet
        self._lengths: list[int] = []  # how many tokens of each it has read
        self._prompt: KeyValues | None = None
        self._logits_V = np.empty(0, np.float32)  # of the prompt that was read last
        self._cache: KeyValues | None = None
        self._views: dict[int, KeyValues] = {}

    def read(self, ids: Sequence[int], stop: CancelFlag, pause: Callable[[], None]) -> None:
        """Read a prompt."""
        self._prompt = None
        self._prompt = KeyValues(self.network.shape, 1, _slots(len(ids)))
        for begin in range(0, len(ids), _TOKENS_AT_ONCE):
            pause()
            part = np.array([ids[begin : begin + _TOKENS_AT_ONCE]])
            is_last = begin + _TOKENS_AT_ONCE >= len(ids)
            outputs = self.network.run(
                part,
                cache=self._prompt,
                write_B=np.array([begin]),
                logits_at=np.array([[-1]]),
                outputs=["logits"] if is_last else ["states"],
            )
            if stop.is_set():
                raise Cancelled
        assert outputs.logits is not None
        self._logits_V = outputs.logits[0, 0]

    def begin(self, sequence: SequenceState) -> None:
        """Generate the first token after the prompt that was read last; the sequence joins unless it is done."""
        tokens = advance([sequence], self._logits_V[None])
        if sequence.is_done:
            return
        length, row = len(sequence.ids), len(self.sequences)
        assert self._prompt is not None
        if self.count == 1:
            self._cache = self._prompt
            self._views.clear()
        else:
            self._demand(length)
            for mine, other in zip(_memory(self._all()), _memory(self._prompt), strict=True):
                mine[row, :, :length] = other[0, :, :length]
        self.sequences.append(sequence)
        self._last += tokens
        self._lengths.append(length)

    def step(self) -> None:
        """Generate a token for each sequence."""
        if not self.sequences:
            return
        self._demand(max(self._lengths))
        rows = len(self.sequences)
        if rows not in self._views:
            keys, values = ([array[:rows] for array in kind] for kind in (self._all().keys, self._all().values))
            self._views[rows] = KeyValues.over(self.network.shape, keys, values)
        outputs = self.network.run(
            np.array(self._last)[:, None],
            cache=self._views[rows],
            write_B=np.array(self._lengths),
            outputs=["logits"],
        )
        assert outputs.logits is not None
        self._lengths = [length + 1 for length in self._lengths]
        self._last = advance(self.sequences, outputs.logits[:, 0])
        for row in reversed(range(rows)):
            if self.sequences[row].is_done:
                self._leave(row)

    def _leave(self, row: int) -> None:
        """Remove a row; the last one takes its place."""
        last = len(self.sequences) - 1
        if row < last:
            for array in _memory(self._all()):
                array[row, :, : self._lengths[last]] = array[last, :, : self._lengths[last]]
        columns: tuple[list[Any], ...] = (self.sequences, self._last, self._lengths)
        for column in columns:
            column[row] = column[last]
            del column[last]

    def _all(self) -> KeyValues:
        assert self._cache is not None
        return self._cache

    def _demand(self, length: int) -> None:
        """Have room for one token more in a row of ``length`` tokens."""
        if self._cache is None:
            self._cache = KeyValues(self.network.shape, self.count, _slots(length))
        elif length >= self._cache.capacity:
            self._cache = self._cache.grown(_slots(length))
            self._views.clear()


def _slots(length: int) -> int:
    """Return how many slots a cache gets for rows of ``length`` tokens: a graph computes with all of them."""
    more = min(_SLOTS_MORE, max(_SLOTS, length // 4))
    return -(-(length + more) // _SLOTS) * _SLOTS


def _memory(cache: KeyValues) -> list[np.ndarray]:
    return [*cache.keys, *cache.values]
