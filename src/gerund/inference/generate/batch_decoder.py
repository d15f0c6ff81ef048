"""Continuous batching: decode one token per sequence per step; a finished sequence makes room for the next prompt.

A static batch computes as many tokens for each sequence as for the longest. Here nothing waits, and nothing is
padded. Who computes keeps the slots, in tensors or arrays (``decoding.SlotTable``); imports no torch.
"""

from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import islice

from gerund.arrays import Array, library_of
from gerund.inference.generate.decoding import KeyValues, SlotTable
from gerund.inference.generate.sequence import CancelFlag, Cancelled, Fail, SequenceState, advance
from gerund.packed import LEAST_READ


class PrefixCache:
    """A bounded LRU cache of prompt prefixes.

    Prefixes are cached in blocks of ``block`` tokens, each keyed by a hash of all tokens up to its end; so prompts
    share the blocks of their common prefix. At least ``least`` tokens of a prompt are always read.
    """

    def __init__(self, tokens: int, least: int, block: int) -> None:
        self._most, self._least, self._block = tokens // block, max(1, least), block
        self._blocks: OrderedDict[bytes, KeyValues] = OrderedDict()

    def __len__(self) -> int:
        """Return how many tokens are cached."""
        return self._block * len(self._blocks)

    def restore(self, slots: SlotTable, ids: Sequence[int], reader: int = 0) -> int:
        """Copy the cached prefix of a prompt into the slot that will read it; return its number of tokens."""
        hits = []
        for key in self._keys(ids[: max(0, len(ids) - self._least)]):
            block = self._blocks.get(key)
            if block is None:
                break
            hits.append((key, block))
        # Reversed: a block is useless without the blocks before it, so those must be evicted last.
        for key, _ in reversed(hits):
            self._blocks.move_to_end(key)
        if hits:
            layers = [tuple(zip(*layer, strict=True)) for layer in zip(*(block for _, block in hits), strict=True)]
            join = library_of(layers[0][0][0]).concatenate
            slots.copy_in([(join(keys, axis=1), join(values, axis=1)) for keys, values in layers], 0, reader)
        return self._block * len(hits)

    def store(self, slots: SlotTable, ids: Sequence[int], reader: int = 0) -> None:
        """Cache the blocks of the prompt that was read last, unless few tokens were read, which take other kernels."""
        keys = list(self._keys(ids))[: self._most] if len(ids) >= self._least else []
        for number, key in enumerate(keys):
            if key not in self._blocks:
                self._blocks[key] = slots.copy_out(number * self._block, (number + 1) * self._block, reader)
        for key in reversed(keys):
            self._blocks.move_to_end(key)
        while len(self._blocks) > self._most:
            self._blocks.popitem(last=False)

    def _keys(self, ids: Sequence[int]) -> Iterator[bytes]:
        hash_ = blake2b(digest_size=16)
        for start in range(0, len(ids) - self._block + 1, self._block):
            hash_.update(array("q", ids[start : start + self._block]).tobytes())
            yield hash_.digest()


class BatchDecoder:
    """Sequences and their slots.

    While sequences are being decoded, prompts are read ``portion`` tokens at a time; None reads them in one pass.
    """

    def __init__(self, slots: SlotTable, prefixes: PrefixCache | None = None, portion: int | None = None) -> None:
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

    def prefill(self, prompts: Sequence[Sequence[int]]) -> list[tuple[Array, int]]:
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

    def _prefill_in_portions(self, ids: Sequence[int], start: int) -> Array:
        while self.portion and self.sequences and len(ids) - start >= self.portion + LEAST_READ:
            self.slots.prefill(ids[: start + self.portion], start)
            start += self.portion
        return self.slots.prefill(ids, start)

    def begin(self, sequence: SequenceState, logits_V: Array, fail: Fail | None = None, *, reader: int = 0) -> None:
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
        self, sequences: Sequence[SequenceState], logits_BV: Array, fail: Fail | None
    ) -> tuple[list[int], set[int]]:
        """Return the next tokens, and the ids of the sequences that failed."""
        failed: set[int] = set()

        def report(sequence: SequenceState, error: Exception) -> None:
            if fail is None:
                raise error
            failed.add(id(sequence))
            fail(sequence, error)

        return advance(sequences, logits_BV, report), failed


def decode_all(decoder: BatchDecoder, sequences: Sequence[SequenceState], cancelled: CancelFlag | None) -> None:
    """Generate sequences to their ends, those of one prompt next to each other."""
    waiting = deque(sequences)
    read: list[int] | None = None
    logits_V: Array | None = None
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
