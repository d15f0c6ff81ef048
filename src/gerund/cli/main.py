"""The ``gerund`` command: registers the subcommands, and prints an error as one sentence with an exit status.

Knows: the command functions and exit statuses. Does not know: what a command does. The command files
import nothing heavy at their top, so ``gerund --help`` does not wait for torch; and only the named one is imported.
"""

import errno
import os
import sys
import warnings
from functools import cache
from importlib import import_module
from typing import Annotated, Any

import typer

from gerund.cli import quick_imports
from gerund.cli.command import CheckedCommand, LongCommand, WholeFileCommand
from gerund.errors import GerundError, InputError, MissingDependencyError, ResourceError, is_panic, one_line
from gerund.jobs.signals import interrupt_on_termination
from gerund.progress import printed_notes

# The commands, each in the file of its name, and how the command line checks its arguments; `models` has its own.
COMMANDS: dict[str, type[CheckedCommand] | None] = {
    "adapt": LongCommand,
    "ask": CheckedCommand,
    "chat": CheckedCommand,
    "convert": CheckedCommand,
    "demo": CheckedCommand,
    "doctor": CheckedCommand,
    "embed": LongCommand,
    "eval": LongCommand,
    "export": CheckedCommand,
    "generate": WholeFileCommand,
    "index": LongCommand,
    "infill": WholeFileCommand,
    "inspect": CheckedCommand,
    "mcp": CheckedCommand,
    "mine": LongCommand,
    "models": None,
    "negatives": LongCommand,
    "push": CheckedCommand,
    "recipes": CheckedCommand,
    "rerank": WholeFileCommand,
    "score": WholeFileCommand,
    "search": CheckedCommand,
    "serve": CheckedCommand,
    "train": LongCommand,
    "tune": LongCommand,
}

# An installation without these computes quantized GGUF files alone.
_TORCH = ("torch", "transformers", "peft", "accelerate")

# Commands outside this package.
_ELSEWHERE = {"negatives": "gerund.papers.rankgen_command"}


@cache
def application(named: str | None = None) -> typer.Typer:
    """Return the command line with all commands, or with one alone, which spares it the options of the others."""
    app = typer.Typer(
        name="gerund",
        help="Generate, embed, infill and re-rank with one language model.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    for name, kind in COMMANDS.items():
        if name == (named or name):
            module = import_module(_ELSEWHERE.get(name, f"gerund.cli.{name}"))
            if kind is None:
                app.add_typer(module.app)
            else:
                app.command(name, cls=kind)(module.command)
    return app


def __getattr__(name: str) -> Any:
    if name == "app":
        return application()
    raise AttributeError(name)


def _version(value: bool) -> None:
    if value:
        from gerund import __version__

        typer.echo(__version__)
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    del version


def main() -> None:
    """Run the command line; a user's mistake ends in one sentence on stderr and exit status 2.

    Raises:
        Exception: a defect of gerund; it is shown as it is, with a line that says so.
    """
    try:
        with warnings.catch_warnings(), printed_notes():
            warnings.showwarning = _show_warning
            try:
                application(sys.argv[1] if sys.argv[1:2] and sys.argv[1] in COMMANDS else None)()
            finally:
                sys.stdout.flush()
    except BrokenPipeError:
        # Who reads has gone: nothing to say, and nobody to say it to, nor at the end of the process.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(1)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in _TORCH:
            raise
        missing = f"this needs {error.name}, which is not installed: pip install {' '.join(_TORCH)}"
        print(f"gerund: error: {missing}", file=sys.stderr)  # noqa: T201
        sys.exit(MissingDependencyError.exit_code)
    except (GerundError, OSError, MemoryError, RecursionError, UnicodeError) as error:
        message, status = _sentence(error)
        print(f"gerund: error: {message}", file=sys.stderr)  # noqa: T201
        sys.exit(status)
    except BaseException as error:
        if is_panic(error):
            print(f"gerund: error: a library failed on what was given: {one_line(str(error))}", file=sys.stderr)  # noqa: T201
            sys.exit(InputError.exit_code)
        if not isinstance(error, Exception):
            raise
        error.add_note("This is a defect of gerund, whatever it was given: please report it with the lines above.")
        raise


def _sentence(error: Exception) -> tuple[str, int]:
    """Return what an error says to the user, and the exit status.

    Commands say themselves what is wrong. What still comes here as the system's own error was not expected there, and
    is a matter of what was given or of this machine all the same.
    """
    if isinstance(error, GerundError):
        return str(error), error.exit_code
    if isinstance(error, OSError):
        return _system_sentence(error)
    if isinstance(error, MemoryError):
        return "there is not enough memory", ResourceError.exit_code
    message = f"a text that was given is not valid Unicode: {error}"
    if isinstance(error, RecursionError):
        message = "something that was given is nested too deep"
    elif isinstance(error, UnicodeEncodeError) and not error.encoding.lower().startswith("utf"):
        message = f"the output cannot be written: its encoding, {error.encoding}, has no {error.object[error.start]!r}"
    return one_line(message), InputError.exit_code


def _system_sentence(error: OSError) -> tuple[str, int]:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO)
    reason = error.strerror or str(error) or type(error).__name__
    if full and error.filename is None:
        # Without a file's name it is a stream that refuses: what commands write to files, they name.
        # What is still in Python's buffer would be tried, and refused, once more at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return f"the output cannot be written: {reason}", ResourceError.exit_code
    message = reason if error.filename is None else f"{os.fsdecode(error.filename)}: {reason}"
    return one_line(message), (ResourceError if full else InputError).exit_code


def run() -> None:
    """Run the command line as a program of its own.

    A reader that goes away (head, less) ends it quietly, with status 1; SIGTERM ends it as Ctrl-C does, after it has
    tidied up.
    """
    # SIGPIPE stays ignored, as Python starts: the pipes to a job's processes break too, when those are ended, and the
    # signal would end the command before it has said what it kept.
    interrupt_on_termination()
    quick_imports.prepare(sys.argv)
    try:
        main()
    finally:
        quick_imports.leave()


def _show_warning(message: Warning | str, *_where: object, **_more: object) -> None:
    print(f"gerund: warning: {message}", file=sys.stderr)  # noqa: T201


if __name__ == "__main__":
    run()
