"""The interface by which an engine decodes a batch of sequences, and trials of it; imports no torch.

Torch or a packed network computes. Trials with random keys and values show whether a row's result depends on others.

Shapes: B rows, T tokens, V vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from gerund.arrays import Array, library_of
from gerund.errors import GerundError
from gerund.inference.generate.config import GenerationConfig
from gerund.inference.generate.sampling import Draws, request_seeds, sample_seed
from gerund.inference.generate.sequence import CancelFlag, Emit, RequestSettings, SequenceState, Vocabulary, room_after
from gerund.packed import LEAST_READ
from gerund.types import Guarantee

KeyValues = list[tuple[Array, Array]]
"""Keys and values ``(key heads, T, head_dim)`` of some tokens, by layer."""


class SlotTable(ABC):
    """The keys and values of sequences that are decoded together, and of the prompts that were read last.

    Attributes:
        count: how many sequences there is room for.
        room: tokens of a sequence.
        readers: prompts of a pass, at most.
        by_blocks: prompts may be read in parts, and several together.
        block: of how many tokens a prompt's parts are multiples, where others have cached its beginning.
        lengths: how many tokens each sequence has.
    """

    count: int
    room: int
    readers: int
    by_blocks: bool
    block: int
    lengths: list[int]

    @abstractmethod
    def prefill(self, ids: Sequence[int], cached: int = 0) -> Array:
        """Read a prompt, ``cached`` tokens of which are there already; return its logits ``(V,)``."""

    def prefill_together(self, prompts: Sequence[Sequence[int]], cached: Sequence[int]) -> Array:
        """Read up to ``readers`` prompts in one pass, by blocks; return their logits ``(prompts, V)``."""
        raise NotImplementedError  # of slots that have one reader

    @abstractmethod
    def join(self, length: int, reader: int = 0) -> int:
        """Copy a prompt of the last prefill into a row; return its number. May be called several times per prompt."""

    @abstractmethod
    def leave(self, row: int) -> None:
        """Free a row. The last row takes its number."""

    @abstractmethod
    def step(self, tokens: Sequence[int]) -> Array:
        """Append one token per row; return the logits of the next tokens ``(rows, V)``."""

    @abstractmethod
    def copy_out(self, first: int, end: int, reader: int = 0) -> KeyValues:
        """Return copies of the keys and values of some tokens of a prompt of the last prefill."""

    @abstractmethod
    def copy_in(self, layers: KeyValues, first: int, reader: int = 0) -> None:
        """Copy keys and values for the next prefill, from token ``first`` on."""

    @abstractmethod
    def fill(self, lengths: Sequence[int], seed: int) -> None:
        """Fill rows of these lengths with random keys and values, for trials."""


@dataclass(frozen=True)
class Reproducibility:
    """How sequences are decoded in a batch, and what that guarantees."""

    fits: bool  # whether slots can hold the model's cache; if not, each sequence is generated alone

    guarantee: Guarantee

    why: str  # how the guarantee was verified, or why there is none

    alone: bool = False  # each row attends in a call of its own

    at_least: int = 1  # a step has so many rows at least

    multiple: int = 1  # the rows of a step are a multiple of this

    recalls: bool = False
    """Read by blocks, a token of a prompt is bit-identical however long the prompt is, however much of its prefix is
    cached, and whatever prompts are read with it."""


@dataclass(frozen=True)
class Decoding(ABC):
    """Decodes the sequences of one model.

    Attributes:
        tokenizer: its tokenizer.
        ends: the tokens that end a text.
        limit: the length of the model's context; None without one.
        reads_alike: whether a prompt is read by blocks as ``generate`` reads it, to the last bit.
    """

    tokenizer: Any
    ends: tuple[int, ...]
    limit: int | None
    reads_alike: ClassVar[bool]

    @property
    def why_no_slots(self) -> str | None:
        """Why slots cannot hold the model's cache; None where nothing is known against it."""
        return None

    @property
    def decodes_prompt(self) -> bool:
        """Whether the decoder begins with the prompt, and not with a token of its own behind an encoder."""
        return True

    @property
    @abstractmethod
    def vocabulary_size(self) -> int:
        """How many tokens have logits."""

    def sequences(
        self, prompts: Sequence[list[int]], settings: GenerationConfig, emit: Emit | None = None
    ) -> list[SequenceState]:
        """Return the ``settings.n`` sequences of each prompt, in order, before anything is generated."""
        request = RequestSettings(Vocabulary(self.tokenizer, self.vocabulary_size, self.ends), settings)
        decodes_prompt = self.decodes_prompt
        limit = self.limit if decodes_prompt else None  # what an encoder reads does not count
        sequences: list[SequenceState] = []
        for ids, seed in zip(prompts, request_seeds(settings.sampling, len(prompts)), strict=True):
            room, first = room_after(len(ids), settings.max_new_tokens, limit), len(sequences)
            for sample in range(settings.n):
                draws = Draws(sample_seed(seed, sample))
                sequences.append(
                    SequenceState(
                        request, ids, room, draws, decodes_prompt=decodes_prompt, index=first + sample, emit=emit
                    )
                )
        return sequences

    @abstractmethod
    def check(self, count: int, room: int) -> Reproducibility:
        """Try how ``count`` slots of ``room`` tokens decode, and what that guarantees."""

    @abstractmethod
    def slots(self, way: Reproducibility, count: int, room: int, *, by_blocks: bool) -> SlotTable:
        """Return slots that decode in this way."""

    @abstractmethod
    def decode(
        self, sequences: Sequence[SequenceState], *, batch_size: int = 16, cancelled: CancelFlag | None = None
    ) -> None:
        """Generate sequences to their ends, ``batch_size`` at a time, without slots of an engine.

        Raises:
            Cancelled: ``cancelled`` was set.
        """


