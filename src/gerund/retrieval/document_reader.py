"""Find files and read them into text: plain text and tables in this process, other formats in a separate one.

A file of text is one document; each row of a table (JSON lines, CSV, Parquet) is a document. A parser may crash, hang
or fill the memory on a malformed file. In a separate process that is an error of this file only, and a new process
reads the next file. The process starts when the first file needs it.

Other packages can add file types, or replace readers, with the entry point ``gerund.readers``: its name is a file
ending, and it is a function that takes a path and returns Markdown. These run in this process.
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
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from typing import Any, Self

from gerund.checks import demand_number, whole_number
from gerund.data.files import COMPRESSED, checked_text
from gerund.errors import ConfigError, DataError, GerundError, MissingDependencyError, is_panic
from gerund.retrieval.formats import PARSERS, PLAIN, TABLES, ParsedText, Section, markdown, parse_table, utf8_or_none
from gerund.retrieval.store import POINTER_FOLDER

ENTRY_POINTS = "gerund.readers"

# For starting the process and importing a format's library, which is not part of a document's time.
_START_SECONDS = 120.0
_LEAST_MEMORY = 64 * 10**6

_log = logging.getLogger("gerund.retrieval")


class NoTextError(DataError):
    """A readable file without text, so that its stored documents are out of date."""


@dataclass(frozen=True, kw_only=True)
class ReadLimits:
    """Limits for parsing a document; uncompressed UTF-8 text, Markdown and tables have none.

    Raises:
        ConfigError: a limit is too small.

    >>> ReadLimits(seconds=0)
    Traceback (most recent call last):
    gerund.errors.ConfigError: `seconds` must be above 0, got 0
    """

    seconds: float = 60.0
    """Seconds to parse the document, or 64 rows of a table."""

    memory: int = 10**9
    """Bytes of memory, in addition to those of the libraries; the document may unpack to a quarter of it. Windows and
    macOS limit only the latter."""

    def __post_init__(self) -> None:
        demand_number("seconds", self.seconds)
        if not 0 < self.seconds <= threading.TIMEOUT_MAX:
            most = "" if self.seconds <= 0 else f" and at most {threading.TIMEOUT_MAX:g}"
            raise ConfigError(f"`seconds` must be above 0{most}, got {self.seconds:g}")
        if whole_number("memory", self.memory) < _LEAST_MEMORY:
            raise ConfigError(f"`memory` must be at least 64 MB ({_LEAST_MEMORY} bytes), got {self.memory}")


class DocumentReader:
    """Reads files one after the other, with a process for those that need a parser.

    Use it as a context manager, which ends the process. It is not thread-safe.
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
                with suppress(OSError):  # unsent data
                    pipe.close()
        process.wait()

    def read(self, path: Path, bad: Callable[[DataError], None] | None = None) -> Iterator[ParsedText]:
        """Yield the documents of a file in order, without rows that have no text; a file without any raises.

        ``bad`` is called with the error of each row of a table that cannot be read, which is skipped; None raises.
        """
        ending, count, empty = ending_of(path), 0, 0
        for parsed in self._rows(path, ending):
            if isinstance(parsed, DataError):
                if bad is None:
                    raise parsed
                bad(parsed)
                count += 1
            elif parsed.text.strip():
                count += 1
                if parsed.encoding:
                    # Only a detected encoding may be wrong.
                    level = logging.WARNING if parsed.encoding.endswith("(detected)") else logging.INFO
                    _log.log(level, "%s: read as %s", path, parsed.encoding)
                yield parsed
            else:
                empty += 1
        if count and empty:
            _log.warning("%s: rows without text are left out: %d", path, empty)
        if not count:
            hint = "; are its pages pictures of text?" if ending == "pdf" else ""
            raise NoTextError(f"{path}: there is no text in it{hint}")

    def _rows(self, path: Path, ending: str) -> Iterable[ParsedText | DataError]:
        # An installed reader replaces gerund's own for the same ending.
        if ending in plugins():
            return _read_by_plugin(plugins()[ending], path)
        is_compressed = path.suffix.lower() in COMPRESSED
        if ending in TABLES and ending != "parquet" and not is_compressed:
            return parse_table(path, ending)
        if ending not in PARSERS:
            raise DataError(f"{path}: unknown kind of file; known are: {', '.join(f'.{name}' for name in endings())}")
        if ending in PLAIN and not is_compressed and (text := _plain_text(path)) is not None:
            return [ParsedText(text) if ending == "txt" else markdown(text)]
        return self._read_by_process(path, ending)

    def _read_by_process(self, path: Path, ending: str) -> Iterator[ParsedText | DataError]:
        """Yield what the process parses; any failure of it is this file's error."""
        is_reusable = False
        try:
            self._request(path, ending)
            self._next(path, _START_SECONDS)
            while True:
                message = self._next(path, self.limits.seconds)
                if "documents" not in message:
                    # After an out-of-memory error, memory may still be taken.
                    is_reusable = message.get("error") != "memory"
                    _raise_error(message, path, self.limits)
                    return
                for row in message["documents"]:
                    yield _row_of(row)
        finally:
            # After a stop in the middle, the next file would get the rest of this one.
            if not is_reusable:
                self.close()

    def _request(self, path: Path, ending: str) -> None:
        if self._process is not None and self._process.poll() is not None:
            self.close()  # it ended between two files
        if self._process is None:
            self._process = _start_process()
            self._next(path, _START_SECONDS)
        request = {"path": str(path), "ending": ending, "seconds": self.limits.seconds, "memory": self.limits.memory}
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise DataError(f"{path}: cannot be read (the reader process ended: {error})") from error

    def _next(self, path: Path, seconds: float) -> Mapping[str, Any]:
        """Return the process's next message; kill the process if it takes too long."""
        process = self._process
        assert process is not None
        assert process.stdout is not None
        is_late = threading.Event()

        def kill() -> None:
            is_late.set()
            process.kill()

        timer = threading.Timer(seconds, kill)
        timer.daemon = True
        timer.start()
        try:
            line = process.stdout.readline()
        finally:
            timer.cancel()
        if line.endswith(b"\n") and not is_late.is_set():
            message: Mapping[str, Any] = json.loads(line)
            return message
        if is_late.is_set():
            raise DataError(
                f"{path}: reading it took longer than {seconds:g} seconds; it may be damaged, or needs a higher limit "
                "(--read-seconds)"
            )
        code = process.wait()
        how = f"signal {-code}" if code < 0 else f"exit status {code}"
        raise DataError(
            f"{path}: its reader process ended ({how}); the file may be damaged, or need more memory "
            f"than {_mb(self.limits.memory)} (--read-memory)"
        )


