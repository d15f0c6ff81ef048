"""Call transformers, tokenizers and the hub quietly, and turn their failures into gerund's errors.

A tokenizer's errors have no common class: a plain ``Exception`` for a text that its model has no tokens for, and a Rust
panic, which is not even an ``Exception``, for a defect.
"""

from __future__ import annotations

import logging
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import TYPE_CHECKING, Any

from gerund.errors import GerundError, ModelError, TextError, is_panic, one_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_lock = threading.Lock()
_depth = 0
_before = (logging.WARNING, logging.WARNING, True)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' bars and chatter until the block ends, whatever other threads do meanwhile."""
    from transformers.utils import logging as hf_logging

    global _depth, _before  # noqa: PLW0603
    noisy, hub = logging.getLogger("transformers"), logging.getLogger("huggingface_hub")
    with _lock:
        _depth += 1
        if _depth == 1:
            _before = (noisy.level, hub.level, hf_logging.is_progress_bar_enabled())
            noisy.setLevel(logging.ERROR)
            hub.setLevel(logging.ERROR)
            hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if _depth == 0:
                level, hub_level, bars = _before
                noisy.setLevel(level)
                hub.setLevel(hub_level)
                if bars:
                    hf_logging.enable_progress_bar()


@contextmanager
def without_panics(what: str) -> Iterator[None]:
    """Turn a panic of a Rust library into a ``ModelError`` whose message starts with ``what``."""
    try:
        yield
    except BaseException as error:
        if not is_panic(error):
            raise
        raise ModelError(f"{what}: {one_line(str(error))}") from error


def ready_for_threads() -> None:
    """Have torch's pool of threads, before several threads use torch at once.

    A forked process makes the pool anew at the first use, and two first uses at once fail ("Invalid thread pool").
    Setting the number of threads that is set is a use.
    """
    try:
        import torch
    except ImportError:
        return  # without torch there is no such pool
    torch.set_num_threads(torch.get_num_threads())


def guarded(what: str, load: Any, *arguments: Any, **options: Any) -> Any:
    """Call a loader quietly, and turn whatever it raises into a ``ModelError`` that starts with ``what``."""
    try:
        with quiet(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ready_for_threads()  # transformers reads weights in several threads
            return load(*arguments, **options)
    except (GerundError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # safetensors and the hub have exceptions of their own, and tokenizers may panic
        raise ModelError(f"{what}: {_reason(error)[:300]}") from error


def _reason(error: BaseException) -> str:
    """Return why a loader failed, on one line."""
    reason = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, RecursionError):
        return "a file of it is nested too deep"
    if isinstance(error, MemoryError):
        return "there is not enough memory"
    if "trust_remote_code" in reason:
        return "it needs code of its own, which is not run"
    if "couldn't connect" in reason or "outgoing traffic has been disabled" in reason:
        offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") else ""
        return f"it is not in the local cache, and the hub cannot be reached{offline}"
    if "safetensors" in reason and "No such file" not in reason:
        return f"no usable safetensors weights ({reason})"
    return reason


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
    def checked(self: PreTrainedTokenizerBase, *arguments: Any, **options: Any) -> Any:
        try:
            return method(self, *arguments, **options)
        except (GerundError, KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError):
            raise
        except BaseException as error:  # a panic is no Exception
            reason = str(error) or type(error).__name__
            raise TextError(f"this model's tokenizer fails on this text: {reason}") from error

    return checked


def _reduced(self: PreTrainedTokenizerBase, protocol: int) -> tuple[Any, ...]:
    """Pickle a tokenizer by the class that can be imported."""
    kind = vars(type(self))["gerund_kind"]
    return (_made, (kind,), *object.__reduce_ex__(self, max(2, protocol))[2:])


def _made(kind: Any) -> PreTrainedTokenizerBase:
    return checked_tokenizer(kind.__new__(kind))
