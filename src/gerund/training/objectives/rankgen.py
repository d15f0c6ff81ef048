"""Train RankGen: an encoder that scores continuations of a prefix (section 2.2), on what ``gerund negatives`` writes.

Passages of one document are each other's negatives, except texts that overlap the true continuation: those are true
as well.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from gerund.data.files import checked_text, field_of, filled_text
from gerund.data.tables import json_lines
from gerund.errors import ConfigError, DataError
from gerund.inference.tokens import Tokens, keep_end
from gerund.scoring.dual_encoder import ScorerConfig, write_scorer
from gerund.training.corpus.tokenizer import InputFormatter
from gerund.training.objectives.base import VALIDATION_SEED, Batch, Batches, Context, Objective
from gerund.training.objectives.contrastive import ContrastiveLosses, TextGroup
from gerund.training.objectives.sections import ObjectiveConfig
from gerund.training.objectives.settings import RankgenConfig
from gerund.training.sharding import copy_of

_PARTS = "part-*.jsonl"
# The place of a generated text, which is nowhere in the document: it overlaps nothing.
_NOWHERE = (-1, -1)


def prepare(context: Context, config: RankgenConfig) -> Objective:
    """Return batches of passages, and InfoNCE."""
    batches = _batches(context, config, config.passages, context.seed(config))
    validation: dict[str, tuple[Batches, int]] = {}
    if config.validation:
        # The same batches in every run and at every evaluation.
        others = _batches(context, config, config.validation, VALIDATION_SEED)
        validation = {config.kind: (others, context.validation_batches(config, len(others.texts)))}
    if config.continuation_length <= batches.continuations.overhead + 1:
        raise ConfigError(f"rankgen: continuation_length {config.continuation_length} leaves no room for text")
    width = context.model.runtime.width
    losses = ContrastiveLosses(
        context.model.runtime,
        temperature=config.temperature,
        similarity=config.similarity,
        projection=width if config.projection else None,
        in_batch=config.negatives != "generative",
        below=context.model.below,
    )
    if isinstance(losses.projection, nn.Linear):
        with torch.no_grad():
            # The states' own directions to begin with, and products of about the square root of the width.
            losses.projection.weight.copy_(torch.eye(width) * width**-0.25)

    def extra_files() -> list[Callable[[Path], None]]:
        projection = losses.projection
        weight = copy_of(projection.weight).numpy() if isinstance(projection, nn.Linear) else None
        settings = ScorerConfig(
            prefix=config.prefix_marker,
            continuation=config.continuation_marker,
            prefix_tokens=config.length - batches.prefixes.overhead,
            continuation_tokens=config.continuation_length - batches.continuations.overhead,
            similarity=config.similarity,
        )
        return [lambda folder: write_scorer(folder, settings, weight)]

    configs: dict[str, ObjectiveConfig] = {config.kind: config}
    return Objective(config.kind, batches, losses, configs, validation=validation, extra_files=extra_files)


def _batches(context: Context, config: RankgenConfig, paths: list[Path], seed: int) -> "PassageBatches":
    with_negatives = config.negatives != "inbook"
    places = [context.recipe.data.folder / path for path in paths]
    examples = read_passages(places)
    for path, place in zip(paths, places, strict=True):
        context.source.reads(str(path), files_of(place))
    if with_negatives:
        examples = [example for example in examples if example.negatives]
        if not examples:
            raise ConfigError(
                f"rankgen: none of the passages in {', '.join(map(str, paths))} has a generated or hard "
                "continuation; make some with `gerund negatives --generate 1`, or set negatives: inbook"
            )
    return PassageBatches(
        Passages(examples, seed=seed),
        context.formatter(config, config.prefix_marker),
        context.formatter(config, config.continuation_marker),
        TextGroup.of(context),
        lengths=(config.length, config.continuation_length),
        with_negatives=with_negatives,
    )


@dataclass(frozen=True)
class PassageExample:
    """A prefix, what follows it, and what does not."""

    document: tuple[str, int]  # which document it is from; passages of one document are each other's negatives
    prefix: str
    continuation: str
    negatives: tuple[str, ...]  # continuations that a model generated, and hard ones
    span: tuple[int, int, int]
    """The prefix's first character in the document, the continuation's, and the one after its last."""
    negative_spans: tuple[tuple[int, int], ...]
    """First character and the one after the last of each negative; (-1, -1) for generated ones."""


def read_passages(paths: Sequence[Path]) -> list[PassageExample]:
    """Read files of passages, or all parts of folders of them."""
    passages: list[PassageExample] = []
    for path in paths:
        before = len(passages)
        for part in files_of(path):
            if not part.is_file():
                raise DataError(f"{part}: no such file or folder")
            passages += [_example(row, where, str(path)) for where, row in json_lines(part)]
        if len(passages) == before:
            raise DataError(f"{path}: no passages in there; `gerund negatives` makes them")
    return passages


def files_of(path: Path) -> list[Path]:
    """Return the parts of a folder of passages, or the file."""
    return sorted(path.glob(_PARTS)) if path.is_dir() else [path]


def _example(row: Mapping[str, Any], where: str, source: str) -> PassageExample:
    if type(row.get("document")) is not int:
        raise DataError(f"{where}: expected a JSON object with a number 'document'")
    for name in ("prefix", "continuation"):
        filled_text(field_of(row, name, where), where, name)
    generated, hard, places = (_items(row, where, name) for name in ("generated", "hard", "hard_spans"))
    for name, texts in (("generated", generated), ("hard", hard)):
        for text in texts:
            checked_text(text, where, name)
    start, middle, end = _span(field_of(row, "span", where), 3, where, "span")
    hard_spans = [_span(span, 2, where, "hard_spans") for span in places]
    if len(hard_spans) != len(hard):
        raise DataError(f"{where}: {len(hard)} texts in 'hard', and {len(hard_spans)} in 'hard_spans'")
    placed = [*((text, _NOWHERE) for text in generated), *zip(hard, hard_spans, strict=True)]
    negatives = [(text, (span[0], span[-1])) for text, span in placed if text.strip()]
    return PassageExample(
        document=(source, row["document"]),
        prefix=row["prefix"],
        continuation=row["continuation"],
        negatives=tuple(text for text, _ in negatives),
        span=(start, middle, end),
        negative_spans=tuple(span for _, span in negatives),
    )


def _items(row: Mapping[str, Any], where: str, name: str) -> list[Any]:
    value = [] if row.get(name) is None else row[name]
    if not isinstance(value, list):
        raise DataError(f"{where}: {name!r} is not a list but {type(value).__name__}")
    return value


def _span(value: Any, count: int, where: str, name: str) -> tuple[int, ...]:
    rises = isinstance(value, list) and len(value) == count and all(type(number) is int for number in value)
    if not rises or value[0] < 0 or any(first >= second for first, second in pairwise(value)):
        raise DataError(f"{where}: {name!r} holds {count} rising places of characters, not {value!r}")
    return tuple(value)


class Passages:
    """Passages in epochs without repetition, those of a document one after the other (RankGen, section 2.2).

    Documents come in a random order, and the passages of each in a random order, both sampled anew every epoch; so a
    batch is from one document, or, at its ends, from two or a few. Row ``i`` is a pure function of the seed and ``i``.
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


