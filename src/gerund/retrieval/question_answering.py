"""Answer questions from search hits: settings, streams, extractive answers, citations, and checks of what is generated.

``answer_generation`` has the part that needs a model to generate the answer.
"""

import asyncio
import re
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack, get_args

from gerund.checks import check_unicode, flag, one_of, place, whole_number
from gerund.data.passages import sentence_bounds
from gerund.errors import ConfigError, TextError, unknown_name
from gerund.inference.generate.config import GenerationConfig, require_new_tokens
from gerund.jobs.disk_cache import DiskCache
from gerund.retrieval.documents import Chunking
from gerund.retrieval.hybrid_search import check_query
from gerund.settings.aliases import TopK, names_of, takes_aliases
from gerund.settings.ranking import MOST_HITS, ONE_STAGE, RerankKeywords, SecondStage
from gerund.settings.sampling import GREEDY, Sampling
from gerund.text_analysis import Analyzer
from gerund.types import Answer, Hit, Hits, RerankCost, SentenceCheck, Source

if TYPE_CHECKING:
    from gerund.inference.generate.prompts import Message
    from gerund.inference.generate.session import Session
    from gerund.language_model import LanguageModel
    from gerund.retrieval.answer_generation import AnswerPrompt
    from gerund.types import Generation


Method = Literal["extractive", "generate"]
METHODS: tuple[Method, ...] = get_args(Method)
EXTRACTIVE, GENERATE = METHODS
Context = Literal["chunks", "sentence"]
CONTEXTS: tuple[Context, ...] = get_args(Context)
CHUNKS, SENTENCE = CONTEXTS

ANSWER_HITS = 8
"""Default number of chunks that an answer is based on."""

MAX_NEW_TOKENS = 256
"""Default maximum tokens of a generated answer."""

ANSWERS_FROM = 500_000_000
"""Parameters of a model from which its own answer is the default, rather than the best sentence, and from which it
reads whole chunks.

Of 47 development questions over an encyclopedia, manual pages and a manual, SmolLM2-135M-Instruct answers 10 rightly
from the best chunk, 16 from three of its sentences and 21 from the best one, while that sentence has the answer to 36.
"""

NOTHING = "Nothing was found about this question."
SILENT = "The model wrote no answer; the sources are what it read."


class AskKeywords(TopK, RerankKeywords, total=False):
    """Settings of a question in addition to ``k``, or ``top_k``; all have defaults."""

    method: Method | None
    """``generate``: the model generates the answer from the chunks and cites them by number. ``extractive``: the answer
    is the best sentence of the chunks, unchanged. None: ``generate`` where the model has a chat template, since it was
    then trained to answer, and at least 500 million parameters; else ``extractive``, since smaller models give fewer
    right answers than the best sentence does."""

    context: Context | None
    """What a model reads to generate an answer: ``chunks``, or the best ``sentence`` of them alone, which small models
    understand better. None: the sentence below 500 million parameters, chunks from there on, in a running ``chat`` with
    a query head, and with ``approximate_cache``."""

    fallback: bool
    """Whether a generated answer is replaced by the best sentence where no source supports any of it, or where the
    sentence that it was generated from doesn't support all of it. True."""

    filter: str | None
    """As in ``search``."""

    weight: float | None
    """As in ``search``."""

    history: Sequence[Mapping[str, Any]]
    """Earlier turns, as messages of the user and the assistant, so that a question can refer to them."""

    instructions: str
    """What a model that generates the answer is told besides how to answer, such as a tone. Empty."""

    chat: bool
    """Whether the question is a turn of a running conversation, whose keys and values are kept for the next turn. An
    index with a query head (``fit_query_head``) is then searched by the conversation's own states. False."""

    max_new_tokens: int
    """Maximum tokens of a generated answer, and at most half of the model's context. 256."""

    sampling: Sampling | None
    """How the tokens of a generated answer are sampled; None is greedy."""

    approximate_cache: "DiskCache | str | Path | None"
    """A folder, or a cache with its own limit, for the keys and values of each chunk, so that the next question that
    finds the chunk starts sooner. Chunks are then read separately, as if each were the only one, so the answer differs
    from that of reading them together. None, the default, reads them together."""


