"""Slots: keys and values of texts that are written side by side, which join and leave without moving the others.

A slot has room for one text, its tokens at the left. Rows ``0`` to ``live - 1`` are being written; the slot behind all
of them holds a prompt while it is read. What stands behind a row's tokens is left over from others, and is never seen.

Knows: models, their caches, ``SideBySide``. Does not know: what is written, who asked for it.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from gerund.attention.cache_names import CACHE
from gerund.attention.interface import ADDITIVE, FUSED
from gerund.attention.layouts import decoder_layers
from gerund.attention.masked import has_indexer, way_of
from gerund.attention.ragged_batch import STEP, ByBlocks, SideBySide, whole_blocks
from gerund.attention.shared_layer_state import hands_on
from gerund.inference.encode.positions import takes_positions
from gerund.inference.generate import compiled_step
from gerund.inference.generate.preallocated_cache import plain_layers
from gerund.inference.generate.slot_layers import ReadLayer, SlotLayer, WrittenLayer
from gerund.inference.generate.without_hooks import bare
from gerund.models.architectures import is_encoder_decoder

# Rows are filled up to a multiple of this at most.
MOST_ROWS_MORE = 8
# Prompts that are read together at most.
MOST_READ = 4
# Tokens of a pass whose logits are computed at least.
_LEAST_LOGITS = 4
# By layer, keys and values ``(key heads, T, head_dim)`` of some tokens of a text.
Kept = list[tuple[Tensor, Tensor]]


def unfit(model: PreTrainedModel) -> str | None:
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
    """Room for texts that are written side by side.

    Args:
        model: a model that ``unfit`` says nothing against.
        count: how many texts.
        room: tokens of each.
        alone: as in ``SideBySide``.
        at_least: rows of a step at least, empty ones included: some kernels compute few rows another way than many.
        multiple: rows of a step are a multiple of this: some kernels compute the last rows another way than the others.
        compiled: let torch compile the step for so many rows, at least and at most, when it is first done; a step with
            more is done in parts. None leaves it as it is.
        by_blocks: read prompts so that they may be read in parts, and several together.
        shared: all layers have the same room: for trials of whether rows depend on each other, which need no text.
    """

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
        self._writing = Cache(layers=[WrittenLayer(layer) for layer in self._layers])
        # Reading goes through the model's own hooks, which let other work in between two layers.
        self._bare = bare(model)
        self._compiled: Callable[[Tensor, Tensor, SideBySide], Tensor] | None = None
        if compiled:
            self._compiled = compiled_step.compiled(self._one_pass, self._bare, (compiled, whole))

    @property
    def live(self) -> int:
        """How many rows are being written."""
        return len(self.lengths)

    @torch.inference_mode()
    def read(self, ids: Sequence[int], known: int = 0) -> Tensor:
        """Read a prompt into the first slot behind the rows, as ``generate`` begins; return its logits ``(V,)``.

        Args:
            ids: the prompt.
            known: how many of its tokens are there, read before or by ``recall``: whole blocks, and ``by_blocks`` only.
        """
        if self.by_blocks:
            return self.read_together([ids], [known])[0]
        inputs: dict[str, Any] = {"input_ids": torch.tensor([list(ids)], device=self._device)}
        if self._keeps_logits:
            inputs["logits_to_keep"] = 1
        return self._read(inputs, [(0, len(ids))])[0, -1].clone()

    @torch.inference_mode()
    def read_together(self, prompts: Sequence[Sequence[int]], known: Sequence[int]) -> Tensor:
        """Read prompts in one pass, by blocks, each into a slot of its own behind the rows.

        Args:
            prompts: as many as there are ``readers`` at most.
            known: as in ``read``, of each.

        Returns:
            Their logits ``(prompts, V)``.
        """
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
        own = Cache(layers=[ReadLayer(layer, self._reading, parts, self.by_blocks) for layer in self._layers])
        with torch.autocast(self._device.type, enabled=False):
            logits: Tensor = self.model(**inputs, **{CACHE: own}, use_cache=True).logits
        return logits

    def join(self, length: int, reader: int = 0) -> int:
        """Make a row of a prompt that was read last; return its number. It may be done several times.

        Args:
            length: its tokens.
            reader: which of those that were read together.
        """
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
