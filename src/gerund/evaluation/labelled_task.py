"""What tasks on labelled texts in splits have in common: their files, the split that is scored, samples of them.

Knows: folders of labelled texts. Does not know: what is measured on them.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, TypeVar

import numpy as np

from gerund.errors import DataError
from gerund.evaluation.sets.labelled import check_labels, labelled_splits, read_labelled
from gerund.evaluation.task import EvaluationConfig, LabelledTexts, Side, Task

FOLDER = "classification"


@dataclass(frozen=True, kw_only=True)
class LabelledTask(Task):
    """A task on a folder of labelled texts.

    ``config.limit`` is at most so many texts of each split, sampled by ``config.seed`` since files are often
    sorted by label.
    """

    side: ClassVar[Side] = "representation"
    data_folder: ClassVar[str] = FOLDER
    needed_splits: ClassVar[tuple[str, ...]] = ("train", "test")

    @property
    def splits(self) -> dict[str, Path]:
        """The files by split."""
        return labelled_splits(self.files[0].parent)

    @property
    def has_validation(self) -> bool:
        """Whether there is a validation split."""
        return "validation" in self.splits

    def split_file(self, split: str) -> Path:
        """Return the file of a split.

        Raises:
            DataError: there is none.
        """
        path = self.splits.get(split)
        if path is None:
            raise DataError(f"{self.files[0].parent}: there is no file of the {split} split")
        return path

    def scored(self, config: EvaluationConfig) -> LabelledTexts:
        """Return the texts that are scored.

        Raises:
            DataError: a file is malformed.
        """
        return sampled(read_labelled(self.split_file(config.split)), config)

    def learnt_and_scored(self, config: EvaluationConfig) -> tuple[LabelledTexts, LabelledTexts]:
        """Return the training texts and those that are scored.

        Raises:
            DataError: a file is malformed, or a label is only among what is scored.
        """
        train_path, test_path = self.split_file("train"), self.split_file(config.split)
        train, test = read_labelled(train_path), read_labelled(test_path)
        check_labels(train, test, train_path=train_path, test_path=test_path)
        return sampled(train, config), sampled(test, config)

    def picture_data(self, config: EvaluationConfig) -> LabelledTexts:
        """Return the texts that are scored."""
        return self.scored(config)


AnyLabelledTask = TypeVar("AnyLabelledTask", bound=LabelledTask)


def labelled_tasks(kind: type[AnyLabelledTask], folder: Path) -> list[AnyLabelledTask]:
    """Return a task of a kind for every folder of labelled texts that has the splits which the kind needs."""
    found = []
    for place in sorted(path for path in (folder / FOLDER).glob("*") if path.is_dir()):
        splits = labelled_splits(place)
        if set(kind.needed_splits) <= splits.keys():
            found.append(kind(name=f"{kind.kind}/{place.name}", files=tuple(splits.values())))
    return found


def sampled(texts: LabelledTexts, config: EvaluationConfig) -> LabelledTexts:
    """Return at most ``config.limit`` texts, sampled by the seed and in their order."""
    if config.limit is None or config.limit >= len(texts.texts):
        return texts
    order = np.random.default_rng(config.seed).permutation(len(texts.texts))
    return chosen(texts, sorted(order[: config.limit].tolist()))


def by_label(labels: list[str], seed: int, number: int) -> list[list[int]]:
    """Return the places of each label's examples in a random order, label after label.

    The first so many of each are a sample; a smaller sample is part of a larger one.

    Args:
        labels: of the examples that are sampled from.
        seed: the evaluation's.
        number: of the sample.
    """
    places: dict[str, list[int]] = {}
    for place, label in enumerate(labels):
        places.setdefault(label, []).append(place)
    rng = np.random.default_rng([seed, number])
    return [rng.permutation(places[label]).tolist() for label in sorted(places)]


def chosen(texts: LabelledTexts, places: list[int]) -> LabelledTexts:
    """Return the texts at some places."""
    return LabelledTexts([texts.texts[place] for place in places], [texts.labels[place] for place in places])
