"""Where the shards of a job are worked on: in this process, in several of this machine, or in those of a cluster.

The contract that lets the work run anywhere: a shard is a value that can be sent to another process; the work makes a
part of it that is whole or absent and depends on the shard alone, and returns what the part says of itself. So a shard
may be worked on twice and a worker be killed at any time: another one makes the part again, and it is the same.

Knows: the contract, processes of this machine. Does not know: what a shard is, which parts there are, Ray.
"""

import gc
import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import islice
from multiprocessing import connection
from pathlib import Path
from typing import Any, Generic, Protocol, Self, TypeVar

import numpy as np

from gerund.errors import ConfigError, ResourceError

Shard = TypeVar("Shard")
Facts = TypeVar("Facts")
Found_co = TypeVar("Found_co", covariant=True)
Placed = TypeVar("Placed", bound="PlacedShard")

ATTEMPTS = 5
"""How often a shard is begun before its worker's end counts as the shard's own fault."""

LOOK_SECONDS = 1.0
"""How long a result is waited for before it is seen whether a process ended."""

MOST_WORKERS = 100_000

# Bytes; the largest block by which glibc moves that bound is 32 MiB with what it notes of it.
_LARGE_BLOCK = 2**25 - 2**16


@dataclass(frozen=True)
class StatefulWork(Generic[Shard, Facts]):
    """Work with something that each worker makes once and holds, such as a model.

    Attributes:
        make: makes it, and returns what works on a shard.
        gpus: GPUs that a worker needs for itself, where an engine gives them out.
        threads: cores that it needs.
    """

    make: Callable[[], Callable[[Shard], Facts]]
    gpus: float = 0.0
    threads: int = 1


Work = Callable[[Shard], Facts] | StatefulWork[Shard, Facts]


class WorkerPool(Protocol[Shard, Found_co]):
    """Workers that are there for one kind of work, and hold what it needs until they are sent away."""

    def map(self, shards: Iterable[Shard]) -> Iterator[tuple[Shard, Found_co]]:
        """Yield each shard with what the work returned, as they become ready.

        Args:
            shards: taken as they are needed, so that few of them are in memory.

        Raises:
            GerundError: what the work raised.
            InputError: a worker does not see the folder, or has another version of gerund.
            ResourceError: workers were ended from outside again and again.
        """
        ...


class JobEngine(Protocol):
    """Has workers for shards.

    Attributes:
        workers: how many shards are worked on at a time.
    """

    workers: int

    def pool(
        self, work: Work[Shard, Facts], *, folder: Path | None = None
    ) -> AbstractContextManager[WorkerPool[Shard, Facts]]:
        """Return workers, who begin with the first shard and are sent away at the end of the block.

        Args:
            work: what is done with each shard; it and the shards can be sent to other processes.
            folder: where the work puts its parts, which every worker has to see; None where it returns all there is.
        """
        ...


def mapped(
    engine: JobEngine, work: Work[Shard, Facts], shards: Iterable[Shard], *, folder: Path | None = None
) -> Iterator[tuple[Shard, Facts]]:
    """Yield each shard with what the work returned, as they become ready; see ``WorkerPool.map``.

    Close the iterator where it is not read to its end: that ends the work.
    """
    with engine.pool(work, folder=folder) as pool:
        yield from pool.map(shards)


class PlacedShard(Protocol):
    """A shard that a worker may read itself, by the place where it stands."""

    def whole(self) -> Self:
        """Return the same shard, which is sent with all that it holds."""
        ...


def mapped_by_place(pool: WorkerPool[Placed, Facts | None], shards: Iterable[Placed]) -> Iterator[tuple[Placed, Facts]]:
    """Yield each shard with what the work returned; None says that a worker did not find the shard in its place.

    Then a machine of a cluster does not have the input: that shard is given out again, whole, and so are all others
    from then on.
    """
    by_place = True
    left: Iterable[Placed] = (shard if by_place else shard.whole() for shard in shards)
    while left:
        unread: list[Placed] = []
        for shard, facts in pool.map(left):
            if facts is None:
                by_place = False
                unread.append(shard.whole())
            else:
                yield shard, facts
        left = unread


