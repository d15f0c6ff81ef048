"""Rank documents by asking the model: yes or no about each one, a list to pick from, or where its attention goes.

These ways need larger or trained models: with SmolLM2-135M, yes/no answers ranked below BM25 on Medline and Cranfield,
and attention on Cranfield.

``yesno``: the logit of "Yes" less that of "No" as the answer to whether the document is relevant (Nogueira et al. 2020,
"Document Ranking with a Pretrained Sequence-to-Sequence Model", and the yes/no rerankers since).

``listwise``: documents with letters in one prompt, ranked by the log-probability of their letters as the answer (Gangi
Reddy et al. 2024, "FIRST: Faster Improved Listwise Reranking with Single Token Decoding"), both in the given order and
in the reversed one, since a model prefers some places. A window slides from the last documents to the first (Sun et al.
2023, "Is ChatGPT Good at Search?", RankGPT).

``attention``: how much of their attention the query's tokens give to the document, less what they give to it where the
query says nothing ("N/A"). After Chen et al. 2025, "Attention in Large Language Models Yields Efficient Zero-Shot
Re-Rankers" (ICR), but with one document per prompt: in a small model attention to several depends on their places.

Shapes: B texts of a batch, T tokens, D dimensions of a state, H heads, N documents.
"""

import re
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from gerund.attention.bound_plan import BoundPlan
from gerund.attention.layouts import decoder_layers, is_one_graph
from gerund.attention.recurrent import kind_of
from gerund.errors import ConfigError, GerundError, TextError
from gerund.inference.encode.batches import in_batches
from gerund.inference.generate.prompts import render
from gerund.inference.likelihood import causal_runtime
from gerund.inference.lm_head import TokenHead
from gerund.inference.text_ids import beginnings, encode_texts, text_ids
from gerund.inference.tokens import Tokens
from gerund.scoring.query_likelihood import QueryPrompt
from gerund.scoring.reranker import Reranker
from gerund.settings.ranking import PROMPT_MEASURES, RerankerConfig
from gerund.types import Rendered, TextModel

WINDOW = 10
"""Documents in one prompt of ``listwise``; the next window has half of them again."""
PASSAGE = 256
"""Tokens of a document that ``listwise`` reads, from its start; fewer where the context is short."""
_LETTERS = "ABCDEFGHIJ"
_LAST_LAYERS = 3  # one layer in so many, the last ones, is read for attention
_NOTHING = "N/A"
_QUERY, _DOCUMENT = "\U00100002", "\U00100001"

YES_NO = "Query: {query}\n\nDocument: {document}\n\nIs the document relevant to the query? Answer Yes or No."
LISTWISE = (
    "{documents}Query: {query}\n\nWhich of the documents is the most relevant to the query? Answer with its letter."
)


def yes_no(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str) -> Reranker:
    """Return what scores documents by the answer "Yes" or "No" of a base model.

    Raises:
        ConfigError: the tokenizer has no single tokens for the two answers.
    """
    asked = YES_NO.format(document=_DOCUMENT, query=_QUERY)
    text, is_rendered = _prompt(tokenizer, asked)
    piece = text.replace(_DOCUMENT, "{document}").replace(_QUERY, "{query}")
    for yes, no in (("Yes", "No"), (" Yes", " No"), ("yes", "no")) if is_rendered else ((" Yes", " No"), ("Yes", "No")):
        ids = [text_ids(tokenizer, answer, specials=False) for answer in (yes, no)]
        if [len(tokens) for tokens in ids] == [1, 1] and ids[0] != ids[1]:
            (true,), (false,) = ids
            pieces = (piece,) if is_rendered else ("{bos}" + piece,)
            config = RerankerConfig("pieces", pieces, true=true, false=false, activation="Identity")
            return Reranker(model, tokenizer, config, name=name)
    raise ConfigError(f'{name} has no single tokens for Yes and No, so it can\'t rank by yesno. Use `by="lift"`.')


def _prompt(tokenizer: PreTrainedTokenizerBase, asked: str) -> tuple[str, bool]:
    """Return a question with the start of its answer, and whether a chat template made it."""
    if tokenizer.chat_template:
        try:
            text = str(render(tokenizer, [{"role": "user", "content": asked}]))
            if all(text.count(mark) == asked.count(mark) for mark in (_QUERY, _DOCUMENT)):
                return text, True
        except (TextError, ValueError):
            pass  # a template for other conversations
    return f"{asked}\nAnswer:", False


