"""Batches as dictionaries of tensors: made from rows of unequal length, cut into parts, counted.

Knows: tensors with one row a text. Does not know: objectives. Imports torch on use, as all of this folder does.

Shapes: B texts, T tokens.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gerund.training.objectives.base import Batch

if TYPE_CHECKING:
    from torch import Tensor

    from gerund.inference.tokens import Tokens


def split_rows(batch: Batch, rows: int | None) -> list[Batch]:
    """Cut a batch into parts of at most ``rows`` texts; None leaves it whole.

    >>> import torch
    >>> [part["ids"].tolist() for part in split_rows({"ids": torch.arange(5)}, 2)]
    [[0, 1], [2, 3], [4]]
    """
    count = len(next(iter(batch.values())))
    starts = range(0, count, rows or count)
    return [{name: tensor[start : start + (rows or count)] for name, tensor in batch.items()} for start in starts]


def groups(batch: Mapping[str, Batch], rows: int | None) -> Iterator[Batch]:
    """Yield the parts of every group, one group after the other."""
    for group in batch.values():
        yield from split_rows(group, rows)


def tokens_in(batch: Mapping[str, Any]) -> int:
    """Return how many tokens a batch has, padding left out."""
    if "real" in batch:
        return int(batch["real"].sum())
    if "input_ids" in batch:
        return int(batch["input_ids"].numel())
    return sum(tokens_in(group) for group in batch.values() if isinstance(group, Mapping))


def padded(rows: Sequence[Sequence[int] | np.ndarray], fill: int = 0) -> "Tensor":
    """Put rows of unequal length into one tensor, padded on the right.

    >>> padded([[1, 2], [3]], fill=9).tolist()
    [[1, 2], [3, 9]]
    """
    import torch

    out = torch.full((len(rows), max(map(len, rows), default=0)), fill, dtype=torch.long)
    for place, row in enumerate(rows):
        out[place, : len(row)] = torch.as_tensor(np.asarray(row, dtype=np.int64))
    return out


def text_batch(texts: "Sequence[Tokens]", pad: int) -> Batch:
    """Return ``input_ids`` and ``real`` (True for tokens) of formatted texts, padded on the right."""
    import torch

    lengths_B = torch.tensor([len(text) for text in texts])
    ids_BT = padded([text.ids for text in texts], pad)
    return {"input_ids": ids_BT, "real": torch.arange(ids_BT.shape[1]) < lengths_B[:, None]}


def row_generator(seed: int, number: int) -> np.random.Generator:
    """Return the random numbers of text ``number``: always the same ones."""
    return np.random.default_rng([seed, number])
