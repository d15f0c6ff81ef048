"""Training pairs and triples: read from files, weighted, batched by length, and ordered in shuffled epochs."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from gerund.data.files import checked_text, field_of, filled_text, finite_number
from gerund.data.mining.substrings import normalised
from gerund.data.tables import FORMATS, open_table, whole_records
from gerund.errors import DataError
from gerund.training.corpus.texts import Mixture


@dataclass(frozen=True)
class Example:
    """A query, what belongs to it, and what does not."""

    query: str
    positive: str  # a text that belongs to it
    negatives: tuple[str, ...]  # texts that do not; there may be none
    instruction: str = ""  # what the query asks for, where examples have an instruction of their own
    task: str = ""  # which task it belongs to, where batches are of one task each


def read_examples(
    paths: Iterable[str | Path],
    *,
    query: str = "query",
    positive: str = "positive",
    negatives: str = "negatives",
    instruction: str | None = None,
    task: str | None = None,
) -> list[Example]:
    """Read examples from .jsonl, .csv, .tsv or .parquet files (text formats also .gz, .xz).

    ``positive`` names a text, or a list of texts whose first is taken; ``negatives`` a text or a list, absent or empty
    for none; an ``instruction`` may be empty. Errors name file and line.
    """
    return [
        Example(
            required_text(values, query, where),
            _first(field_of(values, positive, where), where, positive),
            _negatives(values.get(negatives), where, negatives),
            _instruction(values, instruction, where),
            "" if task is None else required_text(values, task, where),
        )
        for where, values in records(paths, (query, positive), (negatives, instruction, task))
    ]


def records(
    paths: Iterable[str | Path], required: tuple[str, str], optional: tuple[str | None, ...]
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the rows of files, at least one of each, with the required columns and the optional ones that it has."""
    wanted = list(dict.fromkeys(name for name in (*required, *optional) if name is not None))
    for path in map(Path, paths):
        if not path.is_file():
            raise DataError(f"{path}: no such file")
        table = open_table(path)
        if table.format == "txt":
            raise DataError(f"{path}: a txt file has no columns; valid formats are: {', '.join(FORMATS[1:])}")
        is_empty = True
        for where, values in whole_records(replace(table, column=required[0]), wanted, required=required):
            is_empty = False
            yield where, values
        if is_empty:
            raise DataError(f"{path}: no examples in there")


@dataclass(frozen=True)
class ScoredPair:
    """Two texts and how alike they are: the higher the more."""

    text1: str
    text2: str
    score: float


def read_scored_pairs(paths: Iterable[str | Path], *, text1: str, text2: str, score: str) -> list[ScoredPair]:
    """Read pairs of texts with a score from files as ``read_examples`` reads them; the three names are columns."""
    return [
        ScoredPair(
            required_text(values, text1, where),
            required_text(values, text2, where),
            finite_number(field_of(values, score, where), where, score),
        )
        for where, values in records(paths, (text1, text2), (score,))
    ]


class Examples:
    """Examples in shuffled epochs without repetition; row ``i`` is a pure function of the seed and ``i``.

    Each row gets ``hard_negatives`` negatives, sampled every time. An example with more gives different ones; one with
    fewer gives all of them and repeats them as evenly as can be.
    """

    def __init__(self, examples: Sequence[Example], *, seed: int, hard_negatives: int = 0) -> None:
        if not examples:
            raise DataError("there are no examples to train on")
        lacking = [number for number, example in enumerate(examples, start=1) if not example.negatives]
        if hard_negatives and lacking:
            raise DataError(
                f"hard_negatives={hard_negatives} needs negatives, and {len(lacking)} of {len(examples)} examples have "
                f"none; the first is number {lacking[0]}, {examples[lacking[0] - 1].query[:60]!r}"
            )
        self.examples, self.seed, self.hard_negatives = examples, seed, hard_negatives
        self._mixture = Mixture([len(examples)], [1.0], seed=seed)

    def __len__(self) -> int:
        """Return how many different examples there are."""
        return len(self.examples)

    def row(self, number: int) -> Example:
        """Return example ``number`` of the training, with exactly ``hard_negatives`` negatives."""
        example = self.examples[self._mixture.sample(number).item]
        if not self.hard_negatives:
            return replace(example, negatives=())
        order = np.random.default_rng([self.seed, 2, number]).permutation(len(example.negatives))
        sampled = np.resize(order, self.hard_negatives).tolist()
        return replace(example, negatives=tuple(example.negatives[index] for index in sampled))


