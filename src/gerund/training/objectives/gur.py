"""Pairs of texts of one document that share words: language modelling and contrastive learning in one pass (GUR).

GUR, section III-A, equation 1: ``LM loss + alpha * CL loss``. The encoder reads both sides of a pair with spans
hidden; its states go to the projection head, whose vectors are compared, and to the decoder, which writes what is
hidden. A decoder-only model has the contrastive loss alone: its language modelling is an objective of its own beside
this one.

Knows: which texts make a batch, both losses. Does not know: where pairs come from.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from gerund.errors import ConfigError
from gerund.training.objectives.base import Batch, Batches, JointLosses, Objective, ObjectiveConfig, Purpose, Section
from gerund.training.objectives.batches import row_generator
from gerund.training.objectives.span_corruption import Corruption, demand_decoder, with_targets, written_tokens
from gerund.training.objectives.vectors import ContrastiveConfig, ContrastiveLosses, TextGroup

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from gerund.inference.tokens import Tokens
    from gerund.models.heads import ProjectionHead
    from gerund.settings.encoder import EncoderConfig
    from gerund.training.corpus.formatting import InputFormatter
    from gerund.training.corpus.pairs import Buckets, Example, Examples, MinedPair
    from gerund.training.objectives.context import Context

TITLE_PROMPT = "document2title: "  # before a text whose title is to be written (GUR, section IV-A)

# Of the projection head: GUR, Table I.
_DIMENSIONS = 128
_TITLE_FRACTION = 0.1
_TITLE_SEED = 2  # added to the seed for the order of titles; buckets of pairs have 0 and 1


class PairsOfDocuments(Section):
    """Files of pairs, as ``gerund mine`` writes them."""

    files: list[Path] = Field(min_length=1)
    """Files, relative to ``data.folder``."""
    query: str = "text_a"
    """Column or field of one side; of pairs with a title, the title."""
    positive: str = "text_b"
    """Column or field of the other side."""
    opening: str = "opening"
    """Column or field of the beginning of the document whose title ``query`` is; empty where it is no title."""
    weight: str = "weight"
    """Column or field of what the two texts' common substring weighs."""
    threshold: int | None = Field(default=None, ge=1)
    """Pairs that weigh less are left out; left out, all are taken."""
    short_threshold: int | None = Field(default=None, ge=1)
    """The same for two texts of fewer than ``short_characters`` each (GUR, section IV-A: 20, two Chinese characters,
    with a ``threshold`` of 30); left out, ``threshold``."""

    @model_validator(mode="after")
    def _thresholds(self) -> Self:
        if self.short_threshold is not None and self.short_threshold > (self.threshold or 0):
            raise ValueError(f"short_threshold {self.short_threshold} is above threshold {self.threshold}")
        return self


