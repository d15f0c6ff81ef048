"""Files into documents: which files there are, and what is in each of them.

A file of text is one document; of a table (JSON lines, CSV, Parquet) each row is one.

Knows: folders, endings, hashes. Does not know: formats, chunks, models.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from gerund.data.files import COMPRESSED
from gerund.errors import DataError
from gerund.retrieval.document_reader import DocumentReader, ReadLimits, ending_of, endings
from gerund.retrieval.parsed_text import ParsedText
from gerund.retrieval.store import POINTER_FOLDER

_PIECE = 2**20


def find_files(paths: Sequence[Path]) -> list[Path]:
    """Return these files, and for a folder all files in it and below it that can be read here, sorted.

    Hidden files and folders are passed over, and links to folders are not followed. A file that is named is returned
    whatever its ending.

    Raises:
        DataError: a path is not there, or is neither a file nor a folder.
    """
    found: dict[Path, None] = {}
    for path in paths:
        if not path.exists():
            raise DataError(f"{path}: no such file or folder")
        if path.is_dir():
            found |= dict.fromkeys(sorted(_files_below(path)))
        elif path.is_file():
            found[path] = None
        else:
            raise DataError(f"{path}: neither a file nor a folder")
    return list(found)


def unknown_files(paths: Sequence[Path]) -> dict[str, int]:
    """Return how many files in these folders are of no kind that can be read here, by their ending."""
    counts = Counter(
        path.suffix.lower() or "no ending"
        for folder in paths
        if folder.is_dir()
        for path in _visible_below(folder)
        if ending_of(path) not in endings()
    )
    return dict(sorted(counts.items(), key=lambda own: (-own[1], own[0])))


def _files_below(folder: Path) -> Iterator[Path]:
    return (path for path in _visible_below(folder) if ending_of(path) in endings())


def _visible_below(folder: Path) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename}: cannot be read ({error.strerror})") from error

    for place, folders, names in os.walk(folder, onerror=refuse):
        if POINTER_FOLDER in folders:  # an index's own files are nobody's documents
            folders.clear()
            continue
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            path = Path(place, name)
            if not name.startswith(".") and path.is_file():
                yield path


def stem_of(path: Path) -> str:
    """Return a file's name without its ending and without that of an archive.

    >>> stem_of(Path("a/v1.2 release notes.MD.gz")), stem_of(Path("LICENSE"))
    ('v1.2 release notes', 'LICENSE')
    """
    inner = path.with_suffix("") if path.suffix.lower() in COMPRESSED else path
    return inner.stem


def digest_of(path: Path) -> str:
    """Return a hash of a file's bytes: 32 hexadecimal digits.

    Raises:
        DataError: it cannot be read.
    """
    whole = hashlib.blake2b(digest_size=16)
    try:
        with path.open("rb") as file:
            while piece := file.read(_PIECE):
                whole.update(piece)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
    return whole.hexdigest()


def read_file(
    path: Path, bad: Callable[[DataError], None] | None = None, *, limits: ReadLimits | None = None
) -> Iterator[ParsedText]:
    """Yield the documents of one file, as ``DocumentReader.read`` does; for many files, use one ``DocumentReader``."""
    with DocumentReader(limits) as reader:
        yield from reader.read(path, bad)
