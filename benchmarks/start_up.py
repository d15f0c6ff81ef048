"""What short commands cost: processor seconds of whole processes, with the bundled model and one short input each.

    python benchmarks/start_up.py [--before FOLDER]

Each command runs in a process of its own; with the source of an earlier version (`--before src`) the two run in turn.
The first run of each fills this user's caches, as a user's first one does, and is left out. `modules` are those that
the last run imported, by `python -X importtime`.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import harness
from results import Column, Table, median_of

SOURCE = Path(__file__).resolve().parent.parent / "src"
# The bundled model has no chat template: `chat` loads it and says so.
COMMANDS: dict[str, tuple[str, ...]] = {
    "--help": ("--help",),
    "search --mode words": ("search", "my.index", "flour", "--mode", "words"),
    "search": ("search", "my.index", "flour"),
    "embed, 2 texts": ("embed", "texts.txt", "-o", "out.npy", "--force"),
    "generate, 25 tokens": ("generate", "The old man", "--max-new-tokens", "25"),
    "chat, to its first line": ("chat", "default", "--max-new-tokens", "25"),
}
_IMPORTED = re.compile(r"^import time:", re.MULTILINE)


def run(source: Path, arguments: tuple[str, ...], folder: Path, *flags: str) -> tuple[float, str]:
    """Run a command, and return the processor seconds of its process and what it wrote on standard error."""
    before = os.times()
    done = subprocess.run(
        [sys.executable, *flags, "-m", "gerund", *arguments],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(source)}, input="Hello", capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    after = os.times()
    if done.returncode and arguments[0] != "chat":
        raise SystemExit(f"gerund {' '.join(arguments)}: {done.stderr[-500:]}")
    return after.children_user - before.children_user + after.children_system - before.children_system, done.stderr


def start_up(options: Any) -> Table:
    """Run each command of each version in turn."""
    versions = {"now": SOURCE, **({"before": options.before.resolve()} if options.before else {})}
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folders = {version: Path(name) / version for version in versions}
        for version, folder in folders.items():  # an earlier version may not read the index of a later one
            folder.mkdir()
            (folder / "texts.txt").write_text("Bread is made of flour.\nTrains need rails.\n")
            run(versions[version], ("index", "texts.txt", "-o", "my.index"), folder)
        for called, arguments in COMMANDS.items():
            if called not in options.commands.split(";"):
                continue
            spent: dict[str, list[float]] = {version: [] for version in versions}
            for number in range(options.rounds + 1):
                for version, source in versions.items():
                    seconds, _ = run(source, arguments, folders[version])
                    spent[version] += [seconds] if number else []
            for version, source in versions.items():
                modules = len(_IMPORTED.findall(run(source, arguments, folders[version], "-X", "importtime")[1])) - 1
                rows.append({
                    "command": called, "version": version, "cpu": median_of(spent[version]), "modules": modules,
                })  # fmt: skip
    columns = [
        Column("command", "command"),
        Column("version", "version"),
        Column("cpu", "processor time", "s", 2, "lower"),
        Column("modules", "modules imported", "", 0, "lower"),
    ]
    return Table("start-up", "Whole processes of short commands with the bundled model.", columns, rows)


def main(argv: list[str] | None = None) -> None:
    """Measure."""
    parser = harness.parser(__doc__, rounds=3)
    parser.add_argument("--before", type=Path, help="the source of an earlier version, its folder src")
    parser.add_argument("--commands", default=";".join(COMMANDS), help="which, with semicolons (all)")
    options = harness.parse(parser, argv, quick={"commands": "--help"})
    harness.report(options, __file__, [start_up(options)], libraries=("lancedb",))


if __name__ == "__main__":
    main()
