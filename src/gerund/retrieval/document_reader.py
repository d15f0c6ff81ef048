"""Read files into documents: plain text and rows of tables here, all other formats in a process of their own.

A parser may crash, hang or fill the memory on a malformed file. In another process that is an error of this file alone,
and the next file is read by a new process. It is started when the first file needs it.

Other packages read further kinds of files, or known ones in their own way, by the entry point ``gerund.readers``: its
name is the ending of a file, and it is a function that takes a path and returns Markdown. They run in this process.

Knows: formats, the reader process, limits. Does not know: folders, chunks, models.
"""

import hashlib
import json
import logging
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Self

from gerund.checks import demand_number, whole_number
from gerund.data.files import COMPRESSED, checked_text
from gerund.errors import ConfigError, DataError, GerundError, MissingDependencyError
from gerund.retrieval.encodings import utf8_or_none
from gerund.retrieval.formats import PARSERS, PLAIN, TABLES, ParsedText, Section, is_panic, markdown, parse_table
from gerund.retrieval.store import POINTER_FOLDER

ENTRY_POINTS = "gerund.readers"

# Starting the process, and importing what a format needs, is no fault of a document.
_START_SECONDS = 120.0
_LEAST_MEMORY = 64 * 10**6

_log = logging.getLogger("gerund.retrieval")


class NoTextError(DataError):
    """A file that can be read and has no text, so that what it had before is out of date."""


@dataclass(frozen=True, kw_only=True)
class ReadLimits:
    """What parsing one document may take: all but plain UTF-8 text, Markdown and tables that are not compressed.

    Raises:
        ConfigError: a limit is too small.

    >>> ReadLimits(seconds=0)
    Traceback (most recent call last):
    gerund.errors.ConfigError: seconds=0 leaves no time to read a document; give a number above 0
    """

    seconds: float = 60.0
    """Seconds to parse the document, or 64 rows of a table."""

    memory: int = 10**9
    """Bytes of memory, beyond what the libraries take; a quarter of it is what the document may unpack to. Windows and
    macOS limit only the latter."""

    def __post_init__(self) -> None:
        demand_number("seconds", self.seconds)
        if not 0 < self.seconds <= threading.TIMEOUT_MAX:
            raise ConfigError(f"seconds={self.seconds:g} leaves no time to read a document; give a number above 0")
        if whole_number("memory", self.memory) < _LEAST_MEMORY:
            raise ConfigError(f"memory={self.memory} bytes are too few to read a document; give at least 64 MB")


