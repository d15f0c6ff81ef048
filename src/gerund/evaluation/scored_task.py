"""Tasks that ask a scorer of continuations: which one that is, and where it ranks the right candidate.

Knows: scorers by name, ranks. Does not know: what is scored.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from gerund.evaluation.task import FileTask
from gerund.scoring.names import MODEL_NAMES

DEPTHS = (1, 3, 5, 10, 50)
"""How many of the first candidates a recall is about."""


@dataclass(frozen=True, kw_only=True)
class ScoredTask(FileTask):
    """A task whose option ``scorer`` names the scorer."""

    scorer: str = field(
        default="",
        metadata={
            "help": "Scores continuations: pmi, overlap, ..., a scorer's folder or hub id; left out, the model's own."
        },
    )

    @property
    def reads_scorer(self) -> bool:
        """Whether no other scorer was named."""
        return self.scorer in ("", *MODEL_NAMES)

    @property
    def also_read(self) -> tuple[Path, ...]:
        """The files of the scorer."""
        return files_of(self.scorer)


def files_of(name: str) -> tuple[Path, ...]:
    """Return the files of a scorer's or model's folder; none for a name."""
    folder = Path(name).expanduser()
    return tuple(sorted(path for path in folder.iterdir() if path.is_file())) if name and folder.is_dir() else ()


def rank_of(scores: np.ndarray, right: int) -> int:
    """Return the place of the right candidate, from 1 on; others that score the same stand before it.

    >>> rank_of(np.array([0.5, 0.9, 0.5]), 0)
    3
    """
    return int(np.count_nonzero(scores >= scores[right]))


def recalls(ranks: Sequence[int]) -> dict[str, float]:
    """Return the fraction of queries whose right candidate is among the first, and the mean of one over its place.

    >>> recalls([1, 4])["recall_at_3"], recalls([1, 4])["mrr"]
    (0.5, 0.625)
    """
    found = np.array(ranks, dtype=np.float64)
    return {
        **{f"recall_at_{depth}": float(np.mean(found <= depth)) for depth in DEPTHS},
        "mrr": float(np.mean(1 / found)),
    }
