"""``gerund train``: carry out a recipe."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer


def command(
    recipe: Annotated[Path, typer.Argument(help="The recipe, a YAML file.", show_default=False)],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Settings that replace the recipe's.", show_default=False),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest whole checkpoint of the output folder.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Only print size, tokens and an estimate of the time, and write nothing."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Train a model by a recipe.

    The output folder receives checkpoints, log.jsonl and, at the end, the finished model in OUTPUT/model.
    An interrupted training goes on with --resume and ends with the same weights as an uninterrupted one.

    For example:

        gerund train recipes/default-base.yaml --dry-run data.folder=../shared/data/lm

        gerund train recipes/default-base.yaml data.folder=../shared/data/lm steps=500 optimizer.name=adamw

        gerund train recipes/default-base.yaml data.folder=../shared/data/lm --resume
    """
    from gerund.training.recipe import load_recipe

    settings = load_recipe(recipe, overrides)
    from gerund.training.run import estimate, train

    if dry_run:
        found = estimate(settings)
        if as_json:
            typer.echo(json.dumps(asdict(found)))
            return
        typer.echo(f"parameters         {found.parameters:,}")
        typer.echo(f"tokens per step    {found.tokens_per_step:,}")
        typer.echo(f"steps              {settings.steps:,}")
        typer.echo(f"tokens             {found.tokens:,}")
        typer.echo(f"seconds per step   {found.seconds_per_step:.3g}")
        typer.echo(f"estimated time     {found.seconds / 60:.1f} minutes")
        return
    folder = train(settings, resume=resume)
    if as_json:
        report = json.loads((folder / "training.json").read_text("utf-8"))
        typer.echo(json.dumps({"model": str(folder), **report}))
    else:
        typer.echo(folder)