_OPTIONS = names_of(AskKeywords)


@dataclass(frozen=True)
class Question:
    """A question with its settings, checked."""

    question: str
    k: int = ANSWER_HITS
    method: Method | None = None
    context: Context | None = None
    filter: str | None = None
    weight: float | None = None
    second: SecondStage = ONE_STAGE
    history: "Sequence[Message]" = ()
    max_new_tokens: int = MAX_NEW_TOKENS
    sampling: Sampling | None = None
    approximate_cache: "DiskCache | str | Path | None" = None
    fallback: bool = True
    instructions: str = ""
    chat: bool = False

    @classmethod
    def of(cls, question: str, k: int, options: AskKeywords) -> Self:
        """Return a checked question."""
        for name in options:
            if name not in _OPTIONS:
                raise unknown_name("setting", name, _OPTIONS)
        check_query(question, "question")
        if not 1 <= whole_number("k", k) <= MOST_HITS:
            raise ConfigError(f"k={k} is not a number from 1 to {MOST_HITS}")
        said = dict(options)
        second = SecondStage.of({name: said.pop(name) for name in RerankKeywords.__annotations__ if name in said})
        asked = cls(question, k, **said, second=second)  # type: ignore[arg-type]
        asked._check()
        if asked.history == ():
            return asked
        from gerund.retrieval.answer_generation import check_history  # which imports torch

        return replace(asked, history=check_history(asked.history))

    def _check(self) -> None:
        if self.method is not None:
            one_of("method", self.method, METHODS)
        if self.context is not None:
            one_of("context", self.context, CONTEXTS)
        if self.context == SENTENCE and self.approximate_cache is not None:
            raise ConfigError("approximate_cache is for chunks; leave context=sentence out")
        for_generated = {
            "context": self.context is not None,
            "sampling": self.sampling not in (None, GREEDY),
            "instructions": bool(self.instructions),
            "max_new_tokens": self.max_new_tokens != MAX_NEW_TOKENS,
            "fallback": not self.fallback,
        }
        for name, is_given in for_generated.items():
            if self.method == EXTRACTIVE and is_given:
                raise ConfigError(f"{name} is for generated answers; leave it, or method=extractive, out")
        require_new_tokens(self.max_new_tokens)
        if self.sampling is not None and not isinstance(self.sampling, Sampling):
            raise ConfigError(f"`sampling` must be a Sampling, got {self.sampling!r}")
        flag("fallback", self.fallback)
        flag("chat", self.chat)
        if not isinstance(self.instructions, str):
            raise TextError(f"instructions are a text, not {type(self.instructions).__name__}")
        check_unicode("instructions", self.instructions)
        if self.approximate_cache is not None and not isinstance(self.approximate_cache, DiskCache):
            place("the cache", self.approximate_cache)

    @property
    def search_query(self) -> str:
        """The question, after the one before it, to which it may refer."""
        return f"{self.history[-2]['content'].strip()} {self.question}" if self.history else self.question

    def method_for(self, lm: "LanguageModel") -> Method:
        """Return the method: as requested, else ``generate`` for a model that is large enough and chats."""
        if self.method is not None:
            return self.method
        return GENERATE if lm.tokenizer.chat_template and lm.n_parameters >= ANSWERS_FROM else EXTRACTIVE

    def reads_sentence(self, lm: "LanguageModel", *, has_reader: bool) -> bool:
        """Whether the model generates from the best sentence rather than from chunks."""
        if self.context is not None:
            return self.context == SENTENCE
        return not has_reader and self.approximate_cache is None and lm.n_parameters < ANSWERS_FROM


# Citations

_NUMBER = r"[0-9]{1,3}"
_ITEM = rf"{_NUMBER}(?:\s?[-\u2013]\s?{_NUMBER})?"
_CITATION = re.compile(rf"[ \t]*\[\s?({_ITEM}(?:\s?[,;]\s?{_ITEM})*)\s?\]")
# What may still become a citation: white space at the end, or an open bracket.
_PARTIAL = re.compile(r"[ \t]*\[[0-9\s,;\u2013-]*\Z|[ \t]+\Z")


