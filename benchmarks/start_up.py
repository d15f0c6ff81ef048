"""What short commands cost: processor seconds and memory of whole processes, with one short input each.

    python benchmarks/start_up.py [--before FOLDER] [--model FILE]

With the bundled model, and with another one if it is given: a GGUF file is computed by the packed runtime.

Each command runs in a process of its own; with the source of an earlier version (`--before src`) the two run in turn.
The first run of each fills this user's caches, as a user's first one does, and is left out. `modules` are those that
the last run imported, by `python -X importtime`.
"""

import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
from results import Column, Table, median_of

SOURCE = Path(__file__).resolve().parent.parent / "src"
MODEL = "MODEL"
"""Stands for the model in a command."""
# The bundled model has no chat template: `chat` loads it and says so.
COMMANDS: dict[str, tuple[str, ...]] = {
    "--help": ("--help",),
    "search --mode words": ("search", "my.index", "flour", "--mode", "words"),
    "search": ("search", "my.index", "flour"),
    "ask --extractive": ("ask", "my.index", "What is bread made of?", "--extractive"),
    "embed, 2 texts": ("embed", "texts.txt", "-m", MODEL, "-o", "out.npy", "--force"),
    "generate, 25 tokens": ("generate", "The old man", "-m", MODEL, "--max-new-tokens", "25"),
    "chat, 25 tokens": ("chat", MODEL, "--max-new-tokens", "25"),
}
_IMPORTED = re.compile(r"^import time:", re.MULTILINE)
_MIB = 2**20 / (1 if sys.platform == "darwin" else 2**10)


@dataclass
class Cost:
    """What a process cost."""

    cpu: float  # seconds
    peak: float  # MiB
    errors: str  # what it wrote on standard error


def run(source: Path, arguments: tuple[str, ...], model: str, folder: Path, *flags: str) -> Cost:
    """Run a command and return what it cost."""
    named = [model if argument == MODEL else argument for argument in arguments]
    command = [sys.executable, *flags, "-m", "gerund", *named]
    environment = {**os.environ, "PYTHONPATH": str(source)}
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as errors:
        given.write(b"Hello")
        given.seek(0)
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=given, stdout=subprocess.DEVNULL, stderr=errors
        )
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        errors.seek(0)
        text = errors.read().decode(errors="replace")
    if process.returncode and arguments[0] != "chat":
        raise SystemExit(f"gerund {' '.join(named)}: {text[-500:]}")
    return Cost(used.ru_utime + used.ru_stime, used.ru_maxrss / _MIB, text)


def start_up(options: Any, model: str) -> Table:
    """Run each command of each version in turn."""
    versions = {"now": SOURCE, **({"before": options.before.resolve()} if options.before else {})}
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folders = {version: Path(name) / version for version in versions}
        for version, folder in folders.items():  # an earlier version may not read the index of a later one
            folder.mkdir()
            (folder / "texts.txt").write_text("Bread is made of flour.\nTrains need rails.\n")
            run(versions[version], ("index", "texts.txt", "-o", "my.index", "-m", MODEL), model, folder)
        for called, arguments in COMMANDS.items():
            if called not in options.commands.split(";"):
                continue
            costs: dict[str, list[Cost]] = {version: [] for version in versions}
            for number in range(options.rounds + 1):
                for version, source in versions.items():
                    cost = run(source, arguments, model, folders[version])
                    costs[version] += [cost] if number else []
            for version, source in versions.items():
                listed = run(source, arguments, model, folders[version], "-X", "importtime").errors
                rows.append({
                    "command": called, "version": version, "cpu": median_of([cost.cpu for cost in costs[version]]),
                    "peak": median_of([cost.peak for cost in costs[version]]),
                    "modules": len(_IMPORTED.findall(listed)) - 1,
                })  # fmt: skip
    columns = [
        Column("command", "command"),
        Column("version", "version"),
        Column("cpu", "processor time", "s", 2, "lower"),
        Column("peak", "peak memory", "MiB", 0, "lower"),
        Column("modules", "modules imported", "", 0, "lower"),
    ]
    called = "the bundled model" if model == "default" else Path(model).name
    name = "start-up" if model == "default" else f"start-up, {called}"
    return Table(name, f"Whole processes of short commands with {called}.", columns, rows)


def main(argv: list[str] | None = None) -> None:
    """Measure."""
    parser = harness.parser(__doc__, rounds=3)
    parser.add_argument("--before", type=Path, help="the source of an earlier version, its folder src")
    parser.add_argument("--commands", default=";".join(COMMANDS), help="which, with semicolons (all)")
    parser.add_argument("--model", help="another model than the bundled one, too")
    options = harness.parse(parser, argv, quick={"commands": "--help"})
    models = ["default", *([str(Path(options.model).resolve())] if options.model else [])]
    harness.report(options, __file__, [start_up(options, model) for model in models], libraries=("lancedb",))


if __name__ == "__main__":
    main()
