"""Late interaction: each token of a query counts its nearest token of a document (MaxSim).

Khattab and Zaharia 2020, "ColBERT: Efficient and Effective Passage Search via Contextualized Late Interaction over
BERT". The tokens of a query are weighted by how few of the candidates have them (idf), so that words which all of them
share do not decide.

Shapes: Q tokens of a query, T of a document, E dimensions of a token vector, N documents.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from gerund.errors import ConfigError
from gerund.inference.encode.multi import TokenReader
from gerund.models.vectors import unit
from gerund.scoring.relevance import is_trained_to_embed
from gerund.settings.late import LateConfig
from gerund.types import TextModel


def maxsim(query_QE: np.ndarray, document_TE: np.ndarray, weights_Q: np.ndarray | None = None) -> float:
    """Return the weighted mean over a query's tokens of the largest cosine with a token of a document.

    Vectors may be of any length and precision. 0 where either text has no token.

    Args:
        query_QE: token vectors of the query, as ``lm.encode_multi(query, is_query=True)`` returns them.
        document_TE: those of the document.
        weights_Q: what each token of the query counts; None counts all alike.

    >>> round(maxsim(np.eye(2), np.array([[3.0, 4.0]])), 3)
    0.7
    >>> round(maxsim(np.eye(2), np.array([[3, 4]], dtype=np.int8), np.array([0.0, 1.0])), 3)
    0.8
    """
    if query_QE.ndim != 2 or document_TE.ndim != 2 or query_QE.shape[1] != document_TE.shape[1]:
        raise ConfigError(
            f"token vectors of a query {query_QE.shape} and of a document {document_TE.shape} cannot be compared"
        )
    if not len(query_QE) or not len(document_TE):
        return 0.0
    best_Q = (unit(query_QE.astype(np.float32)) @ unit(document_TE.astype(np.float32)).T).max(axis=1)
    weights_Q = np.ones(len(best_Q)) if weights_Q is None or not weights_Q.any() else weights_Q
    return float(best_Q @ weights_Q / weights_Q.sum())


def idf(query: Sequence[int], documents: Iterable[Iterable[int]]) -> np.ndarray:
    """Return the weight of each token of a query ``(Q,)``: the log of how rare it is among documents.

    >>> idf([5, 6, 7], [[5, 6], [5]]).round(2).tolist()
    [0.18, 0.69, 1.79]
    """
    listed = [set(document) for document in documents]
    counts = Counter(token for document in listed for token in document)
    return np.array([max(0.0, math.log((len(listed) + 1) / (counts[token] + 0.5))) for token in query])


def default_late(lm: TextModel) -> LateConfig:
    """Return how a model is read whose token vectors were not trained.

    A model that was trained to embed gives its last states, with its prompts for queries and documents. Of any other
    language model a layer at a third of its depth serves best, and a marker keeps the first word from being the first
    token, whose state says nothing.
    """
    if is_trained_to_embed(lm):
        return LateConfig(*(lm.encoder.prompts.get(name, "") for name in ("query", "document")))
    return LateConfig(layers=str(max(1, lm.runtime.n_layers // 3)))


class LateInteraction:
    """Scores documents for a query by MaxSim.

    Args:
        lm: the model.
        query: the query.
        candidates: all documents, among which the query's tokens are weighted.

    Raises:
        TextError: the query is empty.
    """

    def __init__(self, lm: TextModel, query: str, candidates: Sequence[str]) -> None:
        self._reader: TokenReader = lm.token_reader()
        asked = self._reader.tokens([query], is_query=True)
        [self._query_QE] = self._reader.vectors(asked)
        own = self._reader.tokens(candidates, is_query=False, empty="zeros")
        self._tokens = dict(zip(candidates, own, strict=True))
        self.weights_Q = idf(self._reader.ids(asked[0]), map(self._reader.ids, own))

    def __call__(self, documents: Sequence[str]) -> np.ndarray:
        """Return the scores ``(N,)`` float64 of some of the candidates."""
        unique = list(dict.fromkeys(documents))
        vectors = self._reader.vectors([self._tokens[text] for text in unique])
        by_text = dict(zip(unique, self.of_vectors(vectors), strict=True))
        return np.array([by_text[text] for text in documents], dtype=np.float64)

    def of_vectors(self, documents: Sequence[np.ndarray]) -> list[float]:
        """Return the scores of documents whose token vectors ``(T, E)`` are known."""
        return [maxsim(self._query_QE, document_TE, self.weights_Q) for document_TE in documents]
