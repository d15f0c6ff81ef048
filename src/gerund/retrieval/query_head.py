"""Search an index from a conversation's own states: a linear head turns what the model has read into a query vector.

While the model reads a question to answer it, it computes states that know the conversation so far. Ridge regression,
on sentences of the index and without labels, maps them to the vector that the encoder would give the text; then no
second pass and no rewritten question is needed. Features are means of the tokens' states at four depths, once plain
and once weighted by how rare a token is (Arora et al. 2017), since the encoder also counts rare words for more.
"""

import json
import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError, safe_open

from gerund.data.passages import sentence_bounds
from gerund.errors import ConfigError, DataError, FingerprintError, TextError
from gerund.inference.generate.prompts import Message, Prompt
from gerund.inference.generate.session import Session, read_with_states
from gerund.inference.text_ids import encode_texts
from gerund.jobs.files import atomic_file
from gerund.models.vectors import unit
from gerund.retrieval.answer_generation import (
    DUMMIES,
    TURN,
    AnswerGenerator,
    Prompter,
    common_start,
    listed,
    session_for,
)
from gerund.retrieval.question_answering import PendingAnswer, Question
from gerund.retrieval.store import VectorStore
from gerund.types import Source

if TYPE_CHECKING:
    from gerund.language_model import LanguageModel

FILE = "query-head.safetensors"
TEXTS = 3000
"""Sentences that the head is fitted on."""

# Depths at which states are read, as fractions of the layers; weight of a token of probability p: r / (r + p).
_DEPTHS = (0.0, 1 / 3, 2 / 3, 1.0)
_RARITY = 1e-3
_RIDGE = 100.0
# What a turn counts beside the next one.
_DECAY = 0.5
_FEWEST, _SHORTEST, _LONGEST = 20, 15, 64
_DOCUMENTS = 2000


@dataclass(frozen=True)
class StateMeans:
    """Sums of tokens' states, plain and weighted, as ``(2, depths, D)``, and of their weights.

    >>> one = StateMeans().added(np.ones((4, 2, 3), dtype=np.float32), np.array([0.5, 1.0]))
    >>> one.features.shape, float(one.features.mean())
    ((24,), 1.0)
    """

    sums: Any = 0.0
    weights: Any = field(default_factory=lambda: np.zeros(2))

    def added(self, states_LTD: np.ndarray, weights_T: np.ndarray, decay: float = 1.0) -> Self:
        """Return the sums with more tokens; what was there counts by ``decay``."""
        both_2T = np.stack([np.ones_like(weights_T), weights_T])
        added = np.einsum("wt,ltd->wld", both_2T, states_LTD)
        return replace(self, sums=decay * self.sums + added, weights=decay * self.weights + both_2T.sum(axis=1))

    @property
    def features(self) -> np.ndarray:
        """The means, in one vector."""
        return np.asarray(self.sums / self.weights[:, None, None]).ravel()


@dataclass(frozen=True)
class QueryHead:
    """A linear map from features of a model's causal states to an encoder's query vectors.

    Attributes:
        weights: ``(F, D)``, for features with the mean ``means`` and divided by ``scales``.
        bias: ``(D,)``.
        rarity: weight of each token, ``(V,)``.
        model: hash of the weights of the model whose states are read.
        encoder: fingerprint of the encoder.
    """

    weights: np.ndarray
    means: np.ndarray
    scales: np.ndarray
    bias: np.ndarray
    rarity: np.ndarray
    model: str
    encoder: str

    def vector(self, states: StateMeans) -> np.ndarray:
        """Return the query vector ``(D,)``, of length 1."""
        return unit(((states.features - self.means) / self.scales @ self.weights + self.bias).astype(np.float32))

    def save(self, path: Path) -> None:
        """Write the head to a file, atomically."""
        arrays = {name: value for name, value in vars(self).items() if isinstance(value, np.ndarray)}
        about = {"gerund": json.dumps({"model": self.model, "encoder": self.encoder})}
        with atomic_file(path) as file:
            file.write(safetensors.numpy.save(arrays, metadata=about))

    @classmethod
    def load(cls, path: Path, lm: "LanguageModel", encoder: str) -> Self:
        """Read a head for a model and an encoder.

        Raises:
            FingerprintError: it was fitted for another model or encoder.
            DataError: it cannot be read.
        """
        try:
            with safe_open(path, "numpy") as file:
                about = json.loads((file.metadata() or {})["gerund"])
                head = cls(**{name: file.get_tensor(name) for name in file.keys()}, **about)  # noqa: SIM118
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise DataError(f"{path} is not a query head ({error}); gerund index --query-head makes it anew") from error
        if (head.model, head.encoder) != (lm.weights_hash, encoder):
            raise FingerprintError(f"{path} was made for another model; gerund index --query-head makes it anew")
        return head


