"""Query likelihood: how probable a document makes a query under the base model, its causal mask and no adapter.

The document stands in one prompt, ``Document: ...``, with the query behind it, through the chat template where the
model has one; the query's tokens are scored. The *lift* compares each token with the same prompt without the document
and counts what it gains: a token that the document does not help counts 0, so that the words of a question that fit any
document do not decide. Sachan et al. 2022 ("Improving Passage Retrieval with Zero-Shot Question Generation") rank by
the likelihood alone.

Each document is read once, and the query's tokens behind all of them in one pass. The keys and values of the documents
that were read last are kept for the next query. Of a long document the best passage counts.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from gerund.attention.cache_names import CACHE
from gerund.attention.recurrent import keeps_states
from gerund.errors import GerundError, ModelError, TextError
from gerund.inference.encode.batches import default_batch_tokens
from gerund.inference.encode.runtime import EncoderRuntime, takes_positions
from gerund.inference.generate.prompts import render
from gerund.inference.likelihood import Scored, causal_runtime, sequence_logprobs, split_pairs
from gerund.inference.lm_head import TokenHead
from gerund.inference.text_ids import encode_texts
from gerund.inference.tokens import rotary_limit
from gerund.scoring.word_overlap import content_words
from gerund.types import Rendered

PASSAGE = 384
"""Tokens of a passage; a longer document is cut into several."""
_OVERLAP = 64
_PASSAGES = 8
"""Passages of a document that are read: those that share the most words with the query."""
KEPT_BYTES = 512 * 2**20
"""Memory for the keys and values of documents that were read last, per model."""

# Keys and values in one pass over the query's tokens, and documents in it at most.
_PASS_BYTES, _PASS_ROWS = 256 * 2**20, 64
# Characters that no text has: they mark where document and query stand in a rendered template.
_DOCUMENT, _QUERY = "\U00100001", "\U00100002"
_TURN, _TURN_ALONE = f"Document: {_DOCUMENT}\n\nQuery: {_QUERY}", f"Query: {_QUERY}"
# A head shorter than this is read again with every document.
_WORTH_SHARING = 8
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
_TOLERANCE_HALF = 0.2


@dataclass(frozen=True)
class QueryPrompt:
    """What stands before a query: ``head``, the document and ``middle``; or ``alone``, without a document."""

    head: str
    middle: str
    alone: str
    is_rendered: bool

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> "QueryPrompt":
        """Return the prompt of a model, through its chat template if that takes a single user turn."""
        if tokenizer.chat_template:
            try:
                turns = [str(render(tokenizer, [{"role": "user", "content": text}])) for text in (_TURN, _TURN_ALONE)]
                (head, middle), (alone,) = map(_parts, turns)
                return cls(head, middle, alone, True)
            except (TextError, ValueError):
                pass  # a template for other conversations
        (head, middle), (alone,) = map(_parts, (_TURN, _TURN_ALONE))
        return cls(head, middle, alone, False)

    def before(self, document: str | None) -> str:
        """Return the text before the query; control tokens in the document are plain text."""
        if document is None:
            return Rendered(self.alone) if self.is_rendered else self.alone
        text = f"{self.head}{document}{self.middle}"
        literal = [(len(self.head), len(self.head) + len(document))]
        return Rendered(text, literal=literal) if self.is_rendered else text


def _parts(turn: str) -> tuple[str, ...]:
    """Return a turn's text before the document, between the two (without it: only that before the query)."""
    before, _, _ = turn.partition(_QUERY)
    parts = before.rstrip(" ").split(_DOCUMENT)
    if _QUERY not in turn or len(parts) != turn.count(_DOCUMENT) + 1:
        raise ValueError("the template changes the texts of a conversation")
    return tuple(parts)


# From the log-probabilities of the query's tokens behind a document, and without one.
Measure = Callable[[np.ndarray, np.ndarray], np.ndarray]

MEASURES: dict[str, Measure] = {
    "lift": lambda given, alone: np.maximum(given - alone, 0),
    "mixed": lambda given, alone: np.logaddexp(given, alone) - np.log(2),
    "likelihood": lambda given, _: given,
}
"""``lift``; ``mixed``, the log-probability under the mean of both; and the plain ``likelihood``."""


