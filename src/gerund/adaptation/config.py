"""Settings of ``gerund adapt``."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gerund.checks import demand_number, flag, one_of, place, whole_number
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
    """Fraction of the documents that is held out for evaluation; at least 30 and at most 500 documents."""
    questions: str | Path | None = None
    """A .jsonl file of questions with the documents that answer them (``question``, ``source``), instead of titles and
    first sentences."""
    ask: str = "titles"
    """What queries are made from: ``titles``, and first sentences where there is none; or ``sentences``, first
    sentences alone, for documents that contain their titles word for word, which keyword search finds by itself."""
    write_questions: bool = False
    """Let the model write questions to the documents that it is trained on, and train on those that find their
    document, with hard negatives (the recipe ``questions-adapt``). The model must generate well enough to ask."""
    reranker: bool = False
    """Train a reranker too, after the encoder and for as long (the recipe ``reranker``), and measure it as the second
    stage of a search. With ``write_questions`` it learns from questions that the model writes."""
    recipe: str | Path | None = None
    """Another recipe than ``gur-adapt``: a file, or the name of a bundled one."""
    minutes: float | None = None
    """Training time at most; default: 10, or with another recipe its number of steps."""
    steps: int | None = None
    """Number of training steps, instead of ``minutes``."""
    language: str = "en"
    """Language code of the documents: how sentences end."""
    seed: int = 0
    """Determines which documents are held out, the order of the pairs, and the training."""

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
                raise ConfigError("pass either minutes or steps, not both")
            if whole_number("steps", self.steps) < 1:
                raise ConfigError(f"steps={self.steps} trains nothing; give 1 or more")
        flag("write_questions", self.write_questions)
        flag("reranker", self.reranker)
        if whole_number("seed", self.seed) < 0:
            raise ConfigError(f"seed={self.seed} is below 0")
        if not isinstance(self.language, str) or not (self.language.isascii() and self.language.isalpha()):
            raise ConfigError(f"language is a code such as en or zh, not {self.language!r}")

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict; of files the names, as they were given."""
        files = {name: None if (path := getattr(self, name)) is None else str(path) for name in ("questions", "recipe")}
        return asdict(self) | files
