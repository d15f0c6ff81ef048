"""Whether a model is an encoder-decoder, has a language modeling head, or is packed; imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from gerund.packed.network import PackedNetwork

SEQ2SEQ = ("t5", "mt5", "umt5")
"""Encoder-decoders, by their ``model_type``."""


def is_encoder_decoder(model: PreTrainedModel) -> bool:
    """Whether the model is an encoder-decoder, or the encoder of one."""
    return model.config.model_type in SEQ2SEQ


def has_head(model: Any) -> bool:
    """Whether a model predicts tokens: published embedding models are often saved without a head."""
    head = model.get_output_embeddings()
    return head is not None and not getattr(head, "is_missing", False)


def packed_network(model: Any) -> PackedNetwork | None:
    """Return the packed network that computes a model; None where torch does."""
    network: PackedNetwork | None = getattr(getattr(model, "base_model", model), "network", None)
    return network
