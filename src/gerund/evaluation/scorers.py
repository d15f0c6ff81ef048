"""Which scorer of continuations an evaluation asks.

Knows: a contender's own scorer, scorers by name. Does not know: what is scored.
"""

from pathlib import Path

from gerund.evaluation.contender import Contender
from gerund.scoring.finding import find_scorer
from gerund.types import Scorer

HELP = "Scores continuations: pmi, overlap, ..., or a scorer's folder or hub id; left out, the model's own scorer."


def chosen_scorer(name: str, contender: Contender, seed: int) -> Scorer | None:
    """Return the scorer of this name, or with an empty name the contender's own, None where it has none.

    Raises:
        ConfigError: there is no such name.
        ModelError: the folder holds no scorer.
    """
    return find_scorer(name, contender.lm, seed=seed) if name else contender.scorer


def files_of(name: str) -> tuple[Path, ...]:
    """Return the files of a scorer's folder; none for a name."""
    folder = Path(name).expanduser()
    return tuple(sorted(path for path in folder.iterdir() if path.is_file())) if name and folder.is_dir() else ()
