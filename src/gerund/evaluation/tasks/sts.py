"""Semantic textual similarity: do cosines order pairs of sentences as people do?

Knows: files of rated pairs, which of MTEB's evaluators scores them. Does not know: models.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from gerund.errors import DataError
from gerund.evaluation.mteb import LocalTask, run_local, score_of
from gerund.evaluation.sets.labelled import first_pairs, named_files, read_scored_pairs
from gerund.evaluation.systems.base import Encoder, Encodes
from gerund.evaluation.task import EvaluationConfig, Examples, FileTask, RatedPairs, Score, Side, Task
from gerund.models.vectors import unit

FOLDER = "sts"
_ENDINGS = (".tsv", ".tsv.xz", ".tsv.gz")


@dataclass(frozen=True, kw_only=True)
class Sts(FileTask):
    """Spearman correlation of cosines with ratings, as MTEB's STS tasks compute it (SentEval's protocol).

    The files are ``sts/NAME.test.tsv`` and, for validation, ``NAME.dev.tsv``: score, sentence, sentence.
    ``config.limit`` is at most so many pairs, the first of the file.

    Attributes:
        files: the test set, then the validation set where there is one.
    """

    kind: ClassVar[str] = "sts"
    data_folder: ClassVar[str] = FOLDER
    side: ClassVar[Side] = "representation"
    requires: ClassVar[type] = Encodes

    def run(self, system: Encoder, config: EvaluationConfig) -> Score:
        """Measure.

        Raises:
            DataError: a malformed file, or fewer than two pairs.
        """
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
        """Return the cosine of each pair beside its rating, from vectors that are kept by now."""
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
        return first_pairs(read_scored_pairs(self._file(config)), config.limit)

    def _file(self, config: EvaluationConfig) -> Path:
        if config.split == "validation" and not self.has_validation:
            raise DataError(f"{self.files[0]}: there is no {self.title}.dev.tsv beside it to validate on")
        return self.scored_file(config)


def find(folder: Path) -> list[Task]:
    """Return a task for every ``sts/NAME.test.tsv``."""
    files = named_files(folder / FOLDER, _ENDINGS)
    names = [name.removesuffix(".test") for name in files if name.endswith(".test")]
    splits = {
        name: [files[f"{name}.{split}"] for split in ("test", "dev") if f"{name}.{split}" in files] for name in names
    }
    return [Sts(name=f"sts/{name}", files=tuple(splits[name])) for name in sorted(names)]
