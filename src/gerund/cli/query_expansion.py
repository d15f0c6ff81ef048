"""``gerund generate --expand``: other ways to ask a query.

Knows: its options. Does not know: how a query is expanded.
"""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from gerund.cli import text_io
from gerund.errors import ConfigError, TextError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gerund.data.tables import Rows
    from gerund.language_model import LanguageModel
    from gerund.settings.sampling import Sampling

Expand = Annotated[
    int | None,
    typer.Option(
        help="Take the prompt as a query and write up to this many variants, with some of its words replaced."
    ),
]
Keep = Annotated[list[str] | None, typer.Option(help="With --expand: a word that stays as it is; may be repeated.")]
Fraction = Annotated[
    float | None, typer.Option(help="With --expand: fraction of the words that is written anew. [default: 0.3]")
]


def expansion_of(
    count: int | None, keep: list[str] | None, fraction: float | None, refused: dict[str, Any]
) -> dict[str, Any] | None:
    """Return the settings that the options make together; None without ``--expand``.

    ``refused`` are values of options that can't be combined with it, by name.
    """
    given = {"--keep": keep, "--fraction": fraction}
    if count is None:
        for name, value in given.items():
            if value:
                raise ConfigError(f"{name} belongs to --expand N, such as --expand 5")
        return None
    for name, value in refused.items():
        if value is not None:
            raise ConfigError(f"{name} is of no use with --expand, which fills gaps one query at a time")
    if count < 1:
        raise ConfigError(f"--expand {count} writes nothing")
    return {"count": count, "keep": keep or []} | ({} if fraction is None else {"fraction": fraction})


def check_queries(chunks: "list[Rows]", settings: dict[str, Any]) -> None:
    """Look at all queries at once: what is wrong with the last shows before the first is expanded."""
    from gerund.inference.infill.expansion import validate_expansion
    from gerund.inference.infill.infilling import BLANK

    for rows in chunks:
        for index, query in enumerate(rows.texts):
            try:
                validate_expansion(query, blank=BLANK, **settings)
            except TextError as error:
                raise rows.placed(index, error) from error


def expanded(
    lm: "LanguageModel", chunks: "list[Rows]", sampling: "Sampling", settings: dict[str, Any]
) -> "Iterator[dict[str, Any]]":
    """Yield a record for each query: ``prompt``, and the list ``expansions``."""
    seeds = text_io.SeedsByText(sampling)
    for rows in chunks:
        for index, query in enumerate(rows.texts):
            try:
                found = lm.expand(query, sampling=seeds.of_one(query), **settings)
            except TextError as error:
                raise rows.placed(index, error) from error
            yield {"prompt": query, "expansions": found}
