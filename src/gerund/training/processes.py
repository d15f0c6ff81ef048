"""Training in several processes: start them, coordinate them, and gather their rows for a loss.

``gerund train --processes N`` starts them by torch's own launcher, with addresses on the loopback of this machine;
several machines are started by ``torchrun`` on each of them.

For a contrastive loss over all processes, take the mean over a process's *own* queries against *all* keys. The gradient
of a key then comes from the losses of all processes, and after the average that DDP takes over them it is the gradient
of one process that has all rows.
"""

import logging
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast
from uuid import uuid4

import torch
from torch import Tensor, distributed
from torch.autograd.function import once_differentiable

from gerund.errors import ConfigError, DataError, GerundError


def process_count() -> int:
    """Return how many processes train together."""
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def gather_rows(rows_BD: Tensor) -> tuple[Tensor, int]:
    """Return the rows of all processes in the order of their ranks, with gradient, and where the own ones begin.

    The backward pass communicates as well: all processes have to run it.

    Every process must bring as many rows of one width; DataError in all of them otherwise. Returns ``(K, D)`` and the
    index of the first own row.
    """
    if process_count() == 1:
        return rows_BD, 0
    _check_equal_shapes(rows_BD)
    all_KD: Tensor = _GatherWithGradient.apply(rows_BD)
    return all_KD, distributed.get_rank() * len(rows_BD)


@torch.no_grad()
def gather_numbers(numbers_B: Tensor) -> Tensor:
    """Return the numbers of all processes, such as ids of texts, in the order of ``gather_rows``; no gradient."""
    if process_count() == 1:
        return numbers_B
    _check_equal_shapes(numbers_B)
    return _gathered(numbers_B)


class _GatherWithGradient(torch.autograd.Function):
    """Rows of all processes; a row's gradient is the sum of what all processes make of it.

    torch's own, ``torch.distributed.nn.functional.all_gather``, is deprecated, and what follows it is private.
    """

    @staticmethod
    def forward(ctx: Any, rows_BD: Tensor) -> Tensor:
        """Collect the rows."""
        first = distributed.get_rank() * len(rows_BD)
        ctx.own = slice(first, first + len(rows_BD))
        return _gathered(rows_BD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream_KD: Tensor) -> Tensor:
        """Add up the gradients of all processes and take those of the own rows."""
        total_KD = upstream_KD.clone(memory_format=torch.contiguous_format)
        distributed.all_reduce(total_KD)
        return total_KD[ctx.own]


def _gathered(local: Tensor) -> Tensor:
    parts = [torch.empty_like(local, memory_format=torch.contiguous_format) for _ in range(process_count())]
    distributed.all_gather(parts, local.contiguous())
    return torch.cat(parts)


def _check_equal_shapes(rows: Tensor) -> None:
    """Compare the shapes first: with unequal ones the communication itself would hang or mix up rows."""
    shape_here = torch.tensor([len(rows), rows[:1].numel() if rows.ndim > 1 else 1], device=rows.device)
    shapes = [torch.empty_like(shape_here) for _ in range(process_count())]
    distributed.all_gather(shapes, shape_here)
    result = [shape.tolist() for shape in shapes]
    if any(shape != result[0] for shape in result):
        text = ", ".join(f"process {rank} has {count} of width {width}" for rank, (count, width) in enumerate(result))
        raise DataError(f"every process has to bring as many rows of one width, but {text}")


Found = TypeVar("Found")


def process_index() -> int:
    """Return the rank of this process: 0 is the first, and the only one where there is no group."""
    return distributed.get_rank() if process_count() > 1 else 0


def planned_processes() -> int:
    """Return how many processes a launcher has started, before they have met."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def wait() -> None:
    """Wait until all processes are here."""
    if process_count() > 1:
        distributed.barrier()


def on_first_process(find: Callable[[], Found]) -> Found:
    """Return what the first process finds, in all of them; a mistake that it finds is raised in all of them."""
    outcome: list[Any] = [None]
    if process_index() == 0:
        try:
            outcome = [find()]
        except GerundError as error:
            outcome = [error]
    if process_count() > 1:
        distributed.broadcast_object_list(outcome)
    [result] = outcome
    if isinstance(result, GerundError):
        raise result
    return cast("Found", result)


@contextmanager
def once_per_node() -> Iterator[None]:
    """Run the block in the first process, then in the first of every other node, then in all that are left.

    What is made on a disk is so made once where all nodes share it, and once a node where each has its own; the
    others find it.
    """
    local_index = int(os.environ.get("LOCAL_RANK", str(process_index())))
    turn = 0 if process_index() == 0 else 1 if local_index == 0 else 2
    for _ in range(turn):
        wait()
    yield
    for _ in range(2 - turn):
        wait()


def check_shared_folder(folder: Path) -> None:
    """Refuse an output folder that the nodes do not share: checkpoints would be scattered."""
    if int(os.environ.get("LOCAL_WORLD_SIZE", str(process_count()))) >= process_count():
        return

    def leave_sign() -> str:
        folder.mkdir(parents=True, exist_ok=True)
        sign = folder / f".seen-by-all-{secrets.token_hex(8)}"
        sign.touch()
        return sign.name

    name = on_first_process(leave_sign)
    seen: list[bool] = [False] * process_count()
    distributed.all_gather_object(seen, (folder / name).exists())
    if process_index() == 0:
        (folder / name).unlink()
    if not all(seen):
        raise ConfigError(
            f"process {seen.index(False)} does not see what the first one writes into {folder}: several nodes need an "
            "output folder that all of them share (data.cache may be a folder of each node's own)"
        )


_LOOPBACK = "127.0.0.1"


def check_processes(processes: int) -> None:
    """Refuse a number of processes that this machine cannot start."""
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

    Returns the exit status: 0, or that of the process that failed first.
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
