"""Passages of documents with wrong continuations, as ``gerund negatives`` writes them, and their order (RankGen).

Knows: rows, places in documents, epochs. Does not know: tokens, objectives.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from gerund.data.files import checked_text, decode, json_row, opened
from gerund.errors import DataError

_PARTS = "part-*.jsonl"
_GENERATED, _HARD = "generated", "hard"
# The place of a text that is nowhere in its document, or is not known to be: it overlaps nothing.
_NOWHERE = (-1, -1)
# The place of a hard one that is looked for when the whole file is read.
_LATER = (-2, -2)
# Characters by which a place in a document is looked up, before all of the text is compared.
_KNOWN_BY = 24


@dataclass(frozen=True)
class PassageExample:
    """A prefix, what follows it, and what does not.

    Attributes:
        document: which document it is from; passages of one document are each other's negatives.
        prefix: the prefix.
        continuation: its continuation.
        negatives: continuations that a model generated, and hard ones.
        span: the prefix's first character in the document, the continuation's, and the one after its last.
        negative_spans: first character and the one after the last of each negative; (-1, -1) for generated ones.
    """

    document: tuple[str, int]
    prefix: str
    continuation: str
    negatives: tuple[str, ...]
    span: tuple[int, int, int]
    negative_spans: tuple[tuple[int, int], ...]


def read_passages(paths: Sequence[Path]) -> list[PassageExample]:
    """Read files of passages, or all parts of folders of them.

    Rows without ``span``, as earlier versions wrote them, get places by :class:`_PlacesByText`.

    Raises:
        DataError: a path is not there, holds no passages, or has a malformed row.
    """
    found: list[PassageExample] = []
    for path in paths:
        before = len(found)
        places = _PlacesByText()
        for part in files_of(path):
            if not part.is_file():
                raise DataError(f"{part}: no such file or folder")
            with opened(part) as file:
                for number, raw in enumerate(file, start=1):
                    where = f"{part}, line {number}"
                    if line := decode(raw, where).strip():
                        found.append(_example(line, where, str(path), places))
        if len(found) == before:
            raise DataError(f"{path}: no passages in there; `gerund negatives` makes them")
        found[before:] = map(places.with_stretches, found[before:])
    return found


def files_of(path: Path) -> list[Path]:
    """Return the parts of a folder of passages, or the file."""
    return sorted(path.glob(_PARTS)) if path.is_dir() else [path]


def _example(line: str, where: str, source: str, places: "_PlacesByText") -> PassageExample:
    row = json_row(line, where)
    if not isinstance(row.get("document"), int):
        raise DataError(f"{where}: expected a JSON object with a number 'document'")
    texts = {}
    for name in ("prefix", "continuation"):
        if name not in row:
            raise DataError(f"{where}: no field {name!r}; present are: {', '.join(row)}")
        texts[name] = checked_text(row[name], where, name)
        if not texts[name].strip():
            raise DataError(f"{where}: {name!r} is empty")
    given = {name: [checked_text(text, where, name) for text in row.get(name) or ()] for name in (_GENERATED, _HARD)}
    if "span" in row:
        start, middle, end = _span(row["span"], 3, where, "span")
        hard_spans = [_span(one, 2, where, "hard_spans") for one in row.get("hard_spans") or ()]
        if len(hard_spans) != len(given[_HARD]):
            raise DataError(f"{where}: {len(given[_HARD])} texts in 'hard', and {len(hard_spans)} in 'hard_spans'")
    else:
        start, middle, end = places.passage(row["document"], texts["prefix"], texts["continuation"])
        hard_spans = [_LATER] * len(given[_HARD])
    placed = [*((text, _NOWHERE) for text in given[_GENERATED]), *zip(given[_HARD], hard_spans, strict=True)]
    own = [(text, (span[0], span[-1])) for text, span in placed if text.strip()]
    return PassageExample(
        document=(source, row["document"]),
        prefix=texts["prefix"],
        continuation=texts["continuation"],
        negatives=tuple(text for text, _ in own),
        span=(start, middle, end),
        negative_spans=tuple(span for _, span in own),
    )


def _span(value: Any, count: int, where: str, name: str) -> tuple[int, ...]:
    """Return rising places of characters."""
    rises = isinstance(value, list) and len(value) == count and all(type(one) is int for one in value)
    if not rises or value[0] < 0 or any(one >= two for one, two in pairwise(value)):
        raise DataError(f"{where}: {name!r} holds {count} rising places of characters, not {value!r}")
    return tuple(value)


class _PlacesByText:
    """Finds places of texts whose rows do not tell them: known are overlaps of passages that follow each other.

    Passages of a document are put together to as much of it as they show: each continues the text so far where that
    ends with what the passage begins with, and else begins behind a gap. Places count characters of that text, white
    space folded, and so only say which texts overlap.
    """

    def __init__(self) -> None:
        self._texts: dict[int, str] = {}
        self._latest: dict[int, int] = {}

    def passage(self, document: int, prefix: str, continuation: str) -> tuple[int, int, int]:
        """Return the places of a passage; those of a document are asked for in its order."""
        shown = self._texts.get(document, "")
        before, own = " ".join(prefix.split()), " ".join(f"{prefix} {continuation}".split())
        start = _continued_from(shown, own, self._latest.get(document, 0))
        if start < 0:
            # No text holds this character after white space was folded.
            shown += "\n"
            start = len(shown)
        self._texts[document] = shown + own[len(shown) - start :]
        self._latest[document] = start
        return start, start + len(before) + 1, start + len(own)

    def with_stretches(self, example: PassageExample) -> PassageExample:
        """Return an example with the places of its hard negatives; nowhere where no passage shows one."""
        if _LATER not in example.negative_spans:
            return example
        shown = self._texts[example.document[1]]
        spans = []
        for text, span in zip(example.negatives, example.negative_spans, strict=True):
            own = " ".join(text.split())
            start = shown.find(own)
            spans.append(span if span != _LATER else (start, start + len(own)) if start >= 0 else _NOWHERE)
        return replace(example, negative_spans=tuple(spans))


def _continued_from(shown: str, own: str, first: int) -> int:
    """Return from where on a text is what is shown, as far as that goes; -1 for nowhere behind ``first``."""
    start = shown.find(own[:_KNOWN_BY], first)
    while start >= 0 and not (own.startswith(shown[start:]) or shown.startswith(own, start)):
        start = shown.find(own[:_KNOWN_BY], start + 1)
    if start >= 0:
        return start
    last = range(max(first, len(shown) - _KNOWN_BY + 1), len(shown))
    return next(
        (start for start in last if shown[start - 1 : start] in ("", " ") and own.startswith(shown[start:])), -1
    )


class Passages:
    """Passages in epochs without repetition, those of a document one after the other (RankGen, section 2.2).

    Documents come in a random order, and the passages of each in a random order, both sampled anew every epoch; so a
    batch is from one document, or, at its ends, from two or a few. Row ``i`` is a pure function of the seed and ``i``.

    Args:
        examples: the passages.
        seed: determines all orders and which negative is taken.

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

    def row(self, number: int) -> tuple[PassageExample, int | None]:
        """Return passage ``number`` of the training and which negative of its own, None where it has none."""
        epoch, place = divmod(number, len(self.examples))
        example = self.examples[self._order(epoch)[place]]
        if not example.negatives:
            return example, None
        rng = np.random.default_rng([self.seed, 1, number])
        return example, int(rng.integers(len(example.negatives)))

    def _order_of(self, epoch: int) -> list[int]:
        rng = np.random.default_rng([self.seed, 0, epoch])
        documents = list(self._by_document.values())
        return [
            documents[which][place]
            for which in rng.permutation(len(documents)).tolist()
            for place in rng.permutation(len(documents[which])).tolist()
        ]
