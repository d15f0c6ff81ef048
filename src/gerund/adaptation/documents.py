"""The documents that a model is adapted to: read from files of any kind that an index reads, each text once.

Knows: files, titles, what is left out. Does not know: queries, pairs, models.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gerund.errors import ConfigError, DataError, MissingDependencyError
from gerund.progress import progress
from gerund.retrieval.document_reader import DocumentReader, ReadLimits, endings
from gerund.retrieval.documents import Document
from gerund.retrieval.indexing import Failure
from gerund.retrieval.reading import find_files


@dataclass(frozen=True)
class Collected:
    """What was found in files.

    Attributes:
        documents: each text once, in the order of the files.
        files: how many files were read.
        failed: those that could not be, or not to their end.
        repeated: documents left out since another has the same text.
    """

    documents: tuple[Document, ...]
    files: int
    failed: tuple[Failure, ...]
    repeated: int

    @property
    def digest(self) -> str:
        """Hash of all documents, which says whether a later run has the same ones."""
        whole = hashlib.blake2b(digest_size=16)
        for one in self.documents:
            whole.update(f"{one.source}\0{one.digest}\0".encode())
        return whole.hexdigest()

    @property
    def summary(self) -> str:
        """Say what was read and what was left out.

        >>> Collected((Document("a", "A."),), 2, (Failure("b.txt", "b.txt: there is no text in it"),), 0).summary
        '1 document in 2 files; left out: 1 file that could not be read to its end'
        """
        count = len(self.documents)
        told = f"{count:,} document{'' if count == 1 else 's'} in {self.files:,} file{'' if self.files == 1 else 's'}"
        left = []
        if self.failed:
            many = len(self.failed) > 1
            left.append(f"{len(self.failed)} file{'s' if many else ''} that could not be read to {_its(many)} end")
        if self.repeated:
            left.append(f"{self.repeated:,} with the same text as another")
        return f"{told}; left out: {', '.join(left)}" if left else told


def _its(many: bool) -> str:
    return "their" if many else "its"


def files_of(paths: Sequence[Path], output: Path | None = None) -> list[Path]:
    """Return the files of documents that there are.

    Args:
        paths: files and folders.
        output: a folder that must not lie in any of them, since it would be read the next time.

    Raises:
        DataError: a path is not there, or none of the files can be read.
        ConfigError: there is no path, or the output lies in one of them.
    """
    if not paths:
        raise ConfigError("name the files or folders of documents to adapt to (--texts)")
    for path in paths:
        if output is not None and path.is_dir() and output.resolve().is_relative_to(path.resolve()):
            raise ConfigError(f"the output {output} lies in the texts' folder {path}; choose another one")
    files = find_files(paths)
    if not files:
        raise DataError(
            f"{', '.join(map(str, paths))}: no file in there can be read; the endings of those that can are "
            f"{', '.join(f'.{name}' for name in endings())}"
        )
    return files


def read_documents(
    paths: Sequence[Path],
    output: Path | None = None,
    *,
    show: bool | None = None,
    limits: ReadLimits | None = None,
) -> Collected:
    """Read files and folders of documents.

    Args:
        paths: the files and folders.
        output: a folder that must not lie in any of them, since it would be read the next time.
        show: whether to show progress; None only on a terminal.
        limits: what reading a document may take; None for the usual limits.

    Raises:
        DataError: a path is not there, or no file can be read.
        ConfigError: there is no path, or the output lies in one of them.
    """
    files = files_of(paths, output)
    documents: dict[str, Document] = {}
    failed, repeated = list[Failure](), 0
    with progress(len(files), "reading", show=show) as advance, DocumentReader(limits) as reader:
        for path in files:
            name = name_of(path)
            try:
                for parsed in reader.read(path):
                    source = f"{name}#{parsed.key}" if parsed.key else name
                    # A title that only the file's name would give is none: nobody asks by it.
                    own = Document(source, parsed.text, parsed.title.strip(), parsed.sections, name)
                    key = hashlib.blake2b(" ".join(own.text.split()).encode(errors="replace")).hexdigest()
                    repeated += key in documents
                    documents.setdefault(key, own)
            except (DataError, MissingDependencyError) as error:
                failed.append(Failure(str(path), str(error)))
            advance(1)
    if not documents:
        more = f" (and {len(failed) - 1} more files)" if len(failed) > 1 else ""
        raise DataError(f"no file could be read: {failed[0].reason}{more}")
    return Collected(tuple(documents.values()), len(files), tuple(failed), repeated)


def name_of(path: Path) -> str:
    """Return what a file is called: by its way from the current folder where it lies below it."""
    whole, here = path.resolve(), Path.cwd().resolve()
    return (whole.relative_to(here) if whole.is_relative_to(here) else whole).as_posix()
