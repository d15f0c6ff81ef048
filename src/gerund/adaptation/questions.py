"""Files of questions, each with the documents that answer it.

Knows: JSON lines, how documents are called. Does not know: what is done with a question.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from gerund.data.files import checked_text, decode, json_row, opened
from gerund.errors import DataError


def read_questions(path: Path, sources: Sequence[str], roots: Sequence[str] = ()) -> dict[str, tuple[str, ...]]:
    """Read a .jsonl file with ``question`` and ``source``, a name or a list of names.

    A name is a document's own, as ``gerund index`` calls it; a file may also be called by its way from one of the
    folders of texts, or by its name alone where no other has it; a row is ``FILE#ID``.

    Args:
        path: the file.
        sources: the names of all documents.
        roots: the folders of texts, as the names of documents begin with them.

    Returns:
        The names of the documents that answer it, for each question.

    Raises:
        DataError: the file is missing or malformed, or no document is called so, or several are; with the line.
    """
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    names = _names(sources, roots)
    found: dict[str, dict[str, None]] = {}
    with opened(path) as file:
        for number, raw in enumerate(file, start=1):
            where = f"{path}, line {number}"
            line = decode(raw, where).removeprefix("\ufeff")
            if not line.strip():
                continue
            row = _row(line, where)
            question = checked_text(row["question"], where, "question").strip()
            if not question:
                raise DataError(f"{where}: 'question' is empty")
            given = row["source"] if isinstance(row["source"], list) else [row["source"]]
            if not given:
                raise DataError(f"{where}: 'source' is empty")
            for one in given:
                found.setdefault(question, {})[_document(checked_text(one, where, "source"), names, sources, where)] = (
                    None
                )
    if not found:
        raise DataError(f"{path}: there is no question in it")
    return {question: tuple(own) for question, own in found.items()}


def _row(line: str, where: str) -> dict[str, Any]:
    row = json_row(line, where)
    for name in ("question", "source"):
        if name not in row:
            raise DataError(f"{where}: no field {name!r}; present are: {', '.join(map(str, row)) or 'none'}")
    return row


def _names(sources: Sequence[str], roots: Sequence[str]) -> Mapping[str, set[str]]:
    """Return which documents each name may mean."""
    found: dict[str, set[str]] = {}
    for source in sources:
        file, sign, key = source.partition("#")
        below = [PurePosixPath(file).relative_to(root) for root in roots if PurePosixPath(file).is_relative_to(root)]
        for name in {file, PurePosixPath(file).name, *map(str, below)}:
            found.setdefault(f"{name}{sign}{key}", set()).add(source)
    return found


def _document(name: str, names: Mapping[str, set[str]], sources: Sequence[str], where: str) -> str:
    meant = names.get(name) or names.get(str(PurePosixPath(name)), set())
    if name in meant or len(meant) == 1:
        return name if name in meant else next(iter(meant))
    if meant:
        raise DataError(f"{where}: the source {name!r} may be any of {', '.join(sorted(meant)[:3])}; name it whole")
    raise DataError(f"{where}: no document is called {name!r}; the first one is called {sources[0]!r}")
