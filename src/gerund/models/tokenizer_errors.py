"""Tokenizers whose failures are gerund's errors, also where their Rust code panics.

What a tokenizer raises has no common class: a plain ``Exception`` for a text that its model has no tokens for, and a
panic, which is not even an ``Exception``, for a defect.

Knows: which methods read and write text. Does not know: where a tokenizer comes from.
"""

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

from transformers import PreTrainedTokenizerBase

from gerund.errors import GerundError, TextError

_METHODS = ("__call__", "encode", "tokenize", "decode", "batch_decode", "convert_tokens_to_string")


def checked_tokenizer(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Return the same tokenizer, which from now on raises ``TextError`` where it fails on a text or on tokens."""
    kind: Any = type(tokenizer)
    tokenizer.__class__ = _checked(kind)
    return tokenizer


@cache
def _checked(kind: Any) -> Any:
    """Return a class of tokenizers under the same name, by which transformers saves them."""
    if "gerund_kind" in vars(kind):
        return kind
    methods: dict[str, Any] = {name: _guard(getattr(kind, name)) for name in _METHODS if hasattr(kind, name)}
    methods |= {"gerund_kind": kind, "__reduce_ex__": _reduced, "__module__": kind.__module__}
    return type(kind.__name__, (kind,), methods)


def _guard(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def guarded(self: PreTrainedTokenizerBase, *arguments: Any, **options: Any) -> Any:
        try:
            return method(self, *arguments, **options)
        except (GerundError, KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError):
            raise
        except BaseException as error:  # a panic is no Exception
            reason = str(error) or type(error).__name__
            raise TextError(f"this model's tokenizer fails on this text: {reason}") from error

    return guarded


def _reduced(self: PreTrainedTokenizerBase, protocol: int) -> tuple[Any, ...]:
    """Pickle a tokenizer by the class that can be imported."""
    kind = vars(type(self))["gerund_kind"]
    return (_made, (kind,), *object.__reduce_ex__(self, max(2, protocol))[2:])


def _made(kind: Any) -> PreTrainedTokenizerBase:
    return checked_tokenizer(kind.__new__(kind))
