"""Files and documents into a store: what is unchanged is passed over, what has changed is replaced, nothing is halved.

A document is stored with all of its chunks in one step. A file counts as done when all of its documents are stored; who
is killed before that finds them unchanged by their hashes the next time, and goes on behind them. So the same command,
however often it is killed and repeated, leaves the same rows.

Knows: files, hashes, the order of steps. Does not know: what embeds, what stores.
"""

import posixpath
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gerund.data.files import shown_path
from gerund.errors import ConfigError, DataError, GerundError, MissingDependencyError
from gerund.models.sources import found_from_anywhere
from gerund.progress import progress
from gerund.retrieval.document_reader import (
    DocumentReader,
    NoTextError,
    ReadLimits,
    digest_of,
    endings,
    find_files,
    stem_of,
)
from gerund.retrieval.documents import Chunk, Chunking, Document, rebuilt
from gerund.retrieval.formats import ParsedText
from gerund.retrieval.store import DocumentState, IndexMetadata, VectorStore

if TYPE_CHECKING:
    from gerund.language_model import LanguageModel

# What is embedded and stored at once: what an interruption costs at most.
CHUNKS_AT_ONCE = 1024
DOCUMENTS_AT_ONCE = 256
_REASONS = 100

Cut = Callable[[Document], list[Chunk]]
Embed = Callable[[Sequence[Sequence[Chunk]]], np.ndarray]


@dataclass(frozen=True)
class Failure:
    """A file that could not be indexed, or not all of it.

    Attributes:
        file: the file.
        reason: why, in a sentence; of several rows that could not be read, the first one's.
        rows: how many of its rows could not be read; 0 where it is the file itself.
        more: why the other rows could not, a hundred of them at most.
    """

    file: str
    reason: str
    rows: int = 0
    more: tuple[str, ...] = ()


@dataclass
class IndexSummary:
    """How indexing went.

    Attributes:
        files: files that were looked at.
        unchanged: those of them that were passed over, since nothing in them has changed.
        documents: documents that were stored, anew or for the first time.
        chunks: their chunks.
        removed: documents that were removed.
        failed: files that could not be read, or not all of them.
        completed: whether an earlier run was ended before its last step, the indices of words and vectors, and this one
            did it.
        seconds: how long it took, without loading the model.
    """

    files: int = 0
    unchanged: int = 0
    documents: int = 0
    chunks: int = 0
    removed: int = 0
    failed: list[Failure] = field(default_factory=list)
    completed: bool = False
    seconds: float = 0.0


