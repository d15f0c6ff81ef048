"""Engines that run the shards of a job: in this process, in several local processes, or on a Ray cluster.

A shard is a value that can be sent to another process. The work makes a part from it that is complete or absent and
depends on the shard alone, and returns facts about the part. So a shard may be run twice and a worker killed at any
time: another worker makes the same part again.

On Ray each worker is an actor with two shards: the one it works on and the next, which has already arrived. A lost
worker is replaced and its shards start again on any free worker. Ray's own retries would block the other workers
meanwhile. Only actors of Ray are used, no datasets or tasks. Anyone who reaches a Ray cluster's ports and has its token
can run code on it, and Ray listens on all interfaces. So gerund starts a cluster only on request, and never without a
token.
"""

import gc
import multiprocessing
import os
import platform
import secrets
import signal
import socket
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import chain, islice
from multiprocessing import connection
from pathlib import Path
from typing import Any, Generic, Protocol, Self, TypeVar

import numpy as np

from gerund.checks import one_of
from gerund.errors import ConfigError, GerundError, InputError, MissingDependencyError, ResourceError
from gerund.jobs.files import write_atomic
from gerund.version import __version__

Shard = TypeVar("Shard")
Facts = TypeVar("Facts")
Facts_co = TypeVar("Facts_co", covariant=True)
Placed = TypeVar("Placed", bound="PlacedShard")

ENGINES = ("local", "ray")
ATTEMPTS = 5
"""Attempts at a shard before the end of its workers counts as the shard's own fault."""
LOOK_SECONDS = 1.0
"""Seconds to wait for a result before checking whether a process ended."""
MOST_WORKERS = 100_000
LOCAL = "local"
"""The Ray address that starts a cluster of this machine alone."""
SHARED_FILE = ".shared-folder.part"
"""File by which workers recognize the driver's folder. The next job in the folder removes it after a kill."""

# Seconds: a network file system may show a new file a moment later.
_SHARED_FOLDER_SECONDS = 5.0
# Bytes: the largest block by which glibc raises its threshold is 32 MiB including the block's header.
_LARGE_BLOCK = 2**25 - 2**16
# Shards per Ray worker: the second arrives over the network while the first is worked on.
_AHEAD = 2
# Seconds for the first Ray worker to start: a cluster may have to fetch a machine for it.
_START_SECONDS = 1800
# Seconds for the head of a Ray cluster to accept a connection.
_ANSWER_SECONDS = 20
_AUTH_MODE = "RAY_AUTH_MODE"


@dataclass(frozen=True)
class StatefulWork(Generic[Shard, Facts]):
    """Work that needs something that each worker makes once, such as a model."""

    make: Callable[[], Callable[[Shard], Facts]]  # makes it, and returns the function that works on a shard
    gpus: float = 0.0  # GPUs per worker, where an engine assigns them
    threads: int = 1  # cores per worker


Work = Callable[[Shard], Facts] | StatefulWork[Shard, Facts]


class WorkerPool(Protocol[Shard, Facts_co]):
    """Workers for one kind of work."""

    def map(self, shards: Iterable[Shard]) -> Iterator[tuple[Shard, Facts_co]]:
        """Yield each shard with the work's result as they become ready; few shards are in memory at a time.

        Raises what the work raised, ``InputError`` for a worker that doesn't see the folder or has another version of
        gerund, and ``ResourceError`` when workers were killed again and again.
        """
        ...


class JobEngine(Protocol):
    """Provides workers for shards."""

    workers: int
    """How many shards are worked on concurrently."""

    def pool(
        self, work: Work[Shard, Facts], *, folder: Path | None = None
    ) -> AbstractContextManager[WorkerPool[Shard, Facts]]:
        """Return workers, which start with the first shard and end with the block.

        The work and its shards can be sent to other processes. ``folder`` is where the work writes its parts, which
        every worker must see; None where the work only returns results.
        """
        ...


def make_engine(
    name: str = "local", workers: int | None = None, address: str | None = None, *, usual: int | None = None
) -> JobEngine:
    """Return the engine ``local`` (processes of this machine) or ``ray`` (workers of the cluster at ``address``).

    ``workers=None`` is ``usual`` on this machine (default: one per core), and as many as fit on a cluster.

    >>> make_engine(workers=2).workers
    2
    """
    one_of("engine", name, ENGINES)
    if name == "ray":
        return RayEngine(workers, address)
    if address is not None:
        raise ConfigError(f"--address {address} is that of a Ray cluster; give --engine ray too")
    return LocalEngine(usual if workers is None else workers)


