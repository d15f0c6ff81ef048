"""Classification without any training: the label whose own embedding is nearest (GUR, section V-B).

Knows: labelled texts, cosines. Does not know: models.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np

from gerund.errors import ConfigError, DataError
from gerund.evaluation.labelled_task import LabelledTask, labelled_tasks
from gerund.evaluation.sets.labelled import read_labelled
from gerund.evaluation.systems.base import Encodes
from gerund.evaluation.task import EvaluationConfig, Examples, Score

_NEAREST = 5
# Cosines that differ by less are equal: they are computed in float64 from float32 vectors.
_DECIMALS = 9


@dataclass(frozen=True, kw_only=True)
class ZeroShot(LabelledTask):
    """Whether a text lies nearer to the name of its class than to those of the others.

    Texts and the names of all classes (of every split that is there) are embedded with the same prompt; the
    nearest name by cosine wins, the alphabetically first of equally near ones. In names, ``_`` and ``-`` become
    spaces. Main metric: accuracy; also how often the right class is among the 5 nearest.

    ``config.limit`` is at most so many scored texts, sampled by the seed.
    """

    kind: ClassVar[str] = "zero-shot"
    requires: ClassVar[type] = Encodes
    needed_splits: ClassVar[tuple[str, ...]] = ("test",)

    label_template: str = field(default="{}", metadata={"help": "What is embedded for a class; {} is its name."})

    def __post_init__(self) -> None:
        if "{}" not in self.label_template:
            raise ConfigError(f"label_template={self.label_template!r} has no {{}} for the name of the class")

    def run(self, system: Encodes, config: EvaluationConfig) -> Score:
        """Classify.

        Raises:
            DataError: a file is malformed, or a label has no letter and so means nothing as a text.
        """
        labels = self._labels()
        test = self.scored(config)
        vectors = system.encode(
            test.texts + self._names(labels),
            prompt=self.prompt(config),
            show=config.show_progress,
        )
        nearest = _nearest(vectors[: len(test.texts)], vectors[len(test.texts) :])
        places = np.array([labels.index(label) for label in test.labels])
        right = nearest == places[:, None]
        metrics = {
            "accuracy": float(right[:, 0].mean()),
            f"accuracy_at_{_NEAREST}": float(right[:, :_NEAREST].any(axis=1).mean()),
        }
        chance, within = (min(1.0, guesses / len(labels)) for guesses in (1, _NEAREST))
        note = f"chance is {chance:.2%} with {len(labels)} classes, {within:.2%} within the {_NEAREST} nearest"
        return Score("accuracy", metrics, size=len(test.texts), notes=(note,), examples=Examples.of_mean(right[:, 0]))

    def texts(self, config: EvaluationConfig) -> list[str]:
        """Return the scored texts and the names of the classes."""
        return self.scored(config).texts + self._names(self._labels())

    def _labels(self) -> list[str]:
        """Return the classes of all splits in alphabetical order."""
        labels: set[str] = set()
        for path in self.splits.values():
            own = read_labelled(path).labels
            meaningless = sorted({label for label in own if not any(map(str.isalpha, label))})
            if meaningless:
                raise DataError(
                    f"{path}: the label {meaningless[0]!r} has no letter, so its embedding means nothing; "
                    "zero-shot classification needs labels that name their class"
                )
            labels.update(own)
        return sorted(labels)

    def _names(self, labels: list[str]) -> list[str]:
        """Return what is embedded for each class."""
        words = [" ".join(label.replace("_", " ").replace("-", " ").split()) for label in labels]
        return [self.label_template.replace("{}", name) for name in words]


def find(folder: Path) -> list[ZeroShot]:
    """Return a task for every folder in ``classification`` that has a test set."""
    return labelled_tasks(ZeroShot, folder)


def _nearest(texts_ND: np.ndarray, names_CD: np.ndarray) -> np.ndarray:
    """Return the places of the names, nearest first, for each text: ``(N, C)``."""
    from gerund.models.vectors import unit

    cosines_NC = unit(texts_ND.astype(np.float64)) @ unit(names_CD.astype(np.float64)).T
    order: np.ndarray = np.argsort(-cosines_NC.round(_DECIMALS), axis=1, kind="stable")
    return order
