"""A progress bar on a terminal, and silence everywhere else."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(total: int | None, label: str, *, show: bool | None = None) -> Iterator[Callable[[int], None]]:
    """Show a bar on stderr while the block runs; yields a function that advances it.

    Args:
        total: number of steps, or None when it is not known.
        label: what is being done.
        show: True or False to insist; None shows it only when stderr is a terminal.
    """
    if show is None:
        show = sys.stderr.isatty()
    if not show:
        yield lambda _steps: None
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
        yield lambda steps: bars.advance(task, steps)
