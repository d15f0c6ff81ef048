"""What an evaluation task is, its config, and what it gives back.

A task is a frozen dataclass: its fields are its options, its ``kind`` the first half of its name
(``sts/stsb``). A task is one module in ``tasks`` with all that belongs to it: the class with its options and checks,
what it measures, and a function ``find(folder)`` that returns the tasks whose data lie in a folder. One line in
``registry`` makes it known.

Knows: names, files, metrics, what systems can do. Does not know: models.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from gerund.errors import ConfigError
from gerund.evaluation.systems.base import Generates

Side = Literal["representation", "tokens", "generation"]
Unit = Literal["percent", "perplexity", "bits", "fraction"]
Split = Literal["test", "validation"]


@dataclass(frozen=True)
class EvaluationConfig:
    """What holds for all tasks of an evaluation."""

    seed: int = 0
    """Seed of all sampling: few-shot examples, masked spans, negatives, generated texts."""

    limit: int | None = None
    """At most so many examples (queries, sentences, documents) a task; for a quick look."""

    prompts: Mapping[str, str] = field(default_factory=dict)
    """Prompts by task name or kind; a task that has none is encoded with the encoder's own prompt."""

    document_prompts: Mapping[str, str] = field(default_factory=dict)
    """Prompts for the documents of MTEB's tasks by task name; documents of others have none."""

    split: Split = "test"
    """Which split is scored; ``validation`` where something is still being chosen."""

    show_progress: bool | None = None
    """None shows bars on a terminal."""

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"limit={self.limit} leaves nothing to score")

    def to_dict(self) -> dict[str, Any]:
        """Return what scores depend on, ready for JSON."""
        others = {"document_prompts": dict(self.document_prompts)} if self.document_prompts else {}
        return {"seed": self.seed, "limit": self.limit, "prompts": dict(self.prompts), "split": self.split, **others}


@dataclass(frozen=True)
class Examples:
    """What a main metric is made of, example by example.

    Attributes:
        statistic: ``mean`` of the values; or ``spearman``, the correlation of their order with that of the targets.
        ids: of the examples: of queries the data's own, else their numbers.
        values: one an example.
        targets: what a correlation is with; None for a mean.
    """

    statistic: Literal["mean", "spearman"]
    ids: tuple[str, ...]
    values: tuple[float, ...]
    targets: tuple[float, ...] | None = None

    @classmethod
    def of_mean(cls, values: Any, ids: Iterable[str] | None = None) -> "Examples":
        """Return examples whose mean is the metric; without ids they are numbered from 0."""
        numbers = tuple(round(float(value), 6) for value in values)
        return cls("mean", tuple(map(str, range(len(numbers)))) if ids is None else tuple(ids), numbers)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict that ``from_dict`` reads back."""
        found = {"statistic": self.statistic, "ids": list(self.ids), "values": list(self.values)}
        return found if self.targets is None else {**found, "targets": list(self.targets)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Examples":
        """Read examples back."""
        targets = data.get("targets")
        return cls(
            data["statistic"],
            tuple(data["ids"]),
            tuple(data["values"]),
            None if targets is None else tuple(targets),
        )


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
        examples: what the main metric is made of; None where it is not made of single examples.
    """

    main: str
    metrics: Mapping[str, float]
    spread: float | None = None
    runs: int = 1
    size: int | None = None
    notes: tuple[str, ...] = ()
    examples: Examples | None = None

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
            "examples": None if self.examples is None else self.examples.to_dict(),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Score":
        """Read a score back."""
        examples = data.get("examples")
        own = {"notes": tuple(data["notes"]), "examples": None if examples is None else Examples.from_dict(examples)}
        return cls(**{**data, **own})


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
        files: the data; a finished score counts as long as their bytes are the same. Empty for what is fetched.
    """

    kind: ClassVar[str]
    side: ClassVar[Side]
    unit: ClassVar[Unit] = "percent"
    higher_is_better: ClassVar[bool] = True
    # Whether the score depends on the plan and pooling (True), or only on the weights, as writing does.
    reads_plan: ClassVar[bool] = True
    # Whether a score that does not depend on the plan depends on an adapter, as filling gaps does.
    reads_adapter: ClassVar[bool] = False
    # The protocol of ``systems.base`` that a system must satisfy to take part.
    requires: ClassVar[type] = Generates
    # Whether it takes so long that a side's name and `all` do not mean it.
    by_name_only: ClassVar[bool] = False
    # Whether `all` means it.
    in_all: ClassVar[bool] = True
    # The folder of the data folder that its files lie in; empty where they lie with another task's.
    data_folder: ClassVar[str] = ""

    name: str
    files: tuple[Path, ...] = ()

    @abstractmethod
    def run(self, system: Any, config: EvaluationConfig) -> Score:
        """Measure.

        Args:
            system: one that satisfies ``capability``.
            config: the evaluation's.

        Raises:
            DataError: the data are malformed; the message names file and line.
        """

    @property
    def title(self) -> str:
        """The second half of the name."""
        return self.name.partition("/")[2]

    @property
    def capability(self) -> type:
        """The protocol that a system must satisfy under the options that are set."""
        return self.requires

    @property
    def reads_scorer(self) -> bool:
        """Whether the score depends on the model's own scorer of continuations."""
        return False

    @property
    def also_read(self) -> tuple[Path, ...]:
        """Files besides the data that a finished score depends on."""
        return ()

    def key_parts(self, config: EvaluationConfig) -> tuple[str, ...]:
        """Return what a finished score depends on besides files, options, config and system; mostly nothing."""
        del config
        return ()

    @property
    def has_validation(self) -> bool:
        """Whether there is a split to choose settings on."""
        return False

    def prompt(self, config: EvaluationConfig) -> str | None:
        """Return the prompt of this task; None for the encoder's own."""
        return config.prompts.get(self.name, config.prompts.get(self.kind))

    def texts(self, config: EvaluationConfig) -> list[str]:
        """Return the texts that ``run`` encodes, in any order, repeated or not; none where that is not known."""
        del config
        return []

    def sentences(self, config: EvaluationConfig) -> list[list[str]]:
        """Return the sentences, as lists of words, whose word vectors ``run`` uses; none for other tasks."""
        del config
        return []

    @property
    def shifts_words(self) -> bool:
        """Whether word vectors are made of the outputs before each token."""
        return False

    @property
    def word_pooling(self) -> Literal["mean", "first"]:
        """How a word's tokens become its vector."""
        return "mean"

    def is_measured(self, system: Any, config: EvaluationConfig) -> bool:
        """Whether ``run`` takes over what another task's run has left, so that there is nothing to encode."""
        del system, config
        return False

    def picture_data(self, config: EvaluationConfig) -> LabelledTexts | RatedPairs | None:
        """Return texts whose embeddings are worth a picture; None for tasks without."""
        del config
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

    def scored_file(self, config: EvaluationConfig) -> Path:
        """Return the file of the split that is scored."""
        return self.files[1 if config.split == "validation" else 0]
