"""Base classes of the training objectives' settings: recipe sections, loss weights by step, seeds and checks."""

from collections.abc import Iterable, Mapping
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, get_args
from zlib import crc32

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from gerund.errors import ConfigError
from gerund.settings.plan import AttentionPlan

if TYPE_CHECKING:
    from gerund.settings.encoder import EncoderConfig
    from gerund.training.recipe import Recipe

DECODER_ONLY = "decoder-only"
ENCODER_DECODER = "encoder-decoder"

# Plans that read a text in another way than its training does.
_UNTRAINABLE_PLANS = ("hybrid", "echo")


class Purpose(StrEnum):
    """What an objective is for, the paper in brackets; of a recipe with several the first one counts."""

    FILL = "Infill (MAGNET)"
    SCORE = "Score continuations (RankGen)"
    EMBED_BY_PAIRS = "Embed, by pairs that are mined or given (GUR, UniMAE)"
    EMBED_BY_TEXTS = "Embed, by texts alone (UniMAE, LLM2Vec)"
    ANSWERS = "Embed, by the model's own answers (LLM2Vec-Gen)"
    DISTIL = "Embed, as another model does (distillation)"
    RANK = "Rank documents, by token vectors (ColBERTv2) or as a reranker"
    WRITE = "Make a language model"
    OTHER = "Others"


class Section(BaseModel):
    """A part of a recipe: unknown fields are refused, nothing changes once it is read."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())


def changed_fields(section: Section, names: Iterable[str]) -> list[str]:
    """Return which of these settings differ from their defaults."""
    fields = type(section).model_fields
    return [name for name in names if getattr(section, name) != fields[name].get_default(call_default_factory=True)]


def _as_schedule(value: Any) -> Any:
    """Turn a single weight into a schedule with one entry."""
    return [[0, value]] if isinstance(value, int | float) and not isinstance(value, bool) else value


Step = Annotated[int, Field(ge=0)]
Weight = Annotated[float, Field(ge=0)]
Schedule = Annotated[tuple[tuple[Step, Weight], ...], BeforeValidator(_as_schedule), Field(min_length=1)]
"""A weight, or a list of [step, weight]: from that step on it has that weight. It begins with step 0."""


class PairFiles(Section):
    """Files of pairs or triples: jsonl, csv, tsv or parquet."""

    files: list[Path] = Field(min_length=1)
    """Files, relative to ``data.folder``."""
    query: str = "query"
    """Column or field of the query."""
    positive: str = "positive"
    """Column or field of its positive; of a list the first is taken."""
    negatives: str = "negatives"
    """Column or field of its negatives, a text or a list."""


class TaskFiles(PairFiles):
    """Files of pairs or triples of one task or several."""

    instruction: str | None = None
    """Column or field of the query's own instruction, which stands in ``query_prompt``; left out, none."""
    task: str | None = None
    """Column or field that names an example's task, for ``same_task``; left out, each file is a task."""


class ScoredPairFiles(Section):
    """Files of pairs of texts with a score: jsonl, csv, tsv or parquet."""

    files: list[Path] = Field(min_length=1)
    """Files, relative to ``data.folder``."""
    text1: str = "sentence1"
    """Column or field of the first text."""
    text2: str = "sentence2"
    """Column or field of the second text."""
    score: str = "score"
    """Column or field of the score, a number that is higher for texts that are more alike. Only its order counts."""


