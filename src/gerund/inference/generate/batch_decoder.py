"""Continuous batching: decode one token per sequence per step; a finished sequence makes room for the next prompt.

A static batch computes as many tokens for each sequence as for the longest. Here nothing waits, and nothing is
padded. It is used where a check has shown that a sequence does not depend on the rest of its batch, and
where there is enough to generate for the check to pay off.
"""

from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import islice

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from gerund.attention.ragged_batch import BLOCK
from gerund.inference.generate.reproducibility import LEAST_READ, check_batching
from gerund.inference.generate.sequence import Fail, SequenceState, advance
from gerund.inference.generate.slots import Kept, Slots, unsupported_reason
from gerund.inference.generate.transformers_loop import CancelFlag, Cancelled
from gerund.inference.tokens import context_length, rotary_limit


class PrefixCache:
    """A bounded store of beginnings."""

    def __init__(self, tokens: int, least: int) -> None:
        self._most, self._least = tokens // BLOCK, max(1, least)
        self._blocks: OrderedDict[bytes, Kept] = OrderedDict()

    def __len__(self) -> int:
        """Return how many tokens are kept."""
        return BLOCK * len(self._blocks)

    def recall(self, slots: Slots, ids: Sequence[int], reader: int = 0) -> int:
        """Put what is known of a prompt's beginning into the slot that it is read into; return how many tokens."""
        found = []
        for name in _names(ids[: max(0, len(ids) - self._least)]):
            kept = self._blocks.get(name)
            if kept is None:
                break
            found.append((name, kept))
        # What others go on from is of more use than what goes on from it.
        for name, _ in reversed(found):
            self._blocks.move_to_end(name)
        if found:
            layers = zip(*(kept for _, kept in found), strict=True)
            slots.recall([_joined(layer) for layer in layers], 0, reader)
        return BLOCK * len(found)

    def keep(self, slots: Slots, ids: Sequence[int], reader: int = 0) -> None:
        """Keep the blocks of a prompt that was read last."""
        names = list(_names(ids))[: self._most]
        for number, name in enumerate(names):
            if name not in self._blocks:
                self._blocks[name] = slots.remember(number * BLOCK, (number + 1) * BLOCK, reader)
        for name in reversed(names):
            self._blocks.move_to_end(name)
        while len(self._blocks) > self._most:
            self._blocks.popitem(last=False)


