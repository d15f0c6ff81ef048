"""RankGen: an encoder that scores continuations of a prefix (section 2.2), and the passages it learns from.

``gerund negatives`` writes the passages. They are read document by document: those of one document are each other's
negatives.

Knows: rows of passages, their order, markers, which texts stand on which side. Does not know: the loss (``vectors``).
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, cast

import numpy as np
from pydantic import Field, model_validator

from gerund.data.files import checked_text, decode, opened
from gerund.errors import ConfigError, DataError
from gerund.training.objectives.base import Batches, Objective
from gerund.training.objectives.context import VALIDATION_SEED
from gerund.training.objectives.vectors import ContrastiveLosses, Similarity, TextGroup, VectorConfig

if TYPE_CHECKING:
    from gerund.training.corpus.formatting import InputFormatter
    from gerund.training.objectives.context import Context

_PARTS = "part-*.jsonl"
_GENERATED, _HARD = "generated", "hard"


class RankgenConfig(VectorConfig):
    """An encoder that scores continuations of a prefix (RankGen, section 2.2)."""

    seed_offset: ClassVar[int | None] = 60

    kind: Literal["rankgen"]
    passages: list[Path] = Field(min_length=1)
    """What ``gerund negatives`` made: folders or files, relative to ``data.folder``."""
    validation: list[Path] = Field(default_factory=list)
    """What it made of other documents, which is measured at every evaluation."""
    negatives: Literal["both", "inbook", "generative"] = "both"
    """``inbook``: the other continuations of the batch, which is from one document. ``generative``: the generated (and
    hard) ones of the batch. ``both``: all of them. With the last two, passages that have none are left out."""
    batch_size: int = Field(default=64, ge=2)
    length: int = Field(default=512, ge=2)
    """Longest prefix in tokens, marker and special tokens included; of a longer one the end is kept."""
    continuation_length: int = Field(default=128, ge=2)
    """Longest continuation in tokens, marker and special tokens included."""
    prefix_marker: str = "pre "
    """Put before prefixes."""
    continuation_marker: str = "suffi "
    """Put before continuations."""
    similarity: Similarity = "dot"
    """``dot``, as in the paper, or ``cosine``."""
    temperature: float = Field(default=1.0, gt=0)
    """Scores are divided by it."""
    projection: bool = True
    """Whether a linear map without bias makes a state into a vector; it is kept with the model."""

    @model_validator(mode="after")
    def _texts_may_differ(self) -> Self:
        if self.similarity == "cosine" and self.temperature == 1.0:
            raise ValueError("similarity cosine needs a temperature, such as 0.05: cosines lie between -1 and 1")
        return self

    @property
    def reads_sources(self) -> bool:
        """Whether it reads the recipe's sources."""
        return False

    def prepare(self, context: "Context") -> Objective:
        """Return batches of passages, and InfoNCE."""
        import torch
        from torch import nn

        batches = self._batches(context, self.passages, context.seed(self))
        validation: dict[str, tuple[Batches, int]] = {}
        if self.validation:
            # The same batches in every run and at every evaluation.
            others = self._batches(context, self.validation, VALIDATION_SEED)
            validation = {self.kind: (others, context.validation_batches(self, len(others.texts)))}
        if self.continuation_length <= batches.continuations.overhead + 1:
            raise ConfigError(f"rankgen: continuation_length {self.continuation_length} leaves no room for text")
        width = context.model.runtime.width
        losses = ContrastiveLosses(
            context.model.runtime,
            temperature=self.temperature,
            similarity=self.similarity,
            projection=width if self.projection else None,
            in_batch=self.negatives != "generative",
        )
        if isinstance(losses.projection, nn.Linear):
            with torch.no_grad():
                # The states' own directions to begin with, and products of about the square root of the width.
                losses.projection.weight.copy_(torch.eye(width) * width**-0.25)
        return RankgenObjective(self.kind, batches, losses, {self.kind: self}, validation=validation)

    def _batches(self, context: "Context", paths: list[Path], seed: int) -> "PassageBatches":
        with_negatives = self.negatives != "inbook"
        found = read_passages([context.recipe.data.folder / path for path in paths])
        if with_negatives:
            found = [example for example in found if example.negatives]
            if not found:
                raise ConfigError(
                    f"rankgen: none of the passages in {', '.join(map(str, paths))} has a generated or hard "
                    "continuation; make some with `gerund negatives --generate 1`, or set negatives: inbook"
                )
        return PassageBatches(
            Passages(found, seed=seed),
            context.formatter(self, self.prefix_marker),
            context.formatter(self, self.continuation_marker),
            TextGroup.of(context),
            lengths=(self.length, self.continuation_length),
            with_negatives=with_negatives,
        )


