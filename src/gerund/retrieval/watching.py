"""Watch files and keep an index up to date.

Files are polled by size and time, which every file system reports; changed files are then hashed and indexed as
``Index.add`` does. A file that is being written waits until it is unchanged for an interval; one that was read too
early is read again when it changes.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gerund.checks import demand_number, flag, place
from gerund.errors import ConfigError, DataError
from gerund.retrieval.document_reader import ReadLimits, find_files
from gerund.retrieval.index import Index
from gerund.retrieval.indexing import Failure, IndexSummary

INTERVAL = 2.0
"""Seconds between two polls."""

_MIN_INTERVAL = 0.01

# A file's modification time in nanoseconds, and its size.
State = tuple[int, int]
Report = Callable[[IndexSummary], None]


def watch(
    index: Index,
    paths: str | Path | Sequence[str | Path],
    *,
    prune: bool = False,
    interval: float = INTERVAL,
    stop: threading.Event | None = None,
    report: Report | None = None,
    limits: ReadLimits | None = None,
) -> None:
    """Keep an index up to date until ``stop`` is set, or an interruption (Ctrl-C) ends it.

    A file that cannot be read is reported, and tried again when it changes. While a path itself does not exist, such as
    a removed drive, its documents stay. ``paths``, ``prune`` and ``limits`` are those of ``Index.add``; ``report`` is
    called with the summary of each round that changed something. Every path must exist at the beginning.
    """
    demand_number("interval", interval)
    if not _MIN_INTERVAL <= interval < float("inf"):
        raise ConfigError(f"`interval` must be at least {_MIN_INTERVAL} seconds, got {interval}")
    listed = [place("what is watched", path) for path in ([paths] if isinstance(paths, str | Path) else paths)]
    for path in listed:
        if not path.exists():
            raise DataError(f"{path}: no such file or folder")
    watcher = Watcher(index, listed, prune=flag("prune", prune), interval=interval, limits=limits)
    stop, report = stop or threading.Event(), report or (lambda _: None)
    while True:
        summary = watcher.round()
        if summary is not None:
            report(summary)
        if stop.wait(interval):
            return


@dataclass(frozen=True)
class _Poll:
    """The state of each file, and the paths that exist, at one moment."""

    files: dict[Path, State]
    existing: list[Path]


class Watcher:
    """Polls files and indexes those that changed; a file that is unchanged for ``interval`` seconds is complete."""

    def __init__(
        self,
        index: Index,
        paths: Sequence[Path],
        *,
        prune: bool,
        interval: float,
        limits: ReadLimits | None = None,
    ) -> None:
        self._index, self._paths, self._prune, self._interval = index, list(paths), prune, interval
        self._limits = limits
        self._indexed: dict[Path, State] = {}
        self._last: dict[Path, State] = {}
        self._reported: set[str] = set()
        self._is_first = True

    def round(self) -> IndexSummary | None:
        """Poll once and index changes; return the summary, None where nothing has changed."""
        failed: list[Failure] = []
        poll = self._poll(failed)
        now = time.time_ns()
        changed = [
            path for path, state in poll.files.items()
            if self._indexed.get(path) != state and self._is_complete(path, state, now)
        ]  # fmt: skip
        deleted = [path for path in self._indexed if path not in poll.files and _is_below(path, poll.existing)]
        self._last = poll.files
        paths = [*changed, *(deleted if self._prune else [])]
        if self._is_first and self._prune:
            paths = list(dict.fromkeys([*poll.existing, *changed]))  # also files that were deleted before
        self._is_first = False
        summary = self._add(paths) if paths else None
        for path in changed:
            self._indexed[path] = poll.files[path]
        for path in deleted:
            del self._indexed[path]
        if failed:
            summary = summary or IndexSummary()
            summary.failed += failed
        return summary

    def _poll(self, failed: list[Failure]) -> _Poll:
        files: dict[Path, State] = {}
        existing = []
        for path in self._paths:
            try:
                for file in find_files([path]):
                    status = file.stat()
                    files[file] = (status.st_mtime_ns, status.st_size)
                existing.append(path)
                self._reported.discard(str(path))
            except (DataError, OSError) as error:
                # The state of a path that does not exist, or cannot be read at the moment, is unchanged.
                files |= {file: state for file, state in self._indexed.items() if _is_below(file, [path])}
                if str(path) not in self._reported:
                    self._reported.add(str(path))
                    failed.append(Failure(str(path), f"{error}; its documents are kept"))
        return _Poll(files, existing)

    def _is_complete(self, path: Path, state: State, now: int) -> bool:
        """Whether a file is as it was at the last poll, or older than the interval."""
        return self._last.get(path) == state or now - state[0] >= self._interval * 1e9

    def _add(self, paths: list[Path]) -> IndexSummary:
        try:
            existing = [path for path in paths if path.exists() or self._prune]
            if not existing:  # all were deleted in the meantime
                return IndexSummary(files=len(paths))
            return self._index.add(existing, prune=self._prune, limits=self._limits)
        except DataError as error:
            # All of them are broken, or were deleted in the meantime.
            return IndexSummary(files=len(paths), failed=[Failure(str(paths[0]), str(error))])


def _is_below(path: Path, folders: Sequence[Path]) -> bool:
    return any(path.is_relative_to(folder) for folder in folders)
