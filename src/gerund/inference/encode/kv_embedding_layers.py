"""Choose the layers that KV-Embedding reroutes: those with the lowest intrinsic dimension.

Tang and Yang, 2026 (arXiv 2601.01046), section 3.2.3: a layer in which the states of tokens lie on a surface of few
dimensions has compressed what was read. The dimension is estimated from each state's two nearest neighbours (TwoNN:
Facco et al., 2017, "Estimating the intrinsic dimension of datasets by a minimal neighborhood information").
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from gerund.attention.bound_plan import BoundPlan
from gerund.attention.layouts import hidden_of
from gerund.errors import DataError
from gerund.inference.encode.batches import in_batches
from gerund.inference.encode.runtime import EncoderRuntime
from gerund.inference.tokens import Tokens

# Number of states in the estimate; more change the third digit.
_MOST_STATES = 2000
_FEWEST_STATES = 50
_ROUNDING = 1e-5
_WINDOW, _EARLY = 0.1, 0.2


def intrinsic_dimension(states_ND: Tensor) -> float:
    """Return the maximum-likelihood intrinsic dimension of points, from their two nearest neighbors.

    Points that equal another one up to rounding are skipped: a token that sees nothing but itself has one state.

    >>> points = torch.rand(2000, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    >>> round(intrinsic_dimension(torch.cat([points, points @ torch.ones(3, 20, dtype=torch.float64)], dim=1)))
    3
    """
    own_ND = states_ND.double()
    # The fast way by matrix products is inaccurate for points that are close together.
    apart_NN = torch.cdist(own_ND, own_ND, compute_mode="donot_use_mm_for_euclid_dist").fill_diagonal_(torch.inf)
    near_N2 = apart_NN.topk(2, largest=False)[0]
    near_N2 = near_N2[near_N2[:, 0] > _ROUNDING * own_ND.norm(dim=1).mean()]
    total = (near_N2[:, 1] / near_N2[:, 0]).log().sum().item()
    return len(near_N2) / total if total > 0 else float("nan")


def layer_dimensions(runtime: EncoderRuntime, texts: Sequence[Tokens], *, show: bool | None = None) -> list[float]:
    """Return the intrinsic dimension of tokens' states after each layer, from at most 2000 tokens of a sample."""
    total = sum(len(text) for text in texts)
    if total < _FEWEST_STATES:
        raise DataError(f"{total} tokens are too few to estimate a dimension. Pass more texts.")
    step = max(1, total // _MOST_STATES)
    states_of: list[list[Tensor]] = [[] for _ in range(runtime.n_layers)]

    def states(batch: Sequence[Tokens]) -> tuple[Tensor, Tensor]:
        inputs = runtime.batch(batch)
        plan = BoundPlan(runtime.plan, inputs.real_BT)

        def note(index: int, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            del args, kwargs
            real_BT = inputs.real_BT
            hidden_BTD = hidden_of(output)
            own_ND = hidden_BTD.flatten(0, 1) if real_BT is None else hidden_BTD[real_BT.bool()]
            states_of[index].append(own_ND[::step].float().cpu())
            return output

        plan.beside = note
        return runtime.run(inputs, plan), inputs.begin

    in_batches(runtime, list(texts), states, lambda *_: None, show=show)
    return [intrinsic_dimension(torch.cat(parts)[:_MOST_STATES]) for parts in states_of]


def chosen_layers(dimensions: Sequence[float]) -> list[int]:
    """Return the layers to reroute, counted from 1: a tenth of them and one more.

    Where the dimension falls and then rises, except for at most one step in five, these are the lowest layer and those
    after it; else the lowest ones after the first fifth.

    >>> chosen_layers([9, 7, 5, 4, 6, 7, 8, 9]), chosen_layers([2, 9, 5, 9, 4, 9, 6, 9])
    ([4, 5], [3, 5])
    """
    n = len(dimensions)
    span = max(1, int(_WINDOW * n))
    lowest = min(range(n), key=lambda layer: dimensions[layer])
    pairs = list(pairwise(dimensions))
    against = sum(after > before for before, after in pairs[:lowest])
    against += sum(after < before for before, after in pairs[lowest:])
    if n >= 5 and 0 < lowest < n - 1 and against <= 0.2 * len(pairs):
        return [layer + 1 for layer in range(lowest, min(n, lowest + span + 1))]
    late = sorted(range(int(_EARLY * n), n), key=lambda layer: dimensions[layer])
    return sorted(layer + 1 for layer in late[: span + 1])
