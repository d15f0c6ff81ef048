"""Rank documents for a query: by how likely they make it, by vectors, or by the model's trained scorer.

With the scores of a first stage, such as BM25's, the two are fused: both are standardized over the documents that were
read (z-scores), and added up with a weight. Then only the first stage's best documents are read, in its order, so that
what a deadline leaves unread keeps its place.
"""

import time
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from gerund.errors import ConfigError
from gerund.models.kinds import has_head, is_encoder_decoder
from gerund.models.vectors import compared
from gerund.settings.ranking import DEFAULT_WEIGHT, MAXSIM, PROMPT_MEASURES, QUERY_MEASURES, RelevanceMeasure
from gerund.types import Ranking, Scorer, TextModel

# Documents that are read between two looks at the clock, at most.
_AT_ONCE = 16

# Returns the score of each text ``(N,)`` for one query.
Score = Callable[[Sequence[str]], np.ndarray]


@runtime_checkable
class ListScore(Protocol):
    """Scores documents by reading several together, so that only it can divide them."""

    reads_lists: bool

    def __call__(self, documents: Sequence[str], end: float | None = None) -> np.ndarray:
        """Return the score of each document ``(N,)``; none are read after ``end``, a time of ``time.monotonic``."""
        ...


def default_measure(lm: TextModel, *, has_scorer: bool, is_second: bool = False) -> RelevanceMeasure:
    """Return what ranks where nothing is said: what the model was tuned or trained to, else the lift where it writes.

    A model that was trained to embed compares vectors, unless it is the second stage of a search (``is_second``), whose
    first stage has compared them.
    """
    if lm.encoder.rerank_by is not None:
        tuned: RelevanceMeasure = lm.encoder.rerank_by
        return tuned
    if lm.late is not None:
        return MAXSIM
    return "lift" if writes(lm) and (is_second or not (has_scorer or is_trained_to_embed(lm))) else "vectors"


def writes(lm: TextModel) -> bool:
    """Whether a model has a head that predicts tokens, and no encoder of its own."""
    return not is_encoder_decoder(lm.model) and has_head(lm.model)


def is_trained_to_embed(lm: TextModel) -> bool:
    """Whether a model's vectors are known to be trained: by an adapter, a head, its record, its author or its kind."""
    is_made_for_it = lm.encoder.conventions != "gerund" or not writes(lm)
    return is_made_for_it or lm.was_trained_to_embed or bool(lm.adapters.hash("encode")) or lm.runtime.head is not None


def rank(
    lm: TextModel,
    query: str,
    documents: Sequence[str],
    *,
    by: RelevanceMeasure,
    scorer: Scorer | None,
    top_k: int | None = None,
    scores: Sequence[float] | None = None,
    weight: float | None = None,
    depth: int | None = None,
    deadline: float | None = None,
    late: Callable[[], Score] | None = None,
) -> Ranking:
    """Rank documents for a query, best first; see ``LanguageModel.rerank``.

    ``scorer`` is the model's trained one; ``late`` makes what scores by ``maxsim``, None that of the model.
    """
    start = time.monotonic()
    end = None if deadline is None else start + deadline
    if not documents:
        return Ranking([], [], by, read=0)
    first_N = None if scores is None else np.asarray(scores, dtype=np.float64)
    order = np.arange(len(documents)) if first_N is None else np.argsort(-first_N, kind="stable")
    offered = order[: len(order) if first_N is None else depth]
    score = late or _scorer(lm, query, by, scorer)
    score_N = _read(score, [documents[index] for index in offered], end)
    seconds = time.monotonic() - start
    read, rest = offered[: len(score_N)], order[len(score_N) :]
    value = None
    if first_N is not None:
        value = weight if weight is not None else lm.encoder.rerank_weight
        value = DEFAULT_WEIGHT if value is None else value
        score_N = value * standardized(score_N) + (1 - value) * standardized(first_N[read])
    best = np.argsort(-score_N, kind="stable")
    # What was not read follows: its scores say its order, and nothing else.
    low = float(score_N.min()) if len(score_N) else 0.0
    ranked = [*((int(read[place]), float(score_N[place])) for place in best)]
    ranked += [(int(index), low - number) for number, index in enumerate(rest, start=1)]
    ranked = ranked[:top_k]
    indices, relevance = [index for index, _ in ranked], [points for _, points in ranked]
    return Ranking(indices, relevance, by, read=len(score_N), weight=value, seconds=seconds)


def standardized(scores_N: np.ndarray) -> np.ndarray:
    """Return z-scores ``(N,)``; zeros where all are equal, and for none.

    >>> standardized(np.array([1.0, 3.0])), standardized(np.array([2.0, 2.0]))
    (array([-1.,  1.]), array([0., 0.]))
    """
    if not len(scores_N):
        return scores_N
    deviation = float(scores_N.std())
    # Equal numbers may differ in their last bits.
    if deviation <= 1e-12 * float(np.abs(scores_N).max()):
        return np.zeros_like(scores_N)
    return np.asarray((scores_N - scores_N.mean()) / deviation)


def _read(score: Callable[[], Score], texts: Sequence[str], end: float | None) -> np.ndarray:
    """Return the scores of as many texts, from the first on, as the time allows: ``(n,)``."""
    if end is None:
        return score()(texts) if len(texts) else np.zeros(0)
    parts: list[np.ndarray] = []
    done, each = 0, 0.0
    reader = score() if time.monotonic() < end else None
    if isinstance(reader, ListScore):
        return reader(texts, end)
    while reader is not None and done < len(texts):
        start = time.monotonic()
        left = end - start
        if left <= each:
            break
        count = 1 if not done else max(1, min(_AT_ONCE, int(left / each)))
        parts.append(reader(texts[done : done + count]))
        done += len(parts[-1])
        each = max(1e-6, (time.monotonic() - start) / len(parts[-1]))
    return np.concatenate(parts) if parts else np.zeros(0)


def _scorer(lm: TextModel, query: str, by: RelevanceMeasure, scorer: Scorer | None) -> Callable[[], Score]:
    """Return what makes the function that scores documents for a query: the query itself is read then."""
    if by == MAXSIM:
        from gerund.scoring.late_interaction import LateInteraction

        return lambda: LateInteraction(lm, query)
    if by in QUERY_MEASURES:
        from gerund.scoring.query_likelihood import QueryLikelihood

        return lambda: QueryLikelihood(lm.model, lm.tokenizer, query, by, autocast=lm.runtime.autocast)
    if by in PROMPT_MEASURES:
        full = lm.full  # whose error says what is missing
        from gerund.scoring.prompted import scorer_of

        return lambda: scorer_of(full, query, by)
    if by == "vectors":
        return lambda: _by_vectors(lm, query)
    if scorer is None:
        raise ConfigError(
            f'{lm.name} was not trained to score under this encoder config. Use `by="lift"` or `by="vectors"`.'
        )
    return lambda: lambda texts: np.asarray(scorer.score([query], [list(texts)])[0], dtype=np.float64)


def _by_vectors(lm: TextModel, query: str) -> Score:
    """Return what compares documents with a query by their vectors, with the encoder's prompts for the two."""
    prompts = lm.encoder.prompts
    query_D = lm.encode(query, prompt_name="query" if "query" in prompts else None, show_progress=False)

    def score(documents: Sequence[str]) -> np.ndarray:
        name = "document" if "document" in prompts else None
        document_ND = lm.encode(documents, prompt_name=name, show_progress=False)
        return compared(document_ND, query_D[None], lm.encoder.similarity)[:, 0]

    return score
