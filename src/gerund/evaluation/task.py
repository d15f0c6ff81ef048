"""Base classes of evaluation tasks, their configuration and their scores.

A task is a frozen dataclass: its fields are its options, its ``kind`` is the first half of its name (``sts/stsb``).
An entry point of the group ``gerund.tasks`` makes its class known.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from gerund.errors import ConfigError, DataError
from gerund.evaluation.data_files import (
    LabelledTexts,
    RatedPairs,
    check_labels,
    labelled_splits,
    read_labelled,
    single_files,
)
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
    """Maximum number of examples (queries, sentences, documents) per task; for a quick look."""

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
        statistic: ``mean`` of the values; or ``spearman``, the rank correlation of values and targets.
        ids: of the examples: of queries the data's own, else their numbers.
        values: one per example.
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
        data = {"statistic": self.statistic, "ids": list(self.ids), "values": list(self.values)}
        return data if self.targets is None else {**data, "targets": list(self.targets)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Examples":
        """Read examples back."""
        targets = data.get("targets")
        values = tuple(data["values"])
        return cls(data["statistic"], tuple(data["ids"]), values, None if targets is None else tuple(targets))


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
        examples = None if self.examples is None else self.examples.to_dict()
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {**values, "metrics": dict(self.metrics), "notes": list(self.notes), "examples": examples}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Score":
        """Read a score back."""
        examples = data.get("examples")
        examples = None if examples is None else Examples.from_dict(examples)
        return cls(**{**data, "notes": tuple(data["notes"]), "examples": examples})


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
    # Whether the score depends on the plan and pooling (True), or only on the weights, as generation does.
    reads_plan: ClassVar[bool] = True
    # Whether a score that does not depend on the plan depends on an adapter, as infilling does.
    reads_adapter: ClassVar[bool] = False
    # Whether it searches by words and vectors, so that the score depends on the vectors' weight and on the words.
    reads_fusion: ClassVar[bool] = False
    # The protocol of ``systems.base`` that a system must satisfy to take part.
    requires: ClassVar[type] = Generates
    # Whether it takes so long that it runs only when it is named, not for a side's name or `all`.
    by_name_only: ClassVar[bool] = False
    # Whether `all` includes it.
    in_all: ClassVar[bool] = True
    # The folder of the data folder that its files are in; empty where they are another task's.
    data_folder: ClassVar[str] = ""
    # What finds the files of each task in that folder, by the second half of its name.
    layout: ClassVar[Callable[[Path], Mapping[str, tuple[Path, ...]]]] = single_files

    name: str
    files: tuple[Path, ...] = ()

    @classmethod
    def find(cls, folder: Path) -> "list[Task]":
        """Return the tasks of this kind whose data are in a folder, as its ``layout`` finds them."""
        return cls.of(cls.layout(folder / cls.data_folder)) if cls.data_folder else []

    @classmethod
    def of(cls, files: Mapping[str, tuple[Path, ...]]) -> "list[Task]":
        """Return a task for each of these, by the second half of its name."""
        return [cls(name=f"{cls.kind}/{name}", files=paths) for name, paths in files.items()]

    @classmethod
    def known_names(cls) -> list[str]:
        """Return the names of the tasks of this kind whose data are fetched; ``select`` takes them as ``kind/NAME``."""
        return []

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
        """Whether another task's run has already measured this one, so that there is nothing to encode."""
        del system, config
        return False

    def picture_data(self, config: EvaluationConfig) -> LabelledTexts | RatedPairs | None:
        """Return texts whose embeddings are worth a figure; None for tasks without."""
        del config
        return None


def options_of(task: Task) -> dict[str, Any]:
    """Return a task's options by name: the fields with a ``help`` text in their metadata."""
    return {item.name: getattr(task, item.name) for item in fields(task) if "help" in item.metadata}


@dataclass(frozen=True, kw_only=True)
class FileTask(Task):
    """A task on one file per split.

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


@dataclass(frozen=True, kw_only=True)
class FolderTask(Task):
    """A task on a folder ``NAME/``, whose files are splits and whatever else belongs to them."""

    # What finds the files of a folder by what they are, and those without which it is no task.
    splits_of: ClassVar[Callable[[Path], dict[str, Path]]]
    needed_splits: ClassVar[tuple[str, ...]] = ("train", "test")

    @classmethod
    def find(cls, folder: Path) -> list[Task]:
        """Return a task for every folder that has the files that are needed."""
        folders = sorted(path for path in (folder / cls.data_folder).glob("*") if path.is_dir())
        splits = {path.name: cls.splits_of(path) for path in folders}
        there = {name: files for name, files in splits.items() if set(cls.needed_splits) <= files.keys()}
        return cls.of({name: tuple(files.values()) for name, files in there.items()})

    @property
    def splits(self) -> dict[str, Path]:
        """The files by what they are."""
        return type(self).splits_of(self.files[0].parent)

    @property
    def has_validation(self) -> bool:
        """Whether there is a validation split."""
        return "validation" in self.splits

    def split_file(self, split: str) -> Path:
        """Return the file of a split; a ``DataError`` where there is none."""
        path = self.splits.get(split)
        if path is None:
            raise DataError(f"{self.files[0].parent}: there is no file of the {split} split")
        return path


@dataclass(frozen=True, kw_only=True)
class LabelledTask(FolderTask):
    """A task on a folder of labelled texts, ``classification/NAME/``.

    ``config.limit`` texts of each split are sampled by ``config.seed``, since files are often sorted by label.
    """

    side: ClassVar[Side] = "representation"
    data_folder: ClassVar[str] = "classification"
    splits_of: ClassVar[Callable[[Path], dict[str, Path]]] = labelled_splits

    def scored(self, config: EvaluationConfig) -> LabelledTexts:
        """Return the texts that are scored."""
        return sampled(read_labelled(self.split_file(config.split)), config)

    def learnt_and_scored(self, config: EvaluationConfig) -> tuple[LabelledTexts, LabelledTexts]:
        """Return the training texts and those that are scored; a ``DataError`` for a label only among the latter."""
        train_path, test_path = self.split_file("train"), self.split_file(config.split)
        train, test = read_labelled(train_path), read_labelled(test_path)
        check_labels(train, test, train_path=train_path, test_path=test_path)
        return sampled(train, config), sampled(test, config)

    def picture_data(self, config: EvaluationConfig) -> LabelledTexts:
        """Return the texts that are scored."""
        return self.scored(config)


def sampled(texts: LabelledTexts, config: EvaluationConfig) -> LabelledTexts:
    """Return at most ``config.limit`` texts, sampled by the seed and in their order."""
    if config.limit is None or config.limit >= len(texts.texts):
        return texts
    order = np.random.default_rng(config.seed).permutation(len(texts.texts))
    return texts.take(sorted(order[: config.limit].tolist()))
