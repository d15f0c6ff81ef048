"""Engines by name.

Knows: which there are. Does not know: what they do.
"""

from gerund.errors import ConfigError, unknown_name
from gerund.jobs.engine import JobEngine, LocalEngine, checked_workers

ENGINES = ("local", "ray")


def engine_of(
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

    >>> engine_of(workers=2).workers
    2
    """
    if name not in ENGINES:
        raise unknown_name("engine", name, ENGINES)
    checked_workers(workers)
    if name == "ray":
        from gerund.jobs.ray_engine import RayEngine

        return RayEngine(workers, address)
    if address is not None:
        raise ConfigError(f"--address {address} is that of a Ray cluster; give --engine ray too")
    return LocalEngine(usual if workers is None else workers)
