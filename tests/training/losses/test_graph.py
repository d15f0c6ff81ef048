"""The leaves of a graph are those that get a gradient."""

import torch
from torch import nn

from gerund.training.losses.vocabulary import trained_leaves


def test_the_leaves_are_those_that_backward_reaches():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2), nn.Linear(2, 2))
    net[2].bias.requires_grad_(False)
    unused = nn.Parameter(torch.zeros(2))
    start = torch.randn(5, 3, requires_grad=True)
    middle = net[0](start)
    result = (net[2](middle.relu()) + middle[:, :2].detach() * unused.detach()).sum()
    leaves = trained_leaves(result)
    result.backward()
    reached = [leaf for leaf in (start, unused, *net.parameters()) if leaf.grad is not None]
    assert {id(leaf) for leaf in leaves} == {id(leaf) for leaf in reached}
    assert len(leaves) == 4


def test_no_graph_no_leaves():
    assert trained_leaves(torch.ones(2)) == []


def test_a_deep_graph_is_no_matter():
    start = torch.ones((), requires_grad=True)
    result = start
    for _ in range(3000):
        result = result + 1
    assert trained_leaves(result) == [start]
