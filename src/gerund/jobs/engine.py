"""Where the shards of a job are worked on: in this process, or in several of this machine.

The contract that lets the work run anywhere: a shard is a value that can be sent to another process; the function makes
a part of it, a file that is whole or absent and depends on the shard alone, and returns what the part says of itself.
So a shard may be worked on twice and an engine be killed at any time: whoever goes on makes the parts that are missing.

Knows: processes. Does not know: what a shard is, which parts there are.
"""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from typing import Protocol, TypeVar

from gerund.errors import ConfigError, ResourceError

Shard = TypeVar("Shard")
Facts = TypeVar("Facts")


class Engine(Protocol):
    """Works on shards."""

    def map(self, function: Callable[[Shard], Facts], shards: Iterable[Shard]) -> Iterator[tuple[Shard, Facts]]:
        """Yield each shard with what the function returned, as they become ready."""
        ...


class LocalEngine:
    """Processes of this machine.

    They are started anew, not forked: a script that uses more than one needs the usual
    ``if __name__ == "__main__":``.

    Args:
        workers: how many; None for one a core. With one, or a single shard, everything runs in this process.

    Raises:
        ConfigError: fewer than one.
    """

    def __init__(self, workers: int | None = None) -> None:
        if workers is not None and workers < 1:
            raise ConfigError(f"workers={workers} leaves nobody to work")
        self.workers = workers or cores()

    def map(self, function: Callable[[Shard], Facts], shards: Iterable[Shard]) -> Iterator[tuple[Shard, Facts]]:
        """Yield each shard with what the function returned, as they become ready.

        Shards are taken as they are needed, so that few of them are in memory. Close the iterator where it is not read
        to its end: that ends the processes.

        Raises:
            ResourceError: a process was ended from outside.
        """
        rest = iter(shards)
        first = deque(islice(rest, 2))
        alone = self.workers == 1 or len(first) < 2
        waiting = _chained(first, rest)
        if alone:
            for shard in waiting:
                yield shard, function(shard)
            return
        pool = ProcessPoolExecutor(self.workers, multiprocessing.get_context("spawn"), initializer=_begin_worker)
        try:
            running: dict[Future[Facts], Shard] = {}
            for shard in waiting:
                # Reading is quicker than the work: without a limit the whole input would wait in memory.
                if len(running) > self.workers:
                    yield from _finished(running)
                running[pool.submit(function, shard)] = shard
            while running:
                yield from _finished(running)
        finally:
            pool.shutdown(cancel_futures=True)


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _finished(running: dict[Future[Facts], Shard]) -> Iterator[tuple[Shard, Facts]]:
    done, _ = wait(running, return_when=FIRST_COMPLETED)
    for future in done:
        shard = running.pop(future)
        try:
            facts = future.result()
        except BrokenProcessPool as error:
            raise ResourceError("a process was ended from outside, perhaps because memory ran out") from error
        yield shard, facts


def _chained(first: "deque[Shard]", rest: Iterator[Shard]) -> Iterator[Shard]:
    while first:
        yield first.popleft()
    yield from rest


def _begin_worker() -> None:
    """Leave interruptions to the parent, and do not outlive it."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
