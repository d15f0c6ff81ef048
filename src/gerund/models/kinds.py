"""Tell whether a model is an encoder-decoder, by its config; imports neither torch nor transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SEQ2SEQ = ("t5", "mt5", "umt5")
"""Encoder-decoders, by their ``model_type``."""


def is_encoder_decoder(model: PreTrainedModel) -> bool:
    """Whether the model is an encoder-decoder, or the encoder of one."""
    return model.config.model_type in SEQ2SEQ
