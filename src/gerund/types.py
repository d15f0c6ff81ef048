"""Frozen results of ``LanguageModel`` and ``Index``, and the protocols of models and scorers."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

if TYPE_CHECKING:
    import numpy as np


class Rendered(str):
    """A text whose control tokens are parsed, such as a rendered chat template; no BOS token is added.

    In any other text a control token such as ``<|im_start|>`` is plain text.

    Attributes:
        literal: (start, end) characters of the parts that come from users, in which control tokens are plain text.
        with_specials: whether the tokenizer adds its special tokens; a template has them already.

    >>> Rendered("<|user|>hello", literal=[(8, 13)]).literal
    ((8, 13),)
    """

    literal: tuple[tuple[int, int], ...]
    with_specials: bool

    def __new__(cls, text: str, *, literal: Sequence[tuple[int, int]] = (), with_specials: bool = False) -> "Rendered":
        """Mark a text as rendered."""
        rendered = super().__new__(cls, text)
        rendered.literal = tuple((int(start), int(end)) for start, end in literal)
        rendered.with_specials = with_specials
        return rendered


UNITS = {"percent": (100.0, 2), "fraction": (100.0, 2), "perplexity": (1.0, 2), "bits": (1.0, 3)}
"""Factor and decimals of a score that is shown, by its unit, as the papers print them."""

Guarantee = Literal["bits of generate", "same text under any load", "none"]
"""What holds for a text that is written beside others: it is that of ``generate``, log-probabilities and all; it is the
same whatever else is written; or nothing but that it is right up to rounding."""


@dataclass(frozen=True)
class EncodeResult:
    """Vectors, with the token counts of their texts.

    Attributes:
        vectors: ``(n, dimensions)`` float32.
        token_counts: tokens per text, prompt and special tokens included; 0 for an empty text.
        truncated: whether each text was too long and truncated at its end.
    """

    vectors: "np.ndarray"
    token_counts: list[int]
    truncated: list[bool]


@dataclass(frozen=True)
class TokenLogprob:
    """A token and its log-probability under the base model.

    Attributes:
        token_id: its id.
        utf8: the bytes that it spells, possibly part of a character; empty for a control token.
        logprob: natural logarithm of its probability, before penalties, temperature and filters.
        top: the most likely tokens at its position, best first, as many as requested.
    """

    token_id: int
    utf8: bytes
    logprob: float
    top: tuple["TokenLogprob", ...] = field(default=(), repr=False)

    @property
    def text(self) -> str:
        """The text that it spells, with a replacement character for part of one."""
        return self.utf8.decode("utf-8", "replace")


@dataclass(frozen=True)
class Usage:
    """Numbers of prompt and completion tokens.

    Attributes:
        prompt_tokens: tokens of the prompt, special tokens included.
        completion_tokens: generated tokens, end token and the tokens of a stop string included.
        cached_tokens: tokens at the prompt's start that an engine did not have to read, since an earlier prompt began
            with them; not compared.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = field(default=0, compare=False)

    @property
    def total_tokens(self) -> int:
        """The sum of both."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True)
class ToolCall:
    """A model's request to run a tool.

    Attributes:
        name: the tool's name.
        arguments: its arguments as the model wrote them: a JSON object, unless ``is_valid`` is False.
        id: identifies the call; the message with its result repeats it as ``tool_call_id``.
    """

    name: str
    arguments: str
    id: str = field(compare=False)

    @property
    def is_valid(self) -> bool:
        """Whether the arguments are a JSON object.

        >>> ToolCall("add", '{"a": 1', "1").is_valid
        False
        """
        try:
            return isinstance(json.loads(self.arguments), dict)
        except (ValueError, RecursionError):
            return False

    @property
    def message(self) -> dict[str, Any]:
        """The call as it stands in the ``tool_calls`` of a message."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True)
class Generation:
    """One completion of one prompt.

    Attributes:
        text: the new text, without the prompt; it ends before a stop string unless you asked to include it.
        token_ids: its token ids, without the end token but with those of a stop string.
        score: mean log-probability (nats per token) of the tokens under the base model; 0.0 for no tokens.
        finished: whether the text is complete (an end token, a stop string, the requested form), rather than cut off by
            ``max_new_tokens``.
        stop: the stop string that ended it, or the id of the stop token, if one did.
        logprobs: one per token of ``token_ids``, if requested.
        usage: its token counts.
        tool_calls: the tools that a chat's answer calls; ``text`` is then what precedes them.
    """

    text: str
    token_ids: list[int] = field(repr=False)
    score: float
    finished: bool
    stop: str | int | None = field(default=None, kw_only=True)
    logprobs: list[TokenLogprob] | None = field(default=None, kw_only=True, repr=False)
    usage: Usage = field(default=Usage(), kw_only=True, repr=False, compare=False)
    tool_calls: tuple[ToolCall, ...] = field(default=(), kw_only=True)

    @property
    def finish_reason(self) -> Literal["stop", "length", "tool_calls"]:
        """Why it ended, by OpenAI's names; ``stop`` also for calls whose arguments are not a JSON object."""
        if not self.finished:
            return "length"
        return "tool_calls" if self.tool_calls and all(call.is_valid for call in self.tool_calls) else "stop"

    @property
    def message(self) -> dict[str, Any]:
        """The assistant's message with this text and these tool calls, to append to the conversation."""
        calls = {"tool_calls": [call.message for call in self.tool_calls]} if self.tool_calls else {}
        return {"role": "assistant", "content": self.text, **calls}


