"""Beginnings with several continuations of which one is right, in the two layouts of published sets.

::

    {"prefix": ..., "suffixes": [...], "gold": 0}                   HellaSwag
    {"sentences": [...], "endings": [...], "gold": 0}               Story Cloze

Knows: these rows. Does not know: how a continuation is chosen.
"""

from dataclasses import dataclass
from pathlib import Path

from gerund.data.files import checked_text
from gerund.errors import DataError
from gerund.evaluation.sets.labelled import named_files
from gerund.evaluation.sets.rows import Row, read_json_lines

FOLDER = "suffix"


@dataclass(frozen=True)
class Choice:
    """A beginning and continuations of it.

    Attributes:
        sentences: the beginning: one text, or the sentences of a story.
        candidates: the continuations.
        gold: which of them is right.
    """

    sentences: tuple[str, ...]
    candidates: tuple[str, ...]
    gold: int

    @property
    def prefix(self) -> str:
        """The beginning as one text."""
        return " ".join(self.sentences)

    @property
    def story(self) -> tuple[str, ...]:
        """The sentences, with the right ending behind them."""
        return (*self.sentences, self.candidates[self.gold])


def choice_files(folder: Path) -> dict[str, Path]:
    """Return the files of a data folder's ``suffix`` by name."""
    return named_files(folder / FOLDER)


def tells_stories(path: Path) -> bool:
    """Whether a file has stories sentence by sentence; looks at its first row alone.

    A file that cannot be read has none: what is wrong with it is said when it is scored.
    """
    try:
        [first] = read_json_lines(path, most=1)
    except DataError:
        return False
    return "sentences" in first.values


def read_choices(path: Path) -> list[Choice]:
    """Return the rows of a file.

    Raises:
        DataError: the file is missing, empty or has a malformed row; the message names file and line.
    """
    return [_choice(row) for row in read_json_lines(path)]


def _choice(row: Row) -> Choice:
    if "sentences" in row.values:
        sentences, candidates = _texts(row, "sentences"), _texts(row, "endings")
    else:
        sentences, candidates = (row.text("prefix"),), _texts(row, "suffixes")
    gold = row.number("gold")
    if gold != int(gold) or not 0 <= gold < len(candidates):
        raise DataError(f"{row.where}: 'gold' is {gold:g}, and there are {len(candidates)} candidates, counted from 0")
    if len(candidates) < 2:
        raise DataError(f"{row.where}: a single candidate leaves nothing to choose")
    return Choice(sentences, candidates, int(gold))


def _texts(row: Row, name: str) -> tuple[str, ...]:
    values = row.values.get(name)
    if not isinstance(values, list) or not values:
        raise DataError(f"{row.where}: {name!r} is not a list of texts")
    texts = tuple(checked_text(value, row.where, name) for value in values)
    if not all(text.strip() for text in texts):
        raise DataError(f"{row.where}: {name!r} holds an empty text")
    return texts
