"""Questions about paragraphs in the layout of SQuAD (Rajpurkar et al. 2016, 2018), and its measures of an answer.

::

    {"data": [{"title": ..., "paragraphs": [{"context": ..., "qas": [
        {"id": ..., "question": ..., "answers": [{"text": ..., "answer_start": ...}], "is_impossible": false}]}]}]}

A question without answers, or with ``is_impossible``, is one that no paragraph answers.

Knows: these files, exact match, F1 of words. Does not know: how questions are answered.
"""

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gerund.checks import read_json
from gerund.data.files import checked_text
from gerund.errors import DataError

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True)
class Paragraph:
    """A paragraph that questions are about.

    Attributes:
        id: what tells it from others.
        title: of the article that it is from; empty where there is none.
        text: the paragraph.
    """

    id: str
    title: str
    text: str


@dataclass(frozen=True)
class Question:
    """A question about a paragraph.

    Attributes:
        text: the question.
        answers: those that are right; none where no paragraph answers it.
        paragraph: the id of the paragraph that it was asked about.
    """

    text: str
    answers: tuple[str, ...]
    paragraph: str


@dataclass(frozen=True)
class Questions:
    """Paragraphs, and questions about them."""

    paragraphs: list[Paragraph]
    questions: list[Question]


def read_questions(path: Path) -> Questions:
    """Read a file; paragraphs of the same text are one.

    Raises:
        DataError: it is missing or malformed; the message says where.
    """
    content = read_json(path)
    paragraphs: dict[str, Paragraph] = {}
    questions = []
    for number, article in enumerate(_listed(content, "data", str(path))):
        where = f"{path}, data[{number}]"
        title = checked_text(_mapping(article, where).get("title") or "", where, "title")
        for place, paragraph in enumerate(_listed(article, "paragraphs", where)):
            own = f"{where}.paragraphs[{place}]"
            text = _text(paragraph, "context", own)
            known = paragraphs.setdefault(text, Paragraph(f"{number}.{place}", title, text))
            for index, qa in enumerate(_listed(paragraph, "qas", own)):
                questions.append(_question(qa, known.id, f"{own}.qas[{index}]"))
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
    return float(any(normalised(answer) == normalised(one) for one in right))


def contains(answer: str, right: Sequence[str]) -> float:
    """Return 1 where an answer holds one of the right ones, as whole words.

    >>> contains("It was opened in 1825.", ["1825"]), contains("in 18255", ["1825"])
    (1.0, 0.0)
    """
    return float(any(f" {normalised(one)} " in f" {normalised(answer)} " for one in right))


def token_f1(answer: str, right: Sequence[str]) -> float:
    """Return the best F1 of an answer's words and those of a right one.

    >>> round(token_f1("opened in 1825", ["1825", "in May 1825"]), 3)
    0.667
    """
    return max((_f1(normalised(answer).split(), normalised(one).split()) for one in right), default=0.0)


def _f1(words: list[str], right: list[str]) -> float:
    if not words or not right:
        return float(words == right)
    shared = sum((Counter(words) & Counter(right)).values())
    return 2 * shared / (len(words) + len(right))


def _question(qa: Any, paragraph: str, where: str) -> Question:
    text = _text(qa, "question", where)
    given = _listed(qa, "answers", where) if "answers" in _mapping(qa, where) else []
    answers = tuple(dict.fromkeys(_text(one, "text", f"{where}.answers[{at}]") for at, one in enumerate(given)))
    return Question(text, () if qa.get("is_impossible") else answers, paragraph)


def _text(value: Any, name: str, where: str) -> str:
    found = checked_text(_mapping(value, where).get(name), where, name)
    if not found.strip():
        raise DataError(f"{where}: {name!r} is empty")
    return found


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise DataError(f"{where}: expected a JSON object, found {type(value).__name__}")
    return value


def _listed(value: Any, name: str, where: str) -> list[Any]:
    found = _mapping(value, where).get(name)
    if not isinstance(found, list):
        raise DataError(f"{where}: needs {name!r}, a list, as SQuAD has it")
    return found