class GurConfig(ContrastiveConfig):
    """Pairs of one document, in one pass for language modelling and contrastive learning (GUR, equation 1)."""

    trains_head: ClassVar[bool] = True
    purpose: ClassVar[Purpose] = Purpose.EMBED_BY_PAIRS
    reads_pairs: ClassVar[bool] = True
    seed_offset: ClassVar[int | None] = 80
    renamed: ClassVar[Mapping[str, str]] = {"title_share": "title_fraction"}

    kind: Literal["gur"]
    pairs: PairsOfDocuments
    batch_size: int = Field(default=64, ge=2)
    """Pairs of one optimizer step; of short ones ``short_factor`` times as many."""
    length: int = Field(default=128, ge=8)
    """Longest text in tokens; of a longer one a random stretch is read."""
    short_length: int | None = Field(default=None, ge=8)
    """Pairs of two short texts make batches of their own, whose texts have at most so many tokens (GUR has 32); left
    out, all pairs are read together."""
    short_characters: int = Field(default=64, ge=1)
    """A text of fewer characters is a short one; a pair is, where both are."""
    short_factor: int = Field(default=4, ge=1)
    """A batch of short pairs has so many times ``batch_size``."""
    temperature: float = Field(default=0.1, gt=0)
    """Similarities are divided by it."""
    alpha: float = Field(default=1.0, ge=0)
    """Weight of the contrastive loss beside language modelling; 0 leaves it out (the paper's GUR-CL)."""
    lm: bool | None = None
    """Whether the decoder writes what is hidden of both texts; false leaves that loss out and reads the same texts with
    the same spans hidden (the paper's GUR-LM). Left out, it does where there is a decoder beside an encoder. A
    decoder-only model reads whole texts, and has objectives of its own for language modelling, such as ``causal`` or
    ``unimae``, in the same recipe."""
    rate: float = Field(default=0.15, ge=0, lt=1)
    """Fraction of the tokens that are hidden; 0, with ``lm`` false only, reads whole texts."""
    spans: Literal["hump", "geometric", "t5"] = "hump"
    """How long hidden spans are: ``hump`` (equation 3), ``geometric`` (SpanBERT's) or ``t5``."""
    title_fraction: float | None = Field(default=None, ge=0, le=1)
    """Beside the pairs of a batch, so many times their number of documents are read, at least one, whose titles are
    to be written (document2title, section IV-A); with ``lm`` only. Left out, 0.1 where files have openings."""
    dimensions: int | None = Field(default=None, ge=1)
    """Numbers of a vector behind a non-linear projection head, which is kept with the model; GUR has 128. Left out,
    as many as the base's head has, or 128 for an encoder-decoder model without one, and no head for others."""
    variant: Literal["paper", "released"] | None = None
    """Of the head: ``paper``, two linear maps with a ReLU between, or ``released``, that of the released code, gated
    and normed. Left out, the base's, or ``paper``."""

    @classmethod
    def purpose_of(cls, settings: Mapping[str, Any]) -> Purpose:
        """Return what these settings are for."""
        return Purpose.WRITE if settings.get("alpha") == 0 else cls.purpose  # without the contrastive loss

    @model_validator(mode="after")
    def _heads_and_lengths(self) -> Self:
        if self.projection is not None and self.dimensions is not None:
            raise ValueError("projection is a head for training only, dimensions one that is kept: give one of them")
        if self.short_length is not None and self.short_length > self.length:
            raise ValueError(f"short_length {self.short_length} is above length {self.length}")
        if self.lm is False and self.alpha == 0:
            raise ValueError("with lm false and alpha 0 nothing is learned")
        if self.rate == 0 and self.lm is not False:
            raise ValueError("rate 0 hides nothing that could be written; it belongs to lm: false")
        if self.lm is False and self.title_fraction:
            raise ValueError("title_fraction is a fraction of texts whose titles are written, and lm is false")
        return self

    @property
    def reads_sources(self) -> bool:
        """Whether it reads the recipe's sources."""
        return False

    def check_model(self, model: str, encoder: "EncoderConfig") -> None:
        """Refuse to write where there is no decoder for it."""
        if self.lm:
            demand_decoder("gur with lm", model)
        super().check_model(model, encoder)

    def prepare(self, context: "Context") -> Objective:
        """Return batches of pairs, and both losses or one of them."""
        seq2seq = context.model.is_encoder_decoder
        writes = seq2seq if self.lm is None else self.lm
        losses = GurLosses(
            context.model.runtime,
            temperature=self.temperature,
            similarity=self.similarity,
            projection=self.projection,
        )
        head = self._head(context)
        if head is not None:
            losses.heads.projection = head
        losses.of(self, context)
        formatter = context.formatter(self)
        seed = context.seed(self)
        pairs = self._pairs(context)
        batches = GurBatches(
            self._buckets(pairs, seed),
            self.batch_size,
            formatter,
            TextGroup.of(context),
            seed=seed,
            corruption=Corruption.of(context, self) if seq2seq and self.rate else None,
            writes=writes,
            titles=self._titles(context, pairs, seed) if writes else None,
        )
        configs: dict[str, ObjectiveConfig] = {"gur": self, **({"lm": self} if writes else {})}
        return Objective(self.kind, batches, losses, configs, factors={"gur": self.alpha})

    def _head(self, context: "Context") -> "ProjectionHead | None":
        """Return the base's head, to be trained further, or a new one, or None where the recipe asks for none."""
        from gerund.models.heads import HeadConfig, ProjectionHead

        model, asked = context.model, self.dimensions
        head = model.head
        if asked is None and (self.projection is not None or not (model.is_encoder_decoder or head)):
            return None
        if head is None:
            shape = HeadConfig(model.runtime.state_width, asked or _DIMENSIONS, self.variant or "paper")
            head = ProjectionHead(shape)
        own = head.settings
        if asked not in (None, own.dimensions) or self.variant not in (None, own.variant):
            raise ConfigError(
                f"gur: the base has a head of {own.dimensions} dimensions ({own.variant}), and the recipe asks for "
                f"{asked or own.dimensions} ({self.variant or own.variant}); left out, that of the base is trained "
                "further"
            )
        model.head = head.float().train()
        return model.head

    def _titles(self, context: "Context", pairs: "Sequence[MinedPair]", seed: int) -> "Titles | None":
        """Return the documents whose titles are written; None where none are, or none are wanted.

        Raises:
            ConfigError: Titles are asked for, and no pair has any.
        """
        from gerund.training.corpus.pairs import Example, Examples

        found = [Example(pair.query, pair.opening, ()) for pair in pairs if pair.opening is not None]
        fraction = self.title_fraction
        if not found and fraction:
            raise ConfigError(
                f"gur: title_fraction {fraction} needs documents with titles, and no pair has one in the column "
                f"{self.pairs.opening!r}; mine with --pairs title, or set title_fraction to 0"
            )
        fraction = _TITLE_FRACTION if fraction is None else fraction
        if not found or not fraction:
            return None
        formatter, fraction = context.formatter(self, TITLE_PROMPT), max(fraction, 1 / self.batch_size)
        return Titles(Examples(found, seed=seed + _TITLE_SEED), formatter, self.length, fraction)

    def _pairs(self, context: "Context") -> "list[MinedPair]":
        """Return the pairs that weigh enough."""
        from gerund.training.corpus.pairs import heavy_pairs, read_pairs

        own = self.pairs
        columns = {"query": own.query, "positive": own.positive, "opening": own.opening, "weight": own.weight}
        found = read_pairs(context.files(own.files), **columns)
        if own.threshold is None:
            return found
        return heavy_pairs(found, own.threshold, own.short_threshold or own.threshold, self.short_characters)

    def _buckets(self, pairs: "Sequence[MinedPair]", seed: int) -> "Buckets":
        from gerund.training.corpus.pairs import Bucket, Buckets, Example, Examples

        found = [Example(pair.query, pair.positive, ()) for pair in pairs]
        if self.short_length is None:
            return Buckets([Bucket(Examples(found, seed=seed), self.length)], self.batch_size)
        by_length: tuple[list[Example], list[Example]] = ([], [])
        for one in found:
            by_length[max(len(one.query), len(one.positive)) >= self.short_characters].append(one)
        shapes = ((self.short_length, self.short_factor), (self.length, 1))
        buckets = [
            Bucket(Examples(examples, seed=seed + place), length, factor)
            for place, (examples, (length, factor)) in enumerate(zip(by_length, shapes, strict=True))
            if examples
        ]
        return Buckets(buckets, self.batch_size)


