"""Rank documents for a query: by vectors, by the model's trained scorer, or by the likelihood of the query."""

from collections.abc import Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from gerund.errors import ConfigError, TextError
from gerund.inference.likelihood import causal_runtime, continuation_logprobs
from gerund.inference.text_ids import beginnings, encode_texts
from gerund.models.vectors import compared
from gerund.scoring.names import RelevanceMeasure
from gerund.types import Ranking, Scorer, TextModel

# Asks for the query after a document (Sachan et al. 2022, section 2.2).
BEFORE = "Passage: "
BEHIND = ". Please write a question based on this passage."


def rank(
    lm: TextModel,
    query: str,
    documents: Sequence[str],
    *,
    by: RelevanceMeasure,
    scorer: Scorer | None,
    top_k: int | None = None,
) -> Ranking:
    """Rank documents for a query, best first; see ``LanguageModel.rerank``. ``scorer`` is the model's trained one."""
    if not documents:
        return Ranking([], [], by)
    if by == "vectors":
        score_N = by_vectors(lm, query, documents)
    elif by == "likelihood":
        score_N = by_likelihood(lm, query, documents)
    elif scorer is None:
        raise ConfigError(
            f'{lm.name} was not trained to score under this encoder config. Use `by="vectors"` or `by="likelihood"`.'
        )
    else:
        score_N = np.asarray(scorer.score([query], [list(documents)])[0], dtype=np.float64)
    order = np.argsort(-score_N, kind="stable")[:top_k]
    return Ranking([int(index) for index in order], [float(score_N[index]) for index in order], by)


def by_vectors(lm: TextModel, query: str, documents: Sequence[str]) -> np.ndarray:
    """Return the similarity of each document and the query ``(n,)``, with the encoder's prompts for the two."""
    prompts = lm.encoder.prompts
    query_D = lm.encode(query, prompt_name="query" if "query" in prompts else None, show_progress=False)
    document_ND = lm.encode(documents, prompt_name="document" if "document" in prompts else None, show_progress=False)
    return compared(document_ND, query_D[None], lm.encoder.similarity)[:, 0]


def by_likelihood(lm: TextModel, query: str, documents: Sequence[str]) -> np.ndarray:
    """Return the mean log-probability of the query's tokens after each document ``(n,)``, under the base model.

    Unsupervised passage re-ranking (UPR, Sachan et al. 2022): a request for a question stands between document and
    query. Documents that do not fit the model's context are truncated at their end.
    """
    model, tokenizer = lm.model, lm.tokenizer
    limit = causal_runtime(model, tokenizer).max_length
    room = None
    if limit is not None:
        [around] = encode_texts(tokenizer, [f"{BEFORE}a{BEHIND} {query.strip()}"])
        room = limit - len(around.ids)
        if room < 1:
            raise TextError(
                f"the query is so long that the model's context of {limit} tokens holds no document with it"
            )
    pairs = [(f"{BEFORE}{_beginning(tokenizer, text, room)}{BEHIND}", f" {query.strip()}") for text in documents]
    logprobs = continuation_logprobs(model, tokenizer, pairs, show=False)
    return np.array([float(pair.continuation.mean(dtype=np.float64)) for pair in logprobs])


def _beginning(tokenizer: PreTrainedTokenizerBase, text: str, limit: int | None) -> str:
    """Return the first ``limit`` tokens of a text, without the full stop at its end."""
    text = text.strip().rstrip(".")
    # No text has more tokens than bytes; half of them leaves room for what a tokenizer adds.
    if limit is None or len(text.encode()) <= limit // 2:
        return text
    return beginnings(tokenizer, [text], limit)[0]
