"""Export a plain model with the adapter merged into its weights, and verify the result.

It is loaded again, and its vectors and logits are compared with those of the model with its adapter.

Shapes: N texts or tokens, D dimensions, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from gerund.errors import ModelError
from gerund.exporting.shared import TEXTS, Export, read_written, write_merged
from gerund.inference.encode.batches import encode
from gerund.inference.encode.runtime import EncoderRuntime, smallest_cosine
from gerund.inference.tokens import InputFormat, Tokens, tokenize
from gerund.models.adapters import active_adapter
from gerund.models.architectures import NoHead

# Largest cosine distance of a text or a token. In half precision the merged weights are rounded, too: a single token
# of a small model is 2e-3 away; without the adapter it is 0.5 away.
_NEAR = {torch.float32: 1e-4, torch.float64: 1e-4}
_NEAR_HALF = 2e-2


def write(runtime: EncoderRuntime, work: Path, folder: Path) -> Export:
    """Fill ``work`` with the merged model, and verify it."""
    identity = write_merged(runtime, work)
    model, tokenizer = read_written(work, None)
    original = runtime.in_own_type()
    merged = replace(original, model=model, tokenizer=tokenizer, adapter=None)
    kinds = {"vectors": lambda runtime: encode(runtime, _tokens(runtime), show=False), "logits": _logits}
    if isinstance(model.get_output_embeddings(), NoHead):
        del kinds["logits"]
    for kind, compute in kinds.items():
        expected_ND, actual_ND = compute(original), compute(merged)
        distance = 1 - smallest_cosine(expected_ND, actual_ND) if expected_ND.shape == actual_ND.shape else 1.0
        if not distance <= _NEAR.get(runtime.model.dtype, _NEAR_HALF):
            raise ModelError(
                f"the merged model, loaded again, gives other {kind} than the model with its adapter (cosine distance "
                f"{distance:.1g}); load it in float32, or use the adapter as it is"
            )
    return Export(folder, f"gerund.load({str(folder)!r})", fingerprint=identity)


@torch.no_grad()
def _logits(runtime: EncoderRuntime) -> np.ndarray:
    """Return the logits ``(N, V)`` of all tokens under causal attention, each token's centered at 0."""
    rows = []
    with active_adapter(runtime.adapter):
        for item in _tokens(runtime):
            ids = torch.tensor([item.ids], device=runtime.device)
            logits_NV = runtime.model(ids, use_cache=False).logits[0].float()
            rows.append((logits_NV - logits_NV.mean(-1, keepdim=True)).cpu().numpy())
    return np.concatenate(rows)


def _tokens(runtime: EncoderRuntime) -> Sequence[Tokens]:
    input_format = InputFormat(append_eos=runtime.config.append_eos, repeat_text=runtime.plan.repeats_text)
    tokens = [item for item in tokenize(runtime.tokenizer, TEXTS, input_format) if item is not None]
    # Truncated here, since for a short context a warning would be about texts that are not the user's.
    return [replace(item, ids=item.ids[: runtime.max_length]) for item in tokens]