class Citations:
    """Removes citations of sources that do not exist from a streamed text; sources have the numbers 1 to ``count``.

    ``cited`` has the numbers that stay, each once, in order; ``dropped`` those that were removed.

    >>> citations = Citations(3)
    >>> citations.put("In 1825 [1, 7]. So ") + citations.put("it was [") + citations.put("2][9].") + citations.end()
    'In 1825 [1]. So it was [2].'
    >>> citations.cited, citations.dropped
    ([1, 2], [7, 9])
    """

    def __init__(self, count: int) -> None:
        self.cited: list[int] = []
        self.dropped: list[int] = []
        self._count = count
        self._pending = ""

    def put(self, text: str) -> str:
        """Add text; return what can no longer become part of a citation."""
        text = self._pending + text
        partial = _PARTIAL.search(text)
        complete = len(text) if partial is None else partial.start()
        self._pending = text[complete:]
        return _CITATION.sub(self._valid_part, text[:complete])

    def end(self) -> str:
        """Return the rest of the text, which is complete."""
        rest, self._pending = self._pending, ""
        return _CITATION.sub(self._valid_part, rest)

    def _valid_part(self, citation: re.Match[str]) -> str:
        numbers = [number for item in re.split(r"[,;]", citation[1]) for number in _numbers(item)]
        valid = [number for number in numbers if 1 <= number <= self._count]
        self.cited = list(dict.fromkeys([*self.cited, *valid]))
        self.dropped = list(dict.fromkeys([*self.dropped, *(number for number in numbers if number not in valid)]))
        if len(valid) == len(numbers):
            return citation[0]
        space = citation[0][: len(citation[0]) - len(citation[0].lstrip())]
        return f"{space}[{', '.join(map(str, valid))}]" if valid else ""


def _numbers(item: str) -> list[int]:
    ends = [int(part) for part in re.split(r"[-\u2013]", item)]
    return list(range(ends[0], ends[-1] + 1)) or ends


# Checks of generated sentences
#
# A sentence is compared by its words, not by a second opinion of the model: models that are small enough to invent an
# answer are also small enough to confirm it. Words of the question count for nothing, since any answer may repeat them,
# and a number or a name that no source has makes a sentence unsupported whatever its other words are. If it is one of
# the question, the sentence is weak at most: it may say of the captain what was asked of the ship.

SUPPORTED, WEAK, UNSUPPORTED = "supported", "weak", "unsupported"

# Fractions of a sentence's words that one source has, from which it counts as supported, and as weakly so.
_SUPPORTED, _WEAK = 0.7, 0.4
_FIGURE = re.compile(r"\d+(?:[.,]\d+)*")
# A word after another in the same sentence that begins as names do.
_NAME = re.compile(r"(?<=\s)[\"'(\u201c\u201e\u00ab]?([^\W\d_][\w-]*)")
_NOUNS_ARE_CAPITALIZED = ("de", "lb")
_BRACKETS = re.compile(r"\[[\d\s,;\u2013-]*\]")


