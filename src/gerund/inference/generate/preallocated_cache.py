"""A key-value cache with room at its end, so that a further token is written where it belongs.

transformers' own copies everything that it holds for every token; with many rows behind a long prompt that is most of
the work.

Knows: tensors of keys and values. Does not know: models, tokens.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

# Tokens that fit before everything is copied once more.
_ROOM = 64


class PreallocatedLayer(DynamicLayer):
    """One layer's keys and values, views of tensors that are longer than they are."""

    keys: Tensor
    values: Tensor
    _allocated: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values ``(B, H, T, D)`` and return all of them."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        before = self.get_seq_length()
        after = before + key_states.shape[-2]
        if self._allocated is None or after > self._allocated[0].shape[-2]:
            self._allocated = (_with_room(self.keys, key_states, after), _with_room(self.values, value_states, after))
        for whole, new in zip(self._allocated, (key_states, value_states), strict=True):
            whole[..., before:after, :] = new
        self.keys, self.values = (whole[..., :after, :] for whole in self._allocated)
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, in this order; a row may be kept more than once."""
        super().batch_select_indices(indices)
        self._allocated = None

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Keep these rows, in this order."""
        super().reorder_cache(beam_idx)
        self._allocated = None

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Keep every row so many times."""
        super().batch_repeat_interleave(repeats)
        self._allocated = None

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last tokens."""
        super().crop(tokens_to_remove)
        self._allocated = None

    def reset(self) -> None:
        """Drop everything."""
        super().reset()
        self._allocated = None


def preallocated_cache() -> DynamicCache:
    """Return an empty cache, which keeps all tokens, those behind a window too."""
    cache = DynamicCache()
    cache.layer_class_to_replicate = PreallocatedLayer
    return cache


def _with_room(held: Tensor | None, new: Tensor, length: int) -> Tensor:
    """Return a tensor for ``length`` tokens and more, with what is held already."""
    rows, heads, _, width = new.shape
    whole = new.new_empty(rows, heads, length + _ROOM, width)
    if held is not None and held.numel():
        whole[..., : held.shape[-2], :] = held
    return whole
