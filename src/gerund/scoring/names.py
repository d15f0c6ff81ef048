"""Names of scorers of continuations, and whether what is named can be one.

Knows: names, folders, hub ids. Does not know: torch, so that a slip in a name is said at once; how a scorer scores.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from gerund.checks import check_unicode, one_of, place, some_texts, whole_number
from gerund.errors import ConfigError, TextError, unknown_name
from gerund.models.sources import Source, find
from gerund.settings.encoder import DEFAULT_MODEL
from gerund.types import Scorer

DEFAULT = "pmi"
OWN = "own"
# Shared words: these need no model.
WORD_MEASURE_NAMES = ("overlap", "content_overlap")
MEASURE_NAMES = ("avg_cll", "cll", "avg_ull", "pmi", "self_certainty", *WORD_MEASURE_NAMES, "random")


def check_scorer(scorer: str | Scorer | None) -> None:
    """Find a mistake in the name of a scorer before the model is loaded that it is to judge.

    Raises:
        ConfigError: there is no such name.
        ModelError: the folder is not there, or holds no model.
    """
    if isinstance(scorer, str) and scorer not in (OWN, *MEASURE_NAMES):
        place_of(scorer)


def place_of(where: str | Path, others: Sequence[str] = (*MEASURE_NAMES, OWN)) -> Source:
    """Return where a scorer comes from that is none of the measures.

    Args:
        where: its folder or hub id, or ``default``.
        others: names that would have done too, for the message.

    Raises:
        ConfigError: it is neither a folder nor a hub id.
        ModelError: the folder is not there, or holds no model.
    """
    if not place("scorer", where).expanduser().is_dir() and "/" not in str(where) and str(where) != DEFAULT_MODEL:
        valid = [*others, DEFAULT_MODEL, "the folder or hub id of one"]
        raise unknown_name("scorer", str(where), valid)
    return find(where)


RelevanceMeasure = Literal["vectors", "own", "likelihood"]
RELEVANCE_MEASURES: tuple[RelevanceMeasure, ...] = get_args(RelevanceMeasure)
DEFAULT_MEASURE: RelevanceMeasure = "vectors"


def check_relevance(query: Any, documents: Any, top_k: int | None, by: str | None) -> tuple[str, list[str]]:
    """Return query and documents after checking all that is asked.

    Raises:
        TextError: a text is none, blank or not valid Unicode.
        ConfigError: there is no such measure, or ``top_k`` is no positive whole number.
    """
    if by is not None:
        one_of("measure of relevance", by, RELEVANCE_MEASURES)
    if top_k is not None and whole_number("top_k", top_k) < 1:
        raise ConfigError(f"top_k={top_k} leaves no document")
    if not isinstance(query, str):
        raise TextError(f"the query is not a string but {type(query).__name__}")
    check_unicode("the query", query)
    if not query.strip():
        raise TextError("the query is empty")
    return query, some_texts("document", "documents", documents)
