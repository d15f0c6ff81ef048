"""Compiled decoder layers: one layer at a time, for texts of any length.

Knows: ``torch.compile``. Does not know: objectives, recipes.
"""

from typing import TYPE_CHECKING

import torch

from gerund.attention.streams import decoder_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# With and without gradients, short texts and long ones, one view and another.
_VARIANTS = 8


def compile_layers(model: "PreTrainedModel") -> None:
    """Compile each decoder layer for the passes to come, the adapter inside it included.

    The whole model would be compiled anew for nearly every shape of a batch, and once more for each attention plan. A
    layer has few sizes, and its kernels serve all layers; only what depends on a layer's index is made for each.

    Args:
        model: a decoder-only language model, attached to gerund's attention functions.
    """
    layers = decoder_layers(model)
    settings = torch._dynamo.config
    # All layers share their code, and each counts as compiling it once more.
    settings.recompile_limit = max(settings.recompile_limit, _VARIANTS * len(layers))
    settings.accumulated_recompile_limit = max(settings.accumulated_recompile_limit, settings.recompile_limit)
    # Sizes of tensors may vary; a layer's index decides what it does.
    settings.specialize_int = True
    for layer in layers:
        layer.compile(dynamic=True)