class DocumentReader:
    """Reads files one after the other, with a process for those that need a parser.

    Use it as a context manager: leaving it ends the process. One thread may use it at a time.

    Args:
        limits: what a document may take; None for the usual ones.
    """

    def __init__(self, limits: ReadLimits | None = None) -> None:
        self.limits = limits or ReadLimits()
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process; the next file that needs one starts another."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                _close_quietly(pipe)
        process.wait()

    def read(self, path: Path, bad: Callable[[DataError], None] | None = None) -> Iterator[ParsedText]:
        """Yield the documents of a file in order; a row without any text is skipped.

        Args:
            path: the file.
            bad: called with the error of each row of a table that cannot be read, which is skipped; None raises.

        Raises:
            DataError: the file cannot be read, is of an unknown kind, is malformed, or takes more time or memory than
                the limits allow; with its name, and where there is one, the line.
            NoTextError: it has no text at all.
            MissingDependencyError: a library is needed to read it; the message has the pip line.
        """
        ending, count = ending_of(path), 0
        for parsed in self._rows(path, ending):
            if isinstance(parsed, DataError):
                if bad is None:
                    raise parsed
                bad(parsed)
                count += 1
            elif parsed.text.strip():
                count += 1
                if parsed.encoding:
                    # A guess may be wrong; what the file itself says is not.
                    level = logging.WARNING if parsed.encoding.endswith("(detected)") else logging.INFO
                    _log.log(level, "%s: read as %s", path, parsed.encoding)
                yield parsed
        if not count:
            hint = "; are its pages pictures of text?" if ending == "pdf" else ""
            raise NoTextError(f"{path}: there is no text in it{hint}")

    def _rows(self, path: Path, ending: str) -> Iterable[ParsedText | DataError]:
        # Whoever installs another reader for a kind that is known here wants that one.
        if ending in foreign_readers():
            return _foreign(foreign_readers()[ending], path)
        packed = path.suffix.lower() in COMPRESSED
        if ending in TABLES and ending != "parquet" and not packed:
            return parse_table(path, ending)
        if ending not in PARSERS:
            raise DataError(f"{path}: unknown kind of file; known are: {', '.join(f'.{name}' for name in endings())}")
        if ending in PLAIN and not packed and (text := _plain_text(path)) is not None:
            return [ParsedText(text) if ending == "txt" else markdown(text)]
        return self._parsed_elsewhere(path, ending)

    def _parsed_elsewhere(self, path: Path, ending: str) -> Iterator[ParsedText | DataError]:
        """Yield what the process parses; whatever happens there is this file's error."""
        in_step = False
        try:
            self._request(path, ending)
            self._next(path, _START_SECONDS)
            while True:
                message = self._next(path, self.limits.seconds)
                if "documents" not in message:
                    # What took all memory may not have given it back.
                    in_step = message.get("error") != "memory"
                    _raise_error(message, path, self.limits)
                    return
                for row in message["documents"]:
                    yield _row_of(row)
        finally:
            # Who stops in the middle would get the rest of this file for the next one.
            if not in_step:
                self.close()

    def _request(self, path: Path, ending: str) -> None:
        if self._process is not None and self._process.poll() is not None:
            self.close()  # it ended between two files, which is no fault of this one
        if self._process is None:
            self._process = _started()
            self._next(path, _START_SECONDS)
        asked = {"path": str(path), "ending": ending, "seconds": self.limits.seconds, "memory": self.limits.memory}
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(asked).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise DataError(f"{path}: cannot be read (the reader process ended: {error})") from error

    def _next(self, path: Path, seconds: float) -> Mapping[str, Any]:
        """Return the process's next message; without one in time the process is ended."""
        process = self._process
        assert process is not None
        assert process.stdout is not None
        late = threading.Event()

        def end() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(seconds, end)
        timer.daemon = True
        timer.start()
        try:
            line = process.stdout.readline()
        finally:
            timer.cancel()
        if line.endswith(b"\n") and not late.is_set():
            message: Mapping[str, Any] = json.loads(line)
            return message
        if late.is_set():
            raise DataError(
                f"{path}: reading it took longer than {seconds:g} seconds; it may be damaged, or needs a higher limit "
                "(--read-seconds)"
            )
        raise DataError(
            f"{path}: its reader process ended ({_how(process.wait())}); the file may be damaged, or need more memory "
            f"than {_mb(self.limits.memory)} (--read-memory)"
        )


def _started() -> subprocess.Popen[bytes]:
    """Start the process with the modules that this one has, but none of the folder that it happens to run in."""
    own = {
        "PYTHONPATH": os.pathsep.join(place for place in sys.path if place),
        # Threads and their memory arenas count as memory that is used.
        "MALLOC_ARENA_MAX": "2",
        "OMP_NUM_THREADS": "1",
        "ARROW_DEFAULT_MEMORY_POOL": "system",
    }
    command = [sys.executable, "-P", "-m", "gerund.retrieval.reader_process"]
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **own},
    )


def _close_quietly(pipe: Any) -> None:
    try:
        pipe.close()
    except OSError:  # what was not sent cannot be any more
        return


