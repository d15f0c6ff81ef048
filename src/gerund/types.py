"""Frozen results of ``LanguageModel`` and ``Index``, and the protocols of models and scorers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

if TYPE_CHECKING:
    import numpy as np


class Rendered(str):
    """A text whose control tokens are meant, such as a chat template filled in: they are parsed, and no BOS is added.

    In any other text a control token such as ``<|im_start|>`` is text.

    Attributes:
        literal: (first, behind the last) characters of the parts that come from users: control tokens there are text.
        with_specials: whether the tokenizer adds its own special tokens, which a template has already.

    >>> Rendered("<|user|>hello", literal=[(8, 13)]).literal
    ((8, 13),)
    """

    literal: tuple[tuple[int, int], ...]
    with_specials: bool

    def __new__(cls, text: str, *, literal: Sequence[tuple[int, int]] = (), with_specials: bool = False) -> "Rendered":
        """Mark a text as rendered."""
        own = super().__new__(cls, text)
        own.literal = tuple((int(first), int(behind)) for first, behind in literal)
        own.with_specials = with_specials
        return own


Promise = Literal["bits of generate", "same text under any load", "none"]
"""What holds for a text that is written beside others: it is that of ``generate``, log-probabilities and all; it is the
same whatever else is written; or nothing but that it is right up to rounding."""


@dataclass(frozen=True)
class EncodeResult:
    """Vectors, and what was read for them.

    Attributes:
        vectors: ``(n, dimensions)`` float32.
        token_counts: how many tokens the model read of each text, prompt and special tokens included; 0 for an empty
            text.
        truncated: for each text, whether it was too long and its end was left out.
    """

    vectors: "np.ndarray"
    token_counts: list[int]
    truncated: list[bool]


@dataclass(frozen=True)
class TokenLogprob:
    """A token, and how probable the untouched model found it where it stands.

    Attributes:
        token_id: its id.
        utf8: the bytes that it spells, which may be a part of a character; none for a control token.
        logprob: natural logarithm of its probability, before penalties, temperature and filters.
        top: the most probable tokens of the place, best first, as many as were asked for.
    """

    token_id: int
    utf8: bytes
    logprob: float
    top: tuple["TokenLogprob", ...] = field(default=(), repr=False)

    @property
    def text(self) -> str:
        """What it spells, with a replacement character for a part of one."""
        return self.utf8.decode("utf-8", "replace")


@dataclass(frozen=True)
class Usage:
    """How many tokens were read and written.

    Attributes:
        prompt_tokens: those of the prompt, special tokens included.
        completion_tokens: all that the model wrote, end token and the tokens of a stop string included.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        """Both together."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True)
class Generation:
    """One continuation of one prompt.

    Attributes:
        text: the new text, without the prompt; it ends before a stop string unless it is to be included.
        token_ids: its token ids, without the end token; those that spell a stop string are there.
        score: mean log-probability (nats a token) that the untouched model gives the tokens; 0.0 for none.
        finished: whether the text came to its end (the model ended it, a stop string was written, what was asked
            for is complete), rather than running out of ``max_new_tokens``.
        stop: the stop string that ended it, or the id of the stop token, if one did.
        logprobs: of each token of ``token_ids``, where they were asked for.
        usage: how many tokens were read and written for it.
    """

    text: str
    token_ids: list[int] = field(repr=False)
    score: float
    finished: bool
    stop: str | int | None = field(default=None, kw_only=True)
    logprobs: list[TokenLogprob] | None = field(default=None, kw_only=True, repr=False)
    usage: Usage = field(default=Usage(), kw_only=True, repr=False, compare=False)

    @property
    def finish_reason(self) -> Literal["stop", "length"]:
        """Why it ended, in the words of OpenAI's interface."""
        return "stop" if self.finished else "length"


