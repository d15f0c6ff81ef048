"""Options of the commands that generate: sampling, ranking of continuations, expansion of queries.

Knows: each option's name and help, what they make together. Does not know: models.
"""

from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gerund.data.tables import Rows
    from gerund.inference.generate.config import GenerationKeywords
    from gerund.language_model import LanguageModel
    from gerund.settings.sampling import Rerank, Sampling
    from gerund.types import Generation, TokenLogprob

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
TopP = Annotated[
    float | None,
    typer.Option(help="Nucleus sampling: only the most probable tokens that together have this probability."),
]
TopK = Annotated[int | None, typer.Option(help="Only this many of the most probable tokens.")]
TypicalP = Annotated[
    float | None,
    typer.Option(
        help="Typical sampling: only the tokens nearest to the average surprise that together have this probability."
    ),
]
Seed = Annotated[int | None, typer.Option(help="Makes sampling repeatable.")]


MinP = Annotated[
    float | None, typer.Option(help="Only tokens at least this fraction as probable as the likeliest one.")
]
RepetitionPenalty = Annotated[
    float | None, typer.Option(help="Above 1: what prompt and text have already becomes less probable.")
]
FrequencyPenalty = Annotated[
    float | None, typer.Option(help="Taken off a token's logit for each time that the text has it; -2 to 2.")
]
PresencePenalty = Annotated[
    float | None, typer.Option(help="Taken off a token's logit once where the text has it; -2 to 2.")
]
LogitBias = Annotated[
    list[str] | None,
    typer.Option(help="ID=NUMBER: added to the logit of a token; may be repeated.", show_default=False),
]
Number = Annotated[
    int | None, typer.Option("-n", "--n", help="So many continuations of a prompt. [default: 1]", show_default=False)
]
Stop = Annotated[
    list[str] | None, typer.Option(help="End the text before this string; may be repeated.", show_default=False)
]
Logprobs = Annotated[
    int | None,
    typer.Option(help="With JSON: each token's log-probability, and those of this many alternatives."),
]
Schema = Annotated[
    str | None, typer.Option(help="The text is JSON that this JSON schema allows: JSON, or @FILE.", show_default=False)
]
Regex = Annotated[str | None, typer.Option(help="The text matches this regular expression.", show_default=False)]
Choice = Annotated[
    list[str] | None, typer.Option(help="The text is one of these; may be repeated.", show_default=False)
]


def penalties_of(
    min_p: float | None,
    repetition: float | None,
    frequency: float | None,
    presence: float | None,
    bias: list[str] | None,
) -> dict[str, Any]:
    """Return the further settings of a ``Sampling`` that the options make.

    Raises:
        ConfigError: a bias is not of the form ID=NUMBER.
    """
    from gerund.errors import ConfigError

    given = {
        "min_p": min_p, "repetition_penalty": repetition, "frequency_penalty": frequency, "presence_penalty": presence,
    }  # fmt: skip
    found: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    for text in bias or []:
        token, _, number = text.partition("=")
        try:
            found.setdefault("logit_bias", {})[int(token)] = float(number)
        except ValueError:
            raise ConfigError(f"--logit-bias is ID=NUMBER, such as 42=-100, not {text!r}") from None
    return found


def text_options_of(
    n: int | None,
    stop: list[str] | None,
    logprobs: int | None,
    schema: str | None,
    regex: str | None,
    choice: list[str] | None,
) -> "GenerationKeywords":
    """Return what the options say of the text as a whole.

    Raises:
        DataError: the file of a schema cannot be read.
    """
    from pathlib import Path

    from gerund.checks import read_json

    given = {"n": n, "stop": stop or None, "logprobs": logprobs, "regex": regex, "choice": choice or None}
    found: GenerationKeywords = {name: value for name, value in given.items() if value is not None}  # type: ignore[assignment]
    if schema is not None:
        found["schema"] = read_json(Path(schema[1:])) if schema.startswith("@") else schema
    return found


def sampling_of(
    temperature: float | None,
    top_p: float | None,
    top_k: int | None,
    typical_p: float | None,
    seed: int | None,
    more: dict[str, Any] | None = None,
) -> "Sampling":
    """Return the settings that the options make together; ``more`` are those of ``penalties_of``.

    Raises:
        ConfigError: an option is impossible, or of no use beside the others.
    """
    from gerund.errors import ConfigError
    from gerund.settings.sampling import Sampling

    more = more or {}
    filters = {"--top-p": top_p, "--top-k": top_k, "--typical-p": typical_p, "--min-p": more.get("min_p")}
    given = [name for name, value in filters.items() if value is not None]
    if temperature is None:
        temperature = 1.0 if given else 0.0
    elif temperature == 0 and given:
        raise ConfigError(f"{given[0]} chooses among sampled tokens, and --temperature 0 samples none")
    if seed is not None and temperature == 0:
        raise ConfigError("--seed is for sampling and greedy decoding samples nothing; give --temperature, such as 0.8")
    return Sampling(temperature=temperature, top_k=top_k, top_p=top_p, typical_p=typical_p, seed=seed, **more)


