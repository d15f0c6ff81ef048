"""The interface by which an engine decodes a batch of sequences, in torch or by a packed network; imports no torch.

Shapes: B rows, T tokens, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from gerund.arrays import Array
from gerund.inference.generate.config import GenerationConfig
from gerund.inference.generate.sequence import CancelFlag, Emit, RequestSettings, SequenceState
from gerund.types import Guarantee

KeyValues = list[tuple[Array, Array]]
"""Keys and values ``(key heads, T, head_dim)`` of some tokens, by layer."""


class SlotTable(Protocol):
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

    def prefill(self, ids: Sequence[int], cached: int = 0) -> Array:
        """Read a prompt, ``cached`` tokens of which are there already; return its logits ``(V,)``."""

    def prefill_together(self, prompts: Sequence[Sequence[int]], cached: Sequence[int]) -> Array:
        """Read up to ``readers`` prompts in one pass; return their logits ``(prompts, V)``."""

    def join(self, length: int, reader: int = 0) -> int:
        """Copy a prompt of the last prefill into a row; return its number. May be called several times per prompt."""

    def leave(self, row: int) -> None:
        """Free a row. The last row takes its number."""

    def step(self, tokens: Sequence[int]) -> Array:
        """Append one token per row; return the logits of the next tokens ``(rows, V)``."""

    def copy_out(self, first: int, end: int, reader: int = 0) -> KeyValues:
        """Return copies of the keys and values of some tokens of a prompt of the last prefill."""

    def copy_in(self, layers: KeyValues, first: int, reader: int = 0) -> None:
        """Copy keys and values for the next prefill, from token ``first`` on."""


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


class Decoding(Protocol):
    """Decodes the sequences of one model."""

    @property
    def reads_alike(self) -> bool:
        """Whether a prompt is read by blocks as ``generate`` reads it, to the last bit."""

    @property
    def why_no_slots(self) -> str | None:
        """Why slots cannot hold the model's cache; None where nothing is known against it."""

    def request_settings(self, settings: GenerationConfig) -> RequestSettings:
        """Resolve settings for the model."""

    def new_sequences(
        self, request: RequestSettings, ids: list[int], seed: int, *, index: int = 0, emit: Emit | None = None
    ) -> list[SequenceState]:
        """Return the ``settings.n`` sequences of a prompt, numbered from ``index``, before anything is generated."""

    def check(self, count: int, room: int) -> Reproducibility:
        """Try how ``count`` slots of ``room`` tokens decode, and what that guarantees."""

    def slots(self, way: Reproducibility, count: int, room: int, *, by_blocks: bool) -> SlotTable:
        """Return slots that decode in this way."""

    def decode(
        self, sequences: Sequence[SequenceState], *, batch_size: int = 16, cancelled: CancelFlag | None = None
    ) -> None:
        """Generate sequences to their ends, without slots of an engine."""
