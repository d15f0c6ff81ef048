"""KV cache slots for batched decoding: sequences join and leave without moving the others.

A slot has room for one sequence, its tokens at the left. Rows ``0`` to ``live - 1`` are being decoded; the slots after
all of them hold prompts during prefill. What is behind a row's tokens is left over from others, and is always masked.
"""

import copy
import inspect
import math
import mmap
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from gerund.attention import BLOCK, whole_blocks
from gerund.attention.interface import ADDITIVE, FUSED
from gerund.attention.layer_state import CACHE, hands_on
from gerund.attention.layouts import decoder_layers, is_stream_hook
from gerund.attention.masked import has_indexer, way_of
from gerund.attention.ragged_batch import BlockPrefill, RaggedBatch
from gerund.errors import ResourceError
from gerund.inference.encode.runtime import takes_positions
from gerund.inference.generate.decoding import KeyValues, SlotTable
from gerund.inference.generate.kv_cache import plain_layers
from gerund.models.adapters import own_module
from gerund.models.kinds import is_encoder_decoder

# Steps are padded to a multiple of at most so many rows.
MOST_ROWS_MORE = 8
# Prompts per prefill pass at most.
MOST_READ = 4
# Least number of tokens of a pass whose logits are computed: few rows take other kernels.
_LEAST_LOGITS = 4


def unsupported_reason(model: PreTrainedModel) -> str | None:
    """Return why slots cannot hold a model's cache; None where nothing is known against it.

    Whether its results are then right is checked by ``reproducibility.check_batching``.
    """
    kind = model.config.model_type
    if is_encoder_decoder(model):
        return f"this {kind} model has an encoder"
    config = model.config.get_text_config(decoder=True)
    layers = decoder_layers(model)
    implementation = config._attn_implementation
    if implementation not in (FUSED, ADDITIVE) or has_indexer(model) or any(map(way_of, model.modules())):
        return f"this {kind} model's attention does not accept attention plans"
    if hands_on(layers):
        return f"the layers of this {kind} model share more than hidden states"
    if plain_layers(model) != len(layers):
        return f"this {kind} model caches more than keys and values, or has a sliding window"
    if CACHE not in inspect.signature(model.forward).parameters or not takes_positions(model):
        return f"this {kind} model does not accept position ids"
    return None


