"""Resumable jobs: the working folder ``OUT.parts`` with its manifest, finished parts and checkpointed rows.

``manifest.json`` says what the parts belong to and the job's stage: ``making`` while parts are added, ``placing`` once
all are there and the output is moved into place. A part is complete or absent. ``unfinished-000003`` holds the finished
rows of the part that is being made, for jobs that checkpoint rows. The folder is removed when the output is there, its
manifest last, so that a job killed in between is known as finished.
"""

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from gerund.errors import DataError, InputError, ResourceError
from gerund.jobs.files import acquire_lock, atomic_file, flush_names, release_lock, require_regular_file, write_atomic

FORMAT = 2
# A hash of a model's weights and configuration: no name to show to anybody.
FINGERPRINT = "fingerprint"


@dataclass(frozen=True)
class Manifest:
    """What a job is.

    Attributes:
        kind: which command's job, such as ``embed``.
        settings: what determines the result, by name; values are JSON, nested by one level at most.
        inputs: a digest of the content of all that is read.
        inputs_name: what messages call that, such as ``the rows of notes.txt``.
        names: what else is called how, such as ``model``; does not count.
        stage: how far the job is; does not count.
        facts: what else is to be kept; does not count.
    """

    kind: str
    settings: Mapping[str, Any]
    inputs: str
    inputs_name: str
    names: Mapping[str, str] = field(default_factory=dict)
    stage: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """A hash of all that determines the result: 16 hexadecimal digits."""
        content = json.dumps([self.kind, self.inputs, self._flat()], sort_keys=True)
        return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()

    def changed(self, earlier: "Manifest") -> list[str]:
        """Return the names of the settings that differ from an earlier manifest's; ``inputs`` where these do."""
        old, new = earlier._flat(), self._flat()
        names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
        return names + (["inputs"] if earlier.inputs != self.inputs else [])

    def difference(self, earlier: "Manifest") -> str:
        """Say what differs from an earlier manifest, with both values; "" where nothing does."""
        if earlier.kind != self.kind:
            return f"it was begun by '{earlier.kind}'"
        old, new, changed = earlier._flat(), self._flat(), self.changed(earlier)
        told = [
            f"{name} was {old.get(name)!r} and is {new.get(name)!r}"
            for name in changed
            if name not in (FINGERPRINT, "inputs")
        ]
        if FINGERPRINT in changed and not told:
            was, now = (names.names.get("model") for names in (earlier, self))
            told.append(f"the model was {was} and is {now}, with other weights or settings")
        if "inputs" in changed:
            told.append(f"{earlier.inputs_name} have changed")
        return ", ".join(told)

    def to_json(self) -> str:
        """Return the manifest as JSON."""
        content = {
            "format": FORMAT,
            "kind": self.kind,
            "stage": self.stage,
            "settings": dict(self.settings),
            "inputs": self.inputs,
            "inputs_name": self.inputs_name,
            "names": dict(self.names),
            "facts": dict(self.facts),
        }
        return json.dumps(content, indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def read(cls, path: Path) -> "Manifest | None":
        """Return the manifest of a file; None where there is none, or one of another version of gerund."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content.pop("format") != FORMAT:
                return None
            return cls(**content)
        except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
            return None

    def _flat(self) -> dict[str, Any]:
        flat: dict[str, Any] = {}
        # What was read from a file and what was not shall compare: JSON has no tuples.
        for name, value in json.loads(json.dumps(dict(self.settings))).items():
            if isinstance(value, dict):
                flat |= {f"{name}.{inner}": it for inner, it in value.items()}
            else:
                flat[name] = value
        return flat


class InputFiles:
    """Files that a job reads, with a digest of their names and contents, taken when this is made.

    Raises:
        DataError: one of them cannot be read.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = list(files)
        self._states = [_file_state(path) for path in self.files]
        self.digest = self._digest()

    def changed(self) -> bool:
        """Tell whether a file has another content by now; one whose size and time are the same is not read again."""
        return [_file_state(path) for path in self.files] != self._states and self._digest() != self.digest

    def _digest(self) -> str:
        found = [[path.name, digest_of_file(path)] for path in self.files]
        return hashlib.blake2b(json.dumps(found).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def digest_of_file(path: Path) -> str:
    """Return a hash of a file's content, read a piece at a time.

    Raises:
        DataError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error


def _file_state(path: Path) -> tuple[int, int]:
    try:
        state = path.stat()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
    return state.st_size, state.st_mtime_ns


KEY_BYTES = 16


class RowStore:
    """Rows of one width, by key.

    Args:
        folder: where they are kept; None keeps them in memory. It is made with the first row.
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
        """Return the vectors of ``keys``."""
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
        """Append vectors ``(n, width)`` under their keys, none of which is here yet.

        Raises:
            ResourceError: the disk is full; what was here before stays.
        """
        vectors = np.ascontiguousarray(vectors, dtype=np.float32)
        self.width = self.width or vectors.shape[1]
        if self.folder is None:
            self.blocks.append(vectors)
        else:
            self._append(self.folder, keys, vectors)
        start = len(self.places)
        self.places.update({key: start + row for row, key in enumerate(keys)})

    def _append(self, folder: Path, keys: Sequence[bytes], vectors: np.ndarray) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not (folder / "width").is_file():
                write_atomic(folder / "width", str(self.width))
            rows = len(self.places)
            for name, size, data in (
                ("vectors", 4 * self.width, vectors.tobytes()),
                ("keys", KEY_BYTES, b"".join(keys)),
            ):
                with (folder / name).open("ab") as file:
                    # Whatever an attempt that was interrupted has left behind the last row.
                    file.truncate(rows * size)
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
        except OSError as error:
            raise ResourceError(f"vectors cannot be kept in {folder}: {error.strerror or error}") from error

    def _open(self, folder: Path) -> None:
        """Read the keys; cut off whatever a killed process left unfinished."""
        self.width = int((folder / "width").read_text())
        sizes = [(folder / name).stat().st_size if (folder / name).is_file() else 0 for name in ("keys", "vectors")]
        rows = min(sizes[0] // KEY_BYTES, sizes[1] // (4 * self.width))
        for name, size in (("keys", rows * KEY_BYTES), ("vectors", rows * 4 * self.width)):
            if (folder / name).is_file():
                os.truncate(folder / name, size)
        data = (folder / "keys").read_bytes() if rows else b""
        self.places = {data[i * KEY_BYTES : (i + 1) * KEY_BYTES]: i for i in range(rows)}


FLUSH_SECONDS = 5.0
"""After so many seconds finished rows go to the disk: with the batch that is being worked on, what a kill costs."""


class ShardCheckpoint:
    """A shard on its way; used as a context, whose end, with an error or without, puts all finished rows on the disk.

    Args:
        folder: where the rows are kept, made with the first of them; None keeps none.
        shard: a hash of all that the rows depend on.
        advance: told how many more rows are done, those of an earlier attempt included.
        seconds: how long finished rows may wait for the disk.
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
        """Rows that are done, in this attempt or an earlier one; the last of them may still wait for the disk."""
        self.stored = 0
        """Those of them that are on the disk."""
        self.resumed = 0
        """Those of them that an earlier attempt had done."""
        self._advance = advance or (lambda _rows: None)
        self._store: RowStore | None = None
        self._waiting: dict[bytes, np.ndarray] = {}
        self._whole_waiting = 0
        self._flushed = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is None:
            self.flush()
        else:
            with suppress(ResourceError):  # what went wrong first is what is to be told
                self.flush()

    def encoding_pass(self, number: int = 0, of: int = 1) -> "EncodingPass":
        """Return the rows of one pass: where each row is made of several, they come one after the other."""
        return EncodingPass(self, number, last=number == of - 1)

    def store(self) -> RowStore | None:
        """Return what is kept; None where nothing is."""
        if self._store is None and self.folder is not None:
            self._store = RowStore(self.folder)
        return self._store

    def add(self, keys: Sequence[bytes], vectors_ND: np.ndarray, *, whole: bool) -> None:
        """Take rows in; ``whole`` says that nothing else is missing of them."""
        if whole:
            self.rows += len(keys)
            self._advance(len(keys))
        if self.folder is None:
            return
        self._waiting.update(zip(keys, vectors_ND, strict=True))
        self._whole_waiting += len(keys) if whole else 0
        if time.monotonic() - self._flushed >= self.seconds:
            self.flush()

    def count_resumed(self, rows: int) -> None:
        """Note how many rows an earlier attempt had done."""
        self.rows += rows
        self.resumed += rows
        self.stored += rows
        self._advance(rows)

    def flush(self) -> None:
        """Put the rows that wait on the disk.

        Raises:
            ResourceError: the disk is full.
        """
        store = self.store()
        # An interruption may come between their way to the disk and the end of their waiting.
        keys = [key for key in self._waiting if store is not None and key not in store]
        if store is not None and keys:
            store.add(keys, np.stack([self._waiting[key] for key in keys]))
        self.stored += self._whole_waiting
        self._whole_waiting = 0
        self._waiting.clear()
        self._flushed = time.monotonic()

    def forget(self) -> None:
        """Remove what is kept, once the shard itself is."""
        self._waiting.clear()
        self._whole_waiting = self.stored = 0
        self._store = None
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


class EncodingPass:
    """The rows of one pass over a shard."""

    def __init__(self, shard: ShardCheckpoint, number: int, *, last: bool) -> None:
        self._shard, self._number, self._last = shard, number, last

    def fill(self, vectors_ND: np.ndarray) -> frozenset[int]:
        """Put the rows that are done into their places; returns which they are."""
        store = self._shard.store()
        if not store or store.width != vectors_ND.shape[1]:
            return frozenset()
        keys = {row: self._key(row) for row in range(len(vectors_ND))}
        done = [row for row, key in keys.items() if key in store]
        if done:
            vectors_ND[done] = store.rows([keys[row] for row in done])
        if self._last:
            self._shard.count_resumed(len(done))
        return frozenset(done)

    def keep(self, rows: Sequence[int], vectors_ND: np.ndarray) -> None:
        """Keep rows that are done now."""
        self._shard.add([self._key(row) for row in rows], vectors_ND, whole=self._last)

    def _key(self, row: int) -> bytes:
        return _key(self._shard.shard, self._number, row)


def has_saved_rows(folder: Path) -> bool:
    """Tell whether a folder of unfinished rows holds any."""
    with suppress(OSError):
        return (folder / "keys").stat().st_size >= KEY_BYTES
    return False


def saved_rows(folder: Path, shard: str, rows: int, passes: int = 1) -> int:
    """Return how many rows of a shard a folder holds; whoever adds to it meanwhile is not disturbed.

    Args:
        folder: where they are kept.
        shard: a hash of all that the rows depend on.
        rows: how many the shard has.
        passes: of how many passes each row is made.
    """
    with suppress(OSError):
        data = (folder / "keys").read_bytes()
        keys = {data[start : start + KEY_BYTES] for start in range(0, len(data), KEY_BYTES)}
        return sum(_key(shard, passes - 1, row) in keys for row in range(rows))
    return 0


def _key(shard: str, number: int, row: int) -> bytes:
    return hashlib.blake2b(f"{shard} {number} {row}".encode(), digest_size=KEY_BYTES).digest()


MAKING = "making"
PLACING = "placing"
_MANIFEST = "manifest.json"


class WorkingFolder:
    """The working folder of one output, held by this process alone.

    Attributes:
        path: the folder.
        ending: what the names of parts end in.
    """

    def __init__(self, path: Path, ending: str = ".arrow") -> None:
        self.path, self.ending = path, ending
        for stray in path.glob(".*.part"):
            stray.unlink()
        shutil.rmtree(self.spill(), ignore_errors=True)

    def manifest(self) -> Manifest | None:
        """Return what the parts belong to; None when nothing was begun."""
        return Manifest.read(self.path / _MANIFEST)

    def write_manifest(self, manifest: Manifest, stage: str) -> None:
        """Say what the parts belong to, and how far the job is.

        Raises:
            ResourceError: the disk is full.
        """
        with atomic_file(self.path / _MANIFEST) as file:
            file.write(replace(manifest, stage=stage).to_json().encode())

    def demand_known(self) -> None:
        """Refuse parts whose manifest cannot be read.

        Raises:
            InputError: there are such parts.
        """
        # Without any manifest they are what is left of a job whose clearing was interrupted.
        if self.begun() and self.manifest() is None and (self.path / _MANIFEST).is_file():
            raise InputError(
                f"{self.path} holds unfinished work of another version of gerund; give --force to begin anew"
            )

    def part(self, index: int) -> Path:
        """Return the place of a part."""
        return self.path / f"part-{index:06d}{self.ending}"

    def parts(self) -> dict[int, Path]:
        """Return the finished parts by their numbers, in order."""
        named = re.compile(rf"part-(\d+){re.escape(self.ending)}")
        found = ((named.fullmatch(path.name), path) for path in self.path.glob(f"part-*{self.ending}"))
        return dict(sorted((int(name[1]), path) for name, path in found if name))

    def begun(self) -> bool:
        """Tell whether there is a finished part, or a row of one."""
        return any(self.path.glob(f"part-*{self.ending}")) or any(map(has_saved_rows, self._unfinished()))

    def unfinished(self, index: int) -> Path:
        """Return the place of a folder for the rows of a part that is not finished."""
        return self.path / f"unfinished-{index:06d}"

    def placing(self) -> bool:
        """Tell whether the output is being put in its place, or is there already."""
        found = self.manifest()
        return found is not None and found.stage == PLACING

    def clear(self) -> None:
        """Forget the manifest and all parts; other files stay."""
        (self.path / _MANIFEST).unlink(missing_ok=True)
        for path in self.path.glob(f"part-*{self.ending}"):
            path.unlink()
        self._remove_unfinished()
        flush_names(self.path)

    def joined(self, name: str) -> Path:
        """Return the place of an output file until it is put where it belongs."""
        return self.path / f"joined-{name}"

    def put(self, files: Sequence[Path]) -> None:
        """Put joined files in their places, one after the other.

        Raises:
            ResourceError: the system refuses.
        """
        for file in files:
            try:
                self.joined(file.name).replace(file)
            except OSError as error:
                raise ResourceError(f"{file} was not written: {error.strerror or error}") from error
        flush_names(files[-1].parent)

    def spool(self, endings: str) -> Path:
        """Return the place of an input that can be read only once; ``endings`` such as ``.txt.gz``."""
        return self.path / f"input{endings}"

    def spill(self) -> Path:
        """Return the place of a folder for what does not fit the memory; who makes it removes it."""
        return self.path / "spill"

    def remove(self) -> None:
        """Delete the folder's content: everything else, then the manifest. The lock goes when it is released."""
        self._remove_unfinished()
        for pattern in (f"part-*{self.ending}", "joined-*", "input*", ".*.part"):
            for path in self.path.glob(pattern):
                path.unlink()
        flush_names(self.path)
        (self.path / _MANIFEST).unlink(missing_ok=True)

    def _unfinished(self) -> Iterator[Path]:
        return self.path.glob("unfinished-*")

    def _remove_unfinished(self) -> None:
        for path in self._unfinished():
            shutil.rmtree(path)


@contextmanager
def working_folder(output: Path, ending: str = ".arrow") -> Iterator[WorkingFolder]:
    """Yield the working folder of ``output``; at the end it goes away unless it holds something to go on from.

    Args:
        output: the file that is made.
        ending: what the names of parts end in.

    Raises:
        InputError: another process is writing the same output, or the folder's name is a symbolic link.
        ResourceError: the folder cannot be made or written.
    """
    path = output.with_name(f"{output.name}.parts")
    try:
        require_regular_file(path)
        lock = acquire_lock(path, output)
        try:
            folder = WorkingFolder(path, ending)
            try:
                yield folder
            finally:
                if path.is_dir() and not folder.begun() and not folder.placing():
                    folder.remove()
        finally:
            release_lock(lock)
            # Not empty: parts to go on from, files that someone keeps in there, or another process has just begun.
            with suppress(OSError):
                path.rmdir()
    except OSError as error:
        raise ResourceError(f"cannot write {output}: {path}: {error.strerror or error}") from error


@contextmanager
def resume_hint(how_to_go_on: Callable[[], str]) -> Iterator[None]:
    """Let whoever is interrupted, or runs out of memory or disk, know what was kept.

    A ``ResourceError`` has it at its end, a ``KeyboardInterrupt`` as a note.

    Args:
        how_to_go_on: says it; "" where nothing was kept.
    """
    try:
        yield
    except ResourceError as error:
        if told := how_to_go_on():
            raise ResourceError(f"{error}; {told}") from error
        raise
    except KeyboardInterrupt as stop:
        if told := how_to_go_on():
            stop.add_note(told)
        raise