def _checked_workers(workers: int | None) -> int | None:
    if workers is not None and not 1 <= workers <= MOST_WORKERS:
        raise ConfigError(f"workers must be from 1 to {MOST_WORKERS}, got {workers}")
    return workers


def map_shards(
    engine: JobEngine, work: Work[Shard, Facts], shards: Iterable[Shard], *, folder: Path | None = None
) -> Iterator[tuple[Shard, Facts]]:
    """Yield each shard with the work's result; see ``WorkerPool.map``. Closing the iterator ends the work."""
    with engine.pool(work, folder=folder) as pool:
        yield from pool.map(shards)


class PlacedShard(Protocol):
    """A shard that a worker may read itself from its place in a file."""

    def whole(self) -> Self:
        """Return the same shard, sent with its content."""
        ...


def map_by_place(pool: WorkerPool[Placed, Facts | None], shards: Iterable[Placed]) -> Iterator[tuple[Placed, Facts]]:
    """Yield each shard with the work's result; a result of None means that a worker didn't find the shard in its place.

    Then a machine of a cluster doesn't have the input: that shard is sent again with its content, and so are all others
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


def runs_in_process(engine: JobEngine) -> bool:
    """Return whether an engine works in this process, one shard after the other."""
    return isinstance(engine, LocalEngine) and engine.workers == 1


def prepare(work: Work[Shard, Facts]) -> Callable[[Shard], Facts]:
    """Return the function that works on a shard, after making what it needs."""
    return work.make() if isinstance(work, StatefulWork) else work


def _prepare_worker(work: Work[Shard, Facts]) -> Callable[[Shard], Facts]:
    """Do the same in a process that is there for this work alone, and tune that process for it."""
    function = prepare(work)
    # Modules and models stay: no garbage collection has to look at them again.
    gc.collect()
    gc.freeze()
    # The C library returns large blocks to the system immediately and gets them page by page for every array, until a
    # block as large as this was freed.
    np.empty(_LARGE_BLOCK, np.uint8)
    return function


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def peak_resident_mib() -> float:
    """Return this process's largest resident size so far, in MiB."""
    # `getrusage` includes the parent process, as large as it was at the start; on Linux /proc has the better number.
    status = Path("/proc/self/status")
    peak = status.read_text(encoding="utf-8").partition("VmHWM:")[2].split() if status.is_file() else []
    if peak:
        return int(peak[0]) / 2**10
    try:
        import resource
    except ImportError:  # Windows
        return 0.0
    # Bytes on macOS, KiB elsewhere.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


class LocalEngine:
    """Processes of this machine; with one worker, or a single shard, everything runs in this process.

    Processes are spawned, not forked: a script that uses more than one needs the usual
    ``if __name__ == "__main__":``. A killed process is replaced, and its shard begun again. ``workers=None`` is one
    per core.

    >>> sorted(map_shards(LocalEngine(1), abs, [-2, 1]))
    [(-2, 2), (1, 1)]
    """

    def __init__(self, workers: int | None = None) -> None:
        self.workers = _checked_workers(workers) or cores()

    @contextmanager
    def pool(
        self,
        work: Work[Shard, Facts],
        *,
        folder: Path | None = None,  # noqa: ARG002  (every process of this machine sees it)
    ) -> Iterator[WorkerPool[Shard, Facts]]:
        """Yield workers; see ``JobEngine``."""
        if self.workers == 1:
            yield _ThisProcess(work)
            return
        pool = _Processes(self.workers, work)
        try:
            yield pool
        except BaseException:
            pool.kill()  # without waiting for parts: what is incomplete is made again
            raise
        pool.close()


class _ThisProcess(Generic[Shard, Facts]):
    def __init__(self, work: Work[Shard, Facts]) -> None:
        self.work = work
        self.function: Callable[[Shard], Facts] | None = None

    def map(self, shards: Iterable[Shard]) -> Iterator[tuple[Shard, Facts]]:
        """Yield each shard with its result."""
        for shard in shards:
            if self.function is None:
                self.function = prepare(self.work)
            yield shard, self.function(shard)


