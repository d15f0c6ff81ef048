"""Notes: what a user should know about a result, logged once in a process; the command line prints them.

Knows: logging. Does not know: what the notes say.
"""

import logging
import multiprocessing
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

logger = logging.getLogger("gerund")


@cache
def say_once(message: str) -> None:
    """Log a message once in a process, and in those that it starts only where they print notes themselves."""
    prints = any(isinstance(handler, _ToStandardError) for handler in logger.handlers)
    if prints or multiprocessing.parent_process() is None:
        logger.warning(message)


class _ToStandardError(logging.Handler):
    """Prints each note as a line of the command."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print the message."""
        print(f"gerund: {record.getMessage()}", file=sys.stderr)  # noqa: T201


@contextmanager
def printed_notes() -> Iterator[None]:
    """Print notes to standard error until the block ends, each of them once."""
    handler, propagated = _ToStandardError(), logger.propagate
    say_once.cache_clear()
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagated
