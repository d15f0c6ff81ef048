"""Questions that a model writes to passages: to train on, and to choose the weight of vectors in hybrid search.

To train on, a question is kept if the search of ``gerund search``, over the documents to train on, has its document
among the first three (the consistency filter of Promptagator, Dai et al. 2022). Its hard negatives are the best
passages of other documents behind that place; what ranks before it may answer the question as well.

For the weight, each question should find the document that it was written to. A model that writes a question takes
words of the chunk, so words do better here than on the questions of people; a weight that wins nonetheless is not too
high.
"""

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

from gerund.errors import DataError
from gerund.progress import progress
from gerund.retrieval.documents import Chunk, Chunking, Document
from gerund.retrieval.hybrid_search import DEPTH, hybrid_rankings, to_hits
from gerund.retrieval.index import open_index
from gerund.retrieval.store import VectorStore
from gerund.scoring.word_overlap import content_words
from gerund.settings.sampling import Sampling
from gerund.text_analysis import normalized, word_spans

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
    lm: "LanguageModel", passages: Sequence[Passage], index: "Index", *, seed: int = 0, show: bool | None = None
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


def questions_to(lm: Any, texts: Sequence[str], seed: int = 0) -> list[list[str]]:
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
