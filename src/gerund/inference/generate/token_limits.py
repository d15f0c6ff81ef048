"""Limit which tokens may be generated: allowed token ids, bad words, and a minimum length.

The limits hold for each token by itself, whatever chooses among those that are left, so that sampling, greedy choice,
forms and batches need not know of them.

Knows: ``GenerationConfig``, what tokens spell. Does not know: models, how a token is chosen.
"""

from collections.abc import Callable, Collection, Sequence

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
        self.spelled: Sequence[bytes] = vocabulary_bytes(tokenizer, size) if self.words else ()
        self._starting: dict[bytes, Tensor] = {}
        self.always_V = torch.ones(size, dtype=torch.bool)
        if settings.allowed_token_ids is not None:
            self.always_V.zero_()[list(settings.allowed_token_ids)] = True
        for word in self.words:
            self.always_V &= ~self._tokens(lambda piece, word=word: word in piece)  # type: ignore[misc]
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

    def starting(self, rest: bytes) -> Tensor:
        """Return which tokens start with the rest of a word ``(V,)`` bool."""
        if rest not in self._starting:
            self._starting[rest] = self._tokens(lambda piece: piece.startswith(rest))
        return self._starting[rest]

    def _tokens(self, holds: Callable[[bytes], bool]) -> Tensor:
        return torch.tensor([holds(piece) for piece in self.spelled], dtype=torch.bool)


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
        for word in own.words:
            for size in range(1, min(len(word), len(self._end) + 1)):
                if self._end.endswith(word[:size]):
                    allowed_V = allowed_V & ~own.starting(word[size:])
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

    def put(self, token: int) -> None:
        """Take the token that was chosen."""
        self._count += 1
        if self._longest:
            self._end = (self._end + self._limits.spelled[token])[-self._longest :]
