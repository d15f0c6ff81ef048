"""Rows of token caches by number: single texts of at most so many tokens, or packed blocks.

Knows: where texts begin, how long ones and whole caches are cut. Does not know: how tokens come to the disk, special
tokens of a batch, prompts (``formatting``), objectives.
"""

from typing import Literal, get_args

import numpy as np
import torch

from gerund.errors import ConfigError, DataError, unknown_name
from gerund.training.corpus.mixture import Mixture
from gerund.training.corpus.token_cache import TokenCache

Cut = Literal["pieces", "head"]


class Texts:
    """Texts of one or several sources; row ``i`` is a pure function of the seed and ``i``.

    :class:`~gerund.training.corpus.mixture.Mixture` gives the order: the texts of each source are shuffled and read
    without repetition, then anew; sources alternate in proportion to their weights.

    Args:
        caches: The tokens of each source.
        weights: How many texts of each source, relative to the others.
        length: Tokens of a text, at most; special tokens are not counted.
        seed: Determines all orders.
        min_tokens: Texts, and last pieces of texts, with fewer tokens are left out.
        cut: What becomes of a longer text: consecutive ``pieces`` of ``length`` tokens, each a text of its own,
            or only its ``head``.

    Attributes:
        skipped: How many texts are too short.

    Raises:
        ConfigError: An unknown cut, or lengths that contradict each other.
        DataError: A source has no text that is long enough.
    """

    def __init__(
        self,
        caches: list[TokenCache],
        weights: list[float],
        *,
        length: int,
        seed: int,
        min_tokens: int = 8,
        cut: Cut = "pieces",
    ) -> None:
        if cut not in get_args(Cut):
            raise unknown_name("cut", cut, list(get_args(Cut)))
        if not 1 <= min_tokens <= length:
            raise ConfigError(
                f"texts of {min_tokens} to {length} tokens are impossible; min_tokens must be 1 to length"
            )
        self.length = length
        self._sources = [_Source(cache, length, min_tokens, cut) for cache in caches]
        self.skipped = sum(source.skipped for source in self._sources)
        self._mixture = Mixture([len(source) for source in self._sources], weights, seed=seed)

    def __len__(self) -> int:
        """Return how many different texts there are."""
        return sum(map(len, self._sources))

    def row(self, number: int) -> np.ndarray:
        """Return the token ids of row ``number``, without special tokens, shape (at most length,), int64."""
        sample = self._mixture.sample(number)
        return self._sources[sample.source].text(sample.item)

    def number(self, row: int) -> int:
        """Return which text row ``row`` is: a number below ``len``, the same whenever the text is read."""
        sample = self._mixture.sample(row)
        return sum(map(len, self._sources[: sample.source])) + sample.item

    def tokens_of(self, number: int) -> np.ndarray:
        """Return the token ids of text ``number``, as ``row`` does."""
        for source in self._sources:
            if number < len(source):
                return source.text(number)
            number -= len(source)
        raise IndexError(number)

    def epochs(self, rows: int) -> list[float]:
        """Return how often each source is read by the first ``rows`` rows."""
        return self._mixture.epochs(rows)


class _Source:
    """The texts of one cache."""

    def __init__(self, cache: TokenCache, length: int, min_tokens: int, cut: Cut) -> None:
        self.length = length
        self.before, self.after = cache.specials_before, cache.specials_after
        self.tokens, self.starts = cache.open(), cache.starts()
        sizes = np.diff(self.starts) - (self.before + self.after)
        pieces = (sizes >= min_tokens).astype(np.int64)
        if cut == "pieces":
            full, rest = np.divmod(sizes, length)
            pieces *= full + (rest >= min_tokens)
        self.skipped = int((pieces == 0).sum())
        # ends[i]: how many pieces texts 0 to i give together.
        self.ends = np.cumsum(pieces)
        if not len(self):
            raise DataError(
                f"{cache.path}: none of {cache.texts} texts has {min_tokens} tokens; the longest has {sizes.max()}"
            )

    def __len__(self) -> int:
        return int(self.ends[-1])

    def text(self, item: int) -> np.ndarray:
        text = int(np.searchsorted(self.ends, item, side="right"))
        piece = item - (int(self.ends[text - 1]) if text else 0)
        start = int(self.starts[text]) + self.before + piece * self.length
        end = min(start + self.length, int(self.starts[text + 1]) - self.after)
        return self.tokens[start:end].astype(np.int64)


class PackedBlocks:
    """Packed blocks by number; block ``i`` is a pure function of the seed and ``i``.

    Each source is cut into blocks of ``length`` tokens, which are read in a shuffled
    order without repetition until the source is used up; then a new order (and a new place of the first cut) begins.

    Args:
        caches: The tokens of each source.
        weights: How much of each source, in tokens; they need not sum to one.
        length: Tokens in a block.
        seed: Determines all orders.

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
        sample = self._mixture.sample(number)
        start = sample.shift + sample.item * self.length
        return self._tokens[sample.source][start : start + self.length]

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
