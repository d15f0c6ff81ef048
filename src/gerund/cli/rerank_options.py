"""Options that say how continuations are ranked while they are written."""

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from gerund.config import Rerank

Scorer = Annotated[
    str | None,
    typer.Option(
        "--rerank",
        help="Write several continuations and keep the best by this scorer: pmi, avg_cll, cll, avg_ull, "
        "self_certainty, overlap, random, own (the model's), default (the embedded default's), or a scorer's folder or "
        "hub id.",
        show_default=False,
    ),
]
Samples = Annotated[
    int | None,
    typer.Option(help="With --rerank: so many continuations of each beam. [default: 20]", show_default=False),
]
Beams = Annotated[
    int | None, typer.Option(help="With --rerank: keep so many each time. [default: 1]", show_default=False)
]
Every = Annotated[
    int | None,
    typer.Option(help="With --rerank: rank after every so many tokens; left out, only at the end.", show_default=False),
]


def rerank_of(scorer: str | None, samples: int | None, beams: int | None, every: int | None) -> "Rerank | None":
    """Return the settings that the options make together; None where nothing is ranked.

    Raises:
        ConfigError: an option is impossible, or of no use without ``--rerank``.
    """
    from gerund.config import Rerank
    from gerund.errors import ConfigError

    given = {"samples": samples, "beams": beams, "every": every}
    numbers = {name: value for name, value in given.items() if value is not None}
    if scorer is None:
        if numbers:
            raise ConfigError(f"--{next(iter(numbers))} belongs to --rerank SCORER, such as --rerank pmi")
        return None
    return Rerank(**numbers, scorer=scorer)
