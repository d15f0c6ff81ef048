"""Query likelihood: how probable a document makes a query under the base model, its causal mask and no adapter.

The document stands in one prompt, ``Document: ...``, with the query behind it, through the chat template where the
model has one; the query's tokens are scored. The *lift* compares each token with the same prompt without the document
and counts what it gains: a token that the document does not help counts 0, so that the words of a question that fit any
document do not decide. Sachan et al. 2022 ("Improving Passage Retrieval with Zero-Shot Question Generation") rank by
the likelihood alone.

Each document is read once, and its keys and values are kept for the next query. Of a long document the best passage
counts. Without torch where the network is packed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np

from gerund.errors import TextError
from gerund.inference.generate.prompts import render
from gerund.inference.text_ids import encode_texts
from gerund.inference.tokens import context_length, split_pairs
from gerund.models.kinds import packed_network
from gerund.scoring.kept_documents import Kept
from gerund.scoring.word_overlap import content_words
from gerund.types import Rendered

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PASSAGE = 384
"""Tokens of a passage; a longer document is cut into several."""
_OVERLAP = 64
_PASSAGES = 8
"""Passages of a document that are read: those that share the most words with the query."""
KEPT_BYTES, KEPT_PACKED_BYTES = 512 * 2**20, 128 * 2**20
"""Memory for the keys and values of documents that were read last, per model; and of a packed one, which is light."""

# Characters that no text has: they mark where document and query stand in a rendered template.
_DOCUMENT, _QUERY = "\U00100001", "\U00100002"
_TURN, _TURN_ALONE = f"Document: {_DOCUMENT}\n\nQuery: {_QUERY}", f"Query: {_QUERY}"


@dataclass(frozen=True)
class QueryPrompt:
    """What stands before a query: ``head``, the document and ``middle``; or ``alone``, without a document."""

    head: str
    middle: str
    alone: str
    is_rendered: bool

    @classmethod
    def of(cls, tokenizer: "PreTrainedTokenizerBase") -> "QueryPrompt":
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
        model: a decoder-only model, or what a packed network is as one.
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
        model: "PreTrainedModel",
        tokenizer: "PreTrainedTokenizerBase",
        query: str,
        measure: str,
        *,
        autocast: Any = None,
    ) -> None:
        self._tokenizer, self._query, self._measure = tokenizer, query.strip(), measure
        self._reader = _reader_of(model, tokenizer, autocast)
        self._prompt = QueryPrompt.of(tokenizer)
        self._limit = limit = context_length(model.config, tokenizer)
        [around] = split_pairs(tokenizer, [(self._prompt.before("a"), self._continuation)], limit)
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
        splits = split_pairs(self._tokenizer, pairs, self._limit)
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


class Reader(Protocol):
    """Reads texts of the form (before, query)."""

    def logprobs(self, sequences: Sequence[tuple[Sequence[int], int]]) -> list[np.ndarray]:
        """Return the log-probabilities of the tokens of each sequence from a position on, float32."""


def _reader_of(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", autocast: Any) -> Reader:
    network = packed_network(model)
    if network is not None:
        from gerund.scoring.packed_document_reader import PackedDocumentReader  # it needs ONNX Runtime

        with _lock:
            kept = _packed.setdefault(network, Kept(KEPT_PACKED_BYTES))
        return PackedDocumentReader(network, kept)
    from gerund.inference.likelihood import causal_runtime
    from gerund.scoring.document_reader import DocumentReader

    runtime = replace(causal_runtime(model, tokenizer), autocast=autocast)
    with _lock:
        kept = _kept.setdefault(model, {}).setdefault(autocast, Kept(KEPT_BYTES))
    return DocumentReader(runtime, kept)


def forget(model: "PreTrainedModel") -> None:
    """Drop the keys and values that are kept of a model's documents."""
    with _lock:
        _kept.pop(model, None)
        if (network := packed_network(model)) is not None:
            _packed.pop(network, None)


_kept: WeakKeyDictionary[Any, dict[Any, Kept[Any]]] = WeakKeyDictionary()
_packed: WeakKeyDictionary[Any, Kept[Any]] = WeakKeyDictionary()
_lock = Lock()
