"""Settings of answer tokens: ``AnswerConfig``, which a model's folder has as ``answers.json``; no torch."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self, get_args

from gerund.checks import demand_fields, one_of
from gerund.errors import ConfigError
from gerund.settings.fields import AUTO_ADAPTER, NO_ADAPTER

ANSWERS_FILE = "answers.json"
AnswerPrefix = Literal["vector", "states"]


@dataclass(frozen=True)
class AnswerConfig:
    """How many answer tokens stand behind a text, and how they are read as text.

    >>> AnswerConfig(tokens=5)
    Traceback (most recent call last):
    gerund.errors.ConfigError: answers.json: read is 10 and tokens 5: both are whole numbers, 1 <= read <= tokens
    """

    tokens: int = 20  # behind a text

    read: int = 10  # the last ones, whose states are pooled

    prefix: AnswerPrefix = "vector"  # what is mapped to the embeddings that the model reads to write the answer

    before: tuple[int, ...] = ()  # ids that stand before these, as before every text (BOS)

    def __post_init__(self) -> None:
        counts = (self.read, self.tokens)
        if any(type(count) is not int for count in counts) or not 1 <= self.read <= self.tokens:
            raise ConfigError(
                f"{ANSWERS_FILE}: read is {self.read} and tokens {self.tokens}: both are whole numbers, "
                "1 <= read <= tokens"
            )
        one_of(f"prefix in {ANSWERS_FILE}", self.prefix, get_args(AnswerPrefix))
        if any(type(number) is not int or number < 0 for number in self.before):
            raise ConfigError(f"{ANSWERS_FILE}: before is a list of token ids, not {list(self.before)}")

    def to_dict(self) -> dict[str, Any]:
        """Return the content of ``answers.json``."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read settings back; raises ``ConfigError`` for an unknown field."""
        demand_fields(cls, data, f"in {ANSWERS_FILE}")
        before = data.get("before", ())
        if not isinstance(before, list | tuple):
            raise ConfigError(f"{ANSWERS_FILE}: before is a list of token ids, not {before!r}")
        return cls(**{**data, "before": tuple(before)})


def answers_folder(adapter: str | Path | None) -> Path | None:
    """Return the folder of answer tokens that an adapter is; None for another adapter, or none."""
    if adapter in (None, NO_ADAPTER, AUTO_ADAPTER):
        return None
    folder = Path(str(adapter))
    return folder if (folder / ANSWERS_FILE).is_file() else None
