"""Results as JSON lines, on standard output or in a file that is written whole or not at all."""

from collections.abc import Iterable
from pathlib import Path

import typer


def refuse_existing(output: Path | None, *, force: bool) -> None:
    """Refuse to write over a file.

    Raises:
        OutputExistsError: it is there and may not be replaced.
    """
    from gerund.errors import OutputExistsError

    if output is not None and output.exists() and not force:
        raise OutputExistsError(f"{output} exists already; choose another name or give --force to replace it")


def write(lines: Iterable[str], output: Path | None, total: int, label: str) -> None:
    """Print lines as they come, or write them into a file, showing progress.

    Args:
        lines: the lines, without their ends.
        output: the file; None for standard output.
        total: how many lines there will be.
        label: what the progress bar calls it.
    """
    if output is None:
        for line in lines:
            typer.echo(line)
        return
    from gerund.data.files import make_folder, whole_file
    from gerund.progress import progress

    make_folder(output.parent)
    with whole_file(output) as sink, progress(total, label) as advance:
        for line in lines:
            sink.write(f"{line}\n".encode())
            advance(1)