class Writer:
    """Puts documents into a store, many at a time.

    Args:
        store: where they go.
        cut: cuts a document.
        embed: embeds the chunks of documents.
        root: what the names of files are relative to; None leaves them whole.
        workers: how many embed at a time: so many times as much is embedded and stored at once.
        make: makes the index, which is done when there is something to store; None where it is there.
        limits: what reading a document may take; None for the usual limits.
    """

    def __init__(
        self,
        store: VectorStore,
        cut: Cut,
        embed: Embed,
        root: Path | None,
        workers: int = 1,
        *,
        make: Callable[[], None] | None = None,
        limits: ReadLimits | None = None,
    ) -> None:
        self.store, self.summary = store, IndexSummary()
        self._workers, self._make, self._limits = workers, make, limits
        self._cut, self._embed, self._root = cut, embed, root
        self._known: dict[str, DocumentState] = store.documents()
        self._by_file: dict[str, set[str]] = {}
        for source, state in self._known.items():
            self._by_file.setdefault(state.file, set()).add(source)
        self._waiting: dict[str, tuple[Document, list[Chunk]]] = {}
        self._finished: dict[str, str | None] = {}
        self._gone: dict[str, None] = {}

    def add_files(self, paths: Sequence[Path], *, prune: bool = False, show_progress: bool | None = None) -> None:
        """Index files and folders.

        Args:
            paths: files, and folders of files.
            prune: remove the documents of files that are in the index, belong to these paths and are no longer there.
            show_progress: None shows a bar on a terminal.

        Raises:
            DataError: a path is not there, or there is no file at all that can be read.
        """
        known = self.store.files()
        places = self._places(known) if prune else {}
        there = [path for path in paths if path.exists() or not _below([path], places)]
        files = find_files(there)
        if not files and not prune:
            raise DataError(
                f"{', '.join(map(str, paths))}: no file in there can be read; the endings of those that can are "
                f"{', '.join(f'.{name}' for name in endings())}"
            )
        with (
            progress(len(files), "indexing", show=show_progress) as advance,
            DocumentReader(self._limits) as reader,
            self._flushing(),
        ):
            for path in files:
                self._add_file(path, known, reader)
                advance(1)
            for file in sorted(_below(paths, places) - {self.name_of(path) for path in files}):
                self._forget(file, known)

    def add_documents(self, documents: Iterable[Document]) -> None:
        """Index documents that come from no file; one that has no text is removed."""
        with self._flushing():
            for one in documents:
                self._add(one)

    def remove(self, sources: Iterable[str]) -> None:
        """Remove documents.

        Raises:
            DataError: the index has no such document.
        """
        wanted = list(dict.fromkeys(sources))
        for source in wanted:
            if source not in self._known:
                raise DataError(f"{self.store.name} has no document {source!r}")
        with self._flushing():
            self._remove(wanted)

    def name_of(self, path: Path) -> str:
        """Return what a file is called in the index: by its way from the index's own folder where it lies below it.

        So the name does not depend on where a command is run, and holds when both are moved together.
        """
        whole = path.resolve()
        if self._root is not None and whole.is_relative_to(self._root):
            whole = whole.relative_to(self._root)
        return shown_path(whole.as_posix())

    def _add_file(self, path: Path, known: dict[str, str], reader: DocumentReader) -> None:
        file = self.name_of(path)
        self.summary.files += 1
        bad: list[str] = []
        found: set[str] = set()
        try:
            digest = digest_of(path)
            if known.get(file) == digest:
                self.summary.unchanged += 1
                return
            for parsed in reader.read(path, lambda error: bad.append(str(error))):
                source = f"{file}#{parsed.key}" if parsed.key else file
                if source in found:
                    bad.append(f"{path}: the id {parsed.key!r} is there twice")
                    continue
                found.add(source)
                self._add(_document(parsed, source, file, path))
        except (DataError, MissingDependencyError) as error:
            self.summary.failed.append(Failure(shown_path(path), str(error)))
            if isinstance(error, NoTextError):
                self._forget(file, known)
            return
        if bad:
            # The documents of these rows, if there are any in the index, stay as they are, and the file is not done.
            self.summary.failed.append(Failure(shown_path(path), bad[0], len(bad), tuple(bad[1 : _REASONS + 1])))
            if file in known:  # else it would be passed over were it put back as it was, without the rows of before
                self._finished[file] = None
            return
        self._remove(self._by_file.get(file, set()) - found)
        self._finished[file] = digest

    def _add(self, document: Document) -> None:
        """Take a document in, unless it is there as it is; one that comes twice counts as it came last."""
        self._waiting.pop(document.source, None)
        self._gone.pop(document.source, None)
        state = self._known.get(document.source)
        if state is not None and state.digest == document.digest and state.file == document.file:
            return
        chunks = self._cut(document)
        if not chunks:
            self._remove([document.source] if state is not None else [])
            return
        self._waiting[document.source] = (document, chunks)
        waiting = sum(len(own) for _, own in self._waiting.values())
        if waiting >= CHUNKS_AT_ONCE * self._workers or len(self._waiting) >= DOCUMENTS_AT_ONCE * self._workers:
            self._flush()

    def tidied(self) -> IndexSummary:
        """Let the store be tidied where this run, or an earlier one that was ended too early, has changed something.

        Returns:
            What was done.
        """
        begin = time.perf_counter()
        has_changed = bool(self.summary.documents or self.summary.removed)
        if not has_changed:
            self.summary.completed = self.store.finish()
        if has_changed or not self.store.is_tidy():
            self.store.tidy()
        self.summary.seconds += time.perf_counter() - begin
        return self.summary

    def _remove(self, sources: Iterable[str]) -> None:
        self._gone |= dict.fromkeys(sorted(sources))

    def _forget(self, file: str, known: dict[str, str]) -> None:
        """Remove a file's documents, and its hash, by which it would be passed over were its text put back."""
        self._remove(self._by_file.get(file, set()))
        if file in known:
            self._finished[file] = None

    def _places(self, known: dict[str, str]) -> dict[str, str]:
        """Return where each file of the index is: its name may be relative to the index's folder, or be whole."""
        own = "" if self._root is None else shown_path(self._root.as_posix())
        return {file: _whole(file, own) for file in {*known, *self._by_file} if file}

    @contextmanager
    def _flushing(self) -> Iterator[None]:
        """Store what waits at the end of the block; who interrupts it is told what is kept."""
        begin = time.perf_counter()
        try:
            yield
            self._flush()
        except KeyboardInterrupt as stop:
            if self.summary.documents:
                stop.add_note(
                    f"{self.summary.documents} documents of this run are kept in {self.store.name}: run the same "
                    "command again to go on from there"
                )
            raise
        finally:
            self.summary.seconds += time.perf_counter() - begin

    def _flush(self) -> None:
        """Embed and store what waits, then note the files that are done with it."""
        if self._waiting:
            documents = [chunks for _, chunks in self._waiting.values()]
            vectors_ND = self._embed(documents)
            if self._make is not None:
                self._make()
                self._make = None
            self.store.replace(list(self._waiting), [one for own in documents for one in own], vectors_ND)
            for source, (document, chunks) in self._waiting.items():
                self._known[source] = DocumentState(document.digest, document.file)
                self._by_file.setdefault(document.file, set()).add(source)
                self.summary.documents += 1
                self.summary.chunks += len(chunks)
            self._waiting.clear()
        if self._gone:
            none = np.zeros((0, 0), dtype=np.float32)
            gone = list(self._gone)
            for first in range(0, len(gone), DOCUMENTS_AT_ONCE):
                self.store.replace(gone[first : first + DOCUMENTS_AT_ONCE], [], none)
            for source in gone:
                state = self._known.pop(source, None)
                self._by_file.get(state.file if state else "", set()).discard(source)
            self.summary.removed += len(gone)
            self._gone.clear()
        if self._finished:
            if self._make is None:
                self.store.note_files(self._finished)
            self._finished.clear()


