"""The key-value cache under its names in transformers, and keys, values and router states that layers share.

transformers' versions name the cache differently. Upper layers of Gemma 3n and 4 attend to keys and values of lower
ones, layers of GLM 5 and Hunyuan 4 may reuse the keys that the layer below has selected, Zaya's routers continue from
the last one. A plan that gives such layers other masks or inputs computes something else; where that has no meaning,
the plan isn't supported.
"""

import inspect
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from torch import nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from gerund.errors import UnsupportedModelError
from gerund.settings.plan import Direction, ResolvedPlan

# From 5.24 on it is `cache` everywhere; some modules had names of their own before.
_NAMES = ("cache", "past_key_values", "cache_params", "layer_past")
CACHE = next(name for name in _NAMES if name in {field.name for field in fields(CausalLMOutputWithPast)})
"""The keyword that a model takes its cache by, and the attribute of its output that holds it."""


def cache_in(kwargs: Mapping[str, Any]) -> Any:
    """Return the cache among the keywords of a module's call; None where there is none."""
    return next((kwargs[name] for name in _NAMES if kwargs.get(name) is not None), None)


# Indexers that hide what comes later by themselves, in blocks that are counted from the beginning of a row.
_ONE_SIDED = ("MiniMaxM3VLIndexer",)
_HANDED = ("shared_kv_states", "prev_topk_indices", "prev_router_hidden_states", "block_states")


def hands_on(layers: nn.ModuleList) -> bool:
    """Whether decoder layers take more from each other than hidden states."""
    names = {name for layer in layers for name in inspect.signature(layer.forward).parameters}
    return not names.isdisjoint(_HANDED)


def counts_rows(module: nn.Module) -> bool:
    """Whether something in a layer or a model counts tokens from the beginning of a row, padding included."""
    return any(type(part).__name__.endswith(_ONE_SIDED) for part in module.modules())


def refuse_shared(plan: ResolvedPlan, layers: nn.ModuleList, name: str) -> None:
    """Refuse a plan that has no meaning where layers hand each other more than hidden states."""
    if plan.stream is not None and plan.stream.kind == "stack" and hands_on(layers):
        raise UnsupportedModelError(
            f"the layers of this {name} model hand each other more than hidden states (such as keys and values), so no "
            "second tower can run beside the first; take a plan without one"
        )
    for index, layer in enumerate(layers):
        views = [plan.views[index], *([plan.stream.view] if plan.stream and index in plan.stream.layers else [])]
        if counts_rows(layer) and any(view.direction is not Direction.CAUSAL for view in views):
            raise UnsupportedModelError(
                f"layer {index} of this {name} model has an indexer that hides later tokens itself, so it cannot be "
                "converted; take a plan that leaves it causal"
            )
        if not any(getattr(part, "skip_topk", False) for part in layer.modules()):
            continue
        if plan.stream is not None or plan.views[index] != plan.views[index - 1]:
            raise UnsupportedModelError(
                f"layer {index} of this {name} model looks where layer {index - 1} has looked, so the plan has to give "
                "both the same view: take one that treats all layers alike, such as bidir, or another k"
            )
