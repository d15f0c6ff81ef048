"""What one of two processes does: it carries recipes out, one after the other.

Not a test by itself; test_processes.py starts it. What stopped it, what it told and the gradients of every step go
to files.
"""

import json
import os
import sys
import tempfile
import traceback
import warnings
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from gerund.errors import GerundError
from gerund.training.corpus.sources import Sources
from gerund.training.losses import by_length
from gerund.training.objectives.registry import prepare_objectives
from gerund.training.recipe import load_recipe
from gerund.training.run import _gathered, train
from gerund.training.run_folder import newest_checkpoint
from gerund.training.step import StepData, TrainingModule, process_count, run_step
from gerund.training.trainable_model import prepare_model
from gerund.training.trainer import WEIGHTS, GerundTrainer, _whole, is_sharded, load_weights, trained_tensors


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


def state(folder):
    """Return weights and optimizer state of the last checkpoint, flattened."""
    last = newest_checkpoint(folder / "checkpoints")[0]
    found = dict(load_file(last / "trainable.safetensors"))
    optimizer = torch.load(last / "optimizer.pt", weights_only=True)
    for number, values in optimizer["state"].items():
        found.update({f"{number}.{key}": torch.as_tensor(value) for key, value in values.items()})
    return found


def assert_equal_states(one, other):
    one, other = state(one), state(other)
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


def one_step(recipe, step, *, sharded=False):
    """Return gradients and the norm of one step from fresh adapters, and what sharded weights can be made into."""
    prepared = prepare_model(recipe)
    objectives = prepare_objectives(recipe, prepared, Sources(recipe, prepared.tokenizer))
    module = TrainingModule(prepared.model, {objective.name: objective.losses for objective in objectives})
    torch.manual_seed(3)
    for name, parameter in module.named_parameters():
        if "lora_B" in name:
            # Zeros at the start: then nothing would reach the other half of the adapter.
            torch.nn.init.normal_(parameter, std=0.1)
    before = trained_tensors(module)
    if sharded:
        mesh = init_device_mesh("cpu", (process_count(),))
        for layer in prepared.model.base_model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(module, mesh=mesh)
        assert is_sharded(module)
    assert by_length.passes_may_differ(prepared.model) != sharded
    module.train()
    data = StepData(objectives, steps=recipe.steps, processes=process_count())
    rank = torch.distributed.get_rank() if process_count() > 1 else 0
    run_step(module, objectives, data[step * process_count() + rank])
    gradients = {name: p.grad for name, p in module.named_parameters() if p.requires_grad and p.grad is not None}
    found = {f"gradient.{name}": _whole(gradient) for name, gradient in gradients.items()}
    found["norm"] = _whole(torch.nn.utils.get_total_norm(gradients.values()))
    if sharded:
        check_sharded(recipe, prepared, module, before)
    return found


def check_sharded(recipe, prepared, module, before):
    """Demand that sharded weights are written, read and finished as whole ones."""
    first = torch.distributed.get_rank() == 0
    tensors = trained_tensors(module, keep=first)
    assert tensors.keys() == (before.keys() if first else set())
    assert all(torch.equal(tensors[name], before[name]) for name in tensors)
    with tempfile.TemporaryDirectory() as folder:
        other = {name: tensor + 1 for name, tensor in before.items()}
        save_file(other, Path(folder) / WEIGHTS)
        load_weights(module, Path(folder))
    whole = _gathered(recipe, prepared, module, first)
    if not first:
        assert whole is prepared
        return
    assert not is_sharded(whole.model)
    for name, parameter in whole.model.named_parameters():
        if parameter.requires_grad:
            assert torch.equal(parameter, other[f"model.{name}"])


def work_sharded(folder: Path, rank: int, port: int) -> None:
    """Take one step with FSDP2 as process ``rank`` of two."""
    with joined(folder, rank, port):
        # Each would read its texts in a number of passes of its own.
        by_length._CPU_TOKENS = 1
        torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
        for path in sorted(folder.glob("*.yaml")):
            found = one_step(load_recipe(path), 1, sharded=True)
            if rank == 0:
                save_file(found, path.with_suffix(".safetensors"))
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


@contextmanager
def joined(folder, rank, port):
    """Be process ``rank`` of two, whose words go to a file."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()}, MASTER_ADDR="127.0.0.1")
    # As torchrun does; accelerate warns where nobody has.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    with (folder / f"told-{rank}.txt").open("w", buffering=1) as told:
        sys.stdout = sys.stderr = told
        try:
            yield
        except BaseException:
            traceback.print_exc()
            raise


def work(folder: Path, rank: int, port: int) -> None:
    """Carry out the jobs of ``folder/jobs.json`` as process ``rank`` of two."""
    with joined(folder, rank, port):
        by_length._CPU_TOKENS = 1
        jobs = json.loads((folder / "jobs.json").read_text())
        stopped = [carry_out(folder, number, **job) for number, job in enumerate(jobs)]
        (folder / f"stopped-{rank}.json").write_text(json.dumps(stopped))
        torch.distributed.destroy_process_group()
