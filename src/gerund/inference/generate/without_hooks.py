"""A language model without what encoding put into it: the same weights in a tree of modules of its own.

A step of writing is many small calls, so that hooks and adapters that take no part cost a tenth of it; and a compiler
can read the tree in one piece.

Knows: modules. Does not know: what is computed with them.
"""

import copy

from torch import nn
from transformers import PreTrainedModel

from gerund.attention.layouts import is_stream_hook
from gerund.models.adapters import own_module
from gerund.models.int8_matmul import Int8Linear


def bare(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model with the same tensors, without adapters and without the hooks of attention plans.

    It computes the same to the bit. Where a module's forward was replaced, as accelerate does, it is the model itself:
    that forward would run the other tree's children.
    """
    if any("forward" in vars(module) for module in model.modules()):
        return model
    found = _bare(model, {})
    assert isinstance(found, PreTrainedModel)
    return found


def _bare(module: nn.Module, known: dict[nn.Module, nn.Module]) -> nn.Module:
    module = own_module(module)
    if module not in known:
        known[module] = own = copy.copy(module)
        own.__dict__ = dict(vars(module))
        if type(own) is Int8Linear:
            own.__class__ = nn.Linear  # type: ignore[assignment]
        own._forward_hooks = type(module._forward_hooks)(
            (number, hook) for number, hook in module._forward_hooks.items() if not is_stream_hook(hook)
        )
        own._modules = {name: None if child is None else _bare(child, known) for name, child in module._modules.items()}
    return known[module]
