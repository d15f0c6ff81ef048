"""Settings of ``gerund adapt``."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gerund.checks import demand_number, one_of, place, whole_number
from gerund.errors import ConfigError

MINUTES = 10.0
"""How long is trained when nobody says."""

ASKED = ("titles", "sentences")

LEAST_QUERIES, MOST_QUERIES = 30, 500
"""How many queries are measured on: fewer tell nothing, and more cost time without telling much more."""

MOST_SEARCHED = 5000
"""How many documents are searched at most when it is measured, which is done twice."""

LEAST_DOCUMENTS = 30
"""How many documents there have to be to train on."""

LEAST_PAIRS = 50
"""How many pairs there have to be to train on."""


@dataclass(frozen=True, kw_only=True)
class AdaptConfig:
    """How a model is adapted.

    Raises:
        ConfigError: an option that cannot be.

    >>> AdaptConfig(minutes=0)
    Traceback (most recent call last):
    gerund.errors.ConfigError: minutes=0 leaves no time to train; give a number above 0
    """

    held_out: float = 0.2
    """Which fraction of the documents is put aside to measure on; at least 30 and at most 500 of them."""
    questions: str | Path | None = None
    """A .jsonl file of questions with the documents that answer them (``question``, ``source``), in the place of titles
    and first sentences."""
    ask: str = "titles"
    """What documents are asked by: ``titles``, and first sentences where there is none; or ``sentences``, first
    sentences alone, where titles stand word for word in the text, so that words find them by themselves."""
    recipe: str | Path | None = None
    """Another recipe than ``gur-adapt``: a file, or the name of a bundled one."""
    minutes: float | None = None
    """How long is trained at most; None for 10, or with a recipe of one's own for the steps that it says."""
    steps: int | None = None
    """How many steps are trained, in the place of minutes."""
    language: str = "en"
    """What the documents are written in: how sentences end."""
    seed: int = 0
    """Determines which documents are put aside, the order of the pairs, and the training."""

    def __post_init__(self) -> None:
        one_of("way to ask", self.ask, ASKED)
        if self.questions is not None:
            object.__setattr__(self, "questions", place("questions", self.questions))
        demand_number("held_out", self.held_out)
        if not 0 < self.held_out <= 0.5:
            raise ConfigError(f"held_out={self.held_out} is not a fraction above 0 and at most 0.5")
        if self.minutes is not None:
            demand_number("minutes", self.minutes)
            if not 0 < self.minutes < float("inf"):
                raise ConfigError(f"minutes={self.minutes:g} leaves no time to train; give a number above 0")
        if self.steps is not None:
            if self.minutes is not None:
                raise ConfigError("minutes and steps both say how long to train; give one of them")
            if whole_number("steps", self.steps) < 1:
                raise ConfigError(f"steps={self.steps} trains nothing; give 1 or more")
        if whole_number("seed", self.seed) < 0:
            raise ConfigError(f"seed={self.seed} is below 0")
        if not isinstance(self.language, str) or not (self.language.isascii() and self.language.isalpha()):
            raise ConfigError(f"language is a code such as en or zh, not {self.language!r}")

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict; of files the names, as they were given."""
        own = {name: getattr(self, name) for name in ("held_out", "ask", "minutes", "steps", "language", "seed")}
        files = {name: getattr(self, name) for name in ("questions", "recipe")}
        return own | {name: None if value is None else str(value) for name, value in files.items()}
