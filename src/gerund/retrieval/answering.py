"""Answers out of what a search found: the best sentence, as it stands in its source, or that there is none.

Knows: sentences, hits, when nothing relevant was found. Does not know: models, stores.
"""

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from gerund.data.passages import sentence_bounds
from gerund.retrieval import fusion
from gerund.retrieval.asking import EXTRACTIVE, sources_of
from gerund.retrieval.documents import Chunk, Chunking
from gerund.retrieval.memory_store import MemoryStore
from gerund.retrieval.store import About, Words, content_words
from gerund.types import Answer, Hit

NOTHING = "Nothing in the index is about this question."

COVERAGE = 0.34
"""Fraction of a question's words that one chunk must have for anything to be relevant: more than a third.

Chosen on Medline, Cranfield and CISI, each asked its own queries and those of the other two, by the first 8 chunks that
words find: 77% of its own pass and 14% of the others'. At 0.3 these are 83% and 23%, at 0.5 55% and 5%.
"""


def coverage(question: str, hits: Sequence[Hit], language: str) -> float:
    """Return which fraction of a question's words one of the hits has at most; 0 for no hits.

    Stems count for English, as in the search for words. A question of stop words alone is covered by any hit.

    >>> hit = Hit("a", 0, 30, "The railways opened in 1825.", 1.0, 1)
    >>> coverage("When was the first railway opened?", [hit], "en")
    0.6666666666666666
    """
    asked = list(dict.fromkeys(word.casefold() for word in content_words(question, language)))
    if not hits or not asked:
        return float(bool(hits))
    store = MemoryStore()
    store.create(About("", "", 1, "", Chunking(language=language)))
    chunks = [_chunk(place, f"{one.title}\n{one.heading}\n{one.text}") for place, one in enumerate(hits)]
    store.replace([one.source for one in chunks], chunks, np.zeros((len(chunks), 1), dtype=np.float32))
    has: Counter[str] = Counter()
    for word in asked:
        has.update(chunk.source for chunk, _ in store.words(Words(word), len(chunks)))
    return max(has.values(), default=0) / len(asked)


def is_relevant(question: str, hits: Sequence[Hit], language: str) -> bool:
    """Whether anything that was found is about a question at all.

    Scores of a search compare hits of one query, and say nothing of that: their best is always near 1. So it is judged
    by the question's words: one chunk must have more than a third of those that are no stop words.
    """
    return coverage(question, hits, language) >= COVERAGE


def no_answer(question: str, method: str) -> Answer:
    """Return the answer to a question that nothing that was found is about."""
    return Answer(question, NOTHING, found=False, sources=[], cited=[], method=method)


def extractive_answer(
    question: str,
    hits: Sequence[Hit],
    encode: Callable[[Sequence[str]], np.ndarray],
    about: About,
    weight: float,
) -> Answer:
    """Return the sentence of the hits that fits the question best, as it stands there.

    Sentences are ranked as chunks are, by words and vectors, and the chunk's own score counts as much as the
    sentence's.

    Args:
        question: what is asked.
        hits: what a search found for it, best first; at least one.
        encode: turns texts into vectors of length 1; the question's first.
        about: what the index says about itself.
        weight: what the vectors count.
    """
    sources = sources_of(hits)
    sentences = [
        (source.number, source.text[start:end])
        for source in sources
        for start, end in sentence_bounds(source.text, about.chunking.language)
    ]
    vectors_ND = encode([question, *(text for _, text in sentences)])
    store = MemoryStore()
    store.create(about)
    chunks = [_chunk(place, text) for place, (_, text) in enumerate(sentences)]
    store.replace([one.source for one in chunks], chunks, vectors_ND[1:])
    words = {int(one.source): score for one, score in store.words(Words.of(question), len(chunks))}
    vectors = {int(one.source): score for one, score in store.vectors(vectors_ND[0], len(chunks))}
    scores = fusion.convex(words, vectors, weight)
    best = max(scores, key=lambda place: scores[place] + hits[sentences[place][0] - 1].score)
    number, text = sentences[best]
    return Answer(question, " ".join(text.split()), found=True, sources=sources, cited=[number], method=EXTRACTIVE)


def _chunk(place: int, text: str) -> Chunk:
    return Chunk(str(place), 0, len(text), text, 0, 0, "", "", "", "")
