"""Options that say how tokens are drawn, for the commands that write text."""

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from gerund.config import Sampling

Temperature = Annotated[
    float | None,
    typer.Option(
        help="0 always takes the likeliest token; 1 samples from the model as it is. [default: 0, or 1 "
        "where one of the next three options is given]",
        show_default=False,
    ),
]
TopP = Annotated[float | None, typer.Option(help="Only the likeliest tokens of together this probability.")]
TopK = Annotated[int | None, typer.Option(help="Only so many of the likeliest tokens.")]
TypicalP = Annotated[
    float | None, typer.Option(help="Only tokens of about average surprise of together this probability.")
]
Seed = Annotated[int | None, typer.Option(help="Makes the draw repeatable.")]


def sampling_of(
    temperature: float | None, top_p: float | None, top_k: int | None, typical_p: float | None, seed: int | None
) -> "Sampling":
    """Return the settings that the options make together.

    Raises:
        ConfigError: an option is impossible, or of no use beside the others.
    """
    from gerund.config import Sampling
    from gerund.errors import ConfigError

    filters = {"--top-p": top_p, "--top-k": top_k, "--typical-p": typical_p}
    given = [name for name, value in filters.items() if value is not None]
    if temperature is None:
        temperature = 1.0 if given else 0.0
    elif temperature == 0 and given:
        raise ConfigError(f"{given[0]} chooses among sampled tokens, and --temperature 0 samples none")
    if seed is not None and temperature == 0:
        raise ConfigError("--seed decides draws and greedy decoding makes none; give --temperature, such as 0.8")
    return Sampling(temperature=temperature, top_k=top_k, top_p=top_p, typical_p=typical_p, seed=seed)


def seed_of_lot(sampling: "Sampling", number: int) -> "Sampling":
    """Return the settings for the lot ``number`` of a file, which draws anew.

    With one seed for all, the same text would get the same continuation in every lot.
    """
    from dataclasses import replace

    return sampling if sampling.seed is None else replace(sampling, seed=sampling.seed + number * 1_000_000_007)
