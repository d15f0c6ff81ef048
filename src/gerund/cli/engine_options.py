"""Options that say where bulk work is done.

Knows: names and helps. Does not know: what a worker does.
"""

from pathlib import Path
from typing import Annotated

import typer

Engine = Annotated[str, typer.Option("--engine", help="Where the work is done: local (this machine) or ray.")]
Workers = Annotated[
    int | None,
    typer.Option("--workers", "-j", help="Processes; left out, one a core, or all of a cluster.", show_default=False),
]
ModelWorkers = Annotated[
    int | None,
    typer.Option(
        "--workers",
        "-j",
        help="Processes, each with the model; left out, this one alone, or all of a cluster.",
        show_default=False,
    ),
]
Address = Annotated[
    str | None,
    typer.Option(
        "--address",
        help="The Ray cluster: auto, HOST:PORT, or local to start one here; left out, RAY_ADDRESS.",
        show_default=False,
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads", help="Threads a process; left out, 1, or all where it is this one alone.", show_default=False
    ),
]
Place = Annotated[
    Path | None,
    typer.Option(
        "--work",
        help="Folder for unfinished parts, which all machines share; left out, beside OUT.",
        show_default=False,
    ),
]
