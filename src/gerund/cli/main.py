"""The ``gerund`` command: puts the commands together and turns errors into one plain sentence.

Knows: the command functions and exit statuses. Does not know: what a command does. The command files
import nothing heavy at their top, so ``gerund --help`` does not wait for torch.
"""

import errno
import os
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
from gerund.cli.literal_help import LiteralHelp
from gerund.errors import GerundError, ResourceError
from gerund.jobs.interruption import interrupt_on_termination

app = typer.Typer(
    name="gerund",
    help="One language model that writes and encodes, with the same weights.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("convert", cls=LiteralHelp)(convert.command)
app.command("demo", cls=LiteralHelp)(demo.command)
app.command("doctor", cls=LiteralHelp)(doctor.command)
app.command("embed", cls=LiteralHelp)(embed.command)
app.command("eval", cls=LiteralHelp)(eval.command)
app.command("export", cls=LiteralHelp)(export.command)
app.command("generate", cls=LiteralHelp)(generate.command)
app.command("infill", cls=LiteralHelp)(infill.command)
app.command("inspect", cls=LiteralHelp)(inspect.command)
app.command("mine", cls=LiteralHelp)(mine.command)
app.command("negatives", cls=LiteralHelp)(negatives.command)
app.command("recipes", cls=LiteralHelp)(recipes.command)
app.command("score", cls=LiteralHelp)(score.command)
app.command("train", cls=LiteralHelp)(train.command)
app.command("tune", cls=LiteralHelp)(tune.command)


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
    except OSError as error:
        # Without a file's name it is a stream that refuses: what commands write to files, they name.
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO) or error.filename is not None:
            raise
        # What is still in Python's buffer would be tried, and refused, once more at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        print(f"gerund: error: the output cannot be written: {error.strerror}", file=sys.stderr)  # noqa: T201
        sys.exit(ResourceError.exit_code)


def run() -> None:
    """Run the command line as a program of its own.

    A reader that goes away (head, less) ends it quietly; SIGTERM ends it as Ctrl-C does, after it has tidied up.
    """
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    interrupt_on_termination()
    main()


def _show_warning(message: Warning | str, *_where: object, **_more: object) -> None:
    print(f"gerund: warning: {message}", file=sys.stderr)  # noqa: T201


if __name__ == "__main__":
    run()
