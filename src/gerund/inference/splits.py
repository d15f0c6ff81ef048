"""Split texts into a prefix and the continuation that is scored, as tokens; imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gerund.errors import TextError
from gerund.inference.tokens import InputFormat, Tokens, tokenize
from gerund.types import Rendered

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Split:
    """Token ids, the position at which the text begins (1 or later), and that of its continuation."""

    ids: list[int]
    text_from: int
    split: int
    lost: int


def split_pairs(tokenizer: PreTrainedTokenizerBase, pairs: Sequence[tuple[str, str]], limit: int | None) -> list[Split]:
    """Return the tokens of prefixes with their continuations, and where these begin.

    ``limit`` is the length of the model's context; see ``likelihood.continuation_logprobs``.
    """
    for index, (_, continuation) in enumerate(pairs):
        if not continuation.strip():
            raise TextError(f"continuation {index} is empty")
    texts = tokenize(tokenizer, [_joined(*pair) for pair in pairs], InputFormat(), offsets=True)
    return [
        _split(tokenizer, tokens, len(prefix), limit)
        for (prefix, _), tokens in zip(pairs, texts, strict=True)
        if tokens is not None
    ]


def _joined(prefix: str, continuation: str) -> str:
    """Join both; after a rendered prefix the control tokens of the continuation are plain text."""
    if not isinstance(prefix, Rendered):
        return prefix + continuation
    end = len(prefix) + len(continuation)
    literal = [*prefix.literal, (len(prefix), end)]
    return Rendered(prefix + continuation, literal=literal, with_specials=prefix.with_specials)


def _split(tokenizer: PreTrainedTokenizerBase, tokens: Tokens, boundary: int, limit: int | None) -> Split:
    """Split a text at a character, and truncate it to the model's context."""
    before = tokens.specials_before
    ids = tokens.ids[: before + len(tokens.offsets)]  # some tokenizers close every text
    place = next(i for i, (start, end) in enumerate(tokens.offsets) if start >= boundary or end > boundary)
    split = before + place
    if not boundary and not before and tokenizer.bos_token_id is not None:
        ids, before, split = [tokenizer.bos_token_id, *ids], 1, 1
    excess = 0 if limit is None else max(0, len(ids) - 1 - limit)
    # Something has to precede the continuation.
    dropped = min(excess, max(0, split - max(1, before)))
    ids = ids[:before] + ids[before + dropped :]
    split -= dropped
    lost = excess - dropped
    ids = ids[: len(ids) - lost]
    return Split(ids, max(1, before), max(1, split), lost)
