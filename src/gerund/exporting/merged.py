"""Export a plain model with the adapter merged into its weights, and verify the result.

It is loaded again, and its vectors and logits are compared with those of the model with its adapter.

Shapes: N texts or tokens, D dimensions, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from gerund.attention.interface import attach
from gerund.attention.layouts import attach_streams, decoder_layers
from gerund.errors import ModelError
from gerund.exporting.shared import TEXTS, write_merged
from gerund.inference.encode.runtime import EncoderRuntime, encode, smallest_cosine
from gerund.inference.tokens import InputFormat, Tokens, tokenize
from gerund.models import architectures, loading
from gerund.models.adapters import active_adapter
from gerund.models.sources import find

# Largest cosine distance of a text or a token. In half precision the merged weights are rounded, too: a single token
# of a small model is 2e-3 away; without the adapter it is 0.5 away.
_NEAR = {torch.float32: 1e-4, torch.float64: 1e-4}
_NEAR_HALF = 2e-2


def write(runtime: EncoderRuntime, folder: Path) -> str:
    """Fill ``folder`` with the merged model, load it again, and compare its vectors and logits."""
    identity = write_merged(runtime, folder)
    # On the CPU: beside the model itself there may be no room for another.
    model, tokenizer = loading.read(find(folder), None)
    attach(model)
    attach_streams(decoder_layers(model))
    own = runtime.in_own_type()
    again = replace(own, model=model, tokenizer=tokenizer, adapter=None)
    _demand_near("vectors", _vectors(own), _vectors(again), runtime.model.dtype)
    if not isinstance(model.get_output_embeddings(), architectures.NoHead):
        _demand_near("logits", _logits(own), _logits(again), runtime.model.dtype)
    return identity


def _demand_near(what: str, own_ND: np.ndarray, again_ND: np.ndarray, dtype: torch.dtype) -> None:
    distance = 1 - smallest_cosine(own_ND, again_ND) if own_ND.shape == again_ND.shape else 1.0
    if not distance <= _NEAR.get(dtype, _NEAR_HALF):
        raise ModelError(
            f"the merged model, loaded again, gives other {what} than the model with its adapter (cosine distance "
            f"{distance:.1g}); load it in float32, or use the adapter as it is"
        )


def _vectors(runtime: EncoderRuntime) -> np.ndarray:
    return encode(runtime, _tokens(runtime), show=False)


@torch.no_grad()
def _logits(runtime: EncoderRuntime) -> np.ndarray:
    """Return the logits ``(N, V)`` of all tokens, read causally, without what is the same for all of a vocabulary."""
    found = []
    with active_adapter(runtime.adapter):
        for item in _tokens(runtime):
            logits_NV = (
                runtime.model(torch.tensor([item.ids], device=runtime.device), use_cache=False).logits[0].float()
            )
            found.append((logits_NV - logits_NV.mean(-1, keepdim=True)).cpu().numpy())
    return np.concatenate(found)


def _tokens(runtime: EncoderRuntime) -> Sequence[Tokens]:
    input_format = InputFormat(append_eos=runtime.config.append_eos, repeat_text=runtime.plan.repeats_text)
    found = [item for item in tokenize(runtime.tokenizer, TEXTS, input_format) if item is not None]
    # Cut here: for a context as short as that, a warning would be about texts that nobody gave.
    return [replace(item, ids=item.ids[: runtime.max_length]) for item in found]
