"""Constrain which tokens may come next: JSON schemas, regular expressions, choices, allowed and banned tokens.

Token limits apply to each token on its own, so sampling, greedy search, schemas and batches need not know of them.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence
from copy import copy
from functools import partial
from itertools import accumulate
from threading import Lock
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from gerund.errors import ConfigError, MissingDependencyError, ModelError
from gerund.inference.generate.config import Constraint, GenerationConfig
from gerund.inference.generate.detokenizing import vocabulary_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# In llguidance's error for a rule that leads to itself without a letter in between, such as {"$ref": "#"}.
_ENDLESS = "NoExtensionBias"
_lock = Lock()
_grammar_vocabularies: WeakKeyDictionary[PreTrainedTokenizerBase, dict[Any, Any]] = WeakKeyDictionary()
_spelled_vocabularies: WeakKeyDictionary[PreTrainedTokenizerBase, SpelledVocabulary] = WeakKeyDictionary()


class CompiledConstraint:
    """A schema, regular expression, list of choices or tool calls as a grammar, shared by any number of sequences.

    ``size`` is the model's vocabulary size; ``ends`` are the tokens that may end a complete text. An invalid grammar
    raises ``ConfigError``.
    """

    def __init__(
        self, constraint: Constraint, tokenizer: PreTrainedTokenizerBase, size: int, ends: Sequence[int]
    ) -> None:
        try:
            from llguidance import LLMatcher
        except ImportError as error:
            raise MissingDependencyError(
                "`schema`, `regex`, `choice` and required tool calls need llguidance: pip install 'gerund[structured]'"
            ) from error
        self._kind = constraint.kind
        vocabulary = _grammar_vocabulary(tokenizer, size, tuple(ends))
        if constraint.kind == "schema":
            grammar = LLMatcher.grammar_from_json_schema(constraint.source)
        elif constraint.kind == "regex":
            grammar = LLMatcher.grammar_from_regex(constraint.source)
        elif constraint.kind == "tools":
            grammar = LLMatcher.grammar_from_lark(constraint.source)
        else:
            written = (json.dumps(choice, ensure_ascii=False) for choice in json.loads(constraint.source))
            choices = " | ".join(written).replace("\x7f", "\\u007f")  # which the grammar's strings do not hold
            grammar = LLMatcher.grammar_from_lark(f"start: {choices}\n")
        self._matcher = partial(LLMatcher, vocabulary, grammar, log_level=0)
        matcher = self._matcher()
        if not matcher.get_error():
            matcher.compute_bitmask()  # some mistakes only show now
        if matcher.get_error():
            raise ConfigError(_reason(constraint.kind, matcher))

    def start(self) -> ConstraintState:
        """Return the state of a new sequence."""
        return ConstraintState(self._matcher(), self._kind)


class ConstraintState:
    """One sequence on its way through a grammar."""

    def __init__(self, matcher: Any, kind: str) -> None:
        self._matcher, self._kind = matcher, kind

    @property
    def is_complete(self) -> bool:
        """Whether no further token can follow."""
        return bool(self._matcher.is_stopped())

    def allowed(self, size: int) -> np.ndarray:
        """Return which of the model's ``size`` tokens may come next ``(V,)`` bool."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        allowed = np.unpackbits(bits, bitorder="little")[:size].astype(bool)
        if not allowed.any():
            raise ModelError(f"This model has no token that continues a text of this `{self._kind}`.")
        return np.pad(allowed, (0, size - len(allowed)))

    def put(self, token: int) -> None:
        """Append the chosen token."""
        self._matcher.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ConfigError(_reason(self._kind, self._matcher))


def _reason(kind: str, matcher: Any) -> str:
    reason, *more = str(matcher.get_error()).splitlines()
    # The mistake in a regular expression is marked in the lines below, and named after them.
    named = next((line.removeprefix("error: ") for line in more if line.startswith("error: ")), "")
    if reason.endswith(":") and named:
        reason = f"{reason} {named}"
    if _ENDLESS in reason:
        reason = "a part of it is defined only by itself, so no text can match it"
    return f"`{kind}` is invalid: {reason}"


def _grammar_vocabulary(tokenizer: PreTrainedTokenizerBase, size: int, ends: tuple[int, ...]) -> Any:
    """Return llguidance's version of a tokenizer; building it takes up to a second, so it is cached."""
    if not tokenizer.is_fast:
        raise ModelError(
            "`schema`, `regex`, `choice` and required tool calls need a fast tokenizer (tokenizer.json), which this "
            "model does not have."
        )
    from llguidance import LLTokenizer

    key = (size, ends, len(tokenizer))
    with _lock:
        cached = _grammar_vocabularies.setdefault(tokenizer, {})
        if key not in cached:
            backend = copy(tokenizer.backend_tokenizer)
            backend.no_padding()
            backend.no_truncation()
            eos = list(ends) or tokenizer.eos_token_id
            cached[key] = LLTokenizer(backend.to_str(), n_vocab=max(size, len(tokenizer)), eos_token=eos)
        return cached[key]


