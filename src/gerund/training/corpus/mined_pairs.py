"""Pairs of texts of one document, as ``gerund mine`` writes them: read, kept by weight, batched by length.

Knows: the columns of mined pairs, which step reads which of them. Does not know: tokens, spans, losses.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gerund.data.mining.symbols import normalised
from gerund.errors import DataError
from gerund.training.corpus.pairs import Examples, records, required_text


@dataclass(frozen=True)
class MinedPair:
    """A pair of texts of one document, as ``gerund mine`` writes it."""

    query: str
    """One side; of a pair with a title, the title."""
    positive: str
    """The other side."""
    opening: str | None
    """How the document begins whose title ``query`` is; None where it is none, or another row has it."""
    weight: int | None
    """What both share weighs; None where that is not known."""


def read_pairs(
    paths: Iterable[str | Path],
    *,
    query: str = "text_a",
    positive: str = "text_b",
    opening: str = "opening",
    weight: str = "weight",
) -> list[MinedPair]:
    """Read pairs from files as ``read_examples`` reads them.

    Args:
        paths: The files.
        query: Column or field of one side.
        positive: Column or field of the other side.
        opening: Column or field of the document's beginning, where ``query`` is its title; absent or empty elsewhere.
        weight: Column or field of the weight of what both share; it may be absent or empty.

    Returns:
        One pair a row, in order.

    Raises:
        DataError: As ``read_examples``; or a weight is no whole number.
    """
    return [
        MinedPair(
            required_text(values, query, where),
            required_text(values, positive, where),
            None if values.get(opening) in (None, "") else required_text(values, opening, where),
            _whole_number(values.get(weight), where, weight),
        )
        for path in map(Path, paths)
        for where, values in records(path, (query, positive), (opening, weight))
    ]


def heavy_pairs(
    pairs: Iterable[MinedPair], threshold: int, short_threshold: int, short_characters: int
) -> list[MinedPair]:
    """Return the pairs whose texts share enough.

    Args:
        pairs: The pairs.
        threshold: What they weigh at least.
        short_threshold: The same where both texts have fewer than ``short_characters`` characters.
        short_characters: Which texts are short, in the normalised form that is mined.

    Raises:
        DataError: A pair has no weight, or none weighs enough.

    >>> pairs = [MinedPair("a", "b", None, 20), MinedPair("a", "b" * 64, None, 20), MinedPair("a", "b" * 64, None, 30)]
    >>> [len(pair.positive) for pair in heavy_pairs(pairs, 30, 20, 64)]
    [1, 64]
    >>> len(heavy_pairs([MinedPair("a", "b " * 20 + "   " * 30, None, 20)], 30, 20, 64))  # short, its spaces folded
    1
    """
    found = []
    for pair in pairs:
        if pair.weight is None:
            raise DataError(
                "a threshold of pairs needs their weights, as `gerund mine` writes them, and the pair of "
                f"{pair.query[:60]!r} has none"
            )
        short = max(len(normalised(pair.query)), len(normalised(pair.positive))) < short_characters
        if pair.weight >= (short_threshold if short else threshold):
            found.append(pair)
    if not found:
        raise DataError(f"no pair weighs as much as the threshold {threshold} asks for")
    return found


@dataclass(frozen=True)
class Bucket:
    """Pairs of about one length, which make batches of their own (GUR, section IV-A).

    Attributes:
        examples: The pairs.
        length: Longest text in tokens.
        factor: A batch has so many times the objective's batch size.
    """

    examples: Examples
    length: int
    factor: int = 1


class Buckets:
    """Which bucket a step reads: each in proportion to its batches, spread evenly, a pure function of the step.

    Args:
        buckets: One or two.
        batch_size: The objective's.
    """

    def __init__(self, buckets: Sequence[Bucket], batch_size: int) -> None:
        self.buckets = buckets
        batches = [len(bucket.examples) / (bucket.factor * batch_size) for bucket in buckets]
        self._fraction = batches[0] / sum(batches)

    def __len__(self) -> int:
        """Return how many pairs there are."""
        return sum(len(bucket.examples) for bucket in self.buckets)

    def at(self, step: int) -> tuple[Bucket, int]:
        """Return the bucket of a step, and how many steps have read it before."""
        before, after = int(step * self._fraction + 1e-9), int((step + 1) * self._fraction + 1e-9)
        return (self.buckets[0], before) if after > before else (self.buckets[-1], step - before)

    def batches_before(self, step: int) -> list[tuple[Bucket, int]]:
        """Return for each bucket how many of the steps before ``step`` have read it."""
        bucket, earlier = self.at(step)
        return [(own, earlier if own is bucket else step - earlier) for own in self.buckets]


def _whole_number(value: object, where: str, name: str) -> int | None:
    if value is None or value == "":
        return None
    try:
        # Tables of text have numbers as text.
        if isinstance(value, str | int) and not isinstance(value, bool):
            return int(value)
    except ValueError:
        pass
    raise DataError(f"{where}: {name!r} is a whole number, not {value!r}")
