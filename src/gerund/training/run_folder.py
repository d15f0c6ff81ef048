"""Files of a training run: checks before a start or resume, complete checkpoints, and the log.

A checkpoint is complete once its manifest, written last, lists every file with its size. The Trainer itself takes the
highest number and would silently continue without a missing optimizer file.
"""

import json
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from gerund.errors import ConfigError, OutputExistsError
from gerund.jobs.files import write_atomic
from gerund.training.corpus.texts import FILES
from gerund.training.processes import peak_memory_mib
from gerund.training.recipe import Recipe

MANIFEST = "manifest.json"
_NAME = re.compile(r"checkpoint-(\d+)$")

# These may differ between a run and its resumption: they do not change what a step computes.
_FREE = (
    "output", "steps", "compile", "sharding", "log_steps", "eval_steps", "save_steps", "keep_checkpoints",
    "snapshot_steps", "report_to",
)  # fmt: skip
# Of the data, of the model and of an objective: none changes a gradient (but for the order of additions).
_FREE_DATA = ("folder", "cache", "validation_tokens")
_FREE_MODEL = ("gradient_checkpointing",)
_FREE_OBJECTIVE = ("micro_batch_size",)


def check_output(output: Path, resume: bool) -> None:
    """Refuse a folder that is a model or holds a finished one, or an unfinished run that is not to be resumed."""
    if output.exists() and not output.is_dir():
        raise OutputExistsError(f"{output} is a file; an output is a folder")
    if any((output / name).exists() for name in ("config.json", "adapter_config.json")):
        raise OutputExistsError(f"{output} is a model's own folder; choose another output")
    if (output / "model").exists():
        raise OutputExistsError(
            f"{output} is finished, {output / 'model'} is there already; choose another output, or remove the whole "
            "folder to train again"
        )
    if not resume and (output / "recipe.json").exists():
        raise OutputExistsError(f"{output} holds an unfinished run; go on with --resume or choose another output")


def check_resumable(recipe: Recipe, output: Path, step: int) -> None:
    """Refuse to resume with settings under which the run so far would have gone differently."""
    path = output / "recipe.json"
    if not path.is_file():
        raise ConfigError(f"{path} is missing, so nothing says what the checkpoints were trained with")
    before, now = json.loads(path.read_text("utf-8")), recipe.plain()
    differing = sorted(_differences(_compared(before), _compared(now)))
    if differing:
        raise ConfigError(f"{output}: cannot resume, since settings have changed: {'; '.join(differing)}")
    if step >= recipe.steps and before["steps"] != recipe.steps:
        raise ConfigError(f"{output}: step {step} is reached already; steps={recipe.steps} would undo some")
    if before["steps"] != recipe.steps or before["schedule"] != now["schedule"]:
        stable = min(_stable_until(before), _stable_until(now))
        if step > stable:
            changed = f"steps was {before['steps']} and is {recipe.steps}; " if before["steps"] != recipe.steps else ""
            raise ConfigError(
                f"{output}: {changed}steps and decay can only change while the learning rate is stable, "
                f"until step {stable}, and the newest checkpoint is at {step}"
            )


def check_same_data(output: Path, summary: dict[str, Any], *, resuming: bool) -> None:
    """Write down what the corpus and other files amount to, or on a resume refuse others."""
    path = output / "data.json"
    texts, files = dict(summary), dict(summary.get(FILES, {}))
    texts.pop(FILES, None)
    if resuming:
        before = json.loads(path.read_text("utf-8")) if path.is_file() else None
        # Runs of earlier versions say nothing of files; and one may be new, of an objective that joins in later.
        known = {} if before is None else before.pop(FILES, {})
        changed = sorted(name for name in files.keys() & known.keys() if files[name] != known[name])
        if before != texts or changed:
            text = f": {', '.join(changed)}" if changed else ""
            raise ConfigError(f"{output}: cannot resume, since the files in data.folder have changed{text}")
        files = {**known, **files}
    write_atomic(path, json.dumps({**texts, FILES: files} if files else texts))


def _compared(settings: dict[str, Any]) -> dict[str, Any]:
    compared = {key: value for key, value in settings.items() if key not in _FREE}
    compared["data"] = {k: v for k, v in compared["data"].items() if k not in _FREE_DATA}
    compared["model"] = {k: v for k, v in compared["model"].items() if k not in _FREE_MODEL}
    compared["objectives"] = [
        {k: v for k, v in objective.items() if k not in _FREE_OBJECTIVE} for objective in compared["objectives"]
    ]
    compared["schedule"] = {k: v for k, v in compared["schedule"].items() if not k.startswith("decay")}
    return compared


