"""Classification learnt from a few examples a class (GUR, section V-B, Figures 9 and 10).

Knows: labelled texts, samples, logistic regression. Does not know: models.
"""

import statistics
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from gerund.errors import ConfigError
from gerund.evaluation.classifiers import accuracy, logistic_regression
from gerund.evaluation.labelled_task import LabelledTask, by_label, chosen, labelled_tasks
from gerund.evaluation.systems.base import Encodes
from gerund.evaluation.task import EvaluationConfig, LabelledTexts, Score
from gerund.progress import progress

SHOTS = (10, 100)
"""Examples a class."""


@dataclass(frozen=True, kw_only=True)
class FewShot(LabelledTask):
    """How well logistic regression on embeddings does with 10 and with 100 examples a class.

    The mean accuracy over several samples of the training set, which depend on the seed alone; the 10 of a sample are
    among its 100. A class that has fewer gives all of its examples. Main metric:
    accuracy at 10, whose standard deviation over the samples is the spread.

    GUR trains the whole model on these examples; here only the classifier is trained, since the weights are to
    stay those of the language model. The task ``fine-tuning`` trains a copy of the whole encoder.

    ``config.limit`` is at most so many texts of the training set that is sampled from and of the split that is
    scored, sampled by the seed.
    """

    kind: ClassVar[str] = "few-shot"
    requires: ClassVar[type] = Encodes

    runs: int = field(default=5, metadata={"help": "Samples."})

    def __post_init__(self) -> None:
        if self.runs < 1:
            raise ConfigError(f"runs={self.runs} leaves nothing to score")

    def run(self, system: Encodes, config: EvaluationConfig) -> Score:
        """Train on each sample, score the other set.

        Raises:
            DataError: a file is malformed, or a label is only among what is scored.
        """
        train, test = self.learnt_and_scored(config)
        samples = self._samples(train, config)
        used = _used(samples)
        learnt = chosen(train, used)
        vectors = system.encode(learnt.texts + test.texts, prompt=self.prompt(config), show=config.show_progress)
        rows = {place: row for row, place in enumerate(used)}
        scores: dict[int, list[float]] = {shots: [] for shots in SHOTS}
        with progress(len(samples), "few-shot samples", show=config.show_progress) as advance:
            for (shots, _), sample in samples.items():
                predicted = logistic_regression(
                    vectors[[rows[place] for place in sample]],
                    [train.labels[place] for place in sample],
                    vectors[len(used) :],
                    seed=config.seed,
                )
                scores[shots].append(accuracy(test.labels, predicted))
                advance(1)
        return Score(
            f"accuracy_at_{SHOTS[0]}",
            {f"accuracy_at_{shots}": statistics.fmean(found) for shots, found in scores.items()},
            spread=statistics.stdev(scores[SHOTS[0]]) if self.runs > 1 else None,
            runs=self.runs,
            size=len(test.labels),
            notes=_notes(train.labels),
        )

    def texts(self, config: EvaluationConfig) -> list[str]:
        """Return the texts that are sampled and those that are scored."""
        train, test = self.learnt_and_scored(config)
        return chosen(train, _used(self._samples(train, config))).texts + test.texts

    def _samples(self, train: LabelledTexts, config: EvaluationConfig) -> dict[tuple[int, int], list[int]]:
        """Return by number of shots and of the sample which training texts are learnt from."""
        samples: dict[tuple[int, int], list[int]] = {}
        for number in range(self.runs):
            orders = by_label(train.labels, config.seed, number)
            for shots in SHOTS:
                samples[shots, number] = [place for order in orders for place in order[:shots]]
        return samples


def find(folder: Path) -> list[FewShot]:
    """Return a task for every folder in ``classification`` that has a training and a test set."""
    return labelled_tasks(FewShot, folder)


def _used(samples: dict[tuple[int, int], list[int]]) -> list[int]:
    """Return the places that any sample has."""
    return sorted({place for sample in samples.values() for place in sample})


def _notes(labels: list[str]) -> tuple[str, ...]:
    """Count the classes that have fewer examples than a sample takes."""
    counts = Counter(labels)
    few = {shots: sum(count < shots for count in counts.values()) for shots in SHOTS}
    return tuple(
        f"{number} of {len(counts)} classes have fewer than {shots} training examples and give all of theirs"
        for shots, number in few.items()
        if number
    )
