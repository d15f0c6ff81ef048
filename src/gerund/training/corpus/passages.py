"""Reads the passages that ``gerund negatives`` writes, and deals them document by document.

Knows: rows of passages, files, the order. Does not know: tokens, markers, losses.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from gerund.data.files import checked_text, decode, opened
from gerund.errors import DataError

_PARTS = "part-*.jsonl"
_GENERATED, _HARD = "generated", "hard"


@dataclass(frozen=True)
class PassageExample:
    """A prefix, what follows it, and what does not.

    Attributes:
        document: which document it is from; passages of one document are each other's negatives.
        prefix: the prefix.
        continuation: its continuation.
        negatives: continuations that a model generated, and hard ones.
    """

    document: tuple[str, int]
    prefix: str
    continuation: str
    negatives: tuple[str, ...]


def read_passages(paths: Sequence[Path]) -> list[PassageExample]:
    """Read files of passages, or all parts of folders of them.

    Raises:
        DataError: a path is not there, holds no passages, or has a malformed row.
    """
    found: list[PassageExample] = []
    for path in paths:
        parts = sorted(path.glob(_PARTS)) if path.is_dir() else [path]
        before = len(found)
        for part in parts:
            if not part.is_file():
                raise DataError(f"{part}: no such file or folder")
            with opened(part) as file:
                for number, raw in enumerate(file, start=1):
                    where = f"{part}, line {number}"
                    if line := decode(raw, where).strip():
                        found.append(_example(line, where, str(path)))
        if len(found) == before:
            raise DataError(f"{path}: no passages in there; `gerund negatives` makes them")
    return found


def _example(line: str, where: str, source: str) -> PassageExample:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where}: not valid JSON ({error})") from error
    if not isinstance(row, dict) or not isinstance(row.get("document"), int):
        raise DataError(f"{where}: expected a JSON object with a number 'document'")
    texts = {}
    for name in ("prefix", "continuation"):
        if name not in row:
            raise DataError(f"{where}: no field {name!r}; present are: {', '.join(row)}")
        texts[name] = checked_text(row[name], where, name)
        if not texts[name].strip():
            raise DataError(f"{where}: {name!r} is empty")
    negatives = [checked_text(text, where, name) for name in (_GENERATED, _HARD) for text in row.get(name) or ()]
    own = tuple(text for text in negatives if text.strip())
    return PassageExample((source, row["document"]), texts["prefix"], texts["continuation"], own)


class Passages:
    """Passages in epochs without repetition, those of a document one after the other (RankGen, section 2.2).

    Documents come in a random order, and the passages of each in a random order, both drawn anew every epoch; so a
    batch is from one document, or, at its ends, from two or a few. Row ``i`` is a pure function of the seed and ``i``.

    Args:
        examples: what is dealt.
        seed: decides all orders and which negative is taken.

    Raises:
        DataError: there are none.
    """

    def __init__(self, examples: Sequence[PassageExample], *, seed: int) -> None:
        if not examples:
            raise DataError("there are no passages to train on")
        self.examples, self.seed = examples, seed
        self._by_document: dict[tuple[str, int], list[int]] = {}
        for place, example in enumerate(examples):
            self._by_document.setdefault(example.document, []).append(place)
        self._order = lru_cache(maxsize=2)(self._order_of)

    def __len__(self) -> int:
        """Return how many passages there are."""
        return len(self.examples)

    def row(self, number: int) -> tuple[PassageExample, str | None]:
        """Return passage ``number`` of the training and one of its negatives, None where it has none."""
        epoch, place = divmod(number, len(self.examples))
        example = self.examples[self._order(epoch)[place]]
        if not example.negatives:
            return example, None
        draw = np.random.default_rng([self.seed, 1, number])
        return example, example.negatives[int(draw.integers(len(example.negatives)))]

    def _order_of(self, epoch: int) -> list[int]:
        draw = np.random.default_rng([self.seed, 0, epoch])
        documents = list(self._by_document.values())
        return [
            documents[which][place]
            for which in draw.permutation(len(documents)).tolist()
            for place in draw.permutation(len(documents[which])).tolist()
        ]
