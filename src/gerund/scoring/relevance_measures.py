"""By what relevance is measured, and whether what is to be ranked can be.

Knows: names, texts. Does not know: models.
"""

from typing import Any, Literal, get_args

from gerund.checks import check_unicode, one_of, some_texts, whole_number
from gerund.errors import ConfigError, TextError

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
