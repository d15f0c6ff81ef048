"""Inputs that lie on object stores, and outputs that go there: local copies for the time of a job.

What a job reads is copied into its working place first, and not again while it is the same there; what it makes is
made in that place, with the parts of an unfinished job, and sent when it is whole. The place is a folder like any
other: on a cluster one that all machines share.

Knows: fsspec, URLs, copies. Does not know: what is in a file.
"""

import hashlib
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from gerund import checks
from gerund.errors import (
    ConfigError,
    DataError,
    GerundError,
    InputError,
    MissingDependencyError,
    OutputExistsError,
    ResourceError,
)
from gerund.jobs.files import atomic_file, make_folder, require_new_files, require_regular_file, write_atomic
from gerund.progress import progress

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_PIECE = 2**20
_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs"}


def is_url(place: str | Path) -> bool:
    """Tell whether a place is on an object store.

    >>> is_url("s3://bucket/notes.jsonl"), is_url("notes.jsonl")
    (True, False)
    """
    return _URL.match(str(place)) is not None


@dataclass(frozen=True)
class Staged:
    """Where a job reads and writes.

    Attributes:
        sources: what it reads, in the order in which it was named.
        output: what it writes.
        target: where that belongs; None where it is there already.
        force: whether what is at the target is replaced.
        places: where the output's files, all that may come with it, belong.
    """

    sources: list[str]
    output: Path
    target: str | None
    force: bool = False
    places: tuple[str, ...] = ()

    def send(self, files: Sequence[Path]) -> list[str]:
        """Put finished files where they belong, the one that stands for all of them last; returns their places.

        Raises:
            ResourceError: the store refuses; the files stay here.
        """
        if self.target is None:
            return [str(file) for file in files]
        folder = self.target.rpartition("/")[0]
        places = [f"{folder}/{file.name}" if folder else file.name for file in files]
        for file, place in zip(files, places, strict=True):
            _send(file, place)
        # Such as the list of rows that an earlier run, whose output is replaced, could not use.
        for place in set(self.places).difference(places):
            _remove(place)
        for file in files:
            file.unlink()
        with suppress(OSError):
            self.output.parent.rmdir()
        return places


@contextmanager
def staged(
    sources: Sequence[str],
    output: str | Path,
    *,
    work: Path | None = None,
    force: bool = False,
    files: Callable[[Path], Sequence[Path]] = lambda output: [output],
    outside: bool = False,
) -> Iterator[Staged]:
    """Yield where a job reads and writes: what lies on object stores has local copies until the block ends.

    After an error the copies stay, so that the same command need not fetch them again.

    Args:
        sources: paths and URLs; a URL may be that of a folder.
        output: a path or URL.
        work: the folder for copies and unfinished parts; None takes that of ``output``, or the current one for a URL.
        force: replace what is at ``output``.
        files: returns all files that may come with the output of a name, itself among them.
        outside: whether the output must not lie in a folder that is read.

    Raises:
        DataError: there is nothing at a URL.
        InputError: the output is what is read, or lies in it.
        OutputExistsError: there is an output already, or one that did not reach its place.
        MissingDependencyError: the package for a store is not installed.
        ResourceError: a store refuses.
    """
    name = PurePosixPath(str(output)).name
    target = str(output) if is_url(output) or work is not None else None
    if target is not None and not name:
        raise ConfigError(f"{output} is a folder; name a file in it as the output")
    place = (work or (Path() if target else Path(output).absolute().parent)).absolute()
    local = Path(output) if target is None else checks.place("the output", place / f"{name}.unsent" / name)
    places = _places(target, files) if target is not None else ()
    if target is not None:
        for own in places:
            _refuse_inputs(own, sources, outside=outside)
            _refuse(own, force=force)
        if local.exists() and not force:
            raise OutputExistsError(
                f"{local} was made by an earlier run and did not reach {target}; copy it there, or give --force to "
                "make it anew"
            )
        make_folder(local.parent)
    copies = place / f"{name}.inputs"
    try:
        yield Staged([_fetched(one, copies) if is_url(one) else one for one in sources], local, target, force, places)
    finally:
        if target is not None:
            with suppress(OSError):  # with an output that was not sent, or parts
                local.parent.rmdir()
    shutil.rmtree(copies, ignore_errors=True)


def _places(target: str, files: Callable[[Path], Sequence[Path]]) -> tuple[str, ...]:
    folder, slash, name = target.rpartition("/")
    return tuple(f"{folder}{slash}{file.name}" for file in files(Path(name)))


