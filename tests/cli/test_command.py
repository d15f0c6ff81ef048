"""Every help says all that was written for it."""

import inspect
import re

import pytest
import typer

from gerund.cli.main import app
from gerund.data.corpus import FORMATS
from tests.cli.helpers import run_cli

COMMANDS = typer.main.get_command(app).commands


def printed(name, monkeypatch):
    """Return what the help of a command says, without white space and frames, which depend on the width."""
    monkeypatch.setenv("COLUMNS", "300")
    ran = run_cli(name, "--help")
    assert ran.code == 0
    return re.sub(r"[\s│╭╮╰╯─]", "", ran.out)


@pytest.mark.parametrize("name", COMMANDS)
def test_brackets_are_printed(name, monkeypatch):
    command = COMMANDS[name]
    written = [inspect.cleandoc(command.help), *(getattr(param, "help", None) or "" for param in command.params)]
    text = printed(name, monkeypatch)
    for line in (line for part in written for line in part.splitlines() if "[" in line):
        assert re.sub(r"\s", "", line) in text


def test_the_usual_gap_is_among_them(monkeypatch):
    assert '"Theoldmanlookedat[blank]andwenthome."' in printed("infill", monkeypatch)


def test_without_rich_nothing_is_escaped(monkeypatch):
    monkeypatch.setattr(typer.core, "HAS_RICH", False, raising=False)
    assert '"Theoldmanlookedat[blank]andwenthome."' in printed("infill", monkeypatch)


@pytest.mark.parametrize("name", ["mine", "negatives"])
def test_every_format_of_documents_is_named(name, monkeypatch):
    text = printed(name, monkeypatch)
    for part in {part for ending in FORMATS for part in ending.removeprefix(".").split(".")}:
        assert f".{part}" in text
