"""The ``gerund`` command: puts the commands together and turns errors into one plain sentence.

Knows: the command functions and exit statuses. Does not know: what a command does. The command files
import nothing heavy at their top, so ``gerund --help`` does not wait for torch.
"""

import signal
import sys
import warnings
from typing import Annotated

import typer

from gerund.cli import (
    convert,
    demo,
    doctor,
    embed,
    eval,
    export,
    generate,
    infill,
    inspect,
    mine,
    negatives,
    recipes,
    score,
    train,
    tune,
)
from gerund.errors import GerundError

app = typer.Typer(
    name="gerund",
    help="One language model that writes and encodes, with the same weights.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("convert")(convert.command)
app.command("demo")(demo.command)
app.command("doctor")(doctor.command)
app.command("embed")(embed.command)
app.command("eval")(eval.command)
app.command("export")(export.command)
app.command("generate")(generate.command)
app.command("infill")(infill.command)
app.command("inspect")(inspect.command)
app.command("mine")(mine.command)
app.command("negatives")(negatives.command)
app.command("recipes")(recipes.command)
app.command("score")(score.command)
app.command("train")(train.command)
app.command("tune")(tune.command)


def _version(value: bool) -> None:
    if value:
        from gerund import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    del version


def main() -> None:
    """Run the command line; a user's mistake ends in one sentence on stderr and exit status 2."""
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            app()
    except GerundError as error:
        print(f"gerund: error: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(error.exit_code)


def run() -> None:
    """Run the command line as a program of its own: a reader that goes away (head, less) ends it quietly."""
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    main()


def _show_warning(message: Warning | str, *_where: object, **_more: object) -> None:
    print(f"gerund: warning: {message}", file=sys.stderr)  # noqa: T201


if __name__ == "__main__":
    run()
