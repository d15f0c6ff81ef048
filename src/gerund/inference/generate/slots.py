"""KV cache slots for batched decoding: sequences join and leave without moving the others.

A slot has room for one sequence, its tokens at the left. Rows ``0`` to ``live - 1`` are being decoded; the slots after
all of them hold prompts during prefill. What is behind a row's tokens is left over from others, and is always masked.
"""

import inspect
import math
import mmap
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from gerund.attention.cache_names import CACHE
from gerund.attention.interface import ADDITIVE, FUSED
from gerund.attention.layouts import decoder_layers
from gerund.attention.masked import has_indexer, way_of
from gerund.attention.ragged_batch import STEP, ByBlocks, SideBySide, whole_blocks
from gerund.attention.shared_layer_state import hands_on
from gerund.errors import ResourceError
from gerund.inference.encode.runtime import takes_positions
from gerund.inference.generate import compiled_step
from gerund.inference.generate.compiled_step import without_hooks
from gerund.inference.generate.kv_cache import plain_layers
from gerund.models.architectures import is_encoder_decoder


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


class PrefillLayer(_LayerOfTransformers):
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


class DecodeLayer(_LayerOfTransformers):
    """A layer while some rows get one token each."""

    place_B: Tensor
    row_B: Tensor
    real_B11W: Tensor
    own: tuple[Tensor, Tensor]

    def __init__(self, layer: SlotLayer) -> None:
        super().__init__(layer)
        self._parts: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def expect(self, first: int, row_B: Tensor, place_B: Tensor, real_B11W: Tensor) -> tuple[Tensor, ...]:
        """Say which rows, from which one on, where in its slot each one's next token goes, and which keys it sees."""
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


# Rows are filled up to a multiple of this at most.
MOST_ROWS_MORE = 8
# Prompts that are read together at most.
MOST_READ = 4
# Tokens of a pass whose logits are computed at least.
_LEAST_LOGITS = 4
# By layer, keys and values ``(key heads, T, head_dim)`` of some tokens of a text.
Kept = list[tuple[Tensor, Tensor]]


def unsupported_reason(model: PreTrainedModel) -> str | None:
    """Say why slots cannot hold what a model keeps of a text; None where nothing is known against it.

    Whether a model that they can hold gives what it should is for ``reproducibility.check_batching`` to find out.
    """
    kind = model.config.model_type
    if is_encoder_decoder(model):
        return f"this {kind} model has an encoder beside the text that it writes"
    config = model.config.get_text_config(decoder=True)
    layers = decoder_layers(model)
    implementation = config._attn_implementation
    if implementation not in (FUSED, ADDITIVE) or has_indexer(model) or any(map(way_of, model.modules())):
        return f"the attention of this {kind} model takes no plan by itself"
    if hands_on(layers):
        return f"the layers of this {kind} model hand each other more than hidden states"
    if plain_layers(model) != len(layers):
        return f"this {kind} model keeps more of a text than keys and values, or forgets what lies behind a window"
    if CACHE not in inspect.signature(model.forward).parameters or not takes_positions(model):
        return f"this {kind} model cannot be told where in its text a token stands"
    return None


