"""The parts of a training objective: batches as tensors, losses on them, and the context both are prepared from.

There are three kinds of losses. :class:`TokenLosses` add up over tokens, so a step may be taken in parts of any size
and divided by its counts afterwards. :class:`PairLosses` compare every text of a batch with every other, so the
vectors of all parts have to be there first (``training/step.py`` caches their gradients). :class:`JointLosses` have
both on one pass.

Shapes: B texts, T tokens.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gerund.errors import ConfigError
from gerund.inference.tokens import Tokens
from gerund.training.corpus.texts import Sources, existing
from gerund.training.corpus.tokenizer import InputFormatter
from gerund.training.losses.vectors import VectorEncoder
from gerund.training.objectives.sections import ObjectiveConfig, TextConfig
from gerund.training.recipe import Recipe
from gerund.training.trainable_model import TrainableModel

if TYPE_CHECKING:
    from gerund.training.estimate import RandomTexts

Batch = dict[str, Tensor]
"""Everything of a batch, by name; every tensor has one row per text."""

VALIDATION_SEED = 5
"""Added to an objective's seed for validation texts."""


class Batches:
    """Makes the texts of one optimizer step into tensors.

    ``texts`` is where they come from, by number; None for those that are not read one by one.
    """

    texts: Any

    def make(self, step: int, first: int, count: int) -> dict[str, Any]:
        """Return texts ``first`` to ``first + count`` of step ``step``: a pure function of these numbers.

        For :class:`TokenLosses` a :data:`Batch`; for :class:`PairLosses` one such batch per group of texts.
        """
        del step
        return self.batch_of(range(first, first + count))

    def batch_of(self, numbers: range) -> dict[str, Any]:
        """Return texts by their numbers; a subclass has this, or ``make`` where the step matters."""
        raise NotImplementedError

    def read(self, numbers: range) -> list[Any]:
        """Return what ``texts`` gives for these numbers."""
        return [self.texts.row(number) for number in numbers]

    @property
    def skipped(self) -> int:
        """How many texts were too short to be used."""
        return getattr(self.texts, "skipped", 0)

    @property
    def available(self) -> int | None:
        """How many different texts there are; None where they are not counted."""
        return None if self.texts is None else len(self.texts)


class Losses:
    """What is computed on batches. ``heads`` has the parameters that are trained in addition to the model's."""

    heads: nn.Module | None = None

    def parameters(self) -> Sequence[nn.Parameter]:
        """Return the parameters of the heads."""
        return [] if self.heads is None else list(self.heads.parameters())


class TokenLosses(Losses):
    """Losses that are sums over tokens."""

    @abstractmethod
    def counts(self, batch: Batch) -> dict[str, int]:
        """Return for each loss what its sum over ``batch`` is divided by: as a rule the tokens that it sums over."""

    @abstractmethod
    def __call__(self, model: PreTrainedModel, batch: Batch) -> dict[str, Tensor]:
        """Return each loss summed over its tokens, a scalar in float32."""


class PairLosses(Losses):
    """A loss that compares the texts of a batch with each other, by the vectors of ``heads``."""

    heads: VectorEncoder

    def __call__(self, model: PreTrainedModel, part: Batch) -> Tensor:
        """Return the vectors ``(B, D)`` of the texts in ``part``, as ``heads`` makes them, not normalised."""
        vectors_BD: Tensor = self.heads(model, part)
        return vectors_BD

    @abstractmethod
    def compare(self, vectors_ND: Tensor, batch: Mapping[str, Batch], *, gather: bool) -> tuple[Tensor, float]:
        """Return the mean loss over this process's queries, and how many rank their positive first.

        The vectors are those of all groups, one group after the other, in the order of ``batch``. With ``gather`` the
        texts of other processes are negatives too.
        """


