"""Constrain which tokens may come next: JSON schemas, regular expressions, choices, allowed and banned tokens.

Token limits apply to each token on its own, so sampling, greedy search, schemas and batches need not know of them.
"""

import json
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence
from itertools import accumulate
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from gerund.errors import ConfigError, MissingDependencyError, ModelError
from gerund.inference.generate.config import Constraint, GenerationConfig
from gerund.inference.generate.detokenizing import vocabulary_bytes

# What llguidance says of a rule that leads to itself without a letter in between, such as {"$ref": "#"}.
_ENDLESS = "NoExtensionBias"


class CompiledConstraint:
    """A form, ready to be followed by any number of texts at once."""

    def __init__(
        self, constraint: Constraint, tokenizer: PreTrainedTokenizerBase, size: int, ends: Sequence[int]
    ) -> None:
        self._library = _llguidance()
        self._tokenizer = _vocabulary(tokenizer, size, tuple(ends))
        self._grammar = self._read(constraint)
        self._kind = constraint.kind
        matcher = self._library.LLMatcher(self._tokenizer, self._grammar, log_level=0)
        if not matcher.get_error():
            matcher.compute_bitmask()  # some mistakes show only when a token is sought
        if matcher.get_error():
            raise ConfigError(_reason(constraint.kind, matcher))

    def follower(self) -> "ConstraintState":
        """Return what follows one text."""
        return ConstraintState(self._library.LLMatcher(self._tokenizer, self._grammar, log_level=0), self._kind)

    def _read(self, constraint: Constraint) -> str:
        matcher = self._library.LLMatcher
        if constraint.kind == "schema":
            grammar: str = matcher.grammar_from_json_schema(constraint.source)
        elif constraint.kind == "regex":
            grammar = matcher.grammar_from_regex(constraint.source)
        else:
            choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in json.loads(constraint.source))
            grammar = matcher.grammar_from_lark(f"start: {choices}\n")
        return grammar


class ConstraintState:
    """One text on its way through a form."""

    def __init__(self, matcher: Any, kind: str) -> None:
        self._matcher, self._kind = matcher, kind

    @property
    def is_complete(self) -> bool:
        """Whether nothing can follow."""
        return bool(self._matcher.is_stopped())

    def allowed(self, size: int) -> Tensor:
        """Return which of so many tokens may follow ``(V,)`` bool."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        found = np.unpackbits(bits, bitorder="little")[:size].astype(bool)
        if not found.any():
            raise ModelError("this model has no token with which a text of the form that was asked for could go on")
        return torch.from_numpy(np.pad(found, (0, size - len(found))))

    def put(self, token: int) -> None:
        """Take the token that was chosen."""
        self._matcher.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ConfigError(_reason(self._kind, self._matcher))


def _reason(kind: str, matcher: Any) -> str:
    """Return why a form cannot be followed."""
    said = str(matcher.get_error()).splitlines()[0]
    if _ENDLESS in said:
        said = "a part of it is defined by itself alone, so that no text can have that form"
    return f"{kind} cannot be followed: {said}"


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise MissingDependencyError(
            "schema, regex and choice need llguidance: pip install 'gerund[structured]'"
        ) from error
    return llguidance


def _vocabulary(tokenizer: PreTrainedTokenizerBase, size: int, ends: tuple[int, ...]) -> Any:
    """Return a tokenizer as llguidance knows it; making it takes up to a second, so it is kept."""
    if not tokenizer.is_fast:
        raise ModelError("schema, regex and choice need a fast tokenizer (tokenizer.json): this model has none")
    from llguidance.hf import from_tokenizer

    key = (size, ends, len(tokenizer))
    with _lock:
        known = _grammar_vocabularies.setdefault(tokenizer, {})
        if key not in known:
            known[key] = from_tokenizer(tokenizer, n_vocab=max(size, len(tokenizer)), eos_token=list(ends) or None)
        return known[key]


_lock = Lock()
_grammar_vocabularies: WeakKeyDictionary[PreTrainedTokenizerBase, dict[Any, Any]] = WeakKeyDictionary()


_LIMITING = ("allowed_token_ids", "bad_words", "min_tokens")


class TokenLimits:
    """The limits of one request."""

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

    def follower(self) -> "TokenLimitState":
        """Return the limits of one text."""
        return TokenLimitState(self)


class TokenLimitState:
    """The limits of one text as it grows."""

    def __init__(self, limits: TokenLimits) -> None:
        self._limits, self._count, self._end = limits, 0, b""
        # As much of the end of the text as may begin a bad word.
        self._longest = max((len(word) for word in limits.words), default=1) - 1

    def allowed(self, form_V: Tensor | None) -> Tensor:
        """Return which tokens may follow ``(V,)`` bool."""
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
    """What all tokens spell, and quick answers to which of them contain something."""

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
        known = _spelled_vocabularies.get(tokenizer)
        if known is None or known.pieces is not pieces:
            known = _spelled_vocabularies[tokenizer] = SpelledVocabulary(pieces)
        return known


_spelled_vocabularies: WeakKeyDictionary[PreTrainedTokenizerBase, SpelledVocabulary] = WeakKeyDictionary()
