"""What a pass does beside its plan: the states of several layers are added up, a token is prepended.

Layers are mixed by the mean of their states, as transformers returns them in ``hidden_states``. Token Prepending (Fu et
al., 2025, "Token Prepending: A Training-Free Approach for Eliciting Better Sentence Embeddings from LLMs"): a token of
random embedding stands before the text in its template; the input of the second layer, and of those after it up to the
``prepend``-th, gets the state of the last token in its place, which has read the text.

Knows: states of layers, places of tokens. Does not know: models, texts.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from gerund.attention.layouts import hidden_of, input_of
from gerund.errors import UnsupportedModelError
from gerund.inference.tokens import Tokens
from gerund.settings.encoder import EncoderConfig
from gerund.settings.templates import layer_numbers

_STREAMS = (
    "the layers of this architecture hand several streams of states on: layers and prepend cannot be used with it"
)


class Beside:
    """One pass; ``after_layer`` is what ``BoundPlan.beside`` calls.

    Args:
        n_layers: of the model.
        config: its ``layers`` and ``prepend`` are read.
    """

    def __init__(self, n_layers: int, config: EncoderConfig) -> None:
        self._numbers = layer_numbers(config.layers, n_layers)
        self._n_layers, self._below = n_layers, config.prepend
        self._total_BTD: Tensor | None = None

    def prepended(
        self,
        embed: Callable[[Tensor], Tensor],
        inputs: Mapping[str, Tensor],
        texts: Sequence[Tokens],
        begin_B: Tensor,
    ) -> dict[str, Tensor]:
        """Return a model's inputs with embeddings in the place of ids, the placeholder's among them.

        Args:
            embed: the model's embeddings.
            inputs: what it would be called with.
            texts: the batch's.
            begin_B: where each begins.
        """
        device = begin_B.device
        self._row_B = torch.arange(len(texts), device=device)
        self._place_B = begin_B + torch.tensor([text.placeholder or 0 for text in texts], device=device)
        self._last_B = begin_B + torch.tensor([len(text) - 1 for text in texts], device=device)
        embedded_BTD = embed(inputs["input_ids"]).clone()
        embedded_BTD[self._row_B, self._place_B] = placeholder_embedding(embedded_BTD.shape[-1]).to(embedded_BTD)
        others = {name: tensor for name, tensor in inputs.items() if name != "input_ids"}
        return {"inputs_embeds": embedded_BTD, **others}

    def after_layer(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Note the states that are wanted, and write the next layer's input."""
        if index == 0 and 0 in self._numbers:
            self._add(input_of(args, kwargs))
        hidden_BTD = hidden_of(output)
        if hidden_BTD.ndim != 3:
            raise UnsupportedModelError(_STREAMS)
        if 1 <= index + 1 < self._below:
            hidden_BTD = hidden_BTD.clone()
            hidden_BTD[self._row_B, self._place_B] = hidden_BTD[self._row_B, self._last_B]
        if index + 1 in self._numbers and index + 1 < self._n_layers:
            self._add(hidden_BTD)
        return (hidden_BTD, *output[1:]) if isinstance(output, tuple) else hidden_BTD

    def mixed(self, last_BTD: Tensor) -> Tensor:
        """Return the mean of the layers' states ``(B, T, D)``, given the last hidden state."""
        if self._n_layers in self._numbers:
            self._add(last_BTD)
        assert self._total_BTD is not None
        if self._total_BTD.shape != last_BTD.shape:  # the last state may be projected to another size
            raise UnsupportedModelError(_STREAMS)
        return self._total_BTD / len(self._numbers)

    def _add(self, hidden_BTD: Tensor) -> None:
        own_BTD = hidden_BTD.float()
        if self._total_BTD is not None and self._total_BTD.shape != own_BTD.shape:
            raise UnsupportedModelError(_STREAMS)
        self._total_BTD = own_BTD if self._total_BTD is None else self._total_BTD + own_BTD


@lru_cache(maxsize=8)
def placeholder_embedding(width: int) -> Tensor:
    """Return the embedding of the placeholder: standard normal, and always the same."""
    return torch.randn(width, generator=torch.Generator().manual_seed(0))
