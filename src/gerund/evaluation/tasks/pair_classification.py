"""Pair classification: do similarities separate the pairs that mean the same from those that do not?

Knows: files of pairs, which of MTEB's evaluators scores them. Does not know: models.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np

from gerund.errors import DataError
from gerund.evaluation.mteb import LocalTask, run_local, score_of
from gerund.evaluation.sets.labelled import first_pairs, named_files, read_labelled_pairs
from gerund.evaluation.systems.base import Encoder, Encodes
from gerund.evaluation.task import EvaluationConfig, RatedPairs, Score, Side, Task
from gerund.models.vectors import unit

FOLDER = "pairs"
_THRESHOLDS = 100
_COLUMNS = {"input1_column_name": "sentence1", "input2_column_name": "sentence2", "label_column_name": "labels"}


@dataclass(frozen=True, kw_only=True)
class PairClassification(Task):
    """Average precision of ranking pairs by similarity, as MTEB computes it.

    ``max_ap`` is the best over cosine, dot product, Euclidean and Manhattan distance of the vectors as they
    were pooled. ``accuracy`` is that of LBW's Table 2, as its released code computes it: the cosine at or above a
    threshold means "the same", and of a hundred thresholds between 0 and 1 the best is taken. The file is
    ``pairs/NAME.jsonl``. ``config.limit`` is at most so many pairs, the first of the file.
    """

    kind: ClassVar[str] = "pair-classification"
    data_folder: ClassVar[str] = FOLDER
    side: ClassVar[Side] = "representation"
    requires: ClassVar[type] = Encodes

    def run(self, system: Encoder, config: EvaluationConfig) -> Score:
        """Measure.

        Raises:
            DataError: a malformed file, or pairs of one kind only.
        """
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
        return first_pairs(read_labelled_pairs(self.files[0]), config.limit)


def best_accuracy(cosine_N: np.ndarray, labels_N: np.ndarray) -> float:
    """Return the fraction of pairs told rightly at the best of a hundred thresholds from 0 to 1.

    >>> best_accuracy(np.array([0.9, 0.2, 0.4]), np.array([1, 0, 1]))
    1.0
    """
    told_TN = cosine_N >= np.linspace(0, 1, _THRESHOLDS)[:, None]
    return float((told_TN == labels_N).mean(axis=1).max())


def find(folder: Path) -> list[Task]:
    """Return a task for every ``pairs/NAME.jsonl``."""
    files = named_files(folder / FOLDER)
    return [PairClassification(name=f"{PairClassification.kind}/{name}", files=(path,)) for name, path in files.items()]
