"""Sources of plain documents in a folder of data: which there are, and their texts, cleaned.

Knows: names of files, the two kinds of raw text that have quirks. Does not know: tokens, what is measured.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from gerund.data.corpus import FORMATS, Document, clean_text, read_documents

FOLDER = "lm"
AUTO = "auto"
# Which cleaning a corpus wants, by a part of its name.
_STYLES = {"wiki": "wikipedia", "book": "gutenberg"}
_NAME = re.compile(rf"(?P<name>.+)\.(?P<split>test|valid)(?:{'|'.join(map(re.escape, FORMATS))})")


def corpora_in(folder: Path) -> dict[str, dict[str, Path]]:
    """Return by name the files of every corpus ``lm/NAME.test.*`` and ``lm/NAME.valid.*``, by split."""
    found: dict[str, dict[str, Path]] = {}
    for path in sorted((folder / FOLDER).glob("*")):
        match = _NAME.fullmatch(path.name)
        if match is not None:
            found.setdefault(match["name"], {})["test" if match["split"] == "test" else "validation"] = path
    return found


def test_files(folder: Path) -> dict[str, tuple[Path, ...]]:
    """Return by name the files of every corpus that has a test file: that, then the validation file if there is one."""
    return {
        name: tuple(files[split] for split in ("test", "validation") if split in files)
        for name, files in corpora_in(folder).items()
        if "test" in files
    }


def style_of(path: Path) -> str:
    """Return the cleaning that a corpus wants; see ``gerund.data.corpus.clean_text``.

    >>> style_of(Path("books.test.jsonl.xz")), style_of(Path("news.test.jsonl"))
    ('gutenberg', 'none')
    """
    return next((style for part, style in _STYLES.items() if part in path.name), "none")


def read_texts(path: Path, clean: str = AUTO) -> Iterator[str]:
    """Yield the cleaned texts of a corpus that are not empty.

    Args:
        path: the file.
        clean: a style of ``gerund.data.corpus.clean_text``, or ``auto`` for ``style_of(path)``.

    Raises:
        DataError: the file is malformed; the message names file and line.
        ConfigError: there is no such style.
    """
    for document in read_titled(path, clean):
        yield document.text


def read_titled(path: Path, clean: str = AUTO) -> Iterator[Document]:
    """Yield the documents whose cleaned text is not empty, with their titles; see ``read_texts``."""
    style = style_of(path) if clean == AUTO else clean
    for document in read_documents([path]):
        text = clean_text(document.text, style)
        if text.strip():
            yield Document(text, document.title.strip())