def _joined(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    if len(pairs) == 1:
        return pairs[0]
    return torch.cat([keys for keys, _ in pairs], dim=1), torch.cat([values for _, values in pairs], dim=1)


def _names(ids: Sequence[int]) -> Iterator[bytes]:
    """Yield the name of each whole block: a hash of all tokens up to its end."""
    so_far = blake2b(digest_size=16)
    for start in range(0, len(ids) - BLOCK + 1, BLOCK):
        so_far.update(array("q", ids[start : start + BLOCK]).tobytes())
        yield so_far.digest()


class BatchDecoder:
    """Rows and their slots."""

    def __init__(self, slots: Slots, prefixes: PrefixCache | None = None, portion: int | None = None) -> None:
        self.slots, self.prefixes, self.portion = slots, prefixes, portion
        self.rows: list[SequenceState] = []
        self._last: list[int] = []  # the token of each row that the model has not read yet

    @property
    def free(self) -> int:
        """How many rows may join."""
        return self.slots.count - len(self.rows)

    def together(self, lengths: Iterable[int], budget: int) -> int:
        """Return how many prompts to read in one pass, of those that wait."""
        most = min(self.free, self.slots.readers if self.slots.by_blocks else 1)
        count = tokens = 0
        for length in islice(lengths, most):
            tokens += length
            if count and (tokens > budget or length < LEAST_READ):
                break
            count += 1
            if length < LEAST_READ:
                break
        return count

    def read(self, prompts: Sequence[Sequence[int]]) -> list[tuple[Tensor, int]]:
        """Read as many prompts as ``together`` says; return each one's logits ``(V,)``, and how much was known."""
        known = [0] * len(prompts)
        if self.prefixes is not None:
            known = [self.prefixes.recall(self.slots, ids, reader) for reader, ids in enumerate(prompts)]
        if len(prompts) == 1:
            logits_PV = self._read_alone(prompts[0], known[0])[None]
        else:
            logits_PV = self.slots.read_together(prompts, known)
        if self.prefixes is not None:
            for reader, ids in enumerate(prompts):
                self.prefixes.keep(self.slots, ids, reader)
        return list(zip(logits_PV, known, strict=True))

    def _read_alone(self, ids: Sequence[int], read: int) -> Tensor:
        while self.portion and self.rows and len(ids) - read >= self.portion + LEAST_READ:
            self.slots.read(ids[: read + self.portion], read)
            read += self.portion
        return self.slots.read(ids, read)

    def begin(
        self, row: SequenceState, length: int, logits_V: Tensor, fail: Fail | None = None, *, reader: int = 0
    ) -> None:
        """Write the first token behind a prompt that was read last; let the row join unless that was all."""
        failed: list[SequenceState] = []

        def note(row: SequenceState, error: Exception) -> None:
            if fail is None:
                raise error
            failed.append(row)
            fail(row, error)

        [token] = advance([row], logits_V[None], note)
        if not row.is_done and not failed:
            self.slots.join(length, reader)
            self.rows.append(row)
            self._last.append(token)

    def step(self, fail: Fail | None = None) -> list[SequenceState]:
        """Write one token into every row; return the rows that are done, which have left."""
        if not self.rows:
            return []
        failed: set[int] = set()

        def note(row: SequenceState, error: Exception) -> None:
            if fail is None:
                raise error
            failed.add(id(row))
            fail(row, error)

        self._last = advance(self.rows, self.slots.step(self._last), note)
        over = [row for row in self.rows if row.is_done or id(row) in failed]
        for row in over:
            self.drop(row)
        return [row for row in over if id(row) not in failed]

    def drop(self, row: SequenceState) -> None:
        """Let a row leave."""
        place = next(place for place, own in enumerate(self.rows) if own is row)
        self.slots.leave(place)
        row, token = self.rows.pop(), self._last.pop()
        if place < len(self.rows):
            self.rows[place], self._last[place] = row, token


HALF = (torch.bfloat16, torch.float16)
# Tokens to write at most, above which it is worth finding out what can be promised.
_WORTHWHILE = 8192
# Rows for each slot; with fewer, hardly any waits for room.
_ROUNDS = 2
# Room of a slot at least. Rooms are powers of 2, so that one check serves many calls.
_LEAST_ROOM = 64


def decode_continuously(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    read: Sequence[tuple[list[int], int]],
    rows: Sequence[SequenceState],
    at_once: int,
    cancelled: CancelFlag | None = None,
) -> bool:
    """Write rows to their ends, as many at a time as there are slots; or do nothing, and return False."""
    if len(rows) < _ROUNDS * at_once or sum(room for _, room in read) < _WORTHWHILE or at_once < 2:
        return False
    if unsupported_reason(model) is not None:
        return False
    longest = max(len(ids) + room for ids, room in read)
    limits = [one for one in (context_length(model.config, tokenizer), rotary_limit(model.config)) if one is not None]
    room = max(longest, min([max(_LEAST_ROOM, 1 << (longest - 1).bit_length()), *limits]))
    found = check_batching(model, tokenizer, at_once, room, recalling=False)
    # In half precision the two likeliest tokens are often as likely to the last bit, so that only equal bits will do.
    good_enough = ("bits of generate",) if model.dtype in HALF else ("bits of generate", "same text under any load")
    if not found.fits or found.promise not in good_enough:
        return False
    _write(BatchDecoder(found.slots(model, at_once, room)), read, rows, cancelled)
    return True


@torch.no_grad()
def _write(
    writers: BatchDecoder,
    read: Sequence[tuple[list[int], int]],
    rows: Sequence[SequenceState],
    cancelled: CancelFlag | None,
) -> None:
    waiting = deque(zip((ids for ids, _ in read), rows, strict=True))
    last: list[int] | None = None
    logits_V = None
    while waiting or writers.rows:
        while waiting and writers.free:
            ids, row = waiting.popleft()
            if ids is not last:
                [(logits_V, _)] = writers.read([ids])
                last = ids
            assert logits_V is not None
            writers.begin(row, len(ids), logits_V)
            if cancelled is not None and cancelled.is_set():
                raise Cancelled
        writers.step()
        if cancelled is not None and cancelled.is_set():
            raise Cancelled
