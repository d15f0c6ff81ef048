"""Cuts token caches into packed blocks.

Knows: blocks. Does not know: how tokens come to the disk, how sources are mixed, models, objectives, the trainer.
"""

import numpy as np
import torch

from gerund.errors import DataError
from gerund.training.corpus.mixture import Mixture
from gerund.training.corpus.token_cache import TokenCache


class PackedBlocks:
    """Packed blocks by number; block ``i`` is a pure function of the seed and ``i``.

    Each source is cut into blocks of ``length`` tokens, which :class:`~gerund.training.corpus.mixture.Mixture` deals
    without repetition until the source is used up; then a new order (and a new place of the first cut) begins.

    Args:
        caches: The tokens of each source.
        weights: How much of each source, in tokens; they need not sum to one.
        length: Tokens in a block.
        seed: Decides all orders.

    Raises:
        DataError: A source has too few tokens.
    """

    def __init__(self, caches: list[TokenCache], weights: list[float], *, length: int, seed: int) -> None:
        self.length = length
        for cache in caches:
            if cache.tokens < 2 * length:
                raise DataError(f"{cache.path}: {cache.tokens} tokens are too few for blocks of {length}")
        self._tokens = [cache.open() for cache in caches]
        # One block fewer than fits: it is the room that shifts the cuts from one epoch to the next.
        blocks = [len(tokens) // length - 1 for tokens in self._tokens]
        self._mixture = Mixture(blocks, weights, seed=seed, shifts=length)

    def row(self, number: int) -> np.ndarray:
        """Return block ``number`` of the whole training, shape (length,)."""
        turn = self._mixture.turn(number)
        start = turn.shift + turn.item * self.length
        return self._tokens[turn.source][start : start + self.length]

    def rows(self, first: int, count: int) -> torch.Tensor:
        """Return blocks ``first`` to ``first + count``, int64 ``(count, length)``."""
        rows = [self.row(number) for number in range(first, first + count)]
        return torch.from_numpy(np.stack(rows).astype(np.int64))

    def epochs(self, rows: int) -> list[float]:
        """Return how often each source is read by the first ``rows`` blocks."""
        return self._mixture.epochs(rows)


class SpreadBlocks:
    """Groups of consecutive blocks from evenly spread places, for a validation that is the same every time.

    Args:
        cache: The tokens.
        length: Tokens in a block.
        rows: Blocks of a group.
        limit: Tokens of all groups together, at most (but one group at least).

    Raises:
        DataError: There are too few tokens for one group.
    """

    def __init__(self, cache: TokenCache, *, length: int, rows: int, limit: int) -> None:
        self.length, self.group = length, rows
        self._tokens = cache.open()
        self._whole = len(self._tokens) // (rows * length)
        if not self._whole:
            raise DataError(
                f"{cache.path}: {cache.tokens} tokens are too few to validate with {rows} blocks of {length}"
            )
        self._groups = max(1, min(self._whole, limit // (rows * length)))

    def __len__(self) -> int:
        """Return how many blocks there are in all groups."""
        return self._groups * self.group

    def rows(self, first: int, count: int) -> torch.Tensor:
        """Return blocks ``first`` to ``first + count``, int64 ``(count, length)``."""
        starts = [self._start(number) for number in range(first, first + count)]
        cuts = [self._tokens[start : start + self.length].astype(np.int64) for start in starts]
        return torch.from_numpy(np.stack(cuts))

    def _start(self, number: int) -> int:
        group, row = divmod(number, self.group)
        return (self._whole * group // self._groups * self.group + row) * self.length