class AnswerChecker:
    """Checks the sentences of an answer against its sources, and attributes those that cite none.

    >>> source = Source(1, "rail.txt", 0, 57, "The railway opened in 1825, from Stockton to Darlington.")
    >>> checker = AnswerChecker("When did it open?", [source])
    >>> checks = checker.check("It opened in 1825. It ran to London in 1830.")
    >>> [(check.support, check.sources) for check in checks]
    [('supported', [1]), ('unsupported', [])]
    >>> [check.support for check in checker.check("The railway opened from Stockton to Darlington in Wales.")]
    ['unsupported']
    >>> AnswerChecker("What opened in Wales?", [source]).check("In Wales the railway opened.")[0].support
    'weak'
    """

    def __init__(self, question: str, sources: Sequence[Source], language: str = "en") -> None:
        self._language, self._analyzer = language, Analyzer(language)
        self._asked, self._asked_numbers = self._analyzer.content(question), set(_FIGURE.findall(question))
        self._asked_names = self._names(question)
        self._sources = sources
        texts = [f"{source.title}\n{source.heading}\n{source.text}" for source in sources]
        self._terms = [frozenset(self._analyzer.document(text)) for text in texts]
        self._numbers = [set(_FIGURE.findall(text)) for text in texts]

    def check(self, text: str) -> list[SentenceCheck]:
        """Return for each sentence of a text how well the sources support it, and which of them does."""
        return [self._check(text[start:end]) for start, end in sentence_bounds(text, self._language)]

    def _check(self, sentence: str) -> SentenceCheck:
        bare = _BRACKETS.sub("", sentence)
        words = self._analyzer.content(bare)
        new_words = words - self._asked
        # A sentence without a word of its own says yes or no, or repeats the question.
        compared = new_words or words
        numbers, names = set(_FIGURE.findall(bare)), (self._names(bare) | self._asked_names) & words
        new_numbers, new_names = numbers - self._asked_numbers, names - self._asked
        shares = [
            len(compared & terms) / len(compared) if compared and new_numbers <= known and new_names <= terms else 0.0
            for terms, known in zip(self._terms, self._numbers, strict=True)
        ]
        best = max(shares, default=0.0)
        if best < _WEAK:
            return SentenceCheck(sentence, UNSUPPORTED, round(best, 3), [])
        # The first of the best, since sources are in the order of their relevance.
        place = shares.index(best)
        has_all = numbers <= self._numbers[place] and names <= self._terms[place]
        support = SUPPORTED if best >= _SUPPORTED and new_words and has_all else WEAK
        return SentenceCheck(sentence, support, round(best, 3), [self._sources[place].number])

    def _names(self, sentence: str) -> frozenset[str]:
        """Return the words that are capitalized inside a sentence; none where every noun is."""
        if self._language in _NOUNS_ARE_CAPITALIZED:
            return frozenset()
        names = (word for word in _NAME.findall(sentence) if word[0].isupper())
        return frozenset().union(*map(self._analyzer.content, names))


# Answers and streams


@dataclass(frozen=True)
class PendingAnswer:
    """An answer that a model is about to generate."""

    question: Question
    lm: "LanguageModel"
    prompt: "AnswerPrompt"
    session: "Session | None" = None  # has the beginning of the prompt; None for nothing
    cites: bool = True  # whether the answer cites sources by numbers; otherwise it is based on all of them
    language: str = "en"
    quote: Callable[[], Answer] | None = None  # gives the best sentence, where the sources don't support the answer
    strict: bool = False  # whether they have to support every sentence of it fully
    rerank: RerankCost | None = None

    @cached_property
    def checker(self) -> AnswerChecker:
        """Checks sentences against the sources."""
        return AnswerChecker(self.question.question, self.prompt.sources, self.language)

    @property
    def settings(self) -> GenerationConfig:
        """How the text is generated."""
        return GenerationConfig(
            max_new_tokens=self.prompt.max_new_tokens, sampling=self.question.sampling or GREEDY, stop=self.prompt.stop
        )

    def stream(self) -> Any:
        """Return the text piece by piece."""
        model, prompt, settings = self._continuation()
        return model.stream(*prompt, self.prompt.max_new_tokens, self.question.sampling, **settings)

    def astream(self) -> Any:
        """Return the text piece by piece, for ``async for``."""
        model, prompt, settings = self._continuation()
        return model.astream(*prompt, self.prompt.max_new_tokens, self.question.sampling, **settings)

    def answer(self, generation: "Generation") -> Answer:
        """Return a generated text as an answer."""
        citations = self.citations()
        text = (citations.put(generation.text) + citations.end()).strip()
        checks = self.checker.check(text)
        if self.quote is not None and not self.is_supported(checks):
            return replace(self.quote(), rejected=text, checks=checks, usage=generation.usage)
        attributed = list(dict.fromkeys(number for check in checks for number in check.sources))
        return Answer(
            self.question.question,
            text or SILENT,
            found=True,
            sources=self.prompt.sources,
            cited=(citations.cited or attributed) if self.cites else [source.number for source in self.prompt.sources],
            method=GENERATE,
            dropped=citations.dropped,
            finished=generation.finished,
            usage=generation.usage,
            checks=checks,
            rerank=self.rerank,
        )

    def is_supported(self, checks: Sequence[SentenceCheck]) -> bool:
        """Whether the sources support an answer enough to give it."""
        if self.strict:
            return bool(checks) and all(check.support == SUPPORTED for check in checks)
        return any(check.sources for check in checks)

    def citations(self) -> Citations:
        """Return what removes citations of sources that do not exist."""
        return Citations(len(self.prompt.sources) if self.cites else 0)

    def _continuation(self) -> tuple[Any, list[Any], dict[str, Any]]:
        """Return what generates, after which prompt: the model, or a session with the beginning of the prompt."""
        ids, settings = self.prompt.ids, {"stop": list(self.prompt.stop) or None}
        if self.session is None:
            return self.lm, [ids], settings
        rest = ids[len(self.session.token_ids) :]
        return (self.session.prefill(rest) if rest else self.session), [], settings


