"""Whether encoding in bfloat16 or in 8 bits is near enough for this model.

Knows: a runtime, a few short texts. Does not know: what the vectors are for.
"""

from dataclasses import replace

import numpy as np
import torch

from gerund.errors import ModelError
from gerund.inference.encode.runtime import EncoderRuntime, encode
from gerund.inference.tokens import InputFormat, tokenize
from gerund.models.int8_matmul import make_ready
from gerund.settings.plan import Direction

# Of several kinds and lengths, since rounding shows most where tokens are rare and texts are short.
SAMPLE_TEXTS = (
    "A cat sleeps.",
    "The central bank raised interest rates for the third time this year, to 4.25 per cent.",
    "def area(radius): return 3.14159 * radius ** 2",
    "In the beginning the ship moved slowly; later, when the wind had turned, it reached the island by noon.",
)
ENOUGH = 0.999
ENOUGH_IN_INT8 = 0.98
"""Whoever asks for 8 bits wants speed, and bears more. Below it, something else is wrong."""


def bfloat16_cosine(runtime: EncoderRuntime) -> float:
    """Return the smallest cosine between vectors computed in bfloat16 and in the weights' own type."""
    return _cosine(runtime, replace(runtime.in_own_type(), autocast=torch.bfloat16))


def int8_cosine(runtime: EncoderRuntime) -> float:
    """Return the smallest cosine between vectors computed in 8 bits and in the weights' own type."""
    return _cosine(runtime, _in_int8(runtime))


def _cosine(runtime: EncoderRuntime, other: EncoderRuntime) -> float:
    own = runtime.config
    input_format = InputFormat(append_eos=own.append_eos, repeat_text=runtime.plan.repeats_text, empty="zeros")
    found = [item for item in tokenize(runtime.tokenizer, SAMPLE_TEXTS, input_format) if item is not None]
    # Cut here: for a context as short as that, a warning would be about texts that nobody gave.
    tokens = [replace(item, ids=item.ids[: runtime.max_length]) for item in found]
    if not tokens:  # a vocabulary of another script
        return 0.0
    return smallest_cosine(*(encode(one, tokens, show=False) for one in (runtime.in_own_type(), other)))


def smallest_cosine(one_ND: np.ndarray, other_ND: np.ndarray) -> float:
    """Return the smallest cosine of two vectors of the same text."""
    norm_N = np.linalg.norm(one_ND, axis=1) * np.linalg.norm(other_ND, axis=1)
    return float(((one_ND * other_ND).sum(axis=1) / np.maximum(norm_N, 1e-12)).min())


def choose_autocast(runtime: EncoderRuntime) -> torch.dtype | None:
    """Return bfloat16 when the weights are float32 and the vectors hardly change, else None."""
    if runtime.model.dtype != torch.float32 or _fills_spans(runtime):
        return None
    return torch.bfloat16 if bfloat16_cosine(runtime) >= ENOUGH else None


def in_int8(runtime: EncoderRuntime, name: str) -> EncoderRuntime:
    """Return what computes in 8 bits.

    Args:
        runtime: a model on a processor that ``cpu_has_int8``.
        name: the model's.

    Raises:
        ModelError: its vectors would be too far from what they are.
    """
    if not _fills_spans(runtime) and not (value := int8_cosine(runtime)) >= ENOUGH_IN_INT8:
        raise ModelError(
            f"{name} does not bear 8 bits: on a few texts the cosine to its own vectors falls to {value:.3f} (at least "
            f"{ENOUGH_IN_INT8} is wanted); take another dtype"
        )
    return _in_int8(runtime)


def _in_int8(runtime: EncoderRuntime) -> EncoderRuntime:
    make_ready(runtime.model)
    return replace(runtime, int8=True)


def _fills_spans(runtime: EncoderRuntime) -> bool:
    return any(view.direction is Direction.HYBRID for view in runtime.plan.views)
