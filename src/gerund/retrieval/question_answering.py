"""What is asked of documents: settings, an answer while it is written, and the verbs that an index has for it.

Knows: settings, steps, streams. Does not know: how chunks are found, how a sentence is chosen, how a model writes.
"""

import asyncio
import re
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack, get_args

import numpy as np

from gerund.checks import one_of, place
from gerund.data.passages import sentence_bounds
from gerund.errors import unknown_name
from gerund.inference.generate.config import require_new_tokens
from gerund.jobs.disk_cache import DiskCache
from gerund.retrieval.documents import PATH_SIGN, Chunk, Chunking
from gerund.retrieval.hybrid_search import check_query, convex
from gerund.retrieval.memory_store import MemoryStore
from gerund.retrieval.store import IndexMetadata, KeywordQuery
from gerund.settings.aliases import TopK, names_of, takes_aliases
from gerund.settings.sampling import Sampling
from gerund.text_analysis import Analyzer
from gerund.types import Answer, Hit, Source

if TYPE_CHECKING:
    from gerund.inference.generate.prompts import Message
    from gerund.inference.generate.session import Session
    from gerund.language_model import LanguageModel
    from gerund.retrieval.answer_generation import AnswerPrompt
    from gerund.types import Generation


_NUMBER = r"[0-9]{1,3}"
_ITEM = rf"{_NUMBER}(?:\s?[-\u2013]\s?{_NUMBER})?"
_CITATION = re.compile(rf"[ \t]*\[\s?({_ITEM}(?:\s?[,;]\s?{_ITEM})*)\s?\]")
# What may still become one: white space at the end, or a bracket that is not closed.
_BEGUN = re.compile(r"[ \t]*\[[0-9\s,;\u2013-]*\Z|[ \t]+\Z")


class Citations:
    """Takes out the numbers that no source has, while a text comes; remembers those that stay.

    Args:
        count: how many sources there are; they are numbered from 1.

    Attributes:
        cited: the numbers that stay, each once, in the order in which they came.
        dropped: the numbers that were taken out.

    >>> found = Citations(3)
    >>> found.put("In 1825 [1, 7]. So ") + found.put("it was [") + found.put("2][9].") + found.end()
    'In 1825 [1]. So it was [2].'
    >>> found.cited, found.dropped
    ([1, 2], [7, 9])
    """

    def __init__(self, count: int) -> None:
        self.cited: list[int] = []
        self.dropped: list[int] = []
        self._count = count
        self._held = ""

    def put(self, text: str) -> str:
        """Take more of the text; return what of it is certain."""
        text = self._held + text
        begun = _BEGUN.search(text)
        first = len(text) if begun is None else begun.start()
        self._held = text[first:]
        return self._checked(text[:first])

    def end(self) -> str:
        """Return what was held back: the text has come to its end."""
        rest, self._held = self._held, ""
        return self._checked(rest)

    def _checked(self, text: str) -> str:
        return _CITATION.sub(self._kept, text)

    def _kept(self, found: re.Match[str]) -> str:
        numbers = [number for item in re.split(r"[,;]", found[1]) for number in _numbers(item)]
        good = [number for number in numbers if 1 <= number <= self._count]
        self.cited += [number for number in dict.fromkeys(good) if number not in self.cited]
        bad = [number for number in dict.fromkeys(numbers) if number not in good]
        self.dropped += [number for number in bad if number not in self.dropped]
        if len(good) == len(numbers):
            return found[0]
        space = found[0][: len(found[0]) - len(found[0].lstrip())]
        return f"{space}[{', '.join(map(str, good))}]" if good else ""


def checked(text: str, count: int) -> tuple[str, list[int], list[int]]:
    """Return a text without the numbers that no source has, those that stay, and those that were taken out.

    >>> checked("It rises [1-3] by yeast [4].", 3)
    ('It rises [1-3] by yeast.', [1, 2, 3], [4])
    """
    citations = Citations(count)
    kept = citations.put(text) + citations.end()
    return kept, citations.cited, citations.dropped


