"""Which documents are relevant to a query: by vectors, by the model's own scorer, or by how probable the query is.

Knows: what a model says of a query beside a document. Does not know: collections, judgements.
"""

from collections.abc import Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from gerund.errors import ConfigError, TextError
from gerund.inference.likelihood import causal_runtime, continuation_logprobs
from gerund.inference.text_ids import beginnings, encode_texts
from gerund.models.vectors import compared
from gerund.scoring.names import DEFAULT_MEASURE, RelevanceMeasure
from gerund.text_encoder import TextEncoder
from gerund.types import Ranking, Scorer

# What asks for the query behind a document (Sachan et al. 2022, section 2.2).
BEFORE = "Passage: "
BEHIND = ". Please write a question based on this passage."


def rank(
    lm: TextEncoder,
    query: str,
    documents: Sequence[str],
    *,
    by: RelevanceMeasure = DEFAULT_MEASURE,
    own: Scorer | None = None,
    top_k: int | None = None,
) -> Ranking:
    """Rank documents for a query; see ``GenerativeModel.rerank``.

    Args:
        lm: the model.
        query: the query.
        documents: the documents, none of them blank.
        by: how relevance is measured.
        own: the scorer that the model was trained to be.
        top_k: how many are kept.

    Raises:
        ConfigError: the model has no scorer of its own and is asked for it.
        UnsupportedModelError: likelihood is asked of a model that does not continue a text.
    """
    if not documents:
        return Ranking([], [], by)
    if by == "vectors":
        scores = by_vectors(lm, query, documents)
    elif by == "likelihood":
        scores = by_likelihood(lm, query, documents)
    elif own is None:
        raise ConfigError(f"{lm.name} was not trained to score under this encoder config; take vectors or likelihood")
    else:
        [listed] = own.score([query], [list(documents)])
        scores = np.asarray(listed, dtype=np.float64)
    order = np.argsort(-scores, kind="stable")[:top_k]
    return Ranking([int(index) for index in order], [float(scores[index]) for index in order], by)


def by_vectors(lm: TextEncoder, query: str, documents: Sequence[str]) -> np.ndarray:
    """Return how near documents are to a query ``(n,)``, as the encoder compares vectors: usually their cosine.

    Each is read with the encoder's prompt for it, where it has one.
    """
    prompts = lm.encoder.prompts
    query_D = lm.encode(query, prompt_name="query" if "query" in prompts else None, show_progress=False)
    document_ND = lm.encode(documents, prompt_name="document" if "document" in prompts else None, show_progress=False)
    return compared(document_ND, query_D[None], lm.encoder.similarity)[:, 0]


def by_likelihood(lm: TextEncoder, query: str, documents: Sequence[str]) -> np.ndarray:
    """Return the mean log-probability of the query's tokens behind each document ``(n,)``, under the untouched model.

    Unsupervised passage re-ranking (UPR, Sachan et al. 2022): a request for a question stands between the two. Of a
    document that the model's context has no room for, the beginning is read.
    """
    model, tokenizer = lm.model, lm.tokenizer
    limit = causal_runtime(model, tokenizer).max_length
    room = None
    if limit is not None:
        fixed = f"{BEFORE}a{BEHIND} {query.strip()}"
        [around] = encode_texts(tokenizer, [fixed])
        room = limit - len(around.ids)
        if room < 1:
            raise TextError(
                f"the query is so long that the model's context of {limit} tokens holds no document with it"
            )
    pairs = [(f"{BEFORE}{_beginning(tokenizer, text, room)}{BEHIND}", f" {query.strip()}") for text in documents]
    found = continuation_logprobs(model, tokenizer, pairs, show=False)
    return np.array([float(one.continuation.mean(dtype=np.float64)) for one in found])


def _beginning(tokenizer: PreTrainedTokenizerBase, text: str, most: int | None) -> str:
    """Return as much of a text's beginning as has at most so many tokens, without the full stop at its end."""
    text = text.strip().rstrip(".")
    # No text has more tokens than bytes; half of them leaves room for what a tokenizer adds.
    if most is None or len(text.encode()) <= most // 2:
        return text
    return beginnings(tokenizer, [text], most)[0]
