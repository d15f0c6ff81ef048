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
from gerund.inference.generate.sequence import CancelFlag, Cancelled, Fail, SequenceState, advance
from gerund.inference.generate.slots import KeyValues, Slots, unsupported_reason
from gerund.inference.tokens import context_length, rotary_limit

HALF = (torch.bfloat16, torch.float16)
# Tokens to generate at most, above which the reproducibility check pays off.
_WORTHWHILE = 8192
# Sequences per slot; with fewer, hardly any waits for a slot.
_ROUNDS = 2
# Least size of a slot in tokens. Sizes are powers of 2, so that one check serves many calls.
_LEAST_ROOM = 64


class PrefixCache:
    """A bounded LRU cache of prompt prefixes.

    Prefixes are cached in blocks of tokens, each keyed by a hash of all tokens up to its end; so prompts share the
    blocks of their common prefix. At least ``least`` tokens of a prompt are always read.
    """

    def __init__(self, tokens: int, least: int) -> None:
        self._most, self._least = tokens // BLOCK, max(1, least)
        self._blocks: OrderedDict[bytes, KeyValues] = OrderedDict()

    def __len__(self) -> int:
        """Return how many tokens are cached."""
        return BLOCK * len(self._blocks)

    def restore(self, slots: Slots, ids: Sequence[int], reader: int = 0) -> int:
        """Copy the cached prefix of a prompt into the slot that will read it; return its number of tokens."""
        hits = []
        for key in _block_keys(ids[: max(0, len(ids) - self._least)]):
            block = self._blocks.get(key)
            if block is None:
                break
            hits.append((key, block))
        # Reversed: a block is useless without the blocks before it, so those must be evicted last.
        for key, _ in reversed(hits):
            self._blocks.move_to_end(key)
        if hits:
            layers = [tuple(zip(*layer, strict=True)) for layer in zip(*(block for _, block in hits), strict=True)]
            slots.copy_in([(torch.cat(keys, dim=1), torch.cat(values, dim=1)) for keys, values in layers], 0, reader)
        return BLOCK * len(hits)

    def store(self, slots: Slots, ids: Sequence[int], reader: int = 0) -> None:
        """Cache the blocks of the prompt that was read last."""
        keys = list(_block_keys(ids))[: self._most]
        for number, key in enumerate(keys):
            if key not in self._blocks:
                self._blocks[key] = slots.copy_out(number * BLOCK, (number + 1) * BLOCK, reader)
        for key in reversed(keys):
            self._blocks.move_to_end(key)
        while len(self._blocks) > self._most:
            self._blocks.popitem(last=False)


def _block_keys(ids: Sequence[int]) -> Iterator[bytes]:
    hash_ = blake2b(digest_size=16)
    for start in range(0, len(ids) - BLOCK + 1, BLOCK):
        hash_.update(array("q", ids[start : start + BLOCK]).tobytes())
        yield hash_.digest()