class SameTaskExamples:
    """Examples in batches of one task each; row ``i`` is a pure function of the seed and ``i``.

    An epoch has as many batches of a task as it has examples for, at least one, in a shuffled order. What is left over
    of a task comes first in its next epoch.
    """

    def __init__(self, examples: Sequence[Example], *, seed: int, batch_size: int, hard_negatives: int = 0) -> None:
        by_task: dict[str, list[Example]] = {}
        for example in examples:
            by_task.setdefault(example.task, []).append(example)
        self.examples, self.seed, self.batch_size = examples, seed, batch_size
        self.tasks = [
            Examples(item, seed=seed + place, hard_negatives=hard_negatives)
            for place, item in enumerate(by_task.values())
        ]
        self._batches = np.array([max(1, len(task) // batch_size) for task in self.tasks])
        self._latest: tuple[int, np.ndarray] = (-1, np.zeros(0, dtype=int))

    def __len__(self) -> int:
        """Return how many different examples there are."""
        return sum(map(len, self.tasks))

    def row(self, number: int) -> Example:
        """Return example ``number`` of the training."""
        step, place = divmod(number, self.batch_size)
        epoch, nth = divmod(step, int(self._batches.sum()))
        if self._latest[0] != epoch:
            turns = np.repeat(np.arange(len(self.tasks)), self._batches)
            self._latest = (epoch, np.random.default_rng([self.seed, 3, epoch]).permutation(turns))
        order = self._latest[1]
        task = int(order[nth])
        batch = epoch * int(self._batches[task]) + int((order[:nth] == task).sum())
        return self.tasks[task].row(batch * self.batch_size + place)


def required_text(values: Mapping[str, Any], name: str, where: str) -> str:
    """Return a text that has to be there."""
    return filled_text(field_of(values, name, where), where, name)


def _first(value: object, where: str, name: str) -> str:
    if value == []:
        raise DataError(f"{where}: {name!r} is empty")
    first, *_ = (filled_text(item, where, name) for item in (value if isinstance(value, list) else [value]))
    return first


def _negatives(value: object, where: str, name: str) -> tuple[str, ...]:
    # An empty cell of a table is how an absent text looks there; an empty text in a list is a mistake.
    if value is None or value == "":
        return ()
    return tuple(filled_text(item, where, name) for item in (value if isinstance(value, list) else [value]))


def _instruction(values: Mapping[str, Any], name: str | None, where: str) -> str:
    """Return a query's own instruction; a row may have an empty one, but the column is there."""
    if name is None:
        return ""
    value = field_of(values, name, where)
    return "" if value is None else checked_text(value, where, name)


@dataclass(frozen=True)
class MinedPair:
    """A pair of texts of one document, as ``gerund mine`` writes it."""

    query: str  # one side; of a pair with a title, the title
    positive: str  # the other side
    opening: str | None
    """How the document begins whose title ``query`` is; None where it is none, or another row has it."""
    weight: int | None  # what both share weighs; None where that is not known


def read_pairs(
    paths: Iterable[str | Path],
    *,
    query: str = "text_a",
    positive: str = "text_b",
    opening: str = "opening",
    weight: str = "weight",
) -> list[MinedPair]:
    """Read pairs from files as ``read_examples`` reads them.

    ``opening`` and ``weight`` may be absent or empty.
    """
    return [
        MinedPair(
            required_text(values, query, where),
            required_text(values, positive, where),
            None if values.get(opening) in (None, "") else required_text(values, opening, where),
            _whole_number(values.get(weight), where, weight),
        )
        for where, values in records(paths, (query, positive), (opening, weight))
    ]


def heavy_pairs(
    pairs: Iterable[MinedPair], threshold: int, short_threshold: int, short_characters: int
) -> list[MinedPair]:
    """Return the pairs whose texts share enough.

    Short are pairs of two texts below ``short_characters``, in the normalised form that is mined.

    >>> pairs = [MinedPair("a", "b", None, 20), MinedPair("a", "b" * 64, None, 20), MinedPair("a", "b" * 64, None, 30)]
    >>> [len(pair.positive) for pair in heavy_pairs(pairs, 30, 20, 64)]
    [1, 64]
    >>> len(heavy_pairs([MinedPair("a", "b " * 20 + "   " * 30, None, 20)], 30, 20, 64))  # short, its spaces folded
    1
    """
    result = []
    for pair in pairs:
        if pair.weight is None:
            raise DataError(
                "a threshold of pairs needs their weights, as `gerund mine` writes them, and the pair of "
                f"{pair.query[:60]!r} has none"
            )
        short = max(len(normalised(pair.query)), len(normalised(pair.positive))) < short_characters
        if pair.weight >= (short_threshold if short else threshold):
            result.append(pair)
    if not result:
        raise DataError(f"no pair weighs as much as the threshold {threshold} asks for")
    return result


@dataclass(frozen=True)
class Bucket:
    """Pairs of about one length, which make batches of their own (GUR, section IV-A)."""

    examples: Examples
    length: int  # longest text in tokens
    factor: int = 1  # a batch has so many times the objective's batch size


class Buckets:
    """Which bucket a step reads: each in proportion to its batches, spread evenly, a pure function of the step."""

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
        return [(item, earlier if item is bucket else step - earlier) for item in self.buckets]


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
