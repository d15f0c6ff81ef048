"""What the command line does whatever the command is."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.main import get_command

from gerund.cli.main import application
from tests.cli.helpers import no_loading, run_cli


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a disk that is always full is Linux's")
@pytest.mark.parametrize("command", [["recipes"], ["--version"], ["train", "--help"]])
def test_an_output_that_cannot_be_written_is_one_sentence(command: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "gerund", *command],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")},
        )
    assert done.stderr == "gerund: error: the output cannot be written: No space left on device\n"
    assert done.returncode == 1


@pytest.mark.parametrize("command", [["recipes"], ["--version"], ["train", "--help"]])
def test_a_reader_that_goes_away_is_no_error(command: list[str]) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "gerund", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")},
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        _, err = process.communicate()
    assert (process.returncode, err) == (1, b"")


SOURCE = str(Path(__file__).parents[2] / "src")
MISTYPED = [
    ["--hlep"],
    ["embd", "x"],
    ["embed", "--nosuch"],
    ["embed", "x.txt", "-o", "x.npy", "--k", "three"],
    ["embed", "x.txt", "-o", "x.npy", "--attention", "mask0-bidr"],
    ["generate", "x", "--dtype", "float23"],
    ["export", "default", "out", "--format", "sentence-transformer"],
    ["infill", "x [blank] y", "--method", "infil"],
    ["convert", "default", "out", "--pooling", "men"],
    ["score", "a", "b", "--scorer", "pmii"],
    ["score", "a", "b", "--scorer", "./no-such-folder"],
    ["generate", "x", "--rerank", "pmii"],
    ["negatives", "x.txt", "-o", "out", "--hard", "1", "--scorer", "overlapp"],
    ["tune", "default", "--data", ".", "-o", "out", "--max-length", "0"],
    ["eval", "--tasks", "sts", "--data", ".", "-o", "out", "--plan", "mask0-bidir:k=two"],
    ["embed", "pyproject.toml", "-m", "smolm2", "-o", "x.parquet"],
    ["generate", "a", "-m", "./absent"],
    ["doctor", "pyproject.toml"],
]


@pytest.mark.slow
def test_what_is_mistyped_is_said_before_torch_is_there() -> None:
    script = """
import sys
from gerund.cli.main import main
for line in sys.argv[1:]:
    sys.argv = ["gerund", *line.split(",")]
    try:
        main()
    except SystemExit as stop:
        print(line, stop.code, *[name for name in ("torch", "transformers", "pyarrow") if name in sys.modules])
