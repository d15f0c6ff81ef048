"""Batches by token budget: texts of like length together, so that next to nothing is padding.

Knows: lengths. Does not know: what the tokens are.
"""

from collections.abc import Sequence

# Beyond this fraction of padding a batch is closed, if what it holds is worth a pass of its own.
_MAX_PADDING = 0.04


def token_batches(lengths: Sequence[int], budget: int, min_tokens: int = 512) -> list[list[int]]:
    """Group texts, longest first, so that rows times longest row stays within ``budget``.

    Longest first: if memory runs out, it does so at once. A text longer than the budget is a batch of its own.

    Args:
        lengths: tokens of each text.
        budget: tokens of a batch, padding included.
        min_tokens: a batch below this size is filled up even with padding.

    Returns:
        Lists of indices into ``lengths``; every index once.

    >>> token_batches([3, 9, 3, 8, 3], budget=18, min_tokens=1)
    [[1], [3], [0, 2, 4]]
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    batches: list[list[int]] = []
    batch: list[int] = []
    longest = real = 0
    for index in order:
        length = lengths[index]
        rows = len(batch) + 1
        padded = 1 - (real + length) / max(1, rows * longest)
        too_large = rows * longest > budget
        wasteful = padded > _MAX_PADDING and real >= min_tokens
        if batch and (too_large or wasteful):
            batches.append(batch)
            batch = []
        if not batch:
            longest, real = length, 0
        batch.append(index)
        real += length
    if batch:
        batches.append(batch)
    return batches