class SeedsByText:
    """A seed for each text of a file, made of ``--seed`` and how often that text came before.

    So a text's result does not depend on the other lines of the file, and equal lines get results of their own. The
    first one has the seed that the text would have by itself.

    >>> from gerund.settings.sampling import Sampling
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


Scorer = Annotated[
    str | None,
    typer.Option(
        "--rerank",
        help="Write several continuations and keep the best by this scorer: pmi, avg_cll, cll, avg_ull, "
        "self_certainty, overlap, content_overlap, random, own (the model's), default (the bundled model's), or a "
        "scorer's folder or hub id.",
        show_default=False,
    ),
]
Samples = Annotated[
    int | None,
    typer.Option(help="With --rerank: continuations of each beam. [default: 20]", show_default=False),
]
Beams = Annotated[int | None, typer.Option(help="With --rerank: beams that are kept. [default: 1]", show_default=False)]
Every = Annotated[
    int | None,
    typer.Option(
        help="With --rerank: tokens between two rankings; left out, rank only at the end.", show_default=False
    ),
]


def as_record(result: "Generation") -> dict[str, Any]:
    """Return a continuation as a JSON object."""
    from gerund.types import Ranked

    record: dict[str, Any] = {"text": result.text, "score": round(result.score, 6), "finished": result.finished}
    if result.stop is not None:
        record["stop"] = result.stop
    if result.logprobs is not None:
        record["logprobs"] = [
            {**_token(one), **({"top": [_token(top) for top in one.top]} if one.top else {})} for one in result.logprobs
        ]
    if isinstance(result, Ranked):
        record["rank_score"] = round(result.rank_score, 6)
    return record


def _token(one: "TokenLogprob") -> dict[str, Any]:
    return {"id": one.token_id, "text": one.text, "logprob": round(one.logprob, 6)}


def rerank_of(scorer: str | None, samples: int | None, beams: int | None, every: int | None) -> "Rerank | None":
    """Return the settings that the options make together; None where nothing is ranked.

    Raises:
        ConfigError: an option is impossible, or of no use without ``--rerank``.
    """
    from gerund.errors import ConfigError
    from gerund.settings.sampling import Rerank

    given = {"samples": samples, "beams": beams, "every": every}
    numbers = {name: value for name, value in given.items() if value is not None}
    if scorer is None:
        if numbers:
            raise ConfigError(f"--{next(iter(numbers))} belongs to --rerank SCORER, such as --rerank pmi")
        return None
    return Rerank(**numbers, scorer=scorer)


Expand = Annotated[
    int | None,
    typer.Option(
        help="Take the prompt as a query and write up to this many variants, with some of its words replaced.",
        show_default=False,
    ),
]
Keep = Annotated[
    list[str] | None,
    typer.Option(help="With --expand: a word that stays as it is; may be repeated.", show_default=False),
]
Fraction = Annotated[
    float | None,
    typer.Option(help="With --expand: fraction of the words that is written anew. [default: 0.3]", show_default=False),
]


def expansion_of(
    count: int | None, keep: list[str] | None, fraction: float | None, refused: dict[str, Any]
) -> dict[str, Any] | None:
    """Return the settings that the options make together; None where nothing is expanded.

    Args:
        count: how many expansions.
        keep: words that stay.
        fraction: fraction of the words that is written anew.
        refused: options that are of no use beside ``--expand``, by name; None where they were not given.

    Raises:
        ConfigError: an option is impossible, or of no use beside the others.
    """
    from gerund.errors import ConfigError

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
    """Look at all queries at once: what is wrong with the last shows before the first is expanded.

    Raises:
        TextError: a query has no word, or lacks one that is to be kept; the message says which.
        ConfigError: a number is impossible, or something is to be kept in a query with blanks of its own.
    """
    from gerund.errors import TextError
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
    """Yield a record for each query: ``prompt``, and the list ``expansions``.

    Raises:
        TextError: a query cannot be expanded; the message says which.
    """
    from gerund.errors import TextError

    seeds = SeedsByText(sampling)
    for rows in chunks:
        for index, query in enumerate(rows.texts):
            try:
                found = lm.expand(query, sampling=seeds.of_one(query), **settings)
            except TextError as error:
                raise rows.placed(index, error) from error
            yield {"prompt": query, "expansions": found}