@dataclass(frozen=True)
class Infill:
    """A text whose gaps were filled.

    Attributes:
        text: the whole text.
        spans: what stands in each gap now, with the spaces that belong to it.
        token_ids: the token ids of each span.
        scores: for each gap the mean log-probability (nats a token) of the span and of the first tokens behind it,
            by which its length was chosen.
        lengths: how many tokens each span has.
    """

    text: str
    spans: list[str]
    token_ids: list[list[int]] = field(repr=False)
    scores: list[float]
    lengths: list[int]


@dataclass(frozen=True)
class Candidate(Generation):
    """One continuation with what a scorer says of it.

    Attributes:
        rank_score: how well it continues the prompt; higher is better, comparable only within one scorer and prompt.
    """

    rank_score: float


@dataclass(frozen=True)
class Ranked(Candidate):
    """The continuation that scored best, with those it was chosen from.

    Attributes:
        beams: what was kept in the end, best first; this one is the first of them.
        history: for each round all texts so far that competed in it, best first; the first ones were kept.
    """

    beams: list[Candidate] = field(repr=False)
    history: list[list[Candidate]] = field(repr=False)

    @property
    def candidates(self) -> list[Candidate]:
        """All whole continuations that competed in the end, best first, each with its score; this one among them."""
        return self.history[-1] if self.history else self.beams

    def __iter__(self) -> Iterator[tuple[int, float]]:
        """Yield the place in ``candidates`` and the score of each of them, best first."""
        return ((index, one.rank_score) for index, one in enumerate(self.candidates))


@dataclass(frozen=True)
class Ranking:
    """Documents in the order of their relevance to a query.

    Attributes:
        indices: which documents, the most relevant first.
        scores: the score of each of them; higher is better, comparable only within one query and measure.
        by: how relevance was measured.
    """

    indices: list[int]
    scores: list[float]
    by: str

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
class Hit(_Plain):
    """A chunk of a document that a search found.

    Attributes:
        source: the document: a file, or ``FILE#ID`` for a row of a table.
        start: its first character in the document's text.
        end: the character behind its last.
        text: the chunk itself.
        score: how well it fits the query; higher is better, comparable only within one query.
        rank: its place, counted from 1.
        title: the document's title; empty where there is none.
        heading: the headings above the chunk, outermost first, joined by `` > ``.
        words: BM25's score; None where the words did not find it.
        similarity: cosine of its vector with the query's; None where the vectors did not find it.
        relevance: the score by which the model put it into a new order; None where it did not.

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


@dataclass(frozen=True)
class Source(_Plain):
    """A chunk that an answer was made from, with the number by which the answer cites it.

    Attributes:
        number: counted from 1; an answer cites it as ``[number]``.
        source: the document: a file, or ``FILE#ID`` for a row of a table.
        start: the chunk's first character in the document's text.
        end: the character behind its last.
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
class Answer(_Plain):
    """An answer out of an index.

    Attributes:
        question: what was asked.
        text: the answer; where nothing relevant was found, a sentence that says so.
        found: whether anything relevant was found.
        sources: what was read, by their numbers; none where nothing relevant was found.
        cited: the numbers of the sources that the answer rests on.
        method: how it was made: ``extractive``, a sentence of a source as it stands there, or ``generate``, written by
            the model.
        dropped: numbers that the model cited and no source has; they were taken out of the text.
        finished: whether a written answer came to its end, rather than running out of tokens.
        usage: how many tokens were read and written for it.

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

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Self:
        """Return the answer that ``to_dict`` described."""
        sources = [Source.from_dict(one) for one in fields["sources"]]
        more = {name: list(fields[name]) for name in ("cited", "dropped") if name in fields}
        usage = {"usage": Usage(**fields["usage"])} if "usage" in fields else {}
        return cls(**{**fields, "sources": sources, **more, **usage})


class Scorer(Protocol):
    """What says how well texts continue a prefix."""

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
    def with_encoder(self) -> Callable[..., Any]:
        """Returns the same model with another encoder config."""
