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
from gerund.evaluation.contender import Contender
from gerund.evaluation.labelled_task import LabelledTask, labelled_tasks
from gerund.evaluation.mteb_runs import LocalTask, mteb_seed, run_local, score_of
from gerund.evaluation.sets.labelled import check_labels, read_labelled
from gerund.evaluation.task import LabelledTexts, Score, Settings, Task

_STEPS = 100


@dataclass(frozen=True, kw_only=True)
class Classification(LabelledTask):
    """Accuracy of a logistic regression on few examples a class, as MTEB computes it.

    The files are ``classification/NAME/{train,test}.jsonl``, and ``valid.jsonl`` for validation. Repeated with
    other examples; a class that has fewer examples gives all it has. ``settings.limit`` is at most so many
    scored texts, drawn by the seed since files are often sorted by label; what is learnt from stays.
    """

    kind: ClassVar[str] = "classification"
    takes_vectors: ClassVar[bool] = True

    per_label: int = field(default=8, metadata={"help": "Examples a class to learn from (MTEB: 8)."})
    runs: int = field(default=10, metadata={"help": "Repetitions with other examples (MTEB: 10)."})

    def __post_init__(self) -> None:
        if min(self.per_label, self.runs) < 1:
            raise ConfigError(f"{self.kind}: per_label and runs are 1 or more")

    def run(self, contender: Contender, settings: Settings) -> Score:
        """Measure.

        Raises:
            DataError: a malformed file, a label that is only among the scored texts, or a single label.
        """
        from sklearn.linear_model import LogisticRegression

        train, test = self.learnt_and_scored(settings)
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
        scores = run_local(local, contender, settings, self.prompt(settings))
        spread = float(np.std([one["accuracy"] for one in scores["scores_per_experiment"]]))
        return score_of(scores, local.main, ("f1",), spread=spread, runs=self.runs, size=len(test.texts))

    def learnt_and_scored(self, settings: Settings) -> tuple[LabelledTexts, LabelledTexts]:
        """Return all training texts, and those that are scored.

        Raises:
            DataError: a file is malformed, or a label is only among what is scored.
        """
        path = self.split_file("train")
        train, test = read_labelled(path), self.scored(settings)
        check_labels(train, test, train_path=path, test_path=self.split_file(settings.split))
        return train, test

    def texts(self, settings: Settings) -> list[str]:
        """Return the texts that are scored, and those that are drawn to learn from."""
        train, test = self.learnt_and_scored(settings)
        learnt = places_drawn(train.labels, mteb_seed(settings), per_label=self.per_label, runs=self.runs)
        return [*test.texts, *(train.texts[place] for place in learnt)]


def places_drawn(labels: Sequence[str], seed: int, *, per_label: int, runs: int) -> list[int]:
    """Return the training examples that MTEB draws in any of its runs, sorted.

    Every run shuffles the order of the one before with the same seed and takes the first examples of each
    class (``AbsTaskClassification._undersample_data``).

    >>> places_drawn(["a", "b", "a", "b"], 42, per_label=2, runs=1)
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
