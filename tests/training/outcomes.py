"""What a training leaves behind, read back, and a crash in the middle of one."""

import json
from contextlib import contextmanager

import torch
from safetensors.torch import load_file

from gerund.training.run_folder import newest_checkpoint
from gerund.training.step import TrainingModule
from gerund.training.trainer import GerundTrainer


class CrashError(Exception):
    pass


def crash():
    raise CrashError


@contextmanager
def crashing(step=None, how=crash):
    """Let a training die behind step ``step``, counted from 0, within the next one; or let it do something else."""
    training_step, forward, taken = GerundTrainer.training_step, TrainingModule.forward, []

    def watched_step(self, model, inputs, *args):
        total = training_step(self, model, inputs, *args)
        taken.append(inputs["step"])
        return total

    def watched_forward(self, *args, **kwargs):
        result = forward(self, *args, **kwargs)
        if self.training and torch.is_grad_enabled() and taken and taken[-1] == step:
            taken.append(None)  # once
            how()
        return result

    GerundTrainer.training_step, TrainingModule.forward = watched_step, watched_forward
    try:
        yield
    finally:
        GerundTrainer.training_step, TrainingModule.forward = training_step, forward


def state(folder):
    """Return weights and optimizer state of the last checkpoint, flattened."""
    last = newest_checkpoint(folder / "checkpoints")[0]
    found = dict(load_file(last / "trainable.safetensors"))
    optimizer = torch.load(last / "optimizer.pt", weights_only=True)
    # Muon's checkpoint has an optimizer for each kind of parameters.
    for part, content in optimizer.items() if "state" not in optimizer else [("adamw", optimizer)]:
        for number, values in content["state"].items():
            found.update({f"{part}.{number}.{key}": torch.as_tensor(value) for key, value in values.items()})
    return found


def assert_equal_states(one, other):
    one, other = state(one), state(other)
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


def read_log(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text("utf-8").splitlines()]


def losses(folder):
    return [(row["step"], row.get("loss"), row.get("val_a")) for row in read_log(folder)]


def losses_of(model, name):
    """Return the losses of an objective in the order of the steps, by the folder of the model that was trained."""
    return [row[f"loss_{name}"] for row in read_log(model.parent) if f"loss_{name}" in row]
