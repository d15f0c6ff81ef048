"""Similarity tasks: semantic textual similarity (STS) and pair classification, scored by MTEB."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np

from gerund.errors import DataError
from gerund.evaluation.data_files import RatedPairs, named_files, read_labelled_pairs, read_scored_pairs
from gerund.evaluation.mteb import LocalTask, run_local, score_of
from gerund.evaluation.systems.base import Encoder, Encodes
from gerund.evaluation.task import EvaluationConfig, Examples, FileTask, Score, Side, Task
from gerund.models.vectors import unit


@dataclass(frozen=True, kw_only=True)
class Sts(FileTask):
    """Spearman correlation of cosines with ratings, as MTEB's STS tasks compute it (SentEval's protocol).

    The files are ``sts/NAME.test.tsv`` and, for validation, ``NAME.dev.tsv``: score, sentence, sentence.
    ``config.limit`` takes the first pairs of the file.

    Attributes:
        files: the test set, then the validation set where there is one.
    """

    kind: ClassVar[str] = "sts"
    data_folder: ClassVar[str] = "sts"
    side: ClassVar[Side] = "representation"
    requires: ClassVar[type] = Encodes

    @classmethod
    def find(cls, folder: Path) -> list[Task]:
        """Return a task for every ``sts/NAME.test.tsv``."""
        files = named_files(folder / cls.data_folder, (".tsv", ".tsv.xz", ".tsv.gz"))
        names = sorted(name.removesuffix(".test") for name in files if name.endswith(".test"))
        splits = {name: [f"{name}.test", f"{name}.dev"] for name in names}
        paths = {name: tuple(files[file] for file in splits[name] if file in files) for name in names}
        return [cls(name=f"{cls.kind}/{name}", files=paths[name]) for name in names]

    def run(self, system: Encoder, config: EvaluationConfig) -> Score:
        """Measure."""
        pairs = self.picture_data(config)
        if len(pairs.ratings) < 2:
            raise DataError(f"{self._file(config)}: a correlation needs two pairs or more")
        columns = {"sentence1": pairs.left, "sentence2": pairs.right, "score": pairs.ratings}
        local = LocalTask(self.name, "AbsTaskSTS", "STS", "cosine_spearman", {"test": columns})
        scores = run_local(local, system, config, self.prompt(config))
        return score_of(
            scores,
            "cosine_spearman",
            ("cosine_pearson",),
            size=len(pairs.ratings),
            examples=self._examples(system, pairs, config),
        )

    def _examples(self, system: Encoder, pairs: RatedPairs, config: EvaluationConfig) -> Examples:
        """Return the cosine of each pair with its rating, from vectors that are cached by now."""
        left_ND, right_ND = (
            unit(system.encode(side, prompt=self.prompt(config), show=False)) for side in (pairs.left, pairs.right)
        )
        cosines = np.round((left_ND * right_ND).sum(axis=1, dtype=np.float64), 6).tolist()
        numbers = tuple(map(str, range(len(cosines))))
        return Examples("spearman", numbers, tuple(cosines), tuple(map(float, pairs.ratings)))

    def texts(self, config: EvaluationConfig) -> list[str]:
        """Return both sides of every pair."""
        pairs = self.picture_data(config)
        return [*pairs.left, *pairs.right]

    def picture_data(self, config: EvaluationConfig) -> RatedPairs:
        """Return the pairs that are scored."""
        return read_scored_pairs(self._file(config)).first(config.limit)

    def _file(self, config: EvaluationConfig) -> Path:
        if config.split == "validation" and not self.has_validation:
            raise DataError(f"{self.files[0]}: there is no {self.title}.dev.tsv next to it to validate on")
        return self.scored_file(config)


_THRESHOLDS = 100
_COLUMNS = {"input1_column_name": "sentence1", "input2_column_name": "sentence2", "label_column_name": "labels"}


@dataclass(frozen=True, kw_only=True)
class PairClassification(Task):
    """Average precision of ranking pairs by similarity, as MTEB computes it.

    ``max_ap`` is the best over cosine, dot product, Euclidean and Manhattan distance of the vectors as they
    were pooled. ``accuracy`` is that of LBW's Table 2, as its released code computes it: the cosine at or above a
    threshold means "the same", and of a hundred thresholds between 0 and 1 the best is taken. The file is
    ``pairs/NAME.jsonl``. ``config.limit`` takes the first pairs of the file.
    """

    kind: ClassVar[str] = "pair-classification"
    data_folder: ClassVar[str] = "pairs"
    side: ClassVar[Side] = "representation"
    requires: ClassVar[type] = Encodes

    @classmethod
    def find(cls, folder: Path) -> list[Task]:
        """Return a task for every ``pairs/NAME.jsonl``."""
        return cls.of_named_files(folder)

    def run(self, system: Encoder, config: EvaluationConfig) -> Score:
        """Measure."""
        pairs = self.picture_data(config)
        if len(set(pairs.ratings)) < 2:
            raise DataError(f"{self.files[0]}: all pairs have label {pairs.ratings[0]:g}; both 0 and 1 are needed")
        labels = [int(rating) for rating in pairs.ratings]
        columns = {"sentence1": pairs.left, "sentence2": pairs.right, "labels": labels}
        local = LocalTask(
            self.name, "AbsTaskPairClassification", "PairClassification", "max_ap", {"test": columns}, _COLUMNS
        )
        scores = run_local(local, system, config, self.prompt(config))
        known = score_of(scores, "max_ap", ("cosine_ap",), size=len(labels))
        left_ND, right_ND = (
            unit(system.encode(side, prompt=self.prompt(config), show=config.show_progress))
            for side in (pairs.left, pairs.right)
        )
        best = best_accuracy((left_ND * right_ND).sum(axis=1), np.array(labels))
        return replace(known, metrics={**known.metrics, "accuracy": best})

    def texts(self, config: EvaluationConfig) -> list[str]:
        """Return both sides of every pair."""
        pairs = self.picture_data(config)
        return [*pairs.left, *pairs.right]

    def picture_data(self, config: EvaluationConfig) -> RatedPairs:
        """Return the pairs that are scored."""
        return read_labelled_pairs(self.files[0]).first(config.limit)


def best_accuracy(cosine_N: np.ndarray, labels_N: np.ndarray) -> float:
    """Return the accuracy at the best of a hundred thresholds from 0 to 1.

    >>> best_accuracy(np.array([0.9, 0.2, 0.4]), np.array([1, 0, 1]))
    1.0
    """
    predicted_TN = cosine_N >= np.linspace(0, 1, _THRESHOLDS)[:, None]
    return float((predicted_TN == labels_N).mean(axis=1).max())
