"""Index files and documents in a store: skip what is unchanged, atomically replace what has changed; watch files.

A document is stored with all of its chunks in one commit. A file counts as done when all of its documents are stored;
after a kill, the next run recognizes stored documents by their hashes and continues after them. So the same command,
however often it is killed and repeated, leaves the same rows.

Watched files are polled by size and time, which every file system reports; changed files are then hashed and indexed as
``Index.add`` does. A file that is being written waits until it is unchanged for an interval; one that was read too
early is read again when it changes.
"""

import posixpath
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gerund.checks import demand_number, flag, place
from gerund.data.files import shown_path
from gerund.errors import ConfigError, DataError, GerundError, MissingDependencyError
from gerund.models.sources import with_absolute_paths
from gerund.progress import Advance, counted_by, progress
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
    from gerund.inference.sentence_encoder import SentenceEncoder
    from gerund.language_model import LanguageModel
    from gerund.retrieval.index import Index


# What is embedded and stored per batch, and lost at most by an interruption.
CHUNKS_AT_ONCE = 1024
DOCUMENTS_AT_ONCE = 256
_REASONS = 100
_NO_VECTORS = np.zeros((0, 0), dtype=np.float32)

Cut = Callable[[Document], list[Chunk]]


@dataclass(frozen=True)
class Embedded:
    """The vectors of chunks ``(n, D)``, and their token vectors as they are stored, where the index has some."""

    vectors_ND: np.ndarray
    tokens: list[bytes] | None = None

    @classmethod
    def joined(cls, parts: Sequence["Embedded"]) -> "Embedded":
        """Return the vectors of all parts, of which there is one at least."""
        tokens = None if parts[0].tokens is None else [stored for part in parts for stored in part.tokens or ()]
        return cls(np.concatenate([part.vectors_ND for part in parts]), tokens)


Embed = Callable[[Sequence[Sequence[Chunk]]], np.ndarray | Embedded]


@dataclass(frozen=True)
class Failure:
    """A file that could not be indexed, or not completely."""

    file: str
    reason: str  # why; where several rows could not be read, the first row's
    rows: int = 0  # how many rows could not be read; 0 where it is the file itself
    more: tuple[str, ...] = ()  # the reasons of the other rows, at most 100


@dataclass
class IndexSummary:
    """What an indexing run did."""

    files: int = 0  # files that were checked
    unchanged: int = 0  # files that were skipped, since they have not changed
    documents: int = 0  # documents that were stored, new or changed
    chunks: int = 0  # their chunks
    removed: int = 0  # documents that were removed
    failed: list[Failure] = field(default_factory=list)  # files that could not be read, or not completely
    completed: bool = False
    """Whether this run updated the indices of words and vectors for an earlier run that was killed."""
    seconds: float = 0.0  # duration, without loading the model


