"""``gerund models``: the models on this machine, and fetching one by its short name."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from gerund.cli.command import CheckedCommand
from gerund.errors import ModelError
from gerund.gguf_file import GgufFile

app = typer.Typer(
    name="models",
    invoke_without_command=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def models(
    context: typer.Context, as_json: Annotated[bool, typer.Option("--json", help="Print the list as JSON.")] = False
) -> None:
    """List the models on this machine, or fetch one by its short name.

    The list has models that were fetched or can be, and GGUF files of Ollama, LM Studio and llama.cpp. The name in the
    first column opens a model in Python and in every command.

    For example:

        gerund models

        gerund models get smollm2
    """
    if context.invoked_subcommand is not None:
        return
    rows = [*_named(), *_local()]
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
        return
    width = max(len(row["name"]) for row in rows)
    for row in rows:
        size = "" if row["bytes"] is None else f"{row['bytes'] / 1e6:,.0f} MB"
        typer.echo(f"{row['name']:{width}}  {size:>10}  {row['about']}")


@app.command("get", cls=CheckedCommand)
def get(
    name: Annotated[str, typer.Argument(help="A short name from `gerund models`.")],
    force: Annotated[bool, typer.Option("--force", help="Fetch it again.")] = False,
) -> None:
    """Fetch a model, after which its short name opens it without a network.

    For example:

        gerund models get smollm2

        gerund chat smollm2
    """
    from gerund.models.catalog import fetch, named_model

    model = named_model(name)
    typer.echo(f"{model.summary}; license: {model.license}", err=True)
    if model.is_here and not force:
        typer.echo(f"{name} is here already, in {model.folder}; --force fetches it again")
        return
    where = fetch(model, overwrite=force, say=lambda line: typer.echo(line, err=True))
    typer.echo(f"{name}: from {where}, in {model.folder}")
    typer.echo(f"try: gerund chat {name}" if model.chats else f"try: gerund generate 'Once upon a time' -m {name}")


def _named() -> Iterator[dict[str, Any]]:
    from gerund.models.catalog import NAMED

    for model in NAMED.values():
        about = model.summary if model.is_here else f"{model.summary} (gerund models get {model.name})"
        size = sum(path.stat().st_size for path in model.folder.rglob("*") if path.is_file()) if model.is_here else None
        yield {"name": model.name, "bytes": size, "here": model.is_here, "license": model.license, "about": about}


def _local() -> Iterator[dict[str, Any]]:
    from gerund.models.catalog import local_models

    for model in local_models():
        size, about = _described(model.path)
        yield {"name": model.name, "bytes": size, "here": True, "license": None, "about": about}


def _described(path: Path) -> tuple[int | None, str]:
    """Return how large a model is, with all its files, and what it is in a few words."""
    from gerund.gguf_file import parts_of, read_file

    try:
        size = sum(part.stat().st_size for part in parts_of(path))
        file = read_file(path)
    except (ModelError, OSError) as error:
        return None, f"cannot be read: {error}"
    if not file.types:
        return size, f"{file.architecture}, no weights"
    about = f"{file.architecture}, {file.n_parameters / 1e6:,.0f} million weights, mostly {file.types[0]}"
    return size, f"{about}; {_use_of(file)}"


def _use_of(file: GgufFile) -> str:
    from gerund.gguf_architectures import LAYOUTS
    from gerund.models.saved_settings import encoder_settings

    if file.architecture not in LAYOUTS:
        return "an architecture that gerund does not read from GGUF"
    try:
        encoder = encoder_settings(file)
    except ModelError as error:
        return str(error).partition(": ")[2]
    if encoder is None:
        return "generates, embeds, infills and re-ranks"
    return f"an embedding model (attention={encoder.attention}, pooling={encoder.pooling})"
