"""Classification by logistic regression on frozen embeddings of the whole training set (LBW section 4.1).

Knows: labelled texts, logistic regression, SMOTE. Does not know: models.
"""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from gerund.errors import unknown_name
from gerund.evaluation.classifiers import accuracy, logistic_regression, macro_f1, oversample, weighted_f1
from gerund.evaluation.labelled_task import LabelledTask, labelled_tasks
from gerund.evaluation.systems.base import Encodes
from gerund.evaluation.task import EvaluationConfig, Examples, Score

SMOTE_TIMES = 5
"""Of LBW's released code (evaluations/utils.py), which uses SMOTE whatever the size of the data."""

_CHOICES = ("never", "released", "balanced")


@dataclass(frozen=True, kw_only=True)
class LinearProbe(LabelledTask):
    """How much of the classes a linear classifier finds in the embeddings.

    Logistic regression by LBFGS (100 iterations) on embeddings of the whole training set as they are, not
    normalised. Main metric: accuracy; also the weighted F1 of LBW's Table 2, and macro F1. The score of the validation
    split is learnt from the same training set. Balanced, rare classes become as likely as frequent ones, so that
    accuracy may well fall where one class is most of the data; the released rule leaves the classes as likely as they
    were.

    ``config.limit`` is at most so many texts of the training set and of the split that is scored, sampled by the
    seed.
    """

    kind: ClassVar[str] = "linear-probe"
    requires: ClassVar[type] = Encodes

    # LBW makes examples up "for tasks with limited sample sizes"; its small one, PubMedQA, loses accuracy by it.
    smote: Literal["never", "released", "balanced"] = field(
        default="never",
        metadata={
            "help": f"make training examples up: released makes every class {SMOTE_TIMES} times as large, as LBW's "
            "code does, balanced brings each to the size of the largest, never makes none up"
        },
    )

    def __post_init__(self) -> None:
        if self.smote not in _CHOICES:
            raise unknown_name("value of smote", self.smote, _CHOICES)

    def run(self, system: Encodes, config: EvaluationConfig) -> Score:
        """Train on the training set, score the other.

        Raises:
            DataError: a file is malformed, or a label is only among what is scored.
        """
        train, test = self.learnt_and_scored(config)
        vectors = system.encode(train.texts + test.texts, prompt=self.prompt(config), show=config.show_progress)
        learnt, scored = vectors[: len(train.texts)], vectors[len(train.texts) :]
        labels = train.labels
        notes = []
        if self.smote != "never":
            times = SMOTE_TIMES if self.smote == "released" else None
            learnt, made = oversample(learnt, labels, seed=config.seed, times=times)
            notes += _smote_notes(labels, len(made))
            labels = made
        predicted = logistic_regression(learnt, labels, scored, seed=config.seed)
        metrics = {
            "accuracy": accuracy(test.labels, predicted),
            "weighted_f1": weighted_f1(test.labels, predicted),
            "macro_f1": macro_f1(test.labels, predicted),
        }
        right = [true == label for true, label in zip(test.labels, predicted, strict=True)]
        examples = Examples.of_mean(right)
        return Score("accuracy", metrics, size=len(test.labels), notes=tuple(notes), examples=examples)

    def texts(self, config: EvaluationConfig) -> list[str]:
        """Return the texts of the training set and of the split that is scored."""
        train, test = self.learnt_and_scored(config)
        return train.texts + test.texts


def find(folder: Path) -> list[LinearProbe]:
    """Return a task for every folder in ``classification`` that has a training and a test set."""
    return labelled_tasks(LinearProbe, folder)


def _smote_notes(labels: list[str], made: int) -> list[str]:
    """Say what SMOTE made of the training set."""
    counts = Counter(labels)
    alone = [label for label, count in sorted(counts.items()) if count == 1]
    notes = [f"SMOTE: {len(labels)} training examples became {made}"]
    if alone:
        notes.append(f"SMOTE left classes of a single example as they are: {', '.join(alone)}")
    return notes
