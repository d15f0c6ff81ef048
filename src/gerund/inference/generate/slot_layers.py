"""Keys and values of one layer in all slots, and what transformers sees of it while prompts are read or rows written.

Knows: transformers' caches. Does not know: models, which text is in a slot.
"""

import math
import mmap
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from gerund.attention.ragged_batch import whole_blocks
from gerund.errors import ResourceError


class SlotLayer:
    """Keys and values of one layer in all slots, ``(slots, key heads, room, head_dim)``."""

    def __init__(self, slots: int, room: int) -> None:
        self.slots, self.room = slots, room
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def tensors(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return both, made when the first keys and values show their sizes and type."""
        if self.keys is None or self.values is None:
            try:
                self.keys, self.values = (self._made(like) for like in (keys, values))
            except (RuntimeError, MemoryError, OSError) as error:
                raise ResourceError(
                    f"{self.slots} texts of {self.room} tokens do not fit the memory; take fewer slots, or less context"
                ) from error
        return self.keys, self.values

    def _made(self, like: Tensor) -> Tensor:
        # Zeros: what is hidden is multiplied by 0, which must not be 0 times infinity.
        shape = (self.slots, like.shape[1], self.room, like.shape[3])
        if like.device.type != "cpu":
            return like.new_zeros(shape)
        # Memory that the system gives when something is written there: most texts are shorter than their room.
        zeros = mmap.mmap(-1, math.prod(shape) * like.element_size())
        return torch.frombuffer(zeros, dtype=like.dtype).view(shape)

    @property
    def bytes(self) -> int:
        """Memory of both, once they were made."""
        return sum(one.nbytes for one in (self.keys, self.values) if one is not None)

    @torch.inference_mode()
    def copy(self, source: int, target: int, length: int) -> None:
        """Copy a slot's first tokens into another slot."""
        for own in self.both():
            own[target, :, :length] = own[source, :, :length]

    def taken(self, slot: int, first: int, behind: int) -> tuple[Tensor, Tensor]:
        """Return copies ``(H, T, D)`` of what some tokens of a slot left."""
        keys, values = (own[slot, :, first:behind].clone() for own in self.both())
        return keys, values

    @torch.inference_mode()
    def put(self, slot: int, first: int, keys: Tensor, values: Tensor) -> None:
        """Put keys and values ``(H, T, D)`` into a slot, from this token on."""
        for own, new in zip(self.tensors(keys[None], values[None]), (keys, values), strict=True):
            own[slot, :, first : first + new.shape[1]] = new

    @torch.inference_mode()
    def fill(self, rows: int, generator: torch.Generator) -> None:
        """Fill the first slots with random numbers."""
        for own in self.both():
            own[:rows] = torch.randn(own.shape[1:], generator=generator).to(own)

    def both(self) -> tuple[Tensor, Tensor]:
        """Return both, which have been made."""
        assert self.keys is not None
        assert self.values is not None
        return self.keys, self.values


class _LayerOfTransformers(CacheLayerMixin):
    """What transformers sees of a layer."""

    is_sliding = False

    def __init__(self, layer: SlotLayer) -> None:
        super().__init__()
        self.layer = layer
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: there is room already."""

    def get_max_length(self) -> int:
        """Return the room of a slot."""
        return self.layer.room


class ReadLayer(_LayerOfTransformers):
    """A layer while prompts are read, some tokens of which are there."""

    def __init__(self, layer: SlotLayer, first: int, parts: Sequence[tuple[int, int]], by_blocks: bool) -> None:
        super().__init__(layer)
        self.first, self.parts, self.by_blocks = first, parts, by_blocks

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values ``(1, H, T, D)``; return all ``(prompts, H, W, D)``, the last block filled up."""
        both = self.layer.tensors(key_states, value_states)
        behind = 0
        for slot, (start, length) in enumerate(self.parts, start=self.first):
            for own, new in zip(both, (key_states, value_states), strict=True):
                own[slot, :, start : start + length] = new[0, :, behind : behind + length]
            behind += length
        longest = max(map(sum, self.parts))
        width = whole_blocks(longest) if self.by_blocks else longest
        keys, values = (own[self.first : self.first + len(self.parts), :, :width] for own in both)
        return keys, values

    def get_seq_length(self) -> int:
        """Return how many tokens were there before, of the first prompt."""
        return self.parts[0][0]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many keys there will be, and which is the first of them."""
        return self.parts[0][0] + query_length, 0


class WrittenLayer(_LayerOfTransformers):
    """A layer while some rows get one token each."""

    place_B: Tensor
    row_B: Tensor
    real_B11W: Tensor
    own: tuple[Tensor, Tensor]

    def __init__(self, layer: SlotLayer) -> None:
        super().__init__(layer)
        self._parts: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def expect(self, first: int, row_B: Tensor, place_B: Tensor, real_B11W: Tensor) -> tuple[Tensor, ...]:
        """Say which rows, from which one on, where in its slot each one's next token goes, and which keys it sees.

        Returns:
            Keys and values of these rows where the same tensors were not returned before.
        """
        self.row_B, self.place_B, self.real_B11W = row_B, place_B, real_B11W
        part = first, len(place_B)
        known = part in self._parts
        if not known:
            keys, values = (one[first : first + len(place_B)] for one in self.layer.both())
            self._parts[part] = keys, values
        self.own = self._parts[part]
        return () if known else self.own

    @property
    def width(self) -> int:
        """How many keys of a row are looked at."""
        return self.real_B11W.shape[-1]

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Put each row's keys and values ``(B, H, 1, D)`` in their place and return those of all of its tokens."""
        for own, new in zip(self.own, (key_states, value_states), strict=True):
            own[self.row_B, :, self.place_B] = new[:, :, 0]
        keys, values = (own[:, :, : self.width] for own in self.own)
        return keys, values

    def get_seq_length(self) -> int:
        """Return how many tokens the longest row has."""
        return self.width - 1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many keys are looked at, and which is the first of them."""
        del query_length
        return self.width, 0
