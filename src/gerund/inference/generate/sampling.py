"""Token sampling: logits filters, penalties, and one seeded random generator per sequence.

The generator gives one number per token; the token is the first up to which the probabilities sum to more than it.
Fresh seeds come from the operating system, so no global random state is read or changed.
"""

from collections.abc import Sequence
from secrets import randbits

import numpy as np
import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TypicalLogitsWarper,
)

from gerund.errors import ConfigError
from gerund.settings.sampling import Sampling

# A lower temperature would choose the same tokens, and overflow.
_LOWEST_TEMPERATURE = 1e-6
# The nucleus is searched among so many tokens first, and then among all.
_LIKELIEST = (256, 2048)


def filters_of(sampling: Sampling) -> list[LogitsProcessor]:
    """Return the logits filters for the settings, in their order; none for greedy."""
    if sampling.is_greedy:
        return []
    filters: list[LogitsProcessor] = [TemperatureLogitsWarper(max(float(sampling.temperature), _LOWEST_TEMPERATURE))]
    if sampling.top_k is not None:
        filters.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p is not None and sampling.top_p < 1:
        filters.append(NucleusFilter(sampling.top_p))
    if sampling.min_p:
        filters.append(MinPLogitsWarper(float(sampling.min_p)))
    if sampling.typical_p is not None and sampling.typical_p < 1:
        filters.append(TypicalLogitsWarper(sampling.typical_p))
    return filters


class NucleusFilter(LogitsProcessor):
    """Nucleus sampling (Holtzman et al. 2020), without sorting the full vocabulary.

    A token stays if all more likely tokens together have less than ``top_p``. The nucleus is nearly always among a few
    hundred tokens, and finding those is faster than sorting everything.
    """

    def __init__(self, top_p: float) -> None:
        self.top_p = top_p

    def __call__(self, input_ids: Tensor | None, scores: Tensor) -> Tensor:
        """Return the scores ``(B, V)`` with minus infinity outside the nucleus."""
        del input_ids
        probabilities_BV = scores.softmax(dim=-1)
        kept_BV = torch.zeros_like(scores, dtype=torch.bool)
        everything = scores.shape[-1]
        rows = torch.arange(len(scores), device=scores.device)  # whose nucleus is not found yet
        for count in (*(count for count in _LIKELIEST if count < everything), everything):
            best = probabilities_BV[rows].topk(count, dim=-1)
            before_RK = best.values.cumsum(dim=-1) - best.values
            kept_RK = before_RK < self.top_p
            kept_RK[:, 0] = True
            kept_BV[rows] = torch.zeros_like(kept_BV[rows]).scatter(-1, best.indices, kept_RK)
            rows = rows[before_RK[:, -1] < self.top_p]
            if not len(rows):
                break
        return scores.masked_fill(~kept_BV, float("-inf"))


def chosen_tokens(scores_BV: Tensor, generators: Sequence[torch.Generator] | None) -> Tensor:
    """Sample a token per row ``(B,)`` from the softmax of filtered scores; without generators take the most likely."""
    if generators is None:
        return scores_BV.argmax(dim=-1)
    # Sums in float32 would lose unlikely tokens; MPS has no float64.
    exact = torch.float32 if scores_BV.device.type == "mps" else torch.float64
    summed_BV = scores_BV.softmax(dim=-1).cumsum(dim=-1, dtype=exact)
    number_B1 = torch.stack([torch.rand(1, generator=generator, dtype=torch.float64) for generator in generators])
    total_B1 = summed_BV[:, -1:]
    # A number that is rounded up to the total would select no token.
    place_B1 = (number_B1.to(total_B1) * total_B1).minimum(total_B1.nextafter(torch.zeros_like(total_B1)))
    return torch.searchsorted(summed_BV, place_B1, right=True)[:, 0]


def penalised(sampling: Sampling, logits_V: Tensor, counts_V: Tensor, seen_V: Tensor | None = None) -> Tensor:
    """Apply bias and penalties to logits; ``counts_V`` counts generated tokens, ``seen_V`` includes the prompt."""
    scores_V = logits_V.clone()
    for token, bias in sampling.logit_bias.items():
        scores_V[token] += bias
    penalty = sampling.repetition_penalty
    if seen_V is not None and penalty != 1:
        other_V = torch.where(scores_V < 0, scores_V * penalty, scores_V / penalty)
        scores_V = torch.where(seen_V, other_V, scores_V)
    return scores_V - (sampling.frequency_penalty * counts_V + sampling.presence_penalty * (counts_V > 0))


def counts_of(tokens: Sequence[int], like_V: Tensor) -> Tensor:
    """Count the tokens of a text, by token of the vocabulary, in the dtype of ``like_V``."""
    ids_T = torch.tensor(tokens, dtype=torch.long, device=like_V.device)
    return torch.bincount(ids_T, minlength=len(like_V)).to(like_V.dtype)


def request_seeds(sampling: Sampling, count: int) -> list[int]:
    """Return a seed per prompt: the given seed, its own seed, or a fresh one.

    >>> request_seeds(Sampling(temperature=1.0, seed=7), 2), request_seeds(Sampling(temperature=1.0, seed=[3, 4]), 2)
    ([7, 7], [3, 4])
    """
    seed = sampling.seed
    if seed is None:
        return [randbits(31) for _ in range(count)]
    if isinstance(seed, int):
        return [seed] * count
    if len(seed) != count:
        raise ConfigError(f"`seed` has {len(seed)} seeds for {count} prompts. Pass one seed, or one per prompt.")
    return list(seed)


def sample_seed(seed: int, sample: int) -> int:
    """Return the seed of a sample of a prompt. Torch uses 32 bits of a seed, so longer ones are hashed."""
    if not 0 <= seed < 2**32:
        seed = int(np.random.SeedSequence(seed % 2**64).generate_state(1)[0])
    return (seed * 1_000_003 + sample) % 2**63


def generator_for(*key: int) -> torch.Generator:
    """Return a random generator for ``key``, which contains the seed; hashed, as torch uses 32 bits of a seed."""
    mixed = np.random.SeedSequence([number % 2**64 for number in key]).generate_state(1)[0]
    return torch.Generator().manual_seed(int(mixed))
