"""What a result file holds: tables of figures, and for each table how, where and when it was measured.

A script of this folder writes one file, `results/NAME.json`, by `write`; `render.py` makes the page of them. A file is
a `Result`; its tables are kept apart by `id`, so that a script may measure one and leave the others as they are. This
file knows JSON, the machine and the commit; it knows no torch and nothing of what is measured.

A cell of a row is a number, a text, None, or one of two summaries: `{"median", "min", "max", "rounds"}` of repeated
timings, `{"mean", "sd", "seeds"}` of repeated trainings. What an old table did not say is left out of a summary.
"""

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
BY_SCRIPT = "by the script"
CARRIED = "carried over from the table of "  # and its date and commit

Cell = float | str | dict[str, float] | None
Row = dict[str, Cell | bool]


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
        key: where a row keeps its cell.
        title: what the page calls it.
        unit: of all its numbers; none for words and plain ratios.
        digits: after the decimal point; a summary may say its own.
        better: `higher` or `lower` where the best of the column is to be seen, else empty.
    """

    key: str
    title: str
    unit: str = ""
    digits: int | None = None
    better: str = ""


@dataclass(frozen=True)
class Run:
    """How, where and when a table was measured.

    Attributes:
        command: what to type, from the project's root; empty where an old table did not say it.
        machine: in words.
        date: of the measurement, as `YYYY-MM-DD`.
        recorded: by whom: `BY_SCRIPT`, or which older table it was carried over from.
        commit: of the code that was measured; empty where it is not known.
        versions: of the libraries that take part.
        settings: what else decides the figures.
        machine_busy: whether other work was running; None where it is not known.
    """

    command: str
    machine: str
    date: str
    recorded: str = BY_SCRIPT
    commit: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    machine_busy: bool | None = None


@dataclass(frozen=True)
class Table:
    """Figures that were measured together.

    Attributes:
        id: its name within the file.
        caption: what is compared, in one sentence.
        columns: from left to right; the first one names the rows.
        rows: each a dictionary by the columns' keys; `"reference": true` keeps a row out of the search for the best.
        run: how it was measured; a script leaves this to `harness.report`.
        checks: what was found equal before anything was timed.
        conclusion: what the table says, in one or two sentences, written by somebody who has read it.
    """

    id: str
    caption: str
    columns: list[Column]
    rows: list[Row]
    run: Run | None = None
    checks: list[str] = field(default_factory=list)
    conclusion: str = ""


@dataclass(frozen=True)
class Result:
    """All tables of one script, or of one command.

    Attributes:
        name: of the file, without its ending.
        script: relative to the project's root; empty for what a command of the library measures.
        tables: in the order of the page.
        note: what holds for all tables, for the page.
    """

    name: str
    script: str
    tables: list[Table]
    note: str = ""


def median_of(values: Sequence[float]) -> dict[str, float]:
    """Return the summary of repeated timings."""
    return {
        "median": _rounded(statistics.median(values)),
        "min": _rounded(min(values)),
        "max": _rounded(max(values)),
        "rounds": len(values),
    }


def mean_of(values: Sequence[float]) -> dict[str, float]:
    """Return the summary of repeated trainings; a single one has no standard deviation."""
    summary = {"mean": _rounded(statistics.fmean(values)), "seeds": len(values)}
    return summary | ({"sd": _rounded(statistics.stdev(values))} if len(values) > 1 else {})


def _rounded(value: float) -> float:
    # Five digits are more than any clock or seed is good for.
    return float(f"{value:.5g}")


def read(path: Path) -> Result:
    """Return what a file holds; an unknown or a missing key is an error, so a mistyped one does not get lost."""
    loaded = json.loads(path.read_text(encoding="utf-8"))
    tables = [
        Table(**{**table, "columns": [Column(**column) for column in table["columns"]], "run": Run(**table["run"])})
        for table in loaded.pop("tables")
    ]
    return Result(**loaded, tables=tables)


def write(result: Result, path: Path) -> None:
    """Write a result. Tables of the same file that were not measured now stay, and so do conclusions and notes."""
    if path.is_file():
        result = _joined(read(path), result)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(result), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _joined(before: Result, now: Result) -> Result:
    known = {table.id: table for table in before.tables}
    for table in now.tables:
        old = known.get(table.id)
        known[table.id] = table if table.conclusion or old is None else replace(table, conclusion=old.conclusion)
    return Result(now.name, now.script, list(known.values()), now.note or before.note)


def machine() -> str:
    """Return this machine in words: processor, cores, memory, accelerator."""
    name, flags = platform.processor() or platform.machine(), ""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        lines = [line.split(":", maxsplit=1) for line in info.read_text(encoding="utf-8").splitlines() if ":" in line]
        facts = {key.strip(): value.strip() for key, value in lines}
        name, flags = facts.get("model name", name), facts.get("flags", "")
    kinds = [kind for flag, kind in (("amx_bf16", "AMX"), ("avx512_bf16", "AVX512-bf16")) if flag in flags.split()]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    gigabytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30 if hasattr(os, "sysconf") else 0
    memory = f", {gigabytes:.0f} GiB of memory" if gigabytes else ""
    extras = f" ({', '.join(kinds)})" if kinds else ""
    return f"{cores} cores of {name}{extras}{memory}, {_accelerator()}"


def _accelerator() -> str:
    # Of CUDA only its name is asked, without torch, which a script may not need.
    try:
        command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        names = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.split("\n")
    except (OSError, subprocess.SubprocessError):
        return "no GPU"
    return " and ".join(name.strip() for name in names if name.strip()) or "no GPU"


def versions(*more: str) -> dict[str, str]:
    """Return the versions of Python and of the libraries that matter, and of ``more`` where they are installed."""
    found = {"python": platform.python_version()}
    for name in ("gerund", "torch", "transformers", "numpy", *more):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """Return the commit of this checkout, with a plus where tracked files were changed; empty without git."""
    try:
        where = Path(__file__).resolve().parent
        run = {"cwd": where, "capture_output": True, "text": True}
        name = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], check=True, **run).stdout.strip()
        sources = [":/src", ":/benchmarks/*.py"]  # results that were just written are no change
        changed = subprocess.run(["git", "status", "--porcelain", "-uno", "--", *sources], check=True, **run).stdout
        return name + ("+" if changed.strip() else "")
    except (OSError, subprocess.SubprocessError):
        return ""
