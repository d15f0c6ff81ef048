"""Encoder-decoder models: an encoder that reads and a decoder that writes.

Knows: which kinds there are, which part encodes. Does not know: how either is used.
"""

import torch
from transformers import PreTrainedModel

from gerund.errors import UnsupportedModelError

SEQ2SEQ = ("t5", "mt5", "umt5")
"""What they are called in a config, as ``model_type``."""


def is_encoder_decoder(model: PreTrainedModel) -> bool:
    """Whether an encoder of its own reads the text, and the decoder, if there, writes one of its own."""
    return model.config.model_type in SEQ2SEQ


def encoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return the encoder of such a model; the model itself where it is nothing else."""
    encoder: PreTrainedModel = getattr(model, "encoder", model)
    return encoder


@torch.no_grad()
def copy_weights(encoder: PreTrainedModel) -> None:
    """Give an encoder's weights memory of their own.

    On a processor weights are pieces of one mapping of their file, which stays whole as long as any piece is used, and
    a tensor does not tell.
    """
    for weight in encoder.parameters():
        if weight.device.type == "cpu":
            weight.data = weight.detach().clone()


def demand_decoder_only(model: PreTrainedModel, what: str) -> None:
    """Refuse an encoder-decoder model.

    Args:
        model: any model.
        what: what it is wanted for, to be read behind "cannot".

    Raises:
        UnsupportedModelError: it has an encoder of its own.
    """
    if is_encoder_decoder(model):
        raise UnsupportedModelError(
            f"a {model.config.model_type} model is an encoder-decoder and cannot {what}; take a decoder-only model"
        )
