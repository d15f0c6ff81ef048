"""Memory by use: what autograd keeps is counted tensor by tensor, and shards are a fraction."""

import torch
from torch import nn

from gerund.training.estimate import ActivationMemory, memory_use

MIB = 2**20


def test_counts_what_a_step_keeps_and_forgets_what_is_let_go():
    layer = nn.Linear(256, 256, bias=False)
    rows = torch.randn(1024, 256)  # 1 MiB
    kept = ActivationMemory(layer)
    with kept.counting():
        loss = layer(rows).square().sum()
        # The input for the weight's gradient and the output for the square's; the weight itself is none.
        assert kept.now == 2 * MIB
        loss.backward()
        loss = None
        assert kept.now == 0
        layer(rows)
    assert kept.peak == 2 * MIB


def test_a_tensor_that_is_kept_twice_counts_once():
    kept = ActivationMemory(nn.Identity())
    one = torch.ones(MIB // 4, requires_grad=True)
    with kept.counting():
        product = one * 1.0
        square = product * product
        assert kept.now == MIB
    del product, square
    assert kept.now == 0


def test_uses():
    model = nn.Sequential(nn.Linear(512, 512, bias=False), nn.Linear(512, 1024, bias=False))  # 1 and 2 MiB
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model[1].parameters())
    model[1].weight.grad = torch.ones_like(model[1].weight)
    optimizer.step()

    def used(processes, sharding):
        given = {"activations": 3 * MIB, "processes": processes, "sharding": sharding}
        found = memory_use(model, [model[1]], optimizer, **given)
        return found.weights, found.gradients, found.optimizer, found.activations, found.gathered

    assert used(1, "none") == used(2, "none") == used(1, "fsdp2") == (3, 2, 5, 3, 0)  # and a step count
    assert used(2, "fsdp2") == (2, 1, 3, 3, 3)
