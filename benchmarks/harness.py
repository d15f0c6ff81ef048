"""What every script of this folder is measured by: options, checks, rounds in turn, memory, one report.

    def main(argv: list[str] | None = None) -> None:
        options = parse(parser(__doc__, rounds=5), argv)
        check = require("largest difference of the vectors", largest_difference(ours(), theirs()), 1e-5)
        rounds = alternate({"the peer": theirs, "gerund": ours}, options.rounds)
        report(options, __file__, [rounds.table("speed", "Encoding 2000 texts", base="the peer", checks=[check])])

The rules that make figures comparable: (1) nothing is timed before the systems were shown to compute the same;
(2) systems take turns, in reversed order every second round, so that a slow minute of the machine falls on all;
(3) time is processor time of the whole process, which other processes disturb least, with wall time beside it;
(4) a ratio is taken within a round and summarised afterwards; (5) memory is the operating system's figure, taken in a
child process that runs one system only; (6) a run with `--quick` shows that a script works and is no result.
"""

import argparse
import ctypes
import gc
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

import results
from gerund.jobs.engine import peak_resident_mib
from render import printed
from results import Cell, Column, Result, Row, Run, Table, median_of

# For a child whose memory is measured: glibc gives what is freed back at once, so that a peak is what was in use and
# not what the allocator kept.
RETURN_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536"}
_COMMON = ("rounds", "threads", "output", "quick", "child", "data", "work", "folder")
# `--option=VALUE` and `NAME=FOLDER`.
_NAMED = re.compile(r"[\w-]+=")
# A machine with more than this much work a core at the start is called busy.
_IDLE_LOAD = 0.25
_LOAD = os.getloadavg()[0] / (os.cpu_count() or 1) if hasattr(os, "getloadavg") else None


class NotTheSame(SystemExit):
    """Systems that are to be compared do not compute the same."""


def parser(doc: str | None, *, rounds: int = 3) -> argparse.ArgumentParser:
    """Return a parser with the options that all scripts have; a script adds its own."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--rounds", type=int, default=rounds, help="how often each system runs (%(default)s)")
    made.add_argument("--threads", type=int, default=1, help="threads of each system (%(default)s)")
    made.add_argument("--output", type=Path, help="the result file (benchmarks/results/SCRIPT.json; none with --quick)")
    made.add_argument("--quick", action="store_true", help="sizes that only show that the script works")
    made.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    return made


def parse(
    made: argparse.ArgumentParser, argv: Sequence[str] | None = None, quick: Mapping[str, Any] | None = None
) -> argparse.Namespace:
    """Read the command line and set the number of threads.

    Args:
        made: from `parser`.
        argv: without the program's name; None for the command line.
        quick: what `--quick` has in the place of defaults; what is typed beside it wins.
    """
    typed = list(sys.argv[1:] if argv is None else argv)
    if "--quick" in typed:
        made.set_defaults(**{"rounds": 1, **(quick or {})})
        for action in made._actions:
            action.required = action.required and action.dest not in (quick or {})
    options = made.parse_args(typed)
    if options.rounds < 1 or options.threads < 1:
        made.error("--rounds and --threads have to be at least 1")
    if options.output is not None and options.output.is_dir():
        made.error(f"--output is a file, and {options.output} is a folder")
    options.argv = typed
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(options.threads)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(options.threads)
    return options


def require(what: str, difference: float, allowed: float) -> str:
    """Return a sentence for the table when a difference is allowed.

    Raises:
        NotTheSame: it is larger, or not a number.
    """
    if not difference <= allowed:
        raise NotTheSame(f"the systems do not compute the same: {what} {difference:.1e}, allowed {allowed:.0e}")
    return f"{what} {difference:.1e} (allowed {allowed:.0e})" if allowed else f"{what} none"


def largest_difference(one: Any, other: Any) -> float:
    """Return the largest absolute difference of two arrays."""
    return float(np.abs(np.asarray(one, dtype=np.float64) - np.asarray(other, dtype=np.float64)).max())


def relative_difference(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the largest difference number by number, relative to the second; zeros are left out."""
    if len(one) != len(other):
        return float("nan")
    return max(abs(a / b - 1) for a, b in zip(one, other, strict=True) if abs(b) > 1e-6)


def loss_and_gradients(loss: Any, model: Any) -> list[float]:
    """Return a loss with the norm of each gradient that it left, for `relative_difference`."""
    return [float(loss), *(float(weight.grad.norm()) for weight in model.parameters() if weight.grad is not None)]


@dataclass(frozen=True)
class Spent:
    """Seconds of one run: of the processor, all threads together, and on the clock."""

    cpu: float
    wall: float


def spend(work: Callable[[], object]) -> Spent:
    """Run something once and return what it took."""
    cpu, wall = time.process_time(), time.perf_counter()
    work()
    return Spent(time.process_time() - cpu, time.perf_counter() - wall)


