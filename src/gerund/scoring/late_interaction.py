"""Late interaction: match each token of a query with its most similar token of a document (MaxSim).

Khattab and Zaharia 2020, "ColBERT: Efficient and Effective Passage Search via Contextualized Late Interaction over
BERT". Where the collection is known, a query's tokens are weighted by how rare they are in it (idf), so that words
which are everywhere do not decide.

Shapes: Q tokens of a query, T of a document, E dimensions of a token vector, N documents.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from gerund.errors import ConfigError
from gerund.inference.encode.multi import TokenReader
from gerund.models.vectors import unit
from gerund.scoring.relevance import is_trained_to_embed
from gerund.settings.encoder import LateConfig
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


class TokenRarity:
    """What tokens of a query count, by how rare they are in a collection (idf).

    Not among the candidates of the query, which share its words: on Medline and Cranfield such weights ranked worse
    than none.

    >>> TokenRarity([[5, 6], [5]])([5, 6, 7]).round(2).tolist()
    [0.18, 0.69, 1.79]
    """

    def __init__(self, documents: Iterable[Iterable[int]]) -> None:
        self._size, self._counts = 0, Counter[int]()
        for document in documents:
            self._size += 1
            self._counts.update(set(document))

    def __call__(self, query: Sequence[int]) -> np.ndarray:
        """Return the weight of each token of a query ``(Q,)``: the log of how rare it is."""
        return np.array([max(0.0, math.log((self._size + 1) / (self._counts[token] + 0.5))) for token in query])


def default_late(lm: TextModel) -> LateConfig:
    """Return how a model is read whose token vectors were not trained.

    A model that was trained to embed gives its last states, with its prompts for queries and documents. Of any other
    language model the layer in the middle serves better than the last, and a marker keeps the first word from being the
    first token, whose state says nothing.
    """
    if is_trained_to_embed(lm):
        return LateConfig(*(lm.encoder.prompts.get(name, "") for name in ("query", "document")))
    return LateConfig(layers=str(max(1, lm.encoder.depth(lm.runtime.n_layers) // 2)))


class LateInteraction:
    """Scores documents for a query by MaxSim.

    Args:
        lm: the model.
        query: the query.
        known: token vectors ``(T, E)`` of documents that need not be read.
        rarity: what the query's tokens count; None counts all alike.

    Raises:
        TextError: the query is empty.
    """

    def __init__(
        self,
        lm: TextModel,
        query: str,
        known: Mapping[str, np.ndarray] | None = None,
        rarity: TokenRarity | None = None,
    ) -> None:
        self._reader: TokenReader = lm.token_reader()
        self._known = known or {}
        asked = self._reader.tokens([query], is_query=True)
        [self._query_QE] = self._reader.vectors(asked)
        self._weights_Q = None if rarity is None else rarity(self._reader.ids(asked[0]))

    def __call__(self, documents: Sequence[str]) -> np.ndarray:
        """Return the scores of documents ``(N,)`` float64."""
        missing = [text for text in dict.fromkeys(documents) if text not in self._known]
        read = dict(zip(missing, self._reader.vectors(self._reader.tokens(missing, is_query=False)), strict=True))
        vectors = (read[text] if text in read else self._known[text] for text in documents)
        return np.array([maxsim(self._query_QE, own_TE, self._weights_Q) for own_TE in vectors], dtype=np.float64)
