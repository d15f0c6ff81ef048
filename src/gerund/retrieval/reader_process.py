"""The process that parses documents for ``document_reader``, so that a hostile file harms nothing else.

Standard input has one request per line, ``{"path", "ending", "seconds", "memory"}``. Standard output has the answers,
one per line: ``{"begun": true}``, then any number of ``{"documents": [...]}``, then ``{"end": true}`` or ``{"error":
KIND, "message": ...}``. The process ends with its standard input, and the system ends it when a document takes too
long, even if its parent is gone.
"""

import json
import os
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from gerund.data.files import as_utf8
from gerund.errors import DataError, MissingDependencyError, is_panic
from gerund.retrieval.formats import ParsedText, load_libraries, parse

ROWS_AT_ONCE = 64
# The parent ends the process first, and reports why.
_GRACE_SECONDS = 5
_UNPACKED_PART = 4  # of the memory: a text is held in several forms while it is parsed


def main() -> None:
    """Answer requests until there are no more."""
    # Ctrl-C goes to all processes of a terminal; the parent ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Answers go to standard output; what a library prints there is discarded.
    answers = os.fdopen(os.dup(1), "wb")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    _answer(answers, {"ready": True})
    for line in sys.stdin.buffer:
        _serve(json.loads(line), answers)


def _serve(request: Mapping[str, Any], answers: BinaryIO) -> None:
    load_libraries(request["ending"])
    _answer(answers, {"begun": True})
    try:
        with _memory_limit(request["memory"]):
            rows = parse(Path(request["path"]), request["ending"], request["memory"] // _UNPACKED_PART)
            for batch in _batches(rows, request["seconds"]):
                _answer(answers, {"documents": batch})
        last: dict[str, Any] = {"end": True}
    except MissingDependencyError as error:
        last = {"error": "dependency", "message": str(error)}
    except DataError as error:
        last = {"error": "data", "message": str(error)}
    except MemoryError:
        last = {"error": "memory"}
    except BrokenPipeError:
        raise
    except BaseException as error:
        if not (isinstance(error, Exception) or is_panic(error)):
            raise
        last = {"error": "data", "message": f"{request['path']}: cannot be read ({type(error).__name__}: {error})"}
    _answer(answers, last)


def _batches(parsed: Iterable[ParsedText | DataError], seconds: float) -> Iterator[list[dict[str, Any]]]:
    rows = iter(parsed)
    while True:
        with _time_limit(seconds):
            batch = [_plain(row) for row in islice(rows, ROWS_AT_ONCE)]
        if not batch:
            return
        yield batch


def _plain(row: ParsedText | DataError) -> dict[str, Any]:
    return {"bad": str(row)} if isinstance(row, DataError) else asdict(row)


def _answer(answers: BinaryIO, message: Mapping[str, Any]) -> None:
    answers.write(as_utf8(json.dumps(message, ensure_ascii=False)).encode() + b"\n")
    answers.flush()


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Let the system end this process if the block takes longer; not on Windows."""
    if not hasattr(signal, "setitimer"):
        yield
        return
    signal.setitimer(signal.ITIMER_REAL, seconds + _GRACE_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


@contextmanager
def _memory_limit(most_bytes: int) -> Iterator[None]:
    """Limit this process to its current memory plus ``most_bytes``, where the system supports it."""
    try:
        import resource
    except ImportError:  # Windows
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_AS)
    limit = _used_bytes() + most_bytes
    with suppress(ValueError, OSError):  # macOS has the limit and ignores it
        resource.setrlimit(resource.RLIMIT_AS, (limit if before[1] < 0 else min(limit, before[1]), before[1]))
    try:
        yield
    finally:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_AS, before)


def _used_bytes() -> int:
    """Return the address space of this process, which is larger than the memory that it uses."""
    try:
        return int(Path("/proc/self/statm").read_text("ascii").split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 2**30


if __name__ == "__main__":
    with suppress(BrokenPipeError):
        main()
