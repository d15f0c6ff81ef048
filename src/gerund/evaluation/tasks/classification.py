"""Classification as MTEB does it: a logistic regression that learns from a few embeddings of each class.

Knows: folders of labelled texts, which of MTEB's evaluators scores them. Does not know: models.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np

from gerund.errors import ConfigError
from gerund.evaluation.labelled_task import LabelledTask, labelled_tasks
from gerund.evaluation.mteb import LocalTask, mteb_seed, run_local, score_of
from gerund.evaluation.sets.labelled import check_labels, read_labelled
from gerund.evaluation.systems.base import Encoder, Encodes
from gerund.evaluation.task import EvaluationConfig, LabelledTexts, Score, Task

_STEPS = 100


@dataclass(frozen=True, kw_only=True)
class Classification(LabelledTask):
    """Accuracy of a logistic regression on few examples a class, as MTEB computes it.

    The files are ``classification/NAME/{train,test}.jsonl``, and ``valid.jsonl`` for validation. Repeated with
    other examples; a class that has fewer examples gives all it has. ``config.limit`` is at most so many
    scored texts, sampled by the seed since files are often sorted by label; what is learnt from stays.
    """

    kind: ClassVar[str] = "classification"
    requires: ClassVar[type] = Encodes

    per_label: int = field(default=8, metadata={"help": "Examples a class to learn from (MTEB: 8)."})
    runs: int = field(default=10, metadata={"help": "Repetitions with other examples (MTEB: 10)."})

    def __post_init__(self) -> None:
        if min(self.per_label, self.runs) < 1:
            raise ConfigError(f"{self.kind}: per_label and runs are 1 or more")

    def run(self, system: Encoder, config: EvaluationConfig) -> Score:
        """Measure.

        Raises:
            DataError: a malformed file, a label that is only among the scored texts, or a single label.
        """
        from sklearn.linear_model import LogisticRegression

        train, test = self.learnt_and_scored(config)
        places = {label: place for place, label in enumerate(sorted({*train.labels, *test.labels}))}
        splits = {
            name: {"text": texts.texts, "label": [places[label] for label in texts.labels]}
            for name, texts in (("train", train), ("test", test))
        }
        attributes = {
            # One of our own: MTEB sets the seed on the object, and its tasks share one.
            "evaluator_model": LogisticRegression(max_iter=_STEPS),
            "samples_per_label": self.per_label,
            "n_experiments": self.runs,
        }
        local = LocalTask(self.name, "AbsTaskClassification", "Classification", "accuracy", splits, attributes)
        scores = run_local(local, system, config, self.prompt(config))
        spread = float(np.std([one["accuracy"] for one in scores["scores_per_experiment"]]))
        return score_of(scores, local.main, ("f1",), spread=spread, runs=self.runs, size=len(test.texts))

    def learnt_and_scored(self, config: EvaluationConfig) -> tuple[LabelledTexts, LabelledTexts]:
        """Return all training texts, and those that are scored.

        Raises:
            DataError: a file is malformed, or a label is only among what is scored.
        """
        path = self.split_file("train")
        train, test = read_labelled(path), self.scored(config)
        check_labels(train, test, train_path=path, test_path=self.split_file(config.split))
        return train, test

    def texts(self, config: EvaluationConfig) -> list[str]:
        """Return the texts that are scored, and those that are sampled to learn from."""
        train, test = self.learnt_and_scored(config)
        learnt = places_sampled(train.labels, mteb_seed(config), per_label=self.per_label, runs=self.runs)
        return [*test.texts, *(train.texts[place] for place in learnt)]


def places_sampled(labels: Sequence[str], seed: int, *, per_label: int, runs: int) -> list[int]:
    """Return the training examples that MTEB samples in any of its runs, sorted.

    Every run shuffles the order of the one before with the same seed and takes the first examples of each
    class (``AbsTaskClassification._undersample_data``).

    >>> places_sampled(["a", "b", "a", "b"], 42, per_label=2, runs=1)
    [0, 1, 2, 3]
    """
    order = list(range(len(labels)))
    found: set[int] = set()
    for _ in range(runs):
        np.random.RandomState(seed).shuffle(order)
        counts: Counter[str] = Counter()
        for place in order:
            if counts[labels[place]] < per_label:
                found.add(place)
                counts[labels[place]] += 1
    return sorted(found)


def find(folder: Path) -> list[Task]:
    """Return a task for every folder in ``classification/`` that has a training and a test set."""
    return list(labelled_tasks(Classification, folder))
