"""``gerund negatives``: passages with wrong continuations, to train a scorer on."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gerund.cli import generation_options as options
from gerund.cli import model_options

if TYPE_CHECKING:
    from gerund.spec import ModelSpec
    from gerund.types import Scorer

_HELPS = {"model": "Writes continuations; left out, the bundled model."}


@model_options.with_spec("model", *model_options.MACHINE, helps=_HELPS)
def command(
    corpus: Annotated[
        list[Path],
        typer.Argument(
            help="Files or folders of documents (.jsonl, .txt, .md, .parquet, .gz, .xz).", show_default=False
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write to.", show_default=False)],
    *,
    spec: "ModelSpec",
    generate: Annotated[
        float, typer.Option(help="Fraction of the passages that get a generated continuation, 0 to 1.")
    ] = 0.5,
    hard: Annotated[
        int, typer.Option(help="Hard stretches of the same document for each passage; needs --scorer.")
    ] = 0,
    scorer: Annotated[
        str | None,
        typer.Option(help="Finds the hard ones: pmi, overlap, ..., or a scorer's folder.", show_default=False),
    ] = None,
    prefix_words: Annotated[int, typer.Option(help="Words of a prefix at most.")] = 256,
    fewest_words: Annotated[int, typer.Option(help="Words of a continuation at least.")] = 10,
    most_words: Annotated[int, typer.Option(help="Words of a continuation at most.")] = 128,
    per_document: Annotated[
        int | None,
        typer.Option(help="Passages of a document at most; left out, one from every sentence.", show_default=False),
    ] = None,
    part: Annotated[
        str,
        typer.Option(help="Which documents: 2/2 every second one, 1/2 the others, on which a generator was trained."),
    ] = "1/1",
    clean: Annotated[
        str, typer.Option(help="Quirks to remove first: none, gutenberg (hard-wrapped lines) or wikipedia.")
    ] = "none",
    text_column: Annotated[str, typer.Option(help="Column or field that holds the text.")] = "text",
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    typical_p: options.TypicalP = None,
    seed: Annotated[int, typer.Option(help="Determines passages and samples.")] = 0,
    batch_size: Annotated[int, typer.Option(help="Prefixes that are continued in one pass.")] = 32,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a folder that was begun.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Begin anew where the folder holds an earlier run, finished or not.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was made as JSON.")] = False,
) -> None:
    """Make passages with wrong continuations, to train a scorer of continuations on.

    A passage is a prefix and what follows it in its document, both whole sentences. Other stretches of the same
    document serve as wrong continuations during the training without being written down; what is written here are
    continuations that a model generates (by nucleus sampling with p 0.9 unless an option says otherwise), and hard
    stretches that a scorer mistakes for the right one. An interrupted run goes on with --resume.

    For example:

        gerund negatives books.jsonl -o passages

        gerund negatives books/ -o passages --clean gutenberg --per-document 200 --generate 1 -m ./model

        gerund negatives books.jsonl -o hard --generate 0 --hard 10 --scorer overlap
    """
    from gerund.config import Sampling
    from gerund.data.corpus import corpus_files
    from gerund.errors import ConfigError
    from gerund.scoring.names import MEASURE_NAMES, WORD_MEASURE_NAMES, check_scorer

    check_scorer(scorer)
    sampled = temperature is not None or top_p is not None or top_k is not None or typical_p is not None
    sampling = options.sampling_of(temperature, top_p, top_k, typical_p, None) if sampled else Sampling(1.0, top_p=0.9)
    from gerund.entry import load_writer
    from gerund.models.encoder_decoder import demand_decoder_only
    from gerund.scoring.registry import find_scorer, fixed_scorer
    from gerund.training.negatives import NegativesConfig, make_negatives

    config = NegativesConfig(
        clean=clean,
        prefix_words=prefix_words,
        fewest_words=fewest_words,
        most_words=most_words,
        per_document=per_document,
        generate=generate,
        hard=hard,
        sampling=sampling,
        part=part,
        seed=seed,
    )
    if batch_size < 1:
        raise ConfigError(f"batch_size={batch_size} leaves no room for a prefix")
    if (scorer is None) != (hard == 0):
        raise ConfigError("--hard and --scorer belong together")
    files = corpus_files(corpus)
    # Shared words and trained scorers need no model that writes.
    measured = scorer in MEASURE_NAMES and scorer not in WORD_MEASURE_NAMES
    lm = load_writer(spec) if generate or measured else None
    if lm is not None:
        demand_decoder_only(lm.model, "continue a text")
    judge: Scorer | None = None
    if scorer is not None:
        judge = fixed_scorer(scorer) if lm is None else find_scorer(scorer, lm, seed=seed)
    made = make_negatives(
        files,
        output,
        config,
        lm=lm,
        scorer=judge,
        text_column=text_column,
        batch_size=batch_size,
        resume=resume,
        force=force,
    )
    if as_json:
        typer.echo(json.dumps({"folder": str(output), **asdict(made)}))
        return
    typer.echo(f"{made.passages:,} passages of {made.documents - made.short:,} documents in {output}")
    typer.echo(f"{made.generated:,} generated and {made.hard:,} hard continuations")
    if made.short:
        typer.echo(f"{made.short:,} documents were too short")
