"""The options of commands that read documents: how much time and memory one may take.

Knows: options. Does not know: formats.
"""

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from gerund.retrieval.document_reader import ReadLimits

SECONDS, MEMORY = 60.0, "1GB"

Seconds = Annotated[
    float, typer.Option("--read-seconds", help="Longest time to parse one HTML, Word, EPUB, PDF or Parquet file.")
]
Memory = Annotated[
    str,
    typer.Option(
        "--read-memory", help="Most memory to parse one such file; a quarter of it is what the file may unpack to."
    ),
]


def limits_of(seconds: float, memory: str) -> "ReadLimits":
    """Return the limits that these options mean.

    Raises:
        ConfigError: one is not a number or size, or is too small.
    """
    from gerund.jobs.disk_cache import parse_size
    from gerund.retrieval.document_reader import ReadLimits

    return ReadLimits(seconds=seconds, memory=parse_size(memory))
