"""``gerund train --processes N``: several processes on this machine, by torch's own launcher.

Nothing is done here that ``torchrun`` would not do; only what a single machine needs no choice for is chosen, such as
addresses (its loopback). Several machines are started by ``torchrun`` on each of them.

Knows: torch's launcher, what it leaves in the environment. Does not know: recipes.
"""

import logging
import os
import sys
from collections.abc import Sequence
from uuid import uuid4

from gerund.errors import ConfigError

_LOOPBACK = "127.0.0.1"


def check_processes(processes: int) -> None:
    """Refuse a number of processes that this machine cannot start.

    Raises:
        ConfigError: With what to do.
    """
    import torch

    if processes < 1:
        raise ConfigError(f"--processes {processes}: a training has at least one")
    if "WORLD_SIZE" in os.environ:
        raise ConfigError("--processes starts processes itself; leave it out under torchrun and accelerate launch")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else None
    if gpus is not None and processes > gpus:
        raise ConfigError(f"--processes {processes}, and this machine has {gpus} GPUs, each for one process")


def launch(arguments: Sequence[str], processes: int) -> int:
    """Run ``gerund`` with the same arguments in so many processes, and wait for all of them.

    Where one ends with an error the others are ended too.

    Args:
        arguments: What follows ``gerund`` on the command line.
        processes: How many.

    Returns:
        The exit status: 0, or that of the process that failed first.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # Each process tells its own mistake in a sentence; the launcher would frame it in twenty lines.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint=f"{_LOOPBACK}:0",
        local_addr=_LOOPBACK,
        max_restarts=0,
        monitor_interval=0.5,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "gerund", *arguments)
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        # A process that a signal has ended has its number, negated.
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as stopped:
        # The launcher has ended the processes with the same signal.
        return 128 + stopped.sigval
    return 0
