"""Incremental encoding: reuse the KV cache of texts that begin like those of the last call.

A search encodes the same beginnings again and again. Under a causal plan the states of a beginning do not depend on
what follows, so they are cached with their keys and values, one row per text.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from gerund.attention.cache_names import CACHE
from gerund.attention.recurrent import keeps_states
from gerund.errors import GerundError
from gerund.inference.encode.runtime import (
    ENOUGH,
    SAMPLE_TEXTS,
    EncoderRuntime,
    default_batch_tokens,
    in_batches,
    pooled,
    smallest_cosine,
    takes_positions,
)
from gerund.inference.generate.kv_cache import PreallocatedLayer, preallocated_cache
from gerund.inference.tokens import InputFormat, Tokens, rotary_limit, tokenize

# Texts of a batch at most, and how many times the usual number of tokens, most of which are not read again.
_ROWS = 32
_TIMES = 8
# A beginning that all texts of a batch share is read by itself from so many tokens on.
_WORTH_READING_FIRST = 16


@dataclass(frozen=True)
class _Known:
    """Texts that were read.

    Attributes:
        ids: their tokens.
        states_BTD: their last hidden states.
        layers: by layer keys and values ``(B, key heads, T, head_dim)``; what stands behind a text's tokens is noise.
    """

    ids: list[list[int]]
    states_BTD: Tensor
    layers: list[tuple[Tensor, Tensor]]


class IncrementalEncoder:
    """An encoder that remembers the texts of its last call."""

    def __init__(self, runtime: EncoderRuntime) -> None:
        self._runtime = runtime
        self._known: _Known | None = None
        self._limit = rotary_limit(runtime.model.config)

    def encode(self, texts: Sequence[Tokens]) -> np.ndarray:
        """Return the vectors ``(n, D)`` float32, not normalised, of texts."""
        vectors = np.zeros((len(texts), self._runtime.width), dtype=np.float32)

        def keep(rows: list[int], batch: list[Tokens], hidden_BTD: Tensor, begin: Tensor) -> None:
            vectors[rows] = pooled(self._runtime, batch, hidden_BTD, begin)

        room = self.room(max(map(len, texts), default=0))
        in_batches(self._runtime, texts, self.states, keep, batch_tokens=room, show=False)
        return vectors

    def room(self, longest: int) -> int:
        """Return how many tokens a batch may have, where texts have up to ``longest`` of which few are new."""
        usual = default_batch_tokens(self._runtime.device.type, self._runtime.width)
        return max(1, min(_ROWS * longest, _TIMES * usual))

    @torch.no_grad()
    def states(self, texts: Sequence[Tokens]) -> tuple[Tensor, Tensor]:
        """Return last hidden states ``(B, T, D)`` of texts in one batch, and where each begins."""
        ids = [list(text.ids) for text in texts]
        longest = max(map(len, ids))
        if self._known is not None and self._is_long(max(map(len, self._known.ids))) != self._is_long(longest):
            self._known = None
        parents, shared = self._parents(ids)
        common = min((_common(ids[0], own) for own in ids[1:]), default=0)
        if common >= max(shared) + _WORTH_READING_FIRST and self._is_long(common) == self._is_long(longest):
            self.states([Tokens(ids[0][:common], 0, 0)])
            parents, shared = self._parents(ids)
        past = max(shared)
        fresh = [own[count:] for own, count in zip(ids, shared, strict=True)]
        width = max(map(len, fresh))
        count_B, fresh_B = torch.tensor(shared), torch.tensor([len(own) for own in fresh])
        place_S = torch.arange(width)
        ids_BS = torch.zeros(len(ids), width, dtype=torch.long)
        for row, own in enumerate(fresh):
            ids_BS[row, : len(own)] = torch.tensor(own)
        before_BP = torch.arange(past) < count_B[:, None]
        real_BT = torch.cat([before_BP, place_S < fresh_B[:, None]], dim=1)
        # Padding stands where the last token does: further on the model may have no position.
        position_BS = torch.minimum(count_B[:, None] + place_S, (count_B + fresh_B - 1)[:, None])
        states_BSD, cache = self._run(ids_BS, position_BS, real_BT, self._past(parents, past))
        # Where each token's state and keys are to be found: in what was known, or in what was read now.
        place_T = torch.arange(longest)
        index_BT = torch.where(place_T < count_B[:, None], place_T, past + place_T - count_B[:, None])
        index_BT = index_BT.clamp(max=past + width - 1).to(states_BSD.device)
        if past and self._known is not None:
            states_BSD = torch.cat([self._known.states_BTD[parents, :past], states_BSD], dim=1)
        states_BTD = states_BSD.gather(1, index_BT[..., None].expand(-1, -1, states_BSD.shape[-1]))
        layers = [(_pick(layer.keys, index_BT), _pick(layer.values, index_BT)) for layer in _layers_of(cache)]
        self._known = _Known(ids, states_BTD, layers)
        return states_BTD, torch.zeros(len(ids), dtype=torch.long, device=states_BTD.device)

    def _is_long(self, length: int) -> bool:
        """Return whether a text is so long that the model turns its keys otherwise: a batch has only one kind."""
        return self._limit is not None and length > self._limit

    def _parents(self, ids: Sequence[list[int]]) -> tuple[list[int], list[int]]:
        """Return for each text the known one that it shares most of its beginning with, and how many tokens that is."""
        parents, shared = [0] * len(ids), [0] * len(ids)
        for row, own in enumerate(ids if self._known is not None else ()):
            assert self._known is not None
            counts = [_common(own, other) for other in self._known.ids]
            parents[row] = int(np.argmax(counts))
            # The last token is always read anew, so that there is something to read.
            shared[row] = min(counts[parents[row]], len(own) - 1)
        return parents, shared

    def _past(self, parents: list[int], length: int) -> DynamicCache:
        cache = preallocated_cache()
        if length and self._known is not None:
            rows = torch.tensor(parents)
            for number, (keys, values) in enumerate(self._known.layers):
                cache.update(keys[rows, :, :length], values[rows, :, :length], number)
        return cache

    def _run(
        self, ids_BS: Tensor, position_BS: Tensor, real_BT: Tensor, cache: DynamicCache
    ) -> tuple[Tensor, DynamicCache]:
        runtime = self._runtime
        inputs: dict[str, Any] = {"position_ids": position_BS.to(runtime.device)}
        if not bool(real_BT.all()):
            inputs["attention_mask"] = real_BT.long().to(runtime.device)
        with runtime.computing():
            output = runtime.model.base_model(ids_BS.to(runtime.device), use_cache=True, **{CACHE: cache}, **inputs)
        return output.last_hidden_state, cache


def can_encode_incrementally(runtime: EncoderRuntime) -> bool:
    """Whether a runtime can encode incrementally: its plan is causal, and the vectors equal those of whole texts."""
    if runtime.config.reads_beside:
        return False
    if not runtime.plan.is_causal or runtime.plan.repeats_text or not takes_positions(runtime.model):
        return False
    # Known and new tokens stand apart in the cache, and a window counts places there; a recurrent layer has none.
    if _has_windows(runtime.model.config.get_text_config(decoder=True)) or keeps_states(runtime.model):
        return False
    input_format = InputFormat(append_eos=runtime.config.append_eos)
    # Cut here: for a context as short as that, a warning would be about texts that nobody gave.
    shorter, texts = (
        [
            replace(text, ids=text.ids[: runtime.max_length])
            for text in tokenize(runtime.tokenizer, [sample[:most] for sample in SAMPLE_TEXTS], input_format)
            if text is not None
        ]
        for most in (9, None)
    )
    try:
        incremental = IncrementalEncoder(runtime)
        incremental.encode(shorter)
        found, expected = incremental.encode(texts), IncrementalEncoder(runtime).encode(texts)
        plain = _anew(runtime, texts)
    except (GerundError, AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        return False
    return min(smallest_cosine(found, plain), smallest_cosine(expected, plain)) >= ENOUGH


def _has_windows(config: Any) -> bool:
    names = ("sliding_window", "window_size", "attention_chunk_size")
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    return any(getattr(config, name, None) is not None for name in names) or kinds != {"full_attention"}


def _anew(runtime: EncoderRuntime, texts: Sequence[Tokens]) -> np.ndarray:
    states_BTD, begin = runtime.states(texts)
    return pooled(runtime, texts, states_BTD, begin)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens two texts share at their beginning.

    >>> _common([5, 6, 7], [5, 6, 8, 9])
    2
    """
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _layers_of(cache: DynamicCache) -> list[PreallocatedLayer]:
    layers = [layer for layer in cache.layers if isinstance(layer, PreallocatedLayer)]
    if len(layers) < len(cache.layers):
        raise TypeError("the cache is of another kind")
    return layers


def _pick(states_BHTD: Tensor, index_BT: Tensor) -> Tensor:
    """Return the states of the tokens at ``index_BT``."""
    _, heads, _, width = states_BHTD.shape
    return states_BHTD.gather(2, index_BT[:, None, :, None].expand(-1, heads, -1, width))