# A prompt that is read in one pass, in parts, and with others: its length, shorter ends, and cached prefixes in blocks.
_LENGTH, _ENDS, _CACHED = 300, (20, 60, 150, 200), (1, 3, 8, 10, 19, 32)


def tried_tokens(count: int, size: int) -> list[int]:
    """Return tokens of a vocabulary to try slots with."""
    return [(17 * position + 5) % size for position in range(count)]


def same_bits(one: Array, other: Array) -> bool:
    """Whether two arrays, or tensors, are equal."""
    return bool(np.array_equal(one, other) if isinstance(one, np.ndarray) else library_of(one).equal(one, other))


def is_steady(slots: SlotTable, size: int, longest: int) -> bool:
    """Whether a row's logits are bit-identical whatever the other rows are and whatever its number is.

    Rows have up to ``longest`` tokens; ``size`` is that of the vocabulary.
    """
    try:
        return longest > 2 and _same_rows(slots, size, longest - 2)
    finally:
        slots.lengths = []


def _same_rows(slots: SlotTable, size: int, most: int) -> bool:
    generator, count = np.random.default_rng(0), slots.count
    tokens = tried_tokens(count, size)
    for trial in range(2):
        lengths = generator.integers(1, most + 1, count).tolist()
        lengths[0], lengths[-1] = min(most, 20), most
        slots.fill(lengths, trial)
        all_BV = slots.step(tokens)
        # Every number of rows that may occur, and with it every place in a product; few come last, since the empty
        # rows of a step write over others.
        for rows in range(count - 1, 0, -1) if trial == 0 else sorted({1, 2, count - 1} - {0, count}, reverse=True):
            slots.lengths = lengths[:rows]
            if not same_bits(slots.step(tokens[:rows]), all_BV[:rows]):
                return False
        slots.fill(lengths, trial)
        order = list(range(count))
        while len(order) > 1:  # rows leave, and the last one takes their place
            slots.leave(0)
            order = [order[-1], *order[1:-1]]
            if len(order) in (1, 2, count - 1):
                before = list(slots.lengths)
                if not same_bits(slots.step([tokens[row] for row in order]), all_BV[order]):
                    return False
                slots.lengths = before
    return True


def recalls(slots: SlotTable, size: int) -> bool:
    """Whether keys, values and logits of block-wise prefill are bit-identical in each way that a prompt may be read."""
    slots.lengths = []
    most = min(_LENGTH, slots.room - 1)
    try:
        return most > slots.block + LEAST_READ and _same_prompts(slots, tried_tokens(most, size))
    except (GerundError, RuntimeError, TypeError, ValueError):
        return False


def _same_prompts(slots: SlotTable, ids: list[int]) -> bool:
    full_V = slots.prefill(ids)
    full = slots.copy_out(0, len(ids))

    def same(length: int, reader: int = 0) -> bool:
        layers = zip(full, slots.copy_out(0, length, reader), strict=True)
        return all(same_bits(array[:, :length], other) for layer in layers for array, other in zip(*layer, strict=True))

    logits = {len(ids): full_V}
    for end in (end for end in _ENDS if end < len(ids)):
        logits[end] = slots.prefill(ids[:end])
        if not same(end):
            return False
    for cached in (blocks * slots.block for blocks in _CACHED if blocks * slots.block + LEAST_READ <= len(ids)):
        slots.prefill(ids[::-1])  # overwrites the slot
        slots.copy_in([(keys[:, :cached], values[:, :cached]) for keys, values in full], 0)
        if not (same_bits(slots.prefill(ids, cached), full_V) and same(len(ids))):
            return False
    if slots.readers == 1:
        return True
    for order in (sorted(logits), sorted(logits, reverse=True)):
        ends = order[: slots.readers]
        together = slots.prefill_together([ids[:end] for end in ends], [0] * len(ends))
        if not all(same_bits(own_V, logits[end]) for own_V, end in zip(together, ends, strict=True)):
            return False
        if not all(same(end, reader) for reader, end in enumerate(ends)):
            return False
    return True
