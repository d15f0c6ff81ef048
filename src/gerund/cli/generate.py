"""``gerund generate``: continue a prompt, or many prompts in a file; expand search queries; or read vectors as text."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gerund.cli import options, text_io
from gerund.errors import ConfigError, TextError
from gerund.types import Ranked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gerund.data.tables import Rows
    from gerund.inference.generate.config import GenerationKeywords
    from gerund.language_model import LanguageModel
    from gerund.settings.model_spec import ModelSpec
    from gerund.settings.sampling import Rerank, Sampling
    from gerund.types import Generation

Expand = Annotated[
    int | None,
    typer.Option(
        help="Take the prompt as a query and generate up to this many variants, with some of its words replaced."
    ),
]
Keep = Annotated[list[str] | None, typer.Option(help="With --expand: a word that stays as it is; may be repeated.")]
Fraction = Annotated[float | None, typer.Option(help="With --expand: fraction of the words to replace. [default: 0.3]")]


@options.takes(
    spec=options.model("model", *options.MACHINE),
    sampling=options.sampling(
        *("temperature", "top_p", "top_k", "typical_p", "min_p", "repetition_penalty", "frequency_penalty"),
        *("presence_penalty", "logit_bias", "seed"),
    ),
    asked=options.text_settings("n", "stop", "logprobs", "schema", "regex", "choice"),
    ranked=options.rerank(),
)
def command(
    prompt: Annotated[str | None, typer.Argument(help="The text to continue; - reads it from standard input.")] = None,
    *,
    spec: "ModelSpec",
    file: options.Texts = None,
    column: Annotated[str | None, typer.Option(help="Column with the prompts. [default: prompt]")] = None,
    format: options.Format = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(help="Most tokens to generate. [default: 64, or 8 per span with --expand]")
    ] = None,
    sampling: dict[str, Any],
    asked: "GenerationKeywords",
    ranked: "Rerank | None",
    candidates: Annotated[
        bool, typer.Option("--candidates", help="With --best-of and JSON: all that competed, with their scores.")
    ] = False,
    expand: Expand = None,
    keep: Keep = None,
    fraction: Fraction = None,
    from_vector: Annotated[
        Path | None,
        typer.Option(help="Read each vector of a .npy or .parquet file as text, by a model with answer tokens."),
    ] = None,
    batch_size: Annotated[int | None, typer.Option(help="Prompts in one pass, with --file. [default: 16]")] = None,
    output: options.Lines = None,
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Continue a prompt, or every prompt of a file.

    For one prompt the prompt and its continuation are printed as they are generated. With --file, --json or -o, prints
    one JSON object per prompt: prompt, text (the continuation alone), score (mean log-probability per token) and
    finished (whether the text came to its end), with --stop the string that ended it, with --logprobs those of its
    tokens, with --best-of rank_score; with -n one object per continuation. With --json there is usage too, in tokens.

    With --best-of many continuations are sampled and the best one by --rank is kept: with --rank consensus the one
    that agrees most with the others. With --beams and --every the best ones are chosen again and again while they are
    extended. By default it samples with --top-p 0.9.

    With --expand the prompt is a query, and other ways to ask are printed, one per line, the most likely first:
    some of its words, never those of --keep, are masked and replaced, or, if the query has [blank], these are filled.
    With --file, --json or -o, prints one JSON object per query: prompt and expansions. By
    default it samples with --top-p 0.9.

    With --from-vector the vectors of a file that `gerund embed` wrote, or of any .npy, are read as text: what the
    model would answer to their texts. The model is one that `gerund train gen` has trained.

    For example:

        gerund generate "Once upon a time" --max-new-tokens 100

        gerund generate "Once upon a time" --temperature 0.8 --top-p 0.95 --seed 1 --json

        gerund generate "The capital of France is" --best-of 8 --rank consensus --seed 1

        gerund generate "Once upon a time" --rank pmi --best-of 10 --beams 2 --every 20 --seed 1

        gerund generate --expand 5 "how to dry damp walls" --keep walls --seed 1

        gerund generate --file prompts.jsonl -m ./model -o continuations.jsonl

        gerund generate --from-vector notes.npy -m runs/gen/model
    """
    from gerund.scoring.names import check_scorer

    if from_vector is not None:
        refused: dict[str, Any] = {
            **{"a prompt": prompt, "--file": file, "--column": column, "--format": format, "--batch-size": batch_size},
            **{"--best-of": ranked, "--candidates": candidates or None},
            **{"--expand": expand, "--keep": keep or None, "--fraction": fraction},
        }
        max_new_tokens = 64 if max_new_tokens is None else max_new_tokens
        settings = {"max_new_tokens": max_new_tokens, "sampling": options.sampling_of(sampling), **asked}
        text_io.refuse_existing(output, force=force)
        _read_vectors(from_vector, spec, settings, refused, output, as_json=as_json)
        return
    text_io.require_text_or_file(prompt, file, "prompt", column=column, format=format)
    rerank = None if ranked is None or ranked.scorer is None else str(ranked.scorer)
    check_scorer(rerank)
    expansion = _expansion_of(expand, keep, fraction, {"--best-of": ranked, "--batch-size": batch_size})
    if (ranked or expansion) is not None and not {"temperature", *options.FILTERS} & sampling.keys():
        sampling["top_p"] = 0.9
    how = options.sampling_of(sampling)
    alone = file is None and output is None and not as_json
    _refuse_unseen(asked, alone=alone, candidates=candidates, ranked=ranked is not None, expands=expansion is not None)
    batch_size = 16 if batch_size is None else batch_size
    if batch_size < 1:
        raise ConfigError(f"batch_size={batch_size} leaves no room for a prompt")
    text_io.refuse_existing(output, force=force)
    chunks = text_io.read_texts(prompt, file, "prompt", column=column, format=format, usual="prompt")
    _check(chunks, max_new_tokens, how, asked, ranked, expansion)
    if ranked is None:
        from gerund.light_entry import load_writer

        lm = load_writer(spec, only_writes=expansion is None)
    else:
        from gerund.entry import load
        from gerund.scoring.registry import find_scorer, for_scoring

        lm = load(for_scoring(spec, rerank))
        # A scorer's folder is read once, not for every chunk.
        ranked = replace(ranked, scorer=find_scorer(rerank, lm, seed=sampling.get("seed", 0)))
    if expansion is not None:
        if max_new_tokens is not None:
            expansion["max_tokens"] = max_new_tokens
        _expand(lm, chunks, how, expansion, output, alone=alone)
        return
    max_new_tokens = 64 if max_new_tokens is None else max_new_tokens
    if alone:
        _stream(lm, chunks[0], max_new_tokens, how, asked, ranked)
        return
    writes = partial(lm.generate, max_new_tokens=max_new_tokens, rerank=ranked, batch_size=batch_size, **asked)
    lines = _lines(writes, chunks, how, asked.get("n", 1), candidates=candidates, with_usage=as_json)
    text_io.write(lines, output, sum(map(len, chunks)), "generating")


