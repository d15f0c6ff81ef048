"""Resumable jobs: the working folder ``OUT.parts`` with its manifest, finished parts and checkpointed rows.

``manifest.json`` describes what the parts belong to and the job's stage: ``making`` while parts are added, ``placing``
once all are there and the output is moved into place. A part is complete or absent. ``unfinished-000003`` stores the
finished rows of the part that is being made, for jobs that checkpoint rows. The folder is removed when the output is
there, its manifest last, so that a job killed in between is known as finished.
"""

import errno
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from gerund.errors import DataError, InputError, ResourceError
from gerund.jobs.files import acquire_lock, explained, flush_names, release_lock, require_regular_file, write_atomic

MAKING = "making"
PLACING = "placing"
_MANIFEST = "manifest.json"
_FORMAT = 2
# A setting that hashes a model's weights and configuration; messages name the model instead.
FINGERPRINT = "fingerprint"

KEY_BYTES = 16
FLUSH_SECONDS = 5.0
"""Seconds after which finished rows are flushed: with the current batch, what a kill costs."""
_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)


@dataclass(frozen=True)
class Manifest:
    """Everything that determines a job's result, as JSON next to its parts.

    Two runs belong together exactly when their manifests have the same key. Names are for messages and don't count, so
    that an input or a model may be moved between two runs.
    """

    kind: str  # the command, such as ``embed``
    settings: Mapping[str, Any]  # what determines the result; values are JSON, nested by one level at most
    inputs: str  # a digest of the content of all inputs
    inputs_name: str  # the inputs' name in messages, such as ``the rows of notes.txt``
    names: Mapping[str, str] = field(default_factory=dict)  # other names, such as ``model``; not part of the key
    stage: str = ""  # how far the job is; not part of the key
    facts: Mapping[str, Any] = field(default_factory=dict)  # counts to store; not part of the key

    @property
    def key(self) -> str:
        """A hash of everything that determines the result: 16 hexadecimal digits."""
        content = json.dumps([self.kind, self.inputs, self._flat()], sort_keys=True)
        return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()

    def changed(self, earlier: "Manifest") -> list[str]:
        """Return the names of the settings that differ from an earlier manifest's, and ``inputs`` if these differ."""
        old, new = earlier._flat(), self._flat()
        names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
        return names + (["inputs"] if earlier.inputs != self.inputs else [])

    def difference(self, earlier: "Manifest") -> str:
        """Describe what differs from an earlier manifest, with both values; "" where nothing does."""
        if earlier.kind != self.kind:
            return f"it was begun by '{earlier.kind}'"
        old, new, changed = earlier._flat(), self._flat(), self.changed(earlier)
        named = [name for name in changed if name not in (FINGERPRINT, "inputs")]
        messages = [f"{name} was {old.get(name)!r} and is {new.get(name)!r}" for name in named]
        if FINGERPRINT in changed and not messages:
            was, now = (manifest.names.get("model") for manifest in (earlier, self))
            messages.append(f"the model was {was} and is {now}, with other weights or settings")
        if "inputs" in changed:
            messages.append(f"{earlier.inputs_name} have changed")
        return ", ".join(messages)

    def to_json(self) -> str:
        """Return the manifest as JSON."""
        return json.dumps({"format": _FORMAT, **asdict(self)}, indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def read(cls, path: Path) -> "Manifest | None":
        """Read a manifest; None where there is none, or one of another version of gerund."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            return cls(**content) if content.pop("format") == _FORMAT else None
        except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
            return None

    def _flat(self) -> dict[str, Any]:
        flat: dict[str, Any] = {}
        # Through JSON, which has no tuples, so that a manifest from a file compares equal to a new one.
        for name, value in json.loads(json.dumps(dict(self.settings))).items():
            if isinstance(value, dict):
                flat |= {f"{name}.{inner}": item for inner, item in value.items()}
            else:
                flat[name] = value
        return flat


class InputFiles:
    """Files that a job reads, with a digest of their names and contents, taken at construction."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = list(files)
        self._states = [_file_state(path) for path in self.files]
        self.digest = self._digest()

    def changed(self) -> bool:
        """Return whether a file's content has changed; a file with the same size and time isn't read again."""
        return [_file_state(path) for path in self.files] != self._states and self._digest() != self.digest

    def _digest(self) -> str:
        digests = [[path.name, _file_digest(path)] for path in self.files]
        return hashlib.blake2b(json.dumps(digests).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _file_digest(path: Path) -> str:
    with _readable(path), path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _file_state(path: Path) -> tuple[int, int]:
    with _readable(path):
        return path.stat().st_size, path.stat().st_mtime_ns


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error


class RowStore:
    """Float32 vectors by key, in memory or in an append-only folder.

    The folder has a file of vectors and a file of keys, which is written after it. A process that is killed in between
    leaves vectors without keys, which the next reader or writer cuts off. ``folder=None`` stores in memory.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.places: dict[bytes, int] = {}
        self.blocks: list[np.ndarray] = []
        self.width = 0
        if folder is not None and (folder / "width").is_file():
            self._open(folder)

    def __contains__(self, key: bytes) -> bool:
        return key in self.places

    def __len__(self) -> int:
        return len(self.places)

    def rows(self, keys: Sequence[bytes]) -> np.ndarray:
        """Return the vectors of ``keys``, ``(n, width)``."""
        if not keys:
            return np.zeros((0, self.width), dtype=np.float32)
        places = np.array([self.places[key] for key in keys])
        if self.folder is not None:
            table = np.memmap(self.folder / "vectors", dtype=np.float32, mode="r").reshape(-1, self.width)
            return np.array(table[places])
        if len(self.blocks) > 1:
            self.blocks = [np.concatenate(self.blocks)]
        chosen: np.ndarray = self.blocks[0][places]
        return chosen

    def add(self, keys: Sequence[bytes], vectors: np.ndarray) -> None:
        """Append vectors ``(n, width)`` under new keys; if the disk is full, the rows before stay."""
        vectors = np.ascontiguousarray(vectors, dtype=np.float32)
        self.width = self.width or vectors.shape[1]
        if self.folder is None:
            self.blocks.append(vectors)
        else:
            self._append(self.folder, keys, vectors)
        start = len(self.places)
        self.places.update({key: start + row for row, key in enumerate(keys)})

    def _append(self, folder: Path, keys: Sequence[bytes], vectors: np.ndarray) -> None:
        with explained(f"cannot store vectors in {folder}"):
            folder.mkdir(parents=True, exist_ok=True)
            if not (folder / "width").is_file():
                write_atomic(folder / "width", str(self.width))
            rows = len(self.places)
            for name, size, data in (
                ("vectors", 4 * self.width, vectors.tobytes()),
                ("keys", KEY_BYTES, b"".join(keys)),
            ):
                with (folder / name).open("ab") as file:
                    # Cut off what an interrupted attempt left after the last row.
                    file.truncate(rows * size)
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())

    def _open(self, folder: Path) -> None:
        """Read the keys, and cut off what a killed process left unfinished."""
        self.width = int((folder / "width").read_text())
        sizes = [(folder / name).stat().st_size if (folder / name).is_file() else 0 for name in ("keys", "vectors")]
        rows = min(sizes[0] // KEY_BYTES, sizes[1] // (4 * self.width))
        for name, size in (("keys", rows * KEY_BYTES), ("vectors", rows * 4 * self.width)):
            if (folder / name).is_file():
                os.truncate(folder / name, size)
        self.places = {key: row for row, key in enumerate(_read_keys(folder))} if rows else {}


def _read_keys(folder: Path) -> list[bytes]:
    data = (folder / "keys").read_bytes()
    return [data[start : start + KEY_BYTES] for start in range(0, len(data), KEY_BYTES)]


class ShardCheckpoint:
    """The finished rows of a shard in progress, so that an interruption costs seconds and not the shard.

    Batches depend on the shard alone, and a resumed shard skips the rows that are done, so it has the same bytes as an
    uninterrupted shard. Rows are stored under a hash of ``shard``, which names all that they depend on. As a context
    manager, flushes at the end of its block, with an error or without. ``folder=None`` stores nothing; ``advance`` is
    called with the number of newly finished rows, those of an earlier attempt included.
    """

    def __init__(
        self,
        folder: Path | None,
        shard: str,
        *,
        advance: Callable[[int], None] | None = None,
        seconds: float = FLUSH_SECONDS,
    ) -> None:
        self.folder, self.shard, self.seconds = folder, shard, seconds
        self.rows = 0
        """Finished rows, in this attempt or an earlier one; the last of them may not be flushed yet."""
        self.stored = 0
        """Those of them that are on the disk."""
        self.resumed = 0
        """Those of them that an earlier attempt finished."""
        self._advance = advance or (lambda _rows: None)
        self._store: RowStore | None = None
        self._waiting: dict[bytes, np.ndarray] = {}
        self._complete_waiting = 0
        self._flushed = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is None:
            self.flush()
        else:
            with suppress(ResourceError):  # the first error is the one to report
                self.flush()

    def encoding_pass(self, number: int = 0, of: int = 1) -> "EncodingPass":
        """Return the rows of one pass; where each row needs several, the passes follow one another."""
        return EncodingPass(self, number, last=number == of - 1)

    def store(self) -> RowStore | None:
        """Return the stored rows; None without a folder."""
        if self._store is None and self.folder is not None:
            self._store = RowStore(self.folder)
        return self._store

    def add(self, keys: Sequence[bytes], vectors_ND: np.ndarray, *, complete: bool) -> None:
        """Add rows; ``complete`` where no further pass is needed for them."""
        if complete:
            self.rows += len(keys)
            self._advance(len(keys))
        if self.folder is None:
            return
        self._waiting.update(zip(keys, vectors_ND, strict=True))
        self._complete_waiting += len(keys) if complete else 0
        if time.monotonic() - self._flushed >= self.seconds:
            self.flush()

    def count_resumed(self, rows: int) -> None:
        """Count rows that an earlier attempt finished."""
        self.rows += rows
        self.resumed += rows
        self.stored += rows
        self._advance(rows)

    def flush(self) -> None:
        """Write the waiting rows to the disk."""
        store = self.store()
        # An interruption may come after they are written and before they are no longer waiting.
        keys = [key for key in self._waiting if store is not None and key not in store]
        if store is not None and keys:
            store.add(keys, np.stack([self._waiting[key] for key in keys]))
        self.stored += self._complete_waiting
        self._complete_waiting = 0
        self._waiting.clear()
        self._flushed = time.monotonic()

    def discard(self) -> None:
        """Delete all rows, once the shard itself is stored."""
        self._waiting.clear()
        self._complete_waiting = self.stored = 0
        self._store = None
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


class EncodingPass:
    """The rows of one pass over a shard."""

    def __init__(self, shard: ShardCheckpoint, number: int, *, last: bool) -> None:
        self._shard, self._number, self._last = shard, number, last

    def restore(self, vectors_ND: np.ndarray) -> frozenset[int]:
        """Fill in the finished rows; returns their numbers."""
        store = self._shard.store()
        if not store or store.width != vectors_ND.shape[1]:
            return frozenset()
        keys = {row: _row_key(self._shard.shard, self._number, row) for row in range(len(vectors_ND))}
        done = [row for row, key in keys.items() if key in store]
        if done:
            vectors_ND[done] = store.rows([keys[row] for row in done])
        if self._last:
            self._shard.count_resumed(len(done))
        return frozenset(done)

    def save(self, rows: Sequence[int], vectors_ND: np.ndarray) -> None:
        """Save newly finished rows."""
        keys = [_row_key(self._shard.shard, self._number, row) for row in rows]
        self._shard.add(keys, vectors_ND, complete=self._last)


def has_saved_rows(folder: Path) -> bool:
    """Return whether the folder of a checkpoint has rows."""
    with suppress(OSError):
        return (folder / "keys").stat().st_size >= KEY_BYTES
    return False


def saved_rows(folder: Path, shard: str, rows: int, passes: int = 1) -> int:
    """Count the finished rows of a shard of ``rows`` rows, without disturbing a process that adds to them."""
    with suppress(OSError):
        keys = set(_read_keys(folder))
        return sum(_row_key(shard, passes - 1, row) in keys for row in range(rows))
    return 0


def _row_key(shard: str, number: int, row: int) -> bytes:
    return hashlib.blake2b(f"{shard} {number} {row}".encode(), digest_size=KEY_BYTES).digest()


class WorkingFolder:
    """The working folder of one output, locked by this process. ``ending`` is the file extension of parts."""

    def __init__(self, path: Path, ending: str = ".arrow") -> None:
        self.path, self.ending = path, ending
        for stray in path.glob(".*.part"):
            stray.unlink()
        shutil.rmtree(self.spill(), ignore_errors=True)

    def manifest(self) -> Manifest | None:
        """Return what the parts belong to; None before anything is begun."""
        return Manifest.read(self.path / _MANIFEST)

    def write_manifest(self, manifest: Manifest, stage: str) -> None:
        """Record what the parts belong to, and the job's stage."""
        write_atomic(self.path / _MANIFEST, replace(manifest, stage=stage).to_json())

    def require_known_version(self) -> None:
        """Raise ``InputError`` if there are parts whose manifest can't be read."""
        # Parts without a manifest are left from a job whose clearing was interrupted.
        if self.begun() and self.manifest() is None and (self.path / _MANIFEST).is_file():
            raise InputError(
                f"{self.path} has unfinished work of another version of gerund; give --force to start from scratch"
            )

    def part(self, index: int) -> Path:
        """Return the path of a part."""
        return self.path / f"part-{index:06d}{self.ending}"

    def parts(self) -> dict[int, Path]:
        """Return the finished parts by their numbers, in order."""
        named = re.compile(rf"part-(\d+){re.escape(self.ending)}")
        matches = ((named.fullmatch(path.name), path) for path in self.path.glob(f"part-*{self.ending}"))
        return dict(sorted((int(match[1]), path) for match, path in matches if match))

    def begun(self) -> bool:
        """Return whether there is a finished part, or a row of a part."""
        return any(self.path.glob(f"part-*{self.ending}")) or any(map(has_saved_rows, self.path.glob("unfinished-*")))

    def unfinished(self, index: int) -> Path:
        """Return the folder for the rows of an unfinished part."""
        return self.path / f"unfinished-{index:06d}"

    def placing(self) -> bool:
        """Return whether the output is being moved into place, or is there already."""
        manifest = self.manifest()
        return manifest is not None and manifest.stage == PLACING

    def clear(self) -> None:
        """Delete the manifest and all parts; other files stay."""
        (self.path / _MANIFEST).unlink(missing_ok=True)
        self._delete(f"part-*{self.ending}")

    def joined(self, name: str) -> Path:
        """Return the path of an output file before it is moved into place."""
        return self.path / f"joined-{name}"

    def put(self, files: Sequence[Path]) -> None:
        """Move joined files into place, one after the other."""
        for file in files:
            with explained(f"cannot write {file}"):
                self.joined(file.name).replace(file)
        flush_names(files[-1].parent)

    def spool(self, endings: str) -> Path:
        """Return the path for a copy of an input that can be read only once; ``endings`` such as ``.txt.gz``."""
        return self.path / f"input{endings}"

    def spill(self) -> Path:
        """Return a folder for data that doesn't fit the memory; the caller makes and removes it."""
        return self.path / "spill"

    def remove(self) -> None:
        """Delete the folder's content, the manifest last. The lock file goes when it is released."""
        self._delete(f"part-*{self.ending}", "joined-*", "input*", ".*.part")
        (self.path / _MANIFEST).unlink(missing_ok=True)

    def _delete(self, *patterns: str) -> None:
        for folder in self.path.glob("unfinished-*"):
            shutil.rmtree(folder)
        for pattern in patterns:
            for path in self.path.glob(pattern):
                path.unlink()
        flush_names(self.path)


@contextmanager
def working_folder(output: Path, ending: str = ".arrow") -> Iterator[WorkingFolder]:
    """Lock and yield the working folder of ``output``; at the end it is removed unless a job can resume from it.

    Raises ``InputError`` if another process writes the same output, or if the folder's name is a symbolic link.
    """
    path = output.with_name(f"{output.name}.parts")
    failure = f"cannot write {output}: {path}"
    with explained(failure):
        require_regular_file(path)
        lock = acquire_lock(path, output)
    try:
        folder = WorkingFolder(path, ending)
        try:
            yield folder
        finally:
            if path.is_dir() and not folder.begun() and not folder.placing():
                folder.remove()
    except OSError as error:
        # Others, such as those of an input or a connection, are no fault of the output.
        if error.errno in _OF_THE_DISK or str(error.filename).startswith(str(path)):
            raise ResourceError(f"{failure}: {error.strerror or error}") from error
        raise
    finally:
        release_lock(lock)
        # Not empty: parts to resume from, files that a user stores there, or another process has just begun.
        with suppress(OSError):
            path.rmdir()


@contextmanager
def resume_hint(hint: Callable[[], str]) -> Iterator[None]:
    """Add to an error what was saved and how to resume, as ``hint`` returns it ("" where nothing was saved).

    A ``ResourceError`` gets it at its end, a ``KeyboardInterrupt`` as a note.
    """
    try:
        yield
    except ResourceError as error:
        if text := hint():
            raise ResourceError(f"{error}; {text}") from error
        raise
    except KeyboardInterrupt as stop:
        if text := hint():
            stop.add_note(text)
        raise
