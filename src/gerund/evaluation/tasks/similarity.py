"""Similarity tasks: semantic textual similarity (STS) and pair classification, scored by MTEB."""

from abc import abstractmethod
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import numpy as np

from gerund.errors import DataError
from gerund.evaluation.data_files import RatedPairs, read_labelled_pairs, read_scored_pairs, split_files
from gerund.evaluation.mteb import LocalTask, run_local, score_of
from gerund.evaluation.systems.base import Encoder, Encodes
from gerund.evaluation.task import EvaluationConfig, Examples, FileTask, Score, Side
from gerund.models.vectors import unit


@dataclass(frozen=True, kw_only=True)
class PairTask(FileTask):
    """A task on pairs of texts with a rating each. ``config.limit`` takes the first pairs of the file."""

    side: ClassVar[Side] = "representation"
    requires: ClassVar[type] = Encodes

    @abstractmethod
    def picture_data(self, config: EvaluationConfig) -> RatedPairs:
        """Return the pairs that are scored."""

    def texts(self, config: EvaluationConfig) -> list[str]:
        """Return both sides of every pair."""
        pairs = self.picture_data(config)
        return [*pairs.left, *pairs.right]

    def directions(self, system: Encoder, pairs: RatedPairs, config: EvaluationConfig) -> list[np.ndarray]:
        """Return the vectors of both sides, of length 1; they are cached by now."""
        sides = (pairs.left, pairs.right)
        return [unit(system.encode(side, prompt=self.prompt(config), show=config.show_progress)) for side in sides]


@dataclass(frozen=True, kw_only=True)
class Sts(PairTask):
    """Spearman correlation of cosines with ratings, as MTEB's STS tasks compute it (SentEval's protocol).

    The files are ``sts/NAME.test.tsv`` and, for validation, ``NAME.dev.tsv``: score, sentence, sentence.
    """

    kind: ClassVar[str] = "sts"
    data_folder: ClassVar[str] = "sts"
    layout = partial(split_files, endings=(".tsv", ".tsv.xz", ".tsv.gz"), splits=("test", "dev"))

    def run(self, system: Encoder, config: EvaluationConfig) -> Score:
        """Measure."""
        pairs = self.picture_data(config)
        if len(pairs.ratings) < 2:
            raise DataError(f"{self.scored_file(config)}: a correlation needs two pairs or more")
        columns = {"sentence1": pairs.left, "sentence2": pairs.right, "score": pairs.ratings}
        local = LocalTask(self.name, "AbsTaskSTS", "STS", "cosine_spearman", {"test": columns})
        scores = run_local(local, system, config, self.prompt(config))
        left_ND, right_ND = self.directions(system, pairs, config)
        cosines = tuple(np.round((left_ND * right_ND).sum(axis=1, dtype=np.float64), 6).tolist())
        numbers = tuple(map(str, range(len(cosines))))
        examples = Examples("spearman", numbers, cosines, tuple(map(float, pairs.ratings)))
        return score_of(scores, local.main, ("cosine_pearson",), size=len(cosines), examples=examples)

    def picture_data(self, config: EvaluationConfig) -> RatedPairs:
        """Return the pairs that are scored."""
        if config.split == "validation" and not self.has_validation:
            raise DataError(f"{self.files[0]}: there is no {self.title}.dev.tsv next to it to validate on")
        return read_scored_pairs(self.scored_file(config)).first(config.limit)


_THRESHOLDS = 100
_COLUMNS = {"input1_column_name": "sentence1", "input2_column_name": "sentence2", "label_column_name": "labels"}


@dataclass(frozen=True, kw_only=True)
class PairClassification(PairTask):
    """Average precision of ranking pairs by similarity, as MTEB computes it.

    ``max_ap`` is the best over cosine, dot product, Euclidean and Manhattan distance of the vectors as they
    were pooled. ``accuracy`` is that of LBW's Table 2, as its released code computes it: the cosine at or above a
    threshold means "the same", and of a hundred thresholds between 0 and 1 the best is taken. The file is
    ``pairs/NAME.jsonl``.
    """

    kind: ClassVar[str] = "pair-classification"
    data_folder: ClassVar[str] = "pairs"

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
        known = score_of(scores, local.main, ("cosine_ap",), size=len(labels))
        left_ND, right_ND = self.directions(system, pairs, config)
        best = best_accuracy((left_ND * right_ND).sum(axis=1), np.array(labels))
        return replace(known, metrics={**known.metrics, "accuracy": best})

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
