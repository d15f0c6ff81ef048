"""The mask pictures of docs/explanation/attention-plans.md, drawn from the masks themselves."""

from itertools import groupby

import torch

from gerund.attention.masks import visible
from gerund.settings.plan import AttentionPlan, Direction

LENGTH = 5


def picture(name: str, n_layers: int, **settings: int) -> str:
    """Draw what each group of layers sees: a row a query, a column a key, `#` for "sees"."""
    plan = AttentionPlan(name, **settings).resolve(n_layers)
    groups = []
    for view, members in groupby(range(n_layers), key=lambda layer: plan.views[layer]):
        layers = list(members)
        title = f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]}-{layers[-1]}"
        span = torch.tensor([[0, 0, 1, 1, 0]]) if view.direction is Direction.HYBRID else None
        mask = visible(view, LENGTH, span_BT=span)[0, 0]
        groups.append([title, *(" ".join("#" if seen else "." for seen in row) for row in mask.tolist())])
    if plan.stream is not None:
        mask = visible(plan.stream.view, LENGTH)[0, 0]
        groups.append(["second pass", *(" ".join("#" if seen else "." for seen in row) for row in mask.tolist())])
    lines = zip(*groups, strict=True)
    return "\n".join("    ".join(f"{cell:<12}" for cell in line).rstrip() for line in lines)