def _refuse_inputs(place: str, sources: Sequence[str], *, outside: bool) -> None:
    for source in sources:
        if is_url(place) or is_url(source):
            is_same, is_inside = place == source.rstrip("/"), place.startswith(source.rstrip("/") + "/")
        else:
            here, there = Path(place), Path(source)
            is_same = here.exists() and there.exists() and here.samefile(there)
            is_inside = there.is_dir() and here.resolve().is_relative_to(there.resolve())
        if is_same:
            raise InputError(f"{place} is the input itself; choose another output")
        if is_inside and outside:
            raise InputError(f"{place} would lie in the folder that is read; choose a place outside of {source}")


def _refuse(place: str, *, force: bool) -> None:
    if is_url(place):
        system, path = _opened(place)
        with _refusals(place):
            if not force and system.exists(path):
                raise OutputExistsError(f"{place} exists already; choose another name or give --force to replace it")
        return
    require_regular_file(Path(place))
    if not force:
        require_new_files(Path(place))


def _remove(place: str) -> None:
    if not is_url(place):
        Path(place).unlink(missing_ok=True)
        return
    system, path = _opened(place)
    with _refusals(place):
        if system.exists(path):
            system.rm_file(path)


def _send(file: Path, place: str) -> None:
    if not is_url(place):
        make_folder(Path(place).absolute().parent)
        with atomic_file(Path(place)) as copy, file.open("rb") as source:
            shutil.copyfileobj(source, copy, _PIECE)
        return
    system, path = _opened(place)
    with _refusals(place):
        # A store shows an object when all of it has come.
        system.put_file(str(file), path)


def _fetched(url: str, copies: Path) -> str:
    """Copy what is at a URL, unless the copy of an earlier run is still the same; returns the copy's path."""
    system, path = _opened(url)
    path = path.rstrip("/")
    digest = hashlib.blake2b(url.encode(), digest_size=4).hexdigest()
    copy = checks.place("the input", copies / digest / PurePosixPath(path).name)
    with _refusals(url):
        if not system.exists(path):
            raise DataError(f"{url}: no such file or folder")
        files = [one for one in sorted(system.find(path)) if not PurePosixPath(one).name.startswith(".")]
        is_folder, kept = system.isdir(path), set[Path]()
        if is_folder:
            make_folder(copy)
        with progress(len(files), "fetching") as advance:
            for one in files:
                below = one.lstrip("/")[len(path.lstrip("/")) :].lstrip("/")
                if ".." in PurePosixPath(below).parts:
                    raise DataError(f"{url}: a name in it leads out of it: {below}")
                own = copy / below if is_folder else copy
                _fetch(system, one, own)
                kept |= {own, _state_of(own)}
                advance(1)
        if is_folder:
            # What an earlier, unfinished job copied and is gone from the store since.
            for file in copy.rglob("*"):
                if file.is_file() and file not in kept:
                    file.unlink()
    return str(copy)


def _state_of(copy: Path) -> Path:
    """Return where the state of a copied file is noted."""
    return copy.with_name(f".{copy.name}.state")


def _fetch(system: Any, path: str, copy: Path) -> None:
    state = _state_of(copy)
    now = str(system.ukey(path))
    if copy.is_file() and state.is_file() and state.read_text(encoding="utf-8") == now:
        return
    make_folder(copy.parent)
    with system.open(path, "rb") as source, atomic_file(copy) as file:
        shutil.copyfileobj(source, file, _PIECE)
    write_atomic(state, now)


def _opened(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, and its path there."""
    import fsspec

    protocol = url.partition("://")[0]
    try:
        system, path = fsspec.core.url_to_fs(url)
    except ImportError as error:
        package = _PACKAGES.get(protocol)
        how = f": pip install {package}" if package else f" ({error})"
        raise MissingDependencyError(f"{protocol}:// needs a package of its own{how}") from error
    except ValueError as error:
        raise ConfigError(f"{url}: {error}") from error
    return system, path


@contextmanager
def _refusals(url: str) -> Iterator[None]:
    """Turn what a store answers into one sentence."""
    try:
        yield
    except GerundError:
        raise
    except Exception as error:  # each store has errors of its own, for keys, networks and names
        raise ResourceError(f"{url}: {getattr(error, 'strerror', None) or error or type(error).__name__}") from error