class Writer:
    """Writes documents to a store, in batches.

    Args:
        store: the store.
        cut: splits a document into chunks.
        embed: embeds the chunks of documents.
        root: file names are relative to it; None leaves them absolute.
        workers: number of processes that embed: a batch is larger by this factor.
        make: creates the index, called when there is something to store; None where it exists.
        limits: time and memory for reading a document; None for the default limits.
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
        self._states: dict[str, DocumentState] = store.documents()
        self._sources_of: dict[str, set[str]] = {}
        for source, state in self._states.items():
            self._sources_of.setdefault(state.file, set()).add(source)
        self._pending: dict[str, tuple[Document, list[Chunk]]] = {}
        self._pending_files: dict[str, str | None] = {}
        self._pending_removals: dict[str, None] = {}
        self._cut_chunks = 0
        self._advance: Advance = lambda _steps, **_: None

    def add_files(self, paths: Sequence[Path], *, prune: bool = False, show_progress: bool | None = None) -> None:
        """Index files and folders; ``prune`` removes the documents of files in these paths that no longer exist."""
        digests = self.store.files()
        places = self._places(digests) if prune else {}
        files = find_files([path for path in paths if path.exists() or not _below([path], places)])
        if not files and not prune:
            where = ", ".join(map(str, paths)) or "no path was named"
            raise DataError(
                f"{where}: there is no file to read; files are read that end in "
                f"{', '.join(f'.{name}' for name in endings())}"
            )
        with (
            progress(None, self._label(0, len(files)), show=show_progress) as self._advance,
            DocumentReader(self._limits) as reader,
            self._flushing(),
        ):
            for read, path in enumerate(files, start=1):
                self._add_file(path, digests, reader)
                # Until all files are read, their number of chunks is estimated from the files before.
                estimate = self._cut_chunks * len(files) // read
                self._advance(0, total=estimate or None, label=self._label(read, len(files)))
            for file in sorted(_below(paths, places) - {self.name_of(path) for path in files}):
                self._forget(file, digests)

    def add_documents(self, documents: Iterable[Document]) -> None:
        """Index documents that come from no file; a document without text is removed."""
        with self._flushing():
            for document in documents:
                self._add(document)

    def remove(self, sources: Iterable[str]) -> None:
        """Remove documents, all of which must exist."""
        unique = list(dict.fromkeys(sources))
        for source in unique:
            if source not in self._states:
                raise DataError(f"{self.store.name} has no document {source!r}")
        with self._flushing():
            self._remove(unique)

    def name_of(self, path: Path) -> str:
        """Return a file's name in the index: its path relative to the index's folder if it is below that.

        So the name does not depend on the working folder, and stays valid when both are moved together.
        """
        resolved = path.resolve()
        if self._root is not None and resolved.is_relative_to(self._root):
            resolved = resolved.relative_to(self._root)
        return shown_path(resolved.as_posix())

    def _add_file(self, path: Path, digests: dict[str, str], reader: DocumentReader) -> None:
        file = self.name_of(path)
        self.summary.files += 1
        bad_rows: list[str] = []
        sources: set[str] = set()
        try:
            digest = digest_of(path)
            if digests.get(file) == digest:
                self.summary.unchanged += 1
                return
            for parsed in reader.read(path, lambda error: bad_rows.append(str(error))):
                source = f"{file}#{parsed.key}" if parsed.key else file
                if source in sources:
                    bad_rows.append(f"{path}: the id {parsed.key!r} is there twice")
                    continue
                sources.add(source)
                self._add(_document(parsed, source, file, path))
        except (DataError, MissingDependencyError) as error:
            self.summary.failed.append(Failure(shown_path(path), str(error)))
            if isinstance(error, NoTextError):
                self._forget(file, digests)
            return
        if bad_rows:
            # The stored documents of these rows stay, and the file is not done.
            reason, *more = bad_rows
            self.summary.failed.append(Failure(shown_path(path), reason, len(bad_rows), tuple(more[:_REASONS])))
            if file in digests:  # else it would be skipped if it were restored, without its earlier rows
                self._pending_files[file] = None
            return
        self._remove(self._sources_of.get(file, set()) - sources)
        self._pending_files[file] = digest

    def _add(self, document: Document) -> None:
        """Add a document, unless it is unchanged; if it comes twice, the last one counts."""
        self._pending.pop(document.source, None)
        self._pending_removals.pop(document.source, None)
        state = self._states.get(document.source)
        if state is not None and state.digest == document.digest and state.file == document.file:
            return
        chunks = self._cut(document)
        if not chunks:
            self._remove([document.source] if state is not None else [])
            return
        self._pending[document.source] = (document, chunks)
        self._cut_chunks += len(chunks)
        n_chunks = sum(len(chunks) for _, chunks in self._pending.values())
        if n_chunks >= CHUNKS_AT_ONCE * self._workers or len(self._pending) >= DOCUMENTS_AT_ONCE * self._workers:
            self._flush()

    def tidied(self) -> IndexSummary:
        """Tidy the store if this run, or an earlier one that was killed, has changed something; return the summary."""
        begin = time.perf_counter()
        has_changed = bool(self.summary.documents or self.summary.removed)
        if not has_changed:
            self.summary.completed = self.store.finish()
        if has_changed or not self.store.is_tidy():
            self.store.tidy()
        self.summary.seconds += time.perf_counter() - begin
        return self.summary

    def _remove(self, sources: Iterable[str]) -> None:
        self._pending_removals |= dict.fromkeys(sorted(sources))

    def _forget(self, file: str, digests: dict[str, str]) -> None:
        """Remove a file's documents and its hash, so that it is not skipped if its text is restored."""
        self._remove(self._sources_of.get(file, set()))
        if file in digests:
            self._pending_files[file] = None

    def _places(self, digests: dict[str, str]) -> dict[str, str]:
        """Return the absolute path of each file of the index, whose name may be relative to the index's folder."""
        root = "" if self._root is None else shown_path(self._root.as_posix())
        return {
            # A file with a scheme, such as ``s3://``, is in no folder.
            file: file if Path(file).is_absolute() or "://" in file else posixpath.join(root, file)
            for file in {*digests, *self._sources_of}
            if file
        }

    @contextmanager
    def _flushing(self) -> Iterator[None]:
        """Store what is pending at the end of the block; an interruption gets a note about what is stored."""
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

    @staticmethod
    def _label(read: int, files: int) -> str:
        return f"{read:,} of {files:,} files read, chunks embedded"

    def _flush(self) -> None:
        """Embed and store what is pending, then mark files as done."""
        if self._pending:
            documents = [chunks for _, chunks in self._pending.values()]
            with _counting(self._advance, sum(map(len, documents))):
                embedded = self._embed(documents)
            if self._make is not None:
                self._make()
                self._make = None
            put(self.store, list(self._pending), documents, embedded)
            for source, (document, chunks) in self._pending.items():
                self._states[source] = DocumentState(document.digest, document.file)
                self._sources_of.setdefault(document.file, set()).add(source)
                self.summary.documents += 1
                self.summary.chunks += len(chunks)
            self._pending.clear()
        if self._pending_removals:
            removals = list(self._pending_removals)
            for first in range(0, len(removals), DOCUMENTS_AT_ONCE):
                self.store.replace(removals[first : first + DOCUMENTS_AT_ONCE], [], _NO_VECTORS)
            for source in removals:
                state = self._states.pop(source, None)
                self._sources_of.get(state.file if state else "", set()).discard(source)
            self.summary.removed += len(removals)
            self._pending_removals.clear()
        if self._pending_files:
            if self._make is None:
                self.store.note_files(self._pending_files)
            self._pending_files.clear()


