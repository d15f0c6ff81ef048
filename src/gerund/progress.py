"""Progress bars on a terminal or progress lines elsewhere, and notes that are logged once per process."""

import logging
import multiprocessing
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Protocol

LINE_SECONDS = 30.0
"""Seconds between two lines where there is no terminal."""
_SHORT_STAGE_SECONDS = 5.0

# Counts what silent ``progress`` blocks do, as a share of their work.
_counter: ContextVar[Callable[[float], None] | None] = ContextVar("gerund_progress_counter", default=None)
_line_seconds: ContextVar[float | None] = ContextVar("gerund_progress_line_seconds", default=None)


@contextmanager
def progress_lines(seconds: float = LINE_SECONDS) -> Iterator[None]:
    """Let ``progress`` write a line to stderr every ``seconds`` until the block ends, unless stderr is a terminal."""
    token = _line_seconds.set(seconds)
    try:
        yield
    finally:
        _line_seconds.reset(token)


class Advance(Protocol):
    """Advances a bar, whose total and label may change when more is known."""

    def __call__(self, steps: int, /, *, total: int | None = None, label: str | None = None) -> None:
        """Add steps."""


@contextmanager
def counted_by(count: Callable[[float], None]) -> Iterator[None]:
    """Let silent ``progress`` of called work report each step to ``count``, as a share of that work."""
    token = _counter.set(count)
    try:
        yield
    finally:
        _counter.reset(token)


@contextmanager
def counted_as(share: float) -> Iterator[None]:
    """Count called work, with its silent ``progress``, as a share of the work around it: 0.5 for one of two passes."""
    count = _counter.get()
    if count is None:
        yield
        return
    with counted_by(lambda more: count(share * more)):
        yield


@contextmanager
def progress(total: int | None, label: str, *, show: bool | None = None) -> Iterator[Advance]:
    """Show a bar on stderr while the block runs; yields a function that advances it.

    Args:
        total: number of steps; None for unknown.
        label: name of the work.
        show: True or False; None shows a bar where stderr is a terminal, and elsewhere lines in a block of
            ``progress_lines``.
    """
    if show is None and not sys.stderr.isatty() and (seconds := _line_seconds.get()) is not None:
        with _lines(total, label, seconds) as advance:
            yield advance
        return
    if show is None:
        show = sys.stderr.isatty()
    if not show:
        count = _counter.get()

        def silent(steps: int, /, **_: object) -> None:
            if count is not None and total:
                count(steps / total)

        yield silent
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(label, total=total)

        def advance(steps: int, /, *, total: int | None = None, label: str | None = None) -> None:
            bars.update(task, advance=steps, total=total, description=label)

        yield advance


@contextmanager
def _lines(total: int | None, label: str, seconds: float) -> Iterator[Advance]:
    """Write a line at every interval, even without a step, and one at the end of long work."""
    done, began, end = 0, time.monotonic(), threading.Event()

    shown = (label, total)

    def advance(steps: int, /, *, total: int | None = None, label: str | None = None) -> None:
        nonlocal done, shown
        done, shown = done + steps, (label or shown[0], total or shown[1])

    def write() -> None:
        label, total = shown
        print(f"gerund: {_progress_text(label, done, total, time.monotonic() - began)}", file=sys.stderr, flush=True)  # noqa: T201

    def watch() -> None:
        while not end.wait(seconds):
            write()

    watcher = threading.Thread(target=watch, name="gerund-progress", daemon=True)
    watcher.start()
    try:
        yield advance
    finally:
        end.set()
        watcher.join()
        if time.monotonic() - began >= min(_SHORT_STAGE_SECONDS, seconds):
            write()


def _progress_text(label: str, done: int, total: int | None, seconds: float) -> str:
    """Return the text of a progress line.

    >>> _progress_text("encoding", 250, 1000, 30.2)
    'encoding: 250 of 1,000 in 30 s, about 91 s left'
    """
    left = "" if not total or not 0 < done < total else f", about {seconds * (total - done) / done:.0f} s left"
    return f"{label}: {done:,}{'' if total is None else f' of {total:,}'} in {seconds:.0f} s{left}"


logger = logging.getLogger("gerund")


def counted(number: int, what: str) -> str:
    """Return a number with its noun.

    >>> counted(1, "document"), counted(2000, "document")
    ('1 document', '2,000 documents')
    """
    return f"{number:,} {what}{'' if number == 1 else 's'}"


@cache
def say_once(message: str) -> None:
    """Log a message once per process; child processes log only where they print notes themselves."""
    prints = any(isinstance(handler, _ToStandardError) for handler in logger.handlers)
    if prints or multiprocessing.parent_process() is None:
        logger.warning(message)


class _ToStandardError(logging.Handler):
    """Prints each note to standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print the message."""
        print(f"gerund: {record.getMessage()}", file=sys.stderr)  # noqa: T201


@contextmanager
def printed_notes() -> Iterator[None]:
    """Print notes to standard error until the block ends, each once."""
    handler, propagated = _ToStandardError(), logger.propagate
    say_once.cache_clear()
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagated
