"""From a name to a scorer.

Knows: which scorers there are. Does not know: how they score.
"""

from pathlib import Path

from gerund.checks import place
from gerund.config import DEFAULT_MODEL
from gerund.errors import ConfigError, unknown_name
from gerund.models import loading
from gerund.scoring.dual import DualScorer, has_scorer
from gerund.scoring.likelihood import MEASURES, LikelihoodScorer
from gerund.scoring.t5 import T5Scorer
from gerund.scoring.words import OverlapScorer
from gerund.text_encoder import TextEncoder
from gerund.types import Scorer

DEFAULT = "pmi"
OWN = "own"


def find_scorer(
    scorer: str | Path | Scorer | None, lm: TextEncoder, *, own: Scorer | None = None, seed: int = 0
) -> Scorer:
    """Return the scorer of this name, or what is one already.

    Args:
        scorer: a name of ``MEASURES``; ``own``; the folder or hub id of a scorer, or ``default``, that of the embedded
            default; an object with a ``score`` method; or None for the model's own scorer, or ``pmi``, the best measure
            of likelihood in RankGen's Table 15.
        own: the scorer that the model was trained to be.
        lm: the model whose likelihoods a measure reads.
        seed: of the random measure.

    Raises:
        ConfigError: there is no such name, the object has no ``score``, or the model no scorer of its own.
        ModelError: the folder holds no scorer.
    """
    if scorer is None:
        scorer = own or DEFAULT
    if isinstance(scorer, str) and scorer == OWN:
        if own is None:
            raise ConfigError(f"{lm.name} was not trained to score continuations under this reading; name a scorer")
        return own
    if isinstance(scorer, str) and scorer in MEASURES:
        return LikelihoodScorer(lm, scorer, seed=seed)
    if isinstance(scorer, str | Path):
        return load_scorer(scorer)
    if not callable(getattr(scorer, "score", None)):
        raise ConfigError(f"a scorer is a name or an object with a method score, not {scorer!r}")
    return scorer


def check_scorer(scorer: str | Scorer | None) -> None:
    """Find a mistake in the name of a scorer before the model is loaded that it is to judge.

    Raises:
        ConfigError: there is no such name.
        ModelError: the folder is not there, or holds no model.
    """
    if isinstance(scorer, str) and scorer != OWN and scorer not in MEASURES:
        _place_of(scorer)


def load_scorer(where: str | Path) -> Scorer:
    """Return the scorer of a folder or hub id; ``default`` is that of the bundled model.

    Raises:
        ConfigError: it is neither.
        ModelError: there is no scorer.
    """
    folder = loading.settings_folder(_place_of(where))
    return DualScorer.load(where) if folder is not None and has_scorer(folder) else T5Scorer.load(where)


def _place_of(where: str | Path) -> loading.Source:
    """Return where a scorer comes from that is none of the measures."""
    if not place("scorer", where).expanduser().is_dir() and "/" not in str(where) and str(where) != DEFAULT_MODEL:
        valid = [*MEASURES, OWN, DEFAULT_MODEL, "the folder or hub id of one"]
        raise unknown_name("scorer", str(where), valid)
    return loading.find(where)


def fixed_scorer(name: str) -> Scorer:
    """Return a scorer that is the same whoever is measured: ``overlap``, or that of a folder or hub id.

    Raises:
        ConfigError: it would read the likelihoods of the model that is measured.
        ModelError: the folder holds no scorer.
    """
    if name == OverlapScorer.name:
        return OverlapScorer()
    if name in MEASURES:
        raise ConfigError(f"{name} differs from model to model; take overlap, or a scorer's folder or hub id")
    return load_scorer(name)


def plan_for(model: str | Path | None, scorer: str | None) -> str | None:
    """Return the plan to load a model with that only writes and scores: causal, which every architecture has.

    None, the model's own plan, where its own scorer is asked for, which was trained for that, and for a model with an
    encoder of its own, which has no other.
    """
    asked = scorer in (None, OWN) and model is not None and has_scorer(Path(model).expanduser())
    return None if asked or loading.is_seq2seq(loading.find(model)) else "causal"
