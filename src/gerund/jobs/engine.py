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
from itertools import islice
from multiprocessing import connection
from pathlib import Path
from typing import Any, Generic, Protocol, Self, TypeVar

import numpy as np

from gerund.errors import ConfigError, GerundError, InputError, MissingDependencyError, ResourceError, unknown_name
from gerund.jobs.files import write_atomic
from gerund.version import __version__

# A name that the next job in the folder removes, should this one be killed.
SHARED_FILE = ".shared-folder.part"
# A network file system may show a new file a moment later.
_SHARED_FOLDER_SECONDS = 5.0


@dataclass(frozen=True)
class SharedFolderCheck:
    """What a worker has to find.

    Attributes:
        folder: the folder; None where none has to be seen.
        nonce: what a file in it says.
        version: the driver's version of gerund.
    """

    folder: Path | None
    nonce: str
    version: str

    def check(self) -> None:
        """Refuse a worker that sees another folder, or runs another gerund.

        Raises:
            InputError: it is one.
        """
        machine = platform.node() or "a machine"
        if self.version != __version__:
            raise InputError(
                f"{machine} has gerund {__version__} and this machine {self.version}; install the same on all of them"
            )
        if self.folder is None:
            return
        end = time.monotonic() + _SHARED_FOLDER_SECONDS
        while (found := _read_nonce(self.folder)) != self.nonce:
            if time.monotonic() > end:
                what = "has another folder at" if found else "does not see"
                raise InputError(
                    f"{machine} works on this job and {what} {self.folder}; put the output, or with --work the parts, "
                    "on storage that all machines share, under the same path"
                )
            time.sleep(0.1)


@contextmanager
def shared_folder_check(folder: Path | None) -> Iterator[SharedFolderCheck]:
    """Yield what workers have to find, and leave the folder as it was.

    Raises:
        ResourceError: the folder cannot be written.
    """
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


