"""Read documents and queries with a transformers model, and cache the keys and values of recent documents.

Each document is read once, and the query's tokens behind all of them in one pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from gerund.attention.layer_state import CACHE
from gerund.attention.recurrent import keeps_states
from gerund.errors import GerundError, ModelError
from gerund.inference.encode.batches import default_batch_tokens
from gerund.inference.encode.runtime import EncoderRuntime, takes_positions
from gerund.inference.likelihood import Scored, sequence_logprobs
from gerund.inference.lm_head import TokenHead
from gerund.inference.tokens import rotary_limit
from gerund.scoring.kept_documents import Kept, shared_beginning

# Keys and values in one pass over the query's tokens, and documents in it at most.
_PASS_BYTES, _PASS_ROWS = 256 * 2**20, 64
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
_TOLERANCE_HALF = 0.2


@dataclass(frozen=True)
class _Read:
    """A text that was read: keys and values ``(key heads, T, head_dim)`` by layer, and its last state ``(D,)``."""

    layers: list[tuple[Tensor, Tensor]]
    last_D: Tensor

    @property
    def n_bytes(self) -> int:
        return sum(keys.nbytes + values.nbytes for keys, values in self.layers) + self.last_D.nbytes


class DocumentReader:
    """Reads texts of the form (before, query), and keeps the keys and values of what stands before queries."""

    def __init__(self, runtime: EncoderRuntime, kept: Kept[_Read]) -> None:
        self.runtime, self._kept = runtime, kept
        self._limit = rotary_limit(runtime.model.config)

    def logprobs(self, sequences: Sequence[Scored]) -> list[np.ndarray]:
        """Return the log-probabilities of the tokens of each sequence from a position on, float32."""
        if self._kept.works is None:
            self._kept.works = self._can_keep()
        if not self._kept.works or any(self._is_long(ids) for ids, _ in sequences):
            model, tokenizer = self.runtime.model, self.runtime.tokenizer
            return sequence_logprobs(model, tokenizer, sequences, states=self.runtime.states, show=False)
        logprobs: list[np.ndarray] = []
        for part in self._passes(sequences):
            befores = [tuple(ids[:first]) for ids, first in part]
            logprobs += self._behind(befores, [list(ids[first:]) for ids, first in part])
        return logprobs

    def _is_long(self, ids: Sequence[int]) -> bool:
        return self._limit is not None and len(ids) > self._limit

    def _passes(self, sequences: Sequence[Scored]) -> list[Sequence[Scored]]:
        """Divide sequences into passes whose keys and values fit the memory."""
        config = self.runtime.model.config.get_text_config(decoder=True)
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        each = 2 * config.num_hidden_layers * heads * width * self.runtime.model.dtype.itemsize
        rows = max(1, min(_PASS_ROWS, _PASS_BYTES // (each * max(len(ids) for ids, _ in sequences))))
        cuts = [*range(0, len(sequences), rows), len(sequences)]
        return [sequences[start:end] for start, end in pairwise(cuts)]

    @torch.no_grad()
    def _behind(self, befores: Sequence[tuple[int, ...]], queries: Sequence[list[int]]) -> list[np.ndarray]:
        """Return the log-probabilities of each query's tokens behind a text, all in one pass."""
        read = self._read(befores)
        runtime, texts = self.runtime, [read[before] for before in befores]
        states = [text.last_D[None] for text in texts]
        width = max(len(query) for query in queries) - 1
        if width:
            ids_BS, fresh_BS = _padded([query[:-1] for query in queries], width)
            past = max(map(len, befores))
            count_B = torch.tensor([len(before) for before in befores])
            # What was read ends at the same place in every row, so that a window counts its tokens.
            real_BP = torch.arange(past) >= past - count_B[:, None]
            position_BS = count_B[:, None] + torch.arange(width).clamp(max=width - 1)
            hidden_BSD, _ = self._run(
                ids_BS, position_BS, torch.cat([real_BP, fresh_BS], dim=1), _stacked([text.layers for text in texts])
            )
            states = [
                torch.cat([first_1D, own_SD[: len(query) - 1]])
                for first_1D, own_SD, query in zip(states, hidden_BSD, queries, strict=True)
            ]
        tokens_N = torch.tensor([token for query in queries for token in query], device=runtime.device)
        logprobs = TokenHead(runtime.model).logprobs(torch.cat(states), tokens_N)
        if not np.isfinite(logprobs).all():
            raise ModelError(
                f"this model's log-probabilities are not numbers in {runtime.model.dtype}; load it with another dtype"
            )
        return np.split(logprobs, np.cumsum([len(query) for query in queries])[:-1])

    def _read(self, texts: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], _Read]:
        """Return what was read of each text, reading those that are not kept."""
        read = self._kept.find(texts)
        missing = sorted({text for text in texts if text not in read}, key=len)
        head = self._head(missing)
        most = default_batch_tokens(self.runtime.device.type, self.runtime.state_width)
        while missing:
            rows = max(1, most // len(missing[-1]))
            batch, missing = missing[-rows:], missing[:-rows]
            fresh = self._fresh(batch, head)
            read |= fresh
            self._kept.add(fresh)
        return read

    def _head(self, texts: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], _Read] | None:
        """Return the beginning that all texts share, read; None where it is too short to be worth it."""
        head = shared_beginning(texts)
        return (head, self._fresh([head], None)[head]) if head else None

    def _fresh(
        self, texts: Sequence[tuple[int, ...]], head: tuple[tuple[int, ...], _Read] | None
    ) -> dict[tuple[int, ...], _Read]:
        """Read one batch of texts, behind the beginning that they share."""
        past = 0 if head is None else len(head[0])
        rest = [list(text[past:]) for text in texts]
        width = max(map(len, rest))
        ids_BS, fresh_BS = _padded(rest, width)
        before = DynamicCache()
        if head is not None:
            for number, pair in enumerate(head[1].layers):
                before.update(*(side[None].expand(len(texts), -1, -1, -1) for side in pair), number)
        real_BT = torch.cat([torch.ones(len(texts), past, dtype=torch.bool), fresh_BS], dim=1)
        position_BS = past + torch.arange(width).expand(len(texts), -1)
        hidden_BSD, cache = self._run(ids_BS, position_BS, real_BT, before)
        read = {}
        for row, text in enumerate(texts):
            layers = [
                (layer.keys[row, :, : len(text)].clone(), layer.values[row, :, : len(text)].clone())
                for layer in cache.layers
            ]
            read[text] = _Read(layers, hidden_BSD[row, len(rest[row]) - 1].clone())
        return read

    def _run(self, ids_BS: Tensor, position_BS: Tensor, real_BT: Tensor, cache: DynamicCache) -> tuple[Tensor, Any]:
        runtime = self.runtime
        device = runtime.device
        inputs: dict[str, Any] = {"position_ids": position_BS.to(device), "attention_mask": real_BT.long().to(device)}
        with runtime.computing():
            output = runtime.model.base_model(ids_BS.to(device), use_cache=True, **{CACHE: cache}, **inputs)
        return output.last_hidden_state, cache

    def _can_keep(self) -> bool:
        """Whether texts may be continued from their keys and values: a trial gives the same log-probabilities."""
        model = self.runtime.model
        if not takes_positions(model) or keeps_states(model):
            return False
        size = model.get_input_embeddings().weight.shape[0]
        samples = [[(7 * place + 3 * length) % size for place in range(length)] for length in (13, 17, 26)]
        trial: list[Scored] = [(ids, len(ids) - 4) for ids in samples]
        try:
            befores = [tuple(ids[:first]) for ids, first in trial]
            behind = self._behind(befores, [list(ids[first:]) for ids, first in trial])
            plain = sequence_logprobs(model, self.runtime.tokenizer, trial, states=self.runtime.states, show=False)
        except (GerundError, AttributeError, IndexError, RuntimeError, TypeError, ValueError):
            return False
        dtype = self.runtime.autocast or model.dtype
        pairs = zip(behind, plain, strict=True)
        apart = max(float(np.abs(one - other).max()) for one, other in pairs)
        return apart <= _TOLERANCE.get(dtype, _TOLERANCE_HALF)


def _padded(texts: Sequence[Sequence[int]], width: int) -> tuple[Tensor, Tensor]:
    """Return token ids ``(B, S)``, zeros at the end of shorter texts, and which of them are real."""
    ids_BS = torch.zeros(len(texts), width, dtype=torch.long)
    for row, text in enumerate(texts):
        ids_BS[row, : len(text)] = torch.tensor(text, dtype=torch.long)
    return ids_BS, torch.arange(width) < torch.tensor([len(text) for text in texts])[:, None]


def _stacked(texts: Sequence[list[tuple[Tensor, Tensor]]]) -> DynamicCache:
    """Return one cache of several texts, which all end at its end."""
    cache = DynamicCache()
    past = max(keys.shape[1] for [(keys, _), *_] in texts)
    for number, of_layer in enumerate(zip(*texts, strict=True)):
        sides = []
        for side in range(2):
            heads, _, width = of_layer[0][side].shape
            joined = of_layer[0][side].new_zeros(len(texts), heads, past, width)
            for row, pair in enumerate(of_layer):
                joined[row, :, past - pair[side].shape[1] :] = pair[side]
            sides.append(joined)
        cache.update(*sides, number)
    return cache
