"""What an objective is: settings that a recipe writes, what they demand, and batches with losses on them.

All of one objective is one module beside this one: a subclass of :class:`ObjectiveConfig` with its fields, its traits
and :meth:`ObjectiveConfig.prepare`, which returns an :class:`Objective` of :class:`Batches` and losses. A line in
``registry.py`` makes it known to recipes.

There are three kinds of losses. :class:`TokenLosses` add up over tokens, so a step may be taken in parts of any size
and divided by its counts afterwards. :class:`PairLosses` compare every text of a batch with every other, so the
vectors of all parts have to be there first (``training/step.py`` caches their gradients). :class:`JointLosses` have
both on one pass.

Recipes are read without torch: modules of objectives import torch, transformers and what needs them in functions.

Knows: settings, batches as dictionaries of tensors. Does not know: any single objective, optimizers, processes.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, get_args
from zlib import crc32

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from gerund.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel

    from gerund.settings.encoder import EncoderConfig
    from gerund.settings.plan import AttentionPlan
    from gerund.training.objectives.context import Context
    from gerund.training.recipe import Recipe

# Everything of a batch, by name; every tensor has one row a text.
Batch = dict[str, "Tensor"]

DECODER_ONLY = "decoder-only"
ENCODER_DECODER = "encoder-decoder"


class Purpose(StrEnum):
    """What an objective is for, the paper in brackets; of a recipe with several the first one counts."""

    FILL = "Fill gaps (MAGNET)"
    SCORE = "Score continuations (RankGen)"
    EMBED_BY_PAIRS = "Embed, by pairs that are mined or given (GUR, UniMAE)"
    EMBED_BY_TEXTS = "Embed, by texts alone (UniMAE, LLM2Vec)"
    DISTIL = "Embed, as another model does (distillation)"
    WRITE = "Make a language model"
    OTHER = "Others"


# Plans that read a text in another way than its training does.
_UNTRAINABLE_PLANS = ("hybrid", "echo")


class Section(BaseModel):
    """A part of a recipe: unknown fields are refused, nothing changes once it is read."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())

    renamed: ClassVar[Mapping[str, str]] = {}
    """Earlier names of fields, each with the name it has now."""


def _as_schedule(value: Any) -> Any:
    """Turn a single weight into a schedule with one entry."""
    return [[0, value]] if isinstance(value, int | float) and not isinstance(value, bool) else value


Step = Annotated[int, Field(ge=0)]
Weight = Annotated[float, Field(ge=0)]
Schedule = Annotated[tuple[tuple[Step, Weight], ...], BeforeValidator(_as_schedule), Field(min_length=1)]
"""A weight, or a list of [step, weight]: from that step on it has that weight. It begins with step 0."""