def is_alone(engine: JobEngine) -> bool:
    """Tell whether an engine works in this process, one shard after the other."""
    return isinstance(engine, LocalEngine) and engine.workers == 1


def opened(work: Work[Shard, Facts]) -> Callable[[Shard], Facts]:
    """Return what works on a shard, after making what is to be held."""
    return work.make() if isinstance(work, StatefulWork) else work


def opened_for_good(work: Work[Shard, Facts]) -> Callable[[Shard], Facts]:
    """Return the same in a process that is there for this work alone, and set that process up for it."""
    function = opened(work)
    # Modules and models stay: no collection has to look at them again.
    gc.collect()
    gc.freeze()
    # The C library gives large blocks back to the system at once, and takes them anew page by page for every array,
    # until a block as large as this was freed.
    np.empty(_LARGE_BLOCK, np.uint8)
    return function


class LocalEngine:
    """Processes of this machine.

    They are started anew, not forked: a script that uses more than one needs the usual
    ``if __name__ == "__main__":``. One that is ended from outside is replaced, and its shard begun again.

    Args:
        workers: how many; None for one a core. With one, or a single shard, everything runs in this process.

    Raises:
        ConfigError: fewer than one.

    >>> sorted(mapped(LocalEngine(1), abs, [-2, 1]))
    [(-2, 2), (1, 1)]
    """

    def __init__(self, workers: int | None = None) -> None:
        self.workers = checked_workers(workers) or cores()

    @contextmanager
    def pool(
        self,
        work: Work[Shard, Facts],
        *,
        folder: Path | None = None,  # noqa: ARG002  (whoever is on this machine sees it)
    ) -> Iterator[WorkerPool[Shard, Facts]]:
        """Yield workers; see ``JobEngine``."""
        if self.workers == 1:
            yield _Here(work)
            return
        pool = _Pool(self.workers, work)
        try:
            yield pool
        except BaseException:
            pool.kill()  # nobody waits for parts: what is not whole is made again
            raise
        pool.close()


class _Here(Generic[Shard, Facts]):
    """This process."""

    def __init__(self, work: Work[Shard, Facts]) -> None:
        self.work = work
        self.function: Callable[[Shard], Facts] | None = None

    def map(self, shards: Iterable[Shard]) -> Iterator[tuple[Shard, Facts]]:
        """Yield each shard with its result."""
        for shard in shards:
            if self.function is None:
                self.function = opened(self.work)
            yield shard, self.function(shard)