def fit_query_head(
    store: VectorStore,
    lm: "LanguageModel",
    encode: Callable[[Sequence[str]], np.ndarray],
    encoder: str,
    language: str = "en",
    count: int = TEXTS,
    *,
    seed: int = 0,
) -> QueryHead:
    """Fit a head on sentences of an index.

    Args:
        store: the index's chunks.
        lm: the model that reads conversations.
        encode: returns the vectors ``(N, D)`` of queries.
        encoder: the encoder's fingerprint.
        language: of the documents.
        count: most sentences.
        seed: of their sample.

    Raises:
        DataError: the index has too few sentences.
        ConfigError: the model does not give the states of its layers.
    """
    texts = _sentences(store, language, count, seed)
    ids = [item.ids[:_LONGEST] for item in encode_texts(lm.tokenizer, texts, specials=True)]
    counts, total = Counter(chain.from_iterable(ids)), sum(map(len, ids))
    rarity_V = np.ones(len(lm.tokenizer), dtype=np.float32)
    for token, seen in counts.items():
        rarity_V[token] = _RARITY / (_RARITY + seen / total)
    features_NF = np.stack(
        [StateMeans().added(states_of(lm, text_ids)[1], rarity_V[text_ids]).features for text_ids in ids]
    )
    targets_ND = encode(texts).astype(np.float64)
    means_F, scales_F, bias_D = features_NF.mean(axis=0), features_NF.std(axis=0) + 1e-6, targets_ND.mean(axis=0)
    scaled_NF = (features_NF - means_F) / scales_F
    weights_FD = _ridge(scaled_NF, targets_ND - bias_D)
    weights, means, scales, bias = (array.astype(np.float32) for array in (weights_FD, means_F, scales_F, bias_D))
    return QueryHead(weights, means, scales, bias, rarity_V, lm.weights_hash, encoder)


def _ridge(x_NF: np.ndarray, y_ND: np.ndarray) -> np.ndarray:
    """Return the weights of ridge regression; by the smaller of the two systems, which have the same solution."""
    n, f = x_NF.shape
    if n < f:
        return np.asarray(x_NF.T @ np.linalg.solve(x_NF @ x_NF.T + _RIDGE * np.eye(n), y_ND))
    return np.asarray(np.linalg.solve(x_NF.T @ x_NF + _RIDGE * np.eye(f), x_NF.T @ y_ND))


def _sentences(store: VectorStore, language: str, count: int, seed: int) -> list[str]:
    chance, sources = random.Random(seed), sorted(store.documents())
    chunks = store.chunks_of(chance.sample(sources, min(_DOCUMENTS, len(sources))))
    spans = ((chunk.text, sentence_bounds(chunk.text, language)) for chunk in chunks)
    sentences = (" ".join(text[start:end].split()) for text, bounds in spans for start, end in bounds)
    texts = list(dict.fromkeys(text for text in sentences if len(text) >= _SHORTEST))
    if len(texts) < _FEWEST:
        raise DataError(f"{store.name} has {len(texts)} sentences; a query head is fitted on {_FEWEST} or more")
    chance.shuffle(texts)
    return texts[:count]


