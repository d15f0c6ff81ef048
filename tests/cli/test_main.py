"""What the command line does whatever the command is, what it imports; every help says all that was written for it."""

import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import PIPE
from unittest.mock import patch

import pytest
import typer
from typer.main import get_command

from gerund.cli.main import app, application
from gerund.cli.options import OPTIONS
from gerund.data.corpus import FORMATS
from gerund.settings.fields import help_of, settings_of
from gerund.settings.model_spec import HELP
from gerund.settings.sampling import Sampling
from tests.cli.helpers import ENVIRONMENT, no_loading, run_cli, run_python


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a disk that is always full is Linux's")
@pytest.mark.parametrize("command", [["--version"], ["train", "--help"]])
def test_an_output_that_cannot_be_written_is_one_sentence(command: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        done = run_python("-m", "gerund", *command, check=False, capture_output=False, stdout=full, stderr=PIPE)
    assert done.stderr == "gerund: error: the output cannot be written: No space left on device\n"
    assert done.returncode == 1


@pytest.mark.skipif(os.name != "posix", reason="signals are sent as POSIX has them")
def test_an_interruption_is_quiet_while_libraries_are_imported() -> None:
    program = """
import builtins, signal
from gerund.__main__ import run

plain = builtins.__import__

def interrupted(name, *more):
    if name == "typer":
        signal.raise_signal(signal.SIGINT)
    return plain(name, *more)

builtins.__import__ = interrupted
run()
"""
    done = run_python("-c", program, check=False)
    assert (done.returncode, done.stderr) == (130, "")


def test_a_reader_that_goes_away_is_no_error() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "gerund", "recipes"], stdout=PIPE, stderr=PIPE, env=ENVIRONMENT
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        _, err = process.communicate()
    assert (process.returncode, err) == (1, b"")


# Mistakes that are told without the slow libraries, and what is said of each; the files are those of the test below.
MISTYPED = {
    "--hlep": "No such option: --hlep",
    "embd x": "embd",
    "embed x.txt -o x.npy --k three": "'--k'",
    "embed x.txt -o x.npy --attention mask0-bidr": "mask0-bidir",
    "generate x --dtype float23": "float32",
    "export default out --format sentence-transformer": "sentence-transformers",
    "infill 'x [blank] y' --method infil": "infill",
    "score a b --scorer pmii": "pmi",
    "negatives x.txt -o out --hard 1 --scorer overlapp": "overlap",
    "eval --tasks sts --data . -o out --plan mask0-bidir:k=two": "two",
    "embed notes/a.txt -m smolm2 -o x.parquet": "smollm2",
    "generate a -m ./absent": "./absent",
    "doctor notes/a.txt": "a.txt",
    "tune default -o out --data nowhere": "nowhere",
    "tune default -o out --data . --plans mask0-bdir": "mask0-bidir",
    "tune default -o out --data . --methods skip": "skips",
    "tune default -o out --data . --budget 1": "budget",
}
# The same of files, for which some need pyarrow.
WRONG_FILES = {
    "adapt -o out --texts nowhere": "nowhere: no such file or folder",
    "adapt -o out --texts empty": "empty: there is no file to read",
    "adapt -o out --texts notes --minutes 0": "minutes=0 leaves no time to train",
    "adapt -o out --texts notes --questions q.jsonl": "q.jsonl: no such file",
    "adapt -o out --texts notes --recipe gur-adopt": "gur-adopt: no such recipe",
    "adapt -o out --texts notes --recipe my.yaml": "my.yaml: no such file",
    "ask --document nowhere.txt Why?": "nowhere.txt: no such file",
    "ask nowhere Why?": "nowhere: no such index; gerund index PATHS -o nowhere makes one",
    "rerank -f nowhere.jsonl": "nowhere.jsonl",
    "rerank -f bad.jsonl": "bad.jsonl, line 1",
    "rerank -f blank.jsonl": "blank.jsonl, line 1: the query is empty",
    "rerank a b --by magic": "unknown measure of relevance 'magic'",
    "serve --index nowhere": "nowhere: no such index; gerund index PATHS -o nowhere makes one",
    "serve --index notes": "notes is not an index: it contains a.txt; an index is a folder of its own",
    "search notes x": "notes is not an index: it contains a.txt; an index is a folder of its own",
}
EARLY = """
import io, json, shlex, sys
from contextlib import redirect_stderr
from gerund.cli.main import main
sys.modules["torch"] = None  # a command that looks at its files too late fails
for line in sys.argv[1:]:
    sys.argv = ["gerund", *shlex.split(line)]
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            main()
    except SystemExit as end:
        print(json.dumps([end.code, said.getvalue(), "transformers" in sys.modules, "pyarrow" in sys.modules]))
"""


