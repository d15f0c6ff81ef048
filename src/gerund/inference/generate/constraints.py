"""Texts of a given form: JSON of a schema, a regular expression, one of several choices, by llguidance.

Knows: llguidance, vocabularies. Does not know: models, how tokens are chosen among those that may follow.
"""

import json
from collections.abc import Sequence
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from gerund.errors import ConfigError, MissingDependencyError, ModelError
from gerund.inference.generate.config import Constraint

# What llguidance says of a rule that leads to itself without a letter in between, such as {"$ref": "#"}.
_ENDLESS = "NoExtensionBias"


class Form:
    """A form, ready to be followed by any number of texts at once.

    Args:
        constraint: the form.
        tokenizer: a fast tokenizer.
        size: how many tokens the model chooses from.
        ends: the tokens that end a text.

    Raises:
        ConfigError: there is no such form: a schema that is none, a regular expression that cannot be read.
        MissingDependencyError: llguidance is not installed.
        ModelError: the tokenizer is not a fast one.
    """

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

    def follower(self) -> "Follower":
        """Return what follows one text."""
        return Follower(self._library.LLMatcher(self._tokenizer, self._grammar, log_level=0), self._kind)

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


class Follower:
    """One text on its way through a form."""

    def __init__(self, matcher: Any, kind: str) -> None:
        self._matcher, self._kind = matcher, kind

    @property
    def is_complete(self) -> bool:
        """Whether nothing can follow."""
        return bool(self._matcher.is_stopped())

    def allowed(self, size: int) -> Tensor:
        """Return which of so many tokens may follow ``(V,)`` bool.

        Raises:
            ModelError: none may.
            ConfigError: the form turns out to be impossible.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        found = np.unpackbits(bits, bitorder="little")[:size].astype(bool)
        if not found.any():
            raise ModelError("this model has no token with which a text of the form that was asked for could go on")
        return torch.from_numpy(np.pad(found, (0, size - len(found))))

    def put(self, token: int) -> None:
        """Take the token that was chosen.

        Raises:
            ConfigError: the form turns out to be impossible.
        """
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
        known = _vocabularies.setdefault(tokenizer, {})
        if key not in known:
            known[key] = from_tokenizer(tokenizer, n_vocab=max(size, len(tokenizer)), eos_token=list(ends) or None)
        return known[key]


_lock = Lock()
_vocabularies: WeakKeyDictionary[PreTrainedTokenizerBase, dict[Any, Any]] = WeakKeyDictionary()