def states_of(lm: "LanguageModel", ids: Sequence[int], session: Session | None = None) -> tuple[Session, np.ndarray]:
    """Read tokens; return the session, and the tokens' states at four depths, ``(4, T, D)`` float32."""
    read, states = read_with_states(lm, ids, session)
    if len(states) <= len(_DEPTHS):
        raise ConfigError(
            f"{lm.name} does not give the states of its layers, from which a query head reads; load it with "
            "runtime='torch'"
        )
    depths = [states[round(depth * (len(states) - 1))][0].float().cpu().numpy() for depth in _DEPTHS]
    return read, np.stack(depths)


@dataclass(frozen=True)
class _QuestionFirst(Prompter):
    """Builds prompts whose question comes before its sources, so that it is read once, to search and to answer."""

    def prompt(self, question: str, sources: Sequence[Source], history: Sequence[Message]) -> Prompt:
        """Return instructions, earlier turns, question and sources."""
        content = f"{question.strip()}\n\nSources:\n\n{listed(sources)}"
        return self._after_turns(history, content, f"Question: {content}\n\nAnswer:")

    def without_sources(self, question: str, history: Sequence[Message]) -> list[int]:
        """Return the token ids of a conversation up to the end of its last question."""
        # Sources follow now; in the next turn's history, the end of the turn follows.
        asked = [f"{question.strip()}{end}" for end in ("", f"\n\n{DUMMIES[0]}")]
        prompts = [self._after_turns(history, text, f"Question: {text}") for text in asked]
        return common_start(*map(self.prompt_ids, prompts))


class ConversationReader(AnswerGenerator):
    """Reads a conversation once: its states search the index, and its keys and values begin the answer's prompt."""

    def __init__(self, lm: "LanguageModel", head: QueryHead) -> None:
        super().__init__(lm)
        self.head = head
        self.prompter: _QuestionFirst = _QuestionFirst(lm.model, lm.tokenizer)
        self._session: Session | None = None
        self._states = StateMeans()
        self._lock = threading.Lock()

    def vector(self, question: Question) -> np.ndarray:
        """Return the query vector ``(D,)`` of a question after its history; only what is new is read."""
        with self._lock:
            while True:
                try:
                    return self._vector(question)
                except TextError:
                    if not question.history:
                        raise
                    # It fills the context, so the oldest turn goes, as in the answer's prompt.
                    question = replace(question, history=question.history[TURN:])

    def _vector(self, question: Question) -> np.ndarray:
        ids = self.prompter.adding(question.instructions).without_sources(question.question, question.history)
        session = session_for(ids, self._session)
        if session is None or not question.history or len(session.token_ids) == len(ids):
            session, self._states = None, StateMeans()
        start = 0 if session is None else len(session.token_ids)
        self._session, states_LTD = states_of(self.lm, ids[start:], session)
        for begin, end in self._turns(question, ids, start):
            spans = slice(begin - start, end - start)
            weights_T = self.head.rarity[ids[begin:end]]
            self._states = self._states.added(states_LTD[:, spans], weights_T, _DECAY)
        return self.head.vector(self._states)

    def _turns(self, question: Question, ids: list[int], start: int) -> list[tuple[int, int]]:
        """Return where the questions are that were not read yet."""
        prompter = self.prompter.adding(question.instructions)
        asked, turns = [*(turn["content"] for turn in question.history[::2]), question.question], []
        for number, text in enumerate(asked):
            history = question.history[: 2 * number]
            other = DUMMIES[1] if text.strip().startswith(DUMMIES[0]) else DUMMIES[0]
            begin = len(common_start(ids, prompter.without_sources(other, history)))
            end = len(common_start(ids, prompter.without_sources(text, history)))
            if begin >= start and end > begin:
                turns.append((begin, end))
        return turns

    def prepare(self, question: Question, sources: Sequence[Source]) -> PendingAnswer:
        """Return what the model is to generate, after what was read of the conversation."""
        prompter = self.prompter.adding(question.instructions)
        prompt = prompter.answer_prompt(question.question, sources, question.history, question.max_new_tokens)
        return PendingAnswer(question, self.lm, prompt, session_for(prompt.ids, self._session))