@dataclass(frozen=True)
class Rounds:
    """What each system spent in each round.

    Attributes:
        spent: by the system's name, as many as there were rounds.
    """

    spent: dict[str, list[Spent]]

    def cpu(self, name: str, scale: float = 1) -> dict[str, float]:
        """Return the summary of a system's processor time, times ``scale``."""
        return median_of([one.cpu * scale for one in self.spent[name]])

    def wall(self, name: str, scale: float = 1) -> dict[str, float]:
        """Return the summary of a system's wall time, times ``scale``."""
        return median_of([one.wall * scale for one in self.spent[name]])

    def times_as_fast(self, name: str, base: str) -> dict[str, float]:
        """Return how many times less processor time a system takes than ``base``, round by round."""
        pairs = zip(self.spent[name], self.spent[base], strict=True)
        return median_of([other.cpu / own.cpu for own, other in pairs])

    def rows(self, base: str | None = None, scale: float = 1, **more: Cell) -> list[Row]:
        """Return a row a system; ``more`` goes into each of them."""
        return [
            {
                "system": name, **more, "cpu": self.cpu(name, scale), "wall": self.wall(name, scale),
                "ratio": None if base in (None, name) else self.times_as_fast(name, str(base)),
            }
            for name in self.spent
        ]  # fmt: skip

    def table(self, id_: str, caption: str, *, base: str, checks: Sequence[str] = ()) -> Table:
        """Return the whole table where there is nothing else in it."""
        return Table(id_, caption, time_columns(base), self.rows(base), checks=list(checks))


def time_columns(base: str, *more: Column, per: str = "s") -> list[Column]:
    """Return the columns of `Rounds.rows`, with ``more`` behind the system's."""
    return [
        Column("system", "system"), *more, Column("cpu", "processor time", per, 2), Column("wall", "wall time", per, 2),
        Column("ratio", f"times as fast as {base}", "", 2),
    ]  # fmt: skip


def alternate(
    systems: Mapping[str, Callable[[], object]], rounds: int, *, prepare: Callable[[str, int], None] | None = None
) -> Rounds:
    """Run the systems in turn. What a first run brings along is the caller's: the checks before are the warm-up.

    Args:
        systems: what is timed, by name.
        rounds: how often each.
        prepare: called with a system's name and the round before it, and not timed.
    """
    spent: dict[str, list[Spent]] = {name: [] for name in systems}
    for number in range(rounds):
        for name in list(systems)[:: -1 if number % 2 else 1]:
            if prepare is not None:
                prepare(name, number)
            spent[name].append(spend(systems[name]))
    return Rounds(spent)


def in_child(script: str, case: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Run one case of a script in a process of its own, which gets it as `options.child` and answers by `answer`."""
    command = [sys.executable, script, "--child", json.dumps(dict(case))]
    done = subprocess.run(
        command, env={**os.environ, **(environment or {})}, stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{Path(script).name} failed on {dict(case)}: exit code {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def alternate_children(
    script: str, cases: Mapping[str, Mapping[str, Any]], rounds: int
) -> tuple[Rounds, dict[str, list[dict[str, Any]]]]:
    """Run cases in turn, each time in a new process, which answers with `cpu`, `wall` and what else it found."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in cases}
    for number in range(rounds):
        for name in list(cases)[:: -1 if number % 2 else 1]:
            found[name].append(in_child(script, cases[name]))
    spent = {name: [Spent(one["cpu"], one["wall"]) for one in answers] for name, answers in found.items()}
    return Rounds(spent), found


def answer(found: Mapping[str, Any]) -> None:
    """Hand what a child found to `in_child`."""
    sys.stdout.write("\n" + json.dumps(dict(found)) + "\n")


def resident_memory() -> float:
    """Return this process's resident size in MiB, after what was freed has been given back."""
    gc.collect()
    if sys.platform != "linux":
        return peak_resident_mib()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def report(
    options: argparse.Namespace, script: str, tables: Sequence[Table], *, libraries: Sequence[str] = (), **settings: Any
) -> None:
    """Print tables and write them to the script's result file, with how they were measured.

    Args:
        options: from `parse`; the script's own ones are kept as settings.
        script: `__file__`.
        tables: what was measured.
        libraries: further ones whose versions matter.
        settings: what else decides the figures.
    """
    own = {key: _setting(value) for key, value in vars(options).items() if key not in (*_COMMON, "argv")}
    run = Run(
        command=command_of(script, options.argv),
        machine=results.machine(),
        date=datetime.now(UTC).date().isoformat(),
        commit=results.commit(),
        versions=results.versions(*libraries),
        settings={"rounds": options.rounds, "threads": options.threads, **own, **settings},
        machine_busy=None if _LOAD is None else _LOAD > _IDLE_LOAD,
    )
    name = Path(script).stem
    result = Result(name, f"benchmarks/{name}.py", [replace(table, run=run) for table in tables])
    sys.stdout.write(printed(result) + "\n")
    output = options.output or (None if options.quick else results.RESULTS / f"{name}.json")
    if output is not None:
        results.write(result, output)
        sys.stdout.write(f"\nwritten to {output.name}; read its conclusions again, then `make benchmark-page`\n")


def command_of(script: str, argv: Sequence[str]) -> str:
    """Return the command line without a machine's own paths: of an absolute one only the last part is kept."""
    words = [_without_folders(word) for word in argv]
    return " ".join(["python", f"benchmarks/{Path(script).name}", *words])


def _without_folders(word: str) -> str:
    name, sign, value = word.partition("=") if _NAMED.match(word) else ("", "", word)
    path = Path(value)
    shown = path.name if path.is_absolute() else value
    return name + sign + (f'"{shown}"' if " " in shown else shown)


def _setting(value: Any) -> Any:
    """Return an option's value for the result file, without a machine's own paths."""
    if isinstance(value, Path):
        return value.name
    if isinstance(value, str):
        return _without_folders(value)
    return [_setting(one) for one in value] if isinstance(value, list | tuple) else value