class _Processes(Generic[Shard, Facts]):
    """Local processes, which are replaced when they are killed."""

    def __init__(self, workers: int, work: Work[Shard, Facts]) -> None:
        self.workers, self.work = workers, work
        self.here = _ThisProcess(work)
        self.executor: ProcessPoolExecutor | None = None
        self.is_broken, self.has_finished = False, False
        # Shards with the number of earlier attempts: those that run, and those to begin again.
        self.running: dict[Future[Facts], tuple[Shard, int]] = {}
        self.again: deque[tuple[Shard, int]] = deque()

    def map(self, shards: Iterable[Shard]) -> Iterator[tuple[Shard, Facts]]:
        """Yield each shard with its result; a single one needs no processes."""
        rest = iter(shards)
        first = list(islice(rest, 2))
        if len(first) < 2 and self.executor is None:
            yield from self.here.map(first)
            return
        fresh = ((shard, 0) for shard in chain(_emptied(first), rest))
        while True:
            # Reading is faster than the work: without a limit the entire input would wait in memory.
            while not self.running if self.is_broken else len(self.running) <= self.workers:
                following = self.again.popleft() if self.again else next(fresh, None)
                if following is None:
                    break
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
            # The executor may wait without knowing of the process that it started last, and then doesn't see its end
            # (CPython wakes its manager before the process is there). It sees the end of the others.
            if connection.wait([process.sentinel for process in self._executor_processes()], timeout=0):
                self._kill_processes()

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
        # A process that was just starting may miss that it is to end, and would be waited for forever.
        self.kill()
        context = multiprocessing.get_context("spawn")
        self.executor = ProcessPoolExecutor(self.workers, context, initializer=_begin_worker, initargs=(self.work,))
        self.is_broken = False
        self.running[self.executor.submit(_work, shard)] = (shard, attempts)

    def _results(self, done: Iterable[Future[Facts]]) -> Iterator[tuple[Shard, Facts]]:
        for future in list(done):
            shard, attempts = self.running.pop(future)
            try:
                facts = future.result()
            except BrokenProcessPool as error:
                # A process ended, and the executor doesn't say which: all that ran or waited are begun again.
                self.is_broken = True
                if attempts + 1 >= ATTEMPTS:
                    message = "a process was killed, perhaps because memory ran out"
                    if not self.has_finished:
                        message += '; a script that uses several processes needs `if __name__ == "__main__":`'
                    raise ResourceError(message) from error
                self.again.append((shard, attempts + 1))
            else:
                self.has_finished = True
                yield shard, facts

    def close(self) -> None:
        """End the processes, which have nothing left to do."""
        if self.executor is not None:
            self.executor.shutdown()

    def kill(self) -> None:
        """End the processes immediately."""
        if self.executor is not None:
            self._kill_processes()
            self.executor.shutdown(cancel_futures=True)

    def _executor_processes(self) -> "list[multiprocessing.process.BaseProcess]":
        return list((getattr(self.executor, "_processes", None) or {}).values())

    def _kill_processes(self) -> None:
        for process in self._executor_processes():
            process.kill()


def _emptied(shards: "list[Shard]") -> Iterator[Shard]:
    """Yield shards without holding on to them."""
    while shards:
        yield shards.pop(0)


# The work of this process, where it is a worker.
_function: Callable[[Any], Any] | None = None
_worker_task: Work[Any, Any] | None = None


def _work(shard: Any) -> Any:
    # Prepared with the first shard, so that an error in it is reported as the shard's.
    global _function  # noqa: PLW0603
    if _function is None:
        assert _worker_task is not None
        _function = _prepare_worker(_worker_task)
    return _function(shard)


def _begin_worker(work: Work[Any, Any]) -> None:
    """Ignore interruptions, which the parent handles, and exit with the parent."""
    global _worker_task  # noqa: PLW0603
    _worker_task = work
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@dataclass(frozen=True)
class SharedFolderCheck:
    """Checks in a worker that it sees the driver's folder (if any), by a file with a nonce, and runs its gerund."""

    folder: Path | None
    nonce: str
    version: str

    def check(self) -> None:
        """Raise ``InputError`` for a worker that sees another folder, or runs another version."""
        machine = platform.node() or "a machine"
        if self.version != __version__:
            raise InputError(
                f"{machine} has gerund {__version__} and this machine {self.version}; install the same on all of them"
            )
        if self.folder is None:
            return
        end = time.monotonic() + _SHARED_FOLDER_SECONDS
        while (nonce := _read_nonce(self.folder)) != self.nonce:
            if time.monotonic() > end:
                what = "has another folder at" if nonce else "does not see"
                raise InputError(
                    f"{machine} works on this job and {what} {self.folder}; put the output, or with --work the parts, "
                    "on storage that all machines share, under the same path"
                )
            time.sleep(0.1)


