"""Generate questions for passages, and keep those for which a search finds the passage's document.

A question is kept if the search of ``gerund search``, over the documents to train on, has its document among the first
three (the consistency filter of Promptagator, Dai et al. 2022). Its hard negatives are the best passages of other
documents behind that place; what ranks before it may answer the question as well.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from gerund.normalization import normalized
from gerund.progress import progress
from gerund.retrieval.documents import Chunking, Document
from gerund.retrieval.index import open_index
from gerund.scoring.word_overlap import content_words
from gerund.settings.sampling import Sampling
from gerund.text_analysis import word_spans

if TYPE_CHECKING:
    from gerund.language_model import LanguageModel
    from gerund.retrieval.index import Index

# Questions that are sampled for a passage.
_EACH = 2
_MOST_TOKENS = 32
_SAMPLING = Sampling(temperature=0.8, top_p=0.9)
PASSAGES_AT_ONCE = 16
"""Passages that questions are written to in one call."""
_FEWEST_WORDS, _MOST_WORDS = 4, 30
# The place in a search by a question that its own document must have at least.
PLACE = 3
_DEPTH = 20
_NEGATIVES = 4

# Read by every model as plain text: through its chat template, SmolLM2-135M asked what the text is about.
_SHOTS = (
    "Text: Swallows build their nests of mud under the roofs of barns, and come back to them every spring.\n"
    "Question: Where do swallows build their nests?\n\n"
    "Text: The first public railway to use steam locomotives was opened in 1825 in the north of England.\n"
    "Question: When was the first railway with steam locomotives opened?\n\n"
)


class Generates(Protocol):
    """A model that generates text."""

    def generate(self, *arguments: Any, **settings: Any) -> Any:
        """Generate, as ``LanguageModel.generate`` does."""


@dataclass(frozen=True)
class Passage:
    """A stretch of a document."""

    text: str
    source: str  # the document's name


@dataclass(frozen=True)
class Asked:
    """What a passage answers, with passages that do not."""

    question: str
    passage: str
    negatives: tuple[str, ...]  # hard ones, at least one


@dataclass(frozen=True)
class WrittenQuestions:
    """The questions of some passages."""

    kept: tuple[Asked, ...]
    written: int  # how many different questions there were before the filter


def question_in(text: str) -> str | None:
    """Return the question that a model wrote; None where there is none that can be asked.

    >>> question_in(' Question: "What is bread made of?" It is made of flour.')
    'What is bread made of?'
    >>> question_in("Why?"), question_in("Bread is made of flour.")
    (None, None)
    """
    line = next((line for line in text.split("\n") if line.strip()), "")
    before, mark, _ = line.replace("\uff1f", "?").partition("?")  # the question mark of Chinese and Japanese
    question = " ".join(re.sub(r"^\W*(?:question|q)\s*:", "", before, flags=re.IGNORECASE).split()).strip("\"'*-#• ")
    count = len(word_spans(normalized(question)))
    return f"{question}?".replace('"', "") if mark and _FEWEST_WORDS <= count <= _MOST_WORDS else None


def write_questions(
    lm: "LanguageModel",
    passages: Sequence[Passage],
    index: "Index",
    *,
    seed: int = 0,
    show: bool | None = None,
) -> WrittenQuestions:
    """Let the model write questions to passages, and keep those by which the index finds the passage's document."""
    asked: dict[str, Passage] = {}
    with progress(len(passages), "writing questions", show=show) as advance:
        for first in range(0, len(passages), PASSAGES_AT_ONCE):
            some = passages[first : first + PASSAGES_AT_ONCE]
            for passage, questions in zip(
                some, questions_to(lm, [passage.text for passage in some], seed), strict=True
            ):
                for question in questions:
                    asked.setdefault(question, passage)
            advance(len(some))
    return WrittenQuestions(tuple(mined(index, list(asked.items()), place=PLACE)), len(asked))


def index_of(
    lm: "LanguageModel", documents: Sequence[Document], chunking: Chunking, *, show: bool | None = None
) -> "Index":
    """Return an index of documents without their titles, in memory."""
    index = open_index(None, lm, chunking=chunking)
    with progress(len(documents), "indexing to find negatives", show=show) as advance:
        for first in range(0, len(documents), 64):
            some = [replace(document, title="") for document in documents[first : first + 64]]
            index.add_documents(some)
            advance(len(some))
    return index


def mined(index: "Index", asked: Sequence[tuple[str, Passage]], *, place: int = _DEPTH) -> list[Asked]:
    """Return what finds its passage's document at ``place`` or before it, with negatives that rank behind it."""
    kept = []
    for first in range(0, len(asked), 64):
        some = asked[first : first + 64]
        for (question, passage), hits in zip(
            some, index.search_all([question for question, _ in some], _DEPTH), strict=True
        ):
            sources = list(dict.fromkeys(hit.source for hit in hits))
            if passage.source not in sources[:place]:
                continue
            rank = next(number for number, hit in enumerate(hits) if hit.source == passage.source)
            negatives = [hit.text for hit in hits[rank + 1 :] if hit.source != passage.source][:_NEGATIVES]
            if negatives:
                kept.append(Asked(question, passage.text, tuple(negatives)))
    return kept


def questions_to(lm: Generates, texts: Sequence[str], seed: int = 0) -> list[list[str]]:
    """Let a model write questions to each text; those that share no word with it are dropped.

    The same text and seed give the same questions, whatever else is asked about.
    """
    prompts = [f"{_SHOTS}Text: {' '.join(text.split())}\nQuestion:" for text in texts]
    sampling = replace(_SAMPLING, seed=seed)
    written = lm.generate(
        prompts, _MOST_TOKENS, sampling, n=_EACH, stop=["?", "\uff1f", "\n"], include_stop_str_in_output=True
    )
    result: list[list[str]] = [[] for _ in texts]
    for number, generation in enumerate(written):
        question, text = question_in(generation.text), texts[number // _EACH]
        # Else it asks about the examples, or about nothing.
        if question is not None and set(content_words(question)) & set(content_words(text)):
            result[number // _EACH].append(question)
    return result
