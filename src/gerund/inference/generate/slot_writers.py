"""Rows that are written side by side in slots: each gets a token a step; who is done makes room for the next.

Knows: slots, rows, beginnings that are kept. Does not know: who asked for a text, what else the model does.
"""

from collections.abc import Iterable, Sequence
from itertools import islice

from torch import Tensor

from gerund.inference.generate.prefixes import Prefixes
from gerund.inference.generate.reproducibility import LEAST_READ
from gerund.inference.generate.rows import Fail, Row, advance
from gerund.inference.generate.slots import Slots


class Writers:
    """Rows and their slots.

    Args:
        slots: the slots.
        prefixes: beginnings of prompts that are kept; None keeps none.
        portion: tokens of a prompt that are read at a time while rows are being written; None reads it at once.
    """

    def __init__(self, slots: Slots, prefixes: Prefixes | None = None, portion: int | None = None) -> None:
        self.slots, self.prefixes, self.portion = slots, prefixes, portion
        self.rows: list[Row] = []
        self._last: list[int] = []  # the token of each row that the model has not read yet

    @property
    def free(self) -> int:
        """How many rows may join."""
        return self.slots.count - len(self.rows)

    def together(self, lengths: Iterable[int], budget: int) -> int:
        """Return how many prompts to read in one pass, of those that wait.

        Args:
            lengths: their tokens, in their order.
            budget: tokens that several may have together.
        """
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

    def begin(self, row: Row, length: int, logits_V: Tensor, fail: Fail | None = None, *, reader: int = 0) -> None:
        """Write the first token behind a prompt that was read last; let the row join unless that was all.

        Args:
            row: a row of that prompt.
            length: tokens of the prompt.
            logits_V: what reading it gave.
            fail: as for ``advance``.
            reader: which of those that were read together.
        """
        failed: list[Row] = []

        def note(row: Row, error: Exception) -> None:
            if fail is None:
                raise error
            failed.append(row)
            fail(row, error)

        [token] = advance([row], logits_V[None], note)
        if not row.is_done and not failed:
            self.slots.join(length, reader)
            self.rows.append(row)
            self._last.append(token)

    def step(self, fail: Fail | None = None) -> list[Row]:
        """Write one token into every row; return the rows that are done, which have left.

        Args:
            fail: as for ``advance``; a row that failed has left.
        """
        if not self.rows:
            return []
        failed: set[int] = set()

        def note(row: Row, error: Exception) -> None:
            if fail is None:
                raise error
            failed.add(id(row))
            fail(row, error)

        self._last = advance(self.rows, self.slots.step(self._last), note)
        over = [row for row in self.rows if row.is_done or id(row) in failed]
        for row in over:
            self.drop(row)
        return [row for row in over if id(row) not in failed]

    def drop(self, row: Row) -> None:
        """Let a row leave."""
        place = next(place for place, own in enumerate(self.rows) if own is row)
        self.slots.leave(place)
        row, token = self.rows.pop(), self._last.pop()
        if place < len(self.rows):
            self.rows[place], self._last[place] = row, token
