"""``gerund generate``: continue a prompt on the terminal, or many prompts in a file."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gerund.config import Sampling
    from gerund.data.tables import Rows
    from gerund.language_model import LanguageModel

# Enough to sort prompts of like length together; few enough that results come soon.
_LOT = 128


def command(
    prompt: Annotated[
        str | None,
        typer.Argument(help="The text to continue; - reads it from standard input.", show_default=False),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="A folder or hub id; left out, the embedded default.", show_default=False),
    ] = None,
    file: Annotated[
        str | None,
        typer.Option(
            "--file", "-f", help="Many prompts: a .txt file (one a line), .jsonl, .csv, .tsv, .parquet, or - ."
        ),
    ] = None,
    column: Annotated[str | None, typer.Option(help="Column with the prompts; left out, prompt.")] = None,
    format: Annotated[
        str | None, typer.Option(help="txt, jsonl, csv, tsv or parquet, where the file's ending does not say it.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="How much to write at most.")] = 64,
    temperature: Annotated[
        float | None,
        typer.Option(
            help="0 always takes the likeliest token; 1 samples from the model as it is. [default: 0, or 1 "
            "where one of the next three options is given]",
            show_default=False,
        ),
    ] = None,
    top_p: Annotated[float | None, typer.Option(help="Only the likeliest tokens of together this probability.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Only so many of the likeliest tokens.")] = None,
    typical_p: Annotated[
        float | None, typer.Option(help="Only tokens of about average surprise of together this probability.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Makes the draw repeatable.")] = None,
    batch_size: Annotated[int, typer.Option(help="Prompts in one pass, with --file.")] = 16,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write JSON lines to this file.", show_default=False)
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the output file.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object instead of the text.")] = False,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = "auto",
) -> None:
    """Continue a prompt, or every prompt of a file.

    For one prompt the prompt and its continuation are printed as they come. With --file, --json or -o there is one
    JSON object a prompt: prompt, text (the continuation alone), score (mean log-probability a token) and finished
    (whether the model ended the text itself).

    For example:

        gerund generate "Once upon a time" --max-new-tokens 100

        gerund generate "Once upon a time" --temperature 0.8 --top-p 0.95 --seed 1 --json

        gerund generate --file prompts.jsonl -m ./model -o continuations.jsonl
    """
    from gerund.errors import ConfigError, OutputExistsError

    sampling = _sampling(temperature, top_p, top_k, typical_p, seed)
    if batch_size < 1:
        raise ConfigError(f"batch_size={batch_size} leaves no room for a prompt")
    if output is not None and output.exists() and not force:
        raise OutputExistsError(f"{output} exists already; choose another name or give --force to replace it")
    lots = _prompts(prompt, file, column, format)
    from gerund.entry import load

    # Writing needs no plan: models that no plan reaches write too.
    lm = load(model, attention="causal", dtype=dtype, device=device)
    if file is None and output is None and not as_json:
        _stream(lm, lots[0], max_new_tokens, sampling)
        return
    lines = _lines(lm, lots, max_new_tokens, sampling, batch_size)
    if output is None:
        for line in lines:
            typer.echo(line)
        return
    from gerund.data.files import whole_file
    from gerund.progress import progress

    output.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(output) as sink, progress(sum(map(len, lots)), "generating") as advance:
        for line in lines:
            sink.write(f"{line}\n".encode())
            advance(1)


def _sampling(
    temperature: float | None, top_p: float | None, top_k: int | None, typical_p: float | None, seed: int | None
) -> "Sampling":
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


def _prompts(prompt: str | None, file: str | None, column: str | None, format: str | None) -> "list[Rows]":
    """Read all prompts at once: what is wrong with the last shows before the first is continued."""
    import sys

    from gerund.data.files import decode
    from gerund.data.tables import Rows, open_table, read_rows
    from gerund.errors import ConfigError, DataError

    if (prompt is None) == (file is None):
        raise ConfigError("give either a prompt or --file" + (", not both" if file else ""))
    if file is None:
        if prompt == "-":
            prompt = decode(sys.stdin.buffer.read(), "standard input").removesuffix("\n")
        return [Rows([0], [prompt or ""], [1], "the prompt", unit="")]
    table = open_table(file, format=format, column=column)
    if column is None and table.format != "txt":
        table = open_table(file, format=format, column="prompt")
    lots = list(read_rows(table, max_rows=_LOT))
    if not lots:
        raise DataError(f"{table.name} has no prompts")
    return lots


def _stream(lm: "LanguageModel", rows: "Rows", max_new_tokens: int, sampling: "Sampling") -> None:
    from gerund.errors import TextError

    [prompt] = rows.texts
    pieces = lm.stream(prompt, max_new_tokens, sampling)
    try:
        first = next(pieces, "")  # a prompt that cannot be continued is not printed
    except TextError as error:
        raise rows.named(error) from error
    typer.echo(prompt + first, nl=False)
    for piece in pieces:
        typer.echo(piece, nl=False)
    typer.echo()


def _lines(
    lm: "LanguageModel", lots: "list[Rows]", max_new_tokens: int, sampling: "Sampling", batch_size: int
) -> "Iterator[str]":
    import json
    from dataclasses import replace

    from gerund.errors import TextError

    for number, rows in enumerate(lots):
        # Each lot draws anew; with one seed for all, the same prompt would get the same text in every lot.
        own = replace(sampling, seed=None if sampling.seed is None else sampling.seed + number * 1_000_000_007)
        try:
            results = lm.generate(rows.texts, max_new_tokens, own, batch_size=batch_size)
        except TextError as error:
            raise rows.named(error) from error
        for text, result in zip(rows.texts, results, strict=True):
            record: dict[str, Any] = {"prompt": text, "text": result.text}
            record |= {"score": round(result.score, 6), "finished": result.finished}
            yield json.dumps(record, ensure_ascii=False)