@dataclass(frozen=True)
class Infill:
    """A text whose blanks were filled.

    Attributes:
        text: the full text.
        spans: the filling of each blank, with its spaces.
        token_ids: the token ids of each span.
        scores: for each blank the mean log-probability (nats per token) of the span and of the first tokens after it,
            by which its length was chosen.
        lengths: number of tokens of each span.
    """

    text: str
    spans: list[str]
    token_ids: list[list[int]] = field(repr=False)
    scores: list[float]
    lengths: list[int]


@dataclass(frozen=True)
class Candidate(Generation):
    """One completion with its score from a scorer.

    Attributes:
        rank_score: how well it continues the prompt; higher is better. Only scores of one scorer and prompt compare.
    """

    rank_score: float


@dataclass(frozen=True)
class Ranked(Candidate):
    """The completion that scored best, with its candidates.

    Attributes:
        beams: the final candidates, best first; this one is the first of them.
        history: for each round its candidates, best first; the first ones were kept.
    """

    beams: list[Candidate] = field(repr=False)
    history: list[list[Candidate]] = field(repr=False)

    @property
    def candidates(self) -> list[Candidate]:
        """All complete candidates, best first, including this one."""
        return self.history[-1] if self.history else self.beams

    def __iter__(self) -> Iterator[tuple[int, float]]:
        """Yield the index in ``candidates`` and the score of each, best first."""
        return ((index, candidate.rank_score) for index, candidate in enumerate(self.candidates))


@dataclass(frozen=True)
class Ranking:
    """Documents in the order of their relevance to a query.

    Attributes:
        indices: which documents, the most relevant first.
        scores: the score of each of them; higher is better, comparable only within one query and measure.
        by: how relevance was measured.
        read: how many documents were read; those after them keep the order of the first stage, and their scores say
            nothing else.
        weight: what the measure counts beside the first stage's scores; None where it ranked alone.
        seconds: how long reading the documents took, on the clock.
    """

    indices: list[int]
    scores: list[float]
    by: str
    read: int | None = field(default=None, kw_only=True)
    weight: float | None = field(default=None, kw_only=True)
    seconds: float | None = field(default=None, kw_only=True, compare=False)

    def __iter__(self) -> Iterator[tuple[int, float]]:
        """Yield the index and the score of each document, the most relevant first.

        >>> list(Ranking([1, 0], [0.8, 0.3], "vectors"))
        [(1, 0.8), (0, 0.3)]
        """
        return iter(zip(self.indices, self.scores, strict=True))

    def __len__(self) -> int:
        """Return how many documents there are."""
        return len(self.indices)


class _Plain:
    """A dataclass that goes through JSON."""

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        return asdict(self)  # type: ignore[call-overload]

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Self:
        """Return what ``to_dict`` described."""
        return cls(**fields)


@dataclass(frozen=True)
class RerankCost(_Plain):
    """What it cost to re-rank documents for a query.

    Attributes:
        by: how relevance was measured.
        offered: how many documents were to be read.
        read: how many were, before a deadline if there was one.
        seconds: how long that took, on the clock.

    >>> str(RerankCost("lift", 20, 12, 1.504))
    '12 of 20 re-ranked by lift in 1.50 s'
    """

    by: str
    offered: int
    read: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.read} of {self.offered} re-ranked by {self.by} in {self.seconds:.2f} s"

    @classmethod
    def of(cls, ranking: Ranking, offered: int) -> Self:
        """Return the cost of a ranking of ``offered`` documents."""
        return cls(ranking.by, offered, ranking.read or 0, round(ranking.seconds or 0.0, 4))


@dataclass(frozen=True)
class Hit(_Plain):
    """A search result: one chunk of a document.

    Attributes:
        source: the document: a file, or ``FILE#ID`` for a row of a table.
        start: its first character in the document's text.
        end: the character after its last.
        text: the chunk itself.
        score: its relevance to the query; higher is better. Only scores of one query compare.
        rank: its rank, from 1.
        title: the document's title; empty where there is none.
        heading: the headings above the chunk, outermost first, joined by `` > ``.
        words: BM25 score; None where keyword search did not find it.
        similarity: cosine similarity with the query; None where vector search did not find it.
        relevance: score of the re-ranking; None without re-ranking.

    >>> hit = Hit("notes.txt", 0, 12, "Bread is made", 0.8, 1)
    >>> Hit.from_dict(hit.to_dict()) == hit
    True
    """

    source: str
    start: int
    end: int
    text: str
    score: float
    rank: int
    title: str = ""
    heading: str = ""
    words: float | None = None
    similarity: float | None = None
    relevance: float | None = None


