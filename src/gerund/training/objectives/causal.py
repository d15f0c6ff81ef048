"""The plain language-modelling objective: every token is predicted from the ones before it."""

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def causal_loss(model: "PreTrainedModel", input_ids_BT: torch.Tensor) -> torch.Tensor:
    """Return the summed cross-entropy of tokens 1..T-1 of every row, a scalar in fp32.

    A sum, because a mean per micro-batch would weigh micro-batches of unequal size wrongly; the trainer
    divides by the count over the whole optimizer step (see :func:`causal_count`).
    """
    hidden_BTD = model.base_model(input_ids=input_ids_BT, use_cache=False).last_hidden_state
    logits_BTV = model.get_output_embeddings()(hidden_BTD)
    # Cut after the head: the product keeps its round shape, and the compiler fuses the cut into the loss.
    predictions_NV = logits_BTV[:, :-1].flatten(0, 1).float()
    return functional.cross_entropy(predictions_NV, input_ids_BT[:, 1:].flatten(), reduction="sum")


def causal_count(input_ids_BT: torch.Tensor) -> int:
    """Return how many tokens :func:`causal_loss` sums over."""
    return input_ids_BT.shape[0] * (input_ids_BT.shape[1] - 1)