class QueryLikelihood:
    """Scores documents for one query by a measure of ``MEASURES``.

    Args:
        model: a decoder-only model.
        tokenizer: its tokenizer.
        query: the query.
        measure: its name.
        autocast: compute in this dtype; None computes in that of the weights.

    Raises:
        UnsupportedModelError: the model has an encoder.
        TextError: the query leaves no room for a document in the model's context.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        query: str,
        measure: str,
        *,
        autocast: torch.dtype | None = None,
    ) -> None:
        self._tokenizer, self._query, self._measure = tokenizer, query.strip(), measure
        self._reader = _reader_of(model, tokenizer, autocast)
        self._prompt = QueryPrompt.of(tokenizer)
        limit = causal_runtime(model, tokenizer).max_length
        [around] = split_pairs(model, tokenizer, [(self._prompt.before("a"), self._continuation)])
        # A token to spare, since a document may not join its neighbors as this one does.
        room = None if limit is None else limit + 1 - len(around.ids)
        if around.lost or (room is not None and room < 1):
            raise TextError(
                f"the query is so long that the model's context of {limit} tokens holds no document with it"
            )
        self._passage = PASSAGE if room is None else min(PASSAGE, room)
        [self._alone] = self._logprobs([None])

    @property
    def _continuation(self) -> str:
        return f" {self._query}"

    def __call__(self, documents: Sequence[str]) -> np.ndarray:
        """Return the mean score of the query's tokens for each document ``(N,)`` float64, that of its best passage."""
        return self.scores(documents, [self._measure])[self._measure]

    def scores(self, documents: Sequence[str], measures: Sequence[str]) -> dict[str, np.ndarray]:
        """Return the scores by several measures, which one pass gives."""
        passages = [self._passages(text) for text in documents]
        logprobs = self._logprobs([passage for texts in passages for passage in texts]) if passages else []
        scores = {}
        for name in measures:
            values = (self._value(given, MEASURES[name]) for given in logprobs)
            scores[name] = np.array([max(next(values) for _ in texts) for texts in passages], dtype=np.float64)
        return scores

    def _value(self, given: np.ndarray, measure: Measure) -> float:
        # A tokenizer may join the first letters with what precedes them in one of the two prompts.
        count = min(len(given), len(self._alone))
        pair = given[len(given) - count :], self._alone[len(self._alone) - count :]
        return float(measure(*(side.astype(np.float64) for side in pair)).mean())

    def _logprobs(self, documents: Sequence[str | None]) -> list[np.ndarray]:
        pairs = [(self._prompt.before(text), self._continuation) for text in documents]
        splits = split_pairs(self._reader.runtime.model, self._tokenizer, pairs)
        return self._reader.logprobs([(one.ids, one.split) for one in splits])

    def _passages(self, text: str) -> list[str]:
        """Return the passages of a document to read."""
        [encoded] = encode_texts(self._tokenizer, [text.strip()], specials=False, offsets=True)
        places, text = encoded.offsets, text.strip()
        if len(places) <= self._passage:
            return [text]
        step = max(1, self._passage - _OVERLAP)
        starts = range(0, len(places) - min(_OVERLAP, self._passage - 1), step)
        parts = [places[start : start + self._passage] for start in starts]
        passages = [text[part[0][0] : part[-1][1]] for part in parts]
        words = set(content_words(self._query))
        shared = [len(words.intersection(content_words(passage))) for passage in passages]
        best = sorted(range(len(passages)), key=lambda place: -shared[place])[:_PASSAGES]
        return [passages[place] for place in sorted(best)]


@dataclass(frozen=True)
class _Read:
    """A text that was read: keys and values ``(key heads, T, head_dim)`` by layer, and its last state ``(D,)``."""

    layers: list[tuple[Tensor, Tensor]]
    last_D: Tensor

    @property
    def n_bytes(self) -> int:
        return sum(keys.nbytes + values.nbytes for keys, values in self.layers) + self.last_D.nbytes


class _Kept:
    """What was read last of a model's texts, at most ``KEPT_BYTES``; ``works`` says if that can be used."""

    def __init__(self) -> None:
        self.works: bool | None = None
        self._texts: OrderedDict[tuple[int, ...], _Read] = OrderedDict()
        self._bytes = 0
        self._lock = Lock()

    def find(self, texts: Iterable[tuple[int, ...]]) -> dict[tuple[int, ...], _Read]:
        """Return those of the texts that are kept."""
        with self._lock:
            kept = {text: self._texts[text] for text in texts if text in self._texts}
            for text in kept:
                self._texts.move_to_end(text)
        return kept

    def add(self, read: Mapping[tuple[int, ...], _Read]) -> None:
        """Keep texts, and drop those that were not needed for longest."""
        with self._lock:
            for text, states in read.items():
                if text not in self._texts and states.n_bytes <= KEPT_BYTES:
                    self._texts[text] = states
                    self._bytes += states.n_bytes
            while self._bytes > KEPT_BYTES:
                _, dropped = self._texts.popitem(last=False)
                self._bytes -= dropped.n_bytes


class _Reader:
    """Reads texts of the form (before, query), and keeps the keys and values of what stands before queries."""

    def __init__(self, runtime: EncoderRuntime, kept: _Kept) -> None:
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
        if len(texts) < 2:
            return None
        first, last = min(texts), max(texts)  # in the order of words, so that only these two differ soonest
        count = next((at for at, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
        count = min(count, *(len(text) - 1 for text in texts))
        if count < _WORTH_SHARING:
            return None
        head = first[:count]
        return head, self._fresh([head], None)[head]

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


def _reader_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, autocast: torch.dtype | None) -> _Reader:
    with _lock:
        kept = _kept.setdefault(model, {}).setdefault(autocast, _Kept())
    return _Reader(replace(causal_runtime(model, tokenizer), autocast=autocast), kept)


def forget(model: PreTrainedModel) -> None:
    """Drop the keys and values that are kept of a model's documents."""
    with _lock:
        _kept.pop(model, None)


_kept: WeakKeyDictionary[PreTrainedModel, dict[torch.dtype | None, _Kept]] = WeakKeyDictionary()
_lock = Lock()
