"""Drawing tokens so that draws are repeatable and do not depend on what else is drawn at the same time.

Every row has a generator of its own, and the draw is made by adding Gumbel noise to the filtered scores and
taking the largest (the Gumbel-max trick), which is a sample from their softmax.

Knows: ``Sampling``, scores. Does not know: models, what the rows are.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TypicalLogitsWarper,
)

from gerund.config import Sampling

# Tokens among which a nucleus is looked for first, and then, before it is looked for among all.
_LIKELIEST = (256, 2048)


def filters_of(sampling: Sampling) -> list[LogitsProcessor]:
    """Return the filters that the settings ask for, in their order; none for greedy."""
    if sampling.is_greedy:
        return []
    filters: list[LogitsProcessor] = [TemperatureLogitsWarper(float(sampling.temperature))]
    if sampling.top_k is not None:
        filters.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p is not None and sampling.top_p < 1:
        filters.append(NucleusFilter(sampling.top_p))
    if sampling.typical_p is not None and sampling.typical_p < 1:
        filters.append(TypicalLogitsWarper(sampling.typical_p))
    return filters


class NucleusFilter(LogitsProcessor):
    """Nucleus sampling (Holtzman et al. 2020), without sorting the whole vocabulary.

    A token stays where all likelier ones together have less than ``top_p``. The nucleus is nearly always among a few
    hundred tokens, which are found faster than everything is sorted.

    Args:
        top_p: above 0 and below 1.
    """

    def __init__(self, top_p: float) -> None:
        self.top_p = top_p

    def __call__(self, input_ids: Tensor | None, scores: Tensor) -> Tensor:
        """Return the scores ``(B, V)`` with minus infinity outside the nucleus."""
        del input_ids
        probabilities_BV = scores.softmax(dim=-1)
        everything = scores.shape[-1]
        for count in (*(count for count in _LIKELIEST if count < everything), everything):
            best = probabilities_BV.topk(count, dim=-1)
            before_BK = best.values.cumsum(dim=-1) - best.values
            if count == everything or bool((before_BK[:, -1] >= self.top_p).all()):
                break
        kept_BK = before_BK < self.top_p
        kept_BK[:, 0] = True
        kept_BV = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best.indices, kept_BK)
        return scores.masked_fill(~kept_BV, float("-inf"))


def with_noise(scores_BV: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
    """Add each row's Gumbel noise; the largest score of a row is then a draw from its softmax."""
    noise = [torch.empty(scores_BV.shape[-1]).exponential_(generator=generator) for generator in generators]
    return scores_BV - torch.stack(noise).to(scores_BV.device).log()


def generator_for(*key: int) -> torch.Generator:
    """Return the generator of one row, told apart from all others by ``key``, which holds the seed.

    Torch reads only 32 bits of a seed, so that numbers are mixed here.
    """
    mixed = np.random.SeedSequence([number % 2**64 for number in key]).generate_state(1)[0]
    return torch.Generator().manual_seed(int(mixed))