@contextmanager
def _counting(advance: Advance, steps: int) -> Iterator[None]:
    """Advance a bar by so many steps: while something is embedded, where the encoder says how far it is."""
    share, counted = 0.0, 0

    def count(more: float) -> None:
        nonlocal share, counted
        share = min(share + more, 1.0)
        before, counted = counted, round(share * steps)
        advance(counted - before)

    with counted_by(count):
        yield
    advance(steps - counted)


def put(store: VectorStore, sources: list[str], documents: Sequence[Sequence[Chunk]], vectors: Any) -> None:
    """Store the chunks of documents, with what ``Embed`` returned, in the place of those of these sources."""
    embedded = vectors if isinstance(vectors, Embedded) else Embedded(vectors)
    # Stores of users know token vectors only where they have some.
    tokens = [] if embedded.tokens is None else [embedded.tokens]
    store.replace(sources, list(chain.from_iterable(documents)), embedded.vectors_ND, *tokens)


def _document(parsed: ParsedText, source: str, file: str, path: Path) -> Document:
    """Return a document; a file without a title gets its name as the title."""
    title = parsed.title or ("" if parsed.key else shown_path(stem_of(path)))
    return Document(source, parsed.text, title, parsed.sections, file)


def _below(paths: Sequence[Path], places: Mapping[str, str]) -> set[str]:
    """Return the files that are these paths or below them."""
    roots = tuple(posixpath.join(shown_path(path.resolve().as_posix()), "") for path in paths)
    return {file for file, place in places.items() if f"{place}/".startswith(roots)}


def all_failed(summary: IndexSummary) -> GerundError | None:
    """Return the error for a run in which no file could be read; None where at least one could."""
    if not summary.failed or len(summary.failed) < summary.files or any(failure.rows for failure in summary.failed):
        return None
    more = f" (and {len(summary.failed) - 1} more files)" if len(summary.failed) > 1 else ""
    return DataError(f"no file could be read: {summary.failed[0].reason}{more}")


# Migration: another encoder, or another chunking, for documents that are already indexed


def migrate_index(
    store: VectorStore,
    encoder: "LanguageModel | SentenceEncoder",
    chunking: Chunking | None = None,
    show_progress: bool | None = None,
    *,
    embed: Embed | None = None,
) -> int:
    """Re-embed every document of a store; see ``Index.migrate``. ``embed`` replaces this process's encoder."""
    from gerund.retrieval.documents import cut
    from gerund.retrieval.embedding import Embedder

    old = store.about()
    if old is None:
        raise DataError(f"{store.name}: there is no index yet, so nothing to migrate")
    about = metadata_for(encoder, chunking or old.chunking)
    embedder = Embedder(encoder, about.chunking)
    return replace_index(
        store,
        about,
        lambda document: cut(document, encoder.tokenizer, about.chunking),
        embed or embedder.embedded,
        show_progress,
    )


