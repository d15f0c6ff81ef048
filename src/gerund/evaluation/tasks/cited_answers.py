"""Answers out of one's own documents: are they right, and do they cite what they rest on?

Knows: questions in SQuAD's layout, indices. Does not know: how an answer is found or written.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np

from gerund.errors import ConfigError
from gerund.evaluation.sets.squad import (
    Paragraph,
    Question,
    contains,
    exact_match,
    read_questions,
    token_f1,
)
from gerund.evaluation.systems.base import Generates
from gerund.evaluation.task import EvaluationConfig, FileTask, Score, Side
from gerund.progress import progress
from gerund.retrieval.documents import Document
from gerund.retrieval.index import open_index
from gerund.retrieval.question_answering import METHODS
from gerund.types import Answer

FOLDER = "ask"


@dataclass(frozen=True, kw_only=True)
class Ask(FileTask):
    """F1 of the words of answers that ``gerund ask`` gives out of an index of all paragraphs.

    The files are ``ask/NAME.test.json``, with ``.valid.json`` for validation, in SQuAD's layout. Beside F1 there are
    SQuAD's exact match; how often the answer holds a right one (``contains``); how many of the sources that are cited
    are the paragraph that the question was asked about (``citation_precision``, over the questions whose answer cites
    any), and how many questions have it cited (``citation_recall``); and how often the questions that no paragraph
    answers get none (``unanswerable``). All but the last are means over the questions that have answers; one that is
    not answered counts as 0.

    ``config.limit`` is at most so many questions, the first; all paragraphs are indexed.
    """

    kind: ClassVar[str] = "ask"
    side: ClassVar[Side] = "generation"
    requires: ClassVar[type] = Generates
    data_folder: ClassVar[str] = FOLDER
    in_all: ClassVar[bool] = True

    method: str = field(
        default="auto", metadata={"help": "extractive, generate, or auto: as the model was trained to answer."}
    )
    chunks: int = field(default=8, metadata={"help": "Chunks that are read for an answer at most."})
    max_new_tokens: int = field(default=64, metadata={"help": "How much a written answer may have at most."})

    def __post_init__(self) -> None:
        if self.method not in ("auto", *METHODS):
            raise ConfigError(f"ask.method is auto, {' or '.join(METHODS)}, not {self.method!r}")
        if self.chunks < 1 or self.max_new_tokens < 1:
            raise ConfigError("ask.chunks and ask.max_new_tokens are 1 or more")

    def run(self, system: Generates, config: EvaluationConfig) -> Score:
        """Ask every question.

        Raises:
            DataError: the file is malformed.
        """
        read = read_questions(self.scored_file(config))
        asked = read.questions[: config.limit]
        index = open_index(None, system.lm)
        index.add_documents([Document(one.id, one.text, one.title) for one in read.paragraphs])
        method = None if self.method == "auto" else self.method
        answers = []
        with progress(len(asked), "asking", show=config.show_progress) as advance:
            for one in asked:
                settings = {"method": method, "max_new_tokens": self.max_new_tokens}
                answers.append(index.ask(one.text, self.chunks, **settings))  # type: ignore[arg-type]
                advance(1)
        return scored(asked, answers, read.paragraphs)


def scored(asked: Sequence[Question], answers: Sequence[Answer], paragraphs: Sequence[Paragraph]) -> Score:
    """Return the measures of answers.

    Args:
        asked: the questions.
        answers: the answer to each.
        paragraphs: what was indexed.
    """
    pairs = list(zip(asked, answers, strict=True))
    right = [(one, answer) for one, answer in pairs if one.answers]
    impossible = [answer for one, answer in pairs if not one.answers]
    cited = [
        (one.paragraph, [source.source for source in answer.sources if source.number in answer.cited])
        for one, answer in right
    ]
    metrics = {
        "f1": _mean([token_f1(answer.text, one.answers) if answer.found else 0.0 for one, answer in right]),
        "exact_match": _mean([exact_match(answer.text, one.answers) if answer.found else 0.0 for one, answer in right]),
        "contains": _mean([contains(answer.text, one.answers) if answer.found else 0.0 for one, answer in right]),
        "citation_precision": _mean([own.count(wanted) / len(own) for wanted, own in cited if own]),
        "citation_recall": _mean([float(wanted in own) for wanted, own in cited]),
        "unanswerable": _mean([float(not answer.found) for answer in impossible]),
    }
    notes = [f"{len(paragraphs)} paragraphs, answers: {_methods(answers)}"]
    if not impossible:
        notes.append("there are no questions without an answer, so unanswerable is 0")
    if not right:
        notes.append("there are no questions with an answer, so all but unanswerable are 0")
    if silent := sum(not own for _, own in cited):
        notes.append(f"questions whose answer cites nothing: {silent}")
    return Score("f1", metrics, size=len(asked), notes=tuple(notes))


def find(folder: Path) -> list[Ask]:
    """Return a task for every file ``ask/NAME.test.json``."""
    found = []
    for path in sorted((folder / FOLDER).glob("*.test.json")):
        name = path.name.removesuffix(".test.json")
        valid = path.with_name(f"{name}.valid.json")
        found.append(Ask(name=f"ask/{name}", files=(path, valid) if valid.is_file() else (path,)))
    return found


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else 0.0


def _methods(answers: Sequence[Answer]) -> str:
    counts = {method: sum(one.method == method for one in answers) for method in METHODS}
    return ", ".join(f"{count} {method}" for method, count in counts.items() if count)
