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

from gerund.attention.layer_state import CACHE
from gerund.attention.layouts import decoder_layers, is_one_graph
from gerund.errors import ConfigError
from gerund.inference.encode.runtime import takes_positions

# Tokens that fit before everything is copied again.
_ROOM = 64
# The rotation trial: number of tokens, distance of the two positions, and the largest relative difference of keys.
_TRIAL_TOKENS, _TRIAL_SHIFT = 8, 37
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
_TOLERANCE_HALF = 5e-2
# Rotary embeddings whose frequencies depend on the length of the text.
_BY_LENGTH = ("dynamic", "longrope")


class PreallocatedLayer(DynamicLayer):
    """Keys and values of a layer, at the beginning of longer tensors.

    What is put in the place of either has no room after it, so it is copied before anything is added.
    """

    _keys: Tensor | None
    _values: Tensor | None
    # Of either alone: one may be replaced before the other.
    _length = _values_length = 0

    @property
    def keys(self) -> Any:
        """Keys ``(B, H, T, D)``."""
        return None if self._keys is None else self._keys[..., : self._length, :]

    @keys.setter
    def keys(self, keys: Tensor | None) -> None:
        self._keys, self._length = keys, 0 if keys is None else keys.shape[-2]

    @property
    def values(self) -> Any:
        """Values ``(B, H, T, D)``."""
        return None if self._values is None else self._values[..., : self._values_length, :]

    @values.setter
    def values(self, values: Tensor | None) -> None:
        self._values, self._values_length = values, 0 if values is None else values.shape[-2]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Note what keys are like."""
        del value_states
        self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True

    def get_seq_length(self) -> int:
        """Return how many tokens there are."""
        return self._length

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values ``(B, H, T, D)`` and return all of them."""
        keys, values, start = self._with_more(key_states, value_states)
        for tensor, new in ((keys, key_states), (values, value_states)):
            tensor[..., start : self._length, :] = new
        return self.keys, self.values

    def reserve(self, like: Tensor) -> tuple[Tensor, Tensor, int]:
        """Append keys and values that the caller writes; see ``models.packed_model.WritesInPlace``."""
        return self._with_more(like, like)

    def _with_more(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, int]:
        """Make room for more; return the memory, and where they begin."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        start, end = self._length, self._length + keys.shape[-2]
        if self._keys is None or self._values is None or end > self._keys.shape[-2]:
            self._keys, self._values = _with_room(self.keys, keys, end), _with_room(self.values, values, end)
        self._length = self._values_length = end
        return self._keys, self._values, start

    @classmethod
    def copy_on_write(cls, layer: DynamicLayer) -> "PreallocatedLayer":
        """Return a layer with the same tokens, which are copied before it adds to them."""
        copied = cls()
        if layer.is_initialized:
            copied.lazy_initialization(layer.keys, layer.values)
            copied.keys, copied.values = layer.keys, layer.values
        return copied


def _with_room(tokens: Tensor | None, new: Tensor, length: int) -> Tensor:
    """Return a tensor for ``length`` tokens and more that begins with ``tokens``."""
    rows, heads, _, width = new.shape
    # Zeros: a graph computes with all of it, and 0 times what is left in memory may be no number.
    longer = new.new_zeros(rows, heads, length + _ROOM, width)
    if tokens is not None and tokens.numel():
        longer[..., : tokens.shape[-2], :] = tokens
    return longer


def preallocated_cache() -> DynamicCache:
    """Return an empty cache of all tokens, those outside a sliding window too."""
    cache = DynamicCache()
    cache.layer_class_to_replicate = PreallocatedLayer
    return cache


def plain_layers(model: PreTrainedModel) -> int:
    """Return how many layers cache keys and values of all tokens; 0 where one of them caches something else."""
    if is_one_graph(model):
        return len(decoder_layers(model))
    try:
        layers = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
    except (AttributeError, TypeError, ValueError):
        return 0
    return len(layers) if all(type(layer) is DynamicLayer for layer in layers) else 0


def cache_for(model: PreTrainedModel) -> DynamicCache | None:
    """Return an empty cache for transformers' own loop; None where a model caches more, or in another way."""
    usual = model.generation_config
    if model.config.is_encoder_decoder or usual.use_cache is False or usual.cache_implementation is not None:
        return None
    takes_it = CACHE in inspect.signature(model.forward).parameters and model._supports_default_dynamic_cache()
    return preallocated_cache() if takes_it and plain_layers(model) else None


def copy_on_write(cache: Cache) -> Cache:
    """Return a cache that continues another one, which does not change."""
    if not all(type(layer) is DynamicLayer for layer in cache.layers):
        return copy.deepcopy(cache)
    copied = copy.copy(cache)
    copied.layers = [PreallocatedLayer.copy_on_write(layer) for layer in cache.layers]
    return copied