def _read_vectors(
    path: Path,
    spec: "ModelSpec",
    settings: dict[str, Any],
    refused: dict[str, Any],
    output: Path | None,
    *,
    as_json: bool,
) -> None:
    """Write what the vectors of a file say; ``refused`` are values that go with prompts, by name."""
    if option := next((name for name, value in refused.items() if value is not None), None):
        raise ConfigError(f"--from-vector reads vectors, and {option} belongs to another use; give one of them")
    from gerund.data.embedding.files import read_vectors
    from gerund.entry import load

    lm = load(spec)
    vectors = read_vectors(path, lm.fingerprint())
    results = (lm.read_vector(vectors[row], **settings) for row in range(len(vectors)))
    is_json = as_json or output is not None
    lines = (
        json.dumps({"row": row, **text_io.as_record(result)}, ensure_ascii=False) if is_json else result.text
        for row, result in enumerate(results)
    )
    text_io.write(lines, output, len(vectors), "reading vectors")


def _refuse_unseen(asked: "GenerationKeywords", *, alone: bool, candidates: bool, ranked: bool, expands: bool) -> None:
    """Refuse what would not be seen, or not be heeded."""
    if alone and (asked.get("logprobs") is not None or candidates or asked.get("n", 1) != 1):
        raise ConfigError("-n, --logprobs and --candidates are for JSON; give --json, --file or -o")
    if candidates and not ranked:
        raise ConfigError("--candidates belongs to --best-of N, such as --best-of 8")
    if expands and asked:
        raise ConfigError(f"--{next(iter(asked))} is of no use with --expand, which infills one query at a time")


