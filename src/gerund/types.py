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
