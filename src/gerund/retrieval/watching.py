"""An index that follows its files: whatever appears, changes or goes is taken over within seconds.

Files are looked at again and again, by size and time alone, which every file system can tell; what has changed is then
hashed and indexed as ``Index.add`` does it. A file that somebody is still writing waits until it has been left alone;
one that was read half-written all the same is read again when it changes.

Knows: files' sizes and times, rounds. Does not know: what indexing does.
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
"""Seconds between two looks."""

_LEAST = 0.01

# A file's time in nanoseconds and its size.
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
    """Keep an index fresh until ``stop`` is set, or an interruption (Ctrl-C) ends it.

    A file that cannot be read is reported, and tried again when it changes. While a path itself is not there, such as a
    drive that was taken away, its documents stay.

    Args:
        index: the index.
        paths: files, and folders of files, as ``Index.add`` takes them.
        prune: remove the documents of files that go.
        interval: seconds between two looks.
        stop: ends it.
        report: called after each round in which anything was done, with what that was.
        limits: what reading a document may take; None for the usual limits.

    Raises:
        DataError: a path is not there at the beginning.
        ConfigError: the interval is no positive number.
        FingerprintError: the index was made with another encoder.
        ResourceError: memory or disk ran out; what was stored is kept.
    """
    demand_number("interval", interval)
    if not _LEAST <= interval < float("inf"):
        raise ConfigError(f"interval={interval} is no number of seconds from {_LEAST} on")
    listed = [paths] if isinstance(paths, str | Path) else list(paths)
    wanted = [place("what is watched", one) for one in listed]
    for path in wanted:
        if not path.exists():
            raise DataError(f"{path}: no such file or folder")
    follower = Follower(index, wanted, prune=flag("prune", prune), interval=interval, limits=limits)
    stop, report = stop or threading.Event(), report or (lambda _: None)
    while True:
        summary = follower.round()
        if summary is not None:
            report(summary)
        if stop.wait(interval):
            return


@dataclass(frozen=True)
class _Look:
    """What there is at one moment: each file's state, and the paths that are there at all."""

    files: dict[Path, State]
    there: list[Path]


class Follower:
    """What has been seen of files, and what was done about it.

    Args:
        index: the index.
        paths: files, and folders of files.
        prune: remove the documents of files that go.
        interval: a file that was not changed for so many seconds is not being written any more.
        limits: what reading a document may take; None for the usual limits.
    """

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
        self._done: dict[Path, State] = {}
        self._last: dict[Path, State] = {}
        self._told: set[str] = set()
        self._is_first = True

    def round(self) -> IndexSummary | None:
        """Look once and take over what has changed; return what was done, None where there was nothing to do."""
        failed: list[Failure] = []
        look = self._look(failed)
        now = time.time_ns()
        changed = [
            path for path, state in look.files.items()
            if self._done.get(path) != state and self._is_settled(path, state, now)
        ]  # fmt: skip
        gone = [path for path in self._done if path not in look.files and _lies_in(path, look.there)]
        self._last = look.files
        begun = [*changed, *(gone if self._prune else [])]
        if self._is_first and self._prune:
            begun = list(dict.fromkeys([*look.there, *changed]))  # also what went while nobody looked
        self._is_first = False
        summary = self._add(begun) if begun else None
        for path in changed:
            self._done[path] = look.files[path]
        for path in gone:
            del self._done[path]
        if failed:
            summary = summary or IndexSummary()
            summary.failed += failed
        return summary

    def _look(self, failed: list[Failure]) -> _Look:
        files: dict[Path, State] = {}
        there = []
        for path in self._paths:
            try:
                for one in find_files([path]):
                    found = one.stat()
                    files[one] = (found.st_mtime_ns, found.st_size)
                there.append(path)
                self._told.discard(str(path))
            except (DataError, OSError) as error:
                # Of a path that is not there, or cannot be read just now, everything stays as it is.
                files |= {one: state for one, state in self._done.items() if _lies_in(one, [path])}
                if str(path) not in self._told:
                    self._told.add(str(path))
                    failed.append(Failure(str(path), f"{error}; its documents are kept"))
        return _Look(files, there)

    def _is_settled(self, path: Path, state: State, now: int) -> bool:
        """Whether a file is as it was at the last look, or older than the time between two."""
        return self._last.get(path) == state or now - state[0] >= self._interval * 1e9

    def _add(self, paths: list[Path]) -> IndexSummary:
        try:
            wanted = [one for one in paths if one.exists() or self._prune]
            return self._index.add(wanted, prune=self._prune, limits=self._limits)
        except DataError as error:
            # All of them are broken, or went meanwhile.
            return IndexSummary(files=len(paths), failed=[Failure(str(paths[0]), str(error))])


def _lies_in(path: Path, folders: Sequence[Path]) -> bool:
    return any(path == one or path.is_relative_to(one) for one in folders)
