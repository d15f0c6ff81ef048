"""Incremental detokenization with stop strings: never half a character, never part of a stop string."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from threading import Lock
from types import MappingProxyType
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from gerund.models.library_calls import without_panics

if TYPE_CHECKING:
    from transformers import AddedToken, PreTrainedTokenizerBase

# Enough tokens of the prompt to decode what follows them as it reads there.
TAIL = 6
NOTHING: Mapping[int, str] = MappingProxyType({})
# Decoded from a character whose other bytes are still to come.
_PARTIAL = "\ufffd"


def decoded(
    tokenizer: PreTrainedTokenizerBase,
    ids: Sequence[int],
    *,
    skip_special_tokens: bool = True,
    spelled: Mapping[int, str] = NOTHING,
) -> str:
    """Return the text of token ids; ``spelled`` are control tokens that are not skipped."""
    place = next((place for place, token in enumerate(ids) if token in spelled), None) if spelled else None
    if place is not None:
        before, after = (
            decoded(tokenizer, part, skip_special_tokens=skip_special_tokens, spelled=spelled)
            for part in (ids[:place], ids[place + 1 :])
        )
        return before + spelled[ids[place]] + after
    with without_panics("the model's tokenizer fails on token ids"):
        text: str = tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
    return text


def continuation_text(
    tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], ids: Sequence[int], spelled: Mapping[int, str] = NOTHING
) -> str:
    """Decode ``ids`` as they read after the prompt, without special tokens except those ``spelled``."""
    return text_behind(tokenizer, prompt, ids, skip_special_tokens=True, spelled=spelled)


def text_behind(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Sequence[int],
    ids: Sequence[int],
    *,
    skip_special_tokens: bool = False,
    spelled: Mapping[int, str] = NOTHING,
) -> str:
    """Decode ``ids`` as they read after the prompt: on their own, many tokenizers would drop their first space."""
    tail = list(prompt[-TAIL:])
    before = decoded(tokenizer, tail, skip_special_tokens=skip_special_tokens, spelled=spelled)
    together = decoded(tokenizer, [*tail, *ids], skip_special_tokens=skip_special_tokens, spelled=spelled)
    return together[len(before) :]


class TextTail:
    """Decode tokens one by one, and return text as soon as it is certain.

    Text that may be the beginning of a stop string is held back. The text ends before the first complete stop string
    (after it with ``includes_stop``), the longest of those that are complete at the same character.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt: Sequence[int],
        stop: Sequence[str] = (),
        *,
        includes_stop: bool = False,
        spelled: Mapping[int, str] = NOTHING,
    ) -> None:
        self._tokenizer, self._spelled = tokenizer, spelled
        self._ids = list(prompt[-TAIL:])
        self._start, self._read = 0, len(self._ids)
        self._stop, self._includes_stop = stop, includes_stop
        self._given = self._searched_from = 0
        self.text = ""
        self.stopped: str | None = None

    def put(self, token: int, *, may_stop: bool = True) -> str:
        """Append a token; return the new certain text. Without ``may_stop``, stop strings here are ignored."""
        self._ids.append(token)
        return self._take(last=False, may_stop=may_stop)

    def end(self) -> str:
        """Return the text that was held back: there are no more tokens."""
        return self._take(last=True)

    def _take(self, *, last: bool, may_stop: bool = True) -> str:
        if self.stopped is not None:
            return ""
        before = decoded(self._tokenizer, self._ids[self._start : self._read], spelled=self._spelled)
        now = decoded(self._tokenizer, self._ids[self._start :], spelled=self._spelled)
        if len(now) > len(before) and (last or not now.endswith(_PARTIAL)):
            known = len(self.text)
            self.text += now[len(before) :]
            self._start, self._read = self._read, len(self._ids)
            if may_stop:
                self._look_for_stop(known)
        if not may_stop:
            self._searched_from = len(self.text)
        certain = len(self.text)
        if self.stopped is None and not last:
            certain -= max((overlap(self.text[self._searched_from :], stop) for stop in self._stop), default=0)
        piece = self.text[self._given : certain]
        self._given = max(self._given, certain)
        return piece

    def _look_for_stop(self, known: int) -> None:
        """End the text at the first complete stop string; up to ``known`` there is none."""
        matches = []
        for stop in self._stop:
            place = self.text.find(stop, max(self._searched_from, known - len(stop) + 1))
            if place >= 0:
                matches.append((place + len(stop), place, stop))
        if matches:
            end, place, self.stopped = min(matches)
            self.text = self.text[: end if self._includes_stop else place]


def overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of a text may begin a stop string.

    >>> overlap("He said: EN", "END")
    2
    """
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)


def token_bytes(tokenizer: PreTrainedTokenizerBase, token: int) -> bytes:
    """Return the bytes of a token, the space before a word included; none for unused ids."""
    return _spelled(tokenizer, token, tokenizer.added_tokens_decoder)


def vocabulary_bytes(tokenizer: PreTrainedTokenizerBase, size: int) -> list[bytes]:
    """Return ``token_bytes`` of the first ``size`` tokens; it takes up to a second, so the result is cached."""
    with _lock:
        known = _vocabularies.get(tokenizer)
        if known is None or known[0] != (size, len(tokenizer)):
            added = tokenizer.added_tokens_decoder
            every = [_spelled(tokenizer, token, added) for token in range(size)]
            known = _vocabularies[tokenizer] = (size, len(tokenizer)), every
        return known[1]


def _spelled(tokenizer: PreTrainedTokenizerBase, token: int, added_tokens: Mapping[int, AddedToken]) -> bytes:
    piece = tokenizer.convert_ids_to_tokens(token)
    if piece is None:  # more rows in the model than tokens in the vocabulary
        return b""
    added = added_tokens.get(token)
    if added is not None:
        return b"" if added.special else piece.encode("utf-8", "replace")
    if _is_byte_level(tokenizer):
        return bytes(_bytes_by_letter().get(letter, ord("?")) for letter in piece)
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes([int(piece[3:5], 16)])
    return str(piece).replace("\u2581", " ").encode("utf-8", "replace")


def _is_byte_level(tokenizer: PreTrainedTokenizerBase) -> bool:
    if tokenizer not in _byte_level:
        decoder = tokenizer.backend_tokenizer.decoder if tokenizer.is_fast else None
        state = "" if decoder is None else json.dumps(json.loads(decoder.__getstate__()))
        _byte_level[tokenizer] = "ByteLevel" in state
    return _byte_level[tokenizer]


_byte_level: WeakKeyDictionary[PreTrainedTokenizerBase, bool] = WeakKeyDictionary()
_lock = Lock()
_vocabularies: WeakKeyDictionary[PreTrainedTokenizerBase, tuple[tuple[int, int], list[bytes]]] = WeakKeyDictionary()


@cache
def _bytes_by_letter() -> dict[str, int]:
    """Return the bytes of GPT-2's letters: printable bytes are themselves, the others are letters from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    rest = [byte for byte in range(256) if byte not in set(printable)]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(256 + place): byte for place, byte in enumerate(rest)}
