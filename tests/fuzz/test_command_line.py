"""Two thousand command lines with any arguments: each works or ends in one sentence, never in a traceback."""

import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, seed
from hypothesis import strategies as st
from typer.main import get_command

import gerund
from gerund.cli.main import app
from gerund.retrieval.question_answering import NOTHING
from tests.cli.helpers import ENVIRONMENT, run_cli
from tests.fuzz.outcome import fuzz, outcome
from tests.fuzz.values import SETTINGS, TEXTS, spoiled_json
from tests.tiny import save_tiny

PARTS = 40
COMMAND_LINES = 50  # in each part
ENOUGH_LINES = 500  # of which a share can be expected to work
PROCESSES = 3
SEED = 20261124
STATUSES = (0, 1, 2)

# What a line of each command begins with; {model}, {file} and {out} are put in. What takes minutes when all is well is
# only ever given what it must refuse.
BEGINNINGS = {
    "adapt": ["{model} --texts {file} -o {out} --dry-run", "{model} --texts {file} -o {out} --steps 1"],
    "ask": ["my.index TEXT -m {model}", "--document {file} TEXT -m {model} --max-new-tokens 2 --cache-size 0"],
    "chat": ["{model} --max-new-tokens 2", "-m {model}"],
    "convert": ["{model} {out}"],
    "doctor": ["{model}"],
    "embed": ["{file} -o {out} -m {model}"],
    "eval": ["{model} --tasks sts --data {file} -o {out} --no-pictures", "--list --data {file}"],
    "export": ["{model} {out} --format merged", "{model} {out} --format sentence-transformers"],
    "generate": ["TEXT -m {model} --max-new-tokens 2", "-f {file} -m {model} --max-new-tokens 2 -o {out}"],
    "index": ["{file} -o {out} -m {model}", "{file} -o my.index"],
    "infill": ["TEXT[blank]x -m {model} --max-tokens 2", "-f {file} -m {model} --max-tokens 2 -o {out}"],
    "inspect": ["{model} TEXT --json", "{model} -f {file} -o {out}"],
    "mine": ["{file} -o {out} --workers 1"],
    "models": ["", "--json", "get TEXT"],
    "negatives": ["{file} -o {out} -m {model} --generate 1"],
    "recipes": ["", "minimal", "TEXT"],
    "rerank": ["TEXT a b -m {model}", "-f {file} -m {model} -o {out}"],
    "score": ["TEXT a b -m {model}", "-f {file} -m {model} -o {out}"],
    "search": ["my.index TEXT", "my.index - -m {model} --mode words", "{out} TEXT"],
    "train": ["{file} --dry-run", "TEXT --texts {file}"],
    "tune": ["{model} --data {file} -o {out} --tasks sts"],
}
# The first two go on until they are stopped, or for minutes; the last would upload.
LASTING = {"demo", "serve", "push", "mcp"}
PROSE = (
    "The old man looked at the sea. He had no boat, and the wind was cold.\n\nNobody spoke to him for a long time.\n"
    * 20
)
FILES: dict[str, bytes] = {
    "a.txt": b"the cat\na dog\n",
    "b.txt": PROSE.encode(),
    "empty.txt": b"",
    "blank.txt": b"\n \n\n",
    "latin.txt": b"caf\xe9\n",
    "nul.txt": b"a\0b\n",
    "lines.txt": "a\u2028b\x85c\n".encode(),
    "a.jsonl": b'{"text": "a", "prompt": "b", "id": 1}\n' * 3,
    "deep.jsonl": b'{"text": ' + b"[" * 100_000 + b"\n",
    "half.jsonl": b'{"text": "\\ud800", "prompt": "\\ud800"}\n',
    "bad.jsonl": b"{\n",
    "list.jsonl": b"[1]\n5\nnull\n",
    "numbers.jsonl": b'{"text": 5, "prompt": null, "prefix": "a", "continuations": 5}\n',
    "good.jsonl": b'{"prefix": "a", "continuations": [" b", " c"], "text": "a [blank] b", "prompt": "a"}\n',
    "a.csv": b'text,prompt\na,b\n"c',
    "wide.csv": b"a,b,c\n1,2,3,4\n",
    "a.tsv": b"text\tid\na\t1\n",
    "a.parquet": b"PAR1no",
    "a.npy": b"\x93NUMPY",
    "a.gz": b"\x1f\x8bno",
    "a.jsonl.gz": b"no",
    "a.json": b"{}",
    "deep.yaml": b"[" * 100_000,
    "a.yaml": b"a: b\n",
    "bomb.yaml": b"a: &a [x]\nb: &b [*a, *a]\nc: [*b, *b]\n",
    "tag.yaml": b"!!python/object/apply:os.getcwd []\n",
    "a.png": b"",
    "a.xz": b"\xfd7zXZ",
    "recipe.yaml": b"model: {model: 5}\noutput: x\n",
}
OUTPUTS = [
    "out.jsonl", "out.npy", "out.parquet", "out.png", "out", "out/deeper/out.jsonl", "a.txt", "a.jsonl",
    "/proc/x.jsonl", "/proc/x", "/dev/null/x.npy", "/proc/x.png", "x" * 300, "y" * 251 + ".npy", "z/" * 3000 + "x", ".",
    "é" * 130, "", "-", "folder",
]  # fmt: skip
WORDS = [text for text in TEXTS if "\0" not in text and text != "~"]
MISTAKES = ["--nosuch", "-Z", "--", "-", "--k", "--json=5", "--force", "--json", "--dtype", "nosuch"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models, files and rubbish."""
    place = tmp_path_factory.mktemp("fuzz") / "within"
    place.mkdir()
    for name, data in FILES.items():
        (place / name).write_bytes(data)
    (place / "folder").mkdir()
    (place / "folder" / "a.txt").write_text("the cat\n")
    rng = random.Random(SEED)
    save_tiny(place / "model", num_hidden_layers=2)
    chunking = gerund.Chunking(tokens=16)
    gerund.open_index(place / "my.index", gerund.load(place / "model"), chunking=chunking).add(place / "b.txt")
    for number in range(12):
        folder = save_tiny(place / f"model{number}", num_hidden_layers=2)
        spoil(folder, rng)
    return place


def spoil(folder: Path, rng: random.Random) -> None:
    """Change something in one of a model's files of JSON."""
    (folder / "gerund.json").write_text(json.dumps(SETTINGS))
    path = folder / rng.choice(
        ["gerund.json", "gerund.json", "config.json", "generation_config.json", "tokenizer_config.json"]
    )
    text = json.dumps(spoiled_json(rng, json.loads(path.read_text())))
    path.write_text(rng.choice([text, text, text, text[: len(text) // 2], "[" * 200_000]))


ENDINGS = {"embed": ".npy", "inspect": ".png", "convert": "", "export": "", "eval": "", "tune": ""}
OPTIONS = {name: command.params for name, command in get_command(app).commands.items()}


def mostly(usual: st.SearchStrategy[str], others: list[str]) -> st.SearchStrategy[str]:
    return st.integers(0, 3).flatmap(lambda number: usual if number else st.sampled_from(others))


MODELS = mostly(
    st.just("model"), [*(f"model{n}" for n in range(12)), "nosuch", "./nosuch", "some/model", "a.txt", "x" * 300, ""]
)
INPUTS = mostly(
    st.sampled_from(["good.jsonl", "a.txt", "b.txt"]), [*FILES, "nosuch.txt", "folder", "model", "-", "x" * 300, ""]
)
PATHS = INPUTS | MODELS | st.sampled_from(OUTPUTS)
OPTION_VALUES = st.sampled_from(["1", "2", "0", "-1", "0.5", "2.5", "1e400", "nan", str(10**30), str(2**63), *WORDS])


@st.composite
def options_of(draw: st.DrawFn, command: str) -> list[str]:
    """Return an option with a value that may be wrong."""
    param: Any = draw(st.sampled_from(OPTIONS[command]))
    if param.param_type_name != "option" or param.name in ("help", "watch"):
        return []
    name = draw(st.sampled_from(param.opts))
    takes_path = param.name in ("file", "data", "output", "texts", "adapter", "model")
    return [name] if param.is_flag else [name, draw(PATHS if takes_path else OPTION_VALUES)]


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    """Return the arguments of a command: a usual beginning, up to three options, and perhaps a mistake."""
    command = draw(st.sampled_from(sorted(BEGINNINGS)))
    new = st.uuids().map(lambda number: f"new{number.hex[:12]}{ENDINGS.get(command, '.jsonl')}")
    arguments = [command]
    for word in draw(st.sampled_from(BEGINNINGS[command])).split():
        filled = word.format(model=draw(MODELS), file=draw(INPUTS), out=draw(mostly(new, OUTPUTS)))
        arguments.append(filled.replace("TEXT", draw(st.sampled_from(WORDS))))
    for option in draw(st.just([]) | st.lists(options_of(command), max_size=3)):
        arguments += option
    mistake = draw(st.integers(0, 19))
    if mistake == 0 and command != "doctor":  # which without a model examines the bundled model for long
        arguments.pop(draw(st.integers(0, len(arguments) - 1)))
    elif mistake < 3:
        place = draw(st.integers(0, len(arguments)))
        arguments.insert(place, draw(st.sampled_from([*MISTAKES, *WORDS])))
    return arguments


def judge(code: int, said: str) -> None:
    assert code in STATUSES, f"status {code}: {said[-200:]!r}"
    assert "Traceback" not in said, said[-400:]
    if code:
        errors = [line for line in said.splitlines() if line.startswith("gerund: error: ")]
        assert errors or any(word in said for word in ("Usage:", " Error ", " Commands ", NOTHING)), (
            f"status {code} and nothing said: {said[-200:]!r}"
        )
        for line in errors:
            assert len(line) <= 320, f"no sentence: {line!r}"


def test_every_command_that_ends_is_among_them() -> None:
    assert set(get_command(app).commands) == BEGINNINGS.keys() | LASTING


def run_lines(lines: int, number: int, run: Callable[[list[str], random.Random], None]) -> None:
    @seed(SEED + number)
    @fuzz(lines)
    @given(command_lines(), st.randoms(use_true_random=False))
    def check(arguments: list[str], rng: random.Random) -> None:
        outcome(lambda: run(arguments, rng))

    check()


@pytest.fixture(scope="module")
def codes() -> Iterator[Counter[int]]:
    """How many command lines of all parts ended with each status; of many, some work and many are refused."""
    codes: Counter[int] = Counter()
    yield codes
    if (lines := codes.total()) >= ENOUGH_LINES:
        assert codes[0] > lines / 40
        assert codes[2] > lines / 4


@pytest.mark.sweep(quick=0, check=1)
@pytest.mark.parametrize("part", range(PARTS))
def test_command_lines_with_any_arguments(
    place: Path, monkeypatch: pytest.MonkeyPatch, codes: Counter[int], part: int
) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setenv("HOME", str(place))

    def run(arguments: list[str], rng: random.Random) -> None:
        given = rng.choice([b"", b"the cat\na dog\n", b"caf\xe9", b'{"text": "a", "prompt": "a"}\n'])
        ran = run_cli(*arguments, stdin=given)
        judge(ran.code, ran.err or ran.out)
        codes[ran.code] += 1

    run_lines(COMMAND_LINES, part, run)


@pytest.mark.sweep(quick=0, check=1)
@pytest.mark.parametrize("part", range(8))
def test_the_same_as_processes_of_their_own(place: Path, part: int) -> None:
    """Arguments are bytes there, and texts are written to a real standard output."""
    environment = {**ENVIRONMENT, "HOME": str(place)}

    def run(arguments: list[str], rng: random.Random) -> None:
        given = [
            os.fsencode(argument) if argument.isprintable() else argument.encode("utf-8", "surrogatepass")
            for argument in arguments
        ]
        command = [sys.executable, "-m", "gerund", *given]
        extra = rng.choice([{}, {"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C"}])
        done = subprocess.run(command, capture_output=True, cwd=place, env=environment | extra, input=b"", check=False)
        judge(done.returncode, (done.stderr or done.stdout).decode("utf-8", "replace"))

    run_lines(PROCESSES, PARTS + part, run)
