"""The vectors of several layers in one pass: the last state's, and those of layers below it through heads of their own.

Knows: decoder layers, pooling. Does not know: losses, teachers.

Shapes: B texts, T tokens, D numbers of a state, E numbers of a vector.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gerund.attention.layouts import decoder_layers, hidden_of
from gerund.models.pooling import pool
from gerund.training.losses.by_length import Batch
from gerund.training.losses.vectors import VectorEncoder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from gerund.inference.encode.runtime import EncoderRuntime
    from gerund.models.heads import ProjectionHead


class DistillEncoder(VectorEncoder):
    """Reads texts as ``encode`` does behind a head, and beside it the pooled states of further layers.

    Args:
        runtime: How a text becomes a vector.
        head: Leads into the teacher's space; it is kept with the model.
        dimensions: Numbers of the teacher's vectors.
        layers: Further layers, counted from 1; each gets a linear head that serves the training only.
    """

    def __init__(
        self, runtime: "EncoderRuntime", head: "ProjectionHead", dimensions: int, layers: Sequence[int] = ()
    ) -> None:
        super().__init__(runtime)
        self.projection = head
        self.layers = list(layers)
        width = runtime.state_width
        self.further = nn.ModuleList([nn.Linear(width, dimensions, bias=False) for _ in self.layers])

    def states(self, model: "PreTrainedModel", part: Batch) -> Tensor:
        """Return the last hidden states ``(B, T, D)``, side by side with those of further layers ``(B, T, L D)``."""
        if not self.layers:
            return super().states(model, part)
        below: dict[int, Tensor] = {}

        def keep(number: int) -> Any:
            def hook(layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
                del layer, args
                below[number] = hidden_of(output)

            return hook

        with ExitStack() as hooks:
            stack = decoder_layers(model)
            for number in self.layers:
                handle = stack[number - 1].register_forward_hook(keep(number))
                hooks.callback(handle.remove)
            last_BTD = super().states(model, part)
        return torch.cat([last_BTD, *(below[number] for number in self.layers)], dim=-1)

    def vectors(self, hidden_BTD: Tensor, part: Batch) -> Tensor:
        """Return the vectors ``(B, E)``, side by side with those of further layers ``(B, L E)``."""
        if not self.layers:
            return super().vectors(hidden_BTD, part)
        last_BTD, *below = hidden_BTD.split(hidden_BTD.shape[-1] // (1 + len(self.layers)), dim=-1)
        found = [super().vectors(last_BTD, part)]
        with torch.autocast(hidden_BTD.device.type, enabled=False):
            found += [
                head(pool(own_BTD, part["pooled"], self.pooling))
                for head, own_BTD in zip(self.further, below, strict=True)
            ]
        return torch.cat(found, dim=-1)