class ObjectiveConfig(Section):
    """An objective as a recipe writes it. Its fields are settings; the class attributes and methods are its traits."""

    if TYPE_CHECKING:
        # The name in recipes and logs: each objective has a field `kind: Literal["name"]`.
        kind: str

    work: ClassVar[str]
    """Dotted name of what prepares its training: ``prepare(context, *configs)`` returns an ``Objective``."""
    purpose: ClassVar[Purpose] = Purpose.OTHER
    """What recipes with it are for."""
    models: ClassVar[tuple[str, ...]] = (DECODER_ONLY,)
    """The kinds of models that it trains."""
    reads_pairs: ClassVar[bool] = False
    """Whether it always reads pairs of texts, in the place of texts."""
    files_field: ClassVar[str | None] = None
    files_setting: ClassVar[str | None] = None  # what names them, where that is another setting
    """What names files of its own: where that is given, they are read in the place of the recipe's sources."""
    settings_of_sources: ClassVar[tuple[str, ...]] = ()
    """Its settings that say how the recipe's sources are read, which files of its own have no use for."""
    trains_vectors: ClassVar[bool] = False
    """Whether it reads texts as the encoder does, with its plan, pooling and prompt, and trains their vectors."""
    trains_head: ClassVar[bool] = False
    """Whether it trains the projection head of the base further, which another objective would leave behind."""
    trains_reranker: ClassVar[bool] = False
    """Whether its adapter only re-ranks, and is saved beside those of the base."""
    trains_base: ClassVar[bool] = True
    """Whether it trains weights of the base, all or an adapter's; those of others stay as they are."""
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
        if steps[0] != 0 or any(item >= two for item, two in pairwise(steps)):
            raise ValueError(f"weight is a list of [step, weight] that begins with step 0 and rises, not {steps}")
        if self.micro_batch_size is not None and self.batch_size % self.micro_batch_size:
            raise ValueError(f"batch_size {self.batch_size} is no multiple of micro_batch_size {self.micro_batch_size}")
        return self

    @model_validator(mode="after")
    def _settings_are_used(self) -> Self:
        unused = [] if self.reads_sources else changed_fields(self, self.settings_of_sources)
        if unused:
            files = self.files_setting or self.files_field
            raise ValueError(
                f"{', '.join(unused)}: this is about the recipe's texts, and {files} is read in their place"
            )
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
        return not (self.reads_pairs or (self.files_field is not None and getattr(self, self.files_field)))

    @property
    def longest_text(self) -> int:
        """The longest text that the model will read, in tokens."""
        return self.length

    def seed(self, recipe_seed: int) -> int:
        """Return the seed of its texts and corruptions."""
        offset = 100 + crc32(self.kind.encode()) % 900 if self.seed_offset is None else self.seed_offset
        return recipe_seed * 1000 + offset

    def check(self, recipe: "Recipe") -> None:
        """Raise ValueError for a recipe that contradicts it."""
        if self.trains_vectors and recipe.encoder.attention in _UNTRAINABLE_PLANS:
            raise ValueError(f"{self.kind} cannot train embeddings that are read with {recipe.encoder.attention}")

    def check_model(self, model: str, encoder: "EncoderConfig") -> None:
        """Raise ConfigError for a kind of model (one of ``models``) or encoder settings that it can't train."""
        del model
        if self.trains_vectors and (name := encoder.attention.name) in _UNTRAINABLE_PLANS:
            raise ConfigError(
                f"{self.kind} cannot train vectors that are read with {name}; set another encoder.attention"
            )

    def check_processes(self, processes: int) -> None:
        """Raise ConfigError if so many processes can't share a batch."""
        if self.batch_size % processes:
            raise ConfigError(f"{self.kind}: {processes} processes cannot share a batch of {self.batch_size}")

    def plans(self, encoder: "EncoderConfig") -> list[AttentionPlan]:
        """Return the attention plans that it reads a decoder-only model with, in addition to the causal one."""
        return [encoder.attention] if self.trains_vectors else []

    def shares_pass(self, other: "ObjectiveConfig") -> bool:
        """Whether its work prepares this and ``other`` as one objective; ConfigError if their settings forbid it."""
        del other
        return False


class TextConfig(ObjectiveConfig):
    """What every objective on plain text has."""

    shortest_text: ClassVar[int] = 8
    """Texts, and last pieces of texts, of fewer tokens are left out."""

    settings_of_sources: ClassVar[tuple[str, ...]] = ("sources", "unit", "min_words")

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


class VectorConfig(ObjectiveConfig):
    """What every objective has that trains the vectors of texts."""

    models: ClassVar[tuple[str, ...]] = (DECODER_ONLY, ENCODER_DECODER)
    trains_vectors: ClassVar[bool] = True
