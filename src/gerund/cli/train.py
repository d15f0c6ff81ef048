"""``gerund train``: train a model from a recipe."""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from gerund.training.recipe import Recipe


def command(
    recipe: Annotated[str, typer.Argument(help="A YAML file, or the name of a bundled recipe (gerund recipes).")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings that replace the recipe's.")
    ] = None,
    texts: Annotated[
        list[Path] | None,
        typer.Option(
            "--texts",
            help="Train on this file or folder of texts (.txt, .md, .jsonl, .parquet) instead of the recipe's; "
            "may be repeated.",
        ),
    ] = None,
    teacher: Annotated[
        str | None,
        typer.Option(
            "--teacher",
            help="For recipes that distil: whose vectors are learned. A folder or hub id of a model that "
            "sentence-transformers or gerund reads, or a file of `gerund embed --keep-text`.",
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume from the newest complete checkpoint of the output folder.")
    ] = False,
    processes: Annotated[
        int,
        typer.Option(
            "--processes",
            help="Train in this many processes of this machine, one per GPU; each step is that of one process. "
            "Several machines are started by torchrun.",
            min=1,
        ),
    ] = 1,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Only print sizes, tokens, memory and the time, estimated from two or three steps; write nothing.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Train a model by a recipe.

    The output folder receives checkpoints, log.jsonl and, at the end, the finished model in OUTPUT/model.
    After Ctrl-C or SIGTERM the step is finished and kept. An interrupted training continues with --resume and ends with
    the same weights as an uninterrupted one.

    For example:

        gerund train unimae-default --texts notes/ output=runs/mine --dry-run

        gerund train unimae-default --texts notes/ output=runs/mine objectives.unimae.p_mar=0.4

        gerund train unimae-default --texts notes/ output=runs/mine --resume

        gerund train align-default --teacher sentence-transformers/all-MiniLM-L6-v2 --texts notes/ output=runs/aligned

        gerund train magnet-llama-2-7b --processes 2 --texts notes/ --texts books.jsonl
    """
    from gerund.training.recipe import load_recipe

    settings = load_recipe(recipe, overrides, texts=texts, teacher=teacher)
    if dry_run:
        from gerund.training.estimate import estimate

        estimated = estimate(settings, processes=processes)
        if as_json:
            typer.echo(json.dumps(asdict(estimated)))
            return
        typer.echo(f"parameters         {estimated.parameters:,}, of which trained {estimated.trained_parameters:,}")
        for name, tokens in estimated.objectives.items():
            typer.echo(f"tokens per step    {tokens:,} at most for {name}")
        typer.echo(f"steps              {settings.steps:,}")
        typer.echo(f"tokens             {estimated.tokens:,} at most")
        typer.echo(f"seconds per step   {estimated.seconds_per_step:.3g}")
        typer.echo(f"estimated time     {_duration(estimated.seconds)}")
        typer.echo(f"memory             {estimated.memory_mib:,} MiB at the peak of a step of this process")
        for line in estimated.memory.lines():
            typer.echo(line)
        return
    if processes > 1:
        _launch(settings, processes, recipe, overrides, texts, teacher, resume=resume, as_json=as_json)
        return
    from gerund.training.run import train

    # The first process says what they all have done, and what was kept.
    speaks = int(os.environ.get("RANK", "0")) == 0
    try:
        folder = train(settings, resume=resume)
    except KeyboardInterrupt:
        if speaks:
            raise
        raise typer.Exit(130) from None
    if not speaks:
        return
    if as_json:
        report = json.loads((folder / "training.json").read_text("utf-8"))
        typer.echo(json.dumps({"model": str(folder), **report}))
    else:
        typer.echo(folder)


def _launch(
    settings: "Recipe",
    processes: int,
    recipe: str,
    overrides: list[str] | None,
    texts: list[Path] | None,
    teacher: str | None,
    *,
    resume: bool,
    as_json: bool,
) -> None:
    """Carry the same command out in several processes; what can be refused at once is refused once."""
    from gerund.training.processes import check_machine, check_processes, launch
    from gerund.training.run_folder import check_output

    check_processes(processes)
    check_machine(settings, processes)
    check_output(settings.output, resume)
    named = [argument for path in texts or () for argument in ("--texts", str(path))]
    named += ["--teacher", teacher] if teacher is not None else []
    flags = ["--resume"] * resume + ["--json"] * as_json
    status = launch(["train", *named, *flags, "--", recipe, *(overrides or ())], processes)
    if status:
        raise typer.Exit(status)


def _duration(seconds: float) -> str:
    """Return a time as people say it.

    >>> [_duration(seconds) for seconds in (4.2, 130, 9000)]
    ['4 seconds', '2.2 minutes', '2.5 hours']
    """
    if seconds < 60:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.1f} minutes" if seconds < 3600 else f"{seconds / 3600:.1f} hours"
