"""``gerund mcp``: offer an index to programs that speak the Model Context Protocol."""

import sys
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gerund.cli import options
from gerund.cli.search import open_existing
from gerund.cli.text_io import tell
from gerund.errors import ConfigError

if TYPE_CHECKING:
    from gerund.settings.model_spec import ModelSpec


@options.takes(
    spec=options.model(
        "model", *options.MACHINE, helps={"model": "Another name of the index's model. [default: the index's own]"}
    )
)
def command(
    where: Annotated[str, typer.Argument(metavar="INDEX", help="An index; gerund index PATHS -o INDEX makes one.")],
    *,
    spec: "ModelSpec",
    answer_with: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Another model to answer with: a folder, GGUF file, short name or hub id; the index's own model "
            "searches. Both are in memory.",
        ),
    ] = None,
    allow_add: Annotated[
        bool, typer.Option("--allow-add", help="Let programs store texts in the index, with the tool add.")
    ] = False,
    http: Annotated[
        bool, typer.Option("--http", help="Listen at an address instead of standard input: streamable HTTP at /mcp.")
    ] = False,
    host: Annotated[
        str | None,
        typer.Option(help="With --http: the address; one that other machines can reach needs a key. "
                     "[default: 127.0.0.1]"),
    ] = None,
    port: Annotated[int | None, typer.Option(help="With --http: the port; 0 for a free one. [default: 8000]")] = None,
    api_key_file: Annotated[
        str | None,
        typer.Option(help="With --http: a file with one API key per line. Or put one key into GERUND_API_KEY."),
    ] = None,
) -> None:  # fmt: skip
    """Offer an index to desktop programs and agents, by the Model Context Protocol.

    Programs get the tools search, ask and read, which return exact quotations with their documents and characters, and
    the documents as resources. They can read what is in the index, and no other file. With --allow-add there is also
    the tool add, which stores a text in the index.

    A program starts the command itself and talks to it on standard input and output; the model is loaded when a tool
    first needs it. With --http it is a server of its own, with everything that gerund serve has.

    For example:

        gerund mcp my.index

        gerund mcp my.index --answer-with smollm2 --allow-add

        gerund mcp my.index --http --port 8080
    """
    of_server: dict[str, Any] = {"host": host, "port": port, "api_key_file": api_key_file}
    server_settings = {name: value for name, value in of_server.items() if value is not None}
    if http:
        from gerund.cli.serve import start
        from gerund.server.config import settings_of

        if answer_with is not None:
            raise ConfigError(
                "--answer-with is for standard input; for HTTP, gerund serve MODEL --encoder MODEL --index INDEX --mcp "
                "has a model to answer and another to search"
            )
        start(spec, settings_of({**server_settings, "index": where, "mcp": True, "allow_add": allow_add}))
        return
    if server_settings:
        raise ConfigError(f"--{next(iter(server_settings)).replace('_', '-')} is for --http, which is missing")
    from gerund.integrations.mcp import serve_stdio

    index = open_existing(where, spec, answer_with)
    if sys.stdin.isatty():
        tell("waiting for a program that speaks the Model Context Protocol on standard input; Ctrl-C ends it")
    serve_stdio(index, PurePath(Path(where).absolute()).name, allow_add=allow_add)
