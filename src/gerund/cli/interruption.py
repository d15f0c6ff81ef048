"""What a command says when it is interrupted, by Ctrl-C or SIGTERM."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer


@contextmanager
def interruption_told() -> Iterator[None]:
    """Say what was kept and how to go on, where the interrupted work has noted it on its ``KeyboardInterrupt``."""
    try:
        yield
    except KeyboardInterrupt as stop:
        for note in getattr(stop, "__notes__", ()):
            typer.echo(f"gerund: interrupted; {note}", err=True)
        raise
