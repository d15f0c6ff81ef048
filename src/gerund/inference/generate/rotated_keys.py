"""Keys that a pass computed at one place of a text, turned to another place: what rotary embeddings allow.

How a layer's keys turn is not read off an architecture's code: each way that is known is tried on a short text that the
model reads at two places, and one that does not bring all keys of a layer from the first to the second is not used.

Knows: rotary embeddings, caches of keys and values. Does not know: texts, what is done with the keys.
"""

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from gerund.attention.cache_names import CACHE
from gerund.errors import ConfigError
from gerund.inference.encode.positions import takes_positions

# The trial: so many tokens, so many places apart, and what keys may differ by, as a fraction of the greatest.
_TOKENS, _APART = 8, 37
_ALIKE = {torch.float32: 1e-3, torch.float64: 1e-3}
_ALIKE_ROUNDED = 5e-2
# Their frequencies depend on how long the text is.
_BY_LENGTH = ("dynamic", "longrope")


@dataclass(frozen=True, eq=False)
class Turn:
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


_known: "WeakKeyDictionary[PreTrainedModel, list[Turn]]" = WeakKeyDictionary()


def turns_of(model: PreTrainedModel) -> list[Turn]:
    """Return how the keys of each layer turn, found by trial once a model.

    Raises:
        ConfigError: they turn in no way that is known, or the model keeps something else than keys and values.
    """
    if model not in _known:
        _known[model] = _found(model)
    return _known[model]


@torch.no_grad()
def _found(model: PreTrainedModel) -> list[Turn]:
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
    known = [Turn(), *(Turn(one, way) for one in frequencies.values() for way in (False, True))]
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
