"""Two thousand command lines with anything at all: each works or ends in one sentence, and never in a traceback."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

import gerund
from gerund.cli.main import app
from gerund.retrieval.question_answering import NOTHING
from tests.cli.helpers import run_cli
from tests.fuzz.outcome import Ledger
from tests.fuzz.values import SETTINGS, TEXTS, spoiled_json
from tests.tiny import save_tiny

PARTS = 10
COMMAND_LINES = 200  # in each part
PROCESSES = 6
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
# These two go on until they are stopped, or for minutes.
LASTING = {"demo", "serve"}
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
    "out.jsonl",
    "out.npy",
    "out.parquet",
    "out.png",
    "out",
    "out/deeper/out.jsonl",
    "a.txt",
    "a.jsonl",
    "/proc/x.jsonl",
    "/proc/x",
    "/dev/null/x.npy",
    "/proc/x.png",
    "x" * 300,
    "y" * 251 + ".npy",
    "z/" * 3000 + "x",
    ".",
    "é" * 130,
    "",
    "-",
    "folder",
]
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


class Lines:
    """Makes command lines up."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.outputs = 0
        self.options = {name: command.params for name, command in get_command(app).commands.items()}

    def one(self) -> list[str]:
        """Return the arguments of one."""
        rng = self.rng
        command = rng.choice(sorted(BEGINNINGS))
        said = rng.choice(BEGINNINGS[command]).split()
        arguments = [command]
        for word in said:
            filled = word.format(model=self.model(), file=self.file(), out=self.output(command))
            arguments.append(filled.replace("TEXT", rng.choice(WORDS)))
        for _ in range(rng.choice([0, 0, 1, 1, 2, 3])):
            arguments += self.option(command)
        action = rng.random()
        if action < 0.05 and command != "doctor":  # which by itself examines the bundled model for long
            arguments.pop(rng.randrange(len(arguments)))
        elif action < 0.15:
            arguments.insert(rng.randrange(len(arguments) + 1), rng.choice([*MISTAKES, *WORDS]))
        return arguments

    def output(self, command: str) -> str:
        """Return where to write to, or where nothing can be written."""
        if self.rng.random() < 0.4:
            return self.rng.choice(OUTPUTS)
        self.outputs += 1
        ending = {"embed": ".npy", "inspect": ".png", "convert": "", "export": "", "eval": "", "tune": ""}
        return f"new{self.outputs}{ending.get(command, '.jsonl')}"

    def model(self) -> str:
        """Return where a model is, or is not."""
        if self.rng.random() < 0.6:
            return "model"
        return self.rng.choice(
            [f"model{self.rng.randrange(12)}", "nosuch", "./nosuch", "some/model", "a.txt", "folder", "x" * 300, ""]
        )

    def file(self) -> str:
        """Return where a file is, or is not."""
        if self.rng.random() < 0.4:
            return "good.jsonl"
        return self.rng.choice(
            [*FILES, "a.txt", "b.txt", "a.jsonl", "good.jsonl", "nosuch.txt", "folder", "model", "-", "x" * 300, ""]
        )

    def option(self, command: str) -> list[str]:
        """Return an option with a value, fit or not."""
        param: Any = self.rng.choice(self.options[command])
        if param.param_type_name != "option" or param.name in ("help", "watch"):
            return []
        name = self.rng.choice(param.opts)
        if param.is_flag:
            return [name]
        fit = ["1", "2", "0", "-1", "0.5", "2.5", "1e400", "nan", str(10**30), str(2**63), *WORDS]
        if param.name in ("file", "data", "output", "texts", "adapter", "model"):
            fit = [self.file(), self.model(), self.rng.choice(OUTPUTS)]
        return [name, self.rng.choice(fit)]


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


@pytest.mark.sweep(quick=0, check=2)
@pytest.mark.parametrize("part", range(PARTS))
def test_command_lines_of_anything_at_all(place: Path, monkeypatch: pytest.MonkeyPatch, part: int) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setenv("HOME", str(place))
    rng = random.Random(SEED + part)
    lines, ledger = Lines(rng), Ledger()
    codes: dict[int, int] = dict.fromkeys(STATUSES, 0)

    def run(arguments: list[str]) -> None:
        given = rng.choice([b"", b"the cat\na dog\n", b"caf\xe9", b'{"text": "a", "prompt": "a"}\n'])
        ran = run_cli(*arguments, stdin=given)
        judge(ran.code, ran.err or ran.out)
        codes[ran.code] += 1

    for _ in range(COMMAND_LINES):
        arguments = lines.one()
        ledger.note(repr(arguments), lambda arguments=arguments: run(arguments))
    assert not ledger.wrong, ledger.report()
    assert codes[0] > COMMAND_LINES / 40
    assert codes[2] > COMMAND_LINES / 4


@pytest.mark.sweep(quick=0, check=1)
@pytest.mark.parametrize("part", range(4))
def test_the_same_as_processes_of_their_own(place: Path, part: int) -> None:
    """Arguments are bytes there, and texts are written to a real standard output."""
    rng = random.Random(SEED + PARTS + part)
    lines, ledger = Lines(rng), Ledger()
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src"), "HOME": str(place)}

    def run(arguments: list[str]) -> None:
        given = [
            os.fsencode(argument) if argument.isprintable() else argument.encode("utf-8", "surrogatepass")
            for argument in arguments
        ]
        command = [sys.executable, "-m", "gerund", *given]
        extra = rng.choice([{}, {"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C"}])
        done = subprocess.run(command, capture_output=True, cwd=place, env=environment | extra, input=b"", check=False)
        judge(done.returncode, (done.stderr or done.stdout).decode("utf-8", "replace"))

    for _ in range(PROCESSES):
        arguments = lines.one()
        ledger.note(repr(arguments), lambda arguments=arguments: run(arguments))
    assert not ledger.wrong, ledger.report()