@contextmanager
def shared_folder_check(folder: Path | None) -> Iterator[SharedFolderCheck]:
    """Yield the check for workers; its file is removed at the end."""
    nonce = secrets.token_hex(16)
    if folder is None:
        yield SharedFolderCheck(None, nonce, __version__)
        return
    folder = folder.absolute()
    write_atomic(folder / SHARED_FILE, nonce)
    try:
        yield SharedFolderCheck(folder, nonce, __version__)
    finally:
        with suppress(OSError):
            (folder / SHARED_FILE).unlink()


def _read_nonce(folder: Path) -> str:
    try:
        return (folder / SHARED_FILE).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


class RayEngine:
    """Workers of a Ray cluster.

    ``workers=None`` is one per core of the cluster, or per GPU where the work needs GPUs. The address is ``auto`` for
    the cluster that this machine belongs to, ``HOST:PORT`` of its head, or ``local`` to start a cluster of this machine
    alone (default: ``RAY_ADDRESS``).
    """

    def __init__(self, workers: int | None = None, address: str | None = None) -> None:
        self._wanted = _checked_workers(workers)
        self._ray = _connect(address or os.environ.get("RAY_ADDRESS"))
        self.workers = workers or self._available("CPU")

    @contextmanager
    def pool(self, work: Work[Shard, Facts], *, folder: Path | None = None) -> Iterator[WorkerPool[Shard, Facts]]:
        """Yield workers; see ``JobEngine``."""
        needs = work if isinstance(work, StatefulWork) else StatefulWork[Shard, Facts](lambda: work)
        fit = self._available("GPU") if needs.gpus else self._available("CPU") // needs.threads
        with shared_folder_check(folder) as check:
            pool = _RayWorkers(self._ray, max(self._wanted or fit, 1), needs, check)
            try:
                yield pool
            except self._ray.exceptions.RayTaskError:
                raise  # a mistake in the work itself: with its traceback
            except self._ray.exceptions.RayError as error:
                raise ResourceError(f"the Ray cluster failed: {error}") from error
            finally:
                pool.kill()

    def _available(self, kind: str) -> int:
        return max(int(self._ray.cluster_resources().get(kind, 0)), 1)


class _Worker:
    """The Ray actor. Errors meant for the user are returned as values, without Ray's traceback."""

    def __init__(self, work: Work[Any, Any], check: SharedFolderCheck) -> None:
        self.work, self.folder_check = work, check
        self.function: Any = None

    def begin(self) -> GerundError | None:
        """Check the machine, and prepare the work."""
        try:
            self.folder_check.check()
            self.function = _prepare_worker(self.work)
        except GerundError as error:
            return error
        return None

    def run(self, shard: Any) -> tuple[Any, GerundError | None]:
        """Work on a shard."""
        try:
            return self.function(shard), None
        except GerundError as error:
            return None, error


@dataclass(eq=False)
class _Actor:
    """A Ray worker as the driver sees it."""

    handle: Any
    is_ready: bool = False
    shards: int = 0


