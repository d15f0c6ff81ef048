"""Choose the weight of vectors in hybrid search, on questions that a model generates for an index's chunks.

Each question should find the document that it was written to. A model that writes a question takes words of the chunk,
so words do better here than on the questions of people; a weight that wins nonetheless is not too high.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from gerund.errors import DataError
from gerund.normalization import normalized
from gerund.retrieval.documents import Chunk
from gerund.retrieval.hybrid_search import DEPTH, hybrid_rankings, to_hits
from gerund.retrieval.store import VectorStore
from gerund.text_analysis import word_spans

if TYPE_CHECKING:
    from gerund.language_model import LanguageModel

QUESTIONS = 30
"""Questions that the model writes."""

# Documents that are looked at for a sample of chunks, and words of a question at least.
_DOCUMENTS, _FEWEST_WORDS = 2000, 3
_MAX_TOKENS = 32
_WEIGHTS = tuple(place / 10 for place in range(11))
_ASK = "Write one short question that this text answers. Write the question only."
_PREFIXES = ("question:", "q:")


@dataclass(frozen=True)
class WeightChoice:
    """A weight, and how it was chosen.

    Attributes:
        weight: of the vectors, from 0 to 1.
        ranks: mean reciprocal rank of the document that a question was written to, by weight.
        questions: what was asked, by the document's name.
        model: what wrote the questions.
    """

    weight: float
    ranks: dict[float, float]
    questions: list[tuple[str, str]]
    model: str

    def __str__(self) -> str:
        return (
            f"weight {self.weight:g} of the vectors, chosen on {len(self.questions)} questions that {self.model} wrote "
            f"to the documents: reciprocal rank {self.ranks[self.weight]:.3f} (words alone {self.ranks[0.0]:.3f}, "
            f"vectors alone {self.ranks[1.0]:.3f})"
        )


def choose_weight(
    store: VectorStore, lm: "LanguageModel", encode: Any, count: int = QUESTIONS, *, seed: int = 0
) -> WeightChoice:
    """Choose the weight of an index's vectors; of equal ones the smallest.

    Args:
        store: the index's chunks.
        lm: writes the questions.
        encode: returns the vectors ``(N, D)`` of queries.
        count: how many questions.
        seed: of the sample of chunks.

    Raises:
        DataError: the index has fewer than two documents, or the model writes no question.
        ModelError: the model cannot generate.
    """
    chunks = _sample(store, count, seed)
    written = _questions(lm, [chunk.text for chunk in chunks])
    asked = [(chunk.source, question) for chunk, question in zip(chunks, written, strict=True) if question]
    if not asked:
        raise DataError(f"{lm.name} wrote no question to the {len(chunks)} chunks of the sample; set --weight yourself")
    vectors_ND = encode([question for _, question in asked])
    scores: dict[float, list[float]] = {weight: [] for weight in _WEIGHTS}
    for (source, question), vector_D in zip(asked, vectors_ND, strict=True):
        # Quotation marks would ask for phrases.
        matches = hybrid_rankings(store, [question.replace('"', " ")], vector_D[None], DEPTH, None)
        for weight, ranks in scores.items():
            ranks.append(_reciprocal_rank(source, [hit.source for hit in to_hits(*matches, "hybrid", weight)]))
    means = {weight: fmean(ranks) for weight, ranks in scores.items()}
    return WeightChoice(max(means, key=lambda weight: (round(means[weight], 9), -weight)), means, asked, lm.name)


def _reciprocal_rank(source: str, hits: Sequence[str]) -> float:
    order = list(dict.fromkeys(hits))
    return 1 / (order.index(source) + 1) if source in order else 0.0


def _sample(store: VectorStore, count: int, seed: int) -> list[Chunk]:
    """Return chunks of as many documents as there are, at random, up to ``count``."""
    chance, sources = random.Random(seed), sorted(store.documents())
    if len(sources) < 2:
        raise DataError(f"{store.name} has {len(sources)} documents; a weight is chosen among two or more")
    sources = chance.sample(sources, min(_DOCUMENTS, len(sources)))
    chunks = store.chunks_of(sources[: 2 * count])
    chance.shuffle(chunks)
    by_source = {chunk.source: chunk for chunk in chunks}  # one of each document
    kept = list(by_source.values())
    kept += [chunk for chunk in chunks if by_source[chunk.source] is not chunk]
    return kept[:count]


def _questions(lm: "LanguageModel", texts: Sequence[str]) -> Iterator[str]:
    """Yield a question to each text; an empty one where the model writes none."""
    if lm.tokenizer.chat_template:
        prompts: list[Any] = [[{"role": "user", "content": f"Text: {text}\n\n{_ASK}"}] for text in texts]
    else:
        prompts = [f"Text: {text}\n\nA question that this text answers:" for text in texts]
    for completion in lm.generate(prompts, _MAX_TOKENS, stop=["\n"]):
        question = completion.text.strip().strip('"').strip()
        for prefix in _PREFIXES:
            if question.lower().startswith(prefix):
                question = question[len(prefix) :].strip()
        yield question if len(word_spans(normalized(question))) >= _FEWEST_WORDS else ""