def _numbers(item: str) -> list[int]:
    """Return the numbers of an item: one, or all from one to another."""
    ends = [int(part) for part in re.split(r"[-\u2013]", item)]
    return list(range(ends[0], ends[-1] + 1)) or ends


Method = Literal["extractive", "generate"]
METHODS: tuple[Method, ...] = get_args(Method)
EXTRACTIVE, GENERATE = METHODS

ANSWER_HITS = 8
"""Chunks that are read for an answer."""

MAX_NEW_TOKENS = 256
"""How much a written answer may have at most."""

SILENT = "The model wrote no answer; the sources are what it read."


class AskKeywords(TopK, total=False):
    """What may be said of a question beside ``k``, or ``top_k``; all of it has defaults."""

    method: Method | None
    """``generate``: the model writes the answer from the chunks, and cites them by their numbers. ``extractive``: the
    answer is the best sentence of the chunks, as it stands there. None: ``generate`` where the model has a chat
    template, since it was then trained to answer, else ``extractive``."""

    filter: str | None
    """As in ``search``."""

    weight: float | None
    """As in ``search``."""

    rerank: int
    """As in ``search``."""

    rerank_by: Any
    """As in ``search``."""

    history: Sequence[Mapping[str, Any]]
    """The turns before, as messages of the user and the assistant, so that a question may refer to them."""

    max_new_tokens: int
    """How much a written answer may have at most; of a small context never more than half. 256."""

    sampling: Sampling | None
    """How the tokens of a written answer are chosen; None is greedy."""

    approximate_cache: "DiskCache | str | Path | None"
    """A folder, or a cache with a limit of its own, where what a model has read of each chunk is kept, so that the next
    question that finds the chunk starts sooner. Chunks are then read apart, each as if it were the only one: the answer
    is not the one that reading them together gives. None, the default, reads them together."""


_OPTIONS = names_of(AskKeywords)


@dataclass(frozen=True)
class Asked:
    """A question with its settings, checked."""

    question: str
    k: int = ANSWER_HITS
    method: Method | None = None
    filter: str | None = None
    weight: float | None = None
    rerank: int = 0
    rerank_by: Any = None
    history: "Sequence[Message]" = ()
    max_new_tokens: int = MAX_NEW_TOKENS
    sampling: Sampling | None = None
    approximate_cache: "DiskCache | str | Path | None" = None

    @classmethod
    def of(cls, question: str, k: int, options: AskKeywords) -> Self:
        """Return a checked question.

        Raises:
            TextError: the question is empty or no text, or the history is no conversation.
            ConfigError: a setting is impossible.
        """
        for name in options:
            if name not in _OPTIONS:
                raise unknown_name("setting", name, _OPTIONS)
        check_query(question, "question")
        given = cls(question, k, **options)  # type: ignore[arg-type, misc]
        if given.method is not None:
            one_of("method", given.method, METHODS)
        require_new_tokens(given.max_new_tokens)
        if given.approximate_cache is not None and not isinstance(given.approximate_cache, DiskCache):
            place("the cache", given.approximate_cache)
        if given.history == ():
            return given
        from gerund.retrieval.answer_generation import check_history  # which imports torch

        return replace(given, history=check_history(given.history))

    @property
    def searched(self) -> str:
        """What is searched for: the question, behind the one before, to which it may refer."""
        return f"{self.history[-2]['content'].strip()} {self.question}" if self.history else self.question