class _RayWorkers(Generic[Shard, Facts]):
    def __init__(self, ray: Any, workers: int, work: StatefulWork[Shard, Facts], check: SharedFolderCheck) -> None:
        self.ray, self.workers = ray, workers
        self.arguments = (work, check)
        # Restarts and retries are done here. Ray sets OMP_NUM_THREADS to the number of cores.
        options = {"num_cpus": work.threads, "num_gpus": work.gpus, "max_restarts": 0, "max_task_retries": 0}
        self.actor_class = ray.remote(_Worker).options(**options)
        self.actors: list[_Actor] = []
        # Pending calls: a shard with the number of earlier attempts, or None for `begin`.
        self.waiting: dict[Any, tuple[_Actor, tuple[Shard, int] | None]] = {}
        self.again: deque[tuple[Shard, int]] = deque()
        self.lost_at_the_start = 0

    def map(self, shards: Iterable[Shard]) -> Iterator[tuple[Shard, Facts]]:
        """Yield each shard with its result."""
        fresh = ((shard, 0) for shard in shards)
        if (first := next(fresh, None)) is None:
            return
        self.again.append(first)
        while len(self.actors) < self.workers:
            self._start_actor()
        while True:
            self._assign(fresh)
            if all(given is None for _, given in self.waiting.values()) and not self.again:
                return
            seconds = None if any(actor.is_ready for actor in self.actors) else _START_SECONDS
            done, _ = self.ray.wait(list(self.waiting), num_returns=1, timeout=seconds)
            if not done:
                free = {name: self.ray.available_resources().get(name, 0) for name in ("CPU", "GPU")}
                raise ResourceError(
                    f"no worker could be started in {_START_SECONDS // 60} minutes: free on the cluster are {free}"
                )
            for reference in done:
                yield from self._result(reference)

    def _start_actor(self) -> None:
        actor = _Actor(self.actor_class.remote(*self.arguments))
        self.actors.append(actor)
        self.waiting[actor.handle.begin.remote()] = (actor, None)

    def _assign(self, fresh: Iterator[tuple[Shard, int]]) -> None:
        """Give shards to the workers with the fewest of them, so that no shard waits while a worker is idle."""
        while ready := [actor for actor in self.actors if actor.is_ready and actor.shards < _AHEAD]:
            following = self.again.popleft() if self.again else next(fresh, None)
            if following is None:
                return
            actor = min(ready, key=lambda actor: actor.shards)
            actor.shards += 1
            self.waiting[actor.handle.run.remote(following[0])] = (actor, following)

    def _result(self, reference: Any) -> Iterator[tuple[Shard, Facts]]:
        actor, given = self.waiting.pop(reference)
        try:
            result = self.ray.get(reference)
        except self.ray.exceptions.RayTaskError:
            raise
        except self.ray.exceptions.RayError as error:
            self._replace(actor, given, error)
            return
        if given is None:
            if result is not None:
                raise result
            actor.is_ready, self.lost_at_the_start = True, 0
            return
        actor.shards -= 1
        facts, problem = result
        if problem is not None:
            raise problem
        yield given[0], facts

    def _replace(self, actor: _Actor, given: tuple[Shard, int] | None, error: Exception) -> None:
        """Replace a lost worker, and begin its shards again."""
        if given is not None:
            if given[1] + 1 >= ATTEMPTS:
                raise ResourceError("a worker was killed, perhaps because memory ran out") from error
            self.again.append((given[0], given[1] + 1))
        if actor not in self.actors:
            return  # already replaced, when its other shard failed
        self.actors.remove(actor)
        if not actor.is_ready:
            self.lost_at_the_start += 1
            if self.lost_at_the_start >= ATTEMPTS:
                raise ResourceError(f"no worker could be started on the cluster: {error}") from error
        # A worker that can't be reached may live on; its part would be the same.
        self.ray.kill(actor.handle)
        self._start_actor()

    def kill(self) -> None:
        """End all workers: incomplete parts are made again."""
        for actor in self.actors:
            self.ray.kill(actor.handle)
        self.actors.clear()
        self.waiting.clear()


def _connect(address: str | None) -> Any:
    """Return Ray, connected to a cluster; if this process is connected already, to that cluster."""
    imported = sys.modules.get("ray")
    if imported is not None and imported.is_initialized():
        return imported
    if find_spec("ray") is None:
        raise MissingDependencyError("--engine ray needs Ray: pip install 'gerund[ray]'")
    options = _ray_options(address)
    _require_answer(str(address))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import ray

        try:
            ray.init(address=address, logging_level="error", log_to_driver=False, configure_logging=False, **options)
        except Exception as error:  # Ray raises bare ones where its processes do not start in time
            raise ResourceError(f"no Ray cluster at {address} lets this process in: {error}") from error
    return ray


def _require_answer(address: str) -> None:
    """Raise ``ResourceError`` if HOST:PORT doesn't answer: Ray tries for minutes, deaf to signals."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "//" in address:
        return
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_SECONDS):
            pass
    except (OSError, OverflowError) as error:
        raise ResourceError(f"no Ray cluster answers at {address}: {error}") from error


def _ray_options(address: str | None) -> dict[str, Any]:
    """Return the options for starting a cluster, if one is to be started at all."""
    if not address:
        raise ConfigError(
            "--engine ray needs the --address of a Ray cluster: auto for the one that this machine belongs to, or "
            f"HOST:PORT; {LOCAL} starts one here (--workers alone uses this machine without Ray)"
        )
    if address != LOCAL:
        return {}
    if os.environ.setdefault(_AUTH_MODE, "token").lower() != "token":
        raise ConfigError(
            f"{_AUTH_MODE}={os.environ[_AUTH_MODE]} would let anyone who reaches this machine run code on it, as "
            "Ray listens on all of its interfaces; leave it unset"
        )
    # Ray reports its use to its makers by default.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    return {"include_dashboard": False}