class JointLosses(PairLosses):
    """A loss that compares texts, and losses that are sums over tokens, on one pass over the same texts."""

    @abstractmethod
    def counts(self, batch: Mapping[str, Batch]) -> dict[str, int]:
        """Return for each loss over tokens how many of ``batch`` it sums; none where there is no such loss."""

    @abstractmethod
    def joint(self, model: PreTrainedModel, part: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the vectors ``(B, D)`` of the texts in ``part``, and each loss summed over its tokens."""


@dataclass
class Objective:
    """An objective that is ready to be trained."""

    name: str  # what its batches are called
    batches: Batches  # its training texts
    losses: TokenLosses | PairLosses  # what is computed on them
    configs: dict[str, ObjectiveConfig]  # for each of its losses the settings that hold its weight
    factors: dict[str, float] = field(default_factory=dict)
    """For each loss a constant factor on its weight; 1 where there is none."""
    validation: dict[str, tuple[Batches, int]] = field(default_factory=dict)
    """By name, validation texts and how many batches of them."""
    validated_by_source: bool = False
    """Whether the names of ``validation`` are sources, under which the one loss is reported."""
    report: Callable[[], dict[str, Any]] = dict
    """Returns what ``training.json`` has about it in addition to its losses."""
    extra_files: Callable[[], list[Callable[[Path], None]]] = list
    """Returns functions that each write a file of its own into the folder of the model. Weights are taken as they are
    now. Every process calls this, because weights may be in shards; only the first one calls what it returns."""

    @property
    def config(self) -> ObjectiveConfig:
        """Its batch sizes."""
        return next(iter(self.configs.values()))

    def weights(self, step: int) -> dict[str, float]:
        """Return the weight of each loss in ``step``."""
        return {name: config.weight_at(step) * self.factors.get(name, 1.0) for name, config in self.configs.items()}

    def is_active(self, step: int) -> bool:
        """Whether any of its losses has a weight above 0."""
        return any(self.weights(step).values())


@dataclass(frozen=True)
class Context:
    """What every objective is prepared with."""

    recipe: Recipe
    model: TrainableModel
    source: "Sources | RandomTexts"  # what gives texts: a corpus or, in a dry run, random tokens
    resuming: bool = False  # whether a run continues from a checkpoint, by the same recipe and on the same texts

    def formatter(self, config: ObjectiveConfig, prompt: str | None = None) -> InputFormatter:
        """Return what puts special tokens and a prompt around texts, as the encoder reads them.

        Without a ``prompt`` it is the encoder's, where vectors are trained. ConfigError if the length leaves no room
        for text.
        """
        encoder = self.model.encoder
        default = encoder.prompt if config.trains_vectors else ""
        formatter = InputFormatter(
            self.model.tokenizer,
            prompt=default if prompt is None else prompt,
            append_eos=encoder.append_eos,
            normalizes=config.trains_vectors and encoder.normalizes_texts,
        )
        if config.length <= formatter.overhead + 1:
            raise ConfigError(
                f"{config.kind}: length {config.length} leaves no room for text; prompt and special tokens take "
                f"{formatter.overhead}"
            )
        return formatter

    def seed(self, config: ObjectiveConfig) -> int:
        """Return the seed of an objective."""
        return config.seed(self.recipe.seed)

    def files(self, paths: list[Path]) -> list[Path]:
        """Return files of pairs, which must be the same on a resume; ConfigError if one does not exist."""
        files = existing(self.recipe, paths, texts=False)
        for path, file in zip(paths, files, strict=True):
            self.source.reads(str(path), [file])
        return files

    def validation_batches(self, config: ObjectiveConfig, available: int) -> int:
        """Return how many validation batches the recipe's limit allows."""
        batches = self.recipe.data.validation_tokens // (config.batch_size * config.length)
        return max(1, min(batches, available // config.batch_size))

    def text_objective(
        self,
        name: str,
        config: TextConfig,
        batches: Callable[[Any, int], Batches],
        losses: Any,
        *,
        overhead: int,
        configs: dict[str, ObjectiveConfig] | None = None,
        factors: dict[str, float] | None = None,
        validate: bool = True,
    ) -> Objective:
        """Return an objective on texts of the sources.

        ``batches`` makes batches from texts and a seed; ``overhead`` is how many tokens of the length are no text;
        ``configs`` and ``factors`` are as in :class:`Objective`, by default of one loss with this name.
        """
        length, seed = config.length - overhead, self.seed(config)
        validation: dict[str, tuple[Batches, int]] = {}
        # Opened also where nothing is validated: what a run reads is compared on a resume.
        texts = self.source.validation_texts(config, length, seed + VALIDATION_SEED)
        if texts is not None and validate:
            validation_batches = batches(texts, seed + VALIDATION_SEED)
            validation = {name: (validation_batches, self.validation_batches(config, len(texts)))}
        training = batches(self.source.texts(config, length, seed), seed)
        return Objective(name, training, losses, configs or {name: config}, factors or {}, validation)


def prepare_objectives(
    recipe: Recipe, model: TrainableModel, source: "Sources | RandomTexts", *, resuming: bool = False
) -> list[Objective]:
    """Return the recipe's objectives, ready to be trained; first those that share a pass."""
    # What never has a weight needs no texts.
    waiting = [config for config in recipe.objectives if config.takes_part(recipe.steps)]
    shared: list[tuple[ObjectiveConfig, ...]] = []
    alone: list[tuple[ObjectiveConfig, ...]] = []
    while waiting:
        config = waiting.pop(0)
        partner = next((other for other in waiting if config.shares_pass(other)), None)
        if partner is None:
            alone.append((config,))
        else:
            waiting.remove(partner)
            shared.append((config, partner))
    context = Context(recipe, model, source, resuming)
    return [_prepared(context, configs) for configs in (*shared, *alone)]


def _prepared(context: Context, configs: tuple[ObjectiveConfig, ...]) -> Objective:
    module, _, name = configs[0].work.rpartition(".")
    objective: Objective = getattr(import_module(module), name)(context, *configs)
    return objective


def split_rows(batch: Batch, rows: int | None) -> list[Batch]:
    """Cut a batch into parts of at most ``rows`` texts; None leaves it whole.

    >>> [part["ids"].tolist() for part in split_rows({"ids": torch.arange(5)}, 2)]
    [[0, 1], [2, 3], [4]]
    """
    count = len(next(iter(batch.values())))
    starts = range(0, count, rows or count)
    return [{name: tensor[start : start + (rows or count)] for name, tensor in batch.items()} for start in starts]


def groups(batch: Mapping[str, Batch], rows: int | None) -> Iterator[Batch]:
    """Yield the parts of every group, one group after the other."""
    for group in batch.values():
        yield from split_rows(group, rows)


def tokens_in(batch: Mapping[str, Any]) -> int:
    """Return how many tokens a batch has, without padding."""
    if "real" in batch:
        return int(batch["real"].sum())
    if "input_ids" in batch:
        return int(batch["input_ids"].numel())
    return sum(tokens_in(group) for group in batch.values() if isinstance(group, Mapping))


def padded(rows: Sequence[Sequence[int] | np.ndarray], fill: int = 0) -> Tensor:
    """Put rows of unequal length into one tensor, padded on the right.

    >>> padded([[1, 2], [3]], fill=9).tolist()
    [[1, 2], [3, 9]]
    """
    out = torch.full((len(rows), max(map(len, rows), default=0)), fill, dtype=torch.long)
    for index, row in enumerate(rows):
        out[index, : len(row)] = torch.as_tensor(np.asarray(row, dtype=np.int64))
    return out


def text_batch(texts: Sequence[Tokens], pad: int) -> Batch:
    """Return ``input_ids`` and ``real`` (True for tokens) of formatted texts, padded on the right."""
    lengths_B = torch.tensor([len(text) for text in texts])
    ids_BT = padded([text.ids for text in texts], pad)
    return {"input_ids": ids_BT, "real": torch.arange(ids_BT.shape[1]) < lengths_B[:, None]}


def row_generator(seed: int, number: int) -> np.random.Generator:
    """Return the random numbers of text ``number``: always the same ones."""
    return np.random.default_rng([seed, number])