@dataclass(frozen=True)
class Written:
    """An answer that a model is about to write.

    Attributes:
        asked: the question.
        lm: the model.
        prompt: what it reads.
        known: what of it has been read already; None for nothing.
        cites: whether the answer cites sources by numbers; where not, it rests on all of them.
    """

    asked: Asked
    lm: "LanguageModel"
    prompt: "AnswerPrompt"
    known: "Session | None" = None
    cites: bool = True

    def stream(self) -> Any:
        """Return the text in pieces, as they come."""
        model, prompt, settings = self._continued()
        return model.stream(*prompt, self.prompt.max_new_tokens, self.asked.sampling, **settings)

    def astream(self) -> Any:
        """Return the text in pieces, for ``async for``."""
        model, prompt, settings = self._continued()
        return model.astream(*prompt, self.prompt.max_new_tokens, self.asked.sampling, **settings)

    def answer(self, generation: "Generation") -> Answer:
        """Return what a model wrote as an answer."""
        text, cited, dropped = checked(generation.text, len(self.prompt.sources) if self.cites else 0)
        return Answer(
            self.asked.question,
            text.strip() or SILENT,
            found=True,
            sources=self.prompt.sources,
            cited=cited if self.cites else [one.number for one in self.prompt.sources],
            method=GENERATE,
            dropped=dropped,
            finished=generation.finished,
            usage=generation.usage,
        )

    def _continued(self) -> tuple[Any, list[Any], dict[str, Any]]:
        """Return what writes, behind which prompt: the model, or a session that has read the beginning already."""
        ids, settings = self.prompt.ids, {"stop": list(self.prompt.stop) or None}
        if self.known is None:
            return self.lm, [ids], settings
        rest = ids[len(self.known.token_ids) :]
        return (self.known.read(rest) if rest else self.known), [], settings


Prepare = Callable[[], Answer | Written]


class AnswerStream(Iterator[str]):
    """An answer in pieces, as they come: of one that is no model's, the whole.

    Numbers in brackets that no source has never come. To stop iterating, or ``close``, stops the model.

    Attributes:
        result: the answer with its sources, once the last piece has come.
    """

    def __init__(self, prepare: Prepare) -> None:
        self.result: Answer | None = None
        self._prepare = prepare
        self._pieces = self._read()

    def __next__(self) -> str:
        return next(self._pieces)

    def _read(self) -> Any:
        found = self._prepare()
        if isinstance(found, Answer):
            yield found.text
            self.result = found
            return
        stream = found.stream()
        try:
            pieces = _Checked(found)
            for piece in stream:
                if text := pieces.put(piece):
                    yield text
            if text := pieces.end():
                yield text
            self.result = found.answer(stream.result)
            if not pieces.said:
                yield self.result.text
        finally:
            stream.close()

    def close(self) -> None:
        """Stop the model, and wait until it has stopped."""
        self._pieces.close()


class AsyncAnswerStream(AsyncIterator[str]):
    """An answer in pieces, for ``async for``; the other of ``AnswerStream``.

    Attributes:
        result: the answer with its sources, once the last piece has come.
    """

    def __init__(self, prepare: Prepare) -> None:
        self.result: Answer | None = None
        self._prepare = prepare
        self._pieces = self._read()

    async def __anext__(self) -> str:
        return str(await anext(self._pieces))

    async def _read(self) -> Any:
        found = await asyncio.to_thread(self._prepare)
        if isinstance(found, Answer):
            yield found.text
            self.result = found
            return
        stream = await asyncio.to_thread(found.astream)
        try:
            pieces = _Checked(found)
            async for piece in stream:
                if text := pieces.put(piece):
                    yield text
            if text := pieces.end():
                yield text
            self.result = found.answer(stream.result)
            if not pieces.said:
                yield self.result.text
        finally:
            await stream.aclose()

    async def aclose(self) -> None:
        """Stop the model, which ends within a token."""
        await self._pieces.aclose()


class _Checked:
    """Pieces of an answer, without white space around it and without numbers that no source has."""

    def __init__(self, written: Written) -> None:
        self.said = False
        self._citations = Citations(len(written.prompt.sources) if written.cites else 0)
        self._space = ""

    def put(self, piece: str) -> str:
        return self._stripped(self._citations.put(piece))

    def end(self) -> str:
        return self._stripped(self._citations.end())

    def _stripped(self, text: str) -> str:
        """Hold white space back until something follows it."""
        text = self._space + text if self.said else (self._space + text).lstrip()
        kept = text.rstrip()
        self._space = text[len(kept) :]
        self.said = self.said or bool(kept)
        return kept


