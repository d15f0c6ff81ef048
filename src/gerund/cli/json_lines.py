"""Results as JSON lines, on standard output or in a file that is written whole or not at all."""

from collections.abc import Iterable
from pathlib import Path

import typer


def refuse_existing(output: Path | None, *, force: bool) -> None:
    """Refuse to write over a file, or to where no file can be written whole.

    Raises:
        OutputExistsError: it is there and may not be replaced.
        InputError: it is a symbolic link, a device or a pipe.
    """
    from gerund.jobs import files

    if output is None:
        return
    files.refuse_special(output)
    if not force:
        files.refuse_existing(output)


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
    from gerund.jobs.files import make_folder, whole_file
    from gerund.progress import progress

    make_folder(output.parent)
    with whole_file(output) as sink, progress(total, label) as advance:
        for line in lines:
            sink.write(f"{line}\n".encode())
            advance(1)
