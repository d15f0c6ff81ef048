"""RankGen: an encoder that scores continuations of a prefix (section 2.2).

Passages of one document are each other's negatives, but for texts that overlap the true continuation: those are true as
well.

Knows: passages with their places, markers, which texts stand on which side. Does not know: the loss (``vectors``), how
passages are read (``corpus.passages``).
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, cast

from pydantic import Field, model_validator

from gerund.errors import ConfigError
from gerund.training.corpus.passages import PassageExample, Passages, files_of, read_passages
from gerund.training.objectives.base import Batch, Batches, Objective, Purpose
from gerund.training.objectives.context import VALIDATION_SEED
from gerund.training.objectives.vectors import ContrastiveLosses, Similarity, TextGroup, VectorConfig

if TYPE_CHECKING:
    from gerund.inference.tokens import Tokens
    from gerund.training.corpus.formatting import InputFormatter
    from gerund.training.objectives.context import Context


class RankgenConfig(VectorConfig):
    """An encoder that scores continuations of a prefix (RankGen, section 2.2)."""

    purpose: ClassVar[Purpose] = Purpose.SCORE
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
        places = [context.recipe.data.folder / path for path in paths]
        found = read_passages(places)
        for path, place in zip(paths, places, strict=True):
            context.source.reads(str(path), files_of(place))
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
        from gerund.scoring.dual_encoder import ScorerConfig, write_scorer

        config, batches = cast("RankgenConfig", self.config), cast("PassageBatches", self.batches)
        projection = cast("ContrastiveLosses", self.losses).projection
        weight = getattr(projection, "weight", None)
        if weight is not None:
            weight = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
            weight = weight.detach().float().cpu().numpy().copy()
        settings = ScorerConfig(
            prefix=config.prefix_marker,
            continuation=config.continuation_marker,
            prefix_tokens=config.length - batches.prefixes.overhead,
            continuation_tokens=config.continuation_length - batches.continuations.overhead,
            similarity=config.similarity,
        )
        yield lambda folder: write_scorer(folder, settings, weight)


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
        """Return the groups ``query``, ``positive`` and, where passages bring any, ``negative``.

        Beside its tokens a text has a ``place`` (B, 3): its document, first character, and the one after its last; a
        query has that of its true continuation, with which no negative of it may overlap.
        """
        from gerund.inference.tokens import keep_end

        del step
        rows = [self.texts.row(number) for number in range(first, first + count)]
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
            own = [(example, which) for example, which in rows if which is not None]
            groups["negative"] = [
                self.continuations.format_text(example.negatives[which].strip(), behind) for example, which in own
            ]
            places["negative"] = [self._place(example, example.negative_spans[which]) for example, which in own]
        return {name: self._group(texts, places[name]) for name, texts in groups.items()}

    def _group(self, texts: "Sequence[Tokens]", places: Sequence[tuple[int, int, int]]) -> Batch:
        import torch

        return {**self.group(texts), "place": torch.tensor(places, dtype=torch.long).reshape(len(texts), 3)}

    @staticmethod
    def _place(example: PassageExample, span: tuple[int, ...]) -> tuple[int, int, int]:
        source, number = example.document
        digest = hashlib.blake2b(f"{number} {source}".encode(errors="replace"), digest_size=8).digest()
        return (int.from_bytes(digest, "little", signed=True), span[0], span[1])