class Hits(list[Hit]):
    """The hits of a query, best first; a list with ``rerank``, what re-ranking cost, None where nothing was."""

    def __init__(self, hits: Iterable[Hit] = (), rerank: RerankCost | None = None) -> None:
        super().__init__(hits)
        self.rerank = rerank


@dataclass(frozen=True)
class Source(_Plain):
    """A chunk that an answer is based on, with its citation number.

    Attributes:
        number: from 1; an answer cites it as ``[number]``.
        source: the document: a file, or ``FILE#ID`` for a row of a table.
        start: the chunk's first character in the document's text.
        end: the character after its last.
        text: the chunk itself.
        title: the document's title; empty where there is none.
        heading: the headings above the chunk, outermost first, joined by `` > ``.
    """

    number: int
    source: str
    start: int
    end: int
    text: str
    title: str = ""
    heading: str = ""


@dataclass(frozen=True)
class SentenceCheck(_Plain):
    """How well its sources support a sentence of a generated answer.

    Attributes:
        text: the sentence.
        support: ``supported``, ``weak`` or ``unsupported``.
        coverage: the largest fraction of its words, those of the question left out, that one source has; 0 where it has
            a number or a name that the source lacks.
        sources: the number of that source; empty for an unsupported sentence.
    """

    text: str
    support: str
    coverage: float
    sources: list[int]


@dataclass(frozen=True)
class Answer(_Plain):
    """An answer from an index.

    Attributes:
        question: the question.
        text: the answer, or a sentence saying that nothing relevant was found.
        found: whether anything relevant was found.
        sources: the chunks given to the model; empty where nothing relevant was found.
        cited: the numbers of the cited sources.
        method: ``extractive``, a sentence quoted from a source, or ``generate``, generated by the model.
        dropped: cited numbers without a source; they were removed from the text.
        finished: whether a generated answer is complete, rather than cut off.
        usage: its token counts.
        checks: for each sentence of a generated text, how well the sources support it.
        rejected: the generated text that the sources don't support, which the quoted sentence in ``text`` replaces.
        rerank: what re-ranking the chunks cost; None where they weren't.

    >>> answer = Answer("When?", "In 1825.", True, [Source(1, "rail.txt", 0, 8, "In 1825.")], [1], "extractive")
    >>> Answer.from_dict(answer.to_dict()) == answer
    True
    """

    question: str
    text: str
    found: bool
    sources: list[Source] = field(repr=False)
    cited: list[int]
    method: str
    dropped: list[int] = field(default_factory=list)
    finished: bool = True
    usage: Usage = field(default=Usage(), repr=False)
    checks: list[SentenceCheck] = field(default_factory=list)
    rejected: str = ""
    rerank: RerankCost | None = None

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Self:
        """Return the answer that ``to_dict`` described."""
        sources = [Source.from_dict(source) for source in fields["sources"]]
        lists = {name: list(fields[name]) for name in ("cited", "dropped") if name in fields}
        usage = {"usage": Usage(**fields["usage"])} if "usage" in fields else {}
        checks = [SentenceCheck.from_dict(check) for check in fields.get("checks", ())]
        rerank = None if fields.get("rerank") is None else RerankCost(**fields["rerank"])
        return cls(**{**fields, "sources": sources, **lists, **usage, "checks": checks, "rerank": rerank})


class Scorer(Protocol):
    """Scores how well texts continue a prefix."""

    name: str

    def score(self, prefixes: Sequence[str], continuations: Sequence[Sequence[str]]) -> list[list[float]]:
        """Return a score for each continuation of each prefix; higher is better."""


class TextModel(Protocol):
    """What encodes texts, as scorers and indices need it; ``LanguageModel`` is one."""

    @property
    def job(self) -> str:
        """Whose adapter is active while texts are read."""

    @property
    def name(self) -> str:
        """What messages call the model."""

    @property
    def model(self) -> Any:
        """The transformers model."""

    @property
    def tokenizer(self) -> Any:
        """Its tokenizer."""

    @property
    def encoder(self) -> Any:
        """The encoder config."""

    @property
    def runtime(self) -> Any:
        """What computes the vectors."""

    @property
    def dimensions(self) -> int:
        """Dimensions of a vector."""

    @property
    def max_length(self) -> int | None:
        """Maximum tokens of a text; None for no limit."""

    @property
    def encode(self) -> Callable[..., Any]:
        """Returns vectors ``(n, D)``, or ``(D,)`` for a single text."""

    @property
    def encode_spans(self) -> Callable[..., Any]:
        """Returns the vectors of spans, an array per text."""

    @property
    def fingerprint(self) -> Callable[..., str]:
        """Returns the encoder's fingerprint."""

    @property
    def adapters(self) -> Any:
        """Its adapters by job."""

    @property
    def late(self) -> Any:
        """What its token vectors were trained with; None where they were not."""

    @property
    def token_reader(self) -> Callable[[], Any]:
        """Returns what reads texts for their token vectors."""

    @property
    def full(self) -> Any:
        """The model with torch: itself, unless it does without."""

    @property
    def was_trained_to_embed(self) -> bool:
        """Whether the record of a training in its folder says so."""

    @property
    def with_encoder(self) -> Callable[..., Any]:
        """Returns the same model with another encoder config."""
