"""CoNLL-2003 files: a word a line with its part of speech, its phrase and its name, a blank line after a sentence.

Knows: columns, splits, tags. Does not know: what is measured on them.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gerund.data.files import decode, opened
from gerund.errors import DataError

Column = Literal["pos", "chunk", "ner"]

# The order of the columns after the word.
COLUMNS: tuple[Column, ...] = ("pos", "chunk", "ner")

# As the shared task named them, and as most copies do.
_SPLITS = {
    "train": ("eng.train", "train.txt"),
    "validation": ("eng.testa", "valid.txt"),
    "test": ("eng.testb", "test.txt"),
}
_DOCUMENT = "-DOCSTART-"
# Not all white space, as str.split() does: a word may hold a no-break space.
_BETWEEN = re.compile(r"[ \t]+")
_CHUNK_TAG = re.compile(r"O|[BI]-\S+")


@dataclass(frozen=True)
class TaggedSentences:
    """Sentences that are split into words, with three tags a word.

    Attributes:
        words: the words of each sentence.
        tags: for each of ``COLUMNS`` the tags of each sentence.
    """

    words: list[list[str]]
    tags: Mapping[Column, list[list[str]]]

    def first(self, limit: int | None) -> "TaggedSentences":
        """Return the first ``limit`` sentences; all for None."""
        return TaggedSentences(self.words[:limit], {name: tags[:limit] for name, tags in self.tags.items()})


def conll_splits(folder: Path) -> dict[str, Path]:
    """Return which of ``train``, ``validation`` and ``test`` a folder has, and their files."""
    found = {}
    for split, names in _SPLITS.items():
        path = next((folder / name for name in names if (folder / name).is_file()), None)
        if path is not None:
            found[split] = path
    return found


def read_conll(path: Path) -> TaggedSentences:
    """Return the sentences of a file, without the lines that begin a document.

    Args:
        path: rows of word, part of speech, phrase and name, with white space between; the last two are tagged
            ``O``, ``B-TYPE`` or ``I-TYPE`` (IOB1 or IOB2). Blank lines and ``-DOCSTART-`` end a sentence.

    Raises:
        DataError: the file is missing, holds no sentence, or has a malformed row.
    """
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    sentences: list[list[list[str]]] = [[]]
    with opened(path) as file:
        for number, raw in enumerate(file, start=1):
            fields = _fields(raw, f"{path}, line {number}")
            if fields:
                sentences[-1].append(fields)
            elif sentences[-1]:
                sentences.append([])
    if not sentences[-1]:
        sentences.pop()
    if not sentences:
        raise DataError(f"{path}: there is no sentence in this file")
    words, *tags = ([[row[place] for row in rows] for rows in sentences] for place in range(1 + len(COLUMNS)))
    return TaggedSentences(words, dict(zip(COLUMNS, tags, strict=True)))


def _fields(raw: bytes, where: str) -> list[str]:
    """Return the columns of a word's line; none for a line between sentences."""
    line = decode(raw, where).removeprefix("\ufeff").strip(" \t\r\n")
    if not line or line.startswith(_DOCUMENT):
        return []
    fields = _BETWEEN.split(line)
    if len(fields) != 1 + len(COLUMNS):
        raise DataError(f"{where}: expected a word and {len(COLUMNS)} tags ({', '.join(COLUMNS)}), found {len(fields)}")
    if not fields[0].strip():
        raise DataError(f"{where}: the word is white space")
    for name, tag in zip(COLUMNS[1:], fields[2:], strict=True):
        if not _CHUNK_TAG.fullmatch(tag):
            raise DataError(f"{where}: the {name} tag {tag!r} is none of O, B-TYPE and I-TYPE")
    return fields