def map_shards(
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


def map_by_place(pool: WorkerPool[Placed, Facts | None], shards: Iterable[Placed]) -> Iterator[tuple[Placed, Facts]]:
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


def runs_in_process(engine: JobEngine) -> bool:
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

    >>> sorted(map_shards(LocalEngine(1), abs, [-2, 1]))
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


LOCAL = "local"
"""The address that starts a cluster of this machine alone."""

# Shards that a worker has: the second comes over the network while it works on the first.
_AHEAD = 2
# Seconds in which the first worker has to be there: a cluster may have to fetch a machine for it.
_START_SECONDS = 1800
# Seconds in which the head of a cluster has to take a connection.
_ANSWER_SECONDS = 20
_AUTH_MODE = "RAY_AUTH_MODE"


class RayEngine:
    """The workers of a Ray cluster.

    Args:
        workers: how many; None for one a core of the cluster, or a GPU where the work needs one.
        address: of the cluster: ``auto`` for the one that this machine belongs to, ``HOST:PORT`` of its head, or
            ``local`` to start one of this machine alone; None for what ``RAY_ADDRESS`` says.

    Raises:
        MissingDependencyError: Ray is not installed.
        ConfigError: fewer than one worker, or no address.
        ResourceError: there is no cluster at the address.
    """

    def __init__(self, workers: int | None = None, address: str | None = None) -> None:
        checked_workers(workers)
        self._ray = _connected(address or os.environ.get("RAY_ADDRESS"))
        self._asked = workers
        self.workers = workers or self._places("CPU")

    @contextmanager
    def pool(self, work: Work[Shard, Facts], *, folder: Path | None = None) -> Iterator[WorkerPool[Shard, Facts]]:
        """Yield workers; see ``JobEngine``."""
        needs = work if isinstance(work, StatefulWork) else StatefulWork[Shard, Facts](lambda: work)
        workers = self._asked or self._places("GPU" if needs.gpus else "CPU") // (1 if needs.gpus else needs.threads)
        with shared_folder_check(folder) as check:
            pool = _Actors(self._ray, max(workers, 1), needs, work, check)
            try:
                yield pool
            except self._ray.exceptions.RayTaskError:
                raise  # a mistake in the work itself: with its traceback
            except self._ray.exceptions.RayError as error:
                raise ResourceError(f"the Ray cluster failed: {error}") from error
            finally:
                pool.dismiss()

    def _places(self, kind: str) -> int:
        return max(int(self._ray.cluster_resources().get(kind, 0)), 1)


class _Worker:
    """What runs in an actor. Errors that mean something to the user come back as values, without Ray's traceback."""

    def __init__(self, work: Work[Any, Any], check: SharedFolderCheck) -> None:
        self.work, self.folder_check = work, check
        self.function: Any = None

    def begin(self) -> GerundError | None:
        """Check the machine, and make what is to be held."""
        try:
            self.folder_check.check()
            self.function = opened_for_good(self.work)
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
class _Member:
    """A worker as the driver sees it.

    Attributes:
        actor: Ray's handle.
        is_ready: whether it has made what it holds.
        shards: how many it has.
    """

    actor: Any
    is_ready: bool = False
    shards: int = 0


class _Actors(Generic[Shard, Facts]):
    """The workers of one kind of work."""

    def __init__(
        self,
        ray: Any,
        workers: int,
        needs: StatefulWork[Shard, Facts],
        work: Work[Shard, Facts],
        check: SharedFolderCheck,
    ) -> None:
        self.ray, self.workers = ray, workers
        self.arguments = (work, check)
        # Restarts and retries are done here. By the cores Ray sets OMP_NUM_THREADS.
        options = {"num_cpus": needs.threads, "num_gpus": needs.gpus, "max_restarts": 0, "max_task_retries": 0}
        self.kind = ray.remote(_Worker).options(**options)
        self.members: list[_Member] = []
        # Who owes what: a shard with the number of its attempts, or None for the beginning.
        self.waiting: dict[Any, tuple[_Member, tuple[Shard, int] | None]] = {}
        self.again: deque[tuple[Shard, int]] = deque()
        self.lost_at_the_start = 0

    def map(self, shards: Iterable[Shard]) -> Iterator[tuple[Shard, Facts]]:
        """Yield each shard with its result."""
        fresh = ((shard, 0) for shard in shards)
        if (first := next(fresh, None)) is None:
            return
        self.again.append(first)
        while len(self.members) < self.workers:
            self._hire()
        while True:
            self._give_out(fresh)
            if all(given is None for _, given in self.waiting.values()) and not self.again:
                return
            done, _ = self.ray.wait(list(self.waiting), num_returns=1, timeout=self._patience())
            if not done:
                free = {name: self.ray.available_resources().get(name, 0) for name in ("CPU", "GPU")}
                raise ResourceError(
                    f"no worker could be started in {_START_SECONDS // 60} minutes: free on the cluster are {free}"
                )
            for reference in done:
                yield from self._take(reference)

    def _patience(self) -> float | None:
        return None if any(member.is_ready for member in self.members) else _START_SECONDS

    def _hire(self) -> None:
        member = _Member(self.kind.remote(*self.arguments))
        self.members.append(member)
        self.waiting[member.actor.begin.remote()] = (member, None)

    def _give_out(self, fresh: Iterator[tuple[Shard, int]]) -> None:
        """Give shards to whoever has the fewest of them, so that none waits behind another while a worker is idle."""
        while ready := [one for one in self.members if one.is_ready and one.shards < _AHEAD]:
            following = self.again.popleft() if self.again else next(fresh, None)
            if following is None:
                return
            member = min(ready, key=lambda one: one.shards)
            member.shards += 1
            self.waiting[member.actor.run.remote(following[0])] = (member, following)

    def _take(self, reference: Any) -> Iterator[tuple[Shard, Facts]]:
        member, given = self.waiting.pop(reference)
        try:
            found = self.ray.get(reference)
        except self.ray.exceptions.RayTaskError:
            raise
        except self.ray.exceptions.RayError as error:
            self._replace(member, given, error)
            return
        if given is None:
            if found is not None:
                raise found
            member.is_ready, self.lost_at_the_start = True, 0
            return
        member.shards -= 1
        facts, problem = found
        if problem is not None:
            raise problem
        yield given[0], facts

    def _replace(self, member: _Member, given: tuple[Shard, int] | None, error: Exception) -> None:
        """Go on without a worker that is gone: all it had is begun again, and somebody else is hired."""
        told = ResourceError("a worker was ended from outside, perhaps because memory ran out")
        if given is not None:
            if given[1] + 1 >= ATTEMPTS:
                raise told from error
            self.again.append((given[0], given[1] + 1))
        if member not in self.members:
            return  # its other shard told first
        self.members.remove(member)
        if not member.is_ready:
            self.lost_at_the_start += 1
            if self.lost_at_the_start >= ATTEMPTS:
                raise ResourceError(f"no worker could be started on the cluster: {error}") from error
        # One that cannot be reached may live on; its part would be the same.
        self.ray.kill(member.actor)
        self._hire()

    def dismiss(self) -> None:
        """End all workers, whatever they do: what is not whole is made again."""
        for member in self.members:
            self.ray.kill(member.actor)
        self.members.clear()
        self.waiting.clear()


def _connected(address: str | None) -> Any:
    """Return Ray, connected to a cluster; where this process is already, to that one."""
    known = sys.modules.get("ray")
    if known is not None and known.is_initialized():
        return known
    if find_spec("ray") is None:
        raise MissingDependencyError("--engine ray needs Ray: pip install 'gerund[ray]'")
    options = _options(address)
    _demand_answer(str(address))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import ray

        try:
            ray.init(address=address, logging_level="error", log_to_driver=False, configure_logging=False, **options)
        except Exception as error:  # Ray raises them bare where its processes do not start in time
            raise ResourceError(f"no Ray cluster at {address} lets this process in: {error}") from error
    return ray


def _demand_answer(address: str) -> None:
    """Refuse HOST:PORT where nobody answers: Ray tries for minutes, and hears no signal meanwhile."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "//" in address:
        return
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_SECONDS):
            pass
    except (OSError, OverflowError) as error:
        raise ResourceError(f"no Ray cluster answers at {address}: {error}") from error


def _options(address: str | None) -> dict[str, Any]:
    """Return what a cluster is started with, where one is to be started at all."""
    if not address:
        raise ConfigError(
            "--engine ray needs the --address of a Ray cluster: auto for the one that this machine belongs to, or "
            f"HOST:PORT; {LOCAL} starts one here (--workers alone uses this machine without Ray)"
        )
    if address != LOCAL:
        return {}
    if os.environ.setdefault(_AUTH_MODE, "token").lower() != "token":
        raise ConfigError(
            f"{_AUTH_MODE}={os.environ[_AUTH_MODE]} would let everybody who reaches this machine run code on it, as "
            "Ray listens on all of its interfaces; leave it unset"
        )
    # Ray tells its makers what it is used for unless it is asked not to.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    return {"include_dashboard": False}


ENGINES = ("local", "ray")


def make_engine(
    name: str = "local", workers: int | None = None, address: str | None = None, *, usual: int | None = None
) -> JobEngine:
    """Return an engine.

    Args:
        name: ``local`` for processes of this machine, ``ray`` for the workers of a Ray cluster.
        workers: how many; None for ``usual`` on this machine, and as many as it has room for on a cluster.
        address: of the cluster.
        usual: for this machine; None for one a core.

    Raises:
        ConfigError: an unknown name, fewer than one worker, or an address of what has none.
        MissingDependencyError: Ray is not installed.
        ResourceError: there is no cluster at the address.

    >>> make_engine(workers=2).workers
    2
    """
    if name not in ENGINES:
        raise unknown_name("engine", name, ENGINES)
    checked_workers(workers)
    if name == "ray":
        return RayEngine(workers, address)
    if address is not None:
        raise ConfigError(f"--address {address} is that of a Ray cluster; give --engine ray too")
    return LocalEngine(usual if workers is None else workers)