class _Pool(Generic[Shard, Facts]):
    """Processes that work on shards, and are replaced when they are ended from outside."""

    def __init__(self, workers: int, work: Work[Shard, Facts]) -> None:
        self.workers, self.work = workers, work
        self.here = _Here(work)
        self.executor: ProcessPoolExecutor | None = None
        self.is_broken, self.has_finished = False, False
        self.running: dict[Future[Facts], tuple[Shard, int]] = {}
        self.again: deque[tuple[Shard, int]] = deque()

    def map(self, shards: Iterable[Shard]) -> Iterator[tuple[Shard, Facts]]:
        """Yield each shard with its result; a single one needs no processes."""
        rest = iter(shards)
        first = list(islice(rest, 2))
        if len(first) < 2 and self.executor is None:
            yield from self.here.map(first)
            return
        fresh = ((shard, 0) for shard in _chained(first, rest))
        while True:
            # Reading is quicker than the work: without a limit the whole input would wait in memory.
            while self._has_room() and (following := self._next(fresh)) is not None:
                self._submit(*following)
            if not self.running:
                return
            yield from self._results(self._some_done())
            if self.is_broken:
                # The executor has given up on all of them; a result that was there already counts.
                yield from self._results(wait(self.running).done)

    def _some_done(self) -> set[Future[Facts]]:
        while True:
            done, _ = wait(self.running, timeout=LOOK_SECONDS, return_when=FIRST_COMPLETED)
            if done:
                return done
            # The executor may wait without knowing of the process that it started last, whose end it then does not
            # see (CPython wakes its manager before the process is there). It sees the others' end.
            if connection.wait([process.sentinel for process in self._processes()], timeout=0):
                self._kill_processes()

    def _has_room(self) -> bool:
        return not self.running if self.is_broken else len(self.running) <= self.workers

    def _next(self, fresh: Iterator[tuple[Shard, int]]) -> tuple[Shard, int] | None:
        return self.again.popleft() if self.again else next(fresh, None)

    def _submit(self, shard: Shard, attempts: int) -> None:
        if self.executor is not None and not self.is_broken:
            try:
                self.running[self.executor.submit(_work, shard)] = (shard, attempts)
                return
            except BrokenProcessPool:
                self.is_broken = True
        if self.running:
            self.again.append((shard, attempts))
            return
        # A process that was just starting may not hear that it is to end, and would be waited for without end.
        self.kill()
        self.executor, self.is_broken = self._start(), False
        self.running[self.executor.submit(_work, shard)] = (shard, attempts)

    def _results(self, done: Iterable[Future[Facts]]) -> Iterator[tuple[Shard, Facts]]:
        for future in list(done):
            shard, attempts = self.running.pop(future)
            try:
                facts = future.result()
            except BrokenProcessPool as error:
                # One process went, and nobody says whose: all that ran or waited are begun again.
                self.is_broken = True
                if attempts + 1 >= ATTEMPTS:
                    told = "a process was ended from outside, perhaps because memory ran out"
                    if not self.has_finished:
                        told += '; a script that uses several processes needs `if __name__ == "__main__":`'
                    raise ResourceError(told) from error
                self.again.append((shard, attempts + 1))
            else:
                self.has_finished = True
                yield shard, facts

    def _start(self) -> ProcessPoolExecutor:
        context = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(self.workers, context, initializer=_begin_worker, initargs=(self.work,))

    def close(self) -> None:
        """End the processes, which have nothing left to do."""
        if self.executor is not None:
            self.executor.shutdown()

    def kill(self) -> None:
        """End the processes at once, whatever they do."""
        if self.executor is not None:
            self._kill_processes()
            self.executor.shutdown(cancel_futures=True)

    def _processes(self) -> "list[multiprocessing.process.BaseProcess]":
        return list((getattr(self.executor, "_processes", None) or {}).values())

    def _kill_processes(self) -> None:
        for process in self._processes():
            process.kill()


def checked_workers(workers: int | None) -> int | None:
    """Return a number of workers.

    Raises:
        ConfigError: fewer than one, or more than any cluster has.
    """
    if workers is not None and workers < 1:
        raise ConfigError(f"workers={workers} leaves nobody to work")
    if workers is not None and workers > MOST_WORKERS:
        raise ConfigError(f"workers={workers} is more than {MOST_WORKERS}")
    return workers


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def peak_resident_mib() -> float:
    """Return this process's largest resident size so far, in MiB."""
    import resource

    # What `getrusage` says counts the process that started this one too, as large as it was then; Linux knows better.
    status = Path("/proc/self/status")
    own = status.read_text(encoding="utf-8").partition("VmHWM:")[2].split() if status.is_file() else []
    if own:
        return int(own[0]) / 2**10
    # Bytes on macOS, KiB elsewhere.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def _chained(first: "list[Shard]", rest: Iterator[Shard]) -> Iterator[Shard]:
    while first:
        yield first.pop(0)
    yield from rest


# What this process works with, where it is one of a pool.
_function: Callable[[Any], Any] | None = None
_opening: Work[Any, Any] | None = None


def _work(shard: Any) -> Any:
    # Made with the first shard: an error in the making then has a place to go.
    global _function  # noqa: PLW0603
    if _function is None:
        assert _opening is not None
        _function = opened_for_good(_opening)
    return _function(shard)


def _begin_worker(work: Work[Any, Any]) -> None:
    """Leave interruptions to the parent, and do not outlive it."""
    global _opening  # noqa: PLW0603
    _opening = work
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
