"""Every help says all that was written for it."""

import inspect
import re
from unittest.mock import patch

import pytest
import typer

from gerund.cli.main import app
from gerund.cli.options import OPTIONS
from gerund.data.corpus import FORMATS
from gerund.settings.fields import help_of, settings_of
from gerund.settings.model_spec import HELP
from gerund.settings.sampling import Sampling
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


def test_options_for_settings_are_made_from_their_declarations():
    """Every command with settings of a model has options with their help, and is handed a spec alone."""
    with_model = {
        name: command for name, command in COMMANDS.items() if any(one.name == "device" for one in command.params)
    }
    names = (
        "adapt ask chat demo doctor embed eval generate index infill inspect mcp negatives rerank score search serve"
    )
    assert " ".join(with_model) == f"{names} tune"
    others = {("generate", "prompt"), ("demo", "prompt"), ("embed", "prompt"), ("tune", "pooling"), ("score", "scorer")}
    others |= {("negatives", "scorer"), ("inspect", "layers"), ("ask", "k"), ("search", "k")}
    others |= {(name, "model") for name in ("ask", "search", "index", "mcp", "negatives")}
    others |= {("index", "transform"), ("infill", "adapter"), ("export", "dtype"), ("adapt", "dtype")}
    others |= {("adapt", "device"), ("adapt", "reranker")}
    for name, command in COMMANDS.items():
        taken = inspect.signature(inspect.unwrap(command.callback)).parameters
        assert ("spec" in taken) == (name in {*with_model, "convert", "export"}), name
        for param in command.params:
            if param.name in OPTIONS and (name, param.name) not in others:
                assert param.help == HELP[param.name]
                assert param.name not in taken or (name, param.name) in {("eval", "sample"), ("tune", "sample")}


def test_options_for_sampling_are_made_from_their_declarations():
    helps = help_of(settings_of(Sampling))
    for name in ("generate", "chat", "infill", "ask"):
        taken = inspect.signature(inspect.unwrap(COMMANDS[name].callback)).parameters
        assert not set(taken) & set(helps)
        shown = {param.name: param.help for param in COMMANDS[name].params if param.name in helps}
        assert len(shown) >= 3
        assert all(helps[option] in text for option, text in shown.items())
        assert shown["temperature"].endswith("[default: 0, or 1 with --top-p and the like]")


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
    with patch("gerund.entry.open_model", side_effect=KeyboardInterrupt):
        ran = run_cli(*arguments, "-o", out)
        assert ran.code == 130
        assert ran.err.count(told) == 1
        assert not out.exists()
        assert "was not written" not in run_cli(*arguments).err


def test_a_model_in_front_of_the_prompt_is_told_where_models_go():
    ran = run_cli("generate", "smollm2", "Once upon a time")
    assert ran.code == 2
    assert "-m smollm2" in re.sub(r"[\s│]+", " ", ran.err)
    assert "-m smollm2" not in run_cli("models", "list", "all", "of", "them").err