def _document(parsed: ParsedText, source: str, file: str, path: Path) -> Document:
    """Return a document; a file that says no title is called by its name."""
    title = parsed.title or ("" if parsed.key else shown_path(stem_of(path)))
    return Document(source, parsed.text, title, parsed.sections, file)


def _whole(file: str, folder: str) -> str:
    """Return the path of a file in an index; what has a scheme, such as ``s3://``, lies in no folder."""
    return file if Path(file).is_absolute() or "://" in file else posixpath.join(folder, file)


def _below(paths: Sequence[Path], places: Mapping[str, str]) -> set[str]:
    """Return the files that are these or lie in these folders."""
    roots = tuple(posixpath.join(shown_path(path.resolve().as_posix()), "") for path in paths)
    return {file for file, place in places.items() if f"{place}/".startswith(roots)}


def all_failed(summary: IndexSummary) -> GerundError | None:
    """Return the error for a run in which no file at all could be read; None where there was one."""
    if not summary.failed or len(summary.failed) < summary.files or any(one.rows for one in summary.failed):
        return None
    more = f" (and {len(summary.failed) - 1} more files)" if len(summary.failed) > 1 else ""
    return DataError(f"no file could be read: {summary.failed[0].reason}{more}")


def migrate_index(
    store: VectorStore,
    lm: "LanguageModel",
    chunking: Chunking | None = None,
    show_progress: bool | None = None,
    *,
    embed: Embed | None = None,
) -> int:
    """Embed every document of a store anew; see ``Index.migrate``. ``embed`` does it in the place of this process."""
    from gerund.retrieval.chunking import cut
    from gerund.retrieval.embedding import Embedder

    old = store.about()
    if old is None:
        raise DataError(f"{store.name}: there is no index yet, so nothing to migrate")
    about = about_of(lm, chunking or old.chunking)
    if about.key == old.key:
        with store.locked():
            store.drop_others()
        return 0
    embedder = Embedder(lm, about.chunking)

    def cut_anew(document: Document) -> list[Chunk]:
        return cut(document, lm.tokenizer, about.chunking)

    with store.locked():
        other = store.create_successor(about)
        count = refill(store, other, cut_anew, embed or embedder.chunks, show_progress)
        other.tidy()
        store.swap(other)
    return count


