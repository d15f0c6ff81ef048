"""Whether encoding in bfloat16 is near enough to float32 for this model.

Knows: a runtime, a few short texts. Does not know: what the vectors are for.
"""

from dataclasses import replace

import numpy as np
import torch

from gerund.attention.plan import Direction
from gerund.inference.encode.runtime import EncoderRuntime, encode
from gerund.inference.tokens import InputFormat, tokenize

# Of several kinds and lengths, since rounding shows most where tokens are rare and texts are short.
SAMPLE_TEXTS = (
    "A cat sleeps.",
    "The central bank raised interest rates for the third time this year, to 4.25 per cent.",
    "def area(radius): return 3.14159 * radius ** 2",
    "In the beginning the ship moved slowly; later, when the wind had turned, it reached the island by noon.",
)
ENOUGH = 0.999


def bfloat16_cosine(runtime: EncoderRuntime) -> float:
    """Return the smallest cosine between vectors computed in bfloat16 and in the weights' own type."""
    input_format = InputFormat(append_eos=runtime.config.append_eos, repeat_text=runtime.plan.repeats_text)
    found = [item for item in tokenize(runtime.tokenizer, SAMPLE_TEXTS, input_format) if item is not None]
    # Cut here: for a context as short as that, a warning would be about texts that nobody gave.
    tokens = [replace(item, ids=item.ids[: runtime.max_length]) for item in found]
    own = encode(replace(runtime, autocast=None), tokens, show=False)
    half = encode(replace(runtime, autocast=torch.bfloat16), tokens, show=False)
    return smallest_cosine(own, half)


def smallest_cosine(one_ND: np.ndarray, other_ND: np.ndarray) -> float:
    """Return the smallest cosine of two vectors of the same text."""
    norm_N = np.linalg.norm(one_ND, axis=1) * np.linalg.norm(other_ND, axis=1)
    return float(((one_ND * other_ND).sum(axis=1) / np.maximum(norm_N, 1e-12)).min())


def choose_autocast(runtime: EncoderRuntime) -> torch.dtype | None:
    """Return bfloat16 when the weights are float32 and the vectors hardly change, else None."""
    fills_spans = any(view.direction is Direction.HYBRID for view in runtime.plan.views)
    if runtime.model.dtype != torch.float32 or fills_spans:
        return None
    return torch.bfloat16 if bfloat16_cosine(runtime) >= ENOUGH else None