def replace_index(
    store: VectorStore, about: IndexMetadata, cut: Cut, embed: Embed, show_progress: bool | None = None
) -> int:
    """Fill a second set of tables from the stored texts, then atomically replace the first; return the documents."""
    old = store.about()
    with store.locked():
        if old is not None and about.key == old.key:
            store.drop_others()
            return 0
        successor = store.create_successor(about)
        count = refill(store, successor, cut, embed, show_progress)
        successor.tidy()
        store.swap(successor)
    return count


def metadata_for(lm: "LanguageModel | SentenceEncoder", chunking: Chunking) -> IndexMetadata:
    """Return the metadata of an index that is created with a model."""
    try:
        spec = with_absolute_paths(lm.spec).model_dump(exclude_none=True)
    except ConfigError:  # a model that was created in memory
        spec = None
    fingerprint, space = lm.fingerprint(), "" if lm.space == lm.fingerprint() else lm.space
    late = lm.token_reader().fingerprint if chunking.multi and hasattr(lm, "token_reader") else ""
    return IndexMetadata(fingerprint, lm.name, lm.dimensions, describe_encoder(lm), chunking, spec, space, late)


def difference(about: IndexMetadata, lm: "LanguageModel | SentenceEncoder") -> str:
    """Describe how a model differs from that of an index: by settings, or else by its name."""
    spec, stored = dict(metadata_for(lm, about.chunking).spec or {}), dict(about.spec or {})
    names = [name for name in sorted({*spec, *stored}) if spec.get(name) != stored.get(name)]
    if not spec or not names or "model" in names:
        return f", not with {lm.name} ({describe_encoder(lm)}, {lm.fingerprint()})"
    pairs = [f"{name} {stored.get(name, 'as usual')}, not {spec.get(name, 'as usual')}" for name in names]
    return f": {'; '.join(pairs)}"


def describe_encoder(lm: "LanguageModel | SentenceEncoder") -> str:
    """Return an encoder's plan and pooling in a few words."""
    from gerund.inference.sentence_encoder import SentenceEncoder

    if isinstance(lm, SentenceEncoder):
        return "sentence-transformers"
    plan = lm.encoder.with_defaults(lm.n_layers).attention
    numbers = "".join(f" {name}={value}" for name in ("k", "k0") if (value := getattr(plan, name)) is not None)
    return f"{plan.name}{numbers}, {lm.encoder.pooling}"


def refill(old: VectorStore, new: VectorStore, cut: Cut, embed: Embed, show_progress: bool | None = None) -> int:
    """Split and embed every document of a store for another, from the stored texts; return the number of documents.

    What an interrupted migration left in ``new`` is not embedded again.
    """
    documents, done = old.documents(), new.documents()
    missing = [source for source, state in documents.items() if done.get(source) != state]
    with progress(len(documents), "embedding anew", show=show_progress) as advance:
        advance(len(documents) - len(missing))
        for first in range(0, len(missing), DOCUMENTS_AT_ONCE):
            sources = missing[first : first + DOCUMENTS_AT_ONCE]
            by_source: dict[str, list[Chunk]] = {}
            for chunk in old.chunks_of(sources):
                by_source.setdefault(chunk.source, []).append(chunk)
            for batch in _batches(by_source, cut):
                # The hash of the document as it was read, by which the next run recognizes it.
                stored = [
                    [replace(chunk, digest=documents[chunk.source].digest) for chunk in chunks] for chunks in batch
                ]
                with _counting(advance, len(stored)):
                    embedded = embed(stored)
                put(new, [chunks[0].source for chunks in stored], stored, embedded)
    new.replace([source for source in done if source not in documents], [], _NO_VECTORS)
    new.note_files({**dict.fromkeys(new.files().keys() - old.files().keys()), **old.files()})
    return len(missing)


def _batches(by_source: dict[str, list[Chunk]], cut: Cut) -> Iterator[list[list[Chunk]]]:
    batch: list[list[Chunk]] = []
    for chunks in by_source.values():
        batch.append(cut(rebuilt(chunks)))
        if sum(map(len, batch)) >= CHUNKS_AT_ONCE:
            yield batch
            batch = []
    if batch:
        yield batch


INTERVAL = 2.0
"""Seconds between two polls."""

_MIN_INTERVAL = 0.01

# A file's modification time in nanoseconds, and its size.
State = tuple[int, int]
Report = Callable[[IndexSummary], None]