@dataclass(eq=False)
class PassageBatches(Batches):
    """Passages in the order of :class:`Passages`, with formatters for prefixes and for continuations and negatives.

    ``lengths`` are those of the longest prefix and continuation in tokens, special ones and marker included.
    """

    texts: Passages
    prefixes: InputFormatter
    continuations: InputFormatter
    group: TextGroup
    lengths: tuple[int, int]
    with_negatives: bool

    def batch_of(self, numbers: range) -> dict[str, Any]:
        """Return the groups ``query``, ``positive`` and, where passages bring any, ``negative``.

        Beside its tokens a text has a ``place`` (B, 3): its document, first character, and the one after its last; a
        query has that of its true continuation, with which no negative of it may overlap.
        """
        rows = self.read(numbers)
        longest, behind = self.lengths
        room = longest - self.prefixes.overhead
        tokenizer = self.prefixes.tokenizer
        right = [self._place(example, example.span[1:]) for example, _ in rows]
        groups = {
            "query": [
                # What stands right before the continuation says most of it.
                self.prefixes.format_text(keep_end(tokenizer, example.prefix, room), longest)
                for example, _ in rows
            ],
            "positive": [self.continuations.format_text(example.continuation.strip(), behind) for example, _ in rows],
        }
        places = {"query": right, "positive": right}
        if self.with_negatives:
            negatives = [(example, which) for example, which in rows if which is not None]
            groups["negative"] = [
                self.continuations.format_text(example.negatives[which].strip(), behind) for example, which in negatives
            ]
            places["negative"] = [self._place(example, example.negative_spans[which]) for example, which in negatives]
        return {name: self._group(texts, places[name]) for name, texts in groups.items()}

    def _group(self, texts: Sequence[Tokens], places: Sequence[tuple[int, int, int]]) -> Batch:
        return {**self.group(texts), "place": torch.tensor(places, dtype=torch.long).reshape(len(texts), 3)}

    @staticmethod
    def _place(example: PassageExample, span: tuple[int, ...]) -> tuple[int, int, int]:
        source, number = example.document
        digest = hashlib.blake2b(f"{number} {source}".encode(errors="replace"), digest_size=8).digest()
        return (int.from_bytes(digest, "little", signed=True), span[0], span[1])
