"""Names of scorers and relevance measures, and checks that need no model: nothing here imports torch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from gerund.checks import check_unicode, one_of, place, some_texts, whole_number
from gerund.errors import ConfigError, TextError, unknown_name
from gerund.models.sources import Source, find
from gerund.settings.encoder import DEFAULT_MODEL
from gerund.types import Scorer

DEFAULT = "pmi"
MODEL = "model"
"""The scorer that the model itself was trained to be."""

OWN = "own"
"""The old name of ``model``, which is still accepted."""

MODEL_NAMES = (MODEL, OWN)
# Shared words: these need no model.
WORD_MEASURE_NAMES = ("overlap", "content_overlap")
MEASURE_NAMES = ("avg_cll", "cll", "avg_ull", "pmi", "self_certainty", *WORD_MEASURE_NAMES, "random")

RelevanceMeasure = Literal["vectors", "model", "likelihood", "own"]
RELEVANCE_MEASURES: tuple[RelevanceMeasure, ...] = ("vectors", "model", "likelihood")
DEFAULT_MEASURE: RelevanceMeasure = "vectors"


def check_scorer(scorer: str | Scorer | None) -> None:
    """Find a mistake in a scorer's name before the model is loaded."""
    if isinstance(scorer, str) and scorer not in (*MODEL_NAMES, *MEASURE_NAMES):
        source_of(scorer)


def source_of(scorer: str | Path, other_names: Sequence[str] = (*MEASURE_NAMES, MODEL)) -> Source:
    """Return where a scorer is loaded from: a folder, a hub id or ``default``; ``other_names`` are for the message."""
    if not place("scorer", scorer).expanduser().is_dir() and "/" not in str(scorer) and str(scorer) != DEFAULT_MODEL:
        raise unknown_name("scorer", str(scorer), [*other_names, DEFAULT_MODEL, "the folder or hub id of one"])
    return find(scorer)


def check_measure(by: str | None) -> None:
    """Refuse an unknown measure of relevance; None is the default."""
    if by not in (None, OWN):
        one_of("measure of relevance", by, RELEVANCE_MEASURES)


def check_relevance(query: Any, documents: Any, top_k: int | None, by: str | None) -> tuple[str, list[str]]:
    """Return query and documents after checking everything that is passed to ``rerank``."""
    check_measure(by)
    if top_k is not None and whole_number("top_k", top_k) < 1:
        raise ConfigError(f"`top_k` must be at least 1, got {top_k}")
    if not isinstance(query, str):
        raise TextError(f"the query is not a string but {type(query).__name__}")
    check_unicode("the query", query)
    if not query.strip():
        raise TextError("the query is empty")
    return query, some_texts("document", "documents", documents)