def watch(
    index: "Index",
    paths: str | Path | Sequence[str | Path],
    *,
    prune: bool = False,
    interval: float = INTERVAL,
    stop: threading.Event | None = None,
    report: Report | None = None,
    limits: ReadLimits | None = None,
) -> None:
    """Keep an index up to date until ``stop`` is set, or an interruption (Ctrl-C) ends it.

    A file that cannot be read is reported, and tried again when it changes. While a path itself does not exist, such as
    a removed drive, its documents stay. ``paths``, ``prune`` and ``limits`` are those of ``Index.add``; ``report`` is
    called with the summary of each round that changed something. Every path must exist at the beginning.
    """
    demand_number("interval", interval)
    if not _MIN_INTERVAL <= interval < float("inf"):
        raise ConfigError(f"`interval` must be at least {_MIN_INTERVAL} seconds, got {interval}")
    listed = [place("what is watched", path) for path in ([paths] if isinstance(paths, str | Path) else paths)]
    for path in listed:
        if not path.exists():
            raise DataError(f"{path}: no such file or folder")
    watcher = Watcher(index, listed, prune=flag("prune", prune), interval=interval, limits=limits)
    stop, report = stop or threading.Event(), report or (lambda _: None)
    while True:
        summary = watcher.round()
        if summary is not None:
            report(summary)
        if stop.wait(interval):
            return


class Watcher:
    """Polls files and indexes those that changed; a file that is unchanged for ``interval`` seconds is complete."""

    def __init__(
        self, index: "Index", paths: Sequence[Path], *, prune: bool, interval: float, limits: ReadLimits | None = None
    ) -> None:
        self._index, self._paths, self._prune, self._interval = index, list(paths), prune, interval
        self._limits = limits
        self._indexed: dict[Path, State] = {}
        self._last: dict[Path, State] = {}
        self._reported: set[str] = set()
        self._is_first = True

    def round(self) -> IndexSummary | None:
        """Poll once and index changes; return the summary, None where nothing has changed."""
        failed: list[Failure] = []
        files, existing = self._poll(failed)
        now = time.time_ns()
        changed = [
            path for path, state in files.items()
            if self._indexed.get(path) != state and self._is_complete(path, state, now)
        ]  # fmt: skip
        deleted = [path for path in self._indexed if path not in files and _is_below(path, existing)]
        self._last = files
        paths = [*changed, *(deleted if self._prune else [])]
        if self._is_first and self._prune:
            paths = list(dict.fromkeys([*existing, *changed]))  # also files that were deleted before
        self._is_first = False
        summary = self._add(paths) if paths else None
        for path in changed:
            self._indexed[path] = files[path]
        for path in deleted:
            del self._indexed[path]
        if failed:
            summary = summary or IndexSummary()
            summary.failed += failed
        return summary

    def _poll(self, failed: list[Failure]) -> tuple[dict[Path, State], list[Path]]:
        """Return the state of each file, and the paths that exist, at this moment."""
        files: dict[Path, State] = {}
        existing = []
        for path in self._paths:
            try:
                for file in find_files([path]):
                    status = file.stat()
                    files[file] = (status.st_mtime_ns, status.st_size)
                existing.append(path)
                self._reported.discard(str(path))
            except (DataError, OSError) as error:
                # The state of a path that does not exist, or cannot be read at the moment, is unchanged.
                files |= {file: state for file, state in self._indexed.items() if _is_below(file, [path])}
                if str(path) not in self._reported:
                    self._reported.add(str(path))
                    failed.append(Failure(str(path), f"{error}; its documents are kept"))
        return files, existing

    def _is_complete(self, path: Path, state: State, now: int) -> bool:
        """Whether a file is as it was at the last poll, or older than the interval."""
        return self._last.get(path) == state or now - state[0] >= self._interval * 1e9

    def _add(self, paths: list[Path]) -> IndexSummary:
        try:
            existing = [path for path in paths if path.exists() or self._prune]
            if not existing:  # all were deleted in the meantime
                return IndexSummary(files=len(paths))
            return self._index.add(existing, prune=self._prune, limits=self._limits)
        except DataError as error:
            # All of them are broken, or were deleted in the meantime.
            return IndexSummary(files=len(paths), failed=[Failure(str(paths[0]), str(error))])


def _is_below(path: Path, folders: Sequence[Path]) -> bool:
    return any(path.is_relative_to(folder) for folder in folders)
