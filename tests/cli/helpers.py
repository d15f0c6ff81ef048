"""Runs the command line: in this process, as ``gerund`` would be run, or in one of its own."""

import io
import os
import subprocess
import sys
from collections.abc import Iterable
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import typer

from gerund.cli import main as entry
from gerund.models import loading

# Processes of their own take gerund from here, and compute in one thread.
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2] / "src"), "OMP_NUM_THREADS": "1"}
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


class _Terminal(io.TextIOWrapper):
    def isatty(self) -> bool:
        return True


def run_python(*arguments: str | bytes | Path, check: bool = True, **settings: Any) -> subprocess.CompletedProcess[str]:
    """Run ``python ARGUMENTS`` as a process of its own, which is to succeed unless ``check`` is false."""
    usual = {"capture_output": True, "text": True, "env": ENVIRONMENT, "timeout": 200}
    return subprocess.run([sys.executable, *arguments], check=check, **{**usual, **settings})


def run_cli(*arguments: object, stdin: str | bytes = b"", typed: Iterable[str] | None = None) -> Ran:
    """Run ``gerund ARGUMENTS`` with ``stdin`` on its standard input, or at a terminal with lines that are typed."""
    raw = stdin.encode() if isinstance(stdin, str) else stdin
    kind = io.TextIOWrapper if typed is None else _Terminal
    keyboard = nullcontext() if typed is None else patch("builtins.input", side_effect=[*typed, EOFError])
    out, err = io.StringIO(), io.StringIO()
    code = 0
    with (
        patch.object(entry, "app", _COMMANDS if entry.app is _APP else entry.app),  # a test may have put in its own
        patch.object(sys, "argv", ["gerund", *map(str, arguments)]),
        patch.object(sys, "stdin", kind(io.BytesIO(raw), encoding="utf-8")),
        keyboard,
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        try:
            entry.main()
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    return Ran(code, out.getvalue(), err.getvalue())
