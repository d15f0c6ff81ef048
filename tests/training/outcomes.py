"""What a training leaves behind, read back, and a crash in the middle of one."""

import json

import torch
from safetensors.torch import load_file

from gerund.training.run_folder import newest_checkpoint
from gerund.training.step import TrainingModule


class CrashError(Exception):
    pass


def crash():
    raise CrashError


def crash_at(monkeypatch, step, how=crash):
    """Let the training die behind optimizer step ``step``, between two parts of the next, or do something else."""
    original, seen = TrainingModule.forward, []

    def forward(self, *args, **kwargs):
        seen.append(torch.is_grad_enabled())
        if self.training and len([one for one in seen if one]) == 2 * step + 2:
            how()
        return original(self, *args, **kwargs)

    monkeypatch.setattr(TrainingModule, "forward", forward)


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
