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

from gerund.attention.layer_state import CACHE
from gerund.attention.recurrent import keeps_states
from gerund.errors import GerundError
from gerund.inference.encode.batches import default_batch_tokens, in_batches
from gerund.inference.encode.runtime import ENOUGH, SAMPLE_TEXTS, EncoderRuntime, smallest_cosine, takes_positions
from gerund.inference.generate.kv_cache import PreallocatedLayer, preallocated_cache
from gerund.inference.text_ids import common_prefix_length
from gerund.inference.tokens import InputFormat, Tokens, rotary_limit, tokenize

# Texts per batch at most, and tokens as a multiple of the usual number, since most are not read again.
_ROWS = 32
_TIMES = 8
# A prefix that all texts of a batch share is read first if it has so many tokens.
_WORTH_READING_FIRST = 16


@dataclass(frozen=True)
class _Known:
    """Texts that were read."""

    ids: list[list[int]]
    states_BTD: Tensor  # last hidden states
    layers: list[tuple[Tensor, Tensor]]  # keys and values ``(B, key heads, T, head_dim)``; noise after a text's tokens


class IncrementalEncoder:
    """An encoder that caches the texts of its last call. Its plan must be causal; see ``can_encode_incrementally``."""

    def __init__(self, runtime: EncoderRuntime) -> None:
        self._runtime = runtime
        self._known: _Known | None = None
        self._limit = rotary_limit(runtime.model.config)

    def encode(self, texts: Sequence[Tokens]) -> np.ndarray:
        """Encode texts into vectors ``(n, D)`` float32, not normalized."""
        vectors = np.zeros((len(texts), self._runtime.width), dtype=np.float32)

        def keep(rows: list[int], batch: list[Tokens], hidden_BTD: Tensor, begin: Tensor) -> None:
            vectors[rows] = self._runtime.pooled(batch, hidden_BTD, begin)

        room = self.room(max(map(len, texts), default=0))
        in_batches(self._runtime, texts, self.states, keep, batch_tokens=room, show=False)
        return vectors

    def room(self, longest: int) -> int:
        """Return how many tokens a batch may have if texts have up to ``longest``, few of them new."""
        usual = default_batch_tokens(self._runtime.device.type, self._runtime.width)
        return max(1, min(_ROWS * longest, _TIMES * usual))

    @torch.no_grad()
    def states(self, texts: Sequence[Tokens]) -> tuple[Tensor, Tensor]:
        """Return last hidden states ``(B, T, D)`` of one batch, and the position at which each text begins."""
        ids = [list(text.ids) for text in texts]
        longest = max(map(len, ids))
        if self._known is not None and self._is_long(max(map(len, self._known.ids))) != self._is_long(longest):
            self._known = None
        parents, shared = self._parents(ids)
        common = min((common_prefix_length(ids[0], text_ids) for text_ids in ids[1:]), default=0)
        if common >= max(shared) + _WORTH_READING_FIRST and self._is_long(common) == self._is_long(longest):
            self.states([Tokens(ids[0][:common], 0, 0)])
            parents, shared = self._parents(ids)
        past = max(shared)
        fresh = [text_ids[count:] for text_ids, count in zip(ids, shared, strict=True)]
        width = max(map(len, fresh))
        count_B, fresh_B = torch.tensor(shared), torch.tensor([len(text_ids) for text_ids in fresh])
        place_S = torch.arange(width)
        ids_BS = torch.zeros(len(ids), width, dtype=torch.long)
        for row, text_ids in enumerate(fresh):
            ids_BS[row, : len(text_ids)] = torch.tensor(text_ids)
        before_BP = torch.arange(past) < count_B[:, None]
        real_BT = torch.cat([before_BP, place_S < fresh_B[:, None]], dim=1)
        # Padding has the position of the last token: the model may have no further ones.
        position_BS = torch.minimum(count_B[:, None] + place_S, (count_B + fresh_B - 1)[:, None])
        states_BSD, cache = self._run(ids_BS, position_BS, real_BT, self._past(parents, past))
        # The index of each token's state and keys: among the cached ones, or among the new ones after them.
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
        """Whether a text is so long that the model rotates its keys differently: a batch has only one kind."""
        return self._limit is not None and length > self._limit

    def _parents(self, ids: Sequence[list[int]]) -> tuple[list[int], list[int]]:
        """Return for each text the cached one with the longest common prefix, and its length."""
        parents, shared = [0] * len(ids), [0] * len(ids)
        for row, text_ids in enumerate(ids if self._known is not None else ()):
            assert self._known is not None
            counts = [common_prefix_length(text_ids, other) for other in self._known.ids]
            parents[row] = int(np.argmax(counts))
            # The last token is always read again, so that there is something to read.
            shared[row] = min(counts[parents[row]], len(text_ids) - 1)
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
    """Whether a runtime can encode incrementally: its plan is causal, and a trial gives the same vectors."""
    if runtime.config.reads_beside or runtime.config.exit_layer is not None:
        return False
    if not runtime.plan.is_causal or runtime.plan.repeats_text or not takes_positions(runtime.model):
        return False
    # Cached and new tokens are apart in the cache, where a window counts positions; a recurrent layer has no cache.
    if _has_windows(runtime.model.config.get_text_config(decoder=True)) or keeps_states(runtime.model):
        return False
    input_format = InputFormat(append_eos=runtime.config.append_eos)
    # Truncated here: a warning would be about texts that the user does not know.
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
        actual, expected = incremental.encode(texts), IncrementalEncoder(runtime).encode(texts)
        plain = _anew(runtime, texts)
    except (GerundError, AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        return False
    return min(smallest_cosine(actual, plain), smallest_cosine(expected, plain)) >= ENOUGH


def _has_windows(config: Any) -> bool:
    names = ("sliding_window", "window_size", "attention_chunk_size")
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    return any(getattr(config, name, None) is not None for name in names) or kinds != {"full_attention"}


def _anew(runtime: EncoderRuntime, texts: Sequence[Tokens]) -> np.ndarray:
    states_BTD, begin = runtime.states(texts)
    return runtime.pooled(texts, states_BTD, begin)


def _layers_of(cache: DynamicCache) -> list[PreallocatedLayer]:
    layers = [layer for layer in cache.layers if isinstance(layer, PreallocatedLayer)]
    if len(layers) < len(cache.layers):
        raise TypeError("the cache is not a preallocated one")
    return layers


def _pick(states_BHTD: Tensor, index_BT: Tensor) -> Tensor:
    """Return the states of the tokens at ``index_BT``."""
    _, heads, _, width = states_BHTD.shape
    return states_BHTD.gather(2, index_BT[:, None, :, None].expand(-1, heads, -1, width))