def _start_process() -> subprocess.Popen[bytes]:
    """Start the process with this process's modules, but without those in the working folder."""
    environment = {
        "PYTHONPATH": os.pathsep.join(folder for folder in sys.path if folder),
        # Threads and their memory arenas count as used memory.
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
        env={**os.environ, **environment},
    )


def _mb(size: int) -> str:
    return f"{size // 10**6} MB"


def _row_of(row: Mapping[str, Any]) -> ParsedText | DataError:
    if "bad" in row:
        return DataError(row["bad"])
    sections = tuple(Section(section["start"], tuple(section["path"])) for section in row["sections"])
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
    """Return a file's text if it is UTF-8, else None."""
    try:
        return utf8_or_none(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error


@cache
def plugins() -> Mapping[str, metadata.EntryPoint]:
    """Return the readers of other packages by file ending."""
    return {entry.name.lower().removeprefix("."): entry for entry in metadata.entry_points(group=ENTRY_POINTS)}


def _read_by_plugin(entry: metadata.EntryPoint, path: Path) -> Iterator[ParsedText]:
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
    """Return a file's ending, without the dot and without that of compression.

    >>> ending_of(Path("a/notes.MD.gz"))
    'md'
    """
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSED:
        suffixes.pop()
    return suffixes[-1].removeprefix(".") if suffixes else ""


def endings() -> tuple[str, ...]:
    """Return the endings of files that can be read, including those of other packages."""
    return tuple(dict.fromkeys((*PARSERS, *plugins())))


def find_files(paths: Sequence[Path]) -> list[Path]:
    """Return these files, and all files of supported types below these folders, sorted.

    Hidden files and folders are skipped, and links to folders are not followed. A file among ``paths`` is returned
    regardless of its ending.
    """
    files: dict[Path, None] = {}
    for path in paths:
        if not path.exists():
            raise DataError(f"{path}: no such file or folder")
        if path.is_dir():
            files |= dict.fromkeys(sorted(file for file in _visible_below(path) if ending_of(file) in endings()))
        elif path.is_file():
            files[path] = None
        else:
            raise DataError(f"{path}: neither a file nor a folder")
    return list(files)


def unknown_files(paths: Sequence[Path]) -> dict[str, int]:
    """Return the number of files of unsupported types below these folders, by ending."""
    counts = Counter(
        path.suffix.lower() or "no ending"
        for folder in paths
        if folder.is_dir()
        for path in _visible_below(folder)
        if ending_of(path) not in endings()
    )
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def _visible_below(folder: Path) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename}: cannot be read ({error.strerror})") from error

    for place, folders, names in os.walk(folder, onerror=refuse):
        if POINTER_FOLDER in folders:  # an index
            folders.clear()
            continue
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            path = Path(place, name)
            if not name.startswith(".") and path.is_file():
                yield path


def stem_of(path: Path) -> str:
    """Return a file's name without its ending and without that of compression.

    >>> stem_of(Path("a/v1.2 release notes.MD.gz")), stem_of(Path("LICENSE"))
    ('v1.2 release notes', 'LICENSE')
    """
    inner = path.with_suffix("") if path.suffix.lower() in COMPRESSED else path
    return inner.stem


def digest_of(path: Path) -> str:
    """Return a hash of a file's bytes: 32 hexadecimal digits."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, partial(hashlib.blake2b, digest_size=16)).hexdigest()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error


def read_file(
    path: Path, bad: Callable[[DataError], None] | None = None, *, limits: ReadLimits | None = None
) -> Iterator[ParsedText]:
    """Yield the documents of one file, as ``DocumentReader.read`` does; for many files, use one ``DocumentReader``."""
    with DocumentReader(limits) as reader:
        yield from reader.read(path, bad)
