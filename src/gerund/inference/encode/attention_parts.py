"""Read the values of the attention, or its output, in the place of hidden states.

Zhang et al., 2026, "LLM-based Embeddings: Attention Values Encode Sentence Semantics Better Than Hidden States" (arXiv
2602.01572): the values of all tokens, pooled over layers and tokens (value aggregation); and the values weighted by the
last token's attention and mapped by the output projection W_O, which is the output of the attention at the last token
(AlignedWVA, with a template). Layers are mixed by the mean of what they give, as hidden states are.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from gerund.errors import UnsupportedModelError
from gerund.settings.templates import HIDDEN

VALUES = "values"
# What architectures call the projection of the heads' outputs.
_PROJECTIONS = ("o_proj", "out_proj", "dense", "c_proj")


class AttentionParts:
    """The mean over layers of the values, or of the outputs, of the attention in one pass.

    ``BoundPlan.attention_parts`` calls ``keep``.

    Args:
        states: ``values`` or ``attention``.
        layers: which layers, counted from 1.
    """

    def __init__(self, states: str, layers: Sequence[int]) -> None:
        self._states, self._layers = states, frozenset(layers)
        self._found: dict[int, Tensor] = {}

    def keep(self, index: int, module: nn.Module, value: Tensor, output: Tensor) -> None:
        """Note what a layer's attention reads and gives.

        Args:
            index: of the layer, from 0.
            module: its attention.
            value: ``(B, heads of keys, T, d)``.
            output: ``(B, T, heads, d)``, before the projection.
        """
        if index + 1 not in self._layers:
            return
        if self._states == VALUES:
            self._found[index + 1] = value.transpose(1, 2).flatten(2).float()
            return
        project = next((getattr(module, name) for name in _PROJECTIONS if hasattr(module, name)), None)
        if project is None:
            raise UnsupportedModelError(
                f"{type(module).__name__} has no projection of its output; take states='values'"
            )
        self._found[index + 1] = project(output.flatten(2)).float()

    def mixed(self, name: str) -> Tensor:
        """Return the mean over the layers ``(B, T, D)`` float32; ``name`` is the model's, for errors."""
        missing = sorted(self._layers - self._found.keys())
        if missing:
            which = ", ".join(map(str, missing))
            raise UnsupportedModelError(
                f"states={self._states!r} reads attention, and layer {which} of this {name} model has none that can be "
                "read; take other layers or states='hidden'"
            )
        first, *others = self._found.values()
        if any(other.shape != first.shape for other in others):
            raise UnsupportedModelError(f"the layers of this {name} model have values of several sizes; take one layer")
        return sum(others, first) / len(self._found)


def width_of(states: str, model: PreTrainedModel, hidden: int) -> int:
    """Return the size of what is read, of a model whose hidden states have ``hidden`` numbers."""
    if states != VALUES:
        return hidden
    config: Any = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_attention_heads", None)
    if heads is None:  # no layer attends, as a pass will say
        return hidden
    kept = getattr(config, "num_key_value_heads", None) or (1 if getattr(config, "multi_query", False) else heads)
    return kept * (getattr(config, "head_dim", None) or config.hidden_size // heads)


def reads_attention(states: str) -> bool:
    """Whether something else than hidden states is read.

    >>> reads_attention("hidden"), reads_attention("values")
    (False, True)
    """
    return states != HIDDEN
