"""The folder ``OUT.parts``: finished parts of a long job, what the job is, and the lock of who works on it.

A part is whole or absent. ``manifest.json`` says what the parts belong to, and at which stage the job is:
``embedding`` or ``mining`` while parts are added, ``placing`` once all are there and the output is put in its
place. The folder goes away when the output is there; its manifest goes last, so that a job killed in between is
known as finished.

Knows: files, locks. Does not know: what is in a part.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from gerund.data.files import flush_names, whole_file
from gerund.errors import FingerprintError, InputError, ResourceError

try:
    import fcntl
except ImportError:  # Windows: there two processes are not kept apart
    fcntl = None  # type: ignore[assignment]

EMBEDDING = "embedding"
MINING = "mining"
PLACING = "placing"
_MANIFEST = "manifest.json"
_LOCK = "lock"


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

    def manifest(self) -> dict[str, Any] | None:
        """Return what the parts belong to; None when nothing was begun."""
        try:
            found = json.loads((self.path / _MANIFEST).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def write_manifest(self, manifest: dict[str, Any]) -> None:
        """Say what the parts belong to.

        Raises:
            ResourceError: the disk is full.
        """
        with whole_file(self.path / _MANIFEST) as file:
            file.write(json.dumps(manifest, indent=1, ensure_ascii=False).encode())

    def part(self, index: int) -> Path:
        """Return the place of a part."""
        return self.path / f"part-{index:06d}{self.ending}"

    def parts(self) -> list[Path]:
        """Return the finished parts, up to the first that is missing."""
        found: list[Path] = []
        while (path := self.part(len(found))).is_file():
            found.append(path)
        return found

    def begun(self) -> bool:
        """Tell whether there is a finished part, be it behind one that is missing."""
        return any(self.path.glob(f"part-*{self.ending}"))

    def clear(self) -> None:
        """Forget the manifest and all parts; other files stay."""
        (self.path / _MANIFEST).unlink(missing_ok=True)
        for path in self.path.glob(f"part-*{self.ending}"):
            path.unlink()
        flush_names(self.path)

    def joined(self, name: str) -> Path:
        """Return the place of an output file until it is put where it belongs."""
        return self.path / f"joined-{name}"

    def spool(self, endings: str) -> Path:
        """Return the place of an input that can be read only once; ``endings`` such as ``.txt.gz``."""
        return self.path / f"input{endings}"

    def spill(self) -> Path:
        """Return the place of a folder for what does not fit the memory; who makes it removes it."""
        return self.path / "spill"

    def remove(self) -> None:
        """Delete the folder: everything else, then the manifest, then the lock."""
        for pattern in (f"part-*{self.ending}", "joined-*", "input*", ".*.part"):
            for path in self.path.glob(pattern):
                path.unlink()
        flush_names(self.path)
        for name in (_MANIFEST, _LOCK):
            (self.path / name).unlink(missing_ok=True)
        # Not empty: another process has just begun to use it, or someone keeps files of his own in there.
        with suppress(OSError):
            self.path.rmdir()


@contextmanager
def working_folder(output: Path, ending: str = ".arrow") -> Iterator[WorkingFolder]:
    """Yield the working folder of ``output``; at the end it goes away unless it holds something to go on from.

    Args:
        output: the file that is made.
        ending: what the names of parts end in.

    Raises:
        InputError: another process is writing the same output.
        ResourceError: the folder cannot be made or written.
    """
    path = output.with_name(f"{output.name}.parts")
    handle = None
    try:
        handle = _locked(path, output)
        folder = WorkingFolder(path, ending)
        try:
            yield folder
        finally:
            if path.is_dir() and not folder.begun() and (folder.manifest() or {}).get("stage") != PLACING:
                folder.remove()
    except OSError as error:
        raise ResourceError(f"cannot write {output}: {path}: {error.strerror or error}") from error
    finally:
        if handle is not None:
            os.close(handle)


@contextmanager
def held(folder: Path, output: Path) -> Iterator[None]:
    """Keep other processes from writing the same output; makes ``folder``, which holds the lock.

    Raises:
        InputError: another process is writing ``output``.
        ResourceError: the folder cannot be made.
    """
    try:
        handle = _locked(folder, output)
    except OSError as error:
        raise ResourceError(f"cannot write {output}: {error.strerror or error}") from error
    try:
        yield
    finally:
        os.close(handle)


def what_counts(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return what decides whether two jobs are the same, by name; what things are called does not count."""
    flat: dict[str, Any] = {"rows": manifest["input"]["digest"]}
    for key, value in manifest["settings"].items():
        if isinstance(value, Mapping):
            flat |= {f"{key}.{inner}": it for inner, it in value.items()}
        elif key != "model":
            flat[key] = value
    return flat


def difference(earlier: dict[str, Any], now: dict[str, Any]) -> tuple[type[InputError], str] | None:
    """Return what differs between two manifests, and the fitting kind of error; None when they fit."""
    old, new = what_counts(earlier), what_counts(now)
    changed = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    told = [
        f"{key} was {old.get(key)!r} and is {new.get(key)!r}" for key in changed if key not in ("fingerprint", "rows")
    ]
    if "fingerprint" in changed and not told:
        was, now_is = earlier["settings"]["model"], now["settings"]["model"]
        told.append(f"the model was {was} and is {now_is}, with other weights or settings")
    if "rows" in changed:
        told.append(f"the rows of {earlier['name']} have changed")
    if not told:
        return None
    return (FingerprintError if "fingerprint" in changed else InputError), ", ".join(told)


def _locked(path: Path, output: Path) -> int:
    """Make the folder if need be, lock it, and return the handle that holds the lock."""
    while True:
        path.mkdir(parents=True, exist_ok=True)
        lock = path / _LOCK
        try:
            handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
        except FileNotFoundError:
            continue  # whoever had it has just removed the folder
        if not _take(handle):
            owner = os.read(handle, 32).decode(errors="replace").strip() or "?"
            os.close(handle)
            raise InputError(f"process {owner} is writing {output} already; wait for it or choose another name")
        if _still_there(handle, lock):
            os.ftruncate(handle, 0)
            os.write(handle, f"{os.getpid()}\n".encode())
            return handle
        os.close(handle)


def _take(handle: int) -> bool:
    if fcntl is None:
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # a file system without locks
    return True


def _still_there(handle: int, lock: Path) -> bool:
    """Tell whether the locked file is the one that has the name now."""
    try:
        return os.path.samestat(os.fstat(handle), lock.stat())
    except FileNotFoundError:
        return False
