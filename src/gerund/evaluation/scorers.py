"""Tasks that ask a scorer of continuations, and which one that is.

Knows: a contender's own scorer, scorers by name. Does not know: what is scored.
"""

from dataclasses import dataclass, field
from pathlib import Path

from gerund.evaluation.contender import Contender
from gerund.evaluation.task import FileTask, Settings
from gerund.scoring.registry import OWN, find_scorer
from gerund.types import Scorer


@dataclass(frozen=True, kw_only=True)
class ScoredTask(FileTask):
    """A task whose option ``scorer`` names who scores."""

    scorer: str = field(
        default="",
        metadata={
            "help": "Scores continuations: pmi, overlap, ..., a scorer's folder or hub id; left out, the model's own."
        },
    )

    @property
    def reads_scorer(self) -> bool:
        """Whether no other scorer was named."""
        return self.scorer in ("", OWN)

    @property
    def also_read(self) -> tuple[Path, ...]:
        """The files of the scorer."""
        return files_of(self.scorer)

    def judge(self, contender: Contender, settings: Settings) -> Scorer | None:
        """Return the scorer; None where none was named and the contender has none of its own, as BM25.

        Raises:
            ConfigError: there is no scorer of this name.
            ModelError: the folder holds no scorer.
        """
        if contender.is_bm25 or not self.scorer:
            return contender.scorer
        return find_scorer(self.scorer, contender.lm, own=contender.scorer, seed=settings.seed)


def files_of(name: str) -> tuple[Path, ...]:
    """Return the files of a scorer's or model's folder; none for a name."""
    folder = Path(name).expanduser()
    return tuple(sorted(path for path in folder.iterdir() if path.is_file())) if name and folder.is_dir() else ()