class Asking(ABC):
    """What answers questions out of documents, at once or piece by piece."""

    @property
    @abstractmethod
    def lm(self) -> "LanguageModel":
        """The model."""

    @property
    @abstractmethod
    def chunking(self) -> "Chunking":
        """How documents are cut, and what they are written in."""

    @abstractmethod
    def _prepared(self, asked: Asked) -> Answer | Written:
        """Return the answer, or what a model is to write it from."""

    @takes_aliases
    def ask(self, question: str, k: int = ANSWER_HITS, **options: Unpack[AskKeywords]) -> Answer:
        """Answer a question from the chunks that fit it best.

        Args:
            question: what is asked.
            k: how many chunks are read at most; fewer where the model's context has no room for them.
            options: ``method``, ``filter``, ``weight``, ``rerank``, ``rerank_by``, ``history``, ``max_new_tokens``,
                ``sampling`` and ``approximate_cache``; see ``AskKeywords``. ``top_k`` is another name for ``k``.

        Returns:
            The answer with its numbered sources. Where nothing relevant was found, its text says so, and ``found`` is
            False. Numbers that a model cited and no source has are taken out of the text, and stand in ``dropped``.

        Raises:
            TextError: the question is empty, no text, or too long for the model.
            ConfigError: an unknown method, a filter that cannot be used, an impossible number.
            DataError: there is no index yet.

        >>> index = gerund.open_index(None, gerund.load())
        >>> _ = index.add_documents([gerund.Document("rail", "The railway opened in 1825. It was the first.")])
        >>> answer = index.ask("When was the railway opened?")
        >>> answer.text, answer.sources[answer.cited[0] - 1].source
        ('The railway opened in 1825.', 'rail')
        """
        stream = self.stream(question, k, **options)
        for _ in stream:
            pass
        assert stream.result is not None
        return stream.result

    @takes_aliases
    def stream(self, question: str, k: int = ANSWER_HITS, **options: Unpack[AskKeywords]) -> AnswerStream:
        """Answer a question as ``ask`` does, and yield the text piece by piece; ``result`` is the answer at the end.

        >>> index = gerund.open_index(None, gerund.load())
        >>> _ = index.add_documents([gerund.Document("rail", "The railway opened in 1825.")])
        >>> stream = index.stream("When was the railway opened?")
        >>> "".join(stream) == stream.result.text
        True
        """
        asked = Asked.of(question, k, options)
        return AnswerStream(lambda: self._prepared(asked))

    @takes_aliases
    async def aask(self, question: str, k: int = ANSWER_HITS, **options: Unpack[AskKeywords]) -> Answer:
        """Answer a question as ``ask`` does, while the event loop goes on; cancelling it stops the model."""
        stream = self.astream(question, k, **options)
        try:
            async for _ in stream:
                pass
        finally:
            await stream.aclose()
        assert stream.result is not None
        return stream.result

    @takes_aliases
    def astream(self, question: str, k: int = ANSWER_HITS, **options: Unpack[AskKeywords]) -> AsyncAnswerStream:
        """Answer a question as ``stream`` does, for ``async for``; to cancel the task stops the model."""
        asked = Asked.of(question, k, options)
        return AsyncAnswerStream(lambda: self._prepared(asked))


def sources_of(hits: Sequence[Any]) -> list[Source]:
    """Return hits as numbered sources."""
    return [
        Source(number, one.source, one.start, one.end, one.text, one.title, one.heading)
        for number, one in enumerate(hits, start=1)
    ]


def method_of(asked: Asked, lm: "LanguageModel") -> Method:
    """Return how a question is answered: as it says, else as the model was trained to."""
    if asked.method is not None:
        return asked.method
    return GENERATE if lm.tokenizer.chat_template else EXTRACTIVE


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
    about: IndexMetadata,
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
    words = {int(one.source): score for one, score in store.words(KeywordQuery.of(question), len(chunks))}
    vectors = {int(one.source): score for one, score in store.vectors(vectors_ND[0], len(chunks))}
    scores = convex(words, vectors, weight)
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
