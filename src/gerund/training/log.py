"""The log of a training: one JSON line a log step, and what the terminal shows meanwhile.

Knows: time, tokens, memory, lines. Does not know: models or the trainer.
"""

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from gerund.jobs.files import write_whole
from gerund.training.machine import peak_memory_mib


def announce(text: str) -> None:
    """Show a line on the terminal's error stream."""
    Console(stderr=True, highlight=False).print(text, soft_wrap=True)


class TrainingLog:
    """Writes ``log.jsonl`` and shows progress: a bar on a terminal, plain lines elsewhere.

    Args:
        path: The file of lines. After a resume the lines beyond ``step`` are dropped, since those steps
            are done again; what the kept ones say about elapsed time is carried on.
        step: The step that the training starts from.
        steps: The step it ends with.
        silent: Neither write nor show anything: another process does.
    """

    def __init__(self, path: Path, *, step: int, steps: int, silent: bool = False) -> None:
        self.path, self.steps, self.silent = path, steps, silent
        self.rows = [row for row in _read_rows(path) if row["step"] <= step]
        if not silent:
            write_whole(path, "".join(json.dumps(row) + "\n" for row in self.rows))
        self.tokens = self.rows[-1]["tokens"] if self.rows else 0
        self.seconds_before = self.rows[-1]["seconds"] if self.rows else 0.0
        self._started = time.perf_counter()
        self._busy = 0.0
        self._last = (self.tokens, self._busy)
        self._step_began = self._started
        self._console = Console(stderr=True, highlight=False)
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