class BatchDecoder:
    """Sequences and their slots.

    While sequences are being decoded, prompts are read ``portion`` tokens at a time; None reads them in one pass.
    """

    def __init__(self, slots: Slots, prefixes: PrefixCache | None = None, portion: int | None = None) -> None:
        self.slots, self.prefixes, self.portion = slots, prefixes, portion
        self.sequences: list[SequenceState] = []
        self._last: list[int] = []  # the token of each sequence that the model has not read yet

    @property
    def free(self) -> int:
        """How many sequences may join."""
        return self.slots.count - len(self.sequences)

    def prefill_count(self, lengths: Iterable[int], budget: int) -> int:
        """Return how many of the waiting prompts to read in one pass; several may have ``budget`` tokens together."""
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

    def prefill(self, prompts: Sequence[Sequence[int]]) -> list[tuple[Tensor, int]]:
        """Read ``prefill_count`` prompts; return the logits ``(V,)`` of each, and how many tokens were cached."""
        cached = [0] * len(prompts)
        if self.prefixes is not None:
            cached = [self.prefixes.restore(self.slots, ids, reader) for reader, ids in enumerate(prompts)]
        if len(prompts) == 1:
            logits_PV = self._prefill_in_portions(prompts[0], cached[0])[None]
        else:
            logits_PV = self.slots.prefill_together(prompts, cached)
        if self.prefixes is not None:
            for reader, ids in enumerate(prompts):
                self.prefixes.store(self.slots, ids, reader)
        return list(zip(logits_PV, cached, strict=True))

    def _prefill_in_portions(self, ids: Sequence[int], start: int) -> Tensor:
        while self.portion and self.sequences and len(ids) - start >= self.portion + LEAST_READ:
            self.slots.prefill(ids[: start + self.portion], start)
            start += self.portion
        return self.slots.prefill(ids, start)

    def begin(self, sequence: SequenceState, logits_V: Tensor, fail: Fail | None = None, *, reader: int = 0) -> None:
        """Generate the first token after a prompt that was read last; the sequence joins unless it is done."""
        tokens, failed = self._advance([sequence], logits_V[None], fail)
        if not sequence.is_done and not failed:
            self.slots.join(len(sequence.ids), reader)
            self.sequences.append(sequence)
            self._last += tokens

    def step(self, fail: Fail | None = None) -> list[SequenceState]:
        """Generate a token for each sequence; return those that are done. They have left, and those that failed too."""
        if not self.sequences:
            return []
        self._last, failed = self._advance(self.sequences, self.slots.step(self._last), fail)
        ended = [sequence for sequence in self.sequences if sequence.is_done or id(sequence) in failed]
        for sequence in ended:
            self.drop(sequence)
        return [sequence for sequence in ended if id(sequence) not in failed]

    def drop(self, sequence: SequenceState) -> None:
        """Remove a sequence; the last one takes its slot."""
        row = next(row for row, other in enumerate(self.sequences) if other is sequence)
        self.slots.leave(row)
        last, token = self.sequences.pop(), self._last.pop()
        if row < len(self.sequences):
            self.sequences[row], self._last[row] = last, token

    def _advance(
        self, sequences: Sequence[SequenceState], logits_BV: Tensor, fail: Fail | None
    ) -> tuple[list[int], set[int]]:
        """Return the next tokens, and the ids of the sequences that failed."""
        failed: set[int] = set()

        def report(sequence: SequenceState, error: Exception) -> None:
            if fail is None:
                raise error
            failed.add(id(sequence))
            fail(sequence, error)

        return advance(sequences, logits_BV, report), failed


def decode_continuously(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sequences: Sequence[SequenceState],
    batch_size: int,
    cancelled: CancelFlag | None = None,
) -> bool:
    """Generate sequences to their ends, ``batch_size`` at a time, those of one prompt next to each other.

    Returns False without doing anything where it is not worthwhile, or not verified to be reproducible.
    """
    tokens = sum(sequence.room for sequence in sequences)
    if len(sequences) < _ROUNDS * batch_size or tokens < _WORTHWHILE or batch_size < 2:
        return False
    if unsupported_reason(model) is not None:
        return False
    longest = max(len(sequence.ids) + sequence.room for sequence in sequences)
    limits = (context_length(model.config, tokenizer), rotary_limit(model.config))
    power_of_2 = max(_LEAST_ROOM, 1 << (longest - 1).bit_length())
    room = max(longest, min([power_of_2, *(limit for limit in limits if limit is not None)]))
    check = check_batching(model, tokenizer, batch_size, room, recalling=False)
    # In half precision the two most likely tokens are often equally likely to the last bit, so only equal bits will do.
    good_enough = ("bits of generate",) if model.dtype in HALF else ("bits of generate", "same text under any load")
    if not check.fits or check.guarantee not in good_enough:
        return False
    _decode(BatchDecoder(check.slots(model, batch_size, room)), sequences, cancelled)
    return True


@torch.no_grad()
def _decode(decoder: BatchDecoder, sequences: Sequence[SequenceState], cancelled: CancelFlag | None) -> None:
    waiting = deque(sequences)
    read: list[int] | None = None
    logits_V: Tensor | None = None
    while waiting or decoder.sequences:
        while waiting and decoder.free:
            sequence = waiting.popleft()
            if sequence.ids is not read:  # sequences of one prompt share it
                [(logits_V, _)] = decoder.prefill([sequence.ids])
                read = sequence.ids
            assert logits_V is not None
            decoder.begin(sequence, logits_V)
            if cancelled is not None and cancelled.is_set():
                raise Cancelled
        decoder.step()
        if cancelled is not None and cancelled.is_set():
            raise Cancelled
