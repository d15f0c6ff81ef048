"""Open an index for a command, and show what a search found.

Knows: terminals. Does not know: how anything is found.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gerund.cli.text_io import tell

if TYPE_CHECKING:
    from rich.text import Text

    from gerund.retrieval.index import Index
    from gerund.retrieval.store import IndexMetadata
    from gerund.settings.model_spec import ModelSpec

# A writer that is still at it can't be told from one that is gone.
COMPLETED = "an earlier gerund index was ended before its last step, or is still running; all words are indexed now"
_SNIPPET = 300


def open_existing(where: str, spec: "ModelSpec", answer_with: str | None = None) -> "Index":
    """Open an index that is there, with the model that is named or else its own, and another to answer with."""
    from gerund.retrieval.index import demand_index, open_index

    about = demand_index(where)
    assert about is not None
    encoder = spec if "model" in spec.model_fields_set else own_model(about, where, spec)
    index = open_index(where, encoder, answer_with=answer_with)
    if index.store.finish():
        tell(f"{where}: {COMPLETED}")
    return index


def own_model(about: "IndexMetadata", where: str, spec: "ModelSpec") -> "ModelSpec | None":
    """Return the model that an index names, with what the options say laid over it; None where they say nothing."""
    # An index says which runtime made its vectors, which `auto` does not take back.
    settings = {name: value for name in spec.model_fields_set if (value := getattr(spec, name)) != "auto"}
    return about.model_spec(where).model_copy(update=settings) if settings else None


def highlighted(text: str, query: str, language: str = "en") -> "Text":
    """Return the part of a text that has most of a query's words, on one line, with these words in bold."""
    from rich.text import Text

    from gerund.normalization import joined_lines
    from gerund.text_analysis import Analyzer

    line = " ".join(joined_lines(text).split())
    matches = Analyzer(language).matches(line, query)
    begin = _best_begin(line, matches)
    shown = line[begin : begin + _SNIPPET]
    result = Text(("... " if begin else "") + shown + (" ..." if begin + _SNIPPET < len(line) else ""))
    lead = 4 if begin else 0
    for start, end in matches:
        if start >= begin and end <= begin + _SNIPPET:
            result.stylize("bold", start - begin + lead, end - begin + lead)
    return result


def _best_begin(line: str, spans: Sequence[tuple[int, int]]) -> int:
    """Return where the stretch begins that has most of what was found; the beginning where that is as good."""
    if len(line) <= _SNIPPET or not spans:
        return 0
    starts = [0, *(max(0, line.rfind(" ", 0, max(0, start - 40)) + 1) for start, _ in spans)]
    return max(
        starts, key=lambda begin: (sum(begin <= start and end <= begin + _SNIPPET for start, end in spans), -begin)
    )
