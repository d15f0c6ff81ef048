"""Token sampling: logits filters, penalties, and random numbers of each sequence's own. Imports no torch.

Scores are arrays of numpy or tensors of torch, and what is returned is alike. Each sequence has one number per token;
the token is the first up to which the probabilities sum to more than it. Fresh seeds come from the operating system,
so no global random state is read or changed.

Shapes: B rows, V vocabulary, R rows whose nucleus is not found yet, K likeliest tokens.
"""

from collections.abc import Callable, Sequence
from functools import partial
from secrets import randbits
from typing import Self

import numpy as np

from gerund.arrays import Array, as_like, copy_of, largest, library_of, log_softmax, masked, picked, softmax
from gerund.errors import ConfigError
from gerund.settings.sampling import Sampling

# A lower temperature would choose the same tokens, and overflow.
_LOWEST_TEMPERATURE = 1e-6
# The nucleus is searched among so many tokens first, and then among all.
_LIKELIEST = (256, 2048)

Filter = Callable[[Array], Array]
"""Takes scores ``(B, V)``, and returns them with minus infinity at the tokens that are left out."""


class Draws:
    """Random numbers of a sequence: those in float64 that ``torch.rand`` gives of a generator of the same seed."""

    def __init__(self, seed: int = 0) -> None:
        self._state = np.random.RandomState(seed % 2**32)

    def next(self) -> float:
        """Return the next number, at least 0 and below 1."""
        high, low = np.frombuffer(self._state.bytes(8), "<u4").tolist()
        return float(((high << 32 | low) & (2**53 - 1)) * 2.0**-53)

    def copy(self) -> Self:
        """Return the same numbers, from the next one on."""
        other = type(self)()
        other._state.set_state(self._state.get_state())
        return other


def filters_of(sampling: Sampling) -> list[Filter]:
    """Return the logits filters for the settings, in their order; none for greedy."""
    if sampling.is_greedy:
        return []
    temperature = max(float(sampling.temperature), _LOWEST_TEMPERATURE)
    filters: list[Filter] = [lambda scores_BV: scores_BV / temperature]
    if sampling.top_k is not None:
        filters.append(partial(top_k, count=sampling.top_k))
    if sampling.top_p is not None and sampling.top_p < 1:
        filters.append(partial(nucleus, top_p=sampling.top_p))
    if sampling.min_p:
        filters.append(partial(above_least, min_p=float(sampling.min_p)))
    if sampling.typical_p is not None and sampling.typical_p < 1:
        filters.append(partial(typical, typical_p=sampling.typical_p))
    return filters


def top_k(scores_BV: Array, count: int) -> Array:
    """Keep the ``count`` likeliest tokens, and those as likely as the last of them."""
    best_BK, _ = largest(scores_BV, count)
    return masked(scores_BV, scores_BV < best_BK[:, -1:])


def nucleus(scores_BV: Array, top_p: float) -> Array:
    """Nucleus sampling (Holtzman et al. 2020), without sorting the full vocabulary.

    A token stays if all more likely tokens together have less than ``top_p``. The nucleus is nearly always among a few
    hundred tokens, and finding those is faster than sorting everything.
    """
    library = library_of(scores_BV)
    probabilities_BV = softmax(scores_BV)
    hidden_BV = library.ones_like(scores_BV, dtype=library.bool)
    everything = scores_BV.shape[-1]
    rows = as_like(np.arange(len(scores_BV)), scores_BV)  # whose nucleus is not found yet
    for count in (*(count for count in _LIKELIEST if count < everything), everything):
        best_RK, place_RK = largest(probabilities_BV[rows], count)
        before_RK = best_RK.cumsum(-1) - best_RK
        kept_RK = before_RK < top_p
        kept_RK[:, 0] = True
        hidden_BV[rows[:, None], place_RK] = ~kept_RK
        rows = rows[before_RK[:, -1] < top_p]
        if not len(rows):
            break
    return masked(scores_BV, hidden_BV)


def above_least(scores_BV: Array, min_p: float) -> Array:
    """Keep the tokens that have at least ``min_p`` of the likeliest one's probability (Nguyen et al. 2024)."""
    probabilities_BV = softmax(scores_BV)
    best_B1 = library_of(scores_BV).amax(probabilities_BV, -1)[:, None]
    return masked(scores_BV, probabilities_BV < min_p * best_B1)


def typical(scores_BV: Array, typical_p: float) -> Array:
    """Keep the tokens whose information is nearest to the entropy (Meister et al. 2023), up to ``typical_p`` in sum."""
    library = library_of(scores_BV)
    logprobs_BV, probabilities_BV = log_softmax(scores_BV), softmax(scores_BV)
    informed_BV = library.where(probabilities_BV > 0, logprobs_BV, 0.0) * probabilities_BV
    distance_BV = abs(informed_BV.sum(-1)[:, None] - logprobs_BV)
    order_BV = library.argsort(distance_BV, -1)
    summed_BV = picked(probabilities_BV, order_BV).cumsum(-1)
    last_B1 = (summed_BV < typical_p).sum(-1).clip(0, scores_BV.shape[-1] - 1)[:, None]
    return masked(scores_BV, distance_BV > picked(picked(distance_BV, order_BV), last_B1))


def chosen_tokens(scores_BV: Array, draws: Sequence[Draws] | None) -> Array:
    """Sample a token per row ``(B,)`` from the softmax of filtered scores; without draws take the most likely."""
    if draws is None:
        return scores_BV.argmax(-1)
    library = library_of(scores_BV)
    is_mps = library is not np and scores_BV.device.type == "mps"
    # Sums in float32 would lose unlikely tokens; MPS has no float64.
    exact = np.float32 if is_mps else np.float64
    summed_BV = library.cumsum(softmax(scores_BV), -1, dtype=getattr(library, exact.__name__))
    number_B1 = as_like(np.array([[each.next()] for each in draws], exact), summed_BV)
    total_B1 = summed_BV[:, -1:]
    # A number that is rounded up to the total would select no token.
    place_B1 = library.minimum(number_B1 * total_B1, library.nextafter(total_B1, library.zeros_like(total_B1)))
    return (summed_BV <= place_B1).sum(-1)


def penalised(sampling: Sampling, logits_V: Array, counts_V: Array, seen_V: Array | None = None) -> Array:
    """Apply bias and penalties to logits; ``counts_V`` counts generated tokens, ``seen_V`` includes the prompt."""
    scores_V = copy_of(logits_V)
    for token, bias in sampling.logit_bias.items():
        scores_V[token] += bias
    penalty = sampling.repetition_penalty
    if seen_V is not None and penalty != 1:
        where = library_of(scores_V).where
        scores_V = where(seen_V, where(scores_V < 0, scores_V * penalty, scores_V / penalty), scores_V)
    return scores_V - (sampling.frequency_penalty * counts_V + sampling.presence_penalty * counts_V.clip(0, 1))


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
    """Return the seed of a sample of a prompt. 32 bits of a seed are used, so longer ones are hashed."""
    if not 0 <= seed < 2**32:
        seed = int(np.random.SeedSequence(seed % 2**64).generate_state(1)[0])
    return (seed * 1_000_003 + sample) % 2**63


def draws_for(*key: int) -> Draws:
    """Return the random numbers for ``key``, which contains the seed; hashed, as 32 bits of a seed are used."""
    mixed = np.random.SeedSequence([number % 2**64 for number in key]).generate_state(1)[0]
    return Draws(int(mixed))
