"""Many texts, as many at a time as a batch has: one that ends makes room for the next ("continuous batching").

A batch that is written to its end computes as many tokens for each text as for the longest one. Here nothing waits, and
nothing is padded. It is done where it was verified that a text does not depend on what is written beside it, and where
there is enough to write that the check is soon earned back.

Knows: rows, slots, reproducibility. Does not know: prompts as texts, settings.
"""

from collections import deque
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from gerund.inference.generate.reproducibility import check_batching
from gerund.inference.generate.rows import Row
from gerund.inference.generate.slot_writers import Writers
from gerund.inference.generate.slots import unfit
from gerund.inference.generate.transformers_loop import Asked, Cancelled
from gerund.inference.tokens import context_length, rotary_limit

HALF = (torch.bfloat16, torch.float16)
# Tokens to write at most, above which it is worth finding out what can be promised.
_WORTHWHILE = 8192
# Rows for each slot; with fewer, hardly any waits for room.
_ROUNDS = 2
# Room of a slot at least. Rooms are powers of 2, so that one check serves many calls.
_LEAST_ROOM = 64


def write_in_turn(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    read: Sequence[tuple[list[int], int]],
    rows: Sequence[Row],
    at_once: int,
    cancelled: Asked | None = None,
) -> bool:
    """Write rows to their ends, as many at a time as there are slots; or do nothing, and return False.

    Args:
        model: the language model.
        tokenizer: its tokenizer.
        read: for each row its prompt, and how many tokens it may have. Rows of one prompt stand together.
        rows: the rows.
        at_once: rows in one pass.
        cancelled: ends the work within a token once it is set.

    Raises:
        Cancelled: ``cancelled`` was set before the end.
    """
    if len(rows) < _ROUNDS * at_once or sum(room for _, room in read) < _WORTHWHILE or at_once < 2:
        return False
    if unfit(model) is not None:
        return False
    longest = max(len(ids) + room for ids, room in read)
    limits = [one for one in (context_length(model.config, tokenizer), rotary_limit(model.config)) if one is not None]
    room = max(longest, min([max(_LEAST_ROOM, 1 << (longest - 1).bit_length()), *limits]))
    found = check_batching(model, tokenizer, at_once, room, recalling=False)
    # In half precision the two likeliest tokens are often as likely to the last bit, so that only equal bits will do.
    good_enough = ("bits of generate",) if model.dtype in HALF else ("bits of generate", "same text under any load")
    if not found.fits or found.promise not in good_enough:
        return False
    _write(Writers(found.slots(model, at_once, room)), read, rows, cancelled)
    return True


@torch.no_grad()
def _write(
    writers: Writers, read: Sequence[tuple[list[int], int]], rows: Sequence[Row], cancelled: Asked | None
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
