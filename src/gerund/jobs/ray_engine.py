"""Shards on the machines of a Ray cluster.

Each worker is a Ray actor, which makes what it holds once and has two shards at a time: one it works on, one that has
come already. A worker that is lost, alone or with its machine, is replaced, and its shards are begun again by
whoever is free; that the others go on meanwhile is why this is not left to Ray's own retries. Of Ray only actors are
used: no data sets, no tasks.

Whoever reaches a Ray cluster's ports and has its token runs code on it. Ray listens on all interfaces of a machine,
so a cluster is started here only where it is asked for by name, and never without a token.

Knows: Ray. Does not know: what a shard is.
"""

import os
import socket
import sys
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Generic

from gerund.errors import ConfigError, GerundError, MissingDependencyError, ResourceError
from gerund.jobs.engine import ATTEMPTS, Facts, Shard, StatefulWork, Work, WorkerPool, checked_workers, opened_for_good
from gerund.jobs.shared_folder import SharedFolderCheck, shared_folder_check

LOCAL = "local"
"""The address that starts a cluster of this machine alone."""

# Shards that a worker has: the second comes over the network while it works on the first.
_AHEAD = 2
# Seconds in which the first worker has to be there: a cluster may have to fetch a machine for it.
_PATIENCE = 1800
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
                    f"no worker could be started in {_PATIENCE // 60} minutes: free on the cluster are {free}"
                )
            for reference in done:
                yield from self._take(reference)

    def _patience(self) -> float | None:
        return None if any(member.is_ready for member in self.members) else _PATIENCE

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
