"""Pool attention values, attention outputs or states of generated tokens, instead of a text's hidden states.

Zhang et al., 2026, "LLM-based Embeddings: Attention Values Encode Sentence Semantics Better Than Hidden States" (arXiv
2602.01572): the values of all tokens, pooled over layers and tokens (value aggregation); and the values weighted by the
last token's attention and mapped by the output projection W_O, which is the output of the attention at the last token
(AlignedWVA, with a template). Layers are mixed by the mean of what they give, as hidden states are.

"The Truth Lies Somewhere in the Middle (of the Generated Tokens)" (2026, arXiv 2605.09969): the mean of the hidden
states of tokens that are generated after a text. They are generated greedily, never one that ends a text, and each
state is the one after reading its token.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gerund.attention.layer_state import CACHE
from gerund.attention.layouts import is_one_graph
from gerund.attention.recurrent import keeps_states
from gerund.errors import UnsupportedModelError
from gerund.inference.lm_head import TokenHead
from gerund.inference.text_ids import end_ids
from gerund.inference.tokens import Tokens
from gerund.settings.templates import HIDDEN

if TYPE_CHECKING:
    from gerund.inference.encode.runtime import EncoderRuntime


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


class EachPart:
    """Hands what a layer's attention reads and gives to several readers of one pass."""

    def __init__(self, parts: Sequence[AttentionParts]) -> None:
        self._parts = parts

    def keep(self, index: int, module: nn.Module, value: Tensor, output: Tensor) -> None:
        """See ``AttentionParts.keep``."""
        for part in self._parts:
            part.keep(index, module, value, output)


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


@torch.no_grad()
def generated_states(runtime: "EncoderRuntime", texts: Sequence[Tokens], count: int) -> Tensor:
    """Return the last hidden states ``(B, count, D)`` of the tokens that continue each text.

    Texts of one length are run together, so that there is no padding in a cache.

    Raises:
        UnsupportedModelError: the model keeps other states than keys and values, or runs as one graph.
    """
    model = runtime.model
    if is_one_graph(model):
        raise UnsupportedModelError("generated needs a cache that a packed model has not: take runtime='torch'")
    if keeps_states(model):
        raise UnsupportedModelError(f"generated is for attention alone; {model.config.model_type} has recurrent layers")
    head, ends = TokenHead(model), end_ids(model, runtime.tokenizer)
    states_of: dict[int, Tensor] = {}
    for length in sorted({len(text) for text in texts}):
        rows = [row for row, text in enumerate(texts) if len(text) == length]
        next_BT = torch.tensor([texts[row].ids for row in rows], device=runtime.device)
        states, cache = list[Tensor](), None
        with runtime.computing():
            for _ in range(count + 1):
                output = model.base_model(next_BT, use_cache=True, **({} if cache is None else {CACHE: cache}))
                states.append(output.last_hidden_state[:, -1])
                cache = getattr(output, CACHE)
                if len(states) <= count:
                    logits_BV = head.logits(states[-1]).float()
                    logits_BV[:, ends] = -torch.inf
                    next_BT = logits_BV.argmax(dim=-1, keepdim=True)
        states_of |= dict(zip(rows, torch.stack(states[1:], dim=1), strict=True))
    return torch.stack([states_of[row] for row in range(len(texts))])