Prepare = Callable[[], Answer | PendingAnswer]


class AnswerStream(Iterator[str]):
    """An answer, piece by piece; an extractive answer is one piece.

    Citations of sources that do not exist are removed. Stopping the iteration, or ``close``, stops the model.

    Attributes:
        result: the answer with its sources, after the last piece.
    """

    def __init__(self, prepare: Prepare) -> None:
        self.result: Answer | None = None
        self._pieces = self._generate(prepare)

    def __next__(self) -> str:
        return next(self._pieces)

    def _generate(self, prepare: Prepare) -> Generator[str]:
        pending = prepare()
        if isinstance(pending, Answer):
            yield pending.text
            self.result = pending
            return
        stream = pending.stream()
        try:
            pieces = AnswerPieces(pending)
            for piece in stream:
                if text := pieces.put(piece):
                    yield text
            if text := pieces.end():
                yield text
            self.result = pending.answer(stream.result)
            if pieces.is_held:
                yield self.result.text
        finally:
            stream.close()

    def close(self) -> None:
        """Stop the model, and wait until it has stopped."""
        self._pieces.close()


class AsyncAnswerStream(AsyncIterator[str]):
    """An answer, piece by piece, for ``async for``; see ``AnswerStream``.

    Attributes:
        result: the answer with its sources, after the last piece.
    """

    def __init__(self, prepare: Prepare) -> None:
        self.result: Answer | None = None
        self._pieces = self._generate(prepare)

    async def __anext__(self) -> str:
        return await anext(self._pieces)

    async def _generate(self, prepare: Prepare) -> AsyncGenerator[str]:
        pending = await asyncio.to_thread(prepare)
        if isinstance(pending, Answer):
            yield pending.text
            self.result = pending
            return
        stream = await asyncio.to_thread(pending.astream)
        try:
            pieces = AnswerPieces(pending)
            async for piece in stream:
                if text := pieces.put(piece):
                    yield text
            if text := pieces.end():
                yield text
            self.result = pending.answer(stream.result)
            if pieces.is_held:
                yield self.result.text
        finally:
            await stream.aclose()

    async def aclose(self) -> None:
        """Stop the model, which ends within a token."""
        await self._pieces.aclose()


class AnswerPieces:
    """Pieces of an answer without surrounding white space, and without citations of sources that do not exist.

    Where an unsupported answer is to be replaced, they are held back until a sentence is complete and supported.

    Attributes:
        is_held: whether nothing was given so far.
    """

    def __init__(self, pending: PendingAnswer) -> None:
        self.is_held = True
        self._checker = None if pending.quote is None else pending.checker
        self._strict = pending.strict
        self._citations = pending.citations()
        self._held = self._space = ""

    def put(self, piece: str) -> str:
        """Add a piece as the model wrote it; return what can be shown now."""
        return self._stripped(self._citations.put(piece))

    def end(self) -> str:
        """Return the rest, which is complete."""
        return self._stripped(self._citations.end())

    def _stripped(self, text: str) -> str:
        """Delay white space until text follows it."""
        text = self._space + text
        if not self._held and self.is_held:
            text = text.lstrip()
        stripped = text.rstrip()
        self._space = text[len(stripped) :]
        return self._released(stripped)

    def _released(self, text: str) -> str:
        if not self.is_held:
            return text
        self._held += text
        if self._checker is not None and self._strict:
            return ""  # any sentence that follows can be unsupported
        # The last sentence may go on.
        if self._held and (self._checker is None or any(one.sources for one in self._checker.check(self._held)[:-1])):
            self.is_held = False
            return self._held
        return ""


