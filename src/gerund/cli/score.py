"""``gerund score``: score continuations of a prefix, given as arguments or in a file."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gerund.cli import options, text_io
from gerund.errors import DataError, TextError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gerund.language_model import LanguageModel
    from gerund.settings.model_spec import ModelSpec
    from gerund.types import Scorer

# Prefixes that are scored in one call: enough to sort texts of like length together, few enough that results come soon.
_CHUNK = 32

# A prefix, its continuations, and where they stood.
Pair = tuple[str, list[str], str]


@options.takes(spec=options.model("model", *options.MACHINE))
def command(
    prefix: Annotated[str | None, typer.Argument(help="What comes first.")] = None,
    continuations: Annotated[
        list[str] | None, typer.Argument(help="What might follow it, each as one argument.")
    ] = None,
    *,
    spec: "ModelSpec",
    scorer: Annotated[
        str | None,
        typer.Option(
            help="pmi, avg_cll, cll, avg_ull, self_certainty, overlap, content_overlap, consensus, random, model (the "
            "model's own), mixed (pmi and the model's own), default (the bundled model's), or a scorer's folder or hub "
            "id. [default: the model's own, else pmi]"
        ),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--file", "-f", help='Many prefixes: a .jsonl file whose lines have "prefix" and "continuations", a list.'
        ),
    ] = None,
    output: options.Lines = None,
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Say how well texts continue a prefix.

    For one prefix its continuations are listed with their scores, the best first. With --file, --json or -o there is
    one JSON object a prefix: prefix, scores (in the order of the continuations) and best (the number of the best one,
    counted from 0). Where a continuation does not begin with a space, one is added.

    pmi is how much likelier the continuation is after the prefix than alone; cll and avg_cll are its log-likelihood,
    in all and for a token; avg_ull is the mean log-likelihood of a token of prefix and continuation together;
    self_certainty is how sure the model is while it reads; overlap is the fraction of words that the prefix has too,
    content_overlap that without stop words; consensus is how near it is to the other continuations; mixed is the
    mean of pmi and of the model's own scorer.

    For example:

        gerund score "The old man looked at the sea." "The waves were high." "Interest rates rose."

        gerund score --file candidates.jsonl -m ./model --scorer avg_cll -o scores.jsonl
    """
    text_io.refuse_existing(output, force=force)
    from gerund.scoring.names import check_scorer

    check_scorer(scorer)
    pairs = _pairs(prefix, continuations or [], file)
    from gerund.entry import load
    from gerund.scoring.registry import find_scorer, for_scoring

    lm = load(for_scoring(spec, scorer))
    scored = _scored(lm, pairs, find_scorer(scorer, lm))  # a scorer's folder is read once
    if file is None and output is None and not as_json:
        [(_, texts, _)] = pairs
        scores = next(scored)["scores"]
        for score, text in sorted(zip(scores, texts, strict=True), key=lambda pair: -pair[0]):
            typer.echo(f"{score:10.4f}  {text.strip()}")
        return
    text_io.write(text_io.as_lines(scored), output, len(pairs), "scoring")


def _pairs(prefix: str | None, continuations: list[str], file: Path | None) -> list[Pair]:
    from gerund.data.files import checked_text

    pairs = []
    for text, texts, where, _ in text_io.one_or_file(prefix, continuations, file, ("prefix", "continuations")):
        if not texts:
            raise DataError(f"{where}: needs 'continuations', a list of texts")
        checked = [checked_text(text, where, "continuations") for text in texts] if where else texts
        pairs.append(_spaced(text, checked, where))
    return pairs


def _spaced(prefix: str, continuations: list[str], where: str) -> Pair:
    for index, text in enumerate(continuations):
        if not text.strip():
            raise DataError(_placed(where, f"continuation {index} is empty"))
    joined = not prefix or prefix[-1].isspace()
    return prefix, [text if joined or text[0].isspace() else f" {text}" for text in continuations], where


def _placed(where: str, message: str) -> str:
    return f"{where}: {message}" if where else message


def _scored(lm: "LanguageModel", pairs: list[Pair], scorer: "Scorer") -> "Iterator[dict[str, Any]]":
    for start in range(0, len(pairs), _CHUNK):
        chunk = pairs[start : start + _CHUNK]
        try:
            scored = lm.score([prefix for prefix, _, _ in chunk], [texts for _, texts, _ in chunk], scorer)
        except TextError as error:
            if error.index is None or error.kind != "prefix":
                raise
            raise TextError(_placed(chunk[error.index][2], f"the prefix {error.reason}")) from error
        for (prefix, _, _), scores in zip(chunk, scored, strict=True):
            best = max(range(len(scores)), key=lambda index, values=scores: values[index])  # type: ignore[misc]
            yield {"prefix": prefix, "scores": [round(score, 6) for score in scores], "best": best}
