"""What one of two processes does: it carries recipes out, one after the other.

Not a test by itself; test_processes.py starts it. What stopped it, what it told and the gradients of every step go
to files.
"""

import json
import os
import sys
import warnings
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file

from gerund.errors import GerundError
from gerund.training.recipe import load_recipe
from gerund.training.run import train
from gerund.training.step import TrainingModule
from gerund.training.trainer import GerundTrainer


class CrashError(Exception):
    pass


@contextmanager
def watched(gradients, crash=None):
    """Note every step's gradients as the optimizer gets them; die in step ``crash``, between two parts."""
    training_step, forward, taken = GerundTrainer.training_step, TrainingModule.forward, []

    def watched_step(self, model, inputs, *args):
        total = training_step(self, model, inputs, *args)
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                gradients[f"{inputs['step']}.{name}"] = parameter.grad.detach().clone()
        taken.append(inputs["step"])
        return total

    def watched_forward(self, *args, **kwargs):
        result = forward(self, *args, **kwargs)
        if self.training and torch.is_grad_enabled() and taken and taken[-1] == crash:
            raise CrashError
        return result

    GerundTrainer.training_step, TrainingModule.forward = watched_step, watched_forward
    try:
        yield
    finally:
        GerundTrainer.training_step, TrainingModule.forward = training_step, forward


def carry_out(folder, number, recipe, overrides, *, resume=False, crash=None):
    """Train once; return what stopped it, as text, or None."""
    gradients, stopped = {}, None
    try:
        with watched(gradients, crash):
            train(load_recipe(recipe, overrides), resume=resume)
    except (GerundError, CrashError) as error:
        stopped = str(error) or type(error).__name__
    if os.environ["RANK"] == "0":
        save_file(gradients, folder / f"gradients-{number}.safetensors")
    return stopped


def work(folder: Path, rank: int, port: int) -> None:
    """Carry out the jobs of ``folder/jobs.json`` as process ``rank`` of two."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()}, MASTER_ADDR="127.0.0.1")
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    with (folder / f"told-{rank}.txt").open("w", buffering=1) as told:
        sys.stdout = sys.stderr = told
        jobs = json.loads((folder / "jobs.json").read_text())
        stopped = [carry_out(folder, number, **job) for number, job in enumerate(jobs)]
        (folder / f"stopped-{rank}.json").write_text(json.dumps(stopped))
        torch.distributed.destroy_process_group()