class RankgenObjective(Objective):
    """A scorer of continuations that is ready to be trained."""

    def extra_files(self) -> Iterator[Callable[[Path], None]]:
        """Yield what writes the scorer beside the model."""
        from gerund.scoring.dual import ScorerSettings, write_scorer

        config, batches = cast("RankgenConfig", self.config), cast("PassageBatches", self.batches)
        projection = cast("ContrastiveLosses", self.losses).projection
        weight = getattr(projection, "weight", None)
        if weight is not None:
            weight = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
            weight = weight.detach().float().cpu().numpy().copy()
        settings = ScorerSettings(
            prefix=config.prefix_marker,
            continuation=config.continuation_marker,
            prefix_tokens=config.length - batches.prefixes.overhead,
            continuation_tokens=config.continuation_length - batches.continuations.overhead,
            similarity=config.similarity,
        )
        yield lambda folder: write_scorer(folder, settings, weight)


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

    def row(self, number: int) -> tuple[PassageExample, str | None]:
        """Return passage ``number`` of the training and one of its negatives, None where it has none."""
        epoch, place = divmod(number, len(self.examples))
        example = self.examples[self._order(epoch)[place]]
        if not example.negatives:
            return example, None
        rng = np.random.default_rng([self.seed, 1, number])
        return example, example.negatives[int(rng.integers(len(example.negatives)))]

    def _order_of(self, epoch: int) -> list[int]:
        rng = np.random.default_rng([self.seed, 0, epoch])
        documents = list(self._by_document.values())
        return [
            documents[which][place]
            for which in rng.permutation(len(documents)).tolist()
            for place in rng.permutation(len(documents[which])).tolist()
        ]


class PassageBatches(Batches):
    """Passages in the order of :class:`Passages`.

    Args:
        passages: Prefixes, continuations and negatives by number.
        prefixes: Formats prefixes.
        continuations: Formats continuations and negatives.
        group: Makes a group of texts into tensors.
        lengths: Longest prefix and continuation in tokens, special ones and marker included.
        with_negatives: Whether each passage brings a negative of its own.
    """

    def __init__(
        self,
        passages: Passages,
        prefixes: "InputFormatter",
        continuations: "InputFormatter",
        group: TextGroup,
        *,
        lengths: tuple[int, int],
        with_negatives: bool,
    ) -> None:
        self.texts, self.prefixes, self.continuations = passages, prefixes, continuations
        self.group, self.lengths, self.with_negatives = group, lengths, with_negatives

    def make(self, step: int, first: int, count: int) -> dict[str, Any]:
        """Return the groups ``query``, ``positive`` and, where passages bring any, ``negative``."""
        from gerund.inference.tokens import keep_end

        del step
        rows = [self.texts.row(number) for number in range(first, first + count)]
        longest, behind = self.lengths
        room = longest - self.prefixes.overhead
        tokenizer = self.prefixes.tokenizer
        groups = {
            "query": [
                # What stands right before the continuation says most of it.
                self.prefixes.format_text(keep_end(tokenizer, example.prefix, room), longest)
                for example, _ in rows
            ],
            "positive": [self.continuations.format_text(example.continuation.strip(), behind) for example, _ in rows],
        }
        if self.with_negatives:
            negatives = [negative for _, negative in rows if negative is not None]
            groups["negative"] = [self.continuations.format_text(text.strip(), behind) for text in negatives]
        return {name: self.group(texts) for name, texts in groups.items()}
