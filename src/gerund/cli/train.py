"""``gerund train``: carry out a recipe."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer


def command(
    recipe: Annotated[
        str, typer.Argument(help="A YAML file, or the name of a bundled recipe (gerund recipes).", show_default=False)
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Settings that replace the recipe's.", show_default=False),
    ] = None,
    texts: Annotated[
        list[Path] | None,
        typer.Option(
            "--texts",
            help="Train on this file or folder of texts (.txt, .md, .jsonl, .parquet) in the place of the recipe's; "
            "may be repeated.",
            show_default=False,
        ),
    ] = None,
    teacher: Annotated[
        str | None,
        typer.Option(
            "--teacher",
            help="For recipes that distil: whose vectors are learned. A folder or hub id of a model that "
            "sentence-transformers or gerund reads, or a file of `gerund embed --keep-text`.",
            show_default=False,
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest whole checkpoint of the output folder.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Only print sizes, tokens, memory and an estimate of the time, and write nothing."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Train a model by a recipe.

    The output folder receives checkpoints, log.jsonl and, at the end, the finished model in OUTPUT/model.
    An interrupted training goes on with --resume and ends with the same weights as an uninterrupted one.

    For example:

        gerund train unimae-default --texts notes/ output=runs/mine --dry-run

        gerund train unimae-default --texts notes/ output=runs/mine objectives.unimae.p_mar=0.4

        gerund train unimae-default --texts notes/ output=runs/mine --resume

        gerund train align-default --teacher sentence-transformers/all-MiniLM-L6-v2 --texts notes/ output=runs/aligned

        torchrun --nproc-per-node 2 -m gerund train magnet-llama-2-7b --texts notes/ --texts books.jsonl
    """
    from gerund.training.recipe import load_recipe

    settings = load_recipe(recipe, overrides, texts=texts, teacher=teacher)
    if dry_run:
        from gerund.training.estimate import estimate

        found = estimate(settings)
        if as_json:
            typer.echo(json.dumps(asdict(found)))
            return
        typer.echo(f"parameters         {found.parameters:,}, of which trained {found.trained_parameters:,}")
        for name, tokens in found.objectives.items():
            typer.echo(f"tokens per step    {tokens:,} at most for {name}")
        typer.echo(f"steps              {settings.steps:,}")
        typer.echo(f"tokens             {found.tokens:,} at most")
        typer.echo(f"seconds per step   {found.seconds_per_step:.3g}")
        typer.echo(f"estimated time     {_duration(found.seconds)}")
        typer.echo(f"memory             {found.memory_mib:,} MiB at the peak of a step")
        return
    from gerund.training.run import train

    folder = train(settings, resume=resume)
    if as_json:
        report = json.loads((folder / "training.json").read_text("utf-8"))
        typer.echo(json.dumps({"model": str(folder), **report}))
    else:
        typer.echo(folder)


def _duration(seconds: float) -> str:
    """Return a time as people say it.

    >>> [_duration(seconds) for seconds in (4.2, 130, 9000)]
    ['4 seconds', '2.2 minutes', '2.5 hours']
    """
    if seconds < 60:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.1f} minutes" if seconds < 3600 else f"{seconds / 3600:.1f} hours"
