"""Shards on the disk, read by whoever asks: rows from several files, and what is missing is said."""

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from gerund.errors import GerundError
from gerund.training.sharding import (
    OPTIMIZER,
    WEIGHTS,
    Stored,
    are_sharded,
    optimizer_state_tensors,
    read_optimizer,
    read_weights,
    shard_file,
    write_shard,
)

MATRIX = torch.arange(15.0).view(5, 3)


def in_three(folder, stem, tensors):
    """Write tensors as three processes would: two rows each, the last one what is left."""
    for index in range(3):
        own = {name: tensor[2 * index : 2 * index + 2] for name, tensor in tensors.items()}
        rows = {name: [2 * index, list(tensor.shape)] for name, tensor in tensors.items()}
        save_file(own, folder / shard_file(stem, index, 3), {"gerund_rows": json.dumps(rows)})


@pytest.mark.parametrize(("first", "stop"), [(0, 5), (1, 4), (3, 5), (2, 2)])
def test_rows_come_from_whatever_file_has_them(tmp_path, first, stop):
    in_three(tmp_path, WEIGHTS, {"matrix": MATRIX})
    stored = Stored.open(tmp_path, WEIGHTS)
    assert stored.shapes == {"matrix": (5, 3)}
    assert torch.equal(stored.rows("matrix", first, stop), MATRIX[first:stop])


def test_a_process_alone_writes_and_reads_whole_tensors(tmp_path):
    tensors = {"matrix": MATRIX, "number": torch.tensor(7.0)}
    write_shard(tensors, tmp_path / "checkpoint", WEIGHTS, index=0, count=1)
    assert are_sharded(tmp_path / "checkpoint")
    stored = Stored.open(tmp_path / "checkpoint", WEIGHTS)
    for name, tensor in tensors.items():
        found = torch.zeros_like(tensor)
        stored.read_into(name, found)
        assert torch.equal(found, tensor)


def test_a_file_without_its_rows_is_refused(tmp_path):
    in_three(tmp_path, WEIGHTS, {"matrix": MATRIX})
    (tmp_path / shard_file(WEIGHTS, 1, 3)).unlink()
    with pytest.raises(GerundError, match=r"^the checkpoint has 3 of 5 rows of matrix; take another one$"):
        Stored.open(tmp_path, WEIGHTS).read_into("matrix", torch.zeros(5, 3))


def test_weights_of_another_model_are_refused(tmp_path):
    model = nn.Linear(3, 5, bias=False)
    in_three(tmp_path, WEIGHTS, {"weight": MATRIX})
    read_weights(model, tmp_path)
    assert torch.equal(model.weight.detach(), MATRIX)
    with pytest.raises(GerundError, match=r"those of another model \(for example bias\)$"):
        read_weights(nn.Linear(3, 5), tmp_path)
    with pytest.raises(GerundError, match=r"those of another model \(for example weight\)$"):
        read_weights(nn.Linear(3, 6, bias=False), tmp_path)


@pytest.mark.parametrize("sharded", [False, True])
def test_an_optimizer_goes_on_as_if_never_stopped(tmp_path, sharded):
    """From the Trainer's own file, in which parameters have numbers, and from shards, in which they have names."""

    def begun():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        groups = [{"params": [model[1].weight, model[0].weight]}, {"params": [model[0].bias, model[1].bias]}]
        return model, torch.optim.AdamW(groups, lr=0.1)

    def step(model, optimizer):
        model(MATRIX).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = begun()
    step(model, optimizer)
    if sharded:
        write_shard(dict(model.named_parameters()), tmp_path, WEIGHTS, index=0, count=1)
        write_shard(optimizer_state_tensors(model, optimizer), tmp_path, OPTIMIZER, index=0, count=1)
    else:
        save_file(model.state_dict(), tmp_path / f"{WEIGHTS}.safetensors")
        torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    other, its_optimizer = begun()
    read_weights(other, tmp_path)
    read_optimizer(other, its_optimizer, tmp_path)
    step(model, optimizer)
    step(other, its_optimizer)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
    assert its_optimizer.state[other[0].bias]["step"] == 2