class ObjectiveConfig(Section):
    """An objective as a recipe writes it. Its fields are settings; the class attributes and methods are its traits."""

    if TYPE_CHECKING:
        # The name in recipes and logs: each objective has a field `kind: Literal["name"]`.
        kind: str

    purpose: ClassVar[Purpose] = Purpose.OTHER
    """What recipes with it are for."""
    models: ClassVar[tuple[str, ...]] = (DECODER_ONLY,)
    """The kinds of models that it trains."""
    reads_pairs: ClassVar[bool] = False
    """Whether it always reads pairs of texts, in the place of texts."""
    trains_vectors: ClassVar[bool] = False
    """Whether it reads texts as the encoder does, with its plan, pooling and prompt, and trains their vectors."""
    trains_head: ClassVar[bool] = False
    """Whether it trains the projection head of the base further, which another objective would leave behind."""
    seed_offset: ClassVar[int | None] = None
    """Added to the recipe's seed (times 1000), so that two objectives do not read the same texts in the same order;
    None derives one from the kind."""

    weight: Schedule = ((0, 1.0),)
    """Its factor in the sum of losses, or a list of [from step, weight]. With weight 0 it does not run at all."""
    batch_size: int = Field(default=32, ge=1)
    """Texts of one optimizer step, over all processes together."""
    micro_batch_size: int | None = Field(default=None, ge=1)
    """Texts that go through the model at once, in each process; left out, all of them. It bounds the memory and
    changes nothing else: losses are divided by the counts of the whole step, contrastive gradients are cached."""
    length: int = Field(default=512, ge=2)
    """Longest text in tokens, special tokens included."""

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Self:
        steps = [step for step, _ in self.weight]
        if steps[0] != 0 or any(one >= two for one, two in pairwise(steps)):
            raise ValueError(f"weight is a list of [step, weight] that begins with step 0 and rises, not {steps}")
        if self.micro_batch_size is not None and self.batch_size % self.micro_batch_size:
            raise ValueError(f"batch_size {self.batch_size} is no multiple of micro_batch_size {self.micro_batch_size}")
        return self

    @classmethod
    def name(cls) -> str:
        """Return its kind, as recipes write it."""
        return str(get_args(cls.model_fields["kind"].annotation)[0])

    @classmethod
    def purpose_of(cls, settings: Mapping[str, Any]) -> Purpose:
        """Return what these settings of it are for."""
        del settings
        return cls.purpose

    def weight_at(self, step: int) -> float:
        """Return the weight in optimizer step ``step``, counted from 0.

        >>> ObjectiveConfig(weight=[[0, 0], [3400, 9]]).weight_at(3399)
        0.0
        """
        return next(weight for first, weight in reversed(self.weight) if first <= step)

    def takes_part(self, steps: int) -> bool:
        """Return whether it has a weight above 0 in any of the first ``steps`` steps."""
        return any(weight > 0 and first < steps for first, weight in self.weight)

    @property
    def reads_sources(self) -> bool:
        """Whether it reads the recipe's sources, rather than files of its own."""
        return True

    @property
    def longest_text(self) -> int:
        """The longest text that the model will read, in tokens."""
        return self.length

    def seed(self, recipe_seed: int) -> int:
        """Return the seed of its texts and corruptions."""
        offset = 100 + crc32(self.kind.encode()) % 900 if self.seed_offset is None else self.seed_offset
        return recipe_seed * 1000 + offset

    def check(self, recipe: "Recipe") -> None:
        """Refuse a recipe that contradicts it.

        Raises:
            ValueError: With what contradicts what.
        """
        if self.trains_vectors and recipe.encoder.attention in _UNTRAINABLE_PLANS:
            raise ValueError(f"{self.kind} cannot train embeddings that are read with {recipe.encoder.attention}")

    def check_model(self, model: str, encoder: "EncoderConfig") -> None:
        """Refuse a model for more reasons than that its kind is not one of ``models``, or a base's way of encoding.

        Args:
            model: ``decoder-only`` or ``encoder-decoder``.
            encoder: How the model is read as an encoder.

        Raises:
            ConfigError: With what does not fit.
        """
        del model
        if self.trains_vectors and encoder.attention.name in _UNTRAINABLE_PLANS:
            name = encoder.attention.name
            raise ConfigError(
                f"{self.kind} cannot train vectors that are read with {name}; set another encoder.attention"
            )

    def check_processes(self, processes: int) -> None:
        """Refuse more processes than can share a batch.

        Raises:
            ConfigError: A batch does not divide.
        """
        if self.batch_size % processes:
            raise ConfigError(f"{self.kind}: {processes} processes cannot share a batch of {self.batch_size}")

    def plans(self, encoder: "EncoderConfig") -> "list[AttentionPlan]":
        """Return the attention plans that it reads a decoder-only model with, beside the causal one."""
        return [encoder.attention] if self.trains_vectors else []

    def joint(self, other: "ObjectiveConfig") -> "Callable[[Context], Objective] | None":
        """Return what prepares this and ``other`` as one objective; None where each has passes of its own.

        Raises:
            ConfigError: They are to share a pass, and their settings do not allow it.
        """
        del other
        return None

    def prepare(self, context: "Context") -> "Objective":
        """Return its batches and losses for a model.

        Raises:
            ConfigError: It does not fit the model's tokenizer, or a file is not there.
            DataError: There is no usable text.
        """
        raise NotImplementedError(f"{type(self).__name__}.prepare")


class TextConfig(ObjectiveConfig):
    """What every objective on plain text has."""

    shortest_text: ClassVar[int] = 8
    """Texts, and last pieces of texts, of fewer tokens are left out."""

    sources: list[str] = Field(default_factory=list)
    """Names of the ``data.sources`` that it reads; left out, all."""
    unit: Literal["documents", "sentences"] = "documents"
    """What a text is: a document, cut into pieces of ``length`` tokens, or a sentence."""
    min_words: int = Field(default=0, ge=0)
    """Sentences with fewer words are left out."""

    @model_validator(mode="after")
    def _unit_fits(self) -> Self:
        if self.min_words and self.unit != "sentences":
            raise ValueError("min_words belongs to unit: sentences")
        return self


