"""Classification learnt from a few examples a class (GUR, section V-B, Figures 9 and 10).

Knows: labelled texts, draws, logistic regression. Does not know: models.
"""

import statistics
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from gerund.errors import ConfigError
from gerund.evaluation.classifiers import accuracy, logistic_regression
from gerund.evaluation.labelled_task import LabelledTask, by_label, chosen, labelled_tasks
from gerund.evaluation.task import LabelledTexts, Score, Settings
from gerund.progress import progress

if TYPE_CHECKING:
    from gerund.evaluation.contender import Contender

SHOTS = (10, 100)
"""Examples a class."""


@dataclass(frozen=True, kw_only=True)
class FewShot(LabelledTask):
    """How well logistic regression on embeddings does with 10 and with 100 examples a class.

    The mean accuracy over several draws from the training set, which the seed decides, the same for every
    contender; the 10 of a draw are among its 100. A class that has fewer gives all of its examples. Main metric:
    accuracy at 10, whose standard deviation over the draws is the spread.

    GUR trains the whole model on these examples; here only the classifier is trained, since the weights are to
    stay those of the language model. The task ``fine-tuning`` trains a copy of the whole encoder.

    ``settings.limit`` is at most so many texts of the training set that is drawn from and of the split that is
    scored, drawn by the seed.
    """

    kind: ClassVar[str] = "few-shot"
    takes_vectors: ClassVar[bool] = True

    runs: int = field(default=5, metadata={"help": "Draws."})

    def __post_init__(self) -> None:
        if self.runs < 1:
            raise ConfigError(f"runs={self.runs} leaves nothing to score")

    def run(self, contender: "Contender", settings: Settings) -> Score:
        """Train on each draw, score the other set.

        Raises:
            DataError: a file is malformed, or a label is only among what is scored.
        """
        train, test = self.learnt_and_scored(settings)
        draws = self._draws(train, settings)
        used = _used(draws)
        learnt = chosen(train, used)
        vectors = contender.encode(learnt.texts + test.texts, prompt=self.prompt(settings), show=settings.show_progress)
        rows = {place: row for row, place in enumerate(used)}
        scores: dict[int, list[float]] = {shots: [] for shots in SHOTS}
        with progress(len(draws), "few-shot draws", show=settings.show_progress) as advance:
            for (shots, _), draw in draws.items():
                predicted = logistic_regression(
                    vectors[[rows[place] for place in draw]],
                    [train.labels[place] for place in draw],
                    vectors[len(used) :],
                    seed=settings.seed,
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

    def texts(self, settings: Settings) -> list[str]:
        """Return the texts that are drawn and those that are scored."""
        train, test = self.learnt_and_scored(settings)
        return chosen(train, _used(self._draws(train, settings))).texts + test.texts

    def _draws(self, train: LabelledTexts, settings: Settings) -> dict[tuple[int, int], list[int]]:
        """Return by number of shots and of the draw which training texts are learnt from."""
        draws: dict[tuple[int, int], list[int]] = {}
        for number in range(self.runs):
            orders = by_label(train.labels, settings.seed, number)
            for shots in SHOTS:
                draws[shots, number] = [place for order in orders for place in order[:shots]]
        return draws


def find(folder: Path) -> list[FewShot]:
    """Return a task for every folder in ``classification`` that has a training and a test set."""
    return labelled_tasks(FewShot, folder)


def _used(draws: dict[tuple[int, int], list[int]]) -> list[int]:
    """Return the places that any draw has."""
    return sorted({place for draw in draws.values() for place in draw})


def _notes(labels: list[str]) -> tuple[str, ...]:
    """Count the classes that have fewer examples than are drawn."""
    counts = Counter(labels)
    few = {shots: sum(count < shots for count in counts.values()) for shots in SHOTS}
    return tuple(
        f"{number} of {len(counts)} classes have fewer than {shots} training examples and give all of theirs"
        for shots, number in few.items()
        if number
    )
