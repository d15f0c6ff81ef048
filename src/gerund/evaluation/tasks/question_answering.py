"""Question answering (SQuAD): are the answers right, and do they cite the paragraph they rest on?"""

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from gerund.checks import read_json
from gerund.data.files import checked_text, filled_text
from gerund.errors import ConfigError, DataError
from gerund.evaluation.data_files import split_files
from gerund.evaluation.systems.base import Generates
from gerund.evaluation.task import EvaluationConfig, FileTask, Score, Side
from gerund.progress import progress
from gerund.retrieval.documents import Document
from gerund.retrieval.index import open_index
from gerund.retrieval.question_answering import EXTRACTIVE, METHODS
from gerund.types import Answer

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True)
class Paragraph:
    """A paragraph that questions are about."""

    id: str  # what tells it from others
    title: str  # of the article that it is from; empty where there is none
    text: str


@dataclass(frozen=True)
class Question:
    """A question about a paragraph."""

    text: str
    answers: tuple[str, ...]  # those that are right; none where no paragraph answers it
    paragraph: str  # the id of the paragraph that it was asked about


@dataclass(frozen=True)
class Questions:
    """Paragraphs, and questions about them."""

    paragraphs: list[Paragraph]
    questions: list[Question]


def read_questions(path: Path) -> Questions:
    """Read a file; paragraphs of the same text are one."""
    content = read_json(path)
    paragraphs: dict[str, Paragraph] = {}
    questions = []
    for number, article in enumerate(_listed(content, "data", str(path))):
        where = f"{path}, data[{number}]"
        title = checked_text(_mapping(article, where).get("title") or "", where, "title")
        for place, paragraph in enumerate(_listed(article, "paragraphs", where)):
            at = f"{where}.paragraphs[{place}]"
            text = _text(paragraph, "context", at)
            known = paragraphs.setdefault(text, Paragraph(f"{number}.{place}", title, text))
            for index, qa in enumerate(_listed(paragraph, "qas", at)):
                questions.append(_question(qa, known.id, f"{at}.qas[{index}]"))
    if not questions:
        raise DataError(f"{path}: there is no question in it")
    return Questions(list(paragraphs.values()), questions)


def normalised(text: str) -> str:
    """Return an answer as SQuAD compares it: lower case, without punctuation, articles and spare white space.

    >>> normalised("The  Battle of Hastings!")
    'battle of hastings'
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str, right: Sequence[str]) -> float:
    """Return 1 where an answer is one of the right ones."""
    return float(any(normalised(answer) == normalised(option) for option in right))


def contains(answer: str, right: Sequence[str]) -> float:
    """Return 1 where an answer holds one of the right ones, as whole words.

    >>> contains("It was opened in 1825.", ["1825"]), contains("in 18255", ["1825"])
    (1.0, 0.0)
    """
    return float(any(f" {normalised(option)} " in f" {normalised(answer)} " for option in right))


def token_f1(answer: str, right: Sequence[str]) -> float:
    """Return the best F1 of an answer's words and those of a right one.

    >>> round(token_f1("opened in 1825", ["1825", "in May 1825"]), 3)
    0.667
    """
    return max((_f1(normalised(answer).split(), normalised(option).split()) for option in right), default=0.0)


def _f1(words: list[str], right: list[str]) -> float:
    if not words or not right:
        return float(words == right)
    shared = sum((Counter(words) & Counter(right)).values())
    return 2 * shared / (len(words) + len(right))


def _question(qa: Any, paragraph: str, where: str) -> Question:
    text = _text(qa, "question", where)
    given = _listed(qa, "answers", where) if "answers" in _mapping(qa, where) else []
    answers = tuple(dict.fromkeys(_text(answer, "text", f"{where}.answers[{at}]") for at, answer in enumerate(given)))
    return Question(text, () if qa.get("is_impossible") else answers, paragraph)


def _text(value: Any, name: str, where: str) -> str:
    return filled_text(_mapping(value, where).get(name), where, name)


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise DataError(f"{where}: expected a JSON object, found {type(value).__name__}")
    return value


def _listed(value: Any, name: str, where: str) -> list[Any]:
    values = _mapping(value, where).get(name)
    if not isinstance(values, list):
        raise DataError(f"{where}: needs {name!r}, a list, as SQuAD has it")
    return values


@dataclass(frozen=True, kw_only=True)
class Ask(FileTask):
    """F1 of the words of answers that ``gerund ask`` gives out of an index of all paragraphs.

    The files are ``ask/NAME.test.json``, with ``.valid.json`` for validation, in SQuAD's layout. Other metrics are
    SQuAD's exact match; how often the answer holds a right one (``contains``); how many of the sources that are cited
    are the paragraph that the question was asked about (``citation_precision``, over the questions whose answer cites
    any), and how many questions have it cited (``citation_recall``); and how often the questions that no paragraph
    answers get none (``unanswerable``). All but the last are means over the questions that have answers; one that is
    not answered counts as 0.

    ``config.limit`` takes the first questions; all paragraphs are indexed.
    """

    kind: ClassVar[str] = "ask"
    side: ClassVar[Side] = "generation"
    reads_fusion: ClassVar[bool] = True
    requires: ClassVar[type] = Generates
    data_folder: ClassVar[str] = "ask"
    layout = split_files

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
        """Ask every question."""
        read = read_questions(self.scored_file(config))
        questions = read.questions[: config.limit]
        index = open_index(None, system.lm)
        index.add_documents([Document(part.id, part.text, part.title) for part in read.paragraphs])
        settings = {} if self.method == EXTRACTIVE else {"max_new_tokens": self.max_new_tokens}
        method = None if self.method == "auto" else self.method
        answers = []
        with progress(len(questions), "asking", show=config.show_progress) as advance:
            for question in questions:
                answers.append(index.ask(question.text, self.chunks, method=method, **settings))  # type: ignore[arg-type]
                advance(1)
        return scored(questions, answers, read.paragraphs)


def scored(questions: Sequence[Question], answers: Sequence[Answer], paragraphs: Sequence[Paragraph]) -> Score:
    """Return the measures of answers."""
    pairs = list(zip(questions, answers, strict=True))
    right = [(question, answer) for question, answer in pairs if question.answers]
    impossible = [answer for question, answer in pairs if not question.answers]
    cited = [
        (question.paragraph, [source.source for source in answer.sources if source.number in answer.cited])
        for question, answer in right
    ]
    metrics = {
        name: _mean([measure(answer.text, question.answers) if answer.found else 0.0 for question, answer in right])
        for name, measure in (("f1", token_f1), ("exact_match", exact_match), ("contains", contains))
    } | {
        "citation_precision": _mean([sources.count(wanted) / len(sources) for wanted, sources in cited if sources]),
        "citation_recall": _mean([float(wanted in sources) for wanted, sources in cited]),
        "unanswerable": _mean([float(not answer.found) for answer in impossible]),
    }
    counts = {method: sum(answer.method == method for answer in answers) for method in METHODS}
    methods = ", ".join(f"{count} {method}" for method, count in counts.items() if count)
    notes = [f"{len(paragraphs)} paragraphs, answers: {methods}"]
    if not impossible:
        notes.append("there are no questions without an answer, so unanswerable is 0")
    if not right:
        notes.append("there are no questions with an answer, so all but unanswerable are 0")
    if silent := sum(not sources for _, sources in cited):
        notes.append(f"questions whose answer cites nothing: {silent}")
    return Score("f1", metrics, size=len(questions), notes=tuple(notes))


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else 0.0
