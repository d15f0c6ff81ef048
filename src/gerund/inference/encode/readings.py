"""Run a model once over texts and return several readings of that pass: layers, values, poolings, transforms."""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from torch import Tensor

from gerund.errors import ConfigError
from gerund.inference.encode.batches import in_batches
from gerund.inference.encode.runtime import EncoderRuntime, shares_pass, states_each
from gerund.inference.tokens import Tokens

Item = TypeVar("Item")


def encode_readings(
    runtimes: Sequence[EncoderRuntime], texts: Sequence[Tokens | None], *, show: bool | None = None
) -> list[np.ndarray]:
    """Encode texts once and return the vectors of each runtime ``(n, D)`` float32, not normalized.

    Args:
        runtimes: encoders that share a pass (see ``runtime.shares_pass``).
        texts: as the encoders read them; None gives a zero vector.
        show: whether to show progress; None does on a terminal.

    Raises:
        ConfigError: the encoders need several passes.
    """
    if not all(shares_pass(runtimes[0], other) for other in runtimes[1:]):
        raise ConfigError("these encoders read texts in different passes")
    vectors = [np.zeros((len(texts), runtime.width), dtype=np.float32) for runtime in runtimes]
    latest: list[Tensor] = []

    def states(batch: Sequence[Tokens]) -> tuple[Tensor, Tensor]:
        latest[:], begin = states_each(runtimes, batch)
        return latest[0], begin

    def keep(rows: list[int], batch: list[Tokens], hidden_BTD: Tensor, begin: Tensor) -> None:
        del hidden_BTD  # that of the first
        for vectors_ND, runtime, states_BTD in zip(vectors, runtimes, latest, strict=True):
            vectors_ND[rows] = runtime.pooled(batch, states_BTD, begin)

    in_batches(runtimes[0], texts, states, keep, show=show)
    return vectors


def by_pass(items: Sequence[Item], runtimes: Sequence[EncoderRuntime]) -> list[list[Item]]:
    """Return items, each of which has a runtime, in groups that share a pass; a group of one shares with no other."""
    groups: list[tuple[EncoderRuntime, list[Item]]] = []
    for item, runtime in zip(items, runtimes, strict=True):
        group = next((members for first, members in groups if shares_pass(first, runtime)), None)
        if group is None:
            groups.append((runtime, [item]))
        else:
            group.append(item)
    return [members for _, members in groups]