@pytest.mark.slow
def test_what_is_wrong_is_said_before_torch_is_there(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("A text.")
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.jsonl").write_text('{"query": "a"}\n')
    (tmp_path / "blank.jsonl").write_text('{"query": " ", "documents": ["a"]}\n')
    wanted = {**MISTYPED, **WRONG_FILES}
    found = run_python("-c", EARLY, *wanted, cwd=tmp_path).stdout.splitlines()
    assert len(found) == len(wanted)
    for (line, sentence), told in zip(wanted.items(), found, strict=True):
        code, said, *heavy = json.loads(told)
        assert code == 2, (line, said)
        assert sentence in said, line
        assert said.count("\n") == 1 or said.startswith("Usage: "), said
        assert not any(heavy[: 1 if line in WRONG_FILES else 2]), line
    assert not (tmp_path / "out").exists()
    for line in list(MISTYPED)[:2]:
        assert_quick(lambda line=line: run_python("-c", EARLY, line))


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["--help"], ["embed", "--help"], ["serve", "--help"]], ids=" ".join)
def test_help_comes_at_once(arguments: list[str]) -> None:
    assert_quick(lambda: run_python("-m", "gerund", *arguments))


def assert_quick(work: Callable[[], object]) -> None:
    """Check that what starts processes takes less than 0.9 seconds of a processor.

    Where the libraries alone, which draw the help and read the options, take most of that because the machine is slow
    or busy, less than 3.2 times what they take right after it is enough.
    """
    tried = []
    for _ in range(5):
        seconds = processor_seconds(work)
        if seconds < 0.9:
            return
        libraries = processor_seconds(lambda: run_python("-c", LIBRARIES))
        tried.append((seconds, libraries))
        if seconds < 3.2 * libraries:
            return
    raise AssertionError(tried)


LIBRARIES = "import typer, typer.rich_utils, rich.markdown, pydantic; pydantic.TypeAdapter, pydantic.BaseModel"


def processor_seconds(work: Callable[[], object]) -> float:
    """Return what the processes that a piece of work starts and waits for took."""
    before = os.times()
    work()
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


