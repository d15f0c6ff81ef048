"""Every help says all that was written for it."""

import inspect
import re
from typing import get_args
from unittest.mock import patch

import pytest
import typer
from typer import core

from gerund.cli.main import app
from gerund.cli.model_options import OPTIONS
from gerund.data.corpus import FORMATS
from tests.cli.helpers import run_cli

COMMANDS = typer.main.get_command(app).commands
# Where an option means less than in other commands, and says so.
SPECIAL_HELPS = {
    ("adapt", "device"),
    ("adapt", "dtype"),
    ("ask", "model"),
    ("index", "model"),
    ("index", "transform"),
    ("search", "model"),
    ("infill", "adapter"),
    ("negatives", "model"),
}


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


def test_what_says_which_model_comes_from_one_table_and_goes_on_as_a_spec():
    """Whatever names a field of a spec is an option of the table; the command itself is handed the spec alone."""
    with_model = {
        name: command for name, command in COMMANDS.items() if any(one.name == "device" for one in command.params)
    }
    names = (
        "adapt ask chat demo doctor embed eval generate index infill inspect negatives rerank score search serve tune"
    )
    assert " ".join(with_model) == names
    others = {("generate", "prompt"), ("demo", "prompt"), ("embed", "prompt"), ("tune", "pooling"), ("score", "scorer")}
    others |= {("negatives", "scorer"), ("eval", "sample"), ("inspect", "layers"), ("tune", "sample")}
    others |= {("ask", "k"), ("search", "k")}  # how many are found
    for name, command in with_model.items():
        own = inspect.signature(inspect.unwrap(command.callback)).parameters
        assert "spec" in own, name
        assert {(name, field) for field in own if field in OPTIONS} <= others
        for param in command.params:
            if param.name in OPTIONS and (name, param.name) not in others:
                _, option = get_args(OPTIONS["MODEL" if isinstance(param, core.TyperArgument) else param.name])
                assert param.help == option.help or (name, param.name) in SPECIAL_HELPS


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


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "a cat"],
        ["infill", "a [blank] cat"],
        ["rerank", "a cat", "a dog"],
        ["score", "a cat", " sat", "--scorer", "overlap"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_command_that_writes_at_its_end_says_that_nothing_is_there(arguments, tmp_path):
    out = tmp_path / "out.jsonl"
    told = f"gerund: interrupted; {out} was not written, and nothing of it is kept"
    with patch("gerund.entry.load", side_effect=KeyboardInterrupt):
        ran = run_cli(*arguments, "-o", out)
        assert ran.code == 130
        assert ran.err.count(told) == 1
        assert not out.exists()
        assert "was not written" not in run_cli(*arguments).err
