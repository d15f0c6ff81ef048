"""``gerund push``: upload a model's folder to the Hugging Face hub."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from gerund.cli import options
from gerund.errors import ConfigError


def command(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A model's folder.")],
    repository: Annotated[str, typer.Argument(metavar="REPO", help="The repository, as OWNER/NAME.")],
    private: Annotated[
        bool | None, typer.Option("--private/--public", help="Who sees a new repository. [default: the hub's]")
    ] = None,
    base: Annotated[
        bool | None,
        typer.Option(
            "--with-base/--adapter-only",
            help="For a folder with adapters: upload the base model's weights too, or the adapters alone.",
        ),
    ] = None,
    base_model: Annotated[
        str | None, typer.Option(help="Hub id of the base model. [default: that of the model card]")
    ] = None,
    results: Annotated[
        Path | None, typer.Option(help="Report of gerund eval, whose scores of this model go into the card.")
    ] = None,
    message: Annotated[str | None, typer.Option("--message", help="Message of the commit.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, created if it does not exist. [default: main]")] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Upload without asking.")] = False,
    as_json: options.Json = False,
) -> None:
    """Upload a model's folder to the Hugging Face hub, in one commit.

    FOLDER is one that gerund convert, train, adapt or export wrote, or lm.save. Lists the files and their sizes, asks
    before it uploads, and verifies the sizes on the hub afterwards. Hidden files are left out. In the examples of the
    model card, the repository takes the place of the folder.

    Where an adapter was trained, the base model's weights are uploaded only with --with-base: they are large, and
    somebody else's. --adapter-only uploads the adapters, the settings and a card that says how to open them.

    The token is that of hf auth login, or HF_TOKEN. HF_ENDPOINT names another hub.

    For example:

        gerund push ./encoder me/encoder --private

        gerund push ./adapted/model me/adapted --adapter-only --base-model HuggingFaceTB/SmolLM2-135M-Instruct

        gerund push ./encoder me/encoder --results report --yes
    """
    from gerund.exporting.hub import prepare, upload

    prepared = prepare(folder, repository, base=base, base_model=base_model, results=results, private=private)
    for name, size in prepared.sizes.items():
        typer.echo(f"{size / 1e6:10,.2f} MB  {name}", err=True)
    if not yes:
        if not sys.stdin.isatty():
            raise ConfigError(f"this would upload {prepared}; add --yes where nobody can be asked")
        typer.confirm(f"Upload {prepared}?", abort=True, err=True)
    done = upload(prepared, commit_message=message, revision=revision)
    if as_json:
        typer.echo(json.dumps({"url": done.url, "commit": done.commit, "sizes": dict(done.sizes)}))
        return
    typer.echo(f"{done.url}: {len(done.sizes)} files, {sum(done.sizes.values()) / 1e6:,.1f} MB")