def _expansion_of(
    count: int | None, keep: list[str] | None, fraction: float | None, refused: dict[str, Any]
) -> dict[str, Any] | None:
    """Return the settings that the options make together; None without ``--expand``.

    ``refused`` are values of options that can't be combined with it, by name.
    """
    expand_options = {"--keep": keep, "--fraction": fraction}
    if count is None:
        for name, value in expand_options.items():
            if value not in (None, []):
                raise ConfigError(f"{name} belongs to --expand N, such as --expand 5")
        return None
    for name, value in refused.items():
        if value is not None:
            raise ConfigError(f"{name} is of no use with --expand, which infills one query at a time")
    if count < 1:
        raise ConfigError(f"--expand {count} is not at least 1")
    return {"count": count, "keep": keep or []} | ({} if fraction is None else {"fraction": fraction})


def _check(
    chunks: "list[Rows]",
    max_new_tokens: int | None,
    sampling: "Sampling",
    asked: "GenerationKeywords",
    ranked: "Rerank | None",
    expansion: dict[str, Any] | None,
) -> None:
    """Find what is wrong with the settings before a model is loaded."""
    from gerund.inference.generate.config import GenerationConfig

    settings = GenerationConfig.of(64 if max_new_tokens is None else max_new_tokens, sampling, asked)
    if ranked is not None:
        from gerund.inference.generate.reranking import require_sampling

        settings.refuse_with_rerank()
        require_sampling(ranked, sampling)
    if expansion is not None:
        from gerund.inference.infill import BLANK
        from gerund.inference.infill.expansion import validate_expansion

        for _ in text_io.each_text(chunks, partial(validate_expansion, blank=BLANK, **expansion)):
            pass


def _stream(
    lm: "LanguageModel",
    rows: "Rows",
    max_new_tokens: int,
    sampling: "Sampling",
    asked: "GenerationKeywords",
    rerank: "Rerank | None",
) -> None:
    from gerund.models.kinds import is_encoder_decoder

    [prompt] = rows.texts
    pieces = lm.stream(prompt, max_new_tokens, sampling, rerank=rerank, **asked)
    try:
        first = next(pieces, "")  # a prompt that cannot be continued is not printed
    except TextError as error:
        raise rows.named(error) from error
    # What a model with an encoder of its own writes does not continue the prompt.
    typer.echo(first if is_encoder_decoder(lm.model) else prompt + first, nl=False)
    for piece in pieces:
        typer.echo(piece, nl=False)
    typer.echo()


def _expand(
    lm: "LanguageModel",
    chunks: "list[Rows]",
    sampling: "Sampling",
    settings: dict[str, Any],
    output: Path | None,
    *,
    alone: bool,
) -> None:
    seeds = text_io.SeedsByText(sampling)

    def expand(query: str) -> dict[str, Any]:
        return {"prompt": query, "expansions": lm.expand(query, sampling=seeds.of_one(query), **settings)}

    expanded = text_io.each_text(chunks, expand)
    if alone:
        for text in next(expanded)["expansions"]:
            typer.echo(text)
        return
    text_io.write(text_io.as_lines(expanded), output, sum(map(len, chunks)), "expanding")


def _lines(
    writes: "Callable[..., list[Generation]]",
    chunks: "list[Rows]",
    sampling: "Sampling",
    n: int,
    *,
    candidates: bool,
    with_usage: bool,
) -> "Iterator[str]":
    seeds = text_io.SeedsByText(sampling)
    for rows in chunks:
        try:
            results = writes(rows.texts, sampling=seeds.of(rows.texts))
        except TextError as error:
            raise rows.named(error) from error
        for place, result in enumerate(results):
            record = {"prompt": rows.texts[place // n], **text_io.as_record(result)}
            if candidates and isinstance(result, Ranked):
                record["candidates"] = [
                    {**text_io.as_record(candidate), "rank_score": round(candidate.rank_score, 6)}
                    for candidate in result.candidates
                ]
            if with_usage:
                counts = ("prompt_tokens", "completion_tokens", "total_tokens")
                record["usage"] = {name: getattr(result.usage, name) for name in counts}
            yield json.dumps(record, ensure_ascii=False)