def about_of(lm: "LanguageModel", chunking: Chunking) -> IndexMetadata:
    """Return what an index says about itself that is made with a model."""
    try:
        spec = found_from_anywhere(lm.spec).model_dump(exclude_none=True)
    except ConfigError:  # made in memory
        spec = None
    fingerprint, space = lm.fingerprint(), lm.space
    own = "" if space == fingerprint else space
    return IndexMetadata(fingerprint, lm.name, lm.dimensions, describe_encoder(lm), chunking, spec, own)


def difference(about: IndexMetadata, lm: "LanguageModel") -> str:
    """Return what a model is that did not make an index: the settings that differ, or else another model's name."""
    own, before = dict(about_of(lm, about.chunking).spec or {}), dict(about.spec or {})
    names = [name for name in sorted({*own, *before}) if own.get(name) != before.get(name)]
    if not own or not names or "model" in names:
        return f", not with {lm.name} ({describe_encoder(lm)}, {lm.fingerprint()})"
    said = [f"{name} {before.get(name, 'as usual')}, not {own.get(name, 'as usual')}" for name in names]
    return f": {'; '.join(said)}"


def describe_encoder(lm: "LanguageModel") -> str:
    """Return an encoder's plan and pooling in a few words."""
    plan = lm.encoder.attention.with_defaults(lm.n_layers)
    numbers = "".join(f" {name}={value}" for name in ("k", "k0") if (value := getattr(plan, name)) is not None)
    return f"{plan.name}{numbers}, {lm.encoder.pooling}"


def refill(old: VectorStore, new: VectorStore, cut: Cut, embed: Embed, show_progress: bool | None = None) -> int:
    """Cut and embed every document of a store anew into another, from the texts that are stored.

    What an interrupted migration left in the other one is not embedded again.

    Args:
        old: the store that there is.
        new: what took shape beside it.
        cut: cuts a document.
        embed: embeds the chunks of documents.
        show_progress: None shows a bar on a terminal.

    Returns:
        How many documents were embedded.
    """
    documents, done = old.documents(), new.documents()
    left = [source for source, state in documents.items() if done.get(source) != state]
    with progress(len(documents), "embedding anew", show=show_progress) as advance:
        advance(len(documents) - len(left))
        for first in range(0, len(left), DOCUMENTS_AT_ONCE):
            sources = left[first : first + DOCUMENTS_AT_ONCE]
            by_source: dict[str, list[Chunk]] = {}
            for chunk in old.chunks_of(sources):
                by_source.setdefault(chunk.source, []).append(chunk)
            for batch in _batches(by_source, cut):
                # The hash is that of the document as it was read, by which the next run knows it.
                own = [[replace(one, digest=documents[one.source].digest) for one in chunks] for chunks in batch]
                new.replace([chunks[0].source for chunks in own], [one for chunks in own for one in chunks], embed(own))
            advance(len(sources))
    stale = [source for source in done if source not in documents]
    new.replace(stale, [], np.zeros((0, 0), dtype=np.float32))
    new.note_files({**dict.fromkeys(new.files().keys() - old.files().keys()), **old.files()})
    return len(left)


def _batches(by_source: dict[str, list[Chunk]], cut: Cut) -> Iterator[list[list[Chunk]]]:
    batch: list[list[Chunk]] = []
    for chunks in by_source.values():
        batch.append(cut(rebuilt(chunks)))
        if sum(map(len, batch)) >= CHUNKS_AT_ONCE:
            yield batch
            batch = []
    if batch:
        yield batch