class Listwise:
    """Ranks documents for one query by windows of them in one prompt (``relevance.ListScore``).

    Scores are places, from 1 for the first to 0 for the last: log-probabilities of several windows don't compare.

    Raises:
        TextError: the query leaves no room for a document.
        ConfigError: the tokenizer has no single tokens for the letters.
    """

    reads_lists = True

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, query: str) -> None:
        self._runtime = causal_runtime(model, tokenizer)
        self._tokenizer, self._query = tokenizer, query.strip()
        _, self._is_rendered = _prompt(tokenizer, _DOCUMENT)
        self._letters = self._letter_ids()
        limit = self._runtime.max_length
        self._room = PASSAGE
        if limit is not None:
            frame = len(self._ids([""] * WINDOW))
            self._room = min(PASSAGE, (limit - frame) // WINDOW - 1)
            if self._room < 1:
                raise TextError(
                    f"the query is so long that the model's context of {limit} tokens holds no {WINDOW} documents "
                    "with it"
                )

    def __call__(self, documents: Sequence[str], end: float | None = None) -> np.ndarray:
        """Return the scores of documents ``(N,)`` float64, in the order of a first stage; none if ``end`` has passed.

        ``end`` is a time of ``time.monotonic``: after it no further window is read, and documents keep their places.
        """
        order, first = list(range(len(documents))), max(0, len(documents) - WINDOW)
        texts = beginnings(self._tokenizer, [text.strip() for text in documents], self._room) if documents else []
        while True:
            if end is not None and time.monotonic() >= end:
                break
            window = order[first : first + WINDOW]
            value = self.window_scores([texts[place] for place in window])
            order[first : first + WINDOW] = [window[place] for place in np.argsort(-value, kind="stable")]
            if not first:
                break
            first = max(0, first - WINDOW // 2)
        scores_N = np.empty(len(documents))
        scores_N[order] = np.linspace(1, 0, len(documents)) if len(documents) > 1 else 1.0
        return scores_N

    @torch.no_grad()
    def window_scores(self, texts: Sequence[str]) -> np.ndarray:
        """Return the mean log-probability of each document's letter over both orders ``(N,)``."""
        count = len(texts)
        both = [self._ids(texts), self._ids(texts[::-1])]
        logprobs_2N = np.zeros((2, count))
        head = TokenHead(self._runtime.model)

        def keep(rows: list[int], batch: list[Tokens], hidden_BTD: Tensor, begin: Tensor) -> None:
            last_B = begin + torch.tensor([len(text) - 1 for text in batch], device=begin.device)
            states_BD = hidden_BTD[torch.arange(len(batch), device=begin.device), last_B]
            logits_BN = head.logits(states_BD)[:, self._letters[:count]].float()
            logprobs_2N[rows] = torch.log_softmax(logits_BN, dim=1).cpu().numpy()

        in_batches(
            self._runtime, [Tokens(ids, 0, 0) for ids in both], self._runtime.states, keep, show=False, label="scoring"
        )
        return np.asarray((logprobs_2N[0] + logprobs_2N[1, ::-1]) / 2)

    def _ids(self, texts: Sequence[str]) -> list[int]:
        """Return the tokens of a window's prompt; control tokens in query and documents are plain text."""
        asked = LISTWISE.format(documents=_DOCUMENT, query=_QUERY)
        prompt, _ = _prompt(self._tokenizer, asked)
        listed = [(f"[{letter}] ", text, "\n\n") for letter, text in zip(_LETTERS, texts, strict=False)]
        whole, literal = "", []
        for part in re.split(f"([{_QUERY}{_DOCUMENT}])", prompt):
            pieces = {_DOCUMENT: [one for entry in listed for one in entry], _QUERY: [self._query]}.get(part, [part])
            start = len(whole)
            whole += "".join(pieces)
            if part in (_DOCUMENT, _QUERY):
                literal.append((start, len(whole)))
        text: str = Rendered(whole, literal=literal) if self._is_rendered else whole
        [encoded] = encode_texts(self._tokenizer, [text])
        return encoded.ids

    def _letter_ids(self) -> list[int]:
        for before in ("", " ") if self._is_rendered else (" ", ""):
            ids = [text_ids(self._tokenizer, before + letter, specials=False) for letter in _LETTERS]
            if all(len(tokens) == 1 for tokens in ids) and len({tokens[0] for tokens in ids}) == len(ids):
                return [tokens[0] for tokens in ids]
        raise ConfigError(
            'the tokenizer has no single tokens for letters, so the model can\'t rank by listwise. Use `by="lift"`.'
        )


class QueryAttention:
    """Scores documents for one query by the attention that its tokens pay to each.

    Raises:
        ConfigError: the model doesn't give its attention away.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, query: str) -> None:
        if is_one_graph(model):
            raise ConfigError(
                'the packed runtime doesn\'t give its attention away. Load the model with `runtime="torch"` to rank by '
                "attention"
            )
        self._runtime = causal_runtime(model, tokenizer)
        self._tokenizer, self._query = tokenizer, query.strip()
        self._prompt = QueryPrompt.of(tokenizer)
        layers = [at for at, layer in enumerate(decoder_layers(model)) if kind_of(layer).attends]
        self._layers = frozenset(layers[-max(1, len(layers) // _LAST_LAYERS) :])
        limit = self._runtime.max_length
        frame = len(self._sequence("", self._query)[0])
        self._room = None if limit is None else limit - frame - 1
        if self._room is not None and self._room < 1:
            raise TextError(
                f"the query is so long that the model's context of {limit} tokens holds no document with it"
            )

    def __call__(self, documents: Sequence[str]) -> np.ndarray:
        """Return the scores of documents ``(N,)`` float64."""
        texts = [text.strip() for text in documents]
        if self._room is not None and texts:
            texts = beginnings(self._tokenizer, texts, self._room)
        values = [self.paid(text, self._query) - self.paid(text, _NOTHING) for text in texts]
        return np.array(values, dtype=np.float64)

    @torch.no_grad()
    def paid(self, document: str, query: str) -> float:
        """Return the attention of the query's tokens to all of the document: mean over tokens, heads and layers."""
        ids, inside_T, asked_T = self._sequence(document, query)
        weights: list[float] = []

        def note(layer: int, _: bool, weights_BHTT: Tensor) -> None:
            if layer in self._layers:
                weights.append(float(weights_BHTT[0][:, asked_T][:, :, inside_T].float().sum(-1).mean()))

        bound = BoundPlan(self._runtime.plan, record=note)
        with self._runtime.computing():
            self._runtime.model.base_model(
                torch.tensor([ids], device=self._runtime.device), use_cache=False, attention_plan=bound
            )
        if len(weights) < len(self._layers):
            raise ConfigError(f"this {self._runtime.model.config.model_type} model doesn't give its attention away")
        return float(np.mean(weights))

    def _sequence(self, document: str, query: str) -> tuple[list[int], list[int], list[int]]:
        """Return token ids, the places of the document's tokens, and those of the query's."""
        before = self._prompt.before(document)
        text: str = f"{before} {query}"
        start = len(self._prompt.head)
        if isinstance(before, Rendered):
            text = Rendered(text, literal=[*before.literal, (len(before), len(text))])
        [encoded] = encode_texts(self._tokenizer, [text], offsets=True)
        spans = {"document": (start, start + len(document)), "query": (len(before), len(text))}
        places: dict[str, list[int]] = {
            name: [at for at, (low, high) in enumerate(encoded.offsets) if high > first and low < last]
            for name, (first, last) in spans.items()
        }
        return encoded.ids, places["document"], places["query"]


def scorer_of(lm: TextModel, query: str, by: str) -> Callable[[Sequence[str]], np.ndarray]:
    """Return what scores documents for a query by one of ``PROMPT_MEASURES``."""
    if by == "listwise":
        return Listwise(lm.model, lm.tokenizer, query)
    if by == "attention":
        return QueryAttention(lm.model, lm.tokenizer, query)
    scorer = yes_no(lm.model, lm.tokenizer, lm.name)
    return lambda documents: np.asarray(scorer.score([query], [list(documents)])[0], dtype=np.float64)


def prompt_measures_of(lm: TextModel) -> list[str]:
    """Return those of ``PROMPT_MEASURES`` that a language model has the tokens and the runtime for."""
    measures: list[str] = []
    for by in PROMPT_MEASURES:
        try:
            scorer_of(lm, "a", by)
        except GerundError:
            continue
        measures.append(by)
    return measures
