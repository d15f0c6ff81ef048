"""Detect bf16, torch.compile and peak memory for training, and save and restore random number states."""

import importlib.util
import os
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch

from gerund.attention.layouts import decoder_layers
from gerund.attention.matmul_attention import cpu_has_bfloat16
from gerund.errors import ConfigError, MissingDependencyError
from gerund.jobs.engine import peak_resident_mib
from gerund.training.processes import planned_processes
from gerund.training.recipe import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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
    processes = planned_processes() if processes is None else processes
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


def compile_layers(model: "PreTrainedModel") -> None:
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
