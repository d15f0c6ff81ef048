"""Logistic regression on frozen embeddings: linear probe with SMOTE (Look Both Ways) and few-shot (GUR)."""

import statistics
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np

from gerund.errors import ConfigError, MissingDependencyError, unknown_name
from gerund.evaluation.data_files import LabelledTexts
from gerund.evaluation.systems.base import Encodes
from gerund.evaluation.task import EvaluationConfig, Examples, LabelledTask, Score
from gerund.progress import progress

SMOTE_TIMES = 5
"""Of LBW's released code (evaluations/utils.py), which uses SMOTE whatever the size of the data."""

_CHOICES = ("never", "released", "balanced")

SHOTS = (10, 100)
"""Examples a class."""
ITERATIONS = 100
"""Of LBFGS: LBW section 4.1, as in MTEB."""

# Nearest neighbours that SMOTE interpolates between: its paper's (Chawla et al., 2002) and imbalanced-learn's.
_NEIGHBOURS = 5


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
        """Train on the training set, score the other."""
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


def _smote_notes(labels: list[str], made: int) -> list[str]:
    """Say what SMOTE made of the training set."""
    counts = Counter(labels)
    alone = [label for label, count in sorted(counts.items()) if count == 1]
    notes = [f"SMOTE: {len(labels)} training examples became {made}"]
    if alone:
        notes.append(f"SMOTE left classes of a single example as they are: {', '.join(alone)}")
    return notes


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
        """Train on each sample, score the other set."""
        train, test = self.learnt_and_scored(config)
        samples = self._samples(train, config)
        used = _used(samples)
        learnt = train.take(used)
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
            {f"accuracy_at_{shots}": statistics.fmean(accuracies) for shots, accuracies in scores.items()},
            spread=statistics.stdev(scores[SHOTS[0]]) if self.runs > 1 else None,
            runs=self.runs,
            size=len(test.labels),
            notes=notes_on(train.labels, SHOTS),
        )

    def texts(self, config: EvaluationConfig) -> list[str]:
        """Return the texts that are sampled and those that are scored."""
        train, test = self.learnt_and_scored(config)
        return train.take(_used(self._samples(train, config))).texts + test.texts

    def _samples(self, train: LabelledTexts, config: EvaluationConfig) -> dict[tuple[int, int], list[int]]:
        """Return by number of shots and of the sample which training texts are learnt from."""
        return {
            (shots, number): sample_of(train.labels, shots, config.seed, number)
            for number in range(self.runs)
            for shots in SHOTS
        }


def _used(samples: dict[tuple[int, int], list[int]]) -> list[int]:
    return sorted({place for sample in samples.values() for place in sample})


def notes_on(labels: list[str], samples: Sequence[int]) -> tuple[str, ...]:
    """Count the classes that have fewer examples than a sample takes, for each number of examples a class."""
    counts = Counter(labels)
    few = {shots: sum(count < shots for count in counts.values()) for shots in samples}
    return tuple(
        f"{number} of {len(counts)} classes have fewer than {shots} training examples and give all of theirs"
        for shots, number in few.items()
        if number
    )


def sample_of(labels: list[str], shots: int, seed: int, number: int) -> list[int]:
    """Return the places of ``shots`` examples of each label, label after label; a smaller sample is part of it."""
    places: dict[str, list[int]] = {}
    for place, label in enumerate(labels):
        places.setdefault(label, []).append(place)
    rng = np.random.default_rng([seed, number])
    return [place for label in sorted(places) for place in rng.permutation(places[label])[:shots].tolist()]


def logistic_regression(
    train_ND: np.ndarray, train_labels: Sequence[str], test_MD: np.ndarray, *, seed: int
) -> list[str]:
    """Fit a logistic regression by LBFGS and return what it predicts.

    The vectors are taken as they are: measured on banking77, hwu64, chemprot and the financial phrasebank, length 1
    costs up to 18 points of accuracy, and unit variance gains nothing.
    """
    if len(set(train_labels)) == 1:
        return [train_labels[0]] * len(test_MD)
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from threadpoolctl import threadpool_limits

    # More threads make LBFGS slower here, by four on two cores: the matrices are small.
    with threadpool_limits(limits=1, user_api="blas"), warnings.catch_warnings():
        # The papers stop after so many iterations, converged or not.
        warnings.simplefilter("ignore", ConvergenceWarning)
        fitted = LogisticRegression(max_iter=ITERATIONS, random_state=seed).fit(train_ND, train_labels)
        return [str(label) for label in fitted.predict(test_MD)]


def oversample(
    vectors_ND: np.ndarray, labels: Sequence[str], *, seed: int, times: int | None = None
) -> tuple[np.ndarray, list[str]]:
    """Make examples up by SMOTE (Chawla et al., 2002): bring every class to one size, or to several times its own.

    A made-up example lies between one of the class and one of its 5 nearest neighbours within the class; where
    a class has no 5 others, between as many as it has. A class with a single example stays as it is.
    """
    try:
        from imblearn.over_sampling import SMOTE
    except ImportError as error:
        raise MissingDependencyError("SMOTE needs imbalanced-learn: pip install 'gerund[papers]'") from error

    if len(set(labels)) < 2:  # there is nothing to tell apart, as in the first examples of a file
        return vectors_ND, list(labels)
    counts = {label: count for label, count in sorted(Counter(labels).items()) if count > 1}
    most = max(counts.values(), default=0)
    fewest = min(_NEIGHBOURS, min(counts.values(), default=2) - 1)
    grouped: dict[int, dict[str, int]] = {}
    for label, count in counts.items():
        if times is not None:
            grouped.setdefault(fewest, {})[label] = times * count
        elif count < most:
            grouped.setdefault(min(_NEIGHBOURS, count - 1), {})[label] = most
    labels = list(labels)
    for neighbours, wanted in grouped.items():
        sampler = SMOTE(k_neighbors=neighbours, sampling_strategy=wanted, random_state=seed)
        vectors_ND, labels = sampler.fit_resample(vectors_ND, labels)
    return vectors_ND, [str(label) for label in labels]


def accuracy(gold: Sequence[str], predicted: Sequence[str]) -> float:
    """Return which fraction of the labels is right."""
    return sum(true == label for true, label in zip(gold, predicted, strict=True)) / len(gold)


def macro_f1(gold: Sequence[str], predicted: Sequence[str]) -> float:
    """Return the mean F1 of all labels that occur or are predicted; 0 for those that are never right."""
    from sklearn.metrics import f1_score

    return float(f1_score(gold, predicted, average="macro", zero_division=0.0))


def weighted_f1(gold: Sequence[str], predicted: Sequence[str]) -> float:
    """Return the mean F1 of all labels that occur, each weighing as often as it occurs."""
    from sklearn.metrics import f1_score

    return float(f1_score(gold, predicted, average="weighted", zero_division=0.0))
