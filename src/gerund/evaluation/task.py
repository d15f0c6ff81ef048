"""What an evaluation task is, what it is told, and what it gives back.

A task is a frozen dataclass: its fields are its options, its ``kind`` the first half of its name
(``sts/stsb``). Each module of tasks has a function ``find(folder)`` that returns the tasks whose data lie in
a folder; ``registry`` knows the modules.

Knows: names, files, metrics. Does not know: models.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from gerund.errors import ConfigError

if TYPE_CHECKING:
    from gerund.evaluation.contender import Contender

Side = Literal["representation", "tokens", "generation"]
Unit = Literal["percent", "perplexity", "bits", "share"]
Split = Literal["test", "validation"]


@dataclass(frozen=True)
class Settings:
    """What all tasks of an evaluation are told."""

    seed: int = 0
    """Decides every draw: few-shot examples, masked spans, negatives, samples."""

    limit: int | None = None
    """At most so many examples (queries, sentences, documents) a task; for a quick look."""

    prompts: Mapping[str, str] = field(default_factory=dict)
    """Prompts by task name or kind; a task that has none is read with the encoder's own prompt."""

    split: Split = "test"
    """Which split is scored; ``validation`` where something is still being chosen."""

    show_progress: bool | None = None
    """None shows bars on a terminal."""

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"limit={self.limit} leaves nothing to score")

    def to_dict(self) -> dict[str, Any]:
        """Return what decides the scores, ready for JSON."""
        return {"seed": self.seed, "limit": self.limit, "prompts": dict(self.prompts), "split": self.split}


@dataclass(frozen=True)
class Score:
    """What a task measured.

    Attributes:
        main: the name of the metric that stands for the task in tables.
        metrics: every metric by name, as fractions of 1 where tables show percent. Never nan: what is not
            defined has a defined value and a note that says so.
        spread: standard deviation of the main metric over repetitions; None for a single one.
        runs: number of repetitions.
        size: number of examples scored.
        notes: sentences that a reader of the number has to know.
    """

    main: str
    metrics: Mapping[str, float]
    spread: float | None = None
    runs: int = 1
    size: int | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        bad = [name for name, value in self.metrics.items() if not np.isfinite(value)]
        if bad or self.main not in self.metrics:
            raise ValueError(f"a score without finite {', '.join(bad) or self.main}")

    @property
    def value(self) -> float:
        """The main metric."""
        return self.metrics[self.main]

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict that ``from_dict`` reads back."""
        return {
            "main": self.main,
            "metrics": dict(self.metrics),
            "spread": self.spread,
            "runs": self.runs,
            "size": self.size,
            "notes": list(self.notes),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Score":
        """Read a score back."""
        return cls(**{**data, "notes": tuple(data["notes"])})


@dataclass(frozen=True)
class LabelledTexts:
    """Texts with a class each, for a picture."""

    texts: list[str]
    labels: list[str]


@dataclass(frozen=True)
class RatedPairs:
    """Pairs of texts with a rating each (0 or 1 for "same or not"), for a picture."""

    left: list[str]
    right: list[str]
    ratings: list[float]


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """One thing to measure. Subclasses add their options as fields with ``metadata={"help": ...}``.

    Attributes:
        name: ``kind/name``.
        files: the data; their bytes decide whether a finished score still counts. Empty for what is fetched.
    """

    kind: ClassVar[str]
    side: ClassVar[Side]
    unit: ClassVar[Unit] = "percent"
    higher_is_better: ClassVar[bool] = True
    # Whether the score depends on the plan and pooling (True), or only on the weights, as writing does.
    reads_plan: ClassVar[bool] = True
    # Whether a score that does not depend on the plan depends on an adapter, as filling gaps does.
    reads_adapter: ClassVar[bool] = False
    takes_bm25: ClassVar[bool] = False
    # Whether a vector for each whole text is all that it asks of a model.
    takes_vectors: ClassVar[bool] = False
    # Whether the model must say how probable a text is, whatever the options.
    always_needs_likelihoods: ClassVar[bool] = False
    # Whether it takes so long that a side's name and `all` do not mean it.
    by_name_only: ClassVar[bool] = False

    name: str
    files: tuple[Path, ...] = ()

    @abstractmethod
    def run(self, contender: "Contender", settings: Settings) -> Score:
        """Measure.

        Raises:
            DataError: the data are malformed; the message names file and line.
        """

    @property
    def title(self) -> str:
        """The second half of the name."""
        return self.name.partition("/")[2]

    @property
    def needs_likelihoods(self) -> bool:
        """Whether the model must say how probable a text is, which one with an encoder of its own cannot."""
        return self.always_needs_likelihoods

    @property
    def reads_scorer(self) -> bool:
        """Whether the score depends on the model's own scorer of continuations."""
        return False

    @property
    def also_read(self) -> tuple[Path, ...]:
        """Files besides the data whose bytes decide whether a finished score still counts."""
        return ()

    @property
    def has_validation(self) -> bool:
        """Whether there is a split to choose settings on."""
        return False

    def prompt(self, settings: Settings) -> str | None:
        """Return the prompt of this task; None for the encoder's own."""
        return settings.prompts.get(self.name, settings.prompts.get(self.kind))

    def texts(self, settings: Settings) -> list[str]:
        """Return the texts that ``run`` encodes, in any order, repeated or not; none where that is not known."""
        del settings
        return []

    def sentences(self, settings: Settings) -> list[list[str]]:
        """Return the sentences, as lists of words, whose word vectors ``run`` reads; none for other tasks."""
        del settings
        return []

    @property
    def shifts_words(self) -> bool:
        """Whether word vectors are read from the outputs before each token."""
        return False

    def is_measured(self, contender: "Contender", settings: Settings) -> bool:
        """Whether ``run`` takes over what another task's run has left, so that there is nothing to encode."""
        del contender, settings
        return False

    def picture_data(self, settings: Settings) -> LabelledTexts | RatedPairs | None:
        """Return texts whose embeddings are worth a look; None for tasks without."""
        del settings
        return None


@dataclass(frozen=True, kw_only=True)
class FileTask(Task):
    """A task on one file a split.

    Attributes:
        files: the test set, then the validation set where there is one.
    """

    @property
    def has_validation(self) -> bool:
        """Whether there is a validation file."""
        return len(self.files) > 1

    def scored_file(self, settings: Settings) -> Path:
        """Return the file of the split that is scored."""
        return self.files[1 if settings.split == "validation" else 0]
