"""The texts that come with the demo.

Knows: the files in ``assets/demo``. Does not know: models.
"""

import json
from dataclasses import dataclass
from importlib import resources
from typing import Any


@dataclass(frozen=True)
class Passage:
    """A document or a search, with the topic that it is about."""

    topic: str
    text: str


@dataclass(frozen=True)
class Beginning:
    """A text that is continued.

    Attributes:
        text: the beginning.
        right: the sentence that follows it.
        wrong: sentences that do not.
    """

    text: str
    right: str
    wrong: tuple[str, ...]


@dataclass(frozen=True)
class Gap:
    """A text with a ``[blank]``, and what might stand there."""

    text: str
    original: str


def read_passages(name: str) -> list[Passage]:
    """Read ``documents.jsonl`` or ``queries.jsonl``."""
    return [Passage(row["topic"], row["text"]) for row in _rows(name)]


def read_beginnings() -> list[Beginning]:
    """Read ``beginnings.jsonl``."""
    return [Beginning(row["text"], row["right"], tuple(row["wrong"])) for row in _rows("beginnings.jsonl")]


def read_gaps() -> list[Gap]:
    """Read ``gaps.jsonl``."""
    return [Gap(row["text"], row["original"]) for row in _rows("gaps.jsonl")]


def _rows(name: str) -> list[dict[str, Any]]:
    text = (resources.files("gerund") / "assets" / "demo" / name).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.split("\n") if line]
