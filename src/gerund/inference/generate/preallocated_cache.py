"""A key-value cache with room at its end, so that a further token is written where it belongs.

transformers' own copies everything that it holds for every token; with many rows behind a long prompt that is most of
the work.

Knows: keys and values, which models keep nothing else. Does not know: what a model computes, tokens.
"""

import copy
import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from gerund.attention.cache_names import CACHE

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

    @classmethod
    def behind(cls, layer: DynamicLayer) -> "PreallocatedLayer":
        """Return a layer that holds the same, and puts all of it elsewhere before it adds to it."""
        own = cls()
        own.__dict__.update(layer.__dict__)
        return own

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


def plain_layers(model: PreTrainedModel) -> int:
    """Return how many layers keep keys and values of all tokens; 0 where one of them keeps something else."""
    try:
        layers = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
    except (AttributeError, TypeError, ValueError):
        return 0
    return len(layers) if all(type(layer) is DynamicLayer for layer in layers) else 0


def cache_for(model: PreTrainedModel) -> DynamicCache | None:
    """Return an empty cache for transformers' own loop; None where a model keeps more, or in a way of its own."""
    usual = model.generation_config
    if model.config.is_encoder_decoder or usual.use_cache is False or usual.cache_implementation is not None:
        return None
    takes_it = CACHE in inspect.signature(model.forward).parameters and model._supports_default_dynamic_cache()
    return preallocated_cache() if takes_it and plain_layers(model) else None


def to_write_on(cache: Cache) -> Cache:
    """Return a cache that goes on from one that stays as it is."""
    if not all(type(layer) is DynamicLayer for layer in cache.layers):
        return copy.deepcopy(cache)
    own = copy.copy(cache)
    own.layers = [PreallocatedLayer.behind(layer) for layer in cache.layers]
    return own


def _with_room(held: Tensor | None, new: Tensor, length: int) -> Tensor:
    """Return a tensor for ``length`` tokens and more, with what is held already."""
    rows, heads, _, width = new.shape
    whole = new.new_empty(rows, heads, length + _ROOM, width)
    if held is not None and held.numel():
        whole[..., : held.shape[-2], :] = held
    return whole