@dataclass(frozen=True, eq=False)
class KeyRotation:
    """How the keys of a layer depend on their position.

    ``frequency_F`` has the radians per position for each pair of dimensions; None where keys do not depend on it.
    A pair is two neighbors where ``is_interleaved``, else a dimension of the first half with one of the second.
    """

    frequency_F: Tensor | None = None
    is_interleaved: bool = False

    def apply(self, keys_BHTD: Tensor, shift: int) -> Tensor:
        """Return keys as they would be ``shift`` positions later; up to rounding."""
        if self.frequency_F is None or shift == 0:
            return keys_BHTD
        angle_F = shift * self.frequency_F.to(keys_BHTD.device, torch.float32)
        cos_F, sin_F = angle_F.cos(), angle_F.sin()
        # Some architectures rotate only the first dimensions of a head.
        rotary, rest = keys_BHTD[..., : 2 * len(angle_F)].float(), keys_BHTD[..., 2 * len(angle_F) :]
        pairs = rotary.unflatten(-1, (-1, 2) if self.is_interleaved else (2, -1))
        x, y = pairs.unbind(-1 if self.is_interleaved else -2)
        rotated = (x * cos_F - y * sin_F, y * cos_F + x * sin_F)
        joined = torch.stack(rotated, dim=-1 if self.is_interleaved else -2).flatten(-2)
        return torch.cat([joined.to(keys_BHTD.dtype), rest], dim=-1)


_rotations: "WeakKeyDictionary[PreTrainedModel, list[KeyRotation]]" = WeakKeyDictionary()


def key_rotations(model: PreTrainedModel) -> list[KeyRotation]:
    """Return how the keys of each layer rotate, found by a trial once per model.

    Raises ``ConfigError`` where no known rotation fits, or the model caches more than keys and values.
    """
    if model not in _rotations:
        _rotations[model] = _try_rotations(model)
    return _rotations[model]


@torch.no_grad()
def _try_rotations(model: PreTrainedModel) -> list[KeyRotation]:
    def unsupported(reason: str) -> ConfigError:
        return ConfigError(
            f"The cache of this {model.config.model_type} model can't be moved to another position: {reason}."
        )

    rope_types = (str(getattr(module, "rope_type", "")) for module in model.modules())
    if any(name in rope_type for rope_type in rope_types for name in _BY_LENGTH):
        raise unsupported("its rotary embedding depends on the length of the text")
    if not takes_positions(model):
        raise unsupported("it does not accept position ids")
    near, far = (_read_at(model, start) for start in (0, _TRIAL_SHIFT))
    if not all(type(layer) is DynamicLayer and layer.is_initialized for layer in near.layers):
        raise unsupported("it caches more than keys and values")
    buffers = (tensor for name, tensor in model.named_buffers() if name.endswith("inv_freq") and tensor.ndim == 1)
    frequencies = {tuple(tensor.tolist()): tensor for tensor in buffers}
    known = [KeyRotation(), *(KeyRotation(inverse, way) for inverse in frequencies.values() for way in (False, True))]
    rotations = []
    for number, (first, second) in enumerate(zip(near.layers, far.layers, strict=True)):
        fitting = [
            rotation
            for rotation in known
            if (rotation.frequency_F is None or 2 * len(rotation.frequency_F) <= first.keys.shape[-1])
            and _are_close(rotation.apply(first.keys, _TRIAL_SHIFT), second.keys)
        ]
        if not fitting or not _are_close(first.values, second.values):
            raise unsupported(f"the keys of layer {number} rotate in no known way")
        rotations.append(fitting[0])
    return rotations


def _read_at(model: PreTrainedModel, start: int) -> DynamicCache:
    """Read a short text whose first token is at this position."""
    size = model.get_input_embeddings().weight.shape[0]
    ids_1T = torch.linspace(0, size - 1, _TRIAL_TOKENS, device=model.device).long()[None]
    position_1T = torch.arange(start, start + _TRIAL_TOKENS, device=model.device)[None]
    cache = DynamicCache(config=model.config)
    mask_1T = torch.ones_like(ids_1T)
    model(ids_1T, position_ids=position_1T, attention_mask=mask_1T, use_cache=True, **{CACHE: cache})
    return cache


def _are_close(keys: Tensor, expected: Tensor) -> bool:
    allowed = _TOLERANCE.get(expected.dtype, _TOLERANCE_HALF) * float(expected.abs().max())
    return float((keys.float() - expected.float()).abs().max()) <= allowed
