"""Cache the states below the lowest trained layer, so that frozen layers read each text once in a training.

With an adapter on the top ten of thirty layers, a step that finds its texts in the cache costs about a third. The
states are those of the first pass, to the rounding of another batch. In a model's forward pass the lower layers hand
their input on, and the last of them returns the states of the cache; nothing else of an architecture has to be known.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gerund.attention.layouts import decoder_layers, hidden_of
from gerund.errors import ConfigError
from gerund.inference.encode.runtime import hidden_states
from gerund.settings.plan import AttentionPlan, ResolvedPlan

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MOST_BYTES = 2**32
"""Bytes of states that are stored; those of further texts are computed each time."""
_NEAR = 0.05


class LowerStates:
    """The states of texts at the input of the lowest trained layer, by their tokens.

    Args:
        model: what is trained; its adapter decides which layers are below.
        plan: how its texts are read; None for causally.

    Raises:
        ConfigError: the lowest layer is trained, the plan adds to the states of lower layers, or these have dropout.
    """

    def __init__(self, model: "PreTrainedModel", plan: ResolvedPlan | None, *, most_bytes: int = MOST_BYTES) -> None:
        layers = decoder_layers(model)
        trained = (number for number, layer in enumerate(layers) if _is_trained(layer))
        self.depth = next(trained, len(layers))
        embeddings = model.get_input_embeddings()
        if self.depth == 0 or _is_trained(embeddings):
            raise ConfigError("model.cache_below: the lowest layer is trained too; set model.lora.lowest_layer")
        if any("forward" in vars(layer) for layer in layers):
            raise ConfigError("model.cache_below is not for models whose layers' forward was replaced")
        self.plan = plan or AttentionPlan("causal").resolve(len(layers))
        stream = self.plan.stream
        if any(skip < self.depth for skip in self.plan.skips) or (stream and stream.layers.start < self.depth):
            raise ConfigError(f"model.cache_below: the plan changes layers below {self.depth}, the lowest trained one")
        if getattr(model.config.get_text_config(decoder=True), "attention_dropout", 0):
            raise ConfigError("model.cache_below: this model's layers have dropout, so no two passes are the same")
        self.most_bytes, self.bytes = most_bytes, 0
        self._states: dict[bytes, Tensor] = {}
        self._outputs = 0  # of a layer that returns a tuple: how many
        self._is_checked = False

    def read(self, model: "PreTrainedModel", ids_BT: Tensor, real_BT: Tensor, plan: ResolvedPlan | None) -> Tensor:
        """Return what ``hidden_states`` returns ``(B, T, D)``, with gradients of the trained layers."""
        below_BTD = self._below(model, ids_BT, real_BT)
        with self._in_place_of_layers(model, below_BTD):
            hidden_BTD = hidden_states(model, ids_BT, real_BT, plan)
        if not self._is_checked:
            with torch.no_grad():
                computed_BTD = hidden_states(model, ids_BT, real_BT, plan)
            apart = (hidden_BTD.detach() - computed_BTD)[real_BT].float().norm() / computed_BTD[real_BT].float().norm()
            if not apart <= _NEAR:
                raise ConfigError(
                    "model.cache_below: upper layers of this architecture need more of the lower ones than their states"
                )
            self._is_checked = True
        return hidden_BTD

    @torch.no_grad()
    def _below(self, model: "PreTrainedModel", ids_BT: Tensor, real_BT: Tensor) -> Tensor:
        """Return the states ``(B, T, D)``, of the cache where all texts are in it; padding is arbitrary."""
        tokens = [ids_T[real_T].cpu() for ids_T, real_T in zip(ids_BT, real_BT, strict=True)]
        keys = [row_T.numpy().tobytes() for row_T in tokens]
        new = [row for row, key in enumerate(keys) if key not in self._states]
        states = [self._states.get(key) for key in keys]
        if new:
            computed_BTD = self._computed(model, ids_BT[new], real_BT[new])
            for row, own_TD in zip(new, computed_BTD, strict=True):
                states[row] = own_TD = own_TD[real_BT[row]].cpu()
                if self.bytes + own_TD.nbytes <= self.most_bytes:
                    self.bytes += own_TD.nbytes
                    self._states[keys[row]] = own_TD.clone()
        first_TD = states[0]
        assert first_TD is not None
        below_BTD = first_TD.new_zeros((*ids_BT.shape, first_TD.shape[-1]))
        below_BTD[real_BT.cpu()] = torch.cat([own_TD for own_TD in states if own_TD is not None])
        return below_BTD.to(ids_BT.device)

    def _computed(self, model: "PreTrainedModel", ids_BT: Tensor, real_BT: Tensor) -> Tensor:
        """Return the states ``(B, T, D)`` of texts that are not in the cache."""
        made: list[Any] = []

        def keep(layer: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
            del layer, args
            made.append(output)

        handle = decoder_layers(model)[self.depth - 1].register_forward_hook(keep)
        try:
            hidden_states(model, ids_BT, real_BT, self.plan.lower(self.depth))
        finally:
            handle.remove()
        self._outputs = len(made[0]) if isinstance(made[0], tuple) else 0
        states_BTD: Tensor = hidden_of(made[0])
        return states_BTD

    @contextmanager
    def _in_place_of_layers(self, model: "PreTrainedModel", below_BTD: Tensor) -> Iterator[None]:
        """Let the lower layers return ``below_BTD`` instead of computing."""

        def forward(hidden_BTD: Tensor, *args: Any, **kwargs: Any) -> Any:
            del hidden_BTD, args, kwargs
            return (below_BTD, *[None] * (self._outputs - 1)) if self._outputs else below_BTD

        below = list(decoder_layers(model))[: self.depth]
        for layer in below:
            vars(layer)["forward"] = forward
        try:
            yield
        finally:
            for layer in below:
                del vars(layer)["forward"]


def _is_trained(module: torch.nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())
