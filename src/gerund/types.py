"""Frozen results: what the verbs give back."""

from dataclasses import dataclass, field


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
