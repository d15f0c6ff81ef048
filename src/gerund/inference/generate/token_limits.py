"""Limit which tokens may be generated: allowed token ids, bad words, and a minimum length.

The limits hold for each token by itself, whatever chooses among those that are left, so that sampling, greedy choice,
forms and batches need not know of them.

Knows: ``GenerationConfig``, what tokens spell. Does not know: models, how a token is chosen.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence
from itertools import accumulate
from threading import Lock
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from gerund.errors import ConfigError
from gerund.inference.generate.config import GenerationConfig
from gerund.inference.generate.detokenizing import vocabulary_bytes

_LIMITING = ("allowed_token_ids", "bad_words", "min_tokens")


class TokenLimits:
    """The limits of one request.

    Args:
        settings: what is asked for.
        tokenizer: the tokenizer.
        size: how many tokens the model chooses from.
        ends: the tokens that end a text.

    Raises:
        ConfigError: no token may be the first one.
    """

    def __init__(
        self, settings: GenerationConfig, tokenizer: PreTrainedTokenizerBase, size: int, ends: Collection[int]
    ) -> None:
        self.least = settings.min_tokens
        self.words = tuple(word.encode("utf-8", "replace") for word in settings.bad_words)
        self.vocabulary = _spelled_vocabulary(tokenizer, size) if self.words else None
        # By the beginning of a word that a text ends in, what must not follow.
        self.rests: dict[bytes, list[bytes]] = {}
        self.always_V = torch.ones(size, dtype=torch.bool)
        if settings.allowed_token_ids is not None:
            self.always_V.zero_()[list(settings.allowed_token_ids)] = True
        for word in self.words:
            assert self.vocabulary is not None
            self.always_V[self.vocabulary.containing(word)] = False
            for length in range(1, len(word)):
                self.rests.setdefault(word[:length], []).append(word[length:])
        self.early_V = self.always_V.clone()
        self.early_V[list(ends)] = False
        self._names = [name for name in _LIMITING if getattr(settings, name)]
        if not (self.early_V if self.least else self.always_V).any():
            raise self.nothing_left()

    @classmethod
    def of(
        cls, settings: GenerationConfig, tokenizer: PreTrainedTokenizerBase, size: int, ends: Collection[int]
    ) -> "TokenLimits | None":
        """Return the limits of a request; None where it has none."""
        if not (settings.min_tokens or settings.bad_words or settings.allowed_token_ids):
            return None
        return cls(settings, tokenizer, size, ends)

    def nothing_left(self, *, has_form: bool = False) -> ConfigError:
        """Return the error for limits that allow no token."""
        every = [*self._names, *(["the form of the text"] if has_form else [])]
        verb = "leave" if len(every) > 1 else "leaves"
        return ConfigError(f"{' and '.join(every)} {verb} no token that could follow; allow more")

    def follower(self) -> "LimitFollower":
        """Return the limits of one text."""
        return LimitFollower(self)


class LimitFollower:
    """The limits of one text as it grows.

    Args:
        limits: those of its request.
    """

    def __init__(self, limits: TokenLimits) -> None:
        self._limits, self._count, self._end = limits, 0, b""
        # As much of the end of the text as may begin a bad word.
        self._longest = max((len(word) for word in limits.words), default=1) - 1

    def allowed(self, form_V: Tensor | None) -> Tensor:
        """Return which tokens may follow ``(V,)`` bool.

        Args:
            form_V: those that the form of the text allows; None without a form.

        Raises:
            ConfigError: none may.
        """
        own = self._limits
        is_early = self._count < own.least
        allowed_V = own.early_V if is_early else own.always_V
        banned = self._banned()
        if banned:
            allowed_V = allowed_V.clone()
            allowed_V[banned] = False
        if form_V is None:
            found_V = allowed_V
        else:
            found_V = allowed_V & form_V
            if is_early and not found_V.any():
                # The form is complete: it ends the text, however short.
                found_V = own.always_V & ~own.early_V & form_V
        if not found_V.any():
            raise own.nothing_left(has_form=form_V is not None)
        return found_V

    def _banned(self) -> list[int]:
        """Return the tokens that would complete a bad word which the text has begun."""
        vocabulary, rests, end = self._limits.vocabulary, self._limits.rests, self._end
        if vocabulary is None:
            return []
        begun = (rests.get(end[at:], ()) for at in range(len(end)))
        return [token for found in begun for rest in found for token in vocabulary.starting(rest)]

    def put(self, token: int) -> None:
        """Take the token that was chosen."""
        self._count += 1
        vocabulary = self._limits.vocabulary
        if self._longest and vocabulary is not None:
            self._end = (self._end + vocabulary.pieces[token])[-self._longest :]


class SpelledVocabulary:
    """What all tokens spell, and quick answers to which of them contain something.

    Args:
        pieces: the bytes of each token.
    """

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = pieces
        self._joined = b"".join(pieces)
        self._starts = [0, *accumulate(map(len, pieces))]
        self._order = sorted(range(len(pieces)), key=lambda token: pieces[token])
        self._sorted = [pieces[token] for token in self._order]

    def containing(self, word: bytes) -> list[int]:
        """Return the tokens that spell a word, alone or with more."""
        found, at = [], self._joined.find(word)
        while at >= 0:
            token = bisect_right(self._starts, at) - 1
            end = self._starts[token + 1]
            is_inside = at + len(word) <= end
            if is_inside:
                found.append(token)
            at = self._joined.find(word, end if is_inside else at + 1)
        return found

    def starting(self, rest: bytes) -> list[int]:
        """Return the tokens whose spelling starts so."""
        first = bisect_left(self._sorted, rest)
        end = bisect_left(self._sorted, True, lo=first, key=lambda piece: not piece.startswith(rest))
        return self._order[first:end]


def _spelled_vocabulary(tokenizer: PreTrainedTokenizerBase, size: int) -> SpelledVocabulary:
    pieces = vocabulary_bytes(tokenizer, size)
    with _lock:
        known = _vocabularies.get(tokenizer)
        if known is None or known.pieces is not pieces:
            known = _vocabularies[tokenizer] = SpelledVocabulary(pieces)
        return known


_lock = Lock()
_vocabularies: WeakKeyDictionary[PreTrainedTokenizerBase, SpelledVocabulary] = WeakKeyDictionary()
