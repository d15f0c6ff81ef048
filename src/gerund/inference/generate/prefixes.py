"""Beginnings of prompts that were read, kept for prompts that begin alike: what a system prompt costs, it costs once.

They are kept in blocks of tokens, each under a name made of all tokens up to its end; so prompts share the blocks of
what they share. The block that was of no use for longest goes first.

Knows: token ids, keys and values. Does not know: models.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from hashlib import blake2b

import torch

from gerund.attention.ragged_batch import BLOCK
from gerund.inference.generate.slots import Kept, Slots


class Prefixes:
    """A bounded store of beginnings.

    Args:
        tokens: how many are kept at most.
        least: tokens of a prompt that are read in any case.
    """

    def __init__(self, tokens: int, least: int) -> None:
        self._most, self._least = tokens // BLOCK, max(1, least)
        self._blocks: OrderedDict[bytes, Kept] = OrderedDict()

    def __len__(self) -> int:
        """Return how many tokens are kept."""
        return BLOCK * len(self._blocks)

    def recall(self, slots: Slots, ids: Sequence[int], reader: int = 0) -> int:
        """Put what is known of a prompt's beginning into the slot that it is read into; return how many tokens."""
        found = []
        for name in _names(ids[: max(0, len(ids) - self._least)]):
            kept = self._blocks.get(name)
            if kept is None:
                break
            found.append((name, kept))
        # What others go on from is of more use than what goes on from it.
        for name, _ in reversed(found):
            self._blocks.move_to_end(name)
        if found:
            layers = zip(*(kept for _, kept in found), strict=True)
            slots.recall([_joined(layer) for layer in layers], 0, reader)
        return BLOCK * len(found)

    def keep(self, slots: Slots, ids: Sequence[int], reader: int = 0) -> None:
        """Keep the blocks of a prompt that was read last."""
        names = list(_names(ids))[: self._most]
        for number, name in enumerate(names):
            if name not in self._blocks:
                self._blocks[name] = slots.remember(number * BLOCK, (number + 1) * BLOCK, reader)
        for name in reversed(names):
            self._blocks.move_to_end(name)
        while len(self._blocks) > self._most:
            self._blocks.popitem(last=False)


def _joined(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    if len(pairs) == 1:
        return pairs[0]
    return torch.cat([keys for keys, _ in pairs], dim=1), torch.cat([values for _, values in pairs], dim=1)


def _names(ids: Sequence[int]) -> Iterator[bytes]:
    """Yield the name of each whole block: a hash of all tokens up to its end."""
    so_far = blake2b(digest_size=16)
    for start in range(0, len(ids) - BLOCK + 1, BLOCK):
        so_far.update(array("q", ids[start : start + BLOCK]).tobytes())
        yield so_far.digest()
