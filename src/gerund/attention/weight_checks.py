"""Detect corrupt checkpoints: non-finite weights and all-zero embeddings."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gerund.errors import ModelError

# So many numbers of a tensor are looked at when a model is loaded: all of an 8B model would take seconds.
_SAMPLE = 65_536
_CHUNK = 2**24
# States of trained models reach some ten thousand.
_LARGEST_STATE = 1e8


def refuse_unsound(model: PreTrainedModel, name: str) -> None:
    """Refuse weights that are damaged through and through.

    The ends of the model, which no probe reads whole, are looked at number by number, all else at places.
    """
    embeddings = model.get_input_embeddings().weight
    head = getattr(model.get_output_embeddings(), "weight", None)
    for key, weight in model.named_parameters():
        whole = weight is embeddings or weight is head
        if not _is_finite(weight if whole else _sample(weight)):
            raise ModelError(f"cannot load {name}: {key} holds numbers that are not finite (NaN or infinity)")
    if not any(bool(chunk.any()) for chunk in _chunks(embeddings)):
        raise ModelError(f"cannot load {name}: its input embeddings are all zero")


def refuse_damaged(model: PreTrainedModel, layer: nn.Module) -> None:
    """Refuse a model whose layer works wrongly when its weights are why; every number is looked at."""
    for key, weight in model.named_parameters():
        if not _is_finite(weight):
            raise ModelError(f"this model's weights are damaged: {key} holds numbers that are not finite")
    parameter_ids = {id(weight) for weight in layer.parameters()}
    for key, weight in model.named_parameters():
        if id(weight) in parameter_ids and weight.ndim > 1 and not any(bool(chunk.any()) for chunk in _chunks(weight)):
            raise ModelError(f"this model's weights are damaged: {key} is all zero, so its layer mixes no tokens")


@torch.no_grad()
def refuse_overflowing(model: PreTrainedModel) -> None:
    """Refuse a model whose weights are numbers but whose states are too large to compute with.

    A normalization squares what it is given, and makes zeros of numbers that are too large for that; and what a layer
    adds to such a state is lost in its rounding.
    """
    overflowing: list[str] = []

    def look(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(_module: nn.Module, _given: Any, made: Any) -> None:
            if isinstance(made, Tensor) and made.is_floating_point() and not bool(made.abs().max() < _LARGEST_STATE):
                overflowing.append(name)

        return hook

    parts = [
        (name, part) for name, part in model.base_model.named_modules() if name and not next(part.children(), None)
    ]
    hooks = [part.register_forward_hook(look(name)) for name, part in parts]
    was_training = model.training
    model.eval()
    try:
        ids_BT = torch.arange(8, device=model.device)[None] % model.get_input_embeddings().weight.shape[0]
        model.base_model(ids_BT, use_cache=False)
    finally:
        model.train(was_training)
        for hook in hooks:
            hook.remove()
    if overflowing:
        dtype = str(model.dtype).removeprefix("torch.")
        hint = ", or made for another type (try dtype='float32')" if model.dtype == torch.float16 else ""
        raise ModelError(
            f"this {model.config.model_type} model's states overflow, or are too large for {dtype}, from "
            f"{overflowing[0]} on: its weights are damaged{hint}"
        )


def _sample(weight: Tensor) -> Tensor:
    flat = weight.detach().flatten()
    return flat[:: max(1, len(flat) // _SAMPLE)]


def _chunks(weight: Tensor) -> list[Tensor]:
    """Return a tensor in parts, so that a look at it takes little memory."""
    return list(weight.detach().flatten().split(_CHUNK))


def _is_finite(weight: Tensor) -> bool:
    if not weight.is_floating_point() or weight.device.type == "meta":
        return True
    return all(
        bool(torch.isfinite(chunk.float().sum())) or bool(torch.isfinite(chunk).all()) for chunk in _chunks(weight)
    )
