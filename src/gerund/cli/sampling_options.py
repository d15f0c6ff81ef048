"""Options that say how tokens are chosen, for the commands that write text."""

from collections import Counter
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gerund.config import Sampling

# From the seed of a text to that of the same text further down.
_NEXT_SEED = 1_000_000_007

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
Seed = Annotated[int | None, typer.Option(help="Makes sampling repeatable.")]


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
        raise ConfigError("--seed is for sampling and greedy decoding samples nothing; give --temperature, such as 0.8")
    return Sampling(temperature=temperature, top_k=top_k, top_p=top_p, typical_p=typical_p, seed=seed)


class SeedsByText:
    """A seed for each text of a file, made of ``--seed`` and how often that text came before.

    So a text's result does not depend on the other lines of the file, and equal lines get results of their own. The
    first one has the seed that the text would have by itself.

    >>> from gerund.config import Sampling
    >>> seeds = SeedsByText(Sampling(temperature=1.0, seed=7))
    >>> seeds.of(["a", "b", "a"]).seed
    (7, 7, 1000000014)
    """

    def __init__(self, sampling: "Sampling") -> None:
        self._sampling = sampling
        self._seen: Counter[str] = Counter()

    def of(self, texts: "Sequence[str]") -> "Sampling":
        """Return the settings for the next texts of the file, with a seed for each of them."""
        from dataclasses import replace

        seeds = [self._next(text) for text in texts]
        return self._sampling if self._sampling.seed is None else replace(self._sampling, seed=seeds)

    def of_one(self, text: str) -> "Sampling":
        """Return the settings for the next text of the file."""
        from dataclasses import replace

        seed = self._next(text)
        return self._sampling if self._sampling.seed is None else replace(self._sampling, seed=seed)

    def _next(self, text: str) -> int:
        seed = self._sampling.seed
        before = self._seen[text]
        self._seen[text] += 1
        return (seed if isinstance(seed, int) else 0) + before * _NEXT_SEED
