"""Filling one text or several.

Knows: lists of texts. Does not know: how a gap is filled.
"""

from collections.abc import Callable, Sequence
from typing import Any

from gerund.checks import is_listing
from gerund.errors import TextError
from gerund.types import Infill


def each(fill: Callable[[str], Infill], texts: str | Sequence[str]) -> Any:
    """Return what ``fill`` gives for a text, or a list of it for several; an error says which of them it is about.

    Raises:
        TextError: as ``fill``.
    """
    if not is_listing(texts) or isinstance(texts, str):
        return fill(texts)  # type: ignore[arg-type]
    found = []
    for index, text in enumerate(texts):
        try:
            found.append(fill(text))
        except TextError as error:
            raise TextError.about("text", index, f"cannot be filled: {error}") from error
    return found
