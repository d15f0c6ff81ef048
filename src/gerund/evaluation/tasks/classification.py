"""Classification, zero-shot classification and clustering of labelled texts."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from gerund.errors import ConfigError, DataError
from gerund.evaluation.data_files import LabelledTexts, check_labels, read_labelled
from gerund.evaluation.mteb import LocalTask, mteb_seed, run_local, score_of
from gerund.evaluation.systems.base import Encoder, Encodes
from gerund.evaluation.task import EvaluationConfig, Examples, LabelledTask, Score, Side, Task, sampled
from gerund.models.vectors import unit

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
        """Measure."""
        from sklearn.linear_model import LogisticRegression

        train, test = self.learnt_and_scored(config)
        # Where every class gives all it has, runs learn from the same texts.
        runs = self.runs if max(Counter(train.labels).values()) > self.per_label else 1
        places = {label: place for place, label in enumerate(sorted({*train.labels, *test.labels}))}
        splits = {
            name: {"text": texts.texts, "label": [places[label] for label in texts.labels]}
            for name, texts in (("train", train), ("test", test))
        }
        attributes = {
            # A new object: MTEB sets the seed on it, and its tasks share theirs.
            "evaluator_model": LogisticRegression(max_iter=_STEPS),
            "samples_per_label": self.per_label,
            "n_experiments": runs,
        }
        local = LocalTask(self.name, "AbsTaskClassification", "Classification", "accuracy", splits, attributes)
        scores = run_local(local, system, config, self.prompt(config))
        spread = float(np.std([scored["accuracy"] for scored in scores["scores_per_experiment"]]))
        return score_of(scores, local.main, ("f1",), spread=spread, runs=runs, size=len(test.texts))

    def learnt_and_scored(self, config: EvaluationConfig) -> tuple[LabelledTexts, LabelledTexts]:
        """Return all training texts, and those that are scored."""
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
    places: set[int] = set()
    for _ in range(runs):
        np.random.RandomState(seed).shuffle(order)
        counts: Counter[str] = Counter()
        for place in order:
            if counts[labels[place]] < per_label:
                places.add(place)
                counts[labels[place]] += 1
    return sorted(places)


_NEAREST = 5
# Cosines that differ by less are equal: they are computed in float64 from float32 vectors.
_DECIMALS = 9


@dataclass(frozen=True, kw_only=True)
class ZeroShot(LabelledTask):
    """Whether a text lies nearer to the name of its class than to those of the others.

    Texts and the names of all classes (of every split that is there) are embedded with the same prompt; the
    nearest name by cosine wins, the alphabetically first of equally near ones. In names, ``_`` and ``-`` become
    spaces. Main metric: accuracy; also how often the right class is among the 5 nearest.

    ``config.limit`` scored texts are sampled by the seed.
    """

    kind: ClassVar[str] = "zero-shot"
    requires: ClassVar[type] = Encodes
    needed_splits: ClassVar[tuple[str, ...]] = ("test",)

    label_template: str = field(default="{}", metadata={"help": "What is embedded for a class; {} is its name."})

    def __post_init__(self) -> None:
        if "{}" not in self.label_template:
            raise ConfigError(f"label_template={self.label_template!r} has no {{}} for the name of the class")

    def run(self, system: Encodes, config: EvaluationConfig) -> Score:
        """Classify."""
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
            labelled = read_labelled(path).labels
            meaningless = sorted({label for label in labelled if not any(map(str.isalpha, label))})
            if meaningless:
                raise DataError(
                    f"{path}: the label {meaningless[0]!r} has no letter, so its embedding means nothing; "
                    "zero-shot classification needs labels that name their class"
                )
            labels.update(labelled)
        return sorted(labels)

    def _names(self, labels: list[str]) -> list[str]:
        words = [" ".join(label.replace("_", " ").replace("-", " ").split()) for label in labels]
        return [self.label_template.replace("{}", name) for name in words]


def _nearest(texts_ND: np.ndarray, names_CD: np.ndarray) -> np.ndarray:
    """Return the places of the names, nearest first, for each text: ``(N, C)``."""
    cosines_NC = unit(texts_ND.astype(np.float64)) @ unit(names_CD.astype(np.float64)).T
    order: np.ndarray = np.argsort(-cosines_NC.round(_DECIMALS), axis=1, kind="stable")
    return order


_RUNS = 10


@dataclass(frozen=True, kw_only=True)
class Clustering(Task):
    """V-measure of mini-batch k-means, as MTEB's clustering tasks compute it.

    Ten times a sample as large as the file is taken with replacement and put into as many clusters as there
    are labels (MTEB's bootstrap, on all texts instead of 4 percent). The file is ``clustering/NAME.jsonl``.
    ``config.limit`` texts are sampled by the seed, since files are often sorted by label.
    """

    kind: ClassVar[str] = "clustering"
    data_folder: ClassVar[str] = "clustering"
    side: ClassVar[Side] = "representation"
    requires: ClassVar[type] = Encodes

    def run(self, system: Encoder, config: EvaluationConfig) -> Score:
        """Measure."""
        texts = self.picture_data(config)
        if len(set(texts.labels)) < 2:
            raise DataError(f"{self.files[0]}: every text has the label {texts.labels[0]!r}; two are needed")
        attributes = {
            "max_fraction_of_documents_to_embed": None,
            "max_documents_per_cluster": len(texts.texts),
            "n_clusters": _RUNS,
        }
        columns = {"sentences": texts.texts, "labels": texts.labels}
        local = LocalTask(self.name, "AbsTaskClustering", "Clustering", "v_measure", {"test": columns}, attributes)
        scores = run_local(local, system, config, self.prompt(config))
        return score_of(scores, local.main, spread=float(scores["v_measure_std"]), runs=_RUNS, size=len(texts.texts))

    def texts(self, config: EvaluationConfig) -> list[str]:
        """Return the texts that are clustered."""
        return self.picture_data(config).texts

    def picture_data(self, config: EvaluationConfig) -> LabelledTexts:
        """Return the texts that are clustered."""
        return sampled(read_labelled(self.files[0]), config)