@dataclass(frozen=True)
class Titles:
    """Documents whose titles are written (GUR, section IV-A: document2title).

    Attributes:
        examples: title and opening of each document.
        formatter: formats openings.
        length: longest opening, and longest title, in tokens.
        fraction: documents for each pair of a batch.
    """

    examples: "Examples"
    formatter: "InputFormatter"
    length: int
    fraction: float

    def count(self, pairs: int) -> int:
        """Return how many documents go with the first ``pairs`` pairs of a batch."""
        return int(self.fraction * pairs + 1e-9)


class GurBatches(Batches):
    """Pairs in a shuffled order.

    Args:
        buckets: The pairs, by length.
        batch_size: Pairs of a step.
        formatter: Formats texts.
        group: Makes a group of texts into tensors.
        seed: Determines crops and spans.
        corruption: Hides spans; None where whole texts are read.
        writes: Whether the decoder writes what is hidden.
        titles: Documents whose titles are to be written; None for no such task.
    """

    def __init__(
        self,
        buckets: "Buckets",
        batch_size: int,
        formatter: "InputFormatter",
        group: TextGroup,
        *,
        seed: int,
        corruption: Corruption | None = None,
        writes: bool = False,
        titles: Titles | None = None,
    ) -> None:
        self.texts, self.batch_size, self.formatter, self.group = buckets, batch_size, formatter, group
        self.seed, self.corruption, self.writes, self.titles = seed, corruption, writes, titles

    def make(self, step: int, first: int, count: int) -> dict[str, Any]:
        """Return the groups ``query`` and ``positive`` and, with the task of titles, ``title``."""
        bucket, earlier = self.texts.at(step)
        offset = first - step * self.batch_size  # where this process's part of the batch begins
        begin = (earlier * self.batch_size + offset) * bucket.factor
        numbers = range(begin, begin + count * bucket.factor)
        rows = [bucket.examples.row(number) for number in numbers]
        sides = {"query": [row.query for row in rows], "positive": [row.positive for row in rows]}
        groups = {
            name: self._side(texts, numbers, bucket.length, place) for place, (name, texts) in enumerate(sides.items())
        }
        titled = self._documents(step, offset * bucket.factor, (offset + count) * bucket.factor)
        if titled:
            groups["title"] = self._titled(titled)
        return groups

    def _documents(self, step: int, first: int, stop: int) -> "list[Example]":
        """Return the documents that go with the pairs ``first`` to ``stop`` of a batch.

        Spread evenly over the whole batch, so that several processes take those that one would.
        """
        titles = self.titles
        if titles is None:
            return []
        before = sum(
            count * titles.count(bucket.factor * self.batch_size) for bucket, count in self.texts.batches_before(step)
        )
        return [titles.examples.row(before + nth) for nth in range(titles.count(first), titles.count(stop))]

    def _side(self, texts: Sequence[str], numbers: range, length: int, side: int) -> Batch:
        formatted, targets = [], []
        for text, number in zip(texts, numbers, strict=True):
            rng = row_generator(self.seed + side, number)
            whole = self._cropped(text, length, rng)
            own, target = (whole, []) if self.corruption is None else self.corruption(whole, rng)
            formatted.append(own)
            targets.append(target)
        batch = self.group(formatted)
        # Which texts are the same is asked of them as they are, not of what is left of them.
        batch["identity"] = self.group.identities(texts)
        return with_targets(batch, targets) if self.writes else batch

    def _cropped(self, text: str, length: int, rng: Any) -> "Tokens":
        """Return a text as the encoder reads it; of a longer one a random stretch (GUR, section III-B, step 5)."""
        whole = self.formatter.format_text(text, None)
        if len(whole) <= length:
            return whole
        places = self.formatter.places(whole)
        room = length - (len(whole) - len(places))
        begin = places.start + int(rng.integers(len(places) - room + 1))
        return self.formatter.format(whole.ids[begin : begin + room])

    def _titled(self, rows: "Sequence[Example]") -> Batch:
        assert self.titles is not None
        assert self.corruption is not None
        formatter, length = self.titles.formatter, self.titles.length
        batch = self.group([formatter.format_text(row.positive, length + formatter.overhead) for row in rows])
        plain = self.formatter.tokenizer
        written = [plain(row.query, add_special_tokens=False, verbose=False)["input_ids"][: length - 1] for row in rows]
        return with_targets(batch, [[*ids, self.corruption.end] for ids in written])


