"""Runs the command line in this process, as ``gerund`` would be run."""

import io
import sys
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from unittest.mock import patch

import typer

from gerund.cli import main as entry
from gerund.models import loading

_APP = entry.app
# All commands are put together once, not for every line that is run.
_COMMANDS = typer.main.get_command(_APP)


@dataclass(frozen=True)
class Ran:
    """What a command left: its exit status and what it wrote."""

    code: int
    out: str
    err: str

    @property
    def mistake(self) -> str:
        """The one sentence of a refusal, after checking that it is one and nothing else."""
        assert (self.code, self.out) == (2, ""), (self.code, self.out, self.err)
        assert self.err.startswith("gerund: error: ")
        assert self.err.count("\n") == 1
        return self.err.removeprefix("gerund: error: ").rstrip("\n")


@contextmanager
def no_loading():
    """Let no model be read from the disk until the block ends."""
    with patch.object(loading, "read", side_effect=AssertionError("a model was loaded")):
        yield


def run_cli(*arguments: object, stdin: str | bytes = b"") -> Ran:
    """Run ``gerund ARGUMENTS`` with ``stdin`` on its standard input."""
    raw = stdin.encode() if isinstance(stdin, str) else stdin
    out, err = io.StringIO(), io.StringIO()
    code = 0
    with (
        patch.object(entry, "app", _COMMANDS if entry.app is _APP else entry.app),  # a test may have put in its own
        patch.object(sys, "argv", ["gerund", *map(str, arguments)]),
        patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw), encoding="utf-8")),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        try:
            entry.main()
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    return Ran(code, out.getvalue(), err.getvalue())