class QuestionAnswering(ABC):
    """What answers questions from documents, at once or piece by piece."""

    @property
    @abstractmethod
    def lm(self) -> "LanguageModel":
        """The model."""

    @property
    @abstractmethod
    def chunking(self) -> Chunking:
        """How documents are split, and their language."""

    @abstractmethod
    def prepare(self, question: Question) -> Answer | PendingAnswer:
        """Return the answer to a checked question, or what a model generates it from."""

    @takes_aliases
    def ask(self, question: str, k: int = ANSWER_HITS, **options: Unpack[AskKeywords]) -> Answer:
        """Answer a question from the chunks that match it best.

        Args:
            question: the question.
            k: maximum number of chunks; fewer where the model's context has no room for them.
            options: ``method``, ``context``, ``filter``, ``weight``, ``rerank`` and its like, ``history``,
                ``max_new_tokens``, ``sampling``, ``instructions`` and ``approximate_cache``; see ``AskKeywords``.
                ``top_k`` is another name for ``k``.

        Returns:
            The answer with its numbered sources. Where nothing relevant was found, its text says so, and ``found`` is
            False. Citations of sources that do not exist are removed from the text, and listed in ``dropped``.

        Raises:
            TextError: the question is empty, not a string, or too long for the model.
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
        asked = Question.of(question, k, options)
        return AnswerStream(lambda: self.prepare(asked))

    @takes_aliases
    async def aask(self, question: str, k: int = ANSWER_HITS, **options: Unpack[AskKeywords]) -> Answer:
        """Answer a question as ``ask`` does, without blocking the event loop; canceling it stops the model."""
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
        """Answer a question as ``stream`` does, for ``async for``; canceling the task stops the model."""
        asked = Question.of(question, k, options)
        return AsyncAnswerStream(lambda: self.prepare(asked))


def sources_of(hits: Sequence[Hit]) -> list[Source]:
    """Return hits as numbered sources."""
    return [
        Source(number, hit.source, hit.start, hit.end, hit.text, hit.title, hit.heading)
        for number, hit in enumerate(hits, start=1)
    ]


# Extractive answers

COVERAGE = 0.34
"""Minimum fraction of a question's words in a single chunk for any hit to be relevant: more than a third.

Chosen on Medline, Cranfield and CISI, each asked its own queries and those of the other two, by the first 8 chunks that
BM25 finds: 77% of its own queries pass and 14% of the others'. At 0.3 these are 83% and 23%, at 0.5 55% and 5%.
"""


def coverage(question: str, hits: Sequence[Hit], language: str) -> float:
    """Return the largest fraction of a question's words that a single hit contains; 0 for no hits.

    Words are compared as in a keyword search. A question of stop words only is covered by any hit.

    >>> hit = Hit("a", 0, 30, "The railways opened in 1825.", 1.0, 1)
    >>> coverage("When was the first railway opened?", [hit], "en")
    0.6666666666666666
    """
    analyzer = Analyzer(language)
    words = analyzer.content(question)
    if not hits or not words:
        return float(bool(hits))
    texts = (f"{hit.title}\n{hit.heading}\n{hit.text}" for hit in hits)
    return max(len(words.intersection(analyzer.document(text))) for text in texts) / len(words)


def is_relevant(question: str, hits: Sequence[Hit], language: str) -> bool:
    """Whether any hit is about a question at all.

    Search scores compare the hits of one query, so they cannot tell. The question's words can: a single chunk must have
    more than a third of them, stop words excluded.
    """
    return coverage(question, hits, language) >= COVERAGE


def no_answer(question: str, method: str, rerank: RerankCost | None = None) -> Answer:
    """Return the answer to a question for which nothing relevant was found."""
    return Answer(question, NOTHING, found=False, sources=[], cited=[], method=method, rerank=rerank)


def extractive_answer(question: str, hits: Hits, sentence: Source) -> Answer:
    """Return the best sentence of the hits, unchanged, as the answer."""
    return Answer(
        question,
        " ".join(sentence.text.split()),
        found=True,
        sources=sources_of(hits),
        cited=[sentence.number],
        method=EXTRACTIVE,
        rerank=hits.rerank,
    )
