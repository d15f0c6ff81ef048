"""Deals single texts of token caches, one a row, each of at most so many tokens.

Knows: where texts begin, how long ones are cut. Does not know: special tokens of a batch, prompts (``framing``),
objectives.
"""

from typing import Literal, get_args

import numpy as np

from gerund.errors import ConfigError, DataError, unknown_name
from gerund.training.corpus.mixture import Mixture
from gerund.training.corpus.token_cache import TokenCache

Cut = Literal["pieces", "head"]


class Texts:
    """Texts of one or several sources; row ``i`` is a pure function of the seed and ``i``.

    :class:`~gerund.training.corpus.mixture.Mixture` deals the texts of each source in a shuffled order without
    repetition, then anew; sources alternate in proportion to their weights.

    Args:
        caches: The tokens of each source.
        weights: How many texts of each source, relative to the others.
        length: Tokens of a text, at most; special tokens are not counted.
        seed: Decides all orders.
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
        turn = self._mixture.turn(number)
        return self._sources[turn.source].text(turn.item)

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