class SlotLayer:
    """Keys and values of one layer in all slots, ``(slots, key heads, room, head_dim)``."""

    def __init__(self, slots: int, room: int) -> None:
        self.slots, self.room = slots, room
        self._both: tuple[Tensor, Tensor] | None = None

    @property
    def both(self) -> tuple[Tensor, Tensor]:
        """Keys and values, once they are allocated."""
        assert self._both is not None
        return self._both

    def allocated(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return both, allocated when the first keys and values show their sizes and dtype."""
        if self._both is None:
            try:
                self._both = self._zeros(keys), self._zeros(values)
            except (RuntimeError, MemoryError, OSError) as error:
                size = f"{self.slots} sequences of {self.room} tokens"
                raise ResourceError(f"{size} do not fit into memory. Use fewer slots or less context.") from error
        return self._both

    def _zeros(self, like: Tensor) -> Tensor:
        # Zeros: masked values are multiplied by 0, which must not be 0 times infinity.
        shape = (self.slots, like.shape[1], self.room, like.shape[3])
        if like.device.type != "cpu":
            return like.new_zeros(shape)
        # The system allocates this memory when it is written to: most sequences are shorter than their room.
        zeros = mmap.mmap(-1, math.prod(shape) * like.element_size())
        return torch.frombuffer(zeros, dtype=like.dtype).view(shape)

    @property
    def bytes(self) -> int:
        """Memory of both, once they are allocated."""
        return sum(tensor.nbytes for tensor in self._both or ())

    @torch.inference_mode()
    def copy(self, source: int, target: int, length: int) -> None:
        """Copy a slot's first tokens into another slot."""
        for tensor in self.both:
            tensor[target, :, :length] = tensor[source, :, :length]

    def copy_out(self, slot: int, first: int, end: int) -> tuple[Tensor, Tensor]:
        """Return copies ``(H, T, D)`` of some tokens of a slot."""
        keys, values = (tensor[slot, :, first:end].clone() for tensor in self.both)
        return keys, values

    @torch.inference_mode()
    def copy_in(self, slot: int, first: int, keys: Tensor, values: Tensor) -> None:
        """Copy keys and values ``(H, T, D)`` into a slot, from token ``first`` on."""
        for tensor, new in zip(self.allocated(keys[None], values[None]), (keys, values), strict=True):
            tensor[slot, :, first : first + new.shape[1]] = new

    @torch.inference_mode()
    def fill(self, rows: int, generator: torch.Generator) -> None:
        """Fill the first slots with random numbers."""
        for tensor in self.both:
            tensor[:rows] = torch.randn(tensor.shape[1:], generator=generator).to(tensor)


class _CacheLayer(CacheLayerMixin):
    """A ``SlotLayer`` as transformers sees it."""

    is_sliding = False

    def __init__(self, layer: SlotLayer) -> None:
        super().__init__()
        self.layer = layer
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: memory is allocated already."""

    def get_max_length(self) -> int:
        """Return the room of a slot."""
        return self.layer.room


class PrefillLayer(_CacheLayer):
    """A layer while prompts are read; ``parts`` has the cached and the new tokens of each."""

    def __init__(self, layer: SlotLayer, first: int, parts: Sequence[tuple[int, int]], by_blocks: bool) -> None:
        super().__init__(layer)
        self.first, self.parts, self.by_blocks = first, parts, by_blocks

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values ``(1, H, T, D)``; return all ``(prompts, H, W, D)``, the last block filled up."""
        both = self.layer.allocated(key_states, value_states)
        offset = 0
        for slot, (start, length) in enumerate(self.parts, start=self.first):
            for tensor, new in zip(both, (key_states, value_states), strict=True):
                tensor[slot, :, start : start + length] = new[0, :, offset : offset + length]
            offset += length
        longest = max(map(sum, self.parts))
        width = whole_blocks(longest) if self.by_blocks else longest
        keys, values = (tensor[self.first : self.first + len(self.parts), :, :width] for tensor in both)
        return keys, values

    def get_seq_length(self) -> int:
        """Return how many tokens of the first prompt were cached."""
        return self.parts[0][0]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many keys there will be, and the offset of the first."""
        return self.parts[0][0] + query_length, 0


class DecodeLayer(_CacheLayer):
    """A layer while some rows get one token each."""

    position_B: Tensor
    row_B: Tensor
    real_B11W: Tensor
    rows: tuple[Tensor, Tensor]

    def expect(self, row_B: Tensor, position_B: Tensor, real_B11W: Tensor) -> None:
        """Set the rows of a step: the position of each one's next token, and the keys it sees."""
        self.row_B, self.position_B, self.real_B11W = row_B, position_B, real_B11W
        keys, values = (tensor[: len(position_B)] for tensor in self.layer.both)
        self.rows = keys, values

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values ``(B, H, 1, D)``, one per row; return those of all tokens ``(B, H, W, D)``."""
        for tensor, new in zip(self.rows, (key_states, value_states), strict=True):
            tensor[self.row_B, :, self.position_B] = new[:, :, 0]
        keys, values = (tensor[:, :, : self.real_B11W.shape[-1]] for tensor in self.rows)
        return keys, values

    def get_seq_length(self) -> int:
        """Return how many tokens the longest row has."""
        return self.real_B11W.shape[-1] - 1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many keys are looked at, and the offset of the first."""
        del query_length
        return self.real_B11W.shape[-1], 0


class Slots(SlotTable):
    """KV cache slots for ``count`` sequences of ``room`` tokens each.

    ``alone``: each row attends in a call of its own.
    ``at_least``, ``multiple``: a step has so many rows at least, and a multiple of this, empty ones included: kernels
    compute few rows, or the last rows, another way than many.
    ``by_blocks``: read prompts in a way that allows parts, and several together.
    ``shared``: all layers share one memory: for trials of whether rows depend on each other, which need no text.
    """

    block = BLOCK

    def __init__(
        self,
        model: PreTrainedModel,
        count: int,
        room: int,
        *,
        alone: bool = False,
        at_least: int = 1,
        multiple: int = 1,
        by_blocks: bool = False,
        shared: bool = False,
    ) -> None:
        self.model, self.count, self.room = model, count, room
        self.alone, self.at_least, self.multiple, self.by_blocks = alone, at_least, multiple, by_blocks
        self.lengths: list[int] = []
        width = whole_blocks(room)
        # Prompts are read into the last slots; a step is padded with the empty rows before them.
        self._first_reader = -(-count // MOST_ROWS_MORE) * MOST_ROWS_MORE
        self._device = model.get_input_embeddings().weight.device
        # A CPU allocates memory only when it is written to. Without fused attention one prompt is read at a time.
        fused = model.config.get_text_config(decoder=True)._attn_implementation == FUSED
        self.readers = MOST_READ if self._device.type == "cpu" and fused else 1
        count = self._first_reader + self.readers
        layers = [SlotLayer(count, width) for _ in decoder_layers(model)]
        self._layers = layers[:1] * len(layers) if shared else layers
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._decode_cache = Cache(layers=[DecodeLayer(layer) for layer in self._layers])
        # Prefill runs the model's own hooks, which let other work in between two layers.
        self._plain_model = without_hooks(model)

    @property
    def live(self) -> int:
        """How many rows are being decoded."""
        return len(self.lengths)

    @torch.inference_mode()
    def prefill(self, ids: Sequence[int], cached: int = 0) -> Tensor:
        # As ``generate`` begins; tokens are cached in whole blocks, and ``by_blocks`` only.
        if self.by_blocks:
            return self.prefill_together([ids], [cached])[0]
        inputs: dict[str, Any] = {"input_ids": torch.tensor([list(ids)], device=self._device)}
        if self._keeps_logits:
            inputs["logits_to_keep"] = 1
        return self._prefill(inputs, [(0, len(ids))])[0, -1].clone()

    @torch.inference_mode()
    def prefill_together(self, prompts: Sequence[Sequence[int]], cached: Sequence[int]) -> Tensor:
        parts = [(start, len(ids) - start) for ids, start in zip(prompts, cached, strict=True)]
        new_ids = [token for ids, start in zip(prompts, cached, strict=True) for token in ids[start:]]
        positions = [position for start, length in parts for position in range(start, start + length)]
        ends_N = torch.tensor([length for _, length in parts], device=self._device).cumsum(0) - 1
        inputs: dict[str, Any] = {
            "input_ids": torch.tensor([new_ids], device=self._device),
            "position_ids": torch.tensor([positions], device=self._device),
            "attention_plan": BlockPrefill(len(self._layers), parts),
            # Not used by the plan, but without it the model would build a mask.
            "attention_mask": torch.ones((1, 1, 1, 1), dtype=torch.bool, device=self._device),
        }
        if not self._keeps_logits:
            return self._prefill(inputs, parts)[0, ends_N]
        more = max(0, _LEAST_LOGITS - len(parts))
        inputs["logits_to_keep"] = torch.cat([ends_N, ends_N[-1:].expand(more)])
        return self._prefill(inputs, parts)[0, : len(parts)].clone()

    def _prefill(self, inputs: dict[str, Any], parts: Sequence[tuple[int, int]]) -> Tensor:
        cache = Cache(layers=[PrefillLayer(layer, self._first_reader, parts, self.by_blocks) for layer in self._layers])
        with torch.autocast(self._device.type, enabled=False):
            logits: Tensor = self.model(**inputs, **{CACHE: cache}, use_cache=True).logits
        return logits

    def join(self, length: int, reader: int = 0) -> int:
        row = self.live
        for layer in self._layers:
            layer.copy(self._first_reader + reader, row, length)
        self.lengths.append(length)
        return row

    def leave(self, row: int) -> None:
        last = self.live - 1
        if row != last:
            for layer in self._layers:
                layer.copy(last, row, self.lengths[last])
            self.lengths[row] = self.lengths[last]
        del self.lengths[last]

    @torch.inference_mode()
    def step(self, tokens: Sequence[int]) -> Tensor:
        size = max(self.at_least, -(-self.live // self.multiple) * self.multiple)
        padding = [0] * (size - self.live)
        positions = [*self.lengths, *padding]
        plan = RaggedBatch(
            len(self._layers), [position + 1 for position in positions], alone=self.alone, device=self._device
        )
        position_B = torch.tensor(positions, device=self._device)
        row_B = torch.arange(size, device=self._device)
        for layer in self._decode_cache.layers:
            layer.expect(row_B, position_B, plan.real_B11W)
        with torch.autocast(self._device.type, enabled=False):
            logits: Tensor = self._plain_model(
                input_ids=torch.tensor([*tokens, *padding], device=self._device)[:, None],
                position_ids=position_B[:, None],
                attention_mask=plan.real_B11W,
                use_cache=True,
                attention_plan=plan,
                **{CACHE: self._decode_cache},
            ).logits
        self.lengths = [length + 1 for length in self.lengths]
        return logits[: self.live, -1]

    def copy_out(self, first: int, end: int, reader: int = 0) -> KeyValues:
        return [layer.copy_out(self._first_reader + reader, first, end) for layer in self._layers]

    def copy_in(self, layers: KeyValues, first: int, reader: int = 0) -> None:
        for layer, (keys, values) in zip(self._layers, layers, strict=True):
            layer.copy_in(self._first_reader + reader, first, keys, values)

    def fill(self, lengths: Sequence[int], seed: int) -> None:
        self.lengths = list(lengths)
        generator = torch.Generator().manual_seed(seed)
        for layer in dict.fromkeys(self._layers):
            layer.fill(len(self.lengths), generator)

    @property
    def are_alike(self) -> bool:
        """Whether all layers have keys and values of the same shapes, once a prompt was read."""
        return len({tuple(tensor.shape for tensor in layer.both) for layer in self._layers}) == 1

    @property
    def bytes(self) -> int:
        """Memory of keys and values, once a prompt was read."""
        return sum(layer.bytes for layer in dict.fromkeys(self._layers))


def without_hooks(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model with the same tensors, without adapters and attention-plan hooks; bit-identical.

    A step is many small calls, so idle hooks and adapters cost a tenth of it. Where a module's forward was replaced, as
    accelerate does, it is the model itself: that forward would run the children of the original.
    """
    if any("forward" in vars(module) for module in model.modules()):
        return model
    bare = _bare(model, {})
    assert isinstance(bare, PreTrainedModel)
    return bare


def _bare(module: nn.Module, known: dict[nn.Module, nn.Module]) -> nn.Module:
    module = own_module(module)
    if module not in known:
        known[module] = duplicate = copy.copy(module)
        duplicate.__dict__ = dict(vars(module))
        duplicate._forward_hooks = type(module._forward_hooks)(
            (number, hook) for number, hook in module._forward_hooks.items() if not is_stream_hook(hook)
        )
        duplicate._modules = {
            name: None if child is None else _bare(child, known) for name, child in module._modules.items()
        }
    return known[module]