class Batches(ABC):
    """Makes the texts of one optimizer step into tensors.

    Attributes:
        texts: Where they come from, by number; None for those that are not read one by one.
    """

    texts: Any = None

    @abstractmethod
    def make(self, step: int, first: int, count: int) -> dict[str, Any]:
        """Return texts ``first`` to ``first + count`` of step ``step``: a pure function of these numbers.

        For :class:`TokenLosses` a :data:`Batch`; for :class:`PairLosses` one such batch a group of texts.
        """

    @property
    def skipped(self) -> int:
        """How many texts were too short to be used."""
        return getattr(self.texts, "skipped", 0)

    @property
    def available(self) -> int | None:
        """How many different texts there are; None where they are not counted."""
        return None if self.texts is None else len(self.texts)


class Losses:
    """What is computed on batches.

    Attributes:
        heads: The parameters that are trained beside the model's, as a module; None for none.
    """

    heads: "nn.Module | None" = None

    def parameters(self) -> "Sequence[nn.Parameter]":
        """Return the parameters of the heads."""
        return [] if self.heads is None else list(self.heads.parameters())


class TokenLosses(Losses):
    """Losses that are sums over tokens."""

    @abstractmethod
    def counts(self, batch: Batch) -> dict[str, int]:
        """Return for each loss what its sum over ``batch`` is divided by: as a rule the tokens that it sums over."""

    @abstractmethod
    def __call__(self, model: "PreTrainedModel", batch: Batch) -> "dict[str, Tensor]":
        """Return each loss summed over its tokens, a scalar in float32."""


class PairLosses(Losses):
    """A loss that compares the texts of a batch with each other."""

    @abstractmethod
    def __call__(self, model: "PreTrainedModel", part: Batch) -> "Tensor":
        """Return the vectors ``(B, D)`` of the texts in ``part``."""

    @abstractmethod
    def compare(self, vectors_ND: "Tensor", batch: Mapping[str, Batch], *, gather: bool) -> "tuple[Tensor, int]":
        """Return the mean loss over this process's queries, and how many find their positive first.

        Args:
            vectors_ND: the vectors of all groups of the batch, one group after the other.
            batch: the batch, its groups in that order.
            gather: whether the texts of other processes are negatives too.
        """

    def during(self, model: "PreTrainedModel") -> AbstractContextManager[None]:
        """Return what holds while these texts are read, forward and backward."""
        del model
        return nullcontext()


class JointLosses(PairLosses):
    """A loss that compares texts, and losses that are sums over tokens, on one pass over the same texts."""

    @abstractmethod
    def counts(self, batch: Mapping[str, Batch]) -> dict[str, int]:
        """Return for each loss over tokens how many of ``batch`` it sums; none where there is no such loss."""

    @abstractmethod
    def joint(self, model: "PreTrainedModel", part: Batch) -> "tuple[Tensor, dict[str, Tensor]]":
        """Return the vectors ``(B, D)`` of the texts in ``part``, and each loss summed over its tokens."""


@dataclass
class Objective:
    """An objective that is ready to be trained."""

    name: str
    """What its batches are called."""
    batches: Batches
    """Its training texts."""
    losses: TokenLosses | PairLosses
    """What is computed on them."""
    configs: dict[str, ObjectiveConfig]
    """For each of its losses the settings that hold its weight."""
    factors: dict[str, float] = field(default_factory=dict)
    """For each loss a constant factor on its weight; 1 where there is none."""
    validation: dict[str, tuple[Batches, int]] = field(default_factory=dict)
    """By name, validation texts and how many batches of them."""
    validated_by_source: bool = False
    """Whether the names of ``validation`` are sources, under which the one loss is reported."""

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

    def report(self) -> dict[str, Any]:
        """Return what ``training.json`` says about it beside its losses."""
        return {}

    def extra_files(self) -> Iterator[Callable[[Path], None]]:
        """Yield what writes a file of its own into the folder of the model.

        Weights are taken as they are now. Every process calls this, because weights may lie in shards; only the first
        one calls what it yields.
        """
        yield from ()