class Slots:
    """Room for texts that are written side by side."""

    def __init__(
        self,
        model: PreTrainedModel,
        count: int,
        room: int,
        *,
        alone: bool = False,
        at_least: int = 1,
        multiple: int = 1,
        compiled: tuple[int, int] | None = None,
        by_blocks: bool = False,
        shared: bool = False,
    ) -> None:
        self.model, self.count, self.room = model, count, room
        self.compiled, self.by_blocks = compiled, by_blocks
        self.alone, self.at_least, self.multiple = alone, at_least, multiple
        self.lengths: list[int] = []
        # Compiled code serves any number of keys but all that there is room for, so there is room for more.
        whole = whole_blocks(room) + bool(compiled) * STEP
        # The last slots are read into; rows that only fill a step up have some of their own where there are not enough.
        self._reading = -(-count // MOST_ROWS_MORE) * MOST_ROWS_MORE
        self._device = model.get_input_embeddings().weight.device
        # A CPU's memory is taken when something is written there. Attention that is no kernel takes one text at a time.
        fused = model.config.get_text_config(decoder=True)._attn_implementation == FUSED
        self.readers = MOST_READ if self._device.type == "cpu" and fused else 1
        layers = [SlotLayer(self._reading + self.readers, whole) for _ in decoder_layers(model)]
        self._layers = layers[:1] * len(layers) if shared else layers
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._writing = Cache(layers=[DecodeLayer(layer) for layer in self._layers])
        # Reading goes through the model's own hooks, which let other work in between two layers.
        self._bare = without_hooks(model)
        self._compiled: Callable[[Tensor, Tensor, SideBySide], Tensor] | None = None
        if compiled:
            self._compiled = compiled_step.compiled(self._one_pass, self._bare, (compiled, whole))

    @property
    def live(self) -> int:
        """How many rows are being written."""
        return len(self.lengths)

    @torch.inference_mode()
    def read(self, ids: Sequence[int], known: int = 0) -> Tensor:
        """Read a prompt into the first slot behind the rows, as ``generate`` begins; return its logits ``(V,)``."""
        if self.by_blocks:
            return self.read_together([ids], [known])[0]
        inputs: dict[str, Any] = {"input_ids": torch.tensor([list(ids)], device=self._device)}
        if self._keeps_logits:
            inputs["logits_to_keep"] = 1
        return self._read(inputs, [(0, len(ids))])[0, -1].clone()

    @torch.inference_mode()
    def read_together(self, prompts: Sequence[Sequence[int]], known: Sequence[int]) -> Tensor:
        """Read prompts in one pass, by blocks, each into a slot of its own behind the rows."""
        parts = [(before, len(ids) - before) for ids, before in zip(prompts, known, strict=True)]
        rest = [token for ids, before in zip(prompts, known, strict=True) for token in ids[before:]]
        places = [place for start, length in parts for place in range(start, start + length)]
        ends_N = torch.tensor([length for _, length in parts], device=self._device).cumsum(0) - 1
        inputs: dict[str, Any] = {
            "input_ids": torch.tensor([rest], device=self._device),
            "position_ids": torch.tensor([places], device=self._device),
            "attention_plan": ByBlocks(len(self._layers), parts),
            # The plan makes no use of it, and without one the model would make a mask.
            "attention_mask": torch.ones((1, 1, 1, 1), dtype=torch.bool, device=self._device),
        }
        if not self._keeps_logits:
            return self._read(inputs, parts)[0, ends_N]
        # Few rows are computed another way than many.
        more = max(0, _LEAST_LOGITS - len(parts))
        inputs["logits_to_keep"] = torch.cat([ends_N, ends_N[-1:].expand(more)])
        return self._read(inputs, parts)[0, : len(parts)].clone()

    def _read(self, inputs: dict[str, Any], parts: Sequence[tuple[int, int]]) -> Tensor:
        own = Cache(layers=[PrefillLayer(layer, self._reading, parts, self.by_blocks) for layer in self._layers])
        with torch.autocast(self._device.type, enabled=False):
            logits: Tensor = self.model(**inputs, **{CACHE: own}, use_cache=True).logits
        return logits

    def join(self, length: int, reader: int = 0) -> int:
        """Make a row of a prompt that was read last; return its number. It may be done several times."""
        row = self.live
        for layer in self._layers:
            layer.copy(self._reading + reader, row, length)
        self.lengths.append(length)
        return row

    def leave(self, row: int) -> None:
        """Free a row. The last row takes its number."""
        last = self.live - 1
        if row != last:
            for layer in self._layers:
                layer.copy(last, row, self.lengths[last])
            self.lengths[row] = self.lengths[last]
        del self.lengths[last]

    @torch.inference_mode()
    def step(self, tokens: Sequence[int]) -> Tensor:
        """Write one token into every row; return the logits of what comes next ``(rows, V)``."""
        least, most = self.compiled or (max(self.at_least, -(-self.live // self.multiple) * self.multiple), self.live)
        size = -(-self.live // -(-self.live // most))
        logits = []
        for first in range(0, self.live, size):
            own = range(first, min(first + size, self.live))
            empty = [0] * (least - len(own))
            where = [*(self.lengths[row] for row in own), *empty]
            ids = [*(tokens[row] for row in own), *empty]
            logits.append(self._written(first, ids, where)[: len(own), -1])
        self.lengths = [length + 1 for length in self.lengths]
        return logits[0] if len(logits) == 1 else torch.cat(logits)

    def _written(self, first: int, ids: Sequence[int], where: Sequence[int]) -> Tensor:
        """Write tokens into the rows from one on, behind as many as they have; return the logits ``(rows, 1, V)``."""
        plan = SideBySide(len(self._layers), [place + 1 for place in where], alone=self.alone, device=self._device)
        place_B = torch.tensor(where, device=self._device)
        row_B = torch.arange(len(where), device=self._device)
        place_B1, ids_B1 = place_B[:, None].clone(), torch.tensor(ids, device=self._device)[:, None].clone()
        owned = [own for layer in self._writing.layers for own in layer.expect(first, row_B, place_B, plan.real_B11W)]
        if self.compiled:
            compiled_step.any_length(plan.real_B11W, 3)
            least, most = self.compiled
            for tensor in (ids_B1, place_B1, place_B, row_B, plan.real_B11W, *owned) if least < most else ():
                compiled_step.any_length(tensor, 0)
        with torch.autocast(self._device.type, enabled=False):
            return (self._compiled or self._one_pass)(ids_B1, place_B1, plan)

    def _one_pass(self, ids_B1: Tensor, place_B1: Tensor, plan: SideBySide) -> Tensor:
        logits: Tensor = self._bare(
            input_ids=ids_B1,
            position_ids=place_B1,
            attention_mask=plan.real_B11W,
            use_cache=True,
            attention_plan=plan,
            **{CACHE: self._writing},
        ).logits
        return logits

    def remember(self, first: int, behind: int, reader: int = 0) -> Kept:
        """Return copies of what some tokens of a prompt that was read last left."""
        return [layer.taken(self._reading + reader, first, behind) for layer in self._layers]

    def recall(self, kept: Kept, first: int, reader: int = 0) -> None:
        """Put what ``remember`` returned into a slot that is read into, from this token on."""
        for layer, (keys, values) in zip(self._layers, kept, strict=True):
            layer.put(self._reading + reader, first, keys, values)

    def fill(self, lengths: Sequence[int], seed: int) -> None:
        """Make rows of these lengths out of random keys and values, for trials."""
        self.lengths = list(lengths)
        generator = torch.Generator().manual_seed(seed)
        for layer in dict.fromkeys(self._layers):
            layer.fill(len(self.lengths), generator)

    @property
    def are_alike(self) -> bool:
        """Whether all layers have keys and values of the same shapes, once a prompt was read."""
        return len({tuple(own.shape for own in layer.both()) for layer in self._layers}) == 1

    @property
    def bytes(self) -> int:
        """Memory of keys and values, once a prompt was read."""
        return sum(layer.bytes for layer in dict.fromkeys(self._layers))
