"""What every objective consists of: batches that depend on nothing but the step, and losses on them.

Two kinds of losses. :class:`TokenLosses` add up over tokens, so a step may be taken in parts of any size and
divided by its counts afterwards. :class:`PairLosses` compare every text of a batch with every other, so the
vectors of all parts have to be there first (``training/step.py`` caches their gradients). :class:`JointLosses` have
both on one pass.

Knows: batches as dictionaries of tensors. Does not know: recipes, optimizers, processes.

Shapes: B texts, T tokens, D numbers of a hidden state, N positions that a loss is computed at.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from gerund.inference.tokens import Tokens
    from gerund.training.recipe_objectives import ObjectiveConfig

# Everything of a batch, by name; every tensor has one row a text.
Batch = dict[str, Tensor]


class Batches(ABC):
    """Makes the texts of one optimizer step into tensors.

    Attributes:
        texts: What deals them by number; None for those that are not dealt one by one.
    """

    texts: Any = None

    @abstractmethod
    def make(self, step: int, first: int, count: int) -> dict[str, Any]:
        """Return texts ``first`` to ``first + count`` of step ``step``: a pure function of these numbers.

        For :class:`TokenLosses` a :data:`Batch`; for :class:`PairLosses` one such batch a group of texts.
        """

    @property
    def skipped(self) -> int:
        """How many texts were too short to be used."""
        return getattr(self.texts, "skipped", 0)

    @property
    def available(self) -> int | None:
        """How many different texts there are; None where they are not counted."""
        return None if self.texts is None else len(self.texts)


class TokenLosses(nn.Module, ABC):
    """Losses that are sums over tokens."""

    @abstractmethod
    def counts(self, batch: Batch) -> dict[str, int]:
        """Return for each loss over how many tokens of ``batch`` it sums."""

    @abstractmethod
    def forward(self, model: "PreTrainedModel", batch: Batch) -> dict[str, Tensor]:
        """Return each loss summed over its tokens, a scalar in float32."""


class PairLosses(nn.Module, ABC):
    """A loss that compares the texts of a batch with each other."""

    @abstractmethod
    def forward(self, model: "PreTrainedModel", part: Batch) -> Tensor:
        """Return the vectors ``(B, D)`` of the texts in ``part``."""

    @abstractmethod
    def compare(self, vectors_ND: Tensor, batch: Mapping[str, Batch], *, gather: bool) -> tuple[Tensor, int]:
        """Return the mean loss over this process's queries, and how many find their positive first.

        Args:
            vectors_ND: the vectors of all groups of the batch, one group after the other.
            batch: the batch, its groups in that order.
            gather: whether the texts of other processes are negatives too.
        """

    def during(self, model: "PreTrainedModel") -> AbstractContextManager[None]:
        """Return what holds while these texts are read, forward and backward."""
        del model
        return nullcontext()


class JointLosses(PairLosses):
    """A loss that compares texts, and losses that are sums over tokens, on one pass over the same texts."""

    @abstractmethod
    def counts(self, batch: Mapping[str, Batch]) -> dict[str, int]:
        """Return for each loss over tokens how many of ``batch`` it sums; none where there is no such loss."""

    @abstractmethod
    def joint(self, model: "PreTrainedModel", part: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the vectors ``(B, D)`` of the texts in ``part``, and each loss summed over its tokens."""


@dataclass
class Objective:
    """An objective, ready to be trained."""

    name: str
    """What its batches are called."""
    batches: Batches
    """Its training texts."""
    losses: TokenLosses | PairLosses
    """What is computed on them."""
    configs: dict[str, "ObjectiveConfig"]
    """For each of its losses the settings that hold its weight."""
    factors: dict[str, float] = field(default_factory=dict)
    """For each loss a constant factor on its weight; 1 where there is none."""
    validation: dict[str, tuple[Batches, int]] = field(default_factory=dict)
    """By name, validation texts and how many batches of them."""

    @property
    def config(self) -> "ObjectiveConfig":
        """Its batch sizes."""
        return next(iter(self.configs.values()))

    def weights(self, step: int) -> dict[str, float]:
        """Return the weight of each loss in ``step``."""
        return {name: config.weight_at(step) * self.factors.get(name, 1.0) for name, config in self.configs.items()}

    def is_active(self, step: int) -> bool:
        """Whether any of its losses has a weight above 0."""
        return any(self.weights(step).values())


def split_rows(batch: Batch, rows: int | None) -> list[Batch]:
    """Cut a batch into parts of at most ``rows`` texts; None leaves it whole.

    >>> [part["ids"].tolist() for part in split_rows({"ids": torch.arange(5)}, 2)]
    [[0, 1], [2, 3], [4]]
    """
    count = len(next(iter(batch.values())))
    starts = range(0, count, rows or count)
    return [{name: tensor[start : start + (rows or count)] for name, tensor in batch.items()} for start in starts]


def tokens_in(batch: Mapping[str, Any]) -> int:
    """Return how many tokens a batch has, padding left out."""
    if "real" in batch:
        return int(batch["real"].sum())
    if "input_ids" in batch:
        return int(batch["input_ids"].numel())
    return sum(tokens_in(group) for group in batch.values() if isinstance(group, Mapping))


def padded(rows: Sequence[Sequence[int] | np.ndarray], fill: int = 0) -> Tensor:
    """Put rows of unequal length into one tensor, padded on the right.

    >>> padded([[1, 2], [3]], fill=9).tolist()
    [[1, 2], [3, 9]]
    """
    out = torch.full((len(rows), max(map(len, rows), default=0)), fill, dtype=torch.long)
    for place, row in enumerate(rows):
        out[place, : len(row)] = torch.as_tensor(np.asarray(row, dtype=np.int64))
    return out


def text_batch(texts: Sequence["Tokens"], pad: int) -> Batch:
    """Return ``input_ids`` and ``real`` (True for tokens) of framed texts, padded on the right."""
    lengths_B = torch.tensor([len(text) for text in texts])
    ids_BT = padded([text.ids for text in texts], pad)
    return {"input_ids": ids_BT, "real": torch.arange(ids_BT.shape[1]) < lengths_B[:, None]}


def row_generator(seed: int, number: int) -> np.random.Generator:
    """Return the random numbers of text ``number``: always the same ones."""
    return np.random.default_rng([seed, number])


def groups(batch: Mapping[str, Batch], rows: int | None) -> Iterator[Batch]:
    """Yield the parts of every group, one group after the other."""
    for group in batch.values():
        yield from split_rows(group, rows)