class GurLosses(ContrastiveLosses, JointLosses):
    """Symmetric InfoNCE between the sides of the pairs, and what the decoder writes, in one pass of the encoder.

    The arguments are those of :class:`ContrastiveLosses`.
    """

    def counts(self, batch: Mapping[str, Batch]) -> dict[str, int]:
        """Return over how many tokens the decoder's loss is summed; nothing where it writes nothing."""
        if "labels" not in batch["query"]:
            return {}
        return {"lm": sum(map(written_tokens, batch.values()))}

    def __call__(self, model: "PreTrainedModel", part: Batch) -> "Tensor":
        """Return the vectors ``(B, D)``, in one pass where ``joint`` reads the same texts under the same dropout."""
        if "labels" not in part:
            return super().__call__(model, part)
        return self.heads.vectors(self.heads.states(model, part), part)

    def joint(self, model: "PreTrainedModel", part: Batch) -> "tuple[Tensor, dict[str, Tensor]]":
        """Return the vectors ``(B, D)`` and, where something is to be written, the decoder's summed loss."""
        from gerund.training.losses.vocabulary import decoder_loss

        hidden_BTD = self.heads.states(model, part)
        vectors_BD = self.heads.vectors(hidden_BTD, part)
        if "labels" not in part:
            return vectors_BD, {}
        return vectors_BD, {"lm": decoder_loss(model, hidden_BTD, part["real"], part["labels"])}

    def compare(self, vectors_ND: "Tensor", batch: Mapping[str, Batch], *, gather: bool) -> "tuple[Tensor, int]":
        """Return the mean over both directions of InfoNCE (equation 2), and how many queries find their positive."""
        from gerund.training.losses.vectors import both_ways_info_nce

        identities = (batch["query"]["identity"], batch["positive"]["identity"])
        pairs = len(identities[0])

        def cut(vectors_NE: "Tensor") -> "tuple[Tensor, int]":
            left_BE, right_BE = vectors_NE.split(pairs)
            return both_ways_info_nce(
                left_BE, right_BE, identities, temperature=self.temperature, similarity=self.similarity, gather=gather
            )

        return self.nested(cut, vectors_ND[: 2 * pairs])
