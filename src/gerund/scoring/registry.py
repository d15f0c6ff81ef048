"""From a name to a scorer.

Knows: which scorers there are. Does not know: how they score, which names are slips.
"""

from pathlib import Path

from gerund.errors import ConfigError
from gerund.models import loading
from gerund.models.sources import find_spec
from gerund.scoring.dual_encoder import DualScorer, has_scorer
from gerund.scoring.likelihood import LikelihoodScorer
from gerund.scoring.names import DEFAULT, MEASURE_NAMES, OWN, WORD_MEASURE_NAMES, place_of
from gerund.scoring.t5 import T5Scorer
from gerund.scoring.word_overlap import OverlapScorer
from gerund.settings.encoder import DEFAULT_MODEL
from gerund.settings.model_spec import ModelSpec
from gerund.text_encoder import TextEncoder
from gerund.types import Scorer


def find_scorer(
    scorer: str | Path | Scorer | None, lm: TextEncoder, *, own: Scorer | None = None, seed: int = 0
) -> Scorer:
    """Return the scorer of this name, or what is one already.

    Args:
        scorer: a name of ``MEASURE_NAMES``; ``own``; the folder or hub id of a scorer, or ``default``, that of the
            bundled model; an object with a ``score`` method; or None for the model's own scorer, or ``pmi``, the best
            measure of likelihood in RankGen's Table 15.
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
            raise ConfigError(
                f"{lm.name} was not trained to score continuations under this encoder config; name a scorer"
            )
        return own
    if isinstance(scorer, str) and scorer in MEASURE_NAMES:
        return LikelihoodScorer(lm, scorer, seed=seed)
    if isinstance(scorer, str | Path):
        return load_scorer(scorer)
    if not callable(getattr(scorer, "score", None)):
        raise ConfigError(f"a scorer is a name or an object with a method score, not {scorer!r}")
    return scorer


def load_scorer(where: str | Path) -> Scorer:
    """Return the scorer of a folder or hub id; ``default`` is that of the bundled model.

    Raises:
        ConfigError: it is neither.
        ModelError: there is no scorer.
    """
    folder = loading.settings_folder(place_of(where))
    return DualScorer.load(where) if folder is not None and has_scorer(folder) else T5Scorer.load(where)


def fixed_scorer(name: str) -> Scorer:
    """Return a scorer that is the same whoever is measured: a measure of shared words, or that of a folder or hub id.

    Raises:
        ConfigError: it would read the likelihoods of the model that is measured.
        ModelError: the folder holds no scorer.
    """
    if name in WORD_MEASURE_NAMES:
        return OverlapScorer(name)
    if name in MEASURE_NAMES:
        words = " or ".join(WORD_MEASURE_NAMES)
        raise ConfigError(f"{name} differs from model to model; take {words}, or a scorer's folder or hub id")
    place_of(name, WORD_MEASURE_NAMES)
    return load_scorer(name)


def for_scoring(spec: ModelSpec, scorer: str | None) -> ModelSpec:
    """Return a spec for a model that only writes and scores: its plan is causal, which every architecture has.

    The spec stays as it is where the model's own scorer is asked for, which was trained for the model's own plan, and
    for a T5, whose encoder has no other.
    """
    source = find_spec(spec)
    has_own = spec.model != DEFAULT_MODEL and source.folder is not None and has_scorer(source.folder)
    own = has_own and scorer in (None, OWN)
    return spec if own or loading.is_seq2seq(source) else ModelSpec.of(spec, attention="causal")