WHOLE_SYSTEM = "these are the files of the whole system; name a folder of texts"


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="/proc, where nobody may write, is Linux's")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["mine", "/", "-o", "out.jsonl"], f"/: {WHOLE_SYSTEM}"),
        (["train", "gur-adapt", "--texts", "/"], f"/: {WHOLE_SYSTEM}"),
        (["adapt", "default", "--texts", "/", "-o", "out"], "the output out lies in the texts' folder /"),
        (["negatives", "a.txt", "-o", "/proc/x"], "cannot write /proc/x: "),
        (["negatives", "a.txt", "-o", "/dev/null/x"], "cannot write /dev/null/x: Not a directory"),
        (["negatives", "a.txt", "-o", "a.txt"], "a.txt is a file, and a folder is to be written; choose another name"),
        (["mine", "a.txt", "-o", "/proc/x.jsonl"], "cannot write /proc/x.jsonl: "),
        (["embed", "a.txt", "-o", "/proc/x.npy"], "cannot write /proc/x.npy: "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_read_or_written_is_one_sentence(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("the cat\na dog\n")
    with no_loading():
        ran = run_cli(*arguments)
    assert (ran.code in (1, 2), ran.out) == (True, "")
    assert ran.err.startswith(f"gerund: error: {said}")
    assert ran.err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt"]


TOO_LONG = "x" * 300
# Of every kind: a folder and a file to write, a model, a file or a folder to read, a name that may be a file.
LONG_PATHS = [
    ["convert", "default", f"a/{TOO_LONG}"],
    ["mine", "a.txt", "-o", f"{TOO_LONG}.jsonl"],
    ["generate", "-f", TOO_LONG],
    ["index", TOO_LONG, "-o", "my.index"],
    ["search", TOO_LONG, "a question"],
    ["serve", "--config", TOO_LONG],
    ["recipes", TOO_LONG],
    ["train", "minimal", "--texts", TOO_LONG],
]


@pytest.mark.parametrize("arguments", LONG_PATHS, ids=lambda arguments: f"{arguments[0]}-{len(arguments)}")
def test_a_path_that_no_file_system_holds(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("the cat\n")
    mistake = run_cli(*arguments).mistake
    assert len(mistake) <= 300
    assert "where file systems allow 255" in mistake or "File name too long" in mistake or "no such recipe" in mistake


@pytest.mark.parametrize("arguments", [["convert", "default", "out", "--prompt"], ["search", "my.index", "bread"]])
def test_bytes_that_are_no_text(arguments: list[str]) -> None:
    done = run_python("-m", "gerund", *arguments, b"caf\xe9", check=False)
    assert (done.returncode, done.stdout) == (2, "")
    called = "--prompt" if "--prompt" in arguments else "the argument"
    assert done.stderr == f"gerund: error: {called} 'caf\\xe9' is not valid UTF-8, at character 3\n"


@pytest.mark.slow
def test_a_file_whose_name_is_no_text_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    name = os.fsdecode(b"caf\xe9.jsonl")
    Path(name).write_text("{\n")
    mistake = run_cli("generate", "-f", name).mistake
    assert mistake.startswith("caf\\xe9.jsonl, line 1")


@pytest.mark.parametrize(
    ("error", "said", "code"),
    [
        (OSError(36, "File name too long", "x" * 300), "File name too long", 2),
        (PermissionError(13, "Permission denied", "/some/where"), "/some/where: Permission denied", 2),
        (OSError(28, "No space left on device", "/x"), "/x: No space left on device", 1),
        (OSError("said\nso"), "said so", 2),
        (MemoryError(), "there is not enough memory", 1),
        (RecursionError("maximum recursion depth exceeded"), "something that was given is nested too deep", 2),
        (
            UnicodeEncodeError("ascii", "é", 0, 1, "no"),
            "the output cannot be written: its encoding, ascii, has no 'é'",
            2,
        ),
        (UnicodeEncodeError("utf-8", "\ud800", 0, 1, "no"), "a text that was given is not valid Unicode", 2),
    ],
)
def test_what_the_system_refuses_is_one_sentence(error, said, code, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr("gerund.cli.main.application", lambda *_named: fail)
    ran = run_cli()
    assert ran.code == code
    assert ran.err.startswith("gerund: error: ")
    assert said in ran.err
    assert ran.err.count("\n") == 1
    assert len(ran.err) <= 320


def test_a_defect_is_shown_and_called_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("gerund.cli.main.application", lambda *_named: fail)
    with pytest.raises(ZeroDivisionError) as caught:
        run_cli()
    assert caught.value.__notes__ == [
        "This is a defect of gerund, whatever it was given: please report it with the lines above."
    ]


DEEP = "[" * 200_000
SETTINGS = {
    "nested": DEEP,
    "nested inside": '{"format": 1, "encoder": {"prompts": ' + DEEP + "}}",
    "a NUL in a path": '{"format": 1, "encoder": {"adapter": "a\\u0000b"}}',
    "a long path for another job": '{"format": 1, "encoder": {}, "adapters": {"infill": "' + "x" * 5000 + '"}}',
    "half a letter in a path": '{"format": 1, "encoder": {"adapter": "\\ud800"}}',
    "half a letter in a prompt": '{"format": 1, "encoder": {"prompt": "\\ud800"}}',
}


@pytest.mark.parametrize("kind", SETTINGS)
def test_settings_that_cannot_be(kind: str, tiny_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    (folder / "gerund.json").write_text(SETTINGS[kind])
    assert len(run_cli("doctor", folder).mistake) <= 305


@pytest.mark.parametrize(
    ("command", "option", "text"),
    [
        ("search", "--model", "the index's own"),
        ("index", "--model", "for a new index the bundled model"),
        ("index", "--transform", "truncate-128 keeps"),
        ("export", "--dtype", "Type of the weights"),
        ("infill", "--adapter", "active while the model infills"),
        ("generate", "--samples", "[default with --rank: 20]"),
        ("generate", "--column", "[default: prompt]"),
    ],
)
def test_help_says_what_an_option_means_to_this_command(command: str, option: str, text: str) -> None:
    [found] = [one for one in get_command(application(command)).commands[command].params if option in one.opts]
    assert text in str(getattr(found, "help", ""))


# ------------------------------------------------------------------------------------------------------------ the helps

COMMANDS = get_command(app).commands


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
                declared, _, _ = HELP[param.name].partition(
                    "; default" if param.param_type_name == "argument" else "\0"
                )
                assert param.help.removesuffix(".") == declared.removesuffix(".")
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


@pytest.mark.parametrize("has_rich", [True, False])
def test_the_usual_gap_is_shown_as_it_is_typed(monkeypatch, has_rich):
    monkeypatch.setattr(typer.core, "HAS_RICH", has_rich, raising=False)
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


SCRIPT = """
import sys
from gerund.cli import quick_imports
quick_imports.prepare(["gerund", "search"])
import gerund
lm = gerund.load()
vector = lm.encode("the cat")
left_out = ("scipy", "pandas", "sympy.core", "torch._dynamo.eval_frame", "torch.distributed.tensor",
            "gerund.exporting.gguf")
print([name for name in left_out if name in sys.modules])
import torch
from torch._dynamo.exc import Unsupported
import torch.distributed.tensor
assert isinstance(sys.modules["torch._dynamo"].config, object) and torch._dynamo.exc.Unsupported is Unsupported
assert type(torch._dynamo).__name__ == "module"
assert torch.distributed.tensor.DTensor.__module__ != "gerund.cli.quick_imports"
import scipy.optimize
import pandas
assert pandas.DataFrame({"a": [1]}).shape == (1, 1)
with torch.device("meta"):
    assert torch.arange(2).tolist() == [0, 1] and torch.arange(2, device="meta").device.type == "meta"
double = torch.compile(lambda x: 2 * x, backend="eager")
assert double(torch.ones(2)).tolist() == [2, 2]
assert (lm.encode("the cat") == vector).all()
"""


@pytest.mark.slow
def test_what_is_left_out_comes_when_it_is_asked_for(bundled) -> None:
    assert run_python("-c", SCRIPT).stdout == "[]\n"


def test_the_list_of_models_is_what_transformers_reads() -> None:
    from transformers.models import __path__ as folder
    from transformers.utils.import_utils import create_import_structure_from_path

    from gerund.cli.quick_imports import _lists, _structure

    structure = create_import_structure_from_path(folder[0])
    assert _structure(json.loads(json.dumps(_lists(structure)))) == structure
    assert create_import_structure_from_path(f"{folder[0]}/__init__.py") == structure
