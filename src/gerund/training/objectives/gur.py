"""Train GUR: language modelling and contrastive learning in one pass, on pairs of texts of one document.

GUR, section III-A, equation 1: ``LM loss + alpha * CL loss``. The encoder reads both sides of a pair with spans
hidden; its states go to the projection head, whose vectors are compared, and to the decoder, which writes what is
hidden. A decoder-only model has the contrastive loss alone: its language modelling is a separate objective.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from gerund.errors import ConfigError
from gerund.inference.tokens import Tokens
from gerund.models.heads import ProjectionHead
from gerund.models.light_head import HeadConfig
from gerund.training.corpus.pairs import Bucket, Buckets, Example, Examples, MinedPair, heavy_pairs, read_pairs
from gerund.training.corpus.tokenizer import InputFormatter
from gerund.training.losses.contrastive import symmetric_batch_info_nce
from gerund.training.losses.vocabulary import decoder_loss
from gerund.training.objectives.base import Batch, Batches, Context, JointLosses, Objective, row_generator
from gerund.training.objectives.contrastive import ContrastiveLosses, TextGroup
from gerund.training.objectives.language_modelling import Corruption, with_targets, written_tokens
from gerund.training.objectives.sections import ObjectiveConfig
from gerund.training.objectives.settings import GurConfig

TITLE_PROMPT = "document2title: "  # before a text whose title is to be written (GUR, section IV-A)

# Of the projection head: GUR, Table I.
_DIMENSIONS = 128
_TITLE_FRACTION = 0.1
_TITLE_SEED = 2  # added to the seed for the order of titles; buckets of pairs have 0 and 1


def prepare(context: Context, config: GurConfig) -> Objective:
    """Return batches of pairs, and both losses or one of them."""
    seq2seq = context.model.is_encoder_decoder
    writes = seq2seq if config.lm is None else config.lm
    _prepare_head(context, config)
    losses = GurLosses.of(context, config)
    formatter, seed = context.formatter(config), context.seed(config)
    pairs = _pairs(context, config)
    batches = GurBatches(
        _buckets(config, pairs, seed),
        config.batch_size,
        formatter,
        TextGroup.of(context),
        seed=seed,
        corruption=Corruption.of(context, config) if seq2seq and config.rate else None,
        writes=writes,
        titles=_titles(context, config, pairs, seed) if writes else None,
    )
    configs: dict[str, ObjectiveConfig] = {"gur": config, **({"lm": config} if writes else {})}
    return Objective(config.kind, batches, losses, configs, factors={"gur": config.alpha})


def _prepare_head(context: Context, config: GurConfig) -> None:
    """Train the base's head further, or give the model a new one, unless the recipe asks for none."""
    model, head = context.model, context.model.head
    if config.dimensions is None and (config.projection is not None or not (model.is_encoder_decoder or head)):
        return
    if head is None:
        shape = HeadConfig(model.runtime.state_width, config.dimensions or _DIMENSIONS, config.variant or "paper")
        head = ProjectionHead(shape)
    has = head.settings
    if config.dimensions not in (None, has.dimensions) or config.variant not in (None, has.variant):
        raise ConfigError(
            f"gur: the base has a head of {has.dimensions} dimensions ({has.variant}), and the recipe asks for "
            f"{config.dimensions or has.dimensions} ({config.variant or has.variant}); left out, that of the base is "
            "trained further"
        )
    model.head = head.float().train()


def _titles(context: Context, config: GurConfig, pairs: Sequence[MinedPair], seed: int) -> "Titles | None":
    """Return the documents whose titles are written; None where none are, or none are wanted."""
    examples = [Example(pair.query, pair.opening, ()) for pair in pairs if pair.opening is not None]
    if not examples and config.title_fraction:
        raise ConfigError(
            f"gur: title_fraction {config.title_fraction} needs documents with titles, and no pair has one in the "
            f"column {config.pairs.opening!r}; mine with --pairs title, or set title_fraction to 0"
        )
    fraction = _TITLE_FRACTION if config.title_fraction is None else config.title_fraction
    if not examples or not fraction:
        return None
    formatter, fraction = context.formatter(config, TITLE_PROMPT), max(fraction, 1 / config.batch_size)
    return Titles(Examples(examples, seed=seed + _TITLE_SEED), formatter, config.length, fraction)


def _pairs(context: Context, config: GurConfig) -> list[MinedPair]:
    files = config.pairs
    columns = {"query": files.query, "positive": files.positive, "opening": files.opening, "weight": files.weight}
    pairs = read_pairs(context.files(files.files), **columns)
    if files.threshold is None:
        return pairs
    return heavy_pairs(pairs, files.threshold, files.short_threshold or files.threshold, config.short_characters)


