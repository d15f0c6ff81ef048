"""Names of scorers and relevance measures, and checks that need no model: nothing here imports torch."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from gerund.checks import check_unicode, demand_number, is_listing, place, some_texts, whole_number
from gerund.errors import ConfigError, TextError, unknown_name
from gerund.models.sources import Source, find
from gerund.settings.encoder import DEFAULT_MODEL
from gerund.settings.ranking import OWN, check_measure
from gerund.types import Scorer

DEFAULT = "pmi"
MODEL: Literal["model"] = "model"
"""The scorer that the model itself was trained to be."""

MODEL_NAMES = (MODEL, OWN)
# Shared words: these need no model.
WORD_MEASURE_NAMES = ("overlap", "content_overlap")
MEASURE_NAMES = ("avg_cll", "cll", "avg_ull", "pmi", "self_certainty", *WORD_MEASURE_NAMES, "random")
CONSENSUS = "consensus"
"""How much a text agrees with the others, by the model's own vectors."""

MIXED = "mixed"
"""PMI and the model's trained scorer together."""

SCORER_NAMES = (*MEASURE_NAMES, CONSENSUS, MIXED)


def check_scorer(scorer: str | Scorer | None) -> None:
    """Find a mistake in a scorer's name before the model is loaded."""
    if isinstance(scorer, str) and scorer not in (*MODEL_NAMES, *SCORER_NAMES):
        source_of(scorer)


def source_of(scorer: str | Path, other_names: Sequence[str] = (*SCORER_NAMES, MODEL)) -> Source:
    """Return where a scorer is loaded from: a folder, a hub id or ``default``; ``other_names`` are for the message."""
    if not place("scorer", scorer).expanduser().is_dir() and "/" not in str(scorer) and str(scorer) != DEFAULT_MODEL:
        raise unknown_name("scorer", str(scorer), [*other_names, DEFAULT_MODEL, "the folder or hub id of one"])
    return find(scorer)


def check_first_stage(
    scores: Any, count: int, weight: float | None, depth: int | None, deadline: float | None
) -> list[float] | None:
    """Return the scores of a first stage, after checking them and what is said beside them."""
    for name, value in (("weight", weight), ("deadline", deadline)):
        if value is not None:
            demand_number(name, value)
    if weight is not None and not 0 <= weight <= 1:
        raise ConfigError(f"weight must be from 0 (the first stage alone) to 1 (the measure alone), got {weight}")
    if deadline is not None and not deadline > 0:
        raise ConfigError(f"deadline must be above 0 seconds, got {deadline}")
    if depth is not None and whole_number("depth", depth) < 1:
        raise ConfigError(f"depth must be at least 1, got {depth}")
    if scores is None:
        named = next((name for name, value in (("weight", weight), ("depth", depth)) if value is not None), None)
        if named is not None:
            raise ConfigError(f"`{named}` is about the scores of a first stage: pass `scores`, one per document")
        return None
    return _numbers(scores, count)


def _numbers(scores: Any, count: int) -> list[float]:
    """Return scores, one for each of so many documents, as a list."""
    listed = scores.tolist() if hasattr(scores, "tolist") else scores
    if not is_listing(listed) or len(listed) != count:
        raise ConfigError(f"`scores` must be a list with one number per document, {count}")
    for index, score in enumerate(listed):
        demand_number(f"score {index}", score)
        if not math.isfinite(score):
            raise ConfigError(f"score {index} is {score}, which is no score")
    return [float(score) for score in listed]


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