def _how(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit status {code}"


def _mb(size: int) -> str:
    return f"{size // 10**6} MB"


def _row_of(row: Mapping[str, Any]) -> ParsedText | DataError:
    if "bad" in row:
        return DataError(row["bad"])
    sections = tuple(Section(one["start"], tuple(one["path"])) for one in row["sections"])
    return ParsedText(row["text"], row["title"], sections, row["key"], row["encoding"])


def _raise_error(message: Mapping[str, Any], path: Path, limits: ReadLimits) -> None:
    kind = message.get("error")
    if kind == "dependency":
        raise MissingDependencyError(message["message"])
    if kind == "memory":
        raise DataError(
            f"{path}: reading it needs more memory than {_mb(limits.memory)}; allow the reader more (--read-memory)"
        )
    if kind is not None:
        raise DataError(message["message"])


def _plain_text(path: Path) -> str | None:
    """Return a file's text if it is UTF-8; None where it is something else."""
    try:
        return utf8_or_none(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error


@cache
def foreign_readers() -> Mapping[str, metadata.EntryPoint]:
    """Return the readers of other packages by the ending of their files."""
    return {one.name.lower().removeprefix("."): one for one in metadata.entry_points(group=ENTRY_POINTS)}


def _foreign(entry: metadata.EntryPoint, path: Path) -> Iterator[ParsedText]:
    try:
        text = entry.load()(path)
    except GerundError:
        raise
    except BaseException as error:
        if not (isinstance(error, Exception) or is_panic(error)):
            raise
        raise DataError(f"{path}: the reader {entry.value} failed on it ({error})") from error
    yield markdown(checked_text(text, str(path), "the reader's text"))


def ending_of(path: Path) -> str:
    """Return what a file's name ends in, without the dot and without that of an archive.

    >>> ending_of(Path("a/notes.MD.gz"))
    'md'
    """
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSED:
        suffixes.pop()
    return suffixes[-1].removeprefix(".") if suffixes else ""


def endings() -> tuple[str, ...]:
    """Return the endings of files that can be read, those of other packages among them."""
    return tuple(dict.fromkeys((*PARSERS, *foreign_readers())))


_PIECE = 2**20


def find_files(paths: Sequence[Path]) -> list[Path]:
    """Return these files, and for a folder all files in it and below it that can be read here, sorted.

    Hidden files and folders are passed over, and links to folders are not followed. A file that is named is returned
    whatever its ending.

    Raises:
        DataError: a path is not there, or is neither a file nor a folder.
    """
    found: dict[Path, None] = {}
    for path in paths:
        if not path.exists():
            raise DataError(f"{path}: no such file or folder")
        if path.is_dir():
            found |= dict.fromkeys(sorted(_files_below(path)))
        elif path.is_file():
            found[path] = None
        else:
            raise DataError(f"{path}: neither a file nor a folder")
    return list(found)


def unknown_files(paths: Sequence[Path]) -> dict[str, int]:
    """Return how many files in these folders are of no kind that can be read here, by their ending."""
    counts = Counter(
        path.suffix.lower() or "no ending"
        for folder in paths
        if folder.is_dir()
        for path in _visible_below(folder)
        if ending_of(path) not in endings()
    )
    return dict(sorted(counts.items(), key=lambda own: (-own[1], own[0])))


def _files_below(folder: Path) -> Iterator[Path]:
    return (path for path in _visible_below(folder) if ending_of(path) in endings())


def _visible_below(folder: Path) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename}: cannot be read ({error.strerror})") from error

    for place, folders, names in os.walk(folder, onerror=refuse):
        if POINTER_FOLDER in folders:  # an index's own files are nobody's documents
            folders.clear()
            continue
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            path = Path(place, name)
            if not name.startswith(".") and path.is_file():
                yield path


def stem_of(path: Path) -> str:
    """Return a file's name without its ending and without that of an archive.

    >>> stem_of(Path("a/v1.2 release notes.MD.gz")), stem_of(Path("LICENSE"))
    ('v1.2 release notes', 'LICENSE')
    """
    inner = path.with_suffix("") if path.suffix.lower() in COMPRESSED else path
    return inner.stem


def digest_of(path: Path) -> str:
    """Return a hash of a file's bytes: 32 hexadecimal digits.

    Raises:
        DataError: it cannot be read.
    """
    whole = hashlib.blake2b(digest_size=16)
    try:
        with path.open("rb") as file:
            while piece := file.read(_PIECE):
                whole.update(piece)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
    return whole.hexdigest()


def read_file(
    path: Path, bad: Callable[[DataError], None] | None = None, *, limits: ReadLimits | None = None
) -> Iterator[ParsedText]:
    """Yield the documents of one file, as ``DocumentReader.read`` does; for many files, use one ``DocumentReader``."""
    with DocumentReader(limits) as reader:
        yield from reader.read(path, bad)
