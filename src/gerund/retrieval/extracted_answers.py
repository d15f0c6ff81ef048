"""Answers out of what a search found: the best sentence, as it stands in its source, or that there is none.

Knows: sentences, hits, when nothing relevant was found. Does not know: models, stores.
"""

import re
from collections.abc import Callable, Sequence

import numpy as np

from gerund.data.passages import sentence_bounds
from gerund.retrieval import fusion
from gerund.retrieval.asking import EXTRACTIVE, sources_of
from gerund.retrieval.documents import PATH_SIGN, Chunk
from gerund.retrieval.memory_store import MemoryStore
from gerund.retrieval.store import About, Words
from gerund.text_analysis import Analyzer
from gerund.types import Answer, Hit

NOTHING = "Nothing in the index is about this question."

COVERAGE = 0.34
"""Fraction of a question's words that one chunk must have for anything to be relevant: more than a third.

Chosen on Medline, Cranfield and CISI, each asked its own queries and those of the other two, by the first 8 chunks that
words find: 77% of its own pass and 14% of the others'. At 0.3 these are 83% and 23%, at 0.5 55% and 5%.
"""


# Chunk and sentence score 1 at most, each: what is no sentence is quoted where there is nothing else.
_NO_SENTENCE, _NO_END = 2.0, 0.5
# A sentence ends so, perhaps in quotation marks or brackets.
_ENDED = re.compile(r"""[.!?\u2026\u3002\uff01\uff1f]["'\u201d\u2019\u00bb\u300d)\]*_]*\Z""")
# What begins so is the rest of a sentence that was divided at a sign that ends none, in a span of code for instance.
_REST = re.compile(r"(?:\.\s|[!?,;:)\]}\u201d\u00bb])")
# What only programs begin with: fences, prompts, keywords; and what only their lines have that end as no sentence does.
_CODE_BEGINS = re.compile(r"(?:```|~~~|>>>|\.\.\. |\$ |import |from [\w.]+ import |def |class |return |@\w)")
_CODE_HOLDS = re.compile(r"\w\(.*\)|[{};]\s*\Z|\w\s*[-+*/]?=\s*\S|</?\w[^>]*>|\w::\w|->")


def coverage(question: str, hits: Sequence[Hit], language: str) -> float:
    """Return which fraction of a question's words one of the hits has at most; 0 for no hits.

    Words are compared as a search compares them. A question of stop words alone is covered by any hit.

    >>> hit = Hit("a", 0, 30, "The railways opened in 1825.", 1.0, 1)
    >>> coverage("When was the first railway opened?", [hit], "en")
    0.6666666666666666
    """
    analyzer = Analyzer(language)
    asked = analyzer.content(question)
    if not hits or not asked:
        return float(bool(hits))
    return max(len(asked.intersection(analyzer.document(_whole_text(one)))) for one in hits) / len(asked)


def _whole_text(hit: Hit) -> str:
    return f"{hit.title}\n{hit.heading}\n{hit.text}"


def is_relevant(question: str, hits: Sequence[Hit], language: str) -> bool:
    """Whether anything that was found is about a question at all.

    Scores of a search compare hits of one query, and say nothing of that. So it is judged by the question's words: one
    chunk must have more than a third of those that are no stop words.
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
    sentence's. Headings, code and lines that do not end as a sentence does stand behind them.

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
    lesser = [_handicap(text, hits[number - 1]) for number, text in sentences]
    best = max(scores, key=lambda place: scores[place] + hits[sentences[place][0] - 1].score - lesser[place])
    number, text = sentences[best]
    return Answer(question, " ".join(text.split()), found=True, sources=sources, cited=[number], method=EXTRACTIVE)


def _handicap(text: str, hit: Hit) -> float:
    """Return what is taken off the score of something that may be no sentence.

    A heading often has all words of a question and answers none; a line of a list may still be the answer.

    >>> hit = Hit("a", 0, 30, "...", 1.0, 1, heading="Opening hours")
    >>> [_handicap(one, hit) for one in ("It opens at 9.", "- open: 9 to 5", "## Hours", "Opening hours", "x = f(9)")]
    [0.0, 0.5, 2.0, 2.0, 2.0]
    >>> _handicap("? ` gets a full stop.", hit)
    2.0
    """
    line = text.strip()
    named = {one.strip().casefold() for one in (hit.title, *hit.heading.split(PATH_SIGN))}
    if line.startswith("#") or line.casefold() in named or _CODE_BEGINS.match(line) or _REST.match(line):
        return _NO_SENTENCE
    if _ENDED.search(line):
        return 0.0
    return _NO_SENTENCE if _CODE_HOLDS.search(line) else _NO_END


def _chunk(place: int, text: str) -> Chunk:
    return Chunk(str(place), 0, len(text), text, 0, 0, "", "", "", "")