def _buckets(config: GurConfig, pairs: Sequence[MinedPair], seed: int) -> Buckets:
    examples = [Example(pair.query, pair.positive, ()) for pair in pairs]
    if config.short_length is None:
        return Buckets([Bucket(Examples(examples, seed=seed), config.length)], config.batch_size)
    by_length: tuple[list[Example], list[Example]] = ([], [])
    for example in examples:
        by_length[max(len(example.query), len(example.positive)) >= config.short_characters].append(example)
    shapes = ((config.short_length, config.short_factor), (config.length, 1))
    buckets = [
        Bucket(Examples(examples, seed=seed + index), length, factor)
        for index, (examples, (length, factor)) in enumerate(zip(by_length, shapes, strict=True))
        if examples
    ]
    return Buckets(buckets, config.batch_size)


@dataclass(frozen=True)
class Titles:
    """Documents whose titles are generated (GUR, section IV-A: document2title), ``fraction`` for each pair of a batch.

    Openings, which ``formatter`` formats, and titles have at most ``length`` tokens each.
    """

    examples: Examples
    formatter: InputFormatter
    length: int
    fraction: float

    def count(self, pairs: int) -> int:
        """Return how many documents go with the first ``pairs`` pairs of a batch."""
        return int(self.fraction * pairs + 1e-9)


@dataclass(eq=False)
class GurBatches(Batches):
    """Pairs in a shuffled order, ``batch_size`` per step; ``seed`` determines crops and spans.

    Without a ``corruption`` whole texts are read; ``writes`` says whether the decoder generates what is hidden.
    """

    texts: Buckets
    batch_size: int
    formatter: InputFormatter
    group: TextGroup
    seed: int
    corruption: Corruption | None = None
    writes: bool = False
    titles: Titles | None = None

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

    def _documents(self, step: int, first: int, stop: int) -> list[Example]:
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
            source, target = (whole, []) if self.corruption is None else self.corruption(whole, rng)
            formatted.append(source)
            targets.append(target)
        batch = self.group(formatted)
        # Which texts are the same is asked of them as they are, not of what is left of them.
        batch["identity"] = self.group.identities(texts)
        return with_targets(batch, targets) if self.writes else batch

    def _cropped(self, text: str, length: int, rng: Any) -> Tokens:
        """Return a text as the encoder reads it; of a longer one a random stretch (GUR, section III-B, step 5)."""
        whole = self.formatter.format_text(text, None)
        if len(whole) <= length:
            return whole
        places = self.formatter.places(whole)
        room = length - (len(whole) - len(places))
        begin = places.start + int(rng.integers(len(places) - room + 1))
        return self.formatter.format(whole.ids[begin : begin + room])

    def _titled(self, rows: Sequence[Example]) -> Batch:
        assert self.titles is not None
        assert self.corruption is not None
        formatter, length = self.titles.formatter, self.titles.length
        batch = self.group([formatter.format_text(row.positive, length + formatter.overhead) for row in rows])
        plain = self.formatter.tokenizer
        written = [plain(row.query, add_special_tokens=False, verbose=False)["input_ids"][: length - 1] for row in rows]
        return with_targets(batch, [[*ids, self.corruption.end] for ids in written])


class GurLosses(ContrastiveLosses, JointLosses):
    """Symmetric InfoNCE between the sides of the pairs, and what the decoder writes, in one pass of the encoder."""

    def counts(self, batch: Mapping[str, Batch]) -> dict[str, int]:
        """Return over how many tokens the decoder's loss is summed; nothing where it writes nothing."""
        if "labels" not in batch["query"]:
            return {}
        return {"lm": sum(map(written_tokens, batch.values()))}

    def __call__(self, model: PreTrainedModel, part: Batch) -> Tensor:
        """Return the vectors ``(B, D)``, in one pass where ``joint`` reads the same texts under the same dropout."""
        if "labels" not in part:
            return super().__call__(model, part)
        return self.heads.vectors(self.heads.states(model, part), part)

    def joint(self, model: PreTrainedModel, part: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the vectors ``(B, D)`` and, where something is to be written, the decoder's summed loss."""
        hidden_BTD = self.heads.states(model, part)
        vectors_BD = self.heads.vectors(hidden_BTD, part)
        if "labels" not in part:
            return vectors_BD, {}
        return vectors_BD, {"lm": decoder_loss(model, hidden_BTD, part["real"], part["labels"])}

    def compare(self, vectors_ND: Tensor, batch: Mapping[str, Batch], *, gather: bool) -> tuple[Tensor, int]:
        """Return the mean over both directions of InfoNCE (equation 2), and how many queries find their positive."""
        identities = (batch["query"]["identity"], batch["positive"]["identity"])
        pairs = len(identities[0])

        def loss_of(vectors_NE: Tensor) -> tuple[Tensor, int]:
            left_BE, right_BE = vectors_NE.split(pairs)
            return symmetric_batch_info_nce(
                left_BE, right_BE, identities, temperature=self.temperature, similarity=self.similarity, gather=gather
            )

        return self.nested(loss_of, vectors_ND[: 2 * pairs])
