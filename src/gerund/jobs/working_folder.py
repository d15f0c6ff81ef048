"""The folder ``OUT.parts``: finished parts of a long job, its manifest, and the lock of who works on it.

A part is whole or absent; ``unfinished-000003`` holds the rows of the part that is being made, for jobs that keep such.
``manifest.json`` says what the parts belong to, and at which stage the job is:
``making`` while parts are added, ``placing`` once all are there and the output is put in its place. The folder goes
away when the output is there; its manifest goes last, so that a job killed in between is known as finished.

Knows: files, locks, manifests. Does not know: what is in a part.
"""

import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from gerund.errors import InputError, ResourceError
from gerund.jobs.files import flush_names, refuse_special, whole_file
from gerund.jobs.locks import give_back, take
from gerund.jobs.manifest import Manifest
from gerund.jobs.unfinished import has_rows

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
        with whole_file(self.path / _MANIFEST) as file:
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
        return any(self.path.glob(f"part-*{self.ending}")) or any(map(has_rows, self._unfinished()))

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
        refuse_special(path)
        lock = take(path, output)
        try:
            folder = WorkingFolder(path, ending)
            try:
                yield folder
            finally:
                if path.is_dir() and not folder.begun() and not folder.placing():
                    folder.remove()
        finally:
            give_back(lock)
            # Not empty: parts to go on from, files that someone keeps in there, or another process has just begun.
            with suppress(OSError):
                path.rmdir()
    except OSError as error:
        raise ResourceError(f"cannot write {output}: {path}: {error.strerror or error}") from error


@contextmanager
def kept_work_told(how_to_go_on: Callable[[], str]) -> Iterator[None]:
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
