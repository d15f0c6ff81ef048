"""KV caches: one preallocated for fast appending, and keys re-rotated to another position.

transformers' own cache copies everything for every token; with many rows after a long prompt that is most of the work.

How a layer's rotary embedding turns its keys is not read from its code: each known way is tried on a short
text at two positions, and is used only if it maps all keys of a layer from the first position to the second.
"""

import copy
import inspect
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from gerund.attention.cache_names import CACHE
from gerund.errors import ConfigError
from gerund.inference.encode.runtime import takes_positions

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


# The trial: so many tokens, so many places apart, and what keys may differ by, as a fraction of the greatest.
_TOKENS, _APART = 8, 37
_ALIKE = {torch.float32: 1e-3, torch.float64: 1e-3}
_ALIKE_ROUNDED = 5e-2
# Their frequencies depend on how long the text is.
_BY_LENGTH = ("dynamic", "longrope")


@dataclass(frozen=True, eq=False)
class KeyRotation:
    """How the keys of a layer change with their place.

    Attributes:
        frequency_F: radians a place, for each pair of numbers of a head; None where keys do not know their place.
        is_interleaved: whether neighbours are a pair, and not a number of the first half with one of the second.
    """

    frequency_F: Tensor | None = None
    is_interleaved: bool = False

    def apply(self, keys_BHTD: Tensor, by: int) -> Tensor:
        """Return keys as they would be so many places further on; up to rounding."""
        if self.frequency_F is None or by == 0:
            return keys_BHTD
        angle_F = by * self.frequency_F.to(keys_BHTD.device, torch.float32)
        cos_F, sin_F = angle_F.cos(), angle_F.sin()
        # Some architectures turn only the first numbers of a head.
        turning, rest = keys_BHTD[..., : 2 * len(angle_F)].float(), keys_BHTD[..., 2 * len(angle_F) :]
        pairs = turning.unflatten(-1, (-1, 2) if self.is_interleaved else (2, -1))
        one, other = pairs.unbind(-1 if self.is_interleaved else -2)
        both = (one * cos_F - other * sin_F, other * cos_F + one * sin_F)
        turned = torch.stack(both, dim=-1 if self.is_interleaved else -2).flatten(-2)
        return torch.cat([turned.to(keys_BHTD.dtype), rest], dim=-1)


_known: "WeakKeyDictionary[PreTrainedModel, list[KeyRotation]]" = WeakKeyDictionary()


def key_rotations(model: PreTrainedModel) -> list[KeyRotation]:
    """Return how the keys of each layer turn, found by trial once a model."""
    if model not in _known:
        _known[model] = _found(model)
    return _known[model]


@torch.no_grad()
def _found(model: PreTrainedModel) -> list[KeyRotation]:
    kind = model.config.model_type
    by_length = [one for one in model.modules() if any(name in str(_rope_type(one)) for name in _BY_LENGTH)]
    if by_length or not takes_positions(model):
        raise ConfigError(
            f"what this {kind} model read at one place cannot be moved to another: "
            + ("its rotary embedding depends on the text's length" if by_length else "it cannot be told places")
        )
    here, there = (_read_at(model, start) for start in (0, _APART))
    if not all(type(layer) is DynamicLayer and layer.is_initialized for layer in here.layers):
        raise ConfigError(
            f"what this {kind} model read at one place cannot be moved: it keeps more than keys and values"
        )
    frequencies = {
        tuple(one.tolist()): one for name, one in model.named_buffers() if name.endswith("inv_freq") and one.ndim == 1
    }
    known = [KeyRotation(), *(KeyRotation(one, way) for one in frequencies.values() for way in (False, True))]
    turns = []
    for number, (first, second) in enumerate(zip(here.layers, there.layers, strict=True)):
        fitting = [
            turn
            for turn in known
            if (turn.frequency_F is None or 2 * len(turn.frequency_F) <= first.keys.shape[-1])
            and _are_alike(turn.apply(first.keys, _APART), second.keys)
        ]
        if not fitting or not _are_alike(first.values, second.values):
            raise ConfigError(
                f"what this {kind} model read at one place cannot be moved to another: the keys of layer {number} "
                "turn in no way that is known"
            )
        turns.append(fitting[0])
    return turns


def _rope_type(module: torch.nn.Module) -> object:
    return getattr(module, "rope_type", "")


def _read_at(model: PreTrainedModel, start: int) -> DynamicCache:
    """Read a short text as if it began at this place."""
    size = model.get_input_embeddings().weight.shape[0]
    ids_1T = torch.linspace(0, size - 1, _TOKENS, device=model.device).long()[None]
    place_1T = torch.arange(start, start + _TOKENS, device=model.device)[None]
    cache = DynamicCache(config=model.config)
    model(
        input_ids=ids_1T,
        position_ids=place_1T,
        attention_mask=torch.ones_like(ids_1T),
        use_cache=True,
        **{CACHE: cache},
    )
    return cache


def _are_alike(one: Tensor, other: Tensor) -> bool:
    allowed = _ALIKE.get(other.dtype, _ALIKE_ROUNDED) * float(other.abs().max())
    return float((one.float() - other.float()).abs().max()) <= allowed