"""
    lines = [",".join(arguments) for arguments in MISTYPED]

    def mistakes(lines: list[str]) -> None:
        done = started("-c", script, *lines)
        assert done.stdout.splitlines() == [f"{line} 2" for line in lines]
        assert "Traceback" not in done.stderr

    mistakes(lines)
    for line in lines[:2]:
        assert_quick(lambda line=line: mistakes([line]))


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["--help"], ["embed", "--help"], ["serve", "--help"]], ids=" ".join)
def test_help_comes_at_once(arguments: list[str]) -> None:
    assert_quick(lambda: started("-m", "gerund", *arguments))


def started(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own."""
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": SOURCE},
    )


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
        libraries = processor_seconds(lambda: started("-c", LIBRARIES))
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
LONG_PATHS = [
    ["adapt", TOO_LONG, "--texts", "a.txt", "-o", "out"],
    ["adapt", "default", "--texts", TOO_LONG, "-o", "out"],
    ["ask", TOO_LONG, "a question"],
    ["ask", "--document", TOO_LONG, "a question"],
    ["index", TOO_LONG, "-o", "my.index"],
    ["index", "a.txt", "-o", TOO_LONG],
    ["rerank", "-f", TOO_LONG],
    ["search", TOO_LONG, "a question"],
    ["serve", TOO_LONG],
    ["serve", "--config", TOO_LONG],
    ["serve", "--api-key-file", TOO_LONG],
    ["convert", TOO_LONG, "out"],
    ["convert", "default", f"a/{TOO_LONG}"],
    ["demo", "-o", TOO_LONG],
    ["doctor", TOO_LONG],
    ["embed", TOO_LONG, "-o", "out.npy"],
    ["embed", "a.txt", "-o", f"{TOO_LONG}.npy"],
    ["eval", "--list", "--data", TOO_LONG],
    ["export", "default", TOO_LONG, "--format", "merged"],
    ["generate", "-f", TOO_LONG],
    ["generate", "x", "-o", TOO_LONG],
    ["generate", "x", "-m", TOO_LONG],
    ["infill", "-f", TOO_LONG],
    ["inspect", "default", "x", "-o", f"{TOO_LONG}.png"],
    ["mine", TOO_LONG, "-o", "out.jsonl"],
    ["mine", "a.txt", "-o", f"{TOO_LONG}.jsonl"],
    ["negatives", TOO_LONG, "-o", "out.jsonl"],
    ["negatives", "a.txt", "-o", f"{TOO_LONG}.jsonl"],
    ["recipes", TOO_LONG],
    ["score", "-f", TOO_LONG],
    ["train", TOO_LONG],
    ["train", "minimal", "--texts", TOO_LONG],
    ["tune", "default", "--data", TOO_LONG, "-o", "out"],
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


@pytest.mark.parametrize(
    "arguments",
    [
        ["embed", "a.txt", "-o", "out.npy", "--prompt", b"caf\xe9"],
        ["convert", "default", "out", "--prompt", b"caf\xe9"],
        ["generate", b"caf\xe9"],
        ["infill", b"caf\xe9 [blank]"],
        ["search", "my.index", "bread", b"caf\xe9"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_bytes_that_are_no_text(arguments: list[str | bytes], tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the cat\n")
    done = subprocess.run(
        [sys.executable, "-m", "gerund", *arguments],
        capture_output=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": SOURCE},
    )
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.startswith(b"gerund: error: ")
    assert re.search(
        rb"error: (the argument|--prompt) 'caf\\xe9[^']*' is not valid UTF-8, at character 3\n$", done.stderr
    )


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
    "a long path": '{"format": 1, "encoder": {"adapter": "' + "x" * 5000 + '"}}',
    "a long path of many parts": '{"format": 1, "encoder": {"adapter": "' + "x/" * 2500 + '"}}',
    "a long path for another job": '{"format": 1, "encoder": {}, "adapters": {"infill": "' + "x" * 5000 + '"}}',
    "half a letter in a path": '{"format": 1, "encoder": {"adapter": "\\ud800"}}',
    "half a letter in a prompt": '{"format": 1, "encoder": {"prompt": "\\ud800"}}',
    "half a letter in a prompt by name": '{"format": 1, "encoder": {"prompts": {"q": "\\ud800"}}}',
    "half a letter in a field": '{"format": 1, "encoder": {"\\ud800": 1}}',
}


@pytest.mark.parametrize("kind", SETTINGS)
@pytest.mark.parametrize("command", ["embed", "convert", "doctor", "generate"])
def test_settings_that_cannot_be(command: str, kind: str, tiny_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    (folder / "gerund.json").write_text(SETTINGS[kind])
    texts = tmp_path / "a.txt"
    texts.write_text("the cat\n")
    arguments = {
        "embed": [texts, "-o", tmp_path / "out.npy", "-m", folder],
        "convert": [folder, tmp_path / "out"],
        "doctor": [folder],
        "generate": ["x", "-m", folder, "--max-new-tokens", 1],
    }[command]
    ran = run_cli(command, *arguments)
    assert ran.code == 2
    sentence = ran.err.splitlines()[-1] if ran.err else ran.out
    assert len(sentence) <= 320
    assert "Traceback" not in ran.err + ran.out


@pytest.mark.parametrize(
    ("command", "option", "text"),
    [
        ("search", "--model", "the index's own"),
        ("index", "--model", "for a new index the bundled model"),
        ("index", "--transform", "truncate-128 keeps"),
        ("export", "--dtype", "Type of the weights"),
        ("infill", "--adapter", "active while the model infills"),
        ("generate", "--temperature", "[default: 0, or 1 with --top-p"),
        ("generate", "--samples", "[default with --rank: 20]"),
        ("generate", "--column", "[default: prompt]"),
    ],
)
def test_help_says_what_an_option_means_to_this_command(command: str, option: str, text: str) -> None:
    parameters = get_command(application(command)).commands[command].params
    [found] = [one for one in parameters if option in one.opts]
    assert text in str(getattr(found, "help", ""))