def _differences(before: Any, now: Any, where: str = "") -> Iterator[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        for key in before.keys() | now.keys():
            yield from _differences(before.get(key), now.get(key), f"{where}.{key}" if where else key)
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for index, (old, other) in enumerate(zip(before, now, strict=True)):
            yield from _differences(old, other, f"{where}.{_named(old, index)}")
    elif before != now:
        yield f"{where} was {_shortly(before)} and is {_shortly(now)}"


def _shortly(value: Any) -> str:
    """Return a setting as a message shows it: of a list of settings the names alone."""
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        return ", ".join(_named(item, index) for index, item in enumerate(value))
    return json.dumps(value)


def _named(item: Any, index: int) -> str:
    """Return what a recipe calls an item of a list."""
    return str(item.get("kind") or item.get("name") or index) if isinstance(item, dict) else str(index)


def _stable_until(settings: dict[str, Any]) -> int:
    """Return the step up to which the learning rate does not depend on the number of steps.

    It does not during a warm-up either; but who resumes a falling schedule with other steps has mistaken them.
    """
    schedule = settings["schedule"]
    if schedule["name"] in ("cosine", "linear"):
        return 0
    return int(settings["steps"] - (schedule["decay_steps"] or 0))


def write_manifest(folder: Path) -> None:
    """Declare the checkpoint in ``folder`` whole."""
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != MANIFEST:
            with path.open("rb") as file:
                # The sizes are only a promise once the contents are on the disk.
                os.fsync(file.fileno())
            files[path.relative_to(folder).as_posix()] = path.stat().st_size
    write_atomic(folder / MANIFEST, json.dumps(files, indent=1))


def newest_checkpoint(folder: Path) -> tuple[Path | None, dict[Path, str]]:
    """Return the newest whole checkpoint in ``folder``, and for each broken one what is wrong with it."""
    newest, broken = None, {}
    result = [path for path in folder.glob("checkpoint-*") if _NAME.match(path.name)]
    for path in sorted(result, key=step_of, reverse=True):
        problem = _problem(path)
        if problem is not None:
            broken[path] = problem
        elif newest is None:
            newest = path
    return newest, broken


def step_of(checkpoint: Path) -> int:
    """Return the step after which a checkpoint was written.

    >>> step_of(Path("run/checkpoints/checkpoint-400"))
    400
    """
    return int(checkpoint.name.rsplit("-", 1)[1])


def _problem(folder: Path) -> str | None:
    try:
        files = json.loads((folder / MANIFEST).read_text("utf-8"))
    except FileNotFoundError:
        return "cut short before it was complete"
    except ValueError:
        return "its manifest is unreadable"
    if not isinstance(files, dict) or not files:
        return "its manifest is unreadable"
    for name, size in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
    return None


def announce(text: str) -> None:
    """Show a line on the terminal's error stream."""
    Console(stderr=True, highlight=False, markup=False).print(text, soft_wrap=True)


class TrainingLog:
    """Writes ``log.jsonl`` and shows progress: a bar on a terminal, plain lines elsewhere.

    After a resume the lines beyond ``step`` are dropped, since those steps are done again; tokens and seconds count on
    from the last line. A ``silent`` one writes and shows nothing: another process does.
    """

    def __init__(self, path: Path, *, step: int, steps: int, silent: bool = False) -> None:
        self.path, self.steps, self.silent = path, steps, silent
        self.rows = [row for row in _read_rows(path) if row["step"] <= step]
        if not silent:
            write_atomic(path, "".join(json.dumps(row) + "\n" for row in self.rows))
        self.tokens = self.rows[-1]["tokens"] if self.rows else 0
        self.seconds_before = self.rows[-1]["seconds"] if self.rows else 0.0
        self._started = time.perf_counter()
        self._busy = 0.0
        self._last = (self.tokens, self._busy)
        self._step_began = self._started
        self._console = Console(stderr=True, highlight=False, markup=False)
        columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=self._console, disable=silent or not sys.stderr.isatty())
        self._task = self._progress.add_task("", total=steps, completed=step)
        self._progress.start()

    @property
    def seconds(self) -> float:
        """Wall time of the whole training so far, interrupted parts included."""
        return self.seconds_before + time.perf_counter() - self._started

    def count(self, tokens: int) -> None:
        """Count the tokens of a step, padding left out, of all processes together."""
        self.tokens += tokens

    def step_begins(self) -> None:
        """Start the clock of a step, so that throughput leaves validation and saving out."""
        self._step_began = time.perf_counter()

    def step_ends(self, step: int) -> None:
        """Stop the clock of a step."""
        self._busy += time.perf_counter() - self._step_began
        self._progress.update(self._task, completed=step)

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Add a line about ``step``."""
        row: dict[str, Any] = {"step": step, **values}
        if "loss" in values:
            before, busy = self._last
            row["tokens_per_second"] = round((self.tokens - before) / max(self._busy - busy, 1e-9))
            self._last = (self.tokens, self._busy)
        row["tokens"] = self.tokens
        row["seconds"] = round(self.seconds, 1)
        row["peak_memory_mib"] = peak_memory_mib()
        self.rows.append(row)
        if self.silent:
            return
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        self._show(row)

    def _show(self, row: dict[str, Any]) -> None:
        shown = {key: value for key, value in row.items() if re.match(r"loss|val|learning|.*accuracy", key)}
        text = "  ".join(f"{key} {value:.4g}" for key, value in shown.items())
        text = f"step {row['step']}/{self.steps}  {text}"
        if "tokens_per_second" in row:
            text += f"  {row['tokens_per_second']:,} tokens/s"
        self.note(text)

    def note(self, text: str) -> None:
        """Show a line without writing it to the file."""
        if not self.silent:
            self._console.print(text, soft_wrap=True)  # one line is one step, in a pipe and a file as well

    def close(self) -> None:
        """Take the progress bar away."""
        self._progress.stop()


def _read_rows(path: Path) -> list[dict[str, Any]]:
    rows = []
    if path.is_file():
        for line in path.read_text("utf-8").split("\n"):
            try:
                rows.append(json.loads(line))
            except ValueError:
                break  # a line cut short by a crash; everything after it is younger than any checkpoint
    return rows
