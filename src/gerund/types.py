"""Frozen results: what the verbs give back."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np


class Rendered(str):
    """A text whose control tokens are meant, such as a chat template filled in: they are parsed, and no BOS is added.

    In any other text a control token such as ``<|im_start|>`` is text.

    Args:
        text: the text.
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
class Generation:
    """One continuation of one prompt.

    Attributes:
        text: the new text, without the prompt.
        token_ids: its token ids, without the end token.
        score: mean log-probability (nats a token) that the untouched model gives the tokens; 0.0 for none.
        finished: whether the model ended the text itself, rather than running out of ``max_new_tokens``.
    """

    text: str
    token_ids: list[int] = field(repr=False)
    score: float
    finished: bool


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


class Scorer(Protocol):
    """What says how well texts continue a prefix."""

    name: str

    def score(self, prefixes: Sequence[str], continuations: Sequence[Sequence[str]]) -> list[list[float]]:
        """Return a score for each continuation of each prefix; higher is better."""
