"""What a result was computed from.

Knows: autograd's graph. Does not know: losses, models.
"""

from torch import Tensor
from torch.autograd.graph import Node


def trained_leaves(result: Tensor) -> list[Tensor]:
    """Return the leaves of the graph behind ``result`` that would receive a gradient from it, each once.

    Args:
        result: any tensor; one without a graph has no leaves.

    >>> import torch
    >>> weight, frozen = torch.ones(2, requires_grad=True), torch.ones(2)
    >>> [leaf is weight for leaf in trained_leaves((weight * frozen + weight).sum())]
    [True]
    """
    found: dict[int, Tensor] = {}
    waiting = [result.grad_fn]
    seen: set[Node] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            found[id(leaf)] = leaf
        waiting += [following for following, _ in node.next_functions]
    return list(found.values())