class TokenLimits:
    """The token limits of one request; ``ends`` are the tokens that end a text."""

    def __init__(
        self, settings: GenerationConfig, tokenizer: PreTrainedTokenizerBase, size: int, ends: Collection[int]
    ) -> None:
        self.least = settings.min_tokens
        self.words = tuple(word.encode("utf-8", "replace") for word in settings.bad_words)
        self.vocabulary = _spelled_vocabulary(tokenizer, size) if self.words else None
        # By the prefix of a bad word that a text may end with: what must not follow it.
        self.rests: dict[bytes, list[bytes]] = {}
        self.always_V = np.ones(size, bool)
        if settings.allowed_token_ids is not None:
            self.always_V[:] = False
            self.always_V[list(settings.allowed_token_ids)] = True
        for word in self.words:
            assert self.vocabulary is not None
            self.always_V[self.vocabulary.containing(word)] = False
            for length in range(1, len(word)):
                self.rests.setdefault(word[:length], []).append(word[length:])
        self.early_V = self.always_V.copy()
        self.early_V[list(ends)] = False
        self._names = [name for name in ("allowed_token_ids", "bad_words", "min_tokens") if getattr(settings, name)]
        if not (self.early_V if self.least else self.always_V).any():
            raise self.no_token_error()

    @classmethod
    def of(
        cls, settings: GenerationConfig, tokenizer: PreTrainedTokenizerBase, size: int, ends: Collection[int]
    ) -> TokenLimits | None:
        """Return the limits of a request; None where it has none."""
        if not (settings.min_tokens or settings.bad_words or settings.allowed_token_ids):
            return None
        return cls(settings, tokenizer, size, ends)

    def no_token_error(self, *, constrained: bool = False) -> ConfigError:
        """Return the error for limits that leave no token."""
        names = " and ".join(f"`{name}`" for name in [*self._names, *(["schema, regex or choice"] * constrained)])
        return ConfigError(f"No token can come next under {names}. Allow more tokens.")


class TokenLimitState:
    """The token limits of one sequence."""

    def __init__(self, limits: TokenLimits) -> None:
        self._limits, self._count, self._end = limits, 0, b""
        # As much of the end of the text as may be the beginning of a bad word.
        self._longest = max((len(word) for word in limits.words), default=1) - 1

    def allowed(self, constraint_V: np.ndarray | None) -> np.ndarray:
        """Return which tokens may come next ``(V,)`` bool, of those that the constraint allows."""
        limits = self._limits
        is_early = self._count < limits.least
        allowed_V = limits.early_V if is_early else limits.always_V
        banned = self._banned()
        if banned:
            allowed_V = allowed_V.copy()
            allowed_V[banned] = False
        if constraint_V is not None:
            allowed_V = allowed_V & constraint_V
            if is_early and not allowed_V.any():
                # The text is complete: it ends, however short.
                allowed_V = limits.always_V & ~limits.early_V & constraint_V
        if not allowed_V.any():
            raise limits.no_token_error(constrained=constraint_V is not None)
        return allowed_V

    def _banned(self) -> list[int]:
        """Return the tokens that would complete a bad word."""
        vocabulary, rests, end = self._limits.vocabulary, self._limits.rests, self._end
        if vocabulary is None:
            return []
        begun = (rests.get(end[at:], ()) for at in range(len(end)))
        return [token for group in begun for rest in group for token in vocabulary.starting(rest)]

    def put(self, token: int) -> None:
        """Append the chosen token."""
        self._count += 1
        vocabulary = self._limits.vocabulary
        if self._longest and vocabulary is not None:
            self._end = (self._end + vocabulary.pieces[token])[-self._longest :]


class SpelledVocabulary:
    """The bytes of each token, indexed for substring and prefix search."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = pieces
        self._joined = b"".join(pieces)
        self._starts = [0, *accumulate(map(len, pieces))]
        self._order = sorted(range(len(pieces)), key=lambda token: pieces[token])
        self._sorted = [pieces[token] for token in self._order]

    def containing(self, word: bytes) -> list[int]:
        """Return the tokens whose bytes contain ``word``."""
        tokens, at = [], self._joined.find(word)
        while at >= 0:
            token = bisect_right(self._starts, at) - 1
            end = self._starts[token + 1]
            is_inside = at + len(word) <= end
            if is_inside:
                tokens.append(token)
            at = self._joined.find(word, end if is_inside else at + 1)
        return tokens

    def starting(self, rest: bytes) -> list[int]:
        """Return the tokens whose bytes start with ``rest``."""
        first = bisect_left(self._sorted, rest)
        end = bisect_left(self._sorted, True, lo=first, key=lambda piece: not piece.startswith(rest))
        return self._order[first:end]


def _spelled_vocabulary(tokenizer: PreTrainedTokenizerBase, size: int) -> SpelledVocabulary:
    pieces = vocabulary_bytes(tokenizer, size)
    with _lock:
        cached = _spelled_vocabularies.get(tokenizer)
        if cached is None or cached.pieces is not pieces:
            cached = _spelled_vocabularies[tokenizer] = SpelledVocabulary(pieces)
        return cached
