"""Training processes: start them, gather rows for a loss across them, and check what the machine can do.

``gerund train --processes N`` starts them by torch's own launcher, with addresses on the loopback of this machine;
several machines are started by ``torchrun`` on each of them.

For a contrastive loss over all processes, take the mean over a process's *own* queries against *all* keys. The gradient
of a key then comes from the losses of all processes, and after the average that DDP takes over them it is the gradient
of one process that has all rows.
"""

import importlib.util
import logging
import os
import random
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast
from uuid import uuid4

import numpy as np
import torch
from torch import Tensor, distributed
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from gerund.attention.interface import cpu_has_bfloat16
from gerund.attention.layouts import decoder_layers
from gerund.errors import ConfigError, DataError, GerundError, MissingDependencyError
from gerund.jobs.engine import peak_resident_mib
from gerund.training.recipe import Recipe


def process_count() -> int:
    """Return how many processes train together."""
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def gather_rows(rows_BD: Tensor, gather: bool = True) -> tuple[Tensor, int]:
    """Return the rows of all processes in the order of their ranks, with gradient, and where the own ones begin.

    The backward pass communicates as well: all processes have to run it. Without ``gather`` the rows are the own ones.

    Every process must bring as many rows of one width; DataError in all of them otherwise. Returns ``(K, D)`` and the
    index of the first own row.
    """
    if not gather or process_count() == 1:
        return rows_BD, 0
    _check_equal_shapes(rows_BD)
    all_KD: Tensor = _GatherWithGradient.apply(rows_BD)
    return all_KD, distributed.get_rank() * len(rows_BD)


@torch.no_grad()
def gather_numbers(numbers_B: Tensor, gather: bool = True) -> Tensor:
    """Return the numbers of all processes, such as ids of texts, in the order of ``gather_rows``; no gradient."""
    if not gather or process_count() == 1:
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


# Any of the packages will do.
_TRACKERS = {"tensorboard": ("tensorboard", "tensorboardX"), "wandb": ("wandb",), "trackio": ("trackio",)}

# With and without gradients, short texts and long ones, one view and another.
_VARIANTS = 8


def uses_bf16(recipe: Recipe) -> bool:
    """Return whether the forward pass runs in bf16."""
    return has_bf16() if recipe.precision == "auto" else recipe.precision == "bf16"


def has_bf16() -> bool:
    """Return whether this machine's GPU, or else its processor, computes in bf16 without emulating it."""
    return torch.cuda.is_bf16_supported() if torch.cuda.is_available() else cpu_has_bfloat16()


def check_machine(recipe: Recipe, processes: int | None = None) -> None:
    """Refuse what this machine cannot do, or what several processes cannot share."""
    compilers = (os.environ.get("CXX"), "c++", "g++", "clang++")
    if recipe.compile and not any(name and shutil.which(name) for name in compilers):
        raise ConfigError("compile=true needs a C++ compiler and there is none; install one or set compile=false")
    if processes is None:
        processes = int(os.environ.get("WORLD_SIZE", "1"))  # as many as a launcher has started; they have not met yet
    for objective in recipe.objectives:
        objective.check_processes(processes)
    if os.environ.get("ACCELERATE_USE_FSDP", "").lower() in ("1", "true"):
        raise ConfigError(
            "accelerate's own FSDP is not used: give the recipe sharding=fsdp2, and start it with gerund train "
            "--processes N, torchrun, or accelerate launch --multi_gpu"
        )
    if recipe.sharding != "none" and processes > 1:
        _check_sharding(recipe)
    for name in recipe.report_to:
        if not any(importlib.util.find_spec(package) for package in _TRACKERS[name]):
            raise MissingDependencyError(f"report_to names {name}, which is not installed: pip install {name}")


def _check_sharding(recipe: Recipe) -> None:
    """Refuse what needs whole weights in one place during the training, or was never tried with shards."""
    if recipe.optimizer.name != "adamw":
        raise ConfigError(
            f"optimizer {recipe.optimizer.name} works on whole matrices, and sharding cuts them; use adamw, or "
            "sharding=none"
        )
    if recipe.snapshot_steps is not None:
        raise ConfigError("snapshot_steps needs whole weights, and sharding cuts them; leave it out, or sharding=none")
    if recipe.compile:
        raise ConfigError("compile was never tried with shards; set compile=false, or sharding=none")


def compile_layers(model: PreTrainedModel) -> None:
    """Compile each decoder layer for the passes to come, the adapter inside it included.

    The whole model would be compiled anew for nearly every shape of a batch, and once more for each attention plan. A
    layer has few sizes, and its kernels serve all layers; only what depends on a layer's index is made for each.
    """
    layers = decoder_layers(model)
    settings = torch._dynamo.config
    # All layers share their code, and each counts as compiling it once more.
    settings.recompile_limit = max(settings.recompile_limit, _VARIANTS * len(layers))
    settings.accumulated_recompile_limit = max(settings.accumulated_recompile_limit, settings.recompile_limit)
    # Sizes of tensors may vary; a layer's index decides what it does.
    settings.specialize_int = True
    for layer in layers:
        layer.compile(dynamic=True)


def peak_memory_mib() -> int:
    """Return the peak memory in MiB: of the GPU where there is one, else of this process."""
    if torch.cuda.is_available():
        return round(torch.cuda.max_memory_allocated() / 2**20)
    return round(peak_resident_mib())


@contextmanager
def preserve_random_states() -> Iterator[None]:
    """Leave all global generators as they were, also after an error.

    transformers' Trainer seeds them, and dropout has no other.
    """
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
