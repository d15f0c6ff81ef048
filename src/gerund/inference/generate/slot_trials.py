"""Test with random keys and values whether a row's result depends on other KV cache slots; imports no torch."""

import numpy as np

from gerund.arrays import Array, library_of
from gerund.errors import GerundError
from gerund.inference.generate.decoding import SlotTable
from gerund.packed import LEAST_READ

# A prompt that is read in one pass, in parts, and with others: its length, shorter ends, and cached prefixes in blocks.
_LENGTH, _ENDS, _CACHED = 300, (20, 60, 150, 200), (1, 3, 8, 10, 19, 32)


def tried_tokens(count: int, size: int) -> list[int]:
    """Return tokens of a vocabulary to try slots with."""
    return [(17 * position + 5) % size for position in range(count)]


def same_bits(one: Array, other: Array) -> bool:
    """Whether two arrays, or tensors, are equal."""
    return bool(np.array_equal(one, other) if isinstance(one, np.ndarray) else library_of(one).equal(one, other))


def is_steady(slots: SlotTable, size: int, longest: int) -> bool:
    """Whether a row's logits are bit-identical whatever the other rows are and whatever its number is.

    Rows have up to ``longest`` tokens; ``size`` is that of the vocabulary.
    """
    try:
        return longest > 2 and _same_rows(slots, size, longest - 2)
    finally:
        slots.lengths = []


def _same_rows(slots: SlotTable, size: int, most: int) -> bool:
    generator, count = np.random.default_rng(0), slots.count
    tokens = tried_tokens(count, size)
    for trial in range(2):
        lengths = generator.integers(1, most + 1, count).tolist()
        lengths[0], lengths[-1] = min(most, 20), most
        slots.fill(lengths, trial)
        all_BV = slots.step(tokens)
        # Every number of rows that may occur, and with it every place in a product; few come last, since the empty
        # rows of a step write over others.
        for rows in range(count - 1, 0, -1) if trial == 0 else sorted({1, 2, count - 1} - {0, count}, reverse=True):
            slots.lengths = lengths[:rows]
            if not same_bits(slots.step(tokens[:rows]), all_BV[:rows]):
                return False
        slots.fill(lengths, trial)
        order = list(range(count))
        while len(order) > 1:  # rows leave, and the last one takes their place
            slots.leave(0)
            order = [order[-1], *order[1:-1]]
            if len(order) in (1, 2, count - 1):
                before = list(slots.lengths)
                if not same_bits(slots.step([tokens[row] for row in order]), all_BV[order]):
                    return False
                slots.lengths = before
    return True


def recalls(slots: SlotTable, size: int) -> bool:
    """Whether keys, values and logits of block-wise prefill are bit-identical in each way that a prompt may be read."""
    slots.lengths = []
    most = min(_LENGTH, slots.room - 1)
    try:
        return most > slots.block + LEAST_READ and _same_prompts(slots, tried_tokens(most, size))
    except (GerundError, RuntimeError, TypeError, ValueError):
        return False


def _same_prompts(slots: SlotTable, ids: list[int]) -> bool:
    full_V = slots.prefill(ids)
    full = slots.copy_out(0, len(ids))

    def same(length: int, reader: int = 0) -> bool:
        layers = zip(full, slots.copy_out(0, length, reader), strict=True)
        return all(same_bits(array[:, :length], other) for layer in layers for array, other in zip(*layer, strict=True))

    logits = {len(ids): full_V}
    for end in (end for end in _ENDS if end < len(ids)):
        logits[end] = slots.prefill(ids[:end])
        if not same(end):
            return False
    for cached in (blocks * slots.block for blocks in _CACHED if blocks * slots.block + LEAST_READ <= len(ids)):
        slots.prefill(ids[::-1])  # overwrites the slot
        slots.copy_in([(keys[:, :cached], values[:, :cached]) for keys, values in full], 0)
        if not (same_bits(slots.prefill(ids, cached), full_V) and same(len(ids))):
            return False
    if slots.readers == 1:
        return True
    for order in (sorted(logits), sorted(logits, reverse=True)):
        ends = order[: slots.readers]
        together = slots.prefill_together([ids[:end] for end in ends], [0] * len(ends))
        if not all(same_bits(own_V, logits[end]) for own_V, end in zip(together, ends, strict=True)):
            return False
        if not all(same(end, reader) for reader, end in enumerate(ends)):
            return False
    return True
